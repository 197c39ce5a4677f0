/* Sockets as the kernel sees them. The listening one is bound before the model is loaded and
 * listens after. */
#ifndef KEEPD_SERVER_SOCK_H
#define KEEPD_SERVER_SOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

int sock_bind(const char *host, int port, int *fd, struct fault *fault);
/* Also writes the URL with the port in force. */
int sock_listen(int fd, const char *host, char *url, size_t url_size, struct fault *fault);

/* While corked the kernel joins what is written into full packets. */
void sock_cork(int fd, bool on);
/* Bytes the peer has acknowledged since the connection began; false: nothing is pending. */
bool sock_pending(int fd, uint64_t *acked);

#endif
