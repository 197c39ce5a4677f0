/* Limits of constrained decoding. A schema, an expression and a grammar come from a client: each
 * limit bounds memory or time that one of them can cost. A text beyond a limit of compilation is
 * refused (ERR_LIMIT, with the field); an answer that runs into a limit of a step ends with an
 * error and harms no other. Work is counted in constructed nodes, never in seconds, so that the
 * same request has the same result on every machine. */
#ifndef KEEPD_CONSTRAIN_LIMITS_H
#define KEEPD_CONSTRAIN_LIMITS_H

#ifdef CONSTRAIN_LITTLE_WORK /* builds with sanitizers, for fuzzers that run many texts */
#define CONSTRAIN_WORK_MAX      100000
#define CONSTRAIN_MASK_WORK_MAX 12500
#define CONSTRAIN_MASK_BYTES    16384
#define CONSTRAIN_PREPARED      64
#define CONSTRAIN_AHEAD_WORK    500
#else
#define CONSTRAIN_WORK_MAX      4000000 /* work of one compilation: at most a second or two */
#define CONSTRAIN_MASK_WORK_MAX 500000  /* work of one mask */
#define CONSTRAIN_MASK_BYTES    8388608 /* masks that one language keeps */
#define CONSTRAIN_PREPARED      4096    /* expressions for which a new language has memory */
#define CONSTRAIN_AHEAD_WORK    20000 /* work on masks that are made when a language is compiled */
#endif
/* The work that a compilation may do: for each byte of the language's text, and in addition. So a
 * short text cannot cost seconds. Schemas in use need up to 210 a byte, short ones up to 225000 in
 * all. */
#define CONSTRAIN_WORK_PER_BYTE 256
#define CONSTRAIN_WORK_LEAST    500000

#define CONSTRAIN_NODES_MAX    500000  /* expressions of one language, compiled; 32 bytes each */
#define CONSTRAIN_CHILDREN_MAX 4000000 /* alternatives in all expressions together */
#define CONSTRAIN_LAZY_NODES_MAX                                                                   \
    250000                             /* expressions that answers add, until they are forgotten   \
                                        */
#define CONSTRAIN_STATES_MAX     16384 /* states that answers add, likewise */
#define CONSTRAIN_KEPT_MAX       64    /* answers whose states are kept when states are forgotten */
#define CONSTRAIN_STACKS_MAX     250000  /* continuations that answers add, likewise */
#define CONSTRAIN_ITEMS_KEPT_MAX 1000000 /* readings in all states, likewise */
#define CONSTRAIN_ITEMS_MAX      20000   /* parallel readings of one text */
#define CONSTRAIN_SEARCH_MAX     20000   /* expressions visited to find out whether one is empty */
#define CONSTRAIN_TEXT_BYTES     4194304 /* one regular expression or grammar */
#define CONSTRAIN_REPEAT_MAX     1000000 /* a bound of a repetition, a length, or a count */
#define CONSTRAIN_DEPTH_MAX      256     /* groups inside each other */
#define CONSTRAIN_RULES_MAX      100000  /* rules of a grammar, recursive parts of a schema */
#define CONSTRAIN_BRANCHES_MAX   4096    /* combinations of a schema's anyOf, oneOf and allOf */
#define CONSTRAIN_PATTERNS_MAX   6       /* patternProperties of one object */
#define CONSTRAIN_DIGITS_MAX     40      /* decimal digits of a bound of numbers */
#define CONSTRAIN_DIVISOR_MAX    100000  /* multipleOf, without its decimal point */
#define CONSTRAIN_SPACE_MAX      32      /* indentation of a JSON text */
#define CONSTRAIN_QUANTIFIERS    4       /* quantifiers in a row */

/* Levels of recursion that one derivative of an expression needs: of compiled expressions, and of
 * those that answers derive from them, which lie up to about twice as deep. A level takes less than
 * 1 KiB of the stack, also in builds with sanitizers. */
#define CONSTRAIN_LEVELS_MAX      1000
#define CONSTRAIN_LAZY_LEVELS_MAX 3000

/* The memory that all languages of a server share. While a language is compiled, the most memory
 * that the limits above allow is reserved for it. A request that finds no room is refused; the
 * client may try again. */
#define CONSTRAIN_MEMORY_MAX    ((size_t)1 << 30)
#define CONSTRAIN_COMPILE_BYTES ((size_t)160 << 20)

#endif
