#include "engine/steps/drafter.h"

#include <string.h>

#include "base/check.h"
#include "base/mem.h"

void drafter_open(struct drafter *drafter, const struct drafter_options *options,
                  int answer_vocab) {
    *drafter =
        (struct drafter){.options = *options,
                         .choices = options->vocab < answer_vocab ? options->vocab : answer_vocab};
    if (!options->kern) return;
    CHECK(options->places >= DRAFTER_PLACES_LEAST && options->texts > 0);
    drafter->texts = mem_must_alloc((size_t)options->texts, sizeof *drafter->texts);
    drafter->sampled = mem_must_alloc(DRAFTER_ASKED, sizeof *drafter->sampled);
    drafter->rows = mem_must_alloc(DRAFTER_ROWS, sizeof *drafter->rows);
    if (options->width == 0) return;
    const size_t width = (size_t)options->width;
    const size_t held = (size_t)options->texts * (DRAFTER_HELD + 1);
    drafter->hidden = mem_must_alloc(held * width, sizeof *drafter->hidden);
    drafter->inputs = mem_must_alloc(DRAFTER_ROWS * width, sizeof *drafter->inputs);
}

void drafter_close(struct drafter *drafter) {
    mem_free(drafter->texts);
    mem_free(drafter->sampled);
    mem_free(drafter->rows);
    mem_free(drafter->hidden);
    mem_free(drafter->inputs);
    *drafter = (struct drafter){0};
}

static int slot_of(const struct drafter *drafter, const struct drafter_text *text) {
    return (int)(text - drafter->texts);
}

static struct drafter_text new_text(const struct drafter *drafter) {
    return (struct drafter_text){.taken = true,
                                 .sinks = drafter->options.width ? 0 : DRAFTER_SINKS};
}

struct drafter_text *drafter_take(struct drafter *drafter) {
    for (int i = 0; i < drafter->options.texts; i++) {
        if (drafter->texts[i].taken) continue;
        drafter->texts[i] = new_text(drafter);
        return &drafter->texts[i];
    }
    return NULL;
}

void drafter_empty(struct drafter *drafter, struct drafter_text *text) {
    struct kern *kern = drafter->options.kern;
    kern->ops->release(kern, slot_of(drafter, text));
    *text = new_text(drafter);
}

void drafter_drop(struct drafter *drafter, struct drafter_text *text) {
    if (!text) return;
    drafter_empty(drafter, text);
    text->taken = false;
}

/* Returns the place at which a token of the sequence is read. */
static int32_t drafter_place_of(const struct drafter_text *text, int32_t token) {
    return text->from > 0 ? token - text->from + text->sinks : token;
}

static int32_t token_at_place(const struct drafter_text *text, int32_t place) {
    return text->from > 0 && place >= text->sinks ? place - text->sinks + text->from : place;
}

/* Returns the place behind the last entry; a text that has read nothing has none. */
static int32_t end_place(const struct drafter_text *text) {
    if (text->read == text->from) return 0;
    return drafter_place_of(text, text->read) + text->guessed;
}

/* The place of hidden state number `held` of those that wait. */
static float *drafter_hidden_at(const struct drafter *drafter, const struct drafter_text *text,
                                int32_t held) {
    const ptrdiff_t width = drafter->options.width, first = slot_of(drafter, text);
    return drafter->hidden + (first * (DRAFTER_HELD + 1) + held) * width;
}

/* Begins a block's text with a token whose hidden state waits. */
static void begin_anew(struct drafter *drafter, struct drafter_text *text, int32_t token,
                       int32_t held) {
    drafter_empty(drafter, text);
    text->from = text->read = token;
    text->held = held;
}

float *drafter_hold(struct drafter *drafter, struct drafter_text *text, int32_t token) {
    CHECK(drafter->options.width > 0 && token > 0);
    if (text->held == DRAFTER_HELD || text->read + text->held != token)
        begin_anew(drafter, text, token, 0);
    return drafter_hidden_at(drafter, text, text->held++);
}

int drafter_settle(struct drafter *drafter, struct drafter_text *text, const int32_t *tokens,
                   int32_t count) {
    struct kern *kern = drafter->options.kern;
    const bool block = drafter->options.width > 0;
    int32_t right = 0;
    CHECK(text->read < count);
    while (!block && right < text->guessed && text->read + 1 < count &&
           tokens[text->read] == text->guesses[right]) {
        right++;
        text->read++;
    }
    bool wrong = right < text->guessed;
    text->guessed = 0;
    if (drafter_place_of(text, count) + DRAFT_MAX > drafter->options.places) {
        if (block)
            begin_anew(drafter, text, text->read, text->held);
        else
            drafter_empty(drafter, text);
        return 0;
    }
    return wrong ? kern->ops->truncate(kern, slot_of(drafter, text), end_place(text)) : 0;
}

void drafter_begin(struct drafter_text *text, int32_t count, int32_t rows) {
    CHECK(text->read == 0 && text->guessed == 0 && rows > 0);
    text->from = count - rows > DRAFTER_SINKS ? count - rows : 0;
    text->read = text->from;
}

