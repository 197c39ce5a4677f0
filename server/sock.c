/* Socket system calls of the server: binding TCP and Unix sockets with errors that name the option,
 * accepting without blocking, and how much of its output a client has received. Linux's
 * tcp_info, which the last one needs, conflicts with headers of the files that use libuv. */
#include "server/sock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* glibc's netinet/tcp.h has no tcpi_bytes_acked, and the two headers conflict, so no file that
 * includes uv.h can include this one. */
#include <linux/sockios.h>
#include <linux/tcp.h>

#define LISTEN_BACKLOG 1024
#define SEND_BUFFER    (256 << 10) /* kernel buffer for a client that does not read */
#define PAIR_BUFFER    (32 << 10)  /* kernel buffer of the pair, each direction */

/* Explains why a program may not listen at the address, and what to do. `error`: errno of bind. */
static int explain_bind(int error, const char *host, int port, struct fault *fault) {
    switch (error) {
    case EADDRINUSE:
        return fault_set(fault, ERR_IO, "port",
                         "another program listens on port %d of %s, perhaps another keepd; end it, "
                         "or choose another port with --port (0: any free one)",
                         port, host);
    case EACCES:
        return fault_set(fault, ERR_IO, "port",
                         "this user may not listen on port %d; choose one from 1024 up with --port",
                         port);
    case EADDRNOTAVAIL:
        return fault_set(fault, ERR_IO, "host",
                         "%s is no address of this machine; 0.0.0.0 stands for all of them", host);
    default:
        return fault_set(fault, ERR_IO, "host", "bind: %s", strerror(error));
    }
}

/* Binds a socket. `host` and `port` are for messages; for a Unix socket they are NULL and 0. */
static int bind_socket(int family, const struct sockaddr *address, socklen_t size, const char *host,
                       int port, struct fault *fault) {
    const char *option = family == AF_UNIX ? "unix-socket" : "host";
    int one = 1;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return fault_set(fault, ERR_IO, option, "socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, address, size) == 0) return fd;
    int error = errno;
    int rc = family == AF_UNIX ? fault_set(fault, ERR_IO, option, "bind: %s", strerror(error))
                               : explain_bind(error, host, port, fault);
    close(fd);
    return rc;
}

/* Resolves a host name; the caller frees *out. */
static int resolve_host(const char *host, int port, struct addrinfo **out, struct fault *fault) {
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    int rc = getaddrinfo(host && *host ? host : NULL, service, &hints, out);
    return rc ? fault_set(fault, ERR_INVALID, "host", "%s: %s", host, gai_strerror(rc)) : 0;
}

static int bind_tcp(const char *host, int port, struct fault *fault) {
    struct addrinfo *address;
    int rc = resolve_host(host, port, &address, fault);
    if (rc) return rc;
    int fd =
        bind_socket(address->ai_family, address->ai_addr, address->ai_addrlen, host, port, fault);
    freeaddrinfo(address);
    return fd;
}

/* --- Unix sockets --- */

static int check_path(const char *path, struct fault *fault) {
    size_t capacity = sizeof((struct sockaddr_un *)0)->sun_path;
    if (*path && strlen(path) < capacity) return 0;
    return fault_set(fault, ERR_LIMIT, "unix-socket",
                     "the path must have 1 byte at least and %zu at most", capacity - 1);
}

static bool sock_is_served(const struct sockaddr_un *address) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return true;
    bool refused =
        connect(fd, (const struct sockaddr *)address, sizeof *address) && errno == ECONNREFUSED;
    close(fd);
    return !refused;
}

static int sock_make_way(const struct sockaddr_un *address, struct fault *fault) {
    static const char option[] = "unix-socket";
    struct stat st;
    if (lstat(address->sun_path, &st)) return 0;
    if (!S_ISSOCK(st.st_mode))
        return fault_set(fault, ERR_INVALID, option, "%s is there and is not a socket",
                         address->sun_path);
    if (sock_is_served(address))
        return fault_set(fault, ERR_IO, option, "%s is served by another process",
                         address->sun_path);
    if (unlink(address->sun_path))
        return fault_set(fault, ERR_IO, option, "%s: %s", address->sun_path, strerror(errno));
    return 0;
}

/* Binds a Unix socket. The umask permits only this user, so that nobody can connect between bind
 * and chmod. */
static int bind_unix(const char *path, unsigned mode, struct fault *fault) {
    static const char option[] = "unix-socket";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int rc = check_path(path, fault);
    if (rc) return rc;
    strcpy(address.sun_path, path);
    rc = sock_make_way(&address, fault);
    if (rc) return rc;
    mode_t before = umask(0177);
    int fd = bind_socket(AF_UNIX, (struct sockaddr *)&address, sizeof address, NULL, 0, fault);
    umask(before);
    if (fd < 0 || chmod(path, (mode_t)mode) == 0) return fd;
    rc = fault_set(fault, ERR_IO, option, "chmod %s: %s", path, strerror(errno));
    sock_unlink(fd);
    close(fd);
    return rc;
}

