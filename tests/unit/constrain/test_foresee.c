/* The bytes that a language leaves to be written, and the usual white space: constrain/foresee.c.
 */
#include <stdio.h>

#include "language.h"

static const char schema[] =
    "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"kind\":{\"const\":"
    "\"a\\u00e4\"},"
    "\"sizes\":{\"type\":\"array\",\"minItems\":1,\"items\":{\"type\":\"object\",\"properties\":"
    "{\"width\":{\"type\":\"integer\"}},\"required\":[\"width\"],\"additionalProperties\":false}}},"
    "\"required\":[\"name\",\"kind\",\"sizes\"],\"additionalProperties\":false}";

/* Returns the bytes foreseen behind `text`, after a mask was made for it. */
static const char *foresee(struct language *l, const char *text, size_t most, uint64_t work) {
    static char out[256];
    struct constrain_at at = {0};
    struct constrain_next next;
    struct constrain_effort effort = {.work = work};
    cr_assert_eq(constrain_next(l->constrain, &at, text, strlen(text), l->mask, &next), 0, "%s",
                 text);
    size_t size = constrain_foresee(l->constrain, &at, text, strlen(text), out, most, &effort);
    cr_assert_leq(effort.work, work + 64, "beyond the limit there is one state at most");
    out[size] = '\0';
    return out;
}

static const struct {
    const char *text, *next;
} places[] = {
    {"", "{\"name\": \""},
    {"{", "\"name\": \""},
    {"{\"na", "me\": \""},
    {"{\"name\": ", "\""},
    {"{\"name\":", " \""},
    {"{\"name\": \"", ""}, /* any character */
    {"{\"name\": \"x\"", ", \"kind\": \"a\xC3\xA4\", \"sizes\": [{\"width\": "},
    {"{\"name\":\"x\"", ", \"kind\":\"a\xC3\xA4\", \"sizes\":[{\"width\":"},
    {"{\"name\":\"x\",\"kind\"", ":\"a\xC3\xA4\",\"sizes\":[{\"width\":"},
    {"{\n  \"name\": \"x\",\n  ",
     "\"kind\": \"a\xC3\xA4\",\n  \"sizes\": [\n    {\n      \"width\": "},
    {"{\n  \"name\": \"x\",\n  \"kind\"",
     ": \"a\xC3\xA4\",\n  \"sizes\": [\n    {\n      \"width\": "},
    {"{\"name\": \"x\", \"kind\": \"a\xC3\xA4\", \"sizes\": [{\"width\": 1",
     ""}, /* digits, or the end */
    {"{\"name\": \"x\", \"kind\": \"a\xC3\xA4\", \"sizes\": [{\"width\": 1}",
     ""}, /* one more, or none */
    {"{\"name\": \"x\", \"kind\": \"a\xC3\xA4\", \"sizes\": [{\"width\": 1}]", "}"},
    {"{\n\t\"name\": \"x\",\n\t\"kind\": \"a\xC3\xA4\",\n\t\"sizes\": [\n\t\t{\n\t\t\t\"width\": "
     "1\n",
     "\t\t}"},
    {"{\n\t\"name\": \"x\",\n\t\"kind\": \"a\xC3\xA4\",\n\t\"sizes\": [{\"width\": 1}\n\t]", "\n}"},
};

Test(foresee, places_in_an_object) {
    struct language l = language_schema(schema);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const char *found = foresee(&l, places[i].text, 200, 100000);
        cr_assert_str_eq(found, places[i].next, "after %s: '%s'", places[i].text, found);
    }
    language_close(&l);
}

/* The text with the foreseen bytes, however many are wanted, belongs to the language. */
Test(foresee, what_is_foreseen_may_be_written) {
    struct language l = language_schema(schema);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        for (size_t most = 0; most < 40; most++) {
            char text[512];
            struct constrain_at at = {0};
            const char *found = foresee(&l, places[i].text, most, 100000);
            cr_assert_leq(strlen(found), most);
            cr_assert_eq(strncmp(found, places[i].next, strlen(found)), 0);
            snprintf(text, sizeof text, "%s%s", places[i].text, found);
            cr_assert_eq(constrain_read(l.constrain, &at, text, strlen(text)), 0, "%s", text);
        }
    }
    language_close(&l);
}

Test(foresee, one_spacing) {
    struct language l = language_of(&(struct constrain_part){
        .kind = CONSTRAIN_SEQ, .one_spacing = true, .field = "f", .count = 0});
    cr_assert_str_eq(foresee(&l, "", 10, 1000), "", "nothing follows an empty language");
    language_close(&l);
    l = language_part(schema, (struct constrain_part){.one_spacing = true});
    cr_assert_str_eq(foresee(&l, "{\"name\": \"x, y\"", 11, 100000), ", \"kind\": \"");
    language_close(&l);
}

/* Too little work, another text, a state that is not of this text. */
Test(foresee, nothing_is_known) {
    struct language l = language_schema(schema);
    struct constrain_at at = {0};
    struct constrain_effort effort = {.work = 100000};
    char out[64];
    cr_assert_eq(constrain_foresee(l.constrain, &at, "", 0, out, sizeof out, &effort), 0);
    cr_assert_eq(constrain_read(l.constrain, &at, "{", 1), 0);
    cr_assert_eq(constrain_foresee(l.constrain, &at, "{\"", 2, out, sizeof out, &effort), 0);
    for (uint64_t work = 0; work < 40; work++) (void)foresee(&l, "{\"na", 60, work);
    cr_assert_str_eq(foresee(&l, "{\"na", 60, 100000), "me\": \"", "what was learned stays");
    language_close(&l);
}

/* No text makes the search for its usual white space long. */
Test(foresee, endless_white_space) {
    enum { BLANKS = 5000 };
    static char text[2 * BLANKS + 2];
    struct language l = language_text(CONSTRAIN_REGEX, "x[ \\n]*x[ \\n]*y");
    memset(text, ' ', sizeof text - 1);
    text[0] = text[BLANKS] = 'x';
    cr_assert_str_eq(foresee(&l, text, 60, 1000000), "y");
    text[1] = '\n';
    text[BLANKS + 1] = '\0';
    cr_assert_str_eq(foresee(&l, text, 60, 1000000), "y");
    language_close(&l);
}
