#include "server/watchdog.h"

#include <string.h>

bool watchdog_due(const struct watchdog *w, int64_t now_ns) {
    return w->every_ns > 0 && now_ns - w->fed_ns >= w->every_ns;
}

bool watchdog_check(struct watchdog *w, int replica, const struct engine_status *status) {
    w->worked[replica] |= status->jobs == 0 || status->progress_ns > w->fed_ns;
    return w->worked[replica] && !status->stopped;
}

void watchdog_fed(struct watchdog *w, int64_t now_ns) {
    w->fed_ns = now_ns;
    memset(w->worked, 0, sizeof w->worked);
}
