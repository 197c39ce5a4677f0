/* Derivatives of expressions: bytes that are said to be alike have the same derivative, and a byte
 * that an expression does not tell from others is derived once. Near expressions agree with the
 * others for as many bytes as they should, and derivatives by characters with those by bytes. */
#include "constrain/node.h"

#include <criterion/criterion.h>
#include <string.h>

#include "constrain/regex.h"

#define DEPTH 3 /* derivatives of derivatives that are compared */

static uint32_t compile(struct node_pool *pool, const char *text) {
    struct fault fault = {0};
    uint32_t node = NODE_NONE;
    cr_assert_eq(regex_compile(pool, text, strlen(text), REGEX_WHOLE, &node, &fault), 0);
    return node;
}

/* Returns the number of derivatives that differ by what is alike. */
static int compare(struct node_pool *pool, uint32_t node, int depth) {
    uint32_t next[256];
    struct byte_set alike[256];
    int groups = 0;
    node_classes(pool);
    for (int i = 0; i < pool->classes; i++) {
        pool->alike = byte_set_all();
        next[i] = node_derive(pool, node, i);
        alike[i] = pool->alike;
        cr_assert(byte_set_has(&alike[i], pool->example[i]));
    }
    for (int i = 0; i < pool->classes; i++) {
        bool first = true;
        for (int k = 0; k < pool->classes; k++) {
            if (!byte_set_has(&alike[i], pool->example[k])) continue;
            cr_assert_eq(next[i], next[k], "node %u, classes %d and %d", node, i, k);
            first = first && k >= i;
        }
        groups += first;
        if (depth > 0 && next[i] > NODE_ALL) compare(pool, next[i], depth - 1);
    }
    cr_assert_eq(pool->rc, 0);
    return groups;
}

Test(node, bytes_that_are_alike_have_one_derivative) {
    static const char *const texts[] = {"[a-c]x|(?!ab)[a-z]{2,5}|é+z?",
                                        "(?=.*[0-9])(?=.*[a-f]).{3,9}!", "(a|bc|d.*)*(?!e)[^q]",
                                        "(x?y?z?){2,3}(foo|bar|baz)"};
    struct node_pool pool;
    cr_assert(node_pool_open(&pool, CONSTRAIN_NODES_MAX));
    uint32_t digits = node_repeat(&pool, node_range(&pool, '0', '9'), 1, 9);
    uint32_t some = node_alt2(&pool, digits, node_range(&pool, '+', '.'));
    compare(&pool, node_and2(&pool, some, node_mod(&pool, 7, 0)), DEPTH);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        compare(&pool, compile(&pool, texts[i]), DEPTH);
    node_pool_close(&pool);
}

Test(node, what_others_tell_apart_is_derived_once) {
    struct node_pool pool;
    cr_assert(node_pool_open(&pool, CONSTRAIN_NODES_MAX));
    uint32_t letters = compile(&pool, "[a-z]{3,60}");
    uint32_t words = compile(&pool, "the|quick|brown|fox|jumps|over|a|lazy|dog");
    node_classes(&pool);
    cr_assert_gt(pool.classes, 26);
    cr_assert_eq(compare(&pool, letters, 0), 2);
    cr_assert_eq(compare(&pool, words, 0), 10, "nine first letters, and all other bytes");
    node_pool_close(&pool);
}

/* Both accept the same texts of at most `bytes` more bytes, and can continue the same. */
static void compare_near(struct node_pool *pool, uint32_t node, uint32_t near, int bytes) {
    cr_assert_eq(node_at(pool, node)->nullable, node_at(pool, near)->nullable);
    cr_assert_eq(node_live(pool, node) == NODE_NONE, node_live(pool, near) == NODE_NONE);
    if (bytes == 0 || node == near) return;
    for (int i = 0; i < pool->classes; i++)
        compare_near(pool, node_derive(pool, node, i), node_derive(pool, near, i), bytes - 1);
    cr_assert_eq(pool->rc, 0);
}

Test(node, what_is_near_agrees_as_far_as_a_token_sees) {
    static const char *const texts[] = {"a{2,9}b{3}",          "(ab?){0,7}(c|d{5,6}a)",
                                        "(?=.{2,5}$)a*b{1,4}", "(a{3}|b){2,}aab",
                                        "(?!aab)[ab]{1,30}",   "a(b(a(b(a(b(a)?)?)?)?)?)?",
                                        "(aaaa|bb){2,3}b?",    "(a?b?){0,4}(?=a)a{1,2}b"};
    struct node_pool pool;
    int smaller = 0;
    cr_assert(node_pool_open(&pool, CONSTRAIN_NODES_MAX));
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        uint32_t node = compile(&pool, texts[i]);
        for (uint32_t bytes = 0; bytes <= 4; bytes++) {
            node_classes(&pool);
            uint32_t near = node_near(&pool, node, bytes);
            smaller += near != node;
            compare_near(&pool, node, near, (int)bytes);
        }
    }
    cr_assert_gt(smaller, 20);
    cr_assert_eq(node_near(&pool, compile(&pool, "x{1,60}y"), 8),
                 node_near(&pool, compile(&pool, "x{1,59}y"), 8));
    node_pool_close(&pool);
}

static uint32_t derive_text(struct node_pool *pool, uint32_t node, const char *text) {
    for (; *text != '\0'; text++)
        node = node_derive(pool, node, pool->class_of[(unsigned char)*text]);
    return node;
}

Test(node, plain_characters_lead_to_one_derivative) {
    static const struct {
        const char *text;
        bool differs;
    } cases[] = {{".{3,60}x?", true},
                 {"[^\"\\\\]{3,60}\"", false},
                 {"\"|\\n", false},
                 {"[a-z]{2}", true},
                 {"(?=[^\"]{2,}$)[^\"\\\\]{0,4}", false},
                 {"(\"?[^\"]){2,3}", false},
                 {"é[^\"]{2}", true}};
    static const char *const characters[] = {"a", " ", "~", "é", "\u0800", "日", "\U0001F600"};
    struct node_pool pool;
    cr_assert(node_pool_open(&pool, CONSTRAIN_NODES_MAX));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t node = compile(&pool, cases[i].text);
        node_classes(&pool);
        uint32_t plain = node_plain(&pool, node);
        cr_assert_eq(plain == NODE_DIFFERS, cases[i].differs, "%s", cases[i].text);
        for (size_t k = 0; k < sizeof characters / sizeof *characters && !cases[i].differs; k++)
            cr_assert_eq(derive_text(&pool, node, characters[k]), plain, "%s by %s", cases[i].text,
                         characters[k]);
    }
    cr_assert_eq(pool.rc, 0);
    node_pool_close(&pool);
}