/* Behind the tokens that are known, the block reads its own hidden state. */
static void add_hidden(struct drafter *drafter, const struct drafter_text *text, int32_t token,
                       int32_t row) {
    const ptrdiff_t width = drafter->options.width;
    const int32_t held = token - text->read < text->held ? token - text->read : DRAFTER_HELD;
    memcpy(drafter->inputs + row * width, drafter_hidden_at(drafter, text, held),
           (size_t)width * sizeof *drafter->inputs);
}

/* Adds the rows of a text to a step. Returns false if a token does not exist in this model. */
static bool add_text_rows(struct drafter *drafter, const struct drafter_ask *ask,
                          struct kern_span *span, int32_t row) {
    int32_t first = end_place(ask->text), end = drafter_place_of(ask->text, ask->end);
    *span = (struct kern_span){
        .slot = slot_of(drafter, ask->text), .row = row, .count = end - first, .pos = first};
    CHECK(span->count > 0 && row + span->count <= DRAFTER_ROWS && end <= drafter->options.places);
    for (int32_t place = first; place < end; place++) {
        int32_t token = ask->tokens[token_at_place(ask->text, place)];
        if (token >= drafter->options.vocab) return false;
        drafter->rows[row + place - first] = token;
        if (drafter->options.width > 0)
            add_hidden(drafter, ask->text, token_at_place(ask->text, place), row + place - first);
    }
    return true;
}

static void note_rows(const struct drafter *drafter, const struct drafter_ask *ask) {
    struct drafter_text *text = ask->text;
    int32_t guesses = ask->end - ask->known, old = text->guessed, before = text->read;
    text->read = guesses > 0 ? ask->known : ask->end;
    if (drafter->options.width > 0 && text->read > before) {
        text->held -= text->read - before;
        memmove(drafter_hidden_at(drafter, text, 0),
                drafter_hidden_at(drafter, text, text->read - before),
                (size_t)text->held * (size_t)drafter->options.width * sizeof *drafter->hidden);
    }
    for (text->guessed = guesses > 0 ? guesses : 0; old < text->guessed; old++)
        text->guesses[old] = ask->tokens[ask->known + old];
}

/* The numbers of a vocabulary that was filled up to a rounder size are no tokens of the answer, and
 * its masks have no bits for them. */
static int sample_guesses(struct drafter *drafter, const float *logits,
                          const struct kern_sample *samples, int count) {
    struct kern *kern = drafter->options.kern;
    const int vocab = drafter->options.vocab;
    int rc = 0;
    if (drafter->choices == vocab)
        return kern->ops->sample(kern, logits, count, vocab, samples, drafter->sampled);
    for (int i = 0; i < count && rc == 0; i++)
        rc = kern->ops->sample(kern, logits + (size_t)i * (size_t)vocab, 1, drafter->choices,
                               &samples[i], &drafter->sampled[i]);
    return rc;
}

/* Keeps the hidden states behind which the tokens were guessed, for the guesses after them. */
static int take_hidden(struct drafter *drafter, const struct drafter_ask *asks, int count) {
    struct kern *kern = drafter->options.kern;
    const ptrdiff_t width = drafter->options.width;
    int rc = 0, wanted = 0;
    if (width == 0) return 0;
    const float *hidden = drafter->options.wanted_hidden(drafter->options.model);
    for (int i = 0; i < count && rc == 0; i++)
        if (asks[i].wants)
            rc = kern->ops->download(kern, drafter_hidden_at(drafter, asks[i].text, DRAFTER_HELD),
                                     hidden + wanted++ * width, (size_t)width * sizeof *hidden);
    return rc;
}

int drafter_step(struct drafter *drafter, const struct drafter_ask *asks, int count) {
    struct kern *kern = drafter->options.kern;
    struct kern_span spans[DRAFTER_ASKED];
    struct kern_sample samples[DRAFTER_ASKED];
    int32_t want[DRAFTER_ASKED], rows = 0;
    int wanted = 0;
    const float *logits = NULL;
    CHECK(count > 0 && count <= DRAFTER_ASKED);
    for (int i = 0; i < count; i++) {
        if (!add_text_rows(drafter, &asks[i], &spans[i], rows)) return ERR_INVALID;
        rows += spans[i].count;
        if (!asks[i].wants) continue;
        samples[wanted] = asks[i].sample;
        want[wanted++] = rows - 1;
    }
    const struct kern_batch batch = {
        .tokens = drafter->rows, .spans = spans, .rows = rows, .span_count = count};
    int rc = drafter->options.model_step(drafter->options.model, &batch, drafter->inputs, want,
                                         wanted, &logits);
    if (rc == 0)
        rc = wanted ? sample_guesses(drafter, logits, samples, wanted) : kern->ops->sync(kern);
    if (rc == 0) rc = take_hidden(drafter, asks, count);
    for (int i = 0; i < count && rc == 0; i++) note_rows(drafter, &asks[i]);
    return rc;
}
