#include "engine/steps/dry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#define FLOAT_LOG_MAX 88.7228391 /* logarithm of the largest float: no power becomes infinite */

_Static_assert(ENGINE_DRY_LAST_MAX < UINT16_MAX, "dry->found counts biases in 16 bits");

/* A table for so many tokens is at most half full. */
static int bits_for(int32_t tokens) {
    int bits = 1;
    while ((int32_t)1 << bits < 2 * tokens) bits++;
    return bits;
}

static float compute_penalty(const struct engine_dry *r, int32_t exponent) {
    const double base = (double)r->base;
    const int32_t most = base > 1.000001 ? (int32_t)(FLOAT_LOG_MAX / log(base)) : INT32_MAX;
    if (exponent > most) exponent = most;
    const double penalty = (double)r->multiplier * pow(base, exponent);
    return penalty < 3e38 ? (float)penalty : 3e38f;
}

int dry_open(struct dry *dry, const struct engine_request *request, dry_bytes_fn *token_bytes,
             const void *arg, int32_t room) {
    const struct engine_dry *r = &request->dry;
    int32_t window = r->last < 0 || r->last > ENGINE_DRY_LAST_MAX ? ENGINE_DRY_LAST_MAX : r->last;
    *dry = (struct dry){0};
    if (window > room) window = room;
    if (!(r->multiplier > 0) || !(r->base >= 1) || window == 0) return 0;
    *dry =
        (struct dry){.request = request, .token_bytes = token_bytes, .arg = arg, .window = window};
    dry->lengths = mem_try_alloc((size_t)window, sizeof *dry->lengths);
    dry->bias = mem_try_alloc((size_t)request->bias_count + (size_t)window, sizeof *dry->bias);
    dry->holds = mem_try_alloc((size_t)window, sizeof *dry->holds);
    dry->found = mem_try_alloc((size_t)1 << bits_for(window), sizeof *dry->found);
    if (!dry->lengths || !dry->bias || !dry->holds || !dry->found) {
        dry_close(dry);
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < DRY_POWERS; i++) dry->power[i] = compute_penalty(r, i);
    for (int32_t i = 0; i < r->breaker_count; i++) {
        const struct engine_stop *breaker = &r->breakers[i];
        dry->starts[(unsigned char)breaker->text[0]] |= (uint32_t)1 << i % 32;
        if (breaker->size > dry->longest) dry->longest = breaker->size;
    }
    for (int32_t i = 0; i < request->bias_count; i++)
        dry->bias[i] = (struct kern_logit_bias){request->bias[i].token, request->bias[i].bias};
    return 0;
}

void dry_close(struct dry *dry) {
    mem_free(dry->lengths);
    mem_free(dry->bias);
    mem_free(dry->holds);
    mem_free(dry->found);
    *dry = (struct dry){0};
}

/* ---- Breakers ---- */

/* Does a breaker begin in text[from, to) that ends behind `least`? */
static bool has_breaker(const struct dry *dry, const char *text, size_t from, size_t to,
                        size_t least, size_t size) {
    for (size_t at = from; at < to; at++)
        for (uint32_t left = dry->starts[(unsigned char)text[at]]; left; left &= left - 1)
            for (int32_t i = __builtin_ctz(left); i < dry->request->dry.breaker_count; i += 32) {
                const struct engine_stop *breaker = &dry->request->dry.breakers[i];
                const size_t end = at + breaker->size;
                if (end > least && end <= size &&
                    memcmp(text + at, breaker->text, breaker->size) == 0)
                    return true;
            }
    return false;
}

/* Does a breaker begin before the token and end in it? `joint`: the bytes before the token and its
 * first ones, as many as a breaker can have of each. */
static bool ends_breaker(const struct dry *dry, const char *joint, size_t before, size_t size) {
    const size_t from = before + 1 > dry->longest ? before + 1 - dry->longest : 0;
    return has_breaker(dry, joint, from, before, before, size);
}

static void note_token(struct dry *dry, int32_t token) {
    const char *bytes = "";
    char joint[2 * ENGINE_BREAKER_MAX];
    const size_t size = dry->token_bytes(dry->arg, token, &bytes), before = dry->tail_size;
    const size_t front = size < ENGINE_BREAKER_MAX ? size : ENGINE_BREAKER_MAX;
    memcpy(joint, dry->tail, before);
    if (front) memcpy(joint + before, bytes, front);
    const bool holds = has_breaker(dry, bytes, 0, size, 0, size);
    dry->holds[dry->known % dry->window] = holds;
    if (holds || ends_breaker(dry, joint, before, before + front)) dry->begins = dry->known + 1;
    if (size >= sizeof dry->tail) {
        dry->tail_size = sizeof dry->tail;
        memcpy(dry->tail, bytes + size - sizeof dry->tail, sizeof dry->tail);
    } else {
        dry->tail_size = before + size < sizeof dry->tail ? before + size : sizeof dry->tail;
        memmove(dry->tail, joint + before + size - dry->tail_size, dry->tail_size);
    }
    dry->known++;
}

