/* The filter urlize: words that are addresses become links, as in jinja2 3.1.
 *
 * The text is escaped and cut at white space. Of each word, opening brackets in front and closing
 * ones and points behind do not belong to an address, unless brackets inside it are open. */
#include <string.h>

#include "text/jinja/builtins.h"
#include "text/jinja/ops.h"
#include "text/jinja/unicode.h"
#include "text/pcre.h"

#define MATCH_LIMIT 1000000

/* A web address: with a scheme or www and a name, with a well-known domain, or a scheme and a
 * number; then a port and a path. */
static const char web_pattern[] =
    "^(?i:(?:https?://|www\\.)(?:[\\w%-]+\\.)*(?:[a-z]{2,63}|xn--[\\w%]{2,59})"
    "|(?:[\\w%-]{2,63}\\.)+(?:com|edu|gov|info|int|mil|net|org)"
    "|https?://(?:\\d{1,3}(?:\\.\\d{1,3}){3}"
    "|\\[(?:[\\da-f]{0,4}:){2}(?:[\\da-f]{0,4}:?){1,6}\\]))"
    "(?::\\d{1,5})?(?:[/?#]\\S*)?$";
static const char mail_pattern[] = "^\\S+@\\w[\\w.-]*\\.\\w+$";

struct linker {
    struct jinja_run *run;
    struct jinja_text *out;
    struct jinja_value attributes; /* rel and target, with a space before each; "" for none */
    struct jinja_list *schemes;    /* NULL: none */
    int64_t limit;                 /* characters shown of a link; -1: all */
    pcre2_code *web, *mail;
    pcre2_match_data *data;
    pcre2_match_context *context;
};

/* --- patterns --- */

static pcre2_code *compile(const char *pattern, pcre2_compile_context *context) {
    int error;
    PCRE2_SIZE offset;
    return pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                         PCRE2_UTF | PCRE2_UCP | PCRE2_DOLLAR_ENDONLY, &error, &offset, context);
}

static int fail_memory(const struct linker *l) {
    return jinja_fail(l->run, ERR_NOMEM, "not enough memory for urlize");
}

static int open_patterns(struct linker *l) {
    pcre2_general_context *memory = text_pcre_memory();
    pcre2_compile_context *context = memory ? pcre2_compile_context_create(memory) : NULL;
    if (context) {
        l->web = compile(web_pattern, context);
        l->mail = compile(mail_pattern, context);
        l->data = pcre2_match_data_create(1, memory);
        l->context = pcre2_match_context_create(memory);
    }
    pcre2_compile_context_free(context);
    pcre2_general_context_free(memory);
    if (!l->web || !l->mail || !l->data || !l->context) return fail_memory(l);
    pcre2_set_match_limit(l->context, MATCH_LIMIT);
    return 0;
}

static void close_patterns(struct linker *l) {
    pcre2_code_free(l->web);
    pcre2_code_free(l->mail);
    pcre2_match_data_free(l->data);
    pcre2_match_context_free(l->context);
}

static bool matches(struct linker *l, const pcre2_code *code, const struct jinja_value *s,
                    int *rc) {
    if (*rc) return false;
    int found = pcre2_match(code, (PCRE2_SPTR)jinja_str_data(s), s->size, 0, PCRE2_NO_UTF_CHECK,
                            l->data, l->context);
    if (found == PCRE2_ERROR_NOMEMORY || found == PCRE2_ERROR_HEAPLIMIT)
        *rc = fail_memory(l);
    else if (found < 0 && found != PCRE2_ERROR_NOMATCH)
        *rc = jinja_fail(l->run, ERR_LIMIT, "urlize: a word needs too many steps");
    return found >= 0;
}

/* --- parts of a word --- */

static bool begins_with(const struct jinja_value *s, const char *prefix) {
    size_t n = strlen(prefix);
    return s->size >= n && memcmp(jinja_str_data(s), prefix, n) == 0;
}

