/* Constrained decoding: which tokens may come next, so that an answer belongs to a language given
 * by a JSON schema, a regular expression, a grammar, or a composition of these.
 *
 * A language is described by parts (below) and compiled by constrain_open. Any number of answers
 * may then use it, on any threads. The states and masks that they find are kept for all of them
 * under a lock; nothing else changes after opening.
 *
 * A mask has one bit per token: token t may come next if bit t % 32 of word t / 32 is set. Every
 * text that masks allow can be continued to a whole string of the language, unless a limit of
 * constrain/limits.h ends it. Tokens without bytes (special ones) are never allowed. Where the text
 * so far is accepted, the caller adds the tokens that end an answer.
 *
 * Two-level design as published for llguidance and XGrammar (Dong et al., "XGrammar: Flexible and
 * efficient structured generation engine for large language models", MLSys 2025): a byte automaton
 * walks a trie of the vocabulary; tokens that only hold characters of JSON strings are judged
 * together (constrain/mask.c). */
#ifndef KEEPD_CONSTRAIN_CONSTRAIN_H
#define KEEPD_CONSTRAIN_CONSTRAIN_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

/* ---- Languages as data ---- */

enum constrain_kind {
    CONSTRAIN_TEXT,    /* `text` itself */
    CONSTRAIN_REGEX,   /* a text that as a whole matches the regular expression `text`
                          (constrain/regex.h) */
    CONSTRAIN_GRAMMAR, /* the grammar `text`, in GBNF or Lark's form (constrain/grammar.h) */
    CONSTRAIN_SCHEMA,  /* a JSON text that satisfies `schema` (constrain/schema.h) */
    CONSTRAIN_OBJECT,  /* any JSON object */
    CONSTRAIN_SEQ,     /* the children, one after the other */
    CONSTRAIN_ALT,     /* any one child */
    CONSTRAIN_REPEAT,  /* the only child, `min` to `max` times; max -1: any number */
    CONSTRAIN_WITHOUT, /* any text that does not contain `text` */
};

/* The types of JSON, to be combined as a set of bits. */
enum constrain_type {
    CONSTRAIN_TYPE_NULL = 1,
    CONSTRAIN_TYPE_BOOLEAN = 2,
    CONSTRAIN_TYPE_NUMBER = 4,
    CONSTRAIN_TYPE_STRING = 8,
    CONSTRAIN_TYPE_ARRAY = 16,
    CONSTRAIN_TYPE_OBJECT = 32,
    CONSTRAIN_TYPES_ALL = 63
};
#define CONSTRAIN_TYPE_COUNT 6

/* How the members of an object are written as tags, one for each, in this order:
 *   open NAME named gap value line VALUE line close after
 * `gap`, `line` and `after` are white space or "". VALUE never contains `close`. */
struct constrain_tags {
    const char *open;  /* "<parameter=" */
    const char *named; /* ">" */
    const char *gap;
    const char *value; /* "<arg_value>"; "": nothing stands between name and value */
    /* typed[i] replaces `value` before a VALUE of the type 1 << i (enum constrain_type), so that
     * the tags say its type, or whether it is a string; all NULL: they do not say */
    const char *typed[CONSTRAIN_TYPE_COUNT];
    const char *line;
    const char *close; /* "</parameter>" */
    const char *after;
    const char *behind_close; /* then the tag's name and this text follow on `close`; NULL: not */
    const char *item; /* values nest: the members of an object are tags, and so are the elements of
                         an array, by this name; NULL: arrays and objects are JSON */
    const char *raw[2]; /* "<![CDATA[" and "]]>", which may stand around a string that then may
                           contain `close`; NULL: nothing may */
};

/* How values are written by models that do not write JSON. The outermost object is
 *   brackets[0] NAME assign VALUE , NAME assign VALUE brackets[1]
 * Arrays and inner objects have the brackets of JSON, and inner objects a ':'. */
struct constrain_notation {
    const char *brackets; /* "()" */
    const char *assign;   /* one character */
    const char *mark;     /* stands before and after a string, whose characters stand for themselves
                             and never make up a mark; then names have no quotes in inner objects,
                             either. NULL: strings and inner names are JSON's */
    const char *space;    /* stands after ',' and ':' */
    const char *words[3]; /* null, false, true */
};

/* Returns whether the names of members have no quotes, in the outermost object or in inner ones.
 * `notation`: NULL is JSON. */
static inline bool constrain_plain_names(const struct constrain_notation *notation,
                                         bool outermost) {
    return notation != NULL && (outermost || notation->mark != NULL);
}

/* A part and all that it points to are borrowed: they stay valid until constrain_open returns,
 * which keeps no pointer to them. */
struct constrain_part {
    enum constrain_kind kind;
    const char
        *field; /* where the client wrote it, for errors: "response_format.json_schema.schema" */
    const char *text;
    size_t size;
    const cJSON *schema;
    bool only_objects;                 /* SCHEMA: only instances that are objects */
    const struct constrain_tags *tags; /* SCHEMA: how the members of objects are written as tags
                                          (constrain/schema.h); NULL: as JSON */
    const struct constrain_notation
        *notation; /* SCHEMA, OBJECT: how an object is written that is the arguments of a call;
                      NULL: as JSON. All parts of a language that have a notation have the same */
    bool closed; /* SCHEMA: an object that declares members has no others, unless the schema says so
                    (constrain/schema.h) */
    bool one_spacing; /* set in the outermost part: JSON has one space after ',' and ':' and no
                         other white space, as chat templates write it */
    const struct constrain_part *children;
    int count;
    int min, max;
};

