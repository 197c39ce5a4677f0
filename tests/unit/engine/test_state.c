/* Tests engine/disk/state.c: written files are read back, and all others are rejected. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/disk/state.h"
#include "engine/kept/conversation.h"

enum { TOKENS = 9, BLOCKS = 3 };

static const uint8_t key[SHA256_BYTES] = "thirty-two bytes of a secret key";
static const uint8_t other_key[SHA256_BYTES] = "thirty-two bytes of another key";

struct file {
    char *data;
    size_t size;
    struct state_head head;
    int32_t tokens[TOKENS];
};

static struct kv_params kv_of(const char *policy, int budget) {
    struct kv_params kv = {.budget = budget, .buffer = 8, .chunk = 16};
    kv_params_set_policy(&kv, policy_find(policy));
    return kv;
}

static void seal(struct file *f) {
    state_seal(f->data, f->size, key);
}

static struct file make_file(void) {
    static const uint64_t sizes[BLOCKS] = {5, 0, 11};
    struct file f = {.head = {.identity = {.weights = "weights",
                                           .gates = "gates",
                                           .dtype = KERN_BF16,
                                           .layers = 2,
                                           .heads_kv = 1,
                                           .head_dim = 64},
                              .id = 0x0123456789abcdefu,
                              .space = "a space",
                              .client = 99,
                              .hint = 77,
                              .saved_unix = 1700000000,
                              .ttl = 3600,
                              .kv = kv_of("global", 32),
                              .token_count = TOKENS,
                              .prompt_end = 6,
                              .evicted_at = 5,
                              .fresh = true,
                              .block_count = BLOCKS}};
    for (int i = 0; i < TOKENS; i++) f.tokens[i] = 100 + i * i;
    f.head.prompt_hash = conversation_hash(CONVERSATION_HASH, f.tokens, 6);
    f.head.token_hash = conversation_hash(CONVERSATION_HASH, f.tokens, TOKENS);
    f.size = state_file_size(TOKENS, BLOCKS, 16);
    f.head.file_size = f.size;
    f.data = mem_must_alloc(f.size, 1);
    size_t at = state_write_head(&f.head, f.tokens, sizes, f.data);
    cr_assert_eq(at + 16 + STATE_SEAL_BYTES, f.size);
    memcpy(f.data + at, "abcdeABCDEFGHIJK", 16);
    seal(&f);
    return f;
}

static void expect_seal(const struct file *f, const uint8_t *with, int rc, const char *says) {
    struct fault fault = {0};
    cr_assert_eq(state_check_seal(f->data, f->size, with, &fault), rc);
    if (rc != 0) cr_assert_not_null(strstr(fault.text, says), "'%s'", fault.text);
}

Test(state, comes_back) {
    struct file f = make_file();
    struct state_view view;
    struct fault fault = {0};
    expect_seal(&f, key, 0, "");
    cr_assert_eq(state_parse(f.data, f.size, &view, &fault), 0, "%s", fault.text);
    const struct state_head *h = &view.head;
    cr_assert(h->id == f.head.id && h->hint == 77 && h->saved_unix == 1700000000);
    cr_assert(h->ttl == 3600 && h->client == 99);
    cr_assert(h->token_count == TOKENS && h->prompt_end == 6 && h->block_count == BLOCKS);
    cr_assert(h->evicted_at == 5 && h->fresh);
    cr_assert_eq(memcmp(h->space, f.head.space, sizeof h->space), 0);
    cr_assert(state_is_ours(h, &f.head.identity) && kv_params_equal(&h->kv, &f.head.kv));
    cr_assert_eq(memcmp(view.tokens, f.tokens, sizeof f.tokens), 0);
    cr_assert(view.blocks[0].size == 5 && memcmp(view.blocks[0].data, "abcde", 5) == 0);
    cr_assert(view.blocks[1].size == 0 && view.blocks[2].size == 11);
    cr_assert_eq(memcmp(view.blocks[2].data, "ABCDEFGHIJK", 11), 0);
    state_view_close(&view);
    mem_free(f.data);
}

Test(state, any_other_identity_is_not_ours) {
    struct file f = make_file();
    struct state_identity i = f.head.identity;
    i.weights[31] ^= 1;
    cr_assert_not(state_is_ours(&f.head, &i));
    i = f.head.identity;
    i.gates[0] ^= 1;
    cr_assert_not(state_is_ours(&f.head, &i));
    for (int n = 0; n < 4; n++) {
        i = f.head.identity;
        *(n == 0 ? &i.dtype : n == 1 ? &i.layers : n == 2 ? &i.heads_kv : &i.head_dim) += 1;
        cr_assert_not(state_is_ours(&f.head, &i));
    }
    mem_free(f.data);
}

/* Truncated at every byte: the checksum fails, and the parser alone also detects it. */
/* Copies of one conversation have one name, wherever and whenever they were made; anything else
 * that a continuation depends on gives another. */
