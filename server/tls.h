/* TLS over a socket that never blocks: certificate, handshake, records. Only tls.c uses
 * GnuTLS. A session belongs to the loop thread, and it owns no descriptor. */
#ifndef KEEPD_SERVER_TLS_H
#define KEEPD_SERVER_TLS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "base/err.h"

#define TLS_AGAIN (-1) /* the socket is not ready: see tls_wants_write */
#define TLS_FAILED                                                                                 \
    (-2) /* the session is over; an alert has been sent if the socket accepted it                  \
          */

struct tls_config; /* certificate, key, permitted algorithms: immutable, shared by its sessions */
struct tls;        /* one connection's session */

/* Loads certificate and key in PEM. The texts belong to the caller and are not needed afterwards. A
 * fault names the option. */
int tls_config_open(const char *cert, const char *key, struct tls_config **out,
                    struct fault *fault);
/* Gives up the owner's reference; the configuration is freed with its last session. NULL allowed.
 */
void tls_config_close(struct tls_config *config);

struct tls *tls_open(struct tls_config *config, int fd); /* NULL: no memory */
void tls_close(struct tls *tls);                         /* NULL allowed */

int tls_handshake(struct tls *tls);           /* 0 = done, or one of the above */
bool tls_has_answered(const struct tls *tls); /* the client's hello has been answered */
bool tls_wants_write(const struct tls *tls);  /* after TLS_AGAIN: writable, else readable */
/* Return the number of bytes; tls_read returns 0 after the client's close_notify. After TLS_AGAIN
 * tls_write must be called with the same bytes again. At most one record; `size` of tls_read must
 * be at least 16 KiB: GnuTLS would otherwise hold back data that polling the socket does not show.
 */
ssize_t tls_read(struct tls *tls, void *to, size_t size);
ssize_t tls_write(struct tls *tls, const void *from, size_t size);
void tls_bye(struct tls *tls); /* sends close_notify, if the socket accepts it */

#endif
