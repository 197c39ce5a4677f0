#include "tests/load/secure.h"

#include <errno.h>
#include <gnutls/gnutls.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"

#define INPUT_BYTES (128 << 10) /* one read and the rest of the record before it */

struct secure {
    gnutls_session_t session;
    secure_send send;
    void *arg;
    bool shaken;
    size_t at, size; /* unread input */
    char input[INPUT_BYTES];
};

static ssize_t push(gnutls_transport_ptr_t arg, const void *data, size_t size) {
    struct secure *s = arg;
    ssize_t sent = s->send(s->arg, data, size);
    if (sent < 0) gnutls_transport_set_errno(s->session, ECONNRESET);
    return sent;
}

static ssize_t pull(gnutls_transport_ptr_t arg, void *to, size_t size) {
    struct secure *s = arg;
    if (size > s->size - s->at) size = s->size - s->at;
    if (!size) {
        gnutls_transport_set_errno(s->session, EAGAIN);
        return -1;
    }
    memcpy(to, s->input + s->at, size);
    s->at += size;
    return (ssize_t)size;
}

/* The certificate is not verified: the load client knows which daemon it asks. */
static gnutls_certificate_credentials_t credentials(void) {
    static gnutls_certificate_credentials_t shared;
    if (!shared) CHECK(!gnutls_certificate_allocate_credentials(&shared));
    return shared;
}

struct secure *secure_open(secure_send send, void *arg) {
    struct secure *s = mem_must_alloc(1, sizeof *s);
    s->send = send;
    s->arg = arg;
    CHECK(!gnutls_init(&s->session, GNUTLS_CLIENT | GNUTLS_NONBLOCK));
    CHECK(!gnutls_set_default_priority(s->session));
    CHECK(!gnutls_credentials_set(s->session, GNUTLS_CRD_CERTIFICATE, credentials()));
    gnutls_transport_set_ptr(s->session, s);
    gnutls_transport_set_push_function(s->session, push);
    gnutls_transport_set_pull_function(s->session, pull);
    return s;
}

void secure_close(struct secure *s) {
    if (!s) return;
    gnutls_deinit(s->session);
    mem_free(s);
}

void secure_feed(struct secure *s, const char *data, size_t size) {
    memmove(s->input, s->input + s->at, s->size - s->at);
    s->size -= s->at;
    s->at = 0;
    CHECK(size <= sizeof s->input - s->size);
    memcpy(s->input + s->size, data, size);
    s->size += size;
}

int secure_handshake(struct secure *s) {
    int rc = gnutls_handshake(s->session);
    s->shaken = rc == 0;
    return rc == 0 ? 0 : gnutls_error_is_fatal(rc) ? -1 : 1;
}

bool secure_is_shaken(const struct secure *s) {
    return s->shaken;
}

bool secure_write(struct secure *s, const char *data, size_t size) {
    return gnutls_record_send(s->session, data, size) == (ssize_t)size;
}

ssize_t secure_read(struct secure *s, char *to, size_t size) {
    ssize_t got = gnutls_record_recv(s->session, to, size);
    if (got >= 0) return got;
    return gnutls_error_is_fatal((int)got) ? -1 : 0;
}
