#include "engine/steps/draft.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/check.h"
#include "base/err.h"
#include "base/mem.h"
#include "engine/engine_pictures.h"

enum { BITS_LEAST = 8, BITS_MOST = 16 };

/* Rates of confirmation that are expected before anything was tried. They count as much as
 * EXPECTED_WEIGHT tokens. */
static const float expected[DRAFT_CLASSES] = {0.4f,  0.55f, 0.7f, 0.85f, 0.85f,
                                              0.25f, 0.45f, 0.6f, 0.8f,  0.95f};
/* The classes of a draft model's tokens end at these probabilities, the last one at 1. */
static const double sure_below[DRAFT_SURENESS - 1] = {0.3, 0.5, 0.7, 0.9};
#define MODEL_RATE      0.65f  /* the expected rate of all tokens of a draft model */
#define RECENT_TOKENS   16.0f  /* tokens of which model_rate is a mean */
#define MODEL_FORGOTTEN 0.003f /* part by which a step without it brings it back to MODEL_RATE */
#define EXPECTED_WEIGHT 2.0f
#define RECENT          48.0f /* tokens that a count covers; when it has more, it is halved */
#define FORGOTTEN       0.02f /* part of the counts that an unused draft takes away */

int draft_open(struct draft *draft, const int32_t *predicted, int32_t predicted_count,
               int32_t prompt_count, int32_t room) {
    size_t places = (size_t)room + (size_t)predicted_count;
    int bits = BITS_LEAST;
    while (bits < BITS_MOST && ((size_t)1 << bits) < places) bits++;
    *draft = (struct draft){.predicted = predicted,
                            .predicted_count = predicted_count,
                            .bits = bits,
                            .from = predicted_count > 0 ? 0 : -1,
                            .begun = prompt_count,
                            .model_rate = MODEL_RATE};
    draft->heads = mem_try_alloc((size_t)1 << bits, sizeof *draft->heads);
    draft->older = mem_try_alloc(places > 0 ? places : 1, sizeof *draft->older);
    if (draft->heads && draft->older) return 0;
    draft_close(draft);
    return ERR_NOMEM;
}

void draft_close(struct draft *draft) {
    mem_free(draft->heads);
    mem_free(draft->older);
    draft->heads = draft->older = NULL;
}

static int32_t token_at(const struct draft *draft, const int32_t *tokens, int32_t place) {
    int32_t before = draft->predicted_count;
    return place < before ? draft->predicted[place] : tokens[place - before];
}

/* Returns the head of the chain for the DRAFT_KEY tokens that end before `end`. */
static uint32_t key_chain(const struct draft *draft, const int32_t *tokens, int32_t end) {
    uint32_t hash = 0;
    for (int32_t i = end - DRAFT_KEY; i < end; i++)
        hash = (hash ^ (uint32_t)token_at(draft, tokens, i)) * 0x9e3779b1u;
    return hash >> (32 - draft->bits);
}

/* Returns how many tokens the texts before two places have in common. */
static int32_t common_before(const struct draft *draft, const int32_t *tokens, int32_t place,
                             int32_t end) {
    int32_t length = 0;
    while (length < DRAFT_LONGEST && length < place &&
           token_at(draft, tokens, place - 1 - length) == token_at(draft, tokens, end - 1 - length))
        length++;
    return length;
}

/* Returns the place where the source of the last draft continues behind the text; -1: the text went
 * on in another way. */
static int32_t find_continuation(const struct draft *draft, const int32_t *tokens, int32_t count) {
    int32_t added = count - draft->begun;
    if (draft->from < 0 || added < 0) return -1;
    if (draft->from < draft->predicted_count && draft->from + added >= draft->predicted_count)
        return -1; /* the prompt does not follow the predicted text */
    for (int32_t i = 0; i < added; i++)
        if (token_at(draft, tokens, draft->from + i) != tokens[draft->begun + i]) return -1;
    return draft->from + added;
}

/* Adds the places before `end` to the chains of the keys in front of them. Returns whether all of
 * them are added. */
static bool note_places(struct draft *draft, const int32_t *tokens, int32_t end) {
    int32_t stop = end - draft->noted > DRAFT_NOTED ? draft->noted + DRAFT_NOTED : end;
    for (; draft->noted < stop; draft->noted++) {
        /* The predicted text and the prompt have no key in common. */
        int32_t begin = draft->noted < draft->predicted_count ? 0 : draft->predicted_count;
        if (draft->noted - begin < DRAFT_KEY) continue;
        int32_t *head = &draft->heads[key_chain(draft, tokens, draft->noted)];
        draft->older[draft->noted] = *head;
        *head = draft->noted + 1;
    }
    return stop == end;
}

