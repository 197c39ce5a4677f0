/* A recursive-descent parser that checks JSON and builds a cJSON tree in the same pass, and a
 * writer. cJSON's own parser is not used: it accepts invalid input, and it refuses valid numbers of
 * more than 63 characters. Its nodes, its cJSON_Delete and its iteration macros are used; nodes
 * come from malloc underneath mem_try_alloc, as cJSON_Delete expects. */
#include "base/json.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/kind.h"
#include "base/mem.h"
#include "base/utf8.h"

struct reader {
    const char *start, *at, *end;
    const struct json_limits *limits;
    struct fault *fault;
    int depth;
    size_t nodes;
};

static int read_value(struct reader *in, cJSON **out);

static int refuse_json(const struct reader *in, const char *why) {
    size_t at = (size_t)(in->at - in->start);
    if (in->at >= in->end && at > 0)
        return fault_set(in->fault, ERR_MALFORMED, NULL, "%s at byte %zu, where the text ends", why,
                         at);
    return fault_set(in->fault, ERR_MALFORMED, NULL, "%s at byte %zu", why, at);
}

static int refuse_json_memory(const struct reader *in) {
    return fault_set(in->fault, ERR_NOMEM, NULL, "not enough memory for this JSON text");
}

static int peek_json_char(const struct reader *in) {
    return in->at < in->end ? (unsigned char)*in->at : -1;
}

static bool skip_json_char(struct reader *in, char c) {
    if (peek_json_char(in) != (unsigned char)c) return false;
    in->at++;
    return true;
}

static void skip_json_space(struct reader *in) {
    while (in->at < in->end && utf8_is_blank(*in->at)) in->at++;
}

static int new_node(struct reader *in, int type, cJSON **out) {
    if (in->limits->nodes && in->nodes >= in->limits->nodes)
        return fault_set(in->fault, ERR_LIMIT, NULL, "more than %zu JSON values",
                         in->limits->nodes);
    in->nodes++;
    *out = mem_try_alloc(1, sizeof **out);
    if (!*out) return refuse_json_memory(in);
    (*out)->type = type;
    return 0;
}

/* --- strings --- */

static int read_hex4(struct reader *in, uint32_t *value) {
    *value = 0;
    for (int i = 0; i < 4; i++) {
        int c = peek_json_char(in);
        int digit;
        if (c >= '0' && c <= '9')
            digit = c - '0';
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            digit = (c | 0x20) - 'a' + 10;
        else
            return refuse_json(in, "\\u needs four hexadecimal digits");
        *value = *value << 4 | (uint32_t)digit;
        in->at++;
    }
    return 0;
}

/* Reads what follows "\u". A UTF-16 pair becomes one character; a lone half is an error. */
static int read_unicode_escape(struct reader *in, uint32_t *scalar) {
    uint32_t low;
    int rc = read_hex4(in, scalar);
    if (rc) return rc;
    if (*scalar == 0 && !in->limits->nuls) return refuse_json(in, "\\u0000 is not accepted");
    if (*scalar < 0xD800 || *scalar > 0xDFFF) return 0;
    if (*scalar > 0xDBFF || !skip_json_char(in, '\\') || !skip_json_char(in, 'u'))
        return refuse_json(in, "lone surrogate");
    if ((rc = read_hex4(in, &low))) return rc;
    if (low < 0xDC00 || low > 0xDFFF) return refuse_json(in, "lone surrogate");
    *scalar = 0x10000 + ((*scalar - 0xD800) << 10) + (low - 0xDC00);
    return 0;
}

/* Reads what follows a backslash, and appends the character to *to. */
static int read_json_escape(struct reader *in, char **to) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    int c = peek_json_char(in);
    const char *name = c > 0 ? strchr(names, c) : NULL;
    if (name) {
        in->at++;
        *(*to)++ = values[name - names];
        return 0;
    }
    if (!skip_json_char(in, 'u')) return refuse_json(in, "unknown escape");
    uint32_t scalar;
    int rc = read_unicode_escape(in, &scalar);
    if (rc) return rc;
    if (scalar == 0) {
        memcpy(*to, JSON_NUL, sizeof JSON_NUL - 1);
        *to += sizeof JSON_NUL - 1;
    } else {
        *to += utf8_encode(scalar, *to);
    }
    return 0;
}

/* Copies from the first byte of a string's content up to its closing quote, which is read, too.
 * `to` has the capacity of the raw text, because no escape is shorter than the character that it
 * stands for. */
