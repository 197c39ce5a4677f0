/* JSON in and out: strict reading into a cJSON tree, and a writer.
 *
 * json_parse is strict where cJSON's parser is not: UTF-8 is checked, exactly one value with
 * nothing after it, numbers and escapes by RFC 8259, raw control characters, lone surrogates and
 * numbers beyond a double refused, limits on bytes, depth and nodes. The bar is JSONTestSuite:
 * every n_ case is refused. Duplicate keys are refused when `unique_keys` is set (requests; not
 * model files). Number nodes keep their text in `valuestring`, so 64-bit seeds lose no digits.
 *
 * Strings of a tree end with a NUL, so U+0000 cannot stand in them as itself. With `nuls` the tree
 * holds it as the two bytes C0 80, as Java's and Tcl's strings do. UTF-8 never has these bytes, so
 * nothing else can be meant; json_write_node writes \u0000 for them, and json_text gives the text
 * itself. Without `nuls` \u0000 is refused (model files).
 *
 * The tree is a plain cJSON tree: walk it with cJSON's own iteration macros, never with
 * cJSON_GetObjectItem (it ignores case). Immutable after parsing, so any thread may read it. */
#ifndef KEEPD_BASE_JSON_H
#define KEEPD_BASE_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"

struct json_limits {
    size_t bytes;
    int depth; /* containers inside each other; at most JSON_MAX_DEPTH whatever is asked */
    bool unique_keys, nuls;
    /* The text is a file's: a byte-order mark in front, as some editors write it, is passed over,
     * and a fault says what the file is if it is something else (base/kind.h). Infinity, which
     * Python writes as it stands, counts as null. */
    bool file;
    size_t nodes; /* values in the tree, each about 100 bytes of memory; 0: only `bytes` bounds */
};

#define JSON_MAX_DEPTH 512

/* ERR_MALFORMED with "... at byte N" in fault->text, ERR_LIMIT, or ERR_NOMEM; *out is then NULL. */
int json_parse(const char *data, size_t size, const struct json_limits *limits, cJSON **out,
               struct fault *fault);
void json_free(cJSON *tree);

/* Returns the member with exactly this name; of several the last, as in Python; NULL when absent. A
 * JSON null counts as absent. */
const cJSON *json_get(const cJSON *object, const char *key);
/* Returns whether the values are equal, with members in any order. Objects must have no duplicate
 * keys. The time grows with the square of an object's members; that of cJSON_Compare doubles with
 * each level of depth. */
bool json_equal(const cJSON *a, const cJSON *b);

/* Typed getters. If the member is absent, they return 0 and leave *value unchanged, so preset the
 * default. A wrong type or a value out of range is ERR_INVALID: fault->field = "<path>.<key>" (or
 * "<key>" when path is NULL or ""), and fault->text says what was expected and what was found. */
int json_int(const cJSON *object, const char *path, const char *key, int64_t min, int64_t max,
             int64_t *value, struct fault *fault); /* 3.0 and 1e2 are integers too */
int json_num(const cJSON *object, const char *path, const char *key, double min, double max,
             double *value, struct fault *fault);
int json_bool(const cJSON *object, const char *path, const char *key, bool *value,
              struct fault *fault);
int json_str(const cJSON *object, const char *path, const char *key, const char **value,
             struct fault *fault); /* points into the tree */
int json_node_int(const cJSON *node, int64_t min, int64_t max,
                  int64_t *value);             /* 0 or ERR_INVALID */
const char *json_type_name(const cJSON *node); /* "string", "number", ... for messages */

/* U+0000 as it is written in the strings of a tree. */
#define JSON_NUL "\xC0\x80"
/* Decodes a string of a tree: writes the text that `from` stands for, of *size bytes and not
 * NUL-terminated. `to` has room for strlen(from) bytes; it may be `from`. */
void json_text(const char *from, char *to, size_t *size);
/* Decodes a string of a tree into the arena; NULL when memory is short. A string without U+0000 is
 * returned as it is. */
const char *json_arena_text(struct arena *arena, const char *from, size_t *size);

/* The writer makes valid JSON from any bytes: invalid UTF-8 becomes U+FFFD. Other text that is not
 * ASCII is written unescaped. */
void json_write_str(struct buf *buf, const char *s, size_t n); /* with the quotes */
void json_write_num(struct buf *buf,
                    double value); /* shortest text that reads back; NaN/inf: null */
void json_write_node(struct buf *buf, const cJSON *node); /* compact; numbers keep their text */

/* UTF-8 */
bool utf8_valid(const char *s, size_t n);
size_t utf8_complete(const char *s,
                     size_t n); /* longest prefix that does not end inside a character */

#endif
