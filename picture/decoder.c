#include "picture/decoder.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "picture/sandbox.h"

/* The process says this twice: when it has given up its rights, and when it has decoded. Behind the
 * second come the pixels of a picture that was decoded. */
struct decoder_reply {
    int32_t rc;
    int32_t width, height;
    char text[sizeof(((struct fault *)0)->text)];
};

/* --- the process --- */

static int read_all(void *to, size_t size) {
    for (size_t at = 0; at < size;) {
        ssize_t n = read(0, (char *)to + at, size - at);
        if (n <= 0) return -1;
        at += (size_t)n;
    }
    return 0;
}

static int write_all(const void *from, size_t size) {
    for (size_t at = 0; at < size;) {
        ssize_t n = write(0, (const char *)from + at, size - at);
        if (n <= 0) return -1;
        at += (size_t)n;
    }
    return 0;
}

static int send_reply(const struct fault *fault, const struct picture_rgb *rgb) {
    struct decoder_reply reply = {fault->code, rgb->width, rgb->height, ""};
    memcpy(reply.text, fault->text, sizeof reply.text);
    if (write_all(&reply, sizeof reply)) return EXIT_FAILURE;
    if (fault->code) return EXIT_SUCCESS;
    return write_all(rgb->pixels, (size_t)rgb->width * (size_t)rgb->height * 3) ? EXIT_FAILURE
                                                                                : EXIT_SUCCESS;
}

