/* Texts of clients that mean to be expensive: each is compiled, or refused, in work that grows with
 * its size and not with its square; and the memory of all languages together has a limit. Times are
 * those of the processor, so a busy machine changes nothing; each case took minutes when pairs of
 * its parts were compared. */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "language.h"

#define SECONDS_MAX 20.0 /* with sanitizers; about a tenth without */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* before, `count` times the piece with its number in place of both '%d', after. */
struct text {
    const char *before, *piece, *between;
    int count;
};

static void write_list(struct buf *out, const struct text *text) {
    buf_str(out, text->before);
    for (int i = 0; i < text->count; i++) {
        if (i > 0) buf_str(out, text->between);
        for (const char *at = text->piece; *at != '\0'; at++) {
            if (*at == '#')
                buf_fmt(out, "%d", i);
            else
                buf_char(out, *at);
        }
    }
}

struct hostile {
    const char *name;
    struct text texts[3];
    const char *after;
    int rc;
    const char *good, *bad;
};

static const struct hostile hostile[] = {
    {"values in a schema of strings",
     {{"{\"type\":\"string\",\"minLength\":1,\"enum\":[", "\"value #\"", ",", 100000}},
     "]}",
     0,
     "\"value 99999\"",
     "\"value 100000\""},
    {"values that two schemas give",
     {{"{\"enum\":[", "\"v#\"", ",", 100000}, {"],\"allOf\":[{\"enum\":[", "\"v1#\"", ",", 100000}},
     "]}]}",
     0,
     "\"v11\"",
     "\"v2\""},
    {"values that are numbers with bounds",
     {{"{\"minimum\":5,\"enum\":[", "#", ",", 100000}},
     "]}",
     0,
     "7777",
     "4"},
    {"branches that values tell apart",
     {{"{\"oneOf\":[{\"enum\":[", "\"a#\"", ",", 50000}, {"]},{\"enum\":[", "\"b#\"", ",", 50000}},
     "]}]}",
     0,
     "\"b49999\"",
     "\"c0\""},
    {"elements",
     {{"{\"type\":\"array\",\"prefixItems\":[", "{\"const\":1}", ",", 150000}},
     "]}",
     ERR_LIMIT,
     NULL,
     NULL},
    {"references by a pointer",
     {{"{\"$defs\":{", "\"d#\":{\"type\":\"null\"}", ",", 40000},
      {"},\"prefixItems\":[", "{\"$ref\":\"\\u0023/$defs/d0\"}", ",", 1},
      {"", ",{\"$ref\":\"\\u0023/$defs/d#\"}", "", 40000}},
     "]}",
     0,
     "[null,null]",
     "[1]"},
    {"references by a name",
     {{"{\"$defs\":{", "\"d#\":{\"$id\":\"x#\",\"type\":\"null\"}", ",", 40000},
      {"},\"prefixItems\":[", "{\"$ref\":\"x#\"}", ",", 40000}},
     "]}",
     0,
     "[null,null]",
     "[1]"},
    {"members that are not keywords, in a schema of many alternatives",
     {{"{", "\"x#\":1", ",", 100000}, {",\"anyOf\":[", "{\"type\":\"null\"}", ",", 4000}},
     "]}",
     ERR_LIMIT,
     NULL,
     NULL},
    {"values that are objects, in a schema of many members",
     {{"{\"enum\":[", "{}", ",", 40000}, {"],", "\"a#\":0", ",", 40000}},
     "}",
     0,
     "{}",
     "[]"},
    {"branches that share a schema of many members",
     {{"{\"$defs\":{\"d\":{", "\"a#\":0", ",", 20000},
      {"}},\"oneOf\":[",
       "{\"type\":\"object\",\"properties\":{\"x\":{\"$ref\":\"\\u0023/$defs/d\"},\"k\":"
       "{\"const\":#}},\"required\":[\"x\",\"k\"]}",
       ",", 200}},
     "]}",
     ERR_LIMIT,
     NULL,
     NULL},
    {"schemas that apply at once, in each alternative",
     {{"{\"allOf\":[", "{\"title\":\"#\"}", ",", 4000},
      {"],\"anyOf\":[", "{\"title\":\"a#\"}", ",", 4000}},
     "]}",
     ERR_LIMIT,
     NULL,
     NULL},
};