static int copy_string(struct reader *in, char *to) {
    for (;;) {
        int c = peek_json_char(in);
        size_t length = 1;
        int rc;
        if (c < 0) return refuse_json(in, "unfinished string");
        if (c < 0x20) return refuse_json(in, "raw control character in a string");
        if (c == '"') break;
        if (c == '\\') {
            in->at++;
            if ((rc = read_json_escape(in, &to))) return rc;
            continue;
        }
        if (c >= 0x80 && utf8_step(in->at, (size_t)(in->end - in->at), &length) != UTF8_CHAR)
            return refuse_json(in, "invalid UTF-8");
        memcpy(to, in->at, length);
        to += length;
        in->at += length;
    }
    in->at++;
    *to = '\0';
    return 0;
}

/* Returns the bytes up to the closing quote, which are the most that the copy can need. */
static size_t raw_length(const struct reader *in) {
    const char *p = in->at;
    while (p < in->end && *p != '"') p += *p == '\\' && p + 1 < in->end ? 2 : 1;
    return (size_t)(p - in->at);
}

static int read_string(struct reader *in, char **out) {
    if (!skip_json_char(in, '"')) return refuse_json(in, "expected a string");
    char *text = mem_try_alloc(raw_length(in) + 1, 1);
    if (!text) return refuse_json_memory(in);
    int rc = copy_string(in, text);
    if (rc) {
        mem_free(text);
        return rc;
    }
    *out = text;
    return 0;
}

/* --- numbers --- */

static bool skip_digits(struct reader *in) {
    const char *from = in->at;
    while (peek_json_char(in) >= '0' && peek_json_char(in) <= '9') in->at++;
    return in->at > from;
}

static int skip_number(struct reader *in) {
    skip_json_char(in, '-');
    if (!skip_json_char(in, '0') && !skip_digits(in)) return refuse_json(in, "expected a digit");
    if (skip_json_char(in, '.') && !skip_digits(in)) return refuse_json(in, "expected a digit");
    if (skip_json_char(in, 'e') || skip_json_char(in, 'E')) {
        if (!skip_json_char(in, '+')) skip_json_char(in, '-');
        if (!skip_digits(in)) return refuse_json(in, "expected a digit");
    }
    return 0;
}

/* Reads a number. strtod accepts the point of the C locale, which is the one in force: the daemon
 * never calls setlocale. */
static int read_json_number(struct reader *in, cJSON *node) {
    const char *from = in->at;
    int rc = skip_number(in);
    if (rc) return rc;
    size_t size = (size_t)(in->at - from);
    node->valuestring = mem_try_alloc(size + 1, 1);
    if (!node->valuestring) return refuse_json_memory(in);
    memcpy(node->valuestring, from, size);
    node->valuedouble = strtod(node->valuestring, NULL);
    if (!isfinite(node->valuedouble)) return refuse_json(in, "number too large");
    node->valueint = node->valuedouble >= INT_MAX   ? INT_MAX
                     : node->valuedouble <= INT_MIN ? INT_MIN
                                                    : (int)node->valuedouble;
    return 0;
}

/* --- containers --- */