Test(state, the_name_follows_from_what_the_conversation_is) {
    struct file f = make_file();
    struct state_head same = f.head;
    const struct state_head h = f.head;
    same.id = 1;
    same.hint = 2;
    same.client = 8;
    same.saved_unix = 3;
    same.ttl = 7;
    same.file_size = 4;
    same.block_count = 5;
    same.evicted_at = 6;
    same.fresh = false;
    cr_assert_eq(state_name(&same), state_name(&h));
    struct state_head others[11];
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) others[i] = h;
    others[0].identity.weights[0]++;
    others[1].identity.gates[31]++;
    others[2].identity.dtype++;
    others[3].space[15]++;
    others[4].kv = kv_of("global", 33);
    others[5].kv = kv_of("streaming", 32);
    others[6].token_count++;
    others[7].prompt_end--;
    others[8].prompt_hash++;
    others[9].token_hash++;
    others[10].kv.rule.recent++;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_assert_neq(state_name(&others[i]), state_name(&h), "%zu", i);
    mem_free(f.data);
}

Test(state, a_torn_file_is_refused_at_every_length) {
    struct file f = make_file();
    for (size_t size = 0; size < f.size; size++) {
        struct file torn = f;
        struct state_view view;
        struct fault fault = {0};
        torn.data = mem_must_alloc(size > 0 ? size : 1, 1); /* overruns are seen */
        torn.size = size;
        memcpy(torn.data, f.data, size);
        expect_seal(&torn, key, ERR_MALFORMED, "torn");
        cr_assert_eq(state_parse(torn.data, size, &view, &fault), ERR_MALFORMED);
        cr_assert_eq(fault.code, ERR_MALFORMED);
        mem_free(torn.data);
    }
    mem_free(f.data);
}

/* Every bit flipped: the checksum fails, and the parser alone never reads beyond the file. */
Test(state, a_flipped_bit_is_refused) {
    struct file f = make_file();
    for (size_t bit = 0; bit < f.size * 8; bit++) {
        struct state_view view;
        struct fault fault = {0};
        f.data[bit / 8] = (char)(f.data[bit / 8] ^ 1 << bit % 8);
        bool in_mac = bit / 8 >= f.size - SHA256_BYTES;
        expect_seal(&f, key, in_mac ? ERR_INVALID : ERR_MALFORMED, in_mac ? "forged" : "checksum");
        if (state_parse(f.data, f.size, &view, &fault) == 0) state_view_close(&view);
        f.data[bit / 8] = (char)(f.data[bit / 8] ^ 1 << bit % 8);
    }
    expect_seal(&f, key, 0, "");
    mem_free(f.data);
}

Test(state, a_forged_file_is_refused) {
    struct file f = make_file();
    expect_seal(&f, other_key, ERR_INVALID, "another key");
    state_seal(f.data, f.size, other_key); /* complete, but written without the key */
    expect_seal(&f, key, ERR_INVALID, "forged");
    mem_free(f.data);
}

/* Another content, its checksum, and the signature of what was there before: anybody who can write
 * to the directory can make this. */
Test(state, a_signature_belongs_to_one_content) {
    struct file f = make_file();
    char mac[SHA256_BYTES];
    char *own = f.data + f.size - SHA256_BYTES;
    memcpy(mac, own, sizeof mac);
    f.data[f.size - STATE_SEAL_BYTES - 1] ^= 1;
    seal(&f);
    expect_seal(&f, key, 0, "");
    memcpy(own, mac, sizeof mac);
    expect_seal(&f, key, ERR_INVALID, "forged");
    mem_free(f.data);
}

static void put(struct file *f, size_t at, const void *value, size_t size) {
    memcpy(f->data + at, value, size);
}

static void expect_parse(const struct file *f, int rc, const char *what) {
    struct state_view view;
    struct fault fault = {0};
    int found = state_parse(f->data, f->size, &view, &fault);
    cr_assert_eq(found, rc, "%s: %d '%s'", what, found, fault.text);
    cr_assert(fault.code == rc && !view.blocks);
}