/* ---- Repetitions ---- */

/* Writes for k = 1 .. n-1 how many of the text's last tokens also stand before place count - k. */
static void find_lengths(int32_t *lengths, const int32_t *tokens, int32_t count, int32_t n) {
    const int32_t *last = tokens + count - 1;
    int32_t left = 0, right = 0; /* the match that reaches furthest: [left, right) from the end */
    for (int32_t k = 1; k < n; k++) {
        int32_t length = k < right ? lengths[k - left] : 0;
        if (length > right - k) length = right - k > 0 ? right - k : 0;
        while (k + length < n && last[-length] == last[-k - length]) length++;
        lengths[k] = length;
        if (k + length > right) {
            left = k;
            right = k + length;
        }
    }
}

/* Returns where the token's bias is, or belongs if it has none yet: its index + 1 is at the place,
 * 0 at one that is free. */
static uint16_t *look_up(const struct dry *dry, int bits, const struct kern_logit_bias *list,
                         int32_t token) {
    const uint32_t mask = ((uint32_t)1 << bits) - 1;
    uint32_t at = (uint32_t)token * 2654435769u >> (32 - bits);
    while (dry->found[at] && list[dry->found[at] - 1].token != token) at = (at + 1) & mask;
    return &dry->found[at];
}

/* Lists the tokens that would repeat, each with the longest of its lengths. Returns how many. */
static int32_t list_repeats(struct dry *dry, const int32_t *tokens, int32_t count, int32_t n,
                            int32_t most) {
    struct kern_logit_bias *list = dry->bias + dry->request->bias_count;
    const int32_t allowed = dry->request->dry.allowed;
    const int bits = bits_for(n);
    int32_t listed = 0;
    memset(dry->found, 0, ((size_t)1 << bits) * sizeof *dry->found);
    for (int32_t k = 1; k < n; k++) {
        const int32_t length = dry->lengths[k] < most ? dry->lengths[k] : most;
        if (length < allowed || dry->holds[(count - k) % dry->window]) continue;
        const int32_t token = tokens[count - k];
        uint16_t *index = look_up(dry, bits, list, token);
        if (!*index) {
            list[listed++] = (struct kern_logit_bias){token, (float)length};
            *index = (uint16_t)listed;
        } else if (list[*index - 1].bias < (float)length) {
            list[*index - 1].bias = (float)length;
        }
    }
    return listed;
}

/* Turns the lengths of the tokens that would repeat into a bias for each of them. */
static void penalise(const struct dry *dry, struct kern_logit_bias *list, int32_t count) {
    const struct engine_dry *r = &dry->request->dry;
    for (int32_t i = 0; i < count; i++) {
        const int32_t exponent = (int32_t)list[i].bias - r->allowed;
        list[i].bias =
            -(exponent < DRY_POWERS ? dry->power[exponent] : compute_penalty(r, exponent));
    }
}

static void find_biases(struct dry *dry, const int32_t *tokens, int32_t count) {
    const struct engine_dry *r = &dry->request->dry;
    const int32_t fixed = dry->request->bias_count;
    const int32_t n = count < dry->window ? count : dry->window;
    if (dry->known < count - n) { /* a breaker that begins before the window has no effect */
        dry->known = count - n;
        dry->tail_size = 0;
    }
    while (dry->known < count) note_token(dry, tokens[dry->known]);
    const int32_t free_of_breakers = count - dry->begins < n ? count - dry->begins : n;
    dry->bias_count = fixed;
    if (n <= r->allowed || free_of_breakers < r->allowed) return;
    find_lengths(dry->lengths, tokens, count, n);
    const int32_t listed = list_repeats(dry, tokens, count, n, free_of_breakers);
    penalise(dry, dry->bias + fixed, listed);
    dry->bias_count = fixed + listed;
}

const struct kern_logit_bias *dry_biases(struct dry *dry, const int32_t *tokens, int32_t count,
                                         int32_t *bias_count) {
    /* A draft model that guesses token after token asks for the same text again. */
    if (dry->asked != count) find_biases(dry, tokens, count);
    dry->asked = count;
    *bias_count = dry->bias_count;
    return dry->bias;
}
