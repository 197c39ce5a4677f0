/* Decides when keepd notifies systemd's watchdog: since the last notification each replica must
 * have made progress or been seen without work, not necessarily at the same time. Loop thread only.
 */
#ifndef KEEPD_SERVER_WATCHDOG_H
#define KEEPD_SERVER_WATCHDOG_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine_options.h"
#include "engine/engine_stats.h"

struct watchdog {
    int64_t every_ns; /* 0 = never */
    int64_t fed_ns;
    bool worked[ENGINE_REPLICAS_MAX]; /* the replica has worked since fed_ns */
};

bool watchdog_due(const struct watchdog *watchdog, int64_t now_ns);
/* Returns whether the replica has worked since the last notification, or was seen with no job. */
bool watchdog_check(struct watchdog *watchdog, int replica, const struct engine_status *status);
void watchdog_fed(struct watchdog *watchdog, int64_t now_ns);

#endif
