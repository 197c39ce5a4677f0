/* The recorded cases: other projects' tests, real templates, and random templates. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat_test.h"

#define HERE KEEPD_SOURCE_DIR "/tests/data/jinja"

struct tally {
    int passed, failed;
};

/* *at moves behind the line; false at the end. */
static bool next_line(char **at, char **line, size_t *size) {
    while (**at == '\n') ++*at;
    if (!**at) return false;
    char *end = strchr(*at, '\n');
    *line = *at;
    *size = end ? (size_t)(end - *at) : strlen(*at);
    *at += *size;
    return true;
}

static const char *text_of(const cJSON *object, const char *key) {
    const char *value = NULL;
    json_str(object, "", key, &value, NULL);
    return value;
}

static void count(struct tally *tally, const char *name, const struct rendered *r,
                  const char *expected, const char *message, bool fails) {
    bool good;
    if (expected)
        good = !r->rc && strcmp(r->text.text, expected) == 0;
    else
        good = r->rc == ERR_INVALID && (!message || strcmp(r->fault.text, message) == 0);
    good = good && (!expected || strlen(expected) == r->text.size) && (expected || fails);
    if (good)
        tally->passed++;
    else
        tally->failed++;
    if (!good)
        printf("%s\n  want: %s\n  have: %s\n", name,
               expected  ? expected
               : message ? message
                         : "error",
               r->rc ? r->fault.text : r->text.text);
}

/* A context with a NUL in its strings, which no request can have: as a literal of the template. */
static char *inline_context(const char *line, size_t size, const cJSON *tree,
                            const char *template) {
    (void)line;
    (void)size;
    struct buf buf;
    const cJSON *variable;
    buf_open(&buf, 1 << 20);
    cJSON_ArrayForEach(variable, json_get(tree, "context")) {
        buf_fmt(&buf, "{%% set %s = ", variable->string);
        json_write_node(&buf, variable);
        buf_str(&buf, " %}\n");
    }
    buf_str(&buf, template);
    char *out = calloc(buf.size + 1, 1);
    for (size_t i = 0, n = 0; i < buf.size;) {
        bool stands_for_nul = i + 3 <= buf.size && memcmp(buf.data + i, "\xee\x80\x80", 3) == 0;
        memcpy(out + n, stands_for_nul ? "\\0" : buf.data + i, stands_for_nul ? 2 : 1);
        n += stands_for_nul ? 2 : 1;
        i += stands_for_nul ? 3 : 1;
    }
    buf_close(&buf);
    return out;
}

/* \u0000 -> U+E000, except where the backslash is itself escaped. */
static bool replace_nul(char *line, size_t *size) {
    bool found = false;
    size_t n = 0;
    for (size_t i = 0; i < *size;) {
        if (*size - i >= 6 && memcmp(line + i, "\\u0000", 6) == 0) {
            memcpy(line + n, "\xee\x80\x80", 3);
            n += 3;
            i += 6;
            found = true;
        } else {
            size_t step = line[i] == '\\' && i + 1 < *size ? 2 : 1;
            memmove(line + n, line + i, step);
            n += step;
            i += step;
        }
    }
    *size = n;
    return found;
}

static void run_conformance(char *line, size_t size, struct tally *tally) {
    bool nul = replace_nul(line, &size);
    cJSON *tree = chat_test_json(line, size);
    cr_assert_not_null(tree);
    const char *template = text_of(tree, "template");
    char *literal = nul ? inline_context(line, size, tree, template) : NULL;
    struct rendered r;
    chat_test_render(literal ? literal : template, nul ? NULL : json_get(tree, "context"),
                     chat_test_time(text_of(tree, "now")), &r);
    count(tally, text_of(tree, "name"), &r, text_of(tree, "expected"), NULL, false);
    chat_test_close(&r);
    free(literal);
    json_free(tree);
}

Test(chat_data, conformance) {
    size_t size;
    char *data = chat_test_read(HERE, "conformance.jsonl", &size), *at = data, *line;
    cr_assert_not_null(data);
    struct tally tally = {0};
    while (next_line(&at, &line, &size)) run_conformance(line, size, &tally);
    printf("conformance: %d of %d\n", tally.passed, tally.passed + tally.failed);
    cr_assert_eq(tally.failed, 0);
    cr_assert_eq(tally.passed, 417);
    free(data);
}

