/* The service manager's two wires, spoken by hand (sd_notify(3), sd_listen_fds(3)): state goes to
 * the datagram socket that $NOTIFY_SOCKET names, listening sockets come as descriptors. Without
 * these variables every function does nothing. Any thread, where nothing else is said. */
#ifndef KEEPD_SERVER_SYSTEMD_H
#define KEEPD_SERVER_SYSTEMD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* "WATCHDOG=1\nSTATUS=...": lines of NAME=value. Never waits: said again soon, or of no weight. */
void systemd_notify(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define SYSTEMD_TEXT_BYTES 512
#define SYSTEMD_QUEUE_MAX  8

/* Messages not sent yet, in order; begins as zeros. */
struct systemd_queue {
    char texts[SYSTEMD_QUEUE_MAX][SYSTEMD_TEXT_BYTES];
    int count;
};

/* The same for what is said once and acted upon (READY, RELOADING, STOPPING): while the manager has
 * no room it waits in the queue, and systemd_repeat says it; when that is full, the first goes.
 * Both on the queue's one thread. */
void systemd_announce(struct systemd_queue *queue, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void systemd_repeat(struct systemd_queue *queue);

/* How long the manager waits for WATCHDOG=1 before it kills us; 0: not at all. */
int64_t systemd_watchdog_ns(void);

/* The one socket that was passed to this process: *fd, or -1 when there is none. It listens for
 * streams already; more than one, or one of another kind, is an error of the unit. */
int systemd_listen_fd(int *fd, struct fault *fault);

#endif
