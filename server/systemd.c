#include "server/systemd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FIRST_FD 3 /* SD_LISTEN_FDS_START */

/* Makes the address of $NOTIFY_SOCKET: a path, or an abstract name if it begins with '@'. */
static bool notify_address(struct sockaddr_un *address, socklen_t *size) {
    const char *name = getenv("NOTIFY_SOCKET");
    size_t length = name ? strlen(name) : 0;
    if (length < 2 || length >= sizeof address->sun_path || (*name != '/' && *name != '@'))
        return false;
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path, name, length);
    if (*name == '@') address->sun_path[0] = '\0';
    *size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    return true;
}

/* Sends a notice. false: the manager's queue is full. Other failures mean that no manager listens;
 * they are ignored. */
static bool send_notice(const char *text) {
    struct sockaddr_un address;
    socklen_t size;
    if (!notify_address(&address, &size)) return true;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return true;
    ssize_t sent;
    do
        sent = sendto(fd, text, strlen(text), MSG_DONTWAIT | MSG_NOSIGNAL,
                      (struct sockaddr *)&address, size);
    while (sent < 0 && errno == EINTR);
    bool full = sent < 0 && (errno == EAGAIN || errno == ENOBUFS);
    close(fd);
    return !full;
}

void systemd_notify(const char *format, ...) {
    char text[SYSTEMD_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    (void)send_notice(text);
}

static void drop_first_notice(struct systemd_queue *queue) {
    memmove(queue->texts[0], queue->texts[1], (size_t)--queue->count * SYSTEMD_TEXT_BYTES);
}

void systemd_repeat(struct systemd_queue *queue) {
    while (queue->count > 0 && send_notice(queue->texts[0])) drop_first_notice(queue);
}

void systemd_announce(struct systemd_queue *queue, const char *format, ...) {
    va_list args;
    if (queue->count == SYSTEMD_QUEUE_MAX)
        drop_first_notice(queue); /* later messages matter more */
    va_start(args, format);
    vsnprintf(queue->texts[queue->count++], SYSTEMD_TEXT_BYTES, format, args);
    va_end(args);
    systemd_repeat(queue);
}

static long long env_number(const char *name) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return -1;
    long long number = strtoll(text, &end, 10);
    return *end ? -1 : number;
}

/* Returns whether the variable names another process. If it is absent, this process is meant; only
 * sd_listen_fds insists on it. */
static bool is_other_process(const char *name) {
    long long pid = env_number(name);
    return pid > 0 && pid != (long long)getpid();
}

int64_t systemd_watchdog_ns(void) {
    long long us = env_number("WATCHDOG_USEC");
    if (us <= 0 || us > INT64_MAX / 1000 || is_other_process("WATCHDOG_PID")) return 0;
    return (int64_t)us * 1000;
}

static int socket_number(int fd, int option) {
    int value = -1;
    socklen_t size = sizeof value;
    return getsockopt(fd, SOL_SOCKET, option, &value, &size) ? -1 : value;
}

int systemd_listen_fd(int *fd, struct fault *fault) {
    long long count = env_number("LISTEN_FDS");
    *fd = -1;
    if (count <= 0 || env_number("LISTEN_PID") != (long long)getpid()) return 0;
    if (count > 1)
        return fault_set(fault, ERR_INVALID, "LISTEN_FDS",
                         "%lld sockets were passed, one is wanted", count);
    if (socket_number(FIRST_FD, SO_TYPE) != SOCK_STREAM ||
        socket_number(FIRST_FD, SO_ACCEPTCONN) != 1)
        return fault_set(fault, ERR_INVALID, "LISTEN_FDS",
                         "descriptor %d is not a listening stream socket", FIRST_FD);
    int flags = fcntl(FIRST_FD, F_GETFL);
    if (flags < 0 || fcntl(FIRST_FD, F_SETFL, flags | O_NONBLOCK) ||
        fcntl(FIRST_FD, F_SETFD, FD_CLOEXEC))
        return fault_set(fault, ERR_IO, "LISTEN_FDS", "descriptor %d cannot be set up", FIRST_FD);
    *fd = FIRST_FD;
    return 0;
}
