#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "server/sip.h"

/* From the reference implementation: key 00..0f, input 00, 01, 02, ... */
static const struct {
    size_t size;
    const char *hash;
} vectors[] = {{0, "a3817f04ba25a8e66df67214c7550293"},
               {1, "da87c1d86b99af44347659119b22fc45"},
               {2, "8177228da4a45dc7fca38bdef60affe4"},
               {3, "9c70b60c5267a94e5f33b6b02985ed51"}};

static void hex(const uint8_t bytes[16], char text[33]) {
    for (int i = 0; i < 16; i++) snprintf(text + (ptrdiff_t)2 * i, 3, "%02x", bytes[i]);
}

Test(sip, reference) {
    uint8_t key[16], input[64], hash[16];
    char text[33];
    for (int i = 0; i < 64; i++) input[i] = (uint8_t)i;
    memcpy(key, input, 16);
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        sip_hash128(key, input, vectors[i].size, hash);
        hex(hash, text);
        cr_assert_str_eq(text, vectors[i].hash, "%zu bytes", vectors[i].size);
    }
}

Test(sip, every_bit_counts) {
    uint8_t key[16] = {1}, input[33] = {0}, first[16], other[16];
    sip_hash128(key, input, sizeof input, first);
    for (size_t bit = 0; bit < 8 * sizeof input; bit++) {
        input[bit / 8] ^= (uint8_t)(1 << bit % 8);
        sip_hash128(key, input, sizeof input, other);
        cr_assert(memcmp(first, other, 16) != 0, "bit %zu", bit);
        input[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    sip_hash128(key, input, sizeof input - 1, other);
    cr_assert(memcmp(first, other, 16) != 0, "a trailing zero counts");
}