static int compare_member_keys(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Refuses an object with equal keys. The keys are sorted first: comparing all pairs of a client's
 * megabytes would take hours. */
static int check_unique(const struct reader *in, const cJSON *object, size_t count) {
    if (count < 2) return 0;
    const char **keys = mem_try_alloc(count, sizeof *keys);
    if (!keys) return refuse_json_memory(in);
    size_t n = 0;
    const cJSON *member;
    cJSON_ArrayForEach(member, object) keys[n++] = member->string;
    qsort(keys, n, sizeof *keys, compare_member_keys);
    int rc = 0;
    for (size_t i = 1; i < n && !rc; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0)
            rc = fault_set(in->fault, ERR_MALFORMED, keys[i],
                           "the key '%.64s' is twice in one object; send it once", keys[i]);
    mem_free(keys);
    return rc;
}

/* Links a child as cJSON does: `next` of the last child is NULL, `prev` of the first child is the
 * last one. */
static void append_child(cJSON *parent, cJSON *child) {
    if (!parent->child) {
        parent->child = child->prev = child;
        return;
    }
    child->prev = parent->child->prev;
    child->prev->next = child;
    parent->child->prev = child;
}

static int read_json_member(struct reader *in, cJSON *parent) {
    char *key = NULL;
    cJSON *child;
    int rc;
    if (cJSON_IsObject(parent)) {
        skip_json_space(in);
        if ((rc = read_string(in, &key))) return rc;
        skip_json_space(in);
        if (!skip_json_char(in, ':')) {
            rc = refuse_json(in, "expected ':'");
            goto fail;
        }
    }
    if ((rc = read_value(in, &child))) goto fail;
    child->string = key;
    append_child(parent, child);
    return 0;
fail:
    mem_free(key);
    return rc;
}

/* Reads what follows the opening bracket. */
static int read_json_members(struct reader *in, cJSON *parent, char close) {
    size_t count = 0;
    skip_json_space(in);
    if (skip_json_char(in, close)) return 0;
    do {
        int rc = read_json_member(in, parent);
        if (rc) return rc;
        count++;
        skip_json_space(in);
    } while (skip_json_char(in, ','));
    if (!skip_json_char(in, close))
        return refuse_json(in, close == ']' ? "expected ',' or ']'" : "expected ',' or '}'");
    return cJSON_IsObject(parent) && in->limits->unique_keys ? check_unique(in, parent, count) : 0;
}

static int read_container(struct reader *in, cJSON *node) {
    int depth = in->limits->depth < JSON_MAX_DEPTH ? in->limits->depth : JSON_MAX_DEPTH;
    if (in->depth >= depth)
        return fault_set(in->fault, ERR_LIMIT, NULL, "JSON nested deeper than %d at byte %zu",
                         depth, (size_t)(in->at - in->start));
    in->depth++;
    in->at++;
    int rc = read_json_members(in, node, cJSON_IsArray(node) ? ']' : '}');
    in->depth--;
    return rc;
}

static int read_word(struct reader *in, const char *word) {
    size_t n = strlen(word);
    if ((size_t)(in->end - in->at) < n || memcmp(in->at, word, n) != 0)
        return refuse_json(in, "expected a value");
    in->at += n;
    return 0;
}

static int value_type(const struct reader *in) {
    const int c = peek_json_char(in);
    if (c == 'I' && in->limits->file) return cJSON_NULL;
    switch (c) {
    case '{':
        return cJSON_Object;
    case '[':
        return cJSON_Array;
    case '"':
        return cJSON_String;
    case 't':
        return cJSON_True;
    case 'f':
        return cJSON_False;
    case 'n':
        return cJSON_NULL;
    default:
        return c == '-' || (c >= '0' && c <= '9') ? cJSON_Number : cJSON_Invalid;
    }
}

/* Reads any value. It recurses through containers, no deeper than JSON_MAX_DEPTH. */
static int read_value(struct reader *in, cJSON **out) {
    cJSON *node;
    skip_json_space(in);
    int type = value_type(in);
    if (type == cJSON_Invalid) return refuse_json(in, "expected a value");
    int rc = new_node(in, type, &node);
    if (rc) return rc;
    switch (type) {
    case cJSON_Object:
    case cJSON_Array:
        rc = read_container(in, node);
        break;
    case cJSON_String:
        rc = read_string(in, &node->valuestring);
        break;
    case cJSON_Number:
        rc = read_json_number(in, node);
        break;
    case cJSON_True:
        rc = read_word(in, "true");
        break;
    case cJSON_False:
        rc = read_word(in, "false");
        break;
    default:
        rc = read_word(in, peek_json_char(in) == 'I' ? "Infinity" : "null");
        break;
    }
    if (rc) {
        cJSON_Delete(node);
        return rc;
    }
    *out = node;
    return 0;
}

int json_parse(const char *data, size_t size, const struct json_limits *limits, cJSON **out,
               struct fault *fault) {
    *out = NULL;
    if (size > limits->bytes)
        return fault_set(fault, ERR_LIMIT, NULL, "JSON of %zu bytes, at most %zu are accepted",
                         size, limits->bytes);
    struct reader in = {
        .start = data, .at = data, .end = data + size, .limits = limits, .fault = fault};
    if (limits->file && size >= 3 && memcmp(data, "\xEF\xBB\xBF", 3) == 0) in.at += 3;
    cJSON *tree;
    int rc = limits->file ? kind_check(data, size, KIND_JSON, NULL, "the file", fault) : 0;
    if (!rc) rc = read_value(&in, &tree);
    if (rc) return rc;
    skip_json_space(&in);
    if (in.at < in.end) {
        rc = refuse_json(&in, "text after the JSON value");
        json_free(tree);
        return rc;
    }
    *out = tree;
    return 0;
}

void json_free(cJSON *tree) {
    cJSON_Delete(tree);
}