static uint32_t count_in(const struct jinja_value *s, uint32_t begin, uint32_t end,
                         const char *part) {
    uint32_t count = 0, n = (uint32_t)strlen(part);
    for (uint32_t i = begin; i + n <= end;) {
        bool here = memcmp(jinja_str_data(s) + i, part, n) == 0;
        count += here;
        i += here ? n : 1;
    }
    return count;
}

/* The bytes that open a bracket at the beginning of s[at, size). */
static uint32_t opening(const struct jinja_value *s, uint32_t at) {
    const char *data = jinja_str_data(s) + at;
    if (at < s->size && (*data == '(' || *data == '<')) return 1;
    return s->size - at >= 4 && memcmp(data, "&lt;", 4) == 0 ? 4 : 0;
}

/* The bytes of a closing bracket, point or comma at the end of s[at, end). */
static uint32_t closing(const struct jinja_value *s, uint32_t at, uint32_t end) {
    const char *data = jinja_str_data(s);
    if (end > at && strchr(")>.,", data[end - 1]) && data[end - 1]) return 1;
    return end - at >= 4 && memcmp(data + end - 4, "&gt;", 4) == 0 ? 4 : 0;
}

/* As many closing brackets go back into s[begin, *end) as it has open ones, if it has more of
 * these; the text between goes with them. */
static void balance(const struct jinja_value *s, uint32_t begin, uint32_t *end) {
    static const char *const brackets[][2] = {{"(", ")"}, {"<", ">"}, {"&lt;", "&gt;"}};
    for (size_t i = 0; i < 3; i++) {
        const char *open = brackets[i][0], *close = brackets[i][1];
        uint32_t n = (uint32_t)strlen(close), opened = count_in(s, begin, *end, open);
        uint32_t closed = count_in(s, *end, s->size, close);
        if (opened <= count_in(s, begin, *end, close)) continue;
        for (uint32_t k = opened < closed ? opened : closed; k > 0; k--) {
            while (memcmp(jinja_str_data(s) + *end, close, n) != 0) ++*end;
            *end += n;
        }
    }
}

/* --- links --- */

static int put(struct linker *l, const char *text) {
    return jinja_text_puts(l->run, l->out, text);
}

/* <a href="{prefix}{to}"{attributes}>{shown}</a> */
static int put_link(struct linker *l, const char *prefix, const struct jinja_value *to,
                    bool attributes, const struct jinja_value *shown, bool cut) {
    int rc = put(l, "<a href=\"");
    if (!rc) rc = put(l, prefix);
    if (!rc) rc = jinja_text_add_str(l->run, l->out, to);
    if (!rc) rc = put(l, "\"");
    if (!rc && attributes) rc = jinja_text_add_str(l->run, l->out, &l->attributes);
    if (!rc) rc = put(l, ">");
    if (!rc) rc = jinja_text_add_str(l->run, l->out, shown);
    if (!rc && cut) rc = put(l, "...");
    return rc ? rc : put(l, "</a>");
}

static int put_web_link(struct linker *l, const struct jinja_value *s) {
    bool whole = begins_with(s, "https://") || begins_with(s, "http://");
    struct jinja_value shown = *s;
    int rc = jinja_charge_walk(l->run, s);
    bool cut = l->limit >= 0 && (int64_t)jinja_str_length(s) > l->limit;
    if (cut) shown = jinja_str_slice(s, 0, l->limit);
    return rc ? rc : put_link(l, whole ? "" : "https://", s, true, &shown, cut);
}

static bool has_scheme(const struct linker *l, const struct jinja_value *s) {
    for (uint32_t i = 0; l->schemes && i < l->schemes->count; i++) {
        const struct jinja_value *scheme = &l->schemes->items[i];
        if (s->size > scheme->size &&
            memcmp(jinja_str_data(s), jinja_str_data(scheme), scheme->size) == 0)
            return true;
    }
    return false;
}

