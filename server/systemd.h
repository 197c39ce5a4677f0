/* systemd's service protocol without libsystemd (sd_notify(3), sd_listen_fds(3)): state is sent to
 * the datagram socket in $NOTIFY_SOCKET; listening sockets are inherited descriptors. Without these
 * environment variables every function does nothing. Any thread, unless stated otherwise. */
#ifndef KEEPD_SERVER_SYSTEMD_H
#define KEEPD_SERVER_SYSTEMD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* Sends "WATCHDOG=1\nSTATUS=...", lines of NAME=value. Never blocks; a message that cannot be sent
 * is lost, so use it for messages that are repeated or unimportant. */
void systemd_notify(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define SYSTEMD_TEXT_BYTES 512
#define SYSTEMD_QUEUE_MAX  8

/* Messages not sent yet, in order; begins as zeros. */
struct systemd_queue {
    char texts[SYSTEMD_QUEUE_MAX][SYSTEMD_TEXT_BYTES];
    int count;
};

/* Sends messages that must arrive (READY, RELOADING, STOPPING). A message that cannot be sent is
 * queued, and systemd_repeat sends it; a full queue drops its oldest message. Both functions run on
 * the queue's one thread. */
void systemd_announce(struct systemd_queue *queue, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void systemd_repeat(struct systemd_queue *queue);

/* Returns how long the manager waits for WATCHDOG=1 before it kills this process; 0: it does not.
 */
int64_t systemd_watchdog_ns(void);

/* Finds the one socket that was passed to this process: *fd, or -1 if there is none. It must be a
 * listening stream socket; several sockets, or one of another type, are an error. */
int systemd_listen_fd(int *fd, struct fault *fault);

#endif