Test(hostile, schemas_cost_no_more_than_their_limit) {
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        const struct hostile *h = &hostile[i];
        struct buf text;
        buf_open(&text, 1 << 24);
        for (int k = 0; k < 3 && h->texts[k].before != NULL; k++) write_list(&text, &h->texts[k]);
        buf_str(&text, h->after);
        double begin = seconds();
        struct language l = language_schema(text.data);
        double spent = seconds() - begin;
        cr_assert_eq(l.rc, h->rc, "%s: %d %s: %s", h->name, l.rc, l.fault.field, l.fault.text);
        cr_assert_lt(spent, SECONDS_MAX, "%s: %.1f s", h->name, spent);
        if (h->good != NULL) cr_assert(language_holds(&l, h->good), "%s: %s", h->name, h->good);
        if (h->bad != NULL) cr_assert_not(language_holds(&l, h->bad), "%s: %s", h->name, h->bad);
        language_close(&l);
        buf_close(&text);
    }
}

#define ALIKE_NAMES 4000

/* Writes names whose hashes (FNV-1a) agree in the bits that choose their place in a table. */
static void write_alike_names(struct buf *text) {
    int found = 0;
    for (int i = 0; found < ALIKE_NAMES; i++) {
        char name[24];
        uint32_t hash = 2166136261u;
        int size = snprintf(name, sizeof name, "%d", i);
        for (int k = 0; k < size; k++) hash = (hash ^ (unsigned char)name[k]) * 16777619u;
        for (int last = 'A'; last <= 'Z' && found < ALIKE_NAMES; last++) {
            uint32_t full = (hash ^ (unsigned)last) * 16777619u;
            if (((full ^ full >> 15) & 8191) != 0) continue;
            buf_fmt(text, "%s\"%s%c\":{}", found++ > 0 ? "," : "", name, last);
        }
    }
}

Test(hostile, names_with_one_place_in_a_table_count_as_work) {
    struct buf text;
    buf_open(&text, 1 << 20);
    buf_str(&text, "{\"$defs\":{");
    write_alike_names(&text);
    buf_str(&text, "},\"$ref\":\"#/$defs/none\"}");
    struct language l = language_schema(text.data);
    cr_assert_eq(l.rc, ERR_LIMIT, "%d %s", l.rc, l.fault.text);
    language_close(&l);
    buf_close(&text);
}

/* The exponent lies below the smallest long; a build with sanitizers finds an overflow. */
Test(hostile, exponents_have_no_overflow) {
    struct language l = language_schema("{\"enum\":[0.1e-99999999999999999999]}");
    cr_assert(l.rc == 0 || l.rc == ERR_INVALID, "%d %s", l.rc, l.fault.text);
    language_close(&l);
}

/* Each class is another set of bytes. */
Test(hostile, expressions_of_many_classes_cost_no_more_than_their_limit) {
    struct buf text;
    buf_open(&text, 1 << 22);
    for (int i = 0; i < 200000; i++)
        buf_fmt(&text, "[%c%c%c]", 'a' + i % 26, 'a' + i / 26 % 26, 'A' + i / 676 % 26);
    double begin = seconds();
    struct language l = language_text(CONSTRAIN_REGEX, text.data);
    double spent = seconds() - begin;
    cr_assert(l.rc == 0 || l.rc == ERR_LIMIT, "%d %s", l.rc, l.fault.text);
    cr_assert_lt(spent, SECONDS_MAX, "%.1f s", spent);
    language_close(&l);
    buf_close(&text);
}

/* A repetition that costs more than its few bytes may. The same with a long description, which a
 * client pays for by its bytes, compiles. */
Test(hostile, a_short_text_may_not_cost_much) {
    for (int length = 0; length <= 8000; length += 8000) {
        struct buf text;
        buf_open(&text, 1 << 20);
        buf_str(&text, "{\"type\":\"string\",\"pattern\":\"^([a-z][0-9])+$\",\"minLength\":10000,"
                       "\"description\":\"");
        for (int i = 0; i < length; i++) buf_char(&text, 'x');
        buf_str(&text, "\"}");
        struct language l = language_schema(text.data);
        cr_assert_eq(l.rc, length > 0 ? 0 : ERR_LIMIT, "%d %s", l.rc, l.fault.text);
        if (length == 0) {
            cr_assert_str_eq(l.fault.field, "f");
            cr_assert_not_null(
                strstr(l.fault.text, "more work than a text of its length may cost"));
        }
        language_close(&l);
        buf_close(&text);
    }
}