static int put_address(struct linker *l, const struct jinja_value *s) {
    bool mailto = begins_with(s, "mailto:");
    struct jinja_value rest = jinja_str_view(s, mailto ? 7 : 0, s->size);
    bool may_be_mail = mailto || (count_in(s, 0, s->size, "@") && !begins_with(s, "www.") &&
                                  !begins_with(s, "@") && !count_in(s, 0, s->size, ":"));
    int rc = 0;
    if (matches(l, l->web, s, &rc)) return put_web_link(l, s);
    if (may_be_mail && matches(l, l->mail, &rest, &rc))
        return put_link(l, "mailto:", &rest, false, &rest, false);
    if (rc) return rc;
    if (has_scheme(l, s)) return put_link(l, "", s, true, s, false);
    return jinja_text_add_str(l->run, l->out, s);
}

static int put_word(struct linker *l, const struct jinja_value *word) {
    uint32_t begin = 0, end = word->size, n;
    while ((n = opening(word, begin)) != 0) begin += n;
    while ((n = closing(word, begin, end)) != 0) end -= n;
    balance(word, begin, &end);
    struct jinja_value head = jinja_str_view(word, 0, begin);
    struct jinja_value middle = jinja_str_view(word, begin, end);
    struct jinja_value tail = jinja_str_view(word, end, word->size);
    int rc = jinja_charge_bytes(l->run, 16 * (size_t)word->size);
    if (!rc) rc = jinja_text_add_str(l->run, l->out, &head);
    if (!rc) rc = put_address(l, &middle);
    return rc ? rc : jinja_text_add_str(l->run, l->out, &tail);
}

static int put_words(struct linker *l, const struct jinja_value *s) {
    struct jinja_cursor c;
    uint32_t begin = 0;
    int rc = jinja_charge_chars(l->run, s->size);
    bool more = true, gap = false;
    jinja_cursor_open(&c, s);
    while (!rc && more) {
        more = jinja_cursor_step(&c);
        uint32_t at = more ? c.at - s->begin : s->size;
        bool space = more && jinja_is_space(c.code);
        if (more && space == gap) continue;
        struct jinja_value part = jinja_str_view(s, begin, at);
        rc = gap ? jinja_text_add_str(l->run, l->out, &part) : put_word(l, &part);
        begin = at;
        gap = space;
    }
    return rc;
}

/* --- arguments --- */

static int put_attribute(struct linker *l, struct jinja_text *text, const char *name,
                         const struct jinja_value *value) {
    struct jinja_value escaped;
    int rc = jinja_escape(l->run, value, &escaped);
    if (!rc) rc = jinja_text_puts(l->run, text, name);
    if (!rc) rc = jinja_text_add_str(l->run, text, &escaped);
    return rc ? rc : jinja_text_puts(l->run, text, "\"");
}

/* Words of `rel`, "noopener" and perhaps "nofollow": sorted, each once. */
static int make_rel(struct linker *l, const struct jinja_value *rel, bool nofollow,
                    struct jinja_value *out) {
    struct jinja_run *run = l->run;
    struct jinja_value words, word, space;
    struct jinja_text *text;
    struct jinja_cursor c;
    int rc = jinja_list_open(run, JINJA_LIST, 4, &words);
    if (!rc) rc = jinja_str_c(run, "noopener", &word);
    if (!rc) rc = jinja_list_add(run, words.list, &word);
    if (!rc && nofollow) rc = jinja_str_c(run, "nofollow", &word);
    if (!rc && nofollow) rc = jinja_list_add(run, words.list, &word);
    if (!rc) rc = jinja_charge_chars(run, rel->size);
    uint32_t begin = 0;
    bool more = true;
    jinja_cursor_open(&c, rel);
    while (!rc && more) {
        more = jinja_cursor_step(&c);
        uint32_t at = more ? c.at - rel->begin : rel->size;
        if (more && !jinja_is_space(c.code)) continue;
        word = jinja_str_view(rel, begin, at);
        begin = more ? at + c.length : at;
        if (word.size) rc = jinja_list_add(run, words.list, &word);
    }
    struct jinja_value keys;
    if (!rc) rc = jinja_to_list(run, &words, JINJA_LIST, &keys);
    if (!rc) rc = jinja_sort(run, words.list, keys.list, false);
    if (!rc) rc = jinja_str_c(run, " ", &space);
    if (!rc) rc = jinja_text_open(run, 32, &text);
    for (uint32_t i = 0; !rc && i < words.list->count; i++) {
        const struct jinja_value *each = &words.list->items[i];
        if (i && jinja_str_equal(each, each - 1)) continue;
        if (i) rc = jinja_text_add_str(run, text, &space);
        if (!rc) rc = jinja_text_add_str(run, text, each);
    }
    if (!rc) *out = jinja_text_value(text);
    return rc;
}

