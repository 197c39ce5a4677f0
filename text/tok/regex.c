/* Split patterns. Files are written for Oniguruma, but PCRE2 runs them. Syntax that PCRE2 would
 * read differently is rewritten, and refused if that is impossible: a pattern must never split text
 * in another way than the model was trained with. */
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "text/pcre.h"
#include "text/tok/internal.h"

/* GPT-2's split, which ByteLevel implies. */
const char tok_regex_gpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* Qwen2's, for directories without tokenizer.json. */
const char tok_regex_qwen2[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
                               "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
                               "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* The pattern comes from the file and the text from a client, so the cost of a match is limited. */
#define MATCH_LIMIT     10000000
#define DEPTH_LIMIT     100000
#define HEAP_LIMIT_KIB  (64 * 1024)
#define JIT_STACK_BYTES ((size_t)64 << 20)
#define GROUPS_MAX      64

struct tok_regex {
    pcre2_code *code;
};

struct tok_scratch {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack; /* NULL until a match needs more than PCRE2's own 32 KiB */
};

/* ---- Rewriting ---- */

struct rewriter {
    const char *at;
    struct buf out;
    const char *field;
    struct fault *fault;
    size_t atom;               /* where the last repeatable item begins in `out` */
    size_t groups[GROUPS_MAX]; /* where open groups begin */
    int depth;
};

/* Oniguruma's word characters; the last six are an oddity of its Latin-1 table. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}"

/* Letters that mean the same in both after a backslash, outside a class. */
#define SAME_ESCAPES  "AzZGnrtfaex123456789"
#define SAME_IN_CLASS "nrtfaex"

static int pcre_refuse(const struct rewriter *w, const char *what, size_t size) {
    return fault_set(w->fault, ERR_UNSUPPORTED, w->field,
                     "'%.*s' in a split pattern is not supported", (int)size, what);
}

/* Rewrites \uXXXX; w->at is at the u. */
static int rewrite_unicode(struct rewriter *w) {
    if (strspn(w->at + 1, "0123456789abcdefABCDEF") < 4) return pcre_refuse(w, w->at - 1, 2);
    buf_fmt(&w->out, "\\x{%.4s}", w->at + 1);
    w->at += 5;
    return 0;
}

/* Copies \x{..} whole, so that the letters in the braces are not read again. */
static int copy_escape(struct rewriter *w) {
    const char *end = w->at + 1;
    if (*w->at == 'x' && *end == '{') {
        end = strchr(end, '}');
        if (!end) return pcre_refuse(w, w->at - 1, 2);
        end++;
    }
    buf_char(&w->out, '\\');
    buf_add(&w->out, w->at, (size_t)(end - w->at));
    w->at = end;
    return 0;
}

/* Writes \p{..}, \P{..} or \p{^..}; `at` is at the letter. Returns the text behind it; NULL: *rc
 * says why it failed. */
static const char *write_property(struct rewriter *w, const char *at, bool in_class, int *rc) {
    const char *name = at + 2, *end = at[1] == '{' ? strchr(name, '}') : NULL;
    bool negated = *at == 'P';
    if (!end) {
        *rc = pcre_refuse(w, at - 1, 2);
        return NULL;
    }
    if (*name == '^') {
        negated = !negated;
        name++;
    }
    *rc = tok_property_write(&w->out, name, (size_t)(end - name), negated, in_class);
    if (*rc == ERR_UNSUPPORTED) *rc = pcre_refuse(w, at - 1, (size_t)(end - at) + 2);
    if (*rc == ERR_NOMEM) fault_set(w->fault, ERR_NOMEM, w->field, "not enough memory");
    return *rc ? NULL : end + 1;
}

/* Copies a pattern of this source file, with the ranges of its properties from the tables. */
static int pcre_write_text(struct rewriter *w, const char *text, bool in_class) {
    int rc = 0;
    while (*text) {
        if (text[0] == '\\' && (text[1] == 'p' || text[1] == 'P')) {
            text = write_property(w, text + 1, in_class, &rc);
            if (!text) return rc;
            continue;
        }
        if (*text == '[' || *text == ']') in_class = *text == '[';
        buf_char(&w->out, *text++);
    }
    return 0;
}

static int rewrite_property(struct rewriter *w, bool in_class) {
    int rc = 0;
    if (strncmp(w->at, "p{Word}", 7) == 0) {
        w->at += 7;
        return pcre_write_text(w, in_class ? WORD : "[" WORD "]", in_class);
    }
    const char *end = write_property(w, w->at, in_class, &rc);
    if (end) w->at = end;
    return rc;
}

/* Rewrites an escape. \w is another set in each version of PCRE2, and \h and \v are white space
 * there. */
static int rewrite_escape(struct rewriter *w, bool in_class) {
    static const struct {
        char letter;
        const char *plain, *in_class;
    } others[] = {
        {'w', "[" WORD "]", WORD},
        {'W', "[^" WORD "]", NULL},
        {'d', "\\p{Nd}", "\\p{Nd}"},
        {'D', "\\P{Nd}", "\\P{Nd}"},
        {'s', "\\p{White_Space}", "\\p{White_Space}"},
        {'S', "\\P{White_Space}", "\\P{White_Space}"},
        {'h', "[0-9a-fA-F]", "0-9a-fA-F"},
        {'H', "[^0-9a-fA-F]", NULL},
        {'v', "\\x0b", "\\x0b"},
        {'b', "(?:(?<=[" WORD "])(?![" WORD "])|(?<![" WORD "])(?=[" WORD "]))", "\\x08"},
        {'B', "(?:(?<=[" WORD "])(?=[" WORD "])|(?<![" WORD "])(?![" WORD "]))", NULL},
    };
    char c = *++w->at;
    if (c == 'u') return rewrite_unicode(w);
    if (c == 'p' || c == 'P') return rewrite_property(w, in_class);
    if (c && strchr(in_class ? SAME_IN_CLASS : SAME_ESCAPES, c)) return copy_escape(w);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const char *text = in_class ? others[i].in_class : others[i].plain;
        if (others[i].letter != c || !text) continue;
        w->at++;
        return pcre_write_text(w, text, in_class);
    }
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter || !c) return pcre_refuse(w, w->at - 1, c ? 2 : 1);
    buf_char(&w->out, '\\');
    buf_char(&w->out, c);
    w->at++;
    return 0;
}

