#include "engine/steps/dry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#define FLOAT_LOG_MAX 88.7228391 /* logarithm of the largest float: no power becomes infinite */

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
    if (!dry->lengths || !dry->bias) {
        dry_close(dry);
        return ERR_NOMEM;
    }
    for (int32_t i = 0; i < request->bias_count; i++)
        dry->bias[i] = (struct kern_logit_bias){request->bias[i].token, request->bias[i].bias};
    return 0;
}

void dry_close(struct dry *dry) {
    mem_free(dry->lengths);
    mem_free(dry->bias);
    *dry = (struct dry){0};
}

/* ---- Breakers ---- */

static bool has_breaker(const struct dry *dry, const char *bytes, size_t size) {
    for (int32_t i = 0; i < dry->request->dry.breaker_count; i++) {
        const struct engine_stop *breaker = &dry->request->dry.breakers[i];
        if (memmem(bytes, size, breaker->text, breaker->size)) return true;
    }
    return false;
}

/* Does a breaker begin before the token and end in it? `joint`: the bytes before the token and its
 * first ones, as many as a breaker can have of each. */
static bool ends_breaker(const struct dry *dry, const char *joint, size_t before, size_t size) {
    for (int32_t i = 0; i < dry->request->dry.breaker_count; i++) {
        const struct engine_stop *breaker = &dry->request->dry.breakers[i];
        const size_t from = before + 1 > breaker->size ? before + 1 - breaker->size : 0;
        if (memmem(joint + from, size - from, breaker->text, breaker->size)) return true;
    }
    return false;
}

static void note_token(struct dry *dry, int32_t token) {
    const char *bytes = "";
    char joint[2 * ENGINE_BREAKER_MAX];
    const size_t size = dry->token_bytes(dry->arg, token, &bytes), before = dry->tail_size;
    const size_t front = size < ENGINE_BREAKER_MAX ? size : ENGINE_BREAKER_MAX;
    memcpy(joint, dry->tail, before);
    if (front) memcpy(joint + before, bytes, front);
    if (has_breaker(dry, bytes, size) || ends_breaker(dry, joint, before, before + front))
        dry->begins = dry->known + 1;
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

static int by_token_and_length(const void *a, const void *b) {
    const struct kern_logit_bias *x = a, *y = b;
    if (x->token != y->token) return x->token < y->token ? -1 : 1;
    return x->bias > y->bias ? -1 : x->bias < y->bias;
}

static float penalty_of(const struct engine_dry *r, int32_t length) {
    const double base = (double)r->base;
    int32_t exponent = length - r->allowed;
    const int32_t most = base > 1.000001 ? (int32_t)(FLOAT_LOG_MAX / log(base)) : INT32_MAX;
    if (exponent > most) exponent = most;
    const double penalty = (double)r->multiplier * pow(base, exponent);
    return penalty < 3e38 ? (float)penalty : 3e38f;
}

/* Turns the lengths of the tokens that would repeat into a bias for each of them. */
static int32_t penalise(const struct dry *dry, struct kern_logit_bias *list, int32_t count) {
    int32_t kept = 0;
    if (count) qsort(list, (size_t)count, sizeof *list, by_token_and_length);
    for (int32_t i = 0; i < count; i++) {
        const char *bytes = "";
        const struct kern_logit_bias longest = list[i];
        while (i + 1 < count && list[i + 1].token == longest.token) i++;
        const size_t size = dry->token_bytes(dry->arg, longest.token, &bytes);
        if (has_breaker(dry, bytes, size)) continue;
        list[kept++] = (struct kern_logit_bias){
            longest.token, -penalty_of(&dry->request->dry, (int32_t)longest.bias)};
    }
    return kept;
}

const struct kern_logit_bias *dry_biases(struct dry *dry, const int32_t *tokens, int32_t count,
                                         int32_t *bias_count) {
    const struct engine_dry *r = &dry->request->dry;
    const int32_t fixed = dry->request->bias_count;
    const int32_t n = count < dry->window ? count : dry->window;
    int32_t found = 0;
    /* A breaker before the window has no effect; the tail may miss its beginning there. */
    if (dry->known < count - n) dry->known = count - n;
    while (dry->known < count) note_token(dry, tokens[dry->known]);
    const int32_t free_of_breakers = count - dry->begins < n ? count - dry->begins : n;
    *bias_count = fixed;
    if (n <= r->allowed || free_of_breakers < r->allowed) return dry->bias;
    find_lengths(dry->lengths, tokens, count, n);
    for (int32_t k = 1; k < n; k++) {
        const int32_t length =
            dry->lengths[k] < free_of_breakers ? dry->lengths[k] : free_of_breakers;
        if (length < r->allowed) continue;
        dry->bias[fixed + found++] = (struct kern_logit_bias){tokens[count - k], (float)length};
    }
    *bias_count = fixed + penalise(dry, dry->bias + fixed, found);
    return dry->bias;
}
