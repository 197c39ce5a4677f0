#include "daemon/progress.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "server/systemd.h"

#define DRAW_EVERY_NS    100000000ll
#define NOTIFY_EVERY_NS  1000000000ll
#define RATE_AFTER_NS    500000000ll
#define LOADING_PATIENCE "60000000" /* microseconds without progress until systemd gives up */

enum { BAR = 16, SIZE_TEXT = 16 };

static const struct {
    const char *status, *begins, *ended;
} words[] = {[PROGRESS_LOADING] = {"Loading", "loading", "loaded"},
             [PROGRESS_ROUNDING] = {"Rounding", "rounding", "rounded"},
             [PROGRESS_FETCHING] = {"Fetching", "fetching", "fetched"}};

static void size_text(char out[SIZE_TEXT], double bytes) {
    static const char *const units[] = {"bytes", "kB", "MB", "GB", "TB"};
    size_t unit = 0;
    while (bytes >= 999.5 && unit + 1 < sizeof units / sizeof *units) {
        bytes /= 1000;
        unit++;
    }
    snprintf(out, SIZE_TEXT, "%.*f %s", unit > 0 && bytes < 99.95 ? 1 : 0, bytes, units[unit]);
}

static void time_text(char out[SIZE_TEXT], double seconds) {
    if (seconds < 60)
        snprintf(out, SIZE_TEXT, "%.0f s", seconds);
    else if (seconds < 3600)
        snprintf(out, SIZE_TEXT, "%.0f min", seconds / 60);
    else
        snprintf(out, SIZE_TEXT, "%.1f h", seconds < 3.6e6 ? seconds / 3600 : 1000);
}

static double share_done(uint64_t done, uint64_t total) {
    if (total == 0 || done >= total) return 1;
    return (double)done / (double)total;
}

void progress_line(char out[PROGRESS_LINE], uint64_t done, uint64_t total, int64_t elapsed_ns,
                   const char *what) {
    char had[SIZE_TEXT], all[SIZE_TEXT], rate[SIZE_TEXT], left[SIZE_TEXT];
    double share = share_done(done, total), seconds = (double)elapsed_ns / 1e9;
    int drawn = (int)(share * BAR);
    size_text(had, (double)done);
    size_text(all, (double)total);
    int at = snprintf(out, PROGRESS_LINE, "%.12s [%.*s%*s] %3d %%  %s of %s", what, drawn,
                      "################", BAR - drawn, "", (int)(share * 100), had, all);
    if (elapsed_ns < RATE_AFTER_NS || done == 0 || at >= PROGRESS_LINE) return;
    size_text(rate, (double)done / seconds);
    time_text(left, share < 1 ? (double)(total - done) * seconds / (double)done : 0);
    snprintf(out + at, PROGRESS_LINE - (size_t)at, "  %s/s  %s left", rate, left);
}

static void notify_progress(struct progress *progress, int percent, const char *what,
                            int64_t now_ns) {
    if (percent < 100 && progress->notified_ns && now_ns - progress->notified_ns < NOTIFY_EVERY_NS)
        return;
    progress->notified_ns = now_ns;
    systemd_notify("STATUS=%s %s: %d %%\nEXTEND_TIMEOUT_USEC=" LOADING_PATIENCE,
                   words[progress->work].status, what, percent);
}

static void draw_progress(struct progress *progress, uint64_t total, const char *what,
                          int64_t now_ns) {
    char line[PROGRESS_LINE];
    if (progress->shown_ns && progress->done < total && now_ns - progress->shown_ns < DRAW_EVERY_NS)
        return;
    progress->shown_ns = now_ns;
    progress_line(line, progress->done, total, now_ns - progress->began_ns, what);
    fprintf(stderr, "\r\033[K%s", line);
}

void progress_open(struct progress *progress, enum progress_work work, bool terminal) {
    int64_t now_ns = clock_ns();
    *progress = (struct progress){
        .work = work, .terminal = terminal, .began_ns = now_ns, .opened_ns = now_ns};
}

void progress_note(struct progress *progress, uint64_t done, uint64_t total, const char *what) {
    int64_t now_ns = clock_ns();
    char size[SIZE_TEXT];
    if (done < progress->done) {
        progress->before += progress->done;
        progress->began_ns = now_ns;
    }
    progress->done = done;
    notify_progress(progress, (int)(share_done(done, total) * 100), what, now_ns);
    size_text(size, (double)total);
    if (progress->terminal)
        draw_progress(progress, total, what, now_ns);
    else if (!progress->begun)
        log_info("%s %s: %s", words[progress->work].begins, what, size);
    progress->begun = true;
}

void progress_close(struct progress *progress, bool whole) {
    const char *ended = words[progress->work].ended;
    double seconds = (double)(clock_ns() - progress->opened_ns) / 1e9;
    double bytes = (double)(progress->before + progress->done);
    char size[SIZE_TEXT], rate[SIZE_TEXT];
    if (!progress->begun) return;
    size_text(size, bytes);
    size_text(rate, seconds > 0 ? bytes / seconds : 0);
    if (progress->terminal && !whole)
        fputc('\n', stderr);
    else if (progress->terminal)
        fprintf(stderr, "\r\033[K%s %s in %.1f s, %s/s\n", ended, size, seconds, rate);
    else if (whole)
        log_info("%s %s in %.1f s, %s/s", ended, size, seconds, rate);
}
