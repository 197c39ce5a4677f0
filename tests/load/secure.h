/* A TLS client on bytes in memory, for the load client's loop. */
#ifndef KEEPD_TESTS_LOAD_SECURE_H
#define KEEPD_TESTS_LOAD_SECURE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct secure;

/* Sends ciphertext: the number of bytes taken, or below 0. */
typedef ssize_t (*secure_send)(void *arg, const void *data, size_t size);

struct secure *secure_open(secure_send send, void *arg);
void secure_close(struct secure *secure); /* NULL allowed */
/* Adds ciphertext that was received. */
void secure_feed(struct secure *secure, const char *data, size_t size);
/* 0 = done, 1 = needs more ciphertext, -1 = failed. The first call sends the hello. */
int secure_handshake(struct secure *secure);
bool secure_is_shaken(const struct secure *secure);
bool secure_write(struct secure *secure, const char *data, size_t size); /* false: not all sent */
/* Plaintext of one record; 0 = needs more ciphertext or has ended, -1 = failed. */
ssize_t secure_read(struct secure *secure, char *to, size_t size);

#endif
