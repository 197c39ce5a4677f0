#include "constrain/ahead.h"

#include <string.h>

#include "base/mem.h"

#define AHEAD_BYTES 1024 /* length of the followed text */

static bool is_letter(int byte) {
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') ||
           (byte >= '0' && byte <= '9') || byte == '_';
}

/* The bytes of the followed text since the last punctuation: `follow` picks the next byte by them.
 */
struct word {
    struct byte_set used;
    bool begun;
    bool quoted; /* inside a JSON string, which only '"' ends */
};

/* Chooses the first byte of a list that may follow; -1: none does. */
static int first_of(struct automaton *a, uint32_t state, const char *list,
                    const struct byte_set *but_not) {
    for (; *list != '\0'; list++)
        if (!byte_set_has(but_not, (unsigned char)*list) &&
            automaton_move(a, state, (unsigned char)*list) > AUTOMATON_DEAD)
            return *list;
    return -1;
}

/* Chooses the next byte, so that the text is short and reaches most kinds of places: a space after
 * ',' and ':', as most models write; at the beginning of a word a letter or digit; then a byte that
 * ends the word, or one that the word does not have yet. -1: no byte may follow. *choices: 2 if
 * more than one byte may follow. */
static int ahead_choose(struct automaton *a, uint32_t state, int last, const struct word *word,
                        int *choices) {
    const char *ends = word->quoted ? "\"" : "\"}],:";
    static const char inner[] = "a@.1-T:/e0";
    static const struct byte_set none;
    int any = -1, byte = -1;
    *choices = 0;
    for (int class = 0; class < a->pool.classes && *choices < 2; class ++) {
        if (automaton_move(a, state, a->pool.example[class]) <= AUTOMATON_DEAD) continue;
        if (any < 0) any = a->pool.example[class];
        (*choices)++;
    }
    if (*choices < 2) return any;
    if ((last == ',' || last == ':') && automaton_move(a, state, ' ') > AUTOMATON_DEAD) return ' ';
    if (word->begun) byte = first_of(a, state, ends, &none);
    if (byte < 0) byte = first_of(a, state, inner, &word->used);
    if (byte < 0) byte = first_of(a, state, ends, &none);
    if (byte < 0) byte = first_of(a, state, inner, &none);
    return byte >= 0 ? byte : any;
}

static void note_byte(struct word *word, int byte) {
    bool ends = byte != '\0' && strchr(word->quoted ? "\"" : " \"{}[],:", byte) != NULL;
    if (ends) {
        *word = (struct word){.quoted = (byte == '"') != word->quoted};
        return;
    }
    byte_set_add(&word->used, (unsigned)byte & 255);
    word->begun = true;
}

/* Follows one text and makes masks along it. Inside a word of which the language leaves no choice,
 * tokens seldom end, so no mask is made there. */
static void follow(struct automaton *a, struct mask_maker *maker, uint32_t *mask) {
    uint32_t state = automaton_start(a);
    struct word word = {0};
    int byte = 0, choices;
    for (int i = 0; i < AHEAD_BYTES && byte >= 0 && a->pool.rc == 0; i++) {
        int last = byte;
        byte = ahead_choose(a, state, last, &word, &choices);
        if (a->pool.rc == 0 && byte >= 0 && (choices > 1 || !is_letter(last)))
            (void)mask_make(maker, a, state, mask);
        if (a->pool.rc != 0 || byte < 0) return;
        state = automaton_move(a, state, (unsigned)byte & 255);
        note_byte(&word, byte);
    }
}

void ahead_learn(struct automaton *a, struct mask_maker *maker, uint64_t work) {
    struct node_pool *pool = &a->pool;
    uint32_t *mask = mem_try_alloc(maker->tokens->words + 1, sizeof *mask);
    if (mask == NULL || pool->rc != 0) return;
    pool->work_limit = pool->work + work;
    follow(a, maker, mask);
    mem_free(mask);
    if (pool->rc == 0 || node_pool_resume(pool)) return;
    automaton_reset(a);
    mask_maker_forget(maker);
}