/* [:alpha:] and the like, by the properties that Oniguruma gives them. */
static int rewrite_posix_class(struct rewriter *w) {
    static const char *const classes[][2] = {{"[:alpha:]", "\\p{Alphabetic}"},
                                             {"[:digit:]", "\\p{Nd}"},
                                             {"[:space:]", "\\p{White_Space}"},
                                             {"[:upper:]", "\\p{Uppercase}"},
                                             {"[:lower:]", "\\p{Lowercase}"}};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        size_t n = strlen(classes[i][0]);
        if (strncmp(w->at, classes[i][0], n) != 0) continue;
        w->at += n;
        return pcre_write_text(w, classes[i][1], true);
    }
    return pcre_refuse(w, w->at, 2);
}

/* Rewrites a class. In Oniguruma a class inside a class adds its members to it, so the inner
 * brackets are dropped. */
static int rewrite_class(struct rewriter *w) {
    const char *start = w->at;
    int depth = 1, rc;
    buf_char(&w->out, *w->at++);
    if (*w->at == '^') buf_char(&w->out, *w->at++);
    if (*w->at == ']') {
        buf_str(&w->out, "\\]");
        w->at++;
    }
    while (depth > 0) {
        if (!*w->at) return pcre_refuse(w, start, 1);
        if (strncmp(w->at, "&&", 2) == 0) return pcre_refuse(w, w->at, 2);
        if (*w->at == '\\') {
            if ((rc = rewrite_escape(w, true))) return rc;
        } else if (*w->at == '[') {
            if (w->at[1] == ':') {
                if ((rc = rewrite_posix_class(w))) return rc;
                continue;
            }
            if (w->at[1] == '^' || w->at[1] == ']' || w->at[-1] == '-')
                return pcre_refuse(w, w->at, 2);
            depth++;
            w->at++;
        } else if (*w->at == ']') {
            if (--depth > 0 && w->at[1] == '-') return pcre_refuse(w, w->at, 2);
            w->at++;
        } else {
            buf_char(&w->out, *w->at++);
        }
    }
    buf_char(&w->out, ']');
    return 0;
}

/* Rewrites what follows "(?". The only options are i and m, which is Oniguruma's name for the
 * option that others call s. */
static int rewrite_group_kind(struct rewriter *w) {
    static const char *const kinds[] = {":", "=", "!", ">", "<=", "<!"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        size_t n = strlen(kinds[i]);
        if (strncmp(w->at, kinds[i], n) != 0) continue;
        buf_add(&w->out, w->at, n);
        w->at += n;
        return 0;
    }
    size_t n = strspn(w->at, "im-");
    if (n == 0 || (w->at[n] != ':' && w->at[n] != ')')) return pcre_refuse(w, w->at - 2, 3);
    for (size_t i = 0; i < n; i++) buf_char(&w->out, w->at[i] == 'm' ? 's' : w->at[i]);
    w->at += n;
    /* ")" is left for the caller: it closes this group. */
    if (*w->at == ':') buf_char(&w->out, *w->at++);
    return 0;
}

