/* Socket system calls. The listening socket is bound before the model is loaded, and listens
 * afterwards. */
#ifndef KEEPD_SERVER_SOCK_H
#define KEEPD_SERVER_SOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/err.h"

/* Where to listen: a TCP address or, with `path`, a Unix socket. */
struct sock_address {
    const char *host;
    int port;         /* 0 = any free one */
    const char *path; /* NULL = TCP */
    unsigned mode;    /* permissions of the path */
};

/* Checks that the address is valid; binds nothing. */
int sock_check(const struct sock_address *address, struct fault *fault);
/* Binds a socket. Replaces the Unix socket of a process that has ended; a socket in use is a fault,
 * and so is a path that is not a socket. */
int sock_bind(const struct sock_address *address, int *fd, struct fault *fault);
/* Listens, and sets the options that accepted connections inherit, also on a socket that already
 * listens. */
int sock_listen(int fd, struct fault *fault);
/* Writes the URL of a bound socket: "http://127.0.0.1:8080" or "unix:/run/keepd.sock". `host` NULL:
 * the bound address. */
void sock_url(int fd, const char *host, bool tls, char *url, size_t size);
bool sock_is_loopback(int fd);  /* reached from this machine only; false for a Unix socket */
bool sock_has_networks(int fd); /* clients may have different addresses */
/* Removes the path of a Unix socket; does nothing for others. */
void sock_unlink(int fd);

/* The peer's address. Peers of Unix sockets have none. */
struct sock_peer {
    union {
        struct sockaddr any;
        struct sockaddr_storage storage;
    };
    socklen_t size;
};

/* Accepts a connection as a non-blocking socket; -1 with errno. */
int sock_accept(int fd, struct sock_peer *peer);
bool sock_peer_known(const struct sock_peer *peer);
/* Writes the peer's network: its IPv4 address, the first 64 bits of its IPv6 address, or zeros on a
 * Unix socket. false: the peer is local (loopback or a Unix socket), where all peers have one
 * address. */
bool sock_peer_network(const struct sock_peer *peer, uint8_t network[16]);
/* Makes two connected, non-blocking sockets with small buffers. 0, or -1 with errno. */
int sock_pair(int pair[2]);
bool sock_unread(int fd);      /* something can be read */
void sock_clear_error(int fd); /* clears a pending error, so that earlier data can be read */

/* Sets *taken to the bytes that the peer has received since the connection began: the acknowledged
 * ones or, on a Unix socket, those of `written` that it has read. On a Unix socket the number may
 * be too low and may fall, because the kernel counts its own overhead. false: nothing is pending.
 */
bool sock_pending(int fd, uint64_t written, uint64_t *taken);

#endif
