/* Sockets as the kernel sees them. The listening one is bound before the model is loaded and
 * listens after. */
#ifndef KEEPD_SERVER_SOCK_H
#define KEEPD_SERVER_SOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/err.h"

/* Where to listen: a TCP address, or with `path` a Unix socket. */
struct sock_address {
    const char *host;
    int port;         /* 0 = any free one */
    const char *path; /* NULL = TCP */
    unsigned mode;    /* permissions of the path */
};

/* Whether there is such an address; takes nothing. */
int sock_check(const struct sock_address *address, struct fault *fault);
/* A path that a dead process left behind is taken over, one that is served is a fault, and so is
 * anything there that is not a socket. */
int sock_bind(const struct sock_address *address, int *fd, struct fault *fault);
/* Also for a socket that listens already: what connections should inherit from it. */
int sock_listen(int fd, struct fault *fault);
/* "http://127.0.0.1:8080" or "unix:/run/keepd.sock", of what is in force. `host` NULL: as bound. */
void sock_url(int fd, const char *host, bool tls, char *url, size_t size);
bool sock_is_loopback(int fd); /* reached from this machine only; false for a Unix socket */
/* Removes the path of a Unix socket; does nothing for others. */
void sock_unlink(int fd);

/* The peer's address. Peers of Unix sockets have none. */
struct sock_peer {
    union {
        struct sockaddr any;
        struct sockaddr_storage room;
    };
    socklen_t size;
};

/* The next connection, which never blocks, or -1 with errno. */
int sock_accept(int fd, struct sock_peer *peer);
bool sock_peer_known(const struct sock_peer *peer);
bool sock_peer_equal(const struct sock_peer *a, const struct sock_peer *b); /* ports aside */
/* The network of the peer: its address, of IPv6 the first 64 bits, which one host has alone. False:
 * it is on this machine, by loopback or a Unix socket, where all have the same. */
bool sock_peer_network(const struct sock_peer *peer, uint8_t network[16]);
/* Two connected sockets that never block and hold little; 0, or -1 with errno. */
int sock_pair(int pair[2]);
bool sock_unread(int fd);      /* something can be read */
void sock_clear_error(int fd); /* the pending one, so that what came before it can be read */

/* Bytes the peer has acknowledged since the connection began (a Unix socket: minus what it has not
 * read), so that a change means that it takes some; false: nothing is pending. */
bool sock_pending(int fd, uint64_t *acked);

#endif