int sock_check(const struct sock_address *address, struct fault *fault) {
    struct addrinfo *found;
    if (address->path) return check_path(address->path, fault);
    int rc = resolve_host(address->host, address->port, &found, fault);
    if (!rc) freeaddrinfo(found);
    return rc;
}

int sock_bind(const struct sock_address *address, int *fd, struct fault *fault) {
    *fd = address->path ? bind_unix(address->path, address->mode, fault)
                        : bind_tcp(address->host, address->port, fault);
    return *fd < 0 ? *fd : 0;
}

/* Accepted sockets inherit both options. */
int sock_listen(int fd, struct fault *fault) {
    int buffer = SEND_BUFFER, one = 1;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (listen(fd, LISTEN_BACKLOG))
        return fault_set(fault, ERR_IO, "host", "listen: %s", strerror(errno));
    return 0;
}

/* --- bound address --- */

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un path;
};

static union address bound_to(int fd) {
    union address address = {0};
    socklen_t size = sizeof address;
    if (getsockname(fd, &address.any, &size)) address.any.sa_family = AF_UNSPEC;
    return address;
}

void sock_url(int fd, const char *host, bool tls, char *url, size_t size) {
    union address address = bound_to(fd);
    char number[INET6_ADDRSTRLEN] = "";
    bool v6 = address.any.sa_family == AF_INET6;
    if (address.any.sa_family == AF_UNIX) {
        snprintf(url, size, "unix:%s", address.path.sun_path);
        return;
    }
    inet_ntop(address.any.sa_family,
              v6 ? (void *)&address.v6.sin6_addr : (void *)&address.v4.sin_addr, number,
              sizeof number);
    if (!host) host = number;
    bool colons = strchr(host, ':') != NULL;
    snprintf(url, size, "http%s://%s%s%s:%d", tls ? "s" : "", colons ? "[" : "", host,
             colons ? "]" : "", ntohs(v6 ? address.v6.sin6_port : address.v4.sin_port));
}

bool sock_is_loopback(int fd) {
    union address address = bound_to(fd);
    if (address.any.sa_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&address.v6.sin6_addr);
    return address.any.sa_family == AF_INET && ntohl(address.v4.sin_addr.s_addr) >> 24 == 127;
}

bool sock_has_networks(int fd) {
    return bound_to(fd).any.sa_family != AF_UNIX && !sock_is_loopback(fd);
}

void sock_unlink(int fd) {
    union address address = bound_to(fd);
    if (address.any.sa_family == AF_UNIX && address.path.sun_path[0]) unlink(address.path.sun_path);
}

/* --- connections --- */

int sock_accept(int fd, struct sock_peer *peer) {
    *peer = (struct sock_peer){.size = sizeof peer->storage};
    return accept4(fd, &peer->any, &peer->size, SOCK_NONBLOCK | SOCK_CLOEXEC);
}

bool sock_peer_known(const struct sock_peer *peer) {
    return peer->any.sa_family == AF_INET || peer->any.sa_family == AF_INET6;
}

bool sock_peer_network(const struct sock_peer *peer, uint8_t network[16]) {
    memset(network, 0, 16);
    if (peer->any.sa_family == AF_INET) {
        memcpy(network + 12, &((const struct sockaddr_in *)&peer->any)->sin_addr, 4);
        return network[12] != 127;
    }
    if (peer->any.sa_family != AF_INET6) return false;
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)&peer->any)->sin6_addr;
    bool mapped = IN6_IS_ADDR_V4MAPPED(v6);
    memcpy(network + (mapped ? 12 : 0), v6->s6_addr + (mapped ? 12 : 0), mapped ? 4 : 8);
    return mapped ? network[12] != 127 : !IN6_IS_ADDR_LOOPBACK(v6);
}

int sock_pair(int pair[2]) {
    int buffer = PAIR_BUFFER;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair)) return -1;
    for (int i = 0; i < 2; i++) setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    return 0;
}

bool sock_unread(int fd) {
    int unread = 0;
    return ioctl(fd, FIONREAD, &unread) == 0 && unread > 0;
}

void sock_clear_error(int fd) {
    int error;
    socklen_t size = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
}

bool sock_pending(int fd, uint64_t written, uint64_t *taken) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    int pending = 0;
    if (ioctl(fd, SIOCOUTQ, &pending) || pending == 0) return false;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size))
        *taken = written > (uint64_t)pending ? written - (uint64_t)pending : 0;
    else
        *taken = info.tcpi_bytes_acked;
    return true;
}
