#include "server/sip.h"

#include <string.h>

struct state {
    uint64_t v0, v1, v2, v3;
};

static uint64_t rotl(uint64_t x, int bits) {
    return (x << bits) | (x >> (64 - bits));
}

/* Reads a word in little-endian order on any machine, as the algorithm is defined. */
static uint64_t load_sip_word(const uint8_t *p, size_t n) {
    uint64_t word = 0;
    for (size_t i = 0; i < n; i++) word |= (uint64_t)p[i] << (8 * i);
    return word;
}

static void store_sip_word(uint8_t *p, uint64_t word) {
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(word >> (8 * i));
}

static void sip_rounds(struct state *s, int count) {
    while (count--) {
        s->v0 += s->v1;
        s->v1 = rotl(s->v1, 13) ^ s->v0;
        s->v0 = rotl(s->v0, 32);
        s->v2 += s->v3;
        s->v3 = rotl(s->v3, 16) ^ s->v2;
        s->v0 += s->v3;
        s->v3 = rotl(s->v3, 21) ^ s->v0;
        s->v2 += s->v1;
        s->v1 = rotl(s->v1, 17) ^ s->v2;
        s->v2 = rotl(s->v2, 32);
    }
}

static void mix_sip_word(struct state *s, uint64_t word) {
    s->v3 ^= word;
    sip_rounds(s, 2);
    s->v0 ^= word;
}

void sip_hash128(const uint8_t key[16], const void *data, size_t size, uint8_t out[16]) {
    uint64_t k0 = load_sip_word(key, 8), k1 = load_sip_word(key + 8, 8);
    struct state s = {k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du ^ 0xee,
                      k0 ^ 0x6c7967656e657261u, k1 ^ 0x7465646279746573u};
    const uint8_t *bytes = data;
    size_t whole = size & ~(size_t)7;
    for (size_t i = 0; i < whole; i += 8) mix_sip_word(&s, load_sip_word(bytes + i, 8));
    mix_sip_word(&s,
                 (size & 7 ? load_sip_word(bytes + whole, size & 7) : 0) | (uint64_t)size << 56);
    s.v2 ^= 0xee;
    sip_rounds(&s, 4);
    store_sip_word(out, s.v0 ^ s.v1 ^ s.v2 ^ s.v3);
    s.v1 ^= 0xdd;
    sip_rounds(&s, 4);
    store_sip_word(out + 8, s.v0 ^ s.v1 ^ s.v2 ^ s.v3);
}