/* The sum of all sizes wraps around to the right one. */
Test(state, blocks_that_wrap_around_are_refused) {
    static const uint64_t sizes[] = {5 + (1ull << 63), 1ull << 63};
    struct file f = make_file();
    for (size_t i = 0; i < 2; i++) put(&f, 256 + 36 + 8 * i, &sizes[i], sizeof sizes[i]);
    seal(&f);
    expect_parse(&f, ERR_MALFORMED, "sizes");
    mem_free(f.data);
}

/* The hashes agree, as a forger with the key would write them. */
Test(state, a_negative_token_is_refused) {
    struct file f = make_file();
    int32_t token = -7;
    f.tokens[2] = token;
    uint64_t hashes[2] = {conversation_hash(CONVERSATION_HASH, f.tokens, 6),
                          conversation_hash(CONVERSATION_HASH, f.tokens, TOKENS)};
    f.head.prompt_hash = hashes[0];
    f.head.token_hash = hashes[1];
    static const uint64_t sizes[BLOCKS] = {5, 0, 11};
    (void)state_write_head(&f.head, f.tokens, sizes, f.data);
    seal(&f);
    expect_parse(&f, ERR_MALFORMED, "token");
    mem_free(f.data);
}

/* Extreme sizes and counts in a file with a valid seal: the checks do not rely on the seal. */
Test(state, forged_numbers_are_refused) {
    static const int64_t evil[] = {-1, INT32_MIN, INT32_MAX,        INT64_MAX, INT64_MIN,
                                   0,  1LL << 32, (1LL << 62) + 10, 1 << 30,   (1 << 30) + 1};
    static const struct {
        size_t at, size;
        const char *what;
    } fields[] = {{12, 4, "block_count"}, {16, 8, "file_size"},    {200, 4, "token_count"},
                  {204, 4, "prompt_end"}, {256 + 36, 8, "size 0"}, {256 + 44, 8, "size 1"},
                  {256 + 52, 8, "size 2"}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        for (size_t k = 0; k < sizeof evil / sizeof *evil; k++) {
            struct file f = make_file();
            bool harmless = evil[k] == 0 && fields[i].at == 256 + 44; /* the field is 0 anyway */
            put(&f, fields[i].at, &evil[k], fields[i].size);
            seal(&f);
            if (!harmless) expect_parse(&f, ERR_MALFORMED, fields[i].what);
            mem_free(f.data);
        }
}

Test(state, other_versions_and_policies_are_named) {
    struct file f = make_file();
    int32_t four = 4, two = 2, zero = 0, negative = -5;
    struct fault fault = {0};
    struct state_head head;
    put(&f, 8, &four, 4);
    cr_assert_eq(state_parse_head(f.data, f.size, &head, &fault), ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(fault.text, "version 4"));
    mem_free(f.data);
    f = make_file();
    put(&f, 144, "lottery", 8);
    cr_assert_eq(state_parse_head(f.data, f.size, &head, &fault), ERR_UNSUPPORTED);
    cr_assert_not_null(strstr(fault.text, "lottery"));
    mem_free(f.data);
    f = make_file();
    put(&f, 144, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", 32); /* no NUL */
    cr_assert_eq(state_parse_head(f.data, f.size, &head, &fault), ERR_UNSUPPORTED);
    mem_free(f.data);
    f = make_file();
    put(&f, 256, &negative, 4);
    expect_parse(&f, ERR_MALFORMED, "a negative token");
    mem_free(f.data);
    f = make_file();
    put(&f, 255, "x", 1);
    expect_parse(&f, ERR_MALFORMED, "its last eviction");
    put(&f, 8, &two, 4);
    expect_parse(&f, ERR_MALFORMED, "reserved");
    put(&f, 252, &zero, 4); /* the version before knew nothing of evictions */
    cr_assert_eq(state_parse_head(f.data, f.size, &head, &fault), 0);
    cr_assert(head.evicted_at == head.token_count && !head.fresh);
    mem_free(f.data);
}

Test(state, sizes_overflow_to_nothing) {
    cr_assert_eq(state_file_size(0, 1, 1), 0);
    cr_assert_eq(state_file_size(-1, 1, 1), 0);
    cr_assert_eq(state_file_size(1, 0, 1), 0);
    cr_assert_eq(state_file_size(INT32_MAX, 1, 1), 0);
    cr_assert_eq(state_file_size(1, INT32_MAX, 1), 0);
    cr_assert_eq(state_file_size(1, 1, SIZE_MAX), 0);
    cr_assert_eq(state_file_size(1, 1, SIZE_MAX - 300), 0);
    cr_assert_eq(state_file_size(1, 1, 1), 256 + 4 + 8 + 1 + STATE_SEAL_BYTES);
}

Test(state, no_memory_is_no_damage) {
    struct file f = make_file();
    struct state_view view;
    struct fault fault = {0};
    mem_fail_after(0);
    cr_assert_eq(state_parse(f.data, f.size, &view, &fault), ERR_NOMEM);
    mem_fail_after(-1);
    mem_free(f.data);
}

/* Every bounded policy's parameters come back equal; what a file cannot hold is not written. */
Test(state, holds_every_bounded_policy) {
    for (int i = 0; policy_at(i); i++) {
        struct kv_params kv = kv_of(policy_at(i)->name, 256);
        cr_assert_eq(state_holds(&kv), policy_at(i)->bounded, "%s", policy_at(i)->name);
    }
}

/* Through a whole file, for all parameters of a request. */
Test(state, what_was_chosen_comes_back) {
    static const struct {
        const char *policy, *name, *text;
        double number;
    } cases[] = {{"global", "horizon", NULL, INFINITY},
                 {"global", "floor", NULL, 0.3},
                 {"trimkv", "threshold", NULL, 0.8},
                 {"trimkv", "parity", NULL, 1},
                 {"gkv", "history", "sum", 0},
                 {"gkv", "decay", NULL, 0},
                 {"gkv", "lambda", NULL, 0.07},
                 {"rkv", "variant", "paper", 0},
                 {"rkv", "parity", NULL, 1},
                 {"snapkv", "window", NULL, 64},
                 {"d2o", "merge", "code", 0},
                 {"d2o", "merge", "none", 0},
                 {"ems", "gamma", NULL, 1.5},
                 {"ems", "tau", NULL, 0},
                 {"ems", "positions", NULL, 0},
                 {"adakv", "floor", NULL, 0}};
    static const uint64_t sizes[BLOCKS] = {5, 0, 11};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct file f = make_file();
        struct state_head head;
        struct fault fault = {0};
        const struct kv_params plain = kv_of(cases[i].policy, 200);
        f.head.kv = plain;
        cr_assert_eq(
            kv_params_choose(&f.head.kv, cases[i].name, cases[i].number, cases[i].text, &fault), 0,
            "%s", fault.text);
        cr_assert(state_holds(&f.head.kv), "%s %s", cases[i].policy, cases[i].name);
        state_write_head(&f.head, f.tokens, sizes, f.data);
        cr_assert_eq(state_parse_head(f.data, f.size, &head, &fault), 0, "%s", fault.text);
        cr_assert(kv_params_equal(&head.kv, &f.head.kv), "%s %s", cases[i].policy, cases[i].name);
        cr_assert_not(kv_params_equal(&head.kv, &plain), "%s", cases[i].name);
        cr_assert_eq(head.kv.rule.merge_beta, f.head.kv.rule.merge_beta);
        mem_free(f.data);
    }
}

/* A file head forged with the right key: bits and values are checked like those of a request. */
Test(state, forged_choices_are_refused) {
    enum { CHOSEN = 196, VALUES = 224 };
    static const struct {
        uint32_t chosen;
        float values[2];
    } cases[] = {{POLICY_WINDOW, {8, 0}}, /* not global's */
                 {POLICY_FLOOR, {NAN, 0}},
                 {POLICY_FLOOR, {1.5f, 0}},
                 {POLICY_FLOOR, {0.5f, 1}}, /* one value too many */
                 {0, {1, 0}},
                 {POLICY_SINKS, {4, 0}},
                 {1u << 31, {0, 0}},
                 {POLICY_PARITY, {0.5f, 0}},
                 {POLICY_HORIZON, {-INFINITY, 0}},
                 {UINT32_MAX, {1, 1}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct file f = make_file();
        struct state_head head;
        struct fault fault = {0};
        put(&f, CHOSEN, &cases[i].chosen, 4);
        put(&f, VALUES, cases[i].values, sizeof cases[i].values);
        cr_assert_eq(state_parse_head(f.data, f.size, &head, &fault), ERR_INVALID, "%zu", i);
        cr_assert_eq(fault.code, ERR_INVALID);
        mem_free(f.data);
    }
}