/* ---- Memory ---- */

static int open_one(const struct constrain_tokens *tokens, struct constrain_budget *budget,
                    const char *pattern, struct constrain **out, struct fault *fault) {
    const struct constrain_part part = {
        .kind = CONSTRAIN_REGEX, .field = "f", .text = pattern, .size = strlen(pattern)};
    return constrain_open(&part, tokens, budget, out, fault);
}

/* The part that is set aside for a compilation is there once and not twice; closing gives all back.
 */
Test(hostile, languages_share_a_budget) {
    const struct constrain_vocabulary v = {LANGUAGE_TOKENS, language_bytes, NULL};
    struct constrain_budget budget = {.limit = CONSTRAIN_COMPILE_BYTES + (1 << 20)};
    struct constrain_tokens *tokens;
    struct constrain *list[64];
    struct fault fault = {0};
    int count = 0, rc = 0;
    cr_assert_eq(constrain_tokens_open(&v, &tokens), 0);
    while (count < 64 && rc == 0) {
        rc = open_one(tokens, &budget, "a+b?", &list[count], &fault);
        count += rc == 0;
    }
    cr_assert_eq(rc, ERR_FULL);
    cr_assert(count > 0 && count < 64, "%d", count);
    cr_assert_not_null(strstr(fault.text, "of all requests"), "%s", fault.text);
    while (count > 0) constrain_close(list[--count]);
    cr_assert_eq(budget.used, 0);
    cr_assert_eq(open_one(tokens, &budget, "a+b?", &list[0], &fault), 0);
    constrain_close(list[0]);
    constrain_tokens_close(tokens);
}

/* An answer goes on from its place where its language had to forget what it learned. */
Test(hostile, a_language_over_the_budget_forgets_and_goes_on) {
    const struct constrain_vocabulary v = {LANGUAGE_TOKENS, language_bytes, NULL};
    struct constrain_budget budget = {.limit = CONSTRAIN_COMPILE_BYTES + (1 << 20)};
    struct constrain_tokens *tokens;
    struct constrain *c;
    struct fault fault = {0};
    cr_assert_eq(constrain_tokens_open(&v, &tokens), 0);
    cr_assert_eq(open_one(tokens, &budget, "a{0,5000}", &c, &fault), 0, "%s", fault.text);
    size_t compiled = budget.used, most = 0;
    budget.limit = 0; /* others hold all of it: everything learned is too much */
    struct constrain_at at = {0};
    struct constrain_next next;
    uint32_t mask[(LANGUAGE_TOKENS + 31) / 32];
    char text[2000];
    for (size_t size = 0; size < sizeof text; size++) {
        struct constrain_effort effort = {CONSTRAIN_MASK_WORK_MAX, true};
        cr_assert_eq(constrain_next_within(c, &at, text, size, mask, &next, &effort), 0);
        cr_assert_lt(effort.work, 400, "the text is not read again: %" PRIu64, effort.work);
        cr_assert(mask['a' / 32] >> ('a' % 32) & 1);
        if (budget.used > most) most = budget.used;
        text[size] = 'a';
    }
    cr_assert_leq(most, compiled + 65536, "%zu after %zu", most, compiled);
    constrain_close(c);
    cr_assert_eq(budget.used, 0);
    constrain_tokens_close(tokens);
}

/* ---- U+0000 ---- */

/* A name with U+0000 is the schema's own, and no other member may have it. */
Test(hostile, names_may_hold_u_0000) {
    struct language l =
        language_schema("{\"type\":\"object\",\"properties\":{\"a\\u0000\":{\"type\":"
                        "\"integer\"}},\"patternProperties\":{\"^b\\u0000$\":{"
                        "\"type\":\"null\"}},\"additionalProperties\":true}");
    cr_assert_eq(l.rc, 0, "%s: %s", l.fault.field, l.fault.text);
    cr_assert(language_holds(&l, "{\"a\\u0000\":1}") && language_holds(&l, "{\"b\\u0000\":null}"));
    cr_assert(language_holds(&l, "{\"a\":true}") && language_holds(&l, "{\"b\":true}"));
    cr_assert_not(language_holds(&l, "{\"a\\u0000\":true}"));
    cr_assert_not(language_holds(&l, "{\"b\\u0000\":1}"));
    language_close(&l);
}