static int open_group(struct rewriter *w) {
    if (w->depth == GROUPS_MAX)
        return fault_set(w->fault, ERR_LIMIT, w->field, "groups nested deeper than %d", GROUPS_MAX);
    w->groups[w->depth++] = w->out.size;
    buf_char(&w->out, *w->at++);
    if (*w->at == '*') return pcre_refuse(w, w->at - 1, 2); /* PCRE2's verbs */
    if (*w->at != '?') return 0;
    buf_char(&w->out, *w->at++);
    return rewrite_group_kind(w);
}

/* Returns the size of {n}, {n,}, {n,m} or {,m}; 0: the brace is an ordinary character. */
static size_t interval_size(const char *s) {
    size_t low = strspn(s + 1, "0123456789"), size = 1 + low;
    if (s[size] == ',') {
        size_t high = strspn(s + size + 1, "0123456789");
        if (low + high == 0) return 0;
        size += 1 + high;
    } else if (low == 0) {
        return 0;
    }
    return s[size] == '}' ? size + 1 : 0;
}

/* Rewrites an interval. "+" behind it means a repetition of the interval, which PCRE2 would read as
 * possessive. */
static int rewrite_interval(struct rewriter *w, size_t size) {
    bool again = w->at[size] == '+';
    /* In Oniguruma {n}? is optional, in PCRE2 lazy. */
    if (w->at[size] == '?' && !memchr(w->at, ',', size)) return pcre_refuse(w, w->at, size + 1);
    if (again) {
        char *tail = mem_try_alloc(w->out.size - w->atom + 1, 1);
        if (!tail) return fault_set(w->fault, ERR_NOMEM, w->field, "not enough memory");
        size_t tail_size = w->out.size - w->atom;
        memcpy(tail, w->out.data + w->atom, tail_size);
        w->out.size = w->atom;
        buf_str(&w->out, "(?:");
        buf_add(&w->out, tail, tail_size);
        mem_free(tail);
    }
    buf_str(&w->out, w->at[1] == ',' ? "{0" : "{");
    buf_add(&w->out, w->at + 1, size - 1);
    if (again) buf_char(&w->out, ')');
    w->at += size;
    return 0;
}

/* Rewrites one item. Everything but quantifiers begins a new atom. */
static int rewrite_item(struct rewriter *w) {
    size_t start = w->out.size, size;
    switch (*w->at) {
    case '*':
    case '+':
    case '?':
        buf_char(&w->out, *w->at++);
        return 0;
    case '{':
        size = interval_size(w->at);
        if (size && start > 0) return rewrite_interval(w, size);
        buf_str(&w->out, "\\{");
        w->at++;
        break;
    case '(':
        return open_group(w);
    case ')':
        if (w->depth) start = w->groups[--w->depth];
        buf_char(&w->out, *w->at++);
        break;
    case '[':
        w->atom = start;
        return rewrite_class(w);
    case '\\':
        w->atom = start;
        return rewrite_escape(w, false);
    default:
        /* copies whole characters, because a quantifier repeats the character */
        do buf_char(&w->out, *w->at++);
        while (((unsigned char)*w->at & 0xC0) == 0x80);
    }
    w->atom = start;
    return 0;
}

static int rewrite(const char *pattern, const char *field, struct buf *out, struct fault *fault) {
    struct rewriter w = {.at = pattern, .field = field, .fault = fault};
    int rc = 0;
    buf_open(&w.out, (size_t)16 * TOK_REGEX_BYTES);
    while (*w.at && !rc && !w.out.failed) rc = rewrite_item(&w);
    if (!rc && w.out.failed) rc = fault_set(fault, ERR_NOMEM, field, "cannot hold the pattern");
    *out = w.out;
    return rc;
}

/* ---- Compiling ---- */

static int pcre_compile(const char *pattern, size_t size, bool literal, const char *field,
                        pcre2_compile_context *context, pcre2_code **out, struct fault *fault) {
    /* \C could cut characters in two. */
    uint32_t options = literal ? PCRE2_LITERAL | PCRE2_UTF
                               : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
    int code;
    PCRE2_SIZE offset;
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    *out =
        pcre2_compile((PCRE2_SPTR)(pattern ? pattern : ""), size, options, &code, &offset, context);
    if (*out) return 0;
    char message[160] = "";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
    if (code == PCRE2_ERROR_HEAP_FAILED || code == PCRE2_ERROR_NOMEMORY)
        return fault_set(fault, ERR_NOMEM, field, "not enough memory for a split pattern");
    return fault_set(fault, ERR_UNSUPPORTED, field, "split pattern: %s (at byte %zu of \"%.150s\")",
                     message, (size_t)offset, pattern ? pattern : "");
}

