#include "server/sock.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* glibc's netinet/tcp.h has no tcpi_bytes_acked, and the two do not mix: nothing that includes
 * uv.h can live in this file. */
#include <linux/sockios.h>
#include <linux/tcp.h>

#define LISTEN_BACKLOG 1024
#define SEND_BUFFER    (256 << 10) /* what the kernel holds for a client that does not read */

static int open_socket(const struct addrinfo *address, struct fault *fault) {
    int one = 1, buffer = SEND_BUFFER;
    int fd = socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                    address->ai_protocol);
    if (fd < 0) return fault_set(fault, ERR_IO, "host", "socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer); /* accepted ones inherit it */
    if (bind(fd, address->ai_addr, address->ai_addrlen) == 0) return fd;
    int rc = fault_set(fault, ERR_IO, errno == EADDRINUSE ? "port" : "host", "bind: %s",
                       strerror(errno));
    close(fd);
    return rc;
}

int sock_bind(const char *host, int port, int *fd, struct fault *fault) {
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *address;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    int rc = getaddrinfo(host && *host ? host : NULL, service, &hints, &address);
    if (rc) return fault_set(fault, ERR_INVALID, "host", "%s: %s", host, gai_strerror(rc));
    *fd = open_socket(address, fault);
    freeaddrinfo(address);
    return *fd < 0 ? *fd : 0;
}

static int port_of(int fd) {
    struct sockaddr_storage address = {0};
    socklen_t size = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &size)) return 0;
    if (address.ss_family == AF_INET6) return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
    return ntohs(((struct sockaddr_in *)&address)->sin_port);
}

int sock_listen(int fd, const char *host, char *url, size_t url_size, struct fault *fault) {
    if (listen(fd, LISTEN_BACKLOG))
        return fault_set(fault, ERR_IO, "port", "listen: %s", strerror(errno));
    snprintf(url, url_size, strchr(host, ':') ? "http://[%s]:%d" : "http://%s:%d", host,
             port_of(fd));
    return 0;
}

void sock_cork(int fd, bool on) {
    int value = on;
    setsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, sizeof value);
}

bool sock_pending(int fd, uint64_t *acked) {
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    int pending = 0;
    if (ioctl(fd, SIOCOUTQ, &pending) || pending == 0) return false;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size)) return false;
    *acked = info.tcpi_bytes_acked;
    return true;
}