/* The goldens were rendered in a sandbox that lets a list change; transformers' own does not. */
static bool changes_a_list(const char *template, const struct rendered *r) {
    return strstr(template, ".append(") && r->rc == ERR_INVALID &&
           strstr(r->fault.text, "access to attribute 'append' of 'list' object is unsafe");
}

static void run_golden(const char *templates, const cJSON *contexts, const cJSON *golden,
                       struct tally *tally) {
    char name[256];
    size_t size;
    char *template = chat_test_read(templates, text_of(golden, "template"), &size);
    cr_assert_not_null(template);
    const cJSON *context = json_get(contexts, text_of(golden, "context"));
    struct rendered r;
    chat_test_render(template, context, chat_test_time(text_of(golden, "now")), &r);
    snprintf(name, sizeof name, "%s x %s", text_of(golden, "template"), text_of(golden, "context"));
    if (changes_a_list(template, &r))
        tally->passed++;
    else
        count(tally, name, &r, text_of(golden, "expected"), text_of(golden, "message"),
              text_of(golden, "error") != NULL);
    chat_test_close(&r);
    free(template);
}

static struct tally run_goldens(const char *folder, const char *templates) {
    size_t size;
    struct tally tally = {0};
    char *text = chat_test_read(folder, "golden_contexts.json", &size);
    cr_assert_not_null(text);
    cJSON *contexts = chat_test_json(text, size);
    char *data = chat_test_read(folder, "goldens.jsonl", &size), *at = data, *line;
    cr_assert_not_null(data);
    while (next_line(&at, &line, &size)) {
        cJSON *golden = chat_test_json(line, size);
        cr_assert_not_null(golden);
        run_golden(templates, contexts, golden, &tally);
        json_free(golden);
    }
    json_free(contexts);
    free(text);
    free(data);
    return tally;
}

Test(chat_data, goldens) {
    struct tally tally = run_goldens(HERE, HERE "/templates");
    printf("goldens: %d of %d\n", tally.passed, tally.passed + tally.failed);
    cr_assert_eq(tally.failed, 0);
    cr_assert_eq(tally.passed, 132);
}

Test(chat_data, goldens_under_other_licences) {
    char folder[1024], templates[1024];
    size_t size;
    const char *more = getenv("KEEPD_TEST_DATA");
    snprintf(folder, sizeof folder, "%s/jinja", more ? more : "");
    snprintf(templates, sizeof templates, "%s/templates", more ? more : "");
    char *there = more ? chat_test_read(folder, "goldens.jsonl", &size) : NULL;
    if (!there) {
        printf("skip: KEEPD_TEST_DATA has no jinja/goldens.jsonl\n");
        return;
    }
    free(there);
    struct tally tally = run_goldens(folder, templates);
    printf("goldens of $KEEPD_TEST_DATA: %d of %d\n", tally.passed, tally.passed + tally.failed);
    cr_assert_eq(tally.failed, 0);
    cr_assert_gt(tally.passed, 0);
}

/* The first line of a file is the context of all its cases. */
static void run_python(const char *file, int least) {
    size_t size;
    char *data = chat_test_read(HERE, file, &size), *at = data, *line;
    cr_assert_not_null(data);
    struct tally tally = {0};
    cr_assert(next_line(&at, &line, &size));
    cJSON *context = chat_test_json(line, size);
    cr_assert_not_null(context);
    while (next_line(&at, &line, &size)) {
        cJSON *item = chat_test_json(line, size);
        cr_assert_not_null(item);
        struct rendered r;
        chat_test_render(text_of(item, "template"), context, 1752148800, &r);
        const char *expected = text_of(item, "expected");
        /* jinja2 may find other errors while compiling than we do. */
        if (!expected && (r.rc == ERR_MALFORMED || r.rc == ERR_UNSUPPORTED)) r.rc = ERR_INVALID;
        count(&tally, text_of(item, "template"), &r, expected, NULL, true);
        chat_test_close(&r);
        json_free(item);
    }
    printf("%s: %d of %d\n", file, tally.passed, tally.passed + tally.failed);
    cr_assert_eq(tally.failed, 0);
    cr_assert_gt(tally.passed, least);
    json_free(context);
    free(data);
}

Test(chat_data, random_templates) {
    run_python("python.jsonl", 800);
}