/* Writes at most `most` tokens that followed the end of a text of `count` tokens elsewhere. */
static int32_t find_followers(struct draft *draft, int32_t *tokens, int32_t count, int32_t most) {
    int32_t end = draft->predicted_count + count;
    int32_t best = find_continuation(draft, tokens, count), longest = 0;
    if (best >= 0) longest = common_before(draft, tokens, best, end);
    int32_t place = end < DRAFT_KEY ? 0 : draft->heads[key_chain(draft, tokens, end)];
    for (int i = 0; i < DRAFT_CHAIN && place > 0; i++, place = draft->older[place - 1]) {
        int32_t common = common_before(draft, tokens, place - 1, end);
        if (common < DRAFT_KEY || common <= longest) continue;
        longest = common;
        best = place - 1;
    }
    draft->from = best;
    draft->begun = count;
    draft->length_class = longest <= 4 ? 0 : longest <= 8 ? 1 : longest <= 16 ? 2 : 3;
    if (best < 0) return 0;
    int32_t left = draft->predicted_count - best;
    if (left > 0 && most > left) most = left;
    /* If the text repeats a short part, the source runs past the end of the text and continues in
     * the draft itself. */
    for (int32_t i = 0; i < most; i++) {
        tokens[count + i] = token_at(draft, tokens, best + i);
        if (engine_is_picture_id(tokens[count + i])) return i; /* no answer has it */
    }
    return most;
}

static double class_rate(const struct draft *draft, int c) {
    return ((double)draft->confirmed[c] + EXPECTED_WEIGHT * expected[c]) /
           ((double)draft->tried[c] + EXPECTED_WEIGHT);
}

int32_t draft_find(struct draft *draft, int32_t *tokens, int32_t count, const int32_t *foreseen,
                   int32_t foreseen_count, int32_t most) {
    draft->foreseen = draft->modelled = 0;
    if (!note_places(draft, tokens, draft->predicted_count + count)) return 0;
    int32_t found = find_followers(draft, tokens, count, most);
    bool surer =
        found == 0 || class_rate(draft, DRAFT_FORESEEN) >= class_rate(draft, draft->length_class);
    if (foreseen_count == 0 || !surer) return found;
    draft->foreseen = foreseen_count < most ? foreseen_count : most;
    memcpy(tokens + count, foreseen, (size_t)draft->foreseen * sizeof *tokens);
    return draft->foreseen +
           find_followers(draft, tokens, count + draft->foreseen, most - draft->foreseen);
}

static int class_of(const struct draft *draft, int32_t i) {
    if (i < draft->modelled) return draft->sureness[i];
    return i < draft->foreseen ? DRAFT_FORESEEN : draft->length_class;
}

double draft_rate(const struct draft *draft, int32_t i) {
    return class_rate(draft, class_of(draft, i));
}

void draft_add_model(struct draft *draft, double probability) {
    int sureness = 0;
    CHECK(draft->modelled < DRAFT_MAX);
    while (sureness < DRAFT_SURENESS - 1 && probability >= sure_below[sureness]) sureness++;
    draft->sureness[draft->modelled++] = (uint8_t)(DRAFT_MODEL + sureness);
    draft->model_rate +=
        ((float)class_rate(draft, DRAFT_MODEL + sureness) - draft->model_rate) / RECENT_TOKENS;
}

void draft_charge_model(struct draft *draft, double steps) {
    const float lost = draft->model_lost + (float)steps;
    draft->model_lost = fminf(fmaxf(lost, DRAFT_LOST_LEAST), DRAFT_LOST_MOST);
}

void draft_skip_model(struct draft *draft) {
    draft->model_rate += MODEL_FORGOTTEN * (MODEL_RATE - draft->model_rate);
}

static void learn_class(struct draft *draft, int c, int32_t tried, int32_t confirmed) {
    float stays = tried == 0 ? 1 - FORGOTTEN : draft->tried[c] > RECENT ? 0.5f : 1;
    draft->tried[c] = draft->tried[c] * stays + (float)tried;
    draft->confirmed[c] = draft->confirmed[c] * stays + (float)confirmed;
}

/* Tokens behind a wrong one do not count, because they were computed from it. */
void draft_learn(struct draft *draft, int32_t tried, int32_t confirmed) {
    CHECK(confirmed <= tried);
    if (tried == 0) learn_class(draft, class_of(draft, 0), 0, 0);
    for (int32_t i = 0; i < tried && i <= confirmed; i++)
        learn_class(draft, class_of(draft, i), 1, i < confirmed);
}