static int make_attributes(struct linker *l, const struct jinja_value *rel, bool nofollow,
                           const struct jinja_value *target) {
    struct jinja_text *text;
    struct jinja_value words = jinja_str_empty();
    bool given = rel->kind != JINJA_MISSING && jinja_truth(rel);
    if ((given && !jinja_is_str(rel)) || (jinja_truth(target) && !jinja_is_str(target)))
        return jinja_fail(l->run, ERR_INVALID, "urlize: rel and target must be strings");
    int rc = make_rel(l, given ? rel : &words, nofollow, &words);
    if (!rc) rc = jinja_text_open(l->run, 64, &text);
    if (!rc) rc = put_attribute(l, text, " rel=\"", &words);
    if (!rc && jinja_truth(target)) rc = put_attribute(l, text, " target=\"", target);
    if (!rc) l->attributes = jinja_text_value(text);
    return rc;
}

/* A scheme is two or more letters, digits, "_", ".", "+" or "-", a colon and up to two slashes. */
static bool is_scheme(const struct jinja_value *s) {
    struct jinja_cursor c;
    uint32_t name = 0, slashes = 0;
    bool colon = false;
    jinja_cursor_open(&c, s);
    while (jinja_cursor_step(&c)) {
        if (colon && (c.code != '/' || ++slashes > 2)) return false;
        if (colon) continue;
        colon = c.code == ':';
        if (!colon && !jinja_is_word(c.code) && c.code != '.' && c.code != '+' && c.code != '-')
            return false;
        name += !colon;
    }
    return colon && name >= 2;
}

static int read_schemes(struct linker *l, const struct jinja_value *v) {
    if (v->kind == JINJA_MISSING || v->kind == JINJA_NONE) return 0;
    int rc = jinja_iterate(l->run, v, &l->schemes);
    for (uint32_t i = 0; !rc && i < l->schemes->count; i++)
        if (!jinja_is_str(&l->schemes->items[i]) || !is_scheme(&l->schemes->items[i]))
            rc = jinja_fail(l->run, ERR_INVALID, "urlize: not a valid URI scheme prefix");
    return rc;
}

int jinja_filter_urlize(struct jinja_run *run, const struct jinja_value *self,
                        const struct jinja_args *args, struct jinja_value *out) {
    static const char *const names[] = {"trim_url_limit", "nofollow", "target", "rel",
                                        "extra_schemes"};
    struct jinja_value v[5], s;
    struct linker l = {.run = run};
    int rc = jinja_bind(run, "urlize", args, names, 5, 0, v);
    if (!rc) rc = jinja_to_str(run, self, &s);
    if (!rc) rc = jinja_arg_int(run, &v[0], -1, &l.limit);
    if (!rc && l.limit < -1) rc = jinja_fail(run, ERR_INVALID, "urlize: a negative trim_url_limit");
    for (int i = 1; i < 5; i++)
        if (v[i].kind == JINJA_MISSING) v[i] = jinja_none();
    if (!rc) rc = make_attributes(&l, &v[3], jinja_truth(&v[1]), &v[2]);
    if (!rc) rc = read_schemes(&l, &v[4]);
    if (!rc && !(s.flags & JINJA_SAFE)) rc = jinja_escape(run, &s, &s);
    if (!rc) rc = jinja_text_open(run, s.size, &l.out);
    if (!rc) rc = open_patterns(&l);
    if (!rc) rc = put_words(&l, &s);
    close_patterns(&l);
    if (!rc) *out = jinja_text_value(l.out);
    return rc;
}
