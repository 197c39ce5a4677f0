/* The bytes of a TLS connection: a handshake, and records after it. The first byte sets how they
 * are cut and how many of them come behind a true client's hello. */
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "server/tls.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tls_config *config;

static void make_config(void) {
    gnutls_x509_privkey_t key;
    gnutls_x509_crt_t cert;
    gnutls_datum_t key_pem, cert_pem;
    struct fault fault = {0};
    CHECK(!gnutls_x509_privkey_init(&key) && !gnutls_x509_crt_init(&cert));
    CHECK(!gnutls_x509_privkey_generate(key, GNUTLS_PK_ECDSA,
                                        GNUTLS_CURVE_TO_BITS(GNUTLS_ECC_CURVE_SECP256R1), 0));
    gnutls_x509_crt_set_version(cert, 3);
    gnutls_x509_crt_set_serial(cert, "1", 1);
    gnutls_x509_crt_set_activation_time(cert, time(NULL) - 60);
    gnutls_x509_crt_set_expiration_time(cert, time(NULL) + 86400);
    gnutls_x509_crt_set_dn_by_oid(cert, GNUTLS_OID_X520_COMMON_NAME, 0, "localhost", 9);
    CHECK(!gnutls_x509_crt_set_key(cert, key));
    CHECK(!gnutls_x509_crt_sign2(cert, cert, key, GNUTLS_DIG_SHA256, 0));
    CHECK(!gnutls_x509_privkey_export2(key, GNUTLS_X509_FMT_PEM, &key_pem));
    CHECK(!gnutls_x509_crt_export2(cert, GNUTLS_X509_FMT_PEM, &cert_pem));
    CHECK(!tls_config_open((char *)cert_pem.data, (char *)key_pem.data, &config, &fault));
    gnutls_free(key_pem.data);
    gnutls_free(cert_pem.data);
    gnutls_x509_crt_deinit(cert);
    gnutls_x509_privkey_deinit(key);
}

/* A client as far as its finished handshake, or its first flight only. */
static gnutls_session_t make_client(gnutls_certificate_credentials_t credentials, int fd) {
    gnutls_session_t client;
    CHECK(!gnutls_init(&client, GNUTLS_CLIENT | GNUTLS_NONBLOCK | GNUTLS_NO_SIGNAL));
    CHECK(!gnutls_set_default_priority(client));
    CHECK(!gnutls_credentials_set(client, GNUTLS_CRD_CERTIFICATE, credentials));
    gnutls_transport_set_int(client, fd);
    return client;
}

static int step(struct tls *server, bool *shaken) {
    char room[16384];
    if (!*shaken) {
        int rc = tls_handshake(server);
        *shaken = rc == 0;
        return rc == TLS_FAILED ? -1 : 0;
    }
    for (;;) {
        ssize_t got = tls_read(server, room, sizeof room);
        CHECK(got >= TLS_FAILED && got <= (ssize_t)sizeof room);
        if (got == TLS_AGAIN) return 0;
        if (got <= 0) return -1;
    }
}

static void drain(int fd) {
    char room[4096];
    while (recv(fd, room, sizeof room, MSG_DONTWAIT) > 0) continue;
}

static void play(struct tls *server, int fd, uint8_t mode, const uint8_t *data, size_t size) {
    gnutls_certificate_credentials_t credentials;
    bool shaken = false;
    CHECK(!gnutls_certificate_allocate_credentials(&credentials));
    gnutls_session_t client = make_client(credentials, fd);
    int rounds = mode >> 6; /* 0: none, 1: the hello, 2 and 3: all */
    for (int i = 0; i < (rounds > 1 ? 8 : rounds); i++) {
        gnutls_handshake(client);
        if (step(server, &shaken)) break;
    }
    CHECK(rounds < 2 || shaken);
    size_t piece = 1 + (mode & 63) * 16u;
    for (size_t at = 0; at < size; at += piece) {
        size_t part = size - at < piece ? size - at : piece;
        if (send(fd, data + at, part, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 || step(server, &shaken))
            break;
        drain(fd);
    }
    if (shaken) {
        CHECK(tls_write(server, "x", 1) >= TLS_FAILED);
        tls_bye(server);
    }
    gnutls_deinit(client);
    gnutls_certificate_free_credentials(credentials);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int pair[2];
    if (size < 2) return 0;
    if (!config) make_config();
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
    struct tls *server = tls_open(config, pair[0]);
    CHECK(server);
    play(server, pair[1], data[0], data + 1, size - 1);
    tls_close(server);
    close(pair[0]);
    close(pair[1]);
    return 0;
}