/* Returns the types that a schema, which is a part of `root`, allows by its own keywords and by
 * those of the definitions that it refers to. An instance never has another type. Returns all types
 * if finding out would take too long. */
unsigned constrain_types(const cJSON *root, const cJSON *schema);

/* Writes a key by which caches find a part: two parts have equal keys exactly if they are equal. */
void constrain_part_write(const struct constrain_part *part, struct buf *out);

/* ---- Tokens ---- */

/* The vocabulary as a trie. Immutable after opening: shared by threads and languages. */
struct constrain_tokens;

struct constrain_vocabulary {
    int32_t size; /* tokens 0 .. size - 1; masks have as many bits */
    /* Returns the bytes that a token adds to a text; 0 for special tokens. The bytes stay valid
     * during the call of constrain_tokens_open. */
    size_t (*token_bytes)(const void *arg, int32_t id, const char **bytes);
    const void *arg;
};

/* ERR_NOMEM; ERR_LIMIT: a token is longer than 65534 bytes. */
int constrain_tokens_open(const struct constrain_vocabulary *vocabulary,
                          struct constrain_tokens **out);
void constrain_tokens_close(struct constrain_tokens *tokens);

static inline size_t constrain_mask_words(int32_t vocabulary_size) {
    return ((size_t)vocabulary_size + 31) / 32;
}

/* ---- Compiled languages ---- */

struct constrain;

/* Memory that several languages share. A language that finds no room in it forgets its states. */
struct constrain_budget {
    _Atomic size_t used; /* bytes that all languages use together */
    size_t limit;
};

/* Compiles a language. `tokens` and `budget` (NULL: none) outlive it. Takes milliseconds to
 * seconds, too long for an event loop. The fault's text names the keyword or construct for
 * ERR_UNSUPPORTED, the mistake for ERR_INVALID, and what is too large for ERR_LIMIT. ERR_FULL: the
 * budget has no room now. fault->field is the part's field and, in a schema, the path below it. */
int constrain_open(const struct constrain_part *part, const struct constrain_tokens *tokens,
                   struct constrain_budget *budget, struct constrain **out, struct fault *fault);
void constrain_close(struct constrain *constrain);

/* How far one answer has been read; all zero before its first byte. */
struct constrain_at {
    uint64_t generation;
    size_t read; /* bytes of the text */
    /* After the state was forgotten: the bytes that had been read before, and the most bytes that
     * were read again by calls for this text that ended with ERR_BUSY. */
    size_t reached, again;
    uint32_t state;
    uint32_t work; /* work of such calls since `again` grew */
};

/* Continues to read a text at `at`. `text` is the whole text from its beginning, because forgotten
 * states must be found again: when the limits on what is learned are reached, only the states of
 * the last CONSTRAIN_KEPT_MAX answers are kept. ERR_INVALID: no string of the language begins with
 * the text. Also ERR_LIMIT, ERR_NOMEM. */
int constrain_read(struct constrain *constrain, struct constrain_at *at, const char *text,
                   size_t size);

struct constrain_next {
    bool accepts;   /* the text is whole as it is */
    bool continues; /* some bytes may follow it */
};

/* Continues to read a text, and says what may follow it. `mask` (NULL: not wanted) has
 * constrain_mask_words words. The errors are those of constrain_read. */
int constrain_next(struct constrain *constrain, struct constrain_at *at, const char *text,
                   size_t size, uint32_t *mask, struct constrain_next *next);

/* How much one call may do. */
struct constrain_effort {
    uint64_t work; /* the most work to spend; after the call, the work that was spent. A unit takes
                      up to 1 us */
    bool may_wait; /* whether the call may wait for threads that use the language and free learned
                      states */
};

/* Does what constrain_next does, within a given effort. ERR_BUSY: the effort was not enough.
 * Whatever was learned is kept, so calling again for the same text continues the work. Repeated
 * calls with growing efforts end: at the latest with ERR_LIMIT, when CONSTRAIN_MASK_WORK_MAX was
 * spent and no more of a forgotten text was read again. */
int constrain_next_within(struct constrain *constrain, struct constrain_at *at, const char *text,
                          size_t size, uint32_t *mask, struct constrain_next *next,
                          struct constrain_effort *effort);

/* Writes at most `most` bytes that probably follow a text, because the language allows nothing else
 * or only white space (constrain/foresee.h), and returns how many. `at` is as constrain_next_within
 * left it for this text. Each byte counts as a unit of work, too. Also returns 0 if the state was
 * forgotten, if others use the language, or if the effort (its may_wait is not used) was not
 * enough. */
size_t constrain_foresee(struct constrain *constrain, const struct constrain_at *at,
                         const char *text, size_t size, char *out, size_t most,
                         struct constrain_effort *effort);

#endif