static int pcre_no_memory(const char *field, struct fault *fault) {
    return fault_set(fault, ERR_NOMEM, field, "not enough memory for a split pattern");
}

static int open_code(const char *pattern, size_t size, bool literal, const char *field,
                     pcre2_code **out, struct fault *fault) {
    pcre2_general_context *general = text_pcre_memory();
    pcre2_compile_context *context = general ? pcre2_compile_context_create(general) : NULL;
    int rc = context ? pcre_compile(pattern, size, literal, field, context, out, fault)
                     : pcre_no_memory(field, fault);
    pcre2_compile_context_free(context);
    pcre2_general_context_free(general);
    /* Where there is no JIT, pcre2_match interprets. */
    if (rc == 0) (void)pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
    return rc;
}

int tok_regex_open(const char *pattern, bool literal, const char *field, struct tok_regex **out,
                   struct fault *fault) {
    struct buf text = {0};
    size_t size = strlen(pattern);
    *out = NULL;
    if (size > TOK_REGEX_BYTES)
        return fault_set(fault, ERR_LIMIT, field, "split pattern of more than %d bytes",
                         TOK_REGEX_BYTES);
    struct tok_regex *regex = mem_try_alloc(1, sizeof *regex);
    int rc = regex ? 0 : pcre_no_memory(field, fault);
    if (!rc && !literal) {
        rc = rewrite(pattern, field, &text, fault);
        pattern = text.data;
        size = text.size;
    }
    if (!rc) rc = open_code(pattern, size, literal, field, &regex->code, fault);
    buf_close(&text);
    if (rc)
        tok_regex_close(regex);
    else
        *out = regex;
    return rc;
}

void tok_regex_close(struct tok_regex *regex) {
    if (!regex) return;
    pcre2_code_free(regex->code);
    mem_free(regex);
}

/* ---- Matching ---- */

struct tok_scratch *tok_scratch_open(void) {
    struct tok_scratch *scratch = mem_try_alloc(1, sizeof *scratch);
    pcre2_general_context *general = text_pcre_memory();
    if (scratch && general) {
        scratch->data = pcre2_match_data_create(1, general);
        scratch->context = pcre2_match_context_create(general);
    }
    pcre2_general_context_free(general);
    if (!scratch || !scratch->data || !scratch->context) {
        tok_scratch_close(scratch);
        return NULL;
    }
    pcre2_set_match_limit(scratch->context, MATCH_LIMIT);
    pcre2_set_depth_limit(scratch->context, DEPTH_LIMIT);
    pcre2_set_heap_limit(scratch->context, HEAP_LIMIT_KIB);
    return scratch;
}

void tok_scratch_close(struct tok_scratch *scratch) {
    if (!scratch) return;
    pcre2_jit_stack_free(scratch->stack);
    pcre2_match_context_free(scratch->context);
    pcre2_match_data_free(scratch->data);
    mem_free(scratch);
}

/* Patterns with repeated groups need a stack that grows with the text. */
static bool grow_stack(struct tok_scratch *scratch) {
    if (scratch->stack) return false;
    scratch->stack = pcre2_jit_stack_create((size_t)64 << 10, JIT_STACK_BYTES, NULL);
    if (!scratch->stack) return false;
    pcre2_jit_stack_assign(scratch->context, NULL, scratch->stack);
    return true;
}

int tok_regex_find(const struct tok_regex *regex, struct tok_scratch *scratch, const char *text,
                   size_t size, size_t from, size_t *begin, size_t *end) {
    uint32_t options = PCRE2_NO_UTF_CHECK;
    int rc;
    for (;;) {
        rc = pcre2_match(regex->code, (PCRE2_SPTR)text, size, from, options, scratch->data,
                         scratch->context);
        if (rc != PCRE2_ERROR_JIT_STACKLIMIT || (options & PCRE2_NO_JIT)) break;
        if (!grow_stack(scratch)) options |= PCRE2_NO_JIT;
    }
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc == PCRE2_ERROR_NOMEMORY || rc == PCRE2_ERROR_HEAPLIMIT) return ERR_NOMEM;
    if (rc < 0) return ERR_LIMIT;
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(scratch->data);
    if (at[0] < from || at[1] < at[0]) return ERR_LIMIT;
    *begin = at[0];
    *end = at[1];
    return 1;
}