int picture_decoder_main(void) {
    struct picture_rgb rgb = {0};
    struct fault fault = {0};
    uint64_t size = 0;
    if (sandbox_enter())
        fault_set(&fault, ERR_IO, NULL,
                  "pictures are not read: this system does not let keepd take the rights of the "
                  "process that decodes them");
    if (send_reply(&fault, &rgb) || fault.code) return EXIT_FAILURE;
    if (read_all(&size, sizeof size) || size > PICTURE_FILE_MAX) return EXIT_FAILURE;
    uint8_t *data = mem_try_alloc((size_t)size, 1);
    if (!data)
        fault_set(&fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    else if (read_all(data, (size_t)size))
        return EXIT_FAILURE;
    else
        picture_decode(data, (size_t)size, &rgb, &fault);
    return send_reply(&fault, &rgb);
}

/* --- the caller --- */

/* A process and the socket to it. */
struct decoder {
    pid_t pid;
    int socket;
    int64_t deadline; /* clock_ns */
    bool ready; /* The process has given up its rights: what happens now is the picture's doing. */
    struct fault *fault;
};

static int start_decoder(struct decoder *d) {
    static char name[] = "keepd", argument[] = PICTURE_DECODER;
    char *const args[] = {name, argument, NULL}, *const environment[] = {NULL};
    posix_spawn_file_actions_t actions;
    int ends[2], rc;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
        return fault_set(d->fault, ERR_IO, NULL, "no process can decode the picture: %s",
                         strerror(errno));
    rc = posix_spawn_file_actions_init(&actions);
    if (!rc) {
        rc = posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
        if (!rc) rc = posix_spawn(&d->pid, "/proc/self/exe", &actions, NULL, args, environment);
        posix_spawn_file_actions_destroy(&actions);
    }
    close(ends[1]);
    d->socket = ends[0];
    if (!rc) return 0;
    close(ends[0]);
    return fault_set(d->fault, ERR_IO, NULL, "no process can decode the picture: %s", strerror(rc));
}

static void end_decoder(const struct decoder *d) {
    close(d->socket);
    kill(d->pid, SIGKILL);
    while (waitpid(d->pid, NULL, 0) < 0 && errno == EINTR) {
    }
}

/* Waits until the socket can be read or written. */
static int wait_for_decoder(const struct decoder *d, short events) {
    struct pollfd poll_fd = {d->socket, events, 0};
    for (;;) {
        const int64_t left = (d->deadline - clock_ns()) / 1000000;
        const int ready = left > 0 ? poll(&poll_fd, 1, (int)left) : 0;
        if (ready > 0) return 0;
        if (ready == 0)
            return fault_set(d->fault, ERR_LIMIT, NULL,
                             "decoding takes too long: all pictures of a request may take %d s",
                             PICTURES_DECODE_MS / 1000);
        if (errno != EINTR)
            return fault_set(d->fault, ERR_IO, NULL, "no process can decode the picture: %s",
                             strerror(errno));
    }
}

static int decoder_ended(const struct decoder *d) {
    if (!d->ready)
        return fault_set(d->fault, ERR_IO, NULL, "the process that decodes pictures did not start");
    return fault_set(d->fault, ERR_MALFORMED, NULL,
                     "the picture's file is damaged, or too large to be decoded");
}

static int send_bytes(const struct decoder *d, const void *from, size_t size) {
    for (size_t at = 0; at < size;) {
        int rc = wait_for_decoder(d, POLLOUT);
        if (rc) return rc;
        ssize_t n =
            send(d->socket, (const char *)from + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n < 0) return decoder_ended(d);
        at += (size_t)n;
    }
    return 0;
}

static int receive_bytes(const struct decoder *d, void *to, size_t size) {
    for (size_t at = 0; at < size;) {
        int rc = wait_for_decoder(d, POLLIN);
        if (rc) return rc;
        ssize_t n = recv(d->socket, (char *)to + at, size - at, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) return decoder_ended(d);
        at += (size_t)n;
    }
    return 0;
}

/* Believes nothing that the process says: it may have been taken over by the picture. */
static int receive_reply(const struct decoder *d, struct decoder_reply *reply) {
    int rc = receive_bytes(d, reply, sizeof *reply);
    if (rc) return rc;
    reply->text[sizeof reply->text - 1] = '\0';
    if (reply->rc == ERR_MALFORMED || reply->rc == ERR_UNSUPPORTED || reply->rc == ERR_LIMIT ||
        reply->rc == ERR_NOMEM || reply->rc == ERR_IO)
        return fault_set(d->fault, reply->rc, NULL, "%s", reply->text);
    return reply->rc ? decoder_ended(d) : 0;
}

static int receive_picture(const struct decoder *d, struct picture_rgb *out) {
    struct decoder_reply reply;
    int rc = receive_reply(d, &reply);
    if (rc) return rc;
    if (reply.width < 1 || reply.height < 1 || reply.width > PICTURE_EDGE_MAX ||
        reply.height > PICTURE_EDGE_MAX ||
        (uint64_t)reply.width * (uint64_t)reply.height > PICTURE_PIXELS_MAX)
        return decoder_ended(d);
    const size_t size = (size_t)reply.width * (size_t)reply.height * 3;
    *out = (struct picture_rgb){reply.width, reply.height, mem_try_alloc(size, 1)};
    if (!out->pixels)
        return fault_set(d->fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    return receive_bytes(d, out->pixels, size);
}

/* Waits until the process has given up its rights, and then has the picture decoded. */
static int use_decoder(struct decoder *d, const void *data, uint64_t size,
                       struct picture_rgb *out) {
    struct decoder_reply reply;
    int rc = receive_reply(d, &reply);
    if (rc) return rc;
    d->ready = true;
    rc = send_bytes(d, &size, sizeof size);
    if (!rc) rc = send_bytes(d, data, (size_t)size);
    return !rc || rc == ERR_MALFORMED ? receive_picture(d, out) : rc;
}

int picture_read(const void *data, size_t size, int64_t deadline, struct picture_rgb *out,
                 struct fault *fault) {
    struct fault unread;
    struct decoder d = {.deadline = deadline, .fault = fault ? fault : &unread};
    *out = (struct picture_rgb){0};
    if (size > PICTURE_FILE_MAX)
        return fault_set(fault, ERR_LIMIT, NULL, "the picture's file has %zu bytes, at most %zu",
                         size, PICTURE_FILE_MAX);
    int rc = start_decoder(&d);
    if (rc) return rc;
    rc = use_decoder(&d, data, size, out);
    end_decoder(&d);
    if (!rc) return 0;
    mem_free(out->pixels);
    *out = (struct picture_rgb){0};
    return rc;
}
