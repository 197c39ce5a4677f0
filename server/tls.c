/* The only user of GnuTLS: loads certificate and key, and translates GnuTLS's results into those of
 * tls.h. The permitted key exchanges are a short list on purpose, see PRIORITIES. */
#include "server/tls.h"

#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <stdint.h>
#include <string.h>

#include "base/mem.h"

/* Every key exchange has forward secrecy and costs the server well under a millisecond. Groups over
 * finite fields are excluded, because a single hello that asks for the largest of them would block
 * the loop for tens of milliseconds. */
#define PRIORITIES                                                                                 \
    "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2:-RSA:-DHE-RSA:-GROUP-ALL:+GROUP-X25519:"           \
    "+GROUP-SECP256R1:+GROUP-SECP384R1:+GROUP-SECP521R1:%SERVER_PRECEDENCE"
#define HANDSHAKE_BYTES_MAX 16384 /* largest handshake message; clients send no certificates */
#define WARNINGS_MAX        4     /* alerts and empty records that are skipped in one call */

struct tls_config {
    gnutls_certificate_credentials_t credentials;
    gnutls_priority_t priorities;
    int refs; /* one reference for the owner and one for each session */
};

struct tls {
    gnutls_session_t session;
    struct tls_config *config;
};

/* --- the certificate --- */

/* Checks the certificate alone first, because GnuTLS 3.7.9 leaks memory when it refuses certificate
 * and key together. */
static int check_cert(const gnutls_datum_t *pem) {
    gnutls_x509_crt_t *certs;
    unsigned count;
    int rc = gnutls_x509_crt_list_import2(&certs, &count, pem, GNUTLS_X509_FMT_PEM, 0);
    if (rc < 0) return rc;
    for (unsigned i = 0; i < count; i++) gnutls_x509_crt_deinit(certs[i]);
    gnutls_free(certs);
    return 0;
}

static int check_key(const gnutls_datum_t *pem) {
    gnutls_x509_privkey_t key;
    int rc = gnutls_x509_privkey_init(&key);
    if (rc) return rc;
    rc = gnutls_x509_privkey_import2(key, pem, GNUTLS_X509_FMT_PEM, NULL, 0);
    gnutls_x509_privkey_deinit(key);
    return rc;
}

static int refuse_tls(const char *option, const char *what, int code, struct fault *fault) {
    return fault_set(fault, ERR_INVALID, option, "%s cannot be used: %s", what,
                     gnutls_strerror(code));
}

int tls_config_open(const char *cert, const char *key, struct tls_config **out,
                    struct fault *fault) {
    const gnutls_datum_t cert_pem = {(unsigned char *)(uintptr_t)cert, (unsigned)strlen(cert)};
    const gnutls_datum_t key_pem = {(unsigned char *)(uintptr_t)key, (unsigned)strlen(key)};
    *out = NULL;
    int rc = check_cert(&cert_pem);
    if (rc) return refuse_tls("tls-cert", "the certificate", rc, fault);
    rc = check_key(&key_pem);
    if (rc) return refuse_tls("tls-key", "the key", rc, fault);
    struct tls_config *config = mem_must_alloc(1, sizeof *config);
    config->refs = 1;
    rc = gnutls_certificate_allocate_credentials(&config->credentials);
    if (!rc) rc = gnutls_priority_init(&config->priorities, PRIORITIES, NULL);
    if (!rc)
        rc = gnutls_certificate_set_x509_key_mem2(config->credentials, &cert_pem, &key_pem,
                                                  GNUTLS_X509_FMT_PEM, NULL, 0);
    if (rc < 0) {
        tls_config_close(config);
        return refuse_tls("tls-cert", "the certificate with this key", rc, fault);
    }
    *out = config;
    return 0;
}

void tls_config_close(struct tls_config *config) {
    if (!config || --config->refs > 0) return;
    if (config->credentials) gnutls_certificate_free_credentials(config->credentials);
    if (config->priorities) gnutls_priority_deinit(config->priorities);
    mem_free(config);
}

/* --- a session --- */

struct tls *tls_open(struct tls_config *config, int fd) {
    static const gnutls_datum_t protocol = {(unsigned char *)(uintptr_t) "http/1.1", 8};
    struct tls *tls = mem_try_alloc(1, sizeof *tls);
    if (!tls) return NULL;
    if (gnutls_init(&tls->session, GNUTLS_SERVER | GNUTLS_NONBLOCK | GNUTLS_NO_SIGNAL)) {
        mem_free(tls);
        return NULL;
    }
    tls->config = config;
    config->refs++;
    if (gnutls_priority_set(tls->session, config->priorities) ||
        gnutls_credentials_set(tls->session, GNUTLS_CRD_CERTIFICATE, config->credentials) ||
        gnutls_alpn_set_protocols(tls->session, &protocol, 1, 0)) {
        tls_close(tls);
        return NULL;
    }
    gnutls_handshake_set_max_packet_length(tls->session, HANDSHAKE_BYTES_MAX);
    gnutls_transport_set_int(tls->session, fd);
    return tls;
}

void tls_close(struct tls *tls) {
    if (!tls) return;
    gnutls_deinit(tls->session);
    tls_config_close(tls->config);
    mem_free(tls);
}

bool tls_wants_write(const struct tls *tls) {
    return gnutls_record_get_direction(tls->session) != 0;
}

/* Returns whether the hello was answered. GnuTLS begins with the state -1, which is not in its
 * enumeration. */
bool tls_has_answered(const struct tls *tls) {
    return (int)gnutls_handshake_get_last_out(tls->session) >= 0;
}

static bool is_again(ssize_t rc) {
    return rc == GNUTLS_E_AGAIN || rc == GNUTLS_E_INTERRUPTED;
}

int tls_handshake(struct tls *tls) {
    int rc = GNUTLS_E_WARNING_ALERT_RECEIVED;
    for (int i = 0; i < WARNINGS_MAX && rc == GNUTLS_E_WARNING_ALERT_RECEIVED; i++)
        rc = gnutls_handshake(tls->session);
    if (rc == GNUTLS_E_SUCCESS) return 0;
    if (is_again(rc)) return TLS_AGAIN;
    gnutls_alert_send_appropriate(tls->session, rc);
    return TLS_FAILED;
}

/* Reads. Renegotiation, which TLS 1.3 no longer has, shows as GNUTLS_E_REHANDSHAKE and ends the
 * session. */
ssize_t tls_read(struct tls *tls, void *to, size_t size) {
    ssize_t rc = GNUTLS_E_WARNING_ALERT_RECEIVED;
    for (int i = 0; i < WARNINGS_MAX && rc == GNUTLS_E_WARNING_ALERT_RECEIVED; i++)
        rc = gnutls_record_recv(tls->session, to, size);
    if (rc >= 0) return rc;
    return is_again(rc) ? TLS_AGAIN : TLS_FAILED;
}

ssize_t tls_write(struct tls *tls, const void *from, size_t size) {
    ssize_t rc = gnutls_record_send(tls->session, from, size);
    if (rc >= 0) return rc;
    return is_again(rc) ? TLS_AGAIN : TLS_FAILED;
}

void tls_bye(struct tls *tls) {
    gnutls_bye(tls->session, GNUTLS_SHUT_WR);
}
