#include "tests/sim/world.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/splitmix.h"
#include "engine/engine_pictures.h"
#include "kernels/cpu/cpu.h"

enum { QKV = (WORLD_HEADS_Q + 2 * WORLD_HEADS_KV) * WORLD_DIM, OUT = WORLD_HEADS_Q * WORLD_DIM };

#define STATE_FLOATS        (WORLD_CHANNELS * (WORLD_WIDTH - 1))
#define STATE_PAGES(floats) ((STATE_FLOATS + (floats)-1) / (floats)) /* with so many on a page */

uint64_t world_mix(uint64_t x) {
    return splitmix_next(&x);
}

/* ---- Planned failures ---- */

/* A backend's functions know only their own instance, so the plan is global. */
static struct {
    enum world_op op;
    long left; /* < 0: none */
    int rc;
    const struct kern_ops *real;
} plan = {.left = -1};

void world_fail(enum world_op op, long n, int rc) {
    plan.op = op;
    plan.left = n;
    plan.rc = rc;
}

bool world_fail_pending(void) {
    return plan.left >= 0;
}

void world_fail_never(void) {
    plan.left = -1;
}

static int fails(enum world_op op) {
    if (plan.left < 0 || plan.op != op) return 0;
    return plan.left-- == 0 ? plan.rc : 0;
}

static int begin_step(struct kern *kern, const struct kern_batch *batch) {
    int rc = fails(WORLD_BEGIN_STEP);
    return rc != 0 ? rc : plan.real->begin_step(kern, batch);
}

static int evict(struct kern *kern, const struct kern_evict *due, int count) {
    int rc = fails(WORLD_EVICT);
    return rc != 0 ? rc : plan.real->evict(kern, due, count);
}

static int sample(struct kern *kern, const float *logits, int rows, int vocab,
                  const struct kern_sample *params, struct kern_sampled *out) {
    int rc = fails(WORLD_SAMPLE);
    if (fails(WORLD_LOGITS) != 0)
        for (int i = 0; i < vocab; i++) ((float *)(uintptr_t)logits)[i] = NAN;
    return rc != 0 ? rc : plan.real->sample(kern, logits, rows, vocab, params, out);
}

static int sync_all(struct kern *kern) {
    int rc = fails(WORLD_SYNC);
    return rc != 0 ? rc : plan.real->sync(kern);
}

static int report(struct kern *kern, int slot, struct kern_report *out) {
    int rc = fails(WORLD_REPORT);
    return rc != 0 ? rc : plan.real->report(kern, slot, out);
}

static int truncate_at(struct kern *kern, int slot, int32_t pos) {
    int rc = fails(WORLD_TRUNCATE);
    return rc != 0 ? rc : plan.real->truncate(kern, slot, pos);
}

static int shift_slot(struct kern *kern, const struct kern_shift *shift) {
    int rc = fails(WORLD_SHIFT);
    return rc != 0 ? rc : plan.real->shift(kern, shift);
}

static int fork_slot(struct kern *kern, int from, int to) {
    int rc = fails(WORLD_FORK);
    return rc != 0 ? rc : plan.real->fork(kern, from, to);
}

static int export_block(struct kern *kern, int slot, int block, void *to) {
    int rc = fails(WORLD_EXPORT);
    return rc != 0 ? rc : plan.real->snapshot_export(kern, slot, block, to);
}

static int import_block(struct kern *kern, int slot, int block, const struct kern_block *from) {
    int rc = fails(WORLD_IMPORT);
    return rc != 0 ? rc : plan.real->snapshot_import(kern, slot, block, from);
}

static void plan_failures(struct world *w) {
    w->real = plan.real = w->kern->ops;
    w->ops = *w->real;
    w->ops.begin_step = begin_step;
    w->ops.evict = evict;
    w->ops.sample = sample;
    w->ops.sync = sync_all;
    w->ops.report = report;
    w->ops.truncate = truncate_at;
    w->ops.shift = shift_slot;
    w->ops.fork = fork_slot;
    w->ops.snapshot_export = export_block;
    w->ops.snapshot_import = import_block;
    w->kern->ops = &w->ops;
}

/* ---- The fake model ---- */

static float unit(uint64_t x) {
    return (float)(world_mix(x) >> 40) * 0x1p-24f;
}

static void fill_rows(struct world *w, const struct kern_batch *batch, int layer) {
    for (int s = 0; s < batch->span_count; s++)
        for (int i = 0; i < batch->spans[s].count; i++) {
            int row = batch->spans[s].row + i, pos = batch->spans[s].pos + i;
            uint64_t key = ((uint64_t)batch->tokens[row] << 32) ^ (uint64_t)(pos * 64 + layer);
            for (int d = 0; d < QKV; d++)
                w->qkv[row * QKV + d] = 2 * unit(key * 977 + (uint64_t)d) - 1;
            for (int h = 0; h < WORLD_HEADS_KV; h++) {
                float u = unit(key * 31 + (uint64_t)h + 7);
                w->log_beta[row * WORLD_HEADS_KV + h] = -u * u * u * 0.2f - 1e-6f;
            }
        }
}

/* The head is the same in every world. To compute it in each step would take a third of a run. */
static float head[WORLD_LAYERS][WORLD_VOCAB][OUT];

static void fill_head(void) {
    for (int layer = 0; layer < WORLD_LAYERS; layer++)
        for (int v = 0; v < WORLD_VOCAB; v++)
            for (int d = 0; d < OUT; d++)
                head[layer][v][d] = 2 * unit((uint64_t)(v * 4096 + d * 4 + layer)) - 1;
}

static void add_logits(struct world *w, float *logits, const int32_t *want, int want_count,
                       int layer) {
    for (int i = 0; i < want_count; i++)
        for (int v = 0; v < WORLD_VOCAB; v++) {
            const float *out = w->out + (size_t)want[i] * OUT;
            float sum = 0;
            for (int d = 0; d < OUT; d++) sum += out[d] * head[layer][v][d];
            logits[i * WORLD_VOCAB + v] += 3 * sum;
        }
}

/* Each state is fed by the tokens alone, so that logits tell which tokens it remembers. */
static void add_states(struct world *w, const struct kern_batch *batch, const int32_t *want,
                       int want_count) {
    enum { C = WORLD_CHANNELS };
    for (int state = 0; state < w->options.states; state++) {
        for (int row = 0; row < batch->rows; row++)
            for (int i = 0; i < 3 * C; i++)
                w->bcx[row * 3 * C + i] =
                    2 * unit((uint64_t)batch->tokens[row] * 4099 + (uint64_t)(i * 8 + state)) - 1;
        w->ops.short_conv(w->kern, state, w->mixed, w->bcx, w->taps, C, WORLD_WIDTH, batch);
        for (int i = 0; i < want_count; i++)
            for (int c = 0; c < C; c++)
                w->logits[i * WORLD_VOCAB + c % WORLD_VOCAB] += w->mixed[want[i] * C + c];
    }
}

static void bring_states(void *model, const struct kern_span *spans, int count) {
    struct world *w = model;
    const struct kern_batch batch = {
        .tokens = w->peeked, .spans = spans, .rows = w->peeked_count, .span_count = count};
    add_states(w, &batch, NULL, 0);
}

static void note_peeked(struct world *w, const struct kern_batch *batch) {
    w->peeked_count = 0;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        CHECK(!span->peeks || w->peeked_count + span->count <= SCHED_PEEK_ROWS);
        for (int k = 0; span->peeks && k < span->count; k++)
            w->peeked[w->peeked_count++] = batch->tokens[span->row + k];
    }
}

/* Checks a batch: rows dense and in order, each slot once, no more logits than agreed. */
/* Each row's places, and what its span is behind, follow from the tokens before it. */
static void check_places(const struct world *w, const struct kern_batch *batch, int index) {
    const struct kern_span *span = &batch->spans[index];
    const int32_t *tokens = w->sched.span_sequences[index]->tokens;
    int32_t place = 0;
    for (int32_t at = 0; at < span->pos + span->count;) {
        const struct engine_grid grid = engine_grid_of(tokens[at]);
        for (int i = 0; i < grid.rows * grid.columns; i++, at++) {
            const int32_t down = i / grid.columns, right = i % grid.columns;
            if (at == span->pos) CHECK(at - span->behind >= place);
            if (at == span->pos && i == 0) CHECK(at - span->behind == place);
            if (at < span->pos || at >= span->pos + span->count) continue;
            CHECK(batch->places || (down == 0 && right == 0));
            if (!batch->places) continue;
            const int32_t *axis = batch->places[span->row + at - span->pos].axis;
            CHECK(axis[0] == place && axis[1] == place + down && axis[2] == place + right);
        }
        place += grid.rows > grid.columns ? grid.rows : grid.columns;
    }
}

static void check_batch(struct world *w, const struct kern_batch *batch, const int32_t *want,
                        int want_count) {
    int rows = 0;
    CHECK(batch->rows > 0 && batch->rows <= w->options.rows);
    CHECK(want_count <= w->options.rows && want_count <= w->options.logits);
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        CHECK(span->row == rows && span->count > 0);
        rows += span->count;
        for (int k = 0; k < i; k++) CHECK(batch->spans[k].slot != span->slot);
        if (w->options.axes) check_places(w, batch, i);
    }
    CHECK(rows == batch->rows);
    for (int i = 0; i < want_count; i++) CHECK(want[i] >= 0 && want[i] < rows);
    CHECK(batch->span_count <= (int)(sizeof w->spans / sizeof *w->spans));
    memcpy(w->spans, batch->spans, (size_t)batch->span_count * sizeof *w->spans);
    w->span_count = batch->span_count;
    w->rows = batch->rows;
    w->want_count = want_count;
}

/* Spans of one row count as answers. */
static void spend(struct world *w, const struct kern_batch *batch) {
    int streams = 0;
    for (int i = 0; i < batch->span_count; i++) streams += batch->spans[i].count == 1;
    w->spent_ns += world_step_ns(streams, batch->rows - streams);
}

static int64_t spent(void *model) {
    return ((struct world *)model)->spent_ns;
}

static const float inv_freq[WORLD_DIM / 2] = {1, 0.5f, 0.25f, 0.1f, 0.05f, 0.01f, 0.001f, 0};
static const uint8_t axes[WORLD_DIM / 2] = {0, 1, 2, 0, 1, 2, 1, 0};
static const float *const rotations[WORLD_LAYERS] = {inv_freq, inv_freq};

static void run_layers(struct world *w, struct kern *kern, const struct kern_batch *batch,
                       float *logits, const int32_t *want, int want_count) {
    struct kern_attend_options attend = {.scale = 1.0f};
    memset(logits, 0, (size_t)want_count * WORLD_VOCAB * sizeof(float));
    for (int layer = 0; layer < WORLD_LAYERS; layer++) {
        fill_rows(w, batch, layer);
        attend.sliding_window = layer % 2 == 0 ? w->options.sliding_window : 0;
        const struct kern_rope rope = {
            .inv_freq = inv_freq, .axes = w->options.axes ? axes : NULL, .scale = 1};
        if (w->options.positions > 0) kern->ops->qk_rope(kern, w->qkv, NULL, NULL, 0, &rope, batch);
        kern->ops->write_kv(kern, layer, w->qkv, w->log_beta, batch);
        kern->ops->attend(kern, layer, w->out, w->qkv, batch, &attend);
        add_logits(w, logits, want, want_count, layer);
    }
}

static int begin_tile(void *encoder, const struct picture *picture, int tile) {
    struct world *w = encoder;
    w->picture = picture->digest[0];
    w->tile = tile;
    w->tile_rows = w->rows_of[w->picture] = picture->tile_tokens;
    w->parts = 0;
    return 0;
}

static int advance_tile(void *encoder, float *out, bool *done) {
    struct world *w = encoder;
    int rc = fails(WORLD_ENCODE);
    *done = ++w->parts == WORLD_TILE_PARTS;
    for (int i = 0; *done && i < w->tile_rows; i++)
        out[i] = (float)world_picture_row(w->picture, w->tile, i);
    return rc;
}

/* Rows that see each other are there up to their tile's last one. */
static void check_together(const struct world *w, const struct kern_given *given) {
    const int last = (int)given->rows[given->count - 1] - WORLD_VOCAB;
    if (given->together) CHECK(last % 10 == w->rows_of[last / 1000] - 1);
}

/* Puts the tokens that given rows stand for into their places. */
static void take_given(struct world *w, const struct kern_batch *batch) {
    memcpy(w->tokens, batch->tokens, (size_t)batch->rows * sizeof *w->tokens);
    for (int i = 0; i < batch->given_count; i++) {
        check_together(w, &batch->given[i]);
        for (int k = 0; k < batch->given[i].count; k++) {
            CHECK(w->tokens[batch->given[i].row + k] == 0);
            w->tokens[batch->given[i].row + k] = (int32_t)batch->given[i].rows[k];
        }
    }
    for (int i = 0; i < batch->rows; i++) CHECK(!engine_is_picture_id(w->tokens[i]));
}

static int fake_step(void *model, const struct kern_batch *step, const int32_t *want,
                     int want_count, const float **logits, const float **hidden) {
    struct world *w = model;
    check_batch(w, step, want, want_count);
    take_given(w, step);
    struct kern_batch own = *step, *batch = &own;
    own.tokens = w->tokens;
    spend(w, batch);
    int rc = w->ops.begin_step(w->kern, batch);
    if (rc != 0) return rc;
    run_layers(w, w->kern, batch, w->logits, want, want_count);
    note_peeked(w, batch);
    CHECK(want_count <= WORLD_WANTED);
    for (int i = 0; i < want_count; i++) w->wanted_hidden[i] = (float)batch->tokens[want[i]];
    add_states(w, batch, want, want_count);
    *logits = w->logits;
    if (hidden) *hidden = w->out;
    return 0;
}

/* ---- The draft model ---- */

/* Random numbers, and the backend's own functions: see plan. */
static struct {
    uint64_t state;
    int fails;
    const struct kern_ops *real;
} draft_plan;

static bool draft_chance(int percent) {
    draft_plan.state = world_mix(draft_plan.state);
    return (int)(draft_plan.state % 100) < percent;
}

static int truncate_draft(struct kern *kern, int slot, int32_t pos) {
    if (draft_chance(draft_plan.fails)) return ERR_NOMEM;
    return draft_plan.real->truncate(kern, slot, pos);
}

static int draft_vocab(const struct world *w) {
    return WORLD_VOCAB + w->options.draft_extra;
}

/* Makes room in the rows for the tokens that only the draft model has. */
static void add_extra_tokens(struct world *w, int rows) {
    const int vocab = draft_vocab(w);
    for (int i = rows - 1; i >= 0; i--) {
        float *row = w->draft_logits + (size_t)i * (size_t)vocab;
        memmove(row, w->draft_logits + (size_t)i * WORLD_VOCAB, WORLD_VOCAB * sizeof *row);
        for (int t = WORLD_VOCAB; t < vocab; t++) row[t] = 1000;
    }
}

/* Each hidden state must be of the token before. */
static void check_hidden(struct world *w, const struct kern_batch *batch, const float *hidden,
                         const int32_t *want, int want_count) {
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *span = &batch->spans[i];
        int32_t *tokens = w->draft_tokens + (ptrdiff_t)span->slot * w->options.draft_places;
        for (int k = 0; k < span->count; k++) {
            const int32_t place = span->pos + k, row = span->row + k;
            CHECK(place < w->options.draft_places);
            tokens[place] = batch->tokens[row];
            CHECK(place == 0 || hidden[row] == (float)tokens[place - 1]);
        }
    }
    for (int i = 0; i < want_count; i++) w->draft_hidden[i] = (float)batch->tokens[want[i]];
}

static const float *draft_hidden(void *model) {
    return ((struct world *)model)->draft_hidden;
}

static const float *wanted_hidden(void *model) {
    return ((struct world *)model)->wanted_hidden;
}

static int draft_step(void *model, const struct kern_batch *batch, const float *hidden,
                      const int32_t *want, int want_count, const float **logits) {
    struct world *w = model;
    CHECK(batch->rows <= DRAFTER_ROWS && want_count <= DRAFTER_ASKED);
    if (draft_chance(w->options.draft_fails)) return ERR_NOMEM;
    int rc = w->draft->ops->begin_step(w->draft, batch);
    CHECK_MSG(rc == 0, "the draft model's cache is too small: %s", err_text(rc));
    if (draft_chance(w->options.draft_fails)) return ERR_INTERNAL; /* with rows appended */
    if (w->options.draft_block) check_hidden(w, batch, hidden, want, want_count);
    run_layers(w, w->draft, batch, w->draft_logits, want, want_count);
    add_extra_tokens(w, want_count);
    for (int i = 0; i < want_count; i++)
        if (draft_chance(w->options.draft_wrong))
            w->draft_logits[i * draft_vocab(w) + (int)(draft_plan.state >> 40) % WORLD_VOCAB] += 9;
    w->draft_rows += batch->rows;
    *logits = w->draft_logits;
    return 0;
}

static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

size_t world_token_bytes(const void *arg, int32_t id, const char **bytes) {
    (void)arg;
    if (id == 0) return 0;
    *bytes = letters + id;
    return 1;
}

static int32_t encode(const void *arg, const char *text, size_t size, int32_t *ids, int32_t most) {
    int32_t count = 0;
    (void)arg;
    for (size_t i = 0; i < size && count < most; i++) {
        const char *letter = strchr(letters, text[i]);
        if (!letter || letter == letters) break;
        ids[count++] = (int32_t)(letter - letters);
    }
    return count;
}

/* ---- The world ---- */

static void open_cache(struct world *w, const struct world_options *o,
                       struct kern_cache_info *info) {
    struct fault fault = {0};
    struct cpu_options cpu = {.path = o->path ? o->path : "reference",
                              .threads = o->threads > 0 ? o->threads : 1};
    CHECK_MSG(cpu_open(&cpu, &w->kern, &fault) == 0, "%s", fault.text);
    plan_failures(w);
    struct kern_cache_options cache = {.layers = WORLD_LAYERS,
                                       .heads_q = WORLD_HEADS_Q,
                                       .heads_kv = WORLD_HEADS_KV,
                                       .head_dim = WORLD_DIM,
                                       .dtype = KERN_F32,
                                       .states = o->states,
                                       .state_floats = STATE_FLOATS,
                                       .pages = o->pages,
                                       .slots = o->sequences + o->conversations,
                                       .max_positions =
                                           o->positions > 0 ? o->positions : WORLD_POSITIONS,
                                       .rotations = o->positions > 0 ? rotations : NULL,
                                       .rows_max = o->rows,
                                       .logits_max = o->logits,
                                       .vocab = WORLD_VOCAB};
    w->ops.cache_info(&cache, info);
    CHECK_MSG(w->ops.cache_open(w->kern, &cache, &fault) == 0, "%s", fault.text);
}

static int64_t draft_text_pages(const struct world_options *o) {
    struct kern_cache_info info;
    const struct kern_cache_options cache = {.head_dim = WORLD_DIM, .dtype = KERN_F32};
    draft_plan.real->cache_info(&cache, &info);
    return (int64_t)WORLD_STREAMS * ((o->draft_places + info.page_slots - 1) / info.page_slots);
}

static void open_draft(struct world *w) {
    struct world_options *o = &w->options;
    struct fault fault = {0};
    struct cpu_options cpu = {.path = o->path ? o->path : "reference", .threads = 1};
    if (o->draft_texts == 0) return;
    if (o->draft_places == 0) o->draft_places = WORLD_POSITIONS;
    CHECK_MSG(cpu_open(&cpu, &w->draft, &fault) == 0, "%s", fault.text);
    draft_plan.real = w->draft->ops;
    draft_plan.fails = o->draft_fails;
    w->draft_ops = *w->draft->ops;
    w->draft_ops.truncate = truncate_draft;
    w->draft->ops = &w->draft_ops;
    struct kern_cache_options cache = {.layers = WORLD_LAYERS,
                                       .heads_q = WORLD_HEADS_Q,
                                       .heads_kv = WORLD_HEADS_KV,
                                       .head_dim = WORLD_DIM,
                                       .dtype = KERN_F32,
                                       .pages = o->draft_texts * draft_text_pages(o),
                                       .slots = o->draft_texts,
                                       .max_positions = o->draft_places,
                                       .rows_max = DRAFTER_ROWS,
                                       .logits_max = DRAFTER_ASKED,
                                       .vocab = draft_vocab(w)};
    CHECK_MSG(w->draft->ops->cache_open(w->draft, &cache, &fault) == 0, "%s", fault.text);
    w->draft_logits = mem_must_alloc(DRAFTER_ASKED * (size_t)draft_vocab(w), sizeof(float));
    w->draft_tokens = mem_must_alloc(
        (size_t)w->options.draft_texts * (size_t)w->options.draft_places, sizeof *w->draft_tokens);
}

static struct drafter_options draft_options(struct world *w) {
    if (!w->draft) return (struct drafter_options){0};
    return (struct drafter_options){
        .kern = w->draft,
        .model = w,
        .model_step = draft_step,
        .wanted_hidden = draft_hidden,
        .width = w->options.draft_block ? 1 : 0,
        .vocab = draft_vocab(w),
        .texts = w->options.draft_texts,
        .places = w->options.draft_places,
        .read_after = w->options.draft_after ? w->options.draft_after : DRAFTER_READ_AFTER,
        .weight = w->options.draft_weight > 0 ? w->options.draft_weight : 0.05};
}

static void close_draft(struct world *w) {
    struct kern_cache_stats stats;
    if (!w->draft) return;
    w->draft->ops->cache_stats(w->draft, &stats);
    CHECK_MSG(stats.pages_used == 0, "%lld pages of drafts leaked", (long long)stats.pages_used);
    w->draft->ops->close(w->draft);
    mem_free(w->draft_logits);
    mem_free(w->draft_tokens);
}

/* A hanging disk: the store's thread blocks in the check of a file. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool planned, reached;
} hang = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void hang_if_planned(void) {
    pthread_mutex_lock(&hang.lock);
    hang.reached = hang.planned;
    pthread_cond_broadcast(&hang.changed);
    while (hang.planned) pthread_cond_wait(&hang.changed, &hang.lock);
    pthread_mutex_unlock(&hang.lock);
}

void world_await_hang(void) {
    pthread_mutex_lock(&hang.lock);
    while (!hang.reached) pthread_cond_wait(&hang.changed, &hang.lock);
    pthread_mutex_unlock(&hang.lock);
}

void world_end_hang(void) {
    pthread_mutex_lock(&hang.lock);
    hang.planned = false;
    pthread_cond_broadcast(&hang.changed);
    pthread_mutex_unlock(&hang.lock);
}

static int check_state(void *backend, struct state_view *view, struct fault *fault) {
    struct kern *kern = backend;
    hang_if_planned();
    return kern->ops->snapshot_check(kern, view->blocks, view->head.block_count,
                                     view->head.token_count, &view->report, fault);
}

static void open_store(struct world *w) {
    const struct world_options *o = &w->options;
    struct fault fault = {0};
    struct store_options store = {.dir = o->state_dir,
                                  .bytes = o->state_bytes > 0 ? o->state_bytes : 1 << 30,
                                  .identity = {.weights = "a fake model",
                                               .dtype = KERN_F32,
                                               .layers = WORLD_LAYERS,
                                               .heads_kv = WORLD_HEADS_KV,
                                               .head_dim = WORLD_DIM},
                                  .state_bytes = (uint64_t)o->states * STATE_FLOATS * sizeof(float),
                                  .inline_io = !o->state_hangs,
                                  .check = check_state,
                                  .backend = w->kern};
    if (!o->state_dir) return;
    hang.planned = o->state_hangs;
    hang.reached = false;
    CHECK_MSG(store_open(&store, &w->store, &fault) == 0, "%s", fault.text);
}

void world_open(struct world *w, const struct world_options *options) {
    static const int32_t eos[] = {0};
    struct kern_cache_info info;
    *w = (struct world){.options = *options};
    struct world_options *o = &w->options;
    if (o->logits == 0) o->logits = o->sequences + 4;
    open_cache(w, o, &info);
    open_store(w);
    open_draft(w);
    size_t rows = (size_t)(w->draft && o->rows < DRAFTER_ROWS ? DRAFTER_ROWS : o->rows);
    w->qkv = mem_must_alloc(rows * QKV, sizeof(float));
    w->log_beta = mem_must_alloc(rows * WORLD_HEADS_KV, sizeof(float));
    w->bcx = mem_must_alloc(rows * 3 * WORLD_CHANNELS, sizeof(float));
    w->mixed = mem_must_alloc(rows * WORLD_CHANNELS, sizeof(float));
    w->taps = mem_must_alloc((size_t)WORLD_CHANNELS * WORLD_WIDTH, sizeof(float));
    for (uint64_t i = 0; i < (uint64_t)WORLD_CHANNELS * WORLD_WIDTH; i++)
        w->taps[i] = 2 * unit(i + 71) - 1;
    w->out = mem_must_alloc(rows * OUT, sizeof(float));
    w->tokens = mem_must_alloc(rows, sizeof *w->tokens);
    fill_head();
    w->logits = mem_must_alloc((size_t)o->logits * WORLD_VOCAB, sizeof(float));
    struct sched_options sched = {
        .kv = {.defaults = {.budget = 32,
                            .buffer = 8,
                            .chunk = 32,
                            .sliding_window = o->sliding_window,
                            .whole = o->states > 0},
               .has_gates = true,
               .positions = o->positions > 0 ? o->positions : WORLD_POSITIONS,
               .can_shift = true,
               .axes = o->axes,
               .backend = w->ops.name,
               .rule_check = w->ops.rule_check},
        .kern = w->kern,
        .model = w,
        .model_step = fake_step,
        .bring_states = bring_states,
        .wanted_hidden = wanted_hidden,
        .step_stretch = o->step_stretch,
        .clock = spent,
        .text = {.token_bytes = world_token_bytes,
                 .encode = encode,
                 .token_bytes_max = 1,
                 .eos = eos,
                 .eos_count = 1},
        .shape = {WORLD_LAYERS, WORLD_HEADS_KV, info.page_slots, info.member_slots,
                  .states = o->states,
                  .state_pages = (int64_t)o->states * STATE_PAGES(info.state_slots),
                  .sliding_layers = o->sliding_window > 0 ? (WORLD_LAYERS + 1) / 2 : 0},
        .vocab = WORLD_VOCAB,
        .width = WORLD_HIDDEN,
        .vector_width = WORLD_HIDDEN,
        .top_max = WORLD_VOCAB,
        .pages_total = o->pages,
        .page_bytes = info.page_bytes,
        .store = w->store,
        .save_idle_ns = o->state_eager ? 0 : (int64_t)1 << 60,
        .copy_bytes = o->copy_bytes > 0 ? o->copy_bytes : SCHED_COPY_BYTES,
        .sequences_max = o->sequences,
        .conversations_max = o->conversations,
        .rows_max = o->rows,
        .logits_max = o->logits,
        .drafts = o->drafts,
        .drafter = draft_options(w),
        .pictures = {.encoder = o->tiles > 0 ? w : NULL,
                     .begin = begin_tile,
                     .advance = advance_tile,
                     .width = 1,
                     .bytes_max = (int64_t)o->tiles * WORLD_TILE * (int64_t)sizeof(float)},
        .row_entries = o->row_entries > 0 ? o->row_entries : KV_ROW_ENTRIES,
        .clients_max = o->clients > 0 ? o->clients : 32,
    };
    kv_params_set_policy(&sched.kv.defaults, policy_find("global"));
    sched.kv.defaults.rule.sinks = 2;
    sched.kv.defaults.rule.horizon = 16;
    sched_open(&w->sched, &sched);
    w->sched.options.queue_places = &w->places;
    w->sched.options.pending_jobs = &w->pending;
}

void world_close(struct world *w) {
    struct kern_cache_stats stats;
    sched_close(&w->sched);
    CHECK(atomic_load(&w->places) == 0 && atomic_load(&w->pending) == 0);
    w->ops.cache_stats(w->kern, &stats);
    CHECK_MSG(stats.pages_used == 0, "%lld pages leaked", (long long)stats.pages_used);
    store_close(w->store);
    close_draft(w);
    w->ops.close(w->kern);
    mem_free(w->bcx);
    mem_free(w->mixed);
    mem_free(w->taps);
    mem_free(w->qkv);
    mem_free(w->log_beta);
    mem_free(w->out);
    mem_free(w->tokens);
    mem_free(w->logits);
}

int world_submit(struct world *w, struct engine_job *job) {
    int rc = sched_resolve_job(&w->sched.options.kv, job, &job->fault);
    if (rc == 0) rc = seq_job_alloc(job, 1, WORLD_STREAMS, WORLD_HIDDEN, 0);
    if (rc != 0) return rc;
    atomic_fetch_add(&w->places, 1);
    atomic_fetch_add(&w->pending, 1);
    sched_submit(&w->sched, job);
    return 0;
}

static int running_jobs(const struct sched *s) {
    int jobs = 0;
    for (int i = 0; i < s->running; i++) {
        const struct engine_job *job = s->sequences[s->order[i]].job;
        bool seen = false;
        for (int k = 0; k < i; k++) seen |= s->sequences[s->order[k]].job == job;
        jobs += !seen;
    }
    return jobs;
}

/* A sequence never holds more pages than it reserved; a conversation exactly those it counts. */
static void check_holdings(const struct world *w) {
    const struct sched *s = &w->sched;
    for (int i = 0; i < s->running; i++) {
        const struct sequence *seq = &s->sequences[s->order[i]];
        struct kern_report held = {0};
        CHECK(w->real->report(w->kern, seq->slot, &held) == 0);
        CHECK(held.pages <= seq->pages_reserved);
        CHECK(held.entries <= (size_t)due_entries(&s->options.shape, &seq->kv, &seq->due));
    }
    for (int i = 0; i < s->keeper.table.capacity; i++) {
        const struct conversation *conv = &s->keeper.table.all[i];
        struct kern_report held = {0};
        if (conv->id == 0) continue;
        CHECK(w->real->report(w->kern, conv->slot, &held) == 0);
        CHECK(held.pages <= conv->pages && held.entries <= (size_t)conv->entries);
        CHECK(conv->arriving ? conv->id == s->keeper.import.id : held.pages == conv->pages);
        CHECK(conv->arriving || held.entries == (size_t)conv->entries);
    }
}

static void check_caches(const struct world *w) {
    struct fault fault = {0};
    CHECK_MSG(w->ops.cache_check(w->kern, &fault) == 0, "%s", fault.text);
    if (w->draft)
        CHECK_MSG(w->draft->ops->cache_check(w->draft, &fault) == 0, "draft: %s", fault.text);
}

static void check_counts(const struct world *w) {
    const struct sched *s = &w->sched;
    struct kern_cache_stats stats;
    w->ops.cache_stats(w->kern, &stats);
    CHECK(stats.pages_used <= s->keeper.pages_reserved + s->keeper.table.pages);
    CHECK(s->keeper.pages_reserved + s->keeper.table.pages <= s->options.pages_total);
    CHECK(atomic_load(&w->places) == s->queue.waiting);
    CHECK(atomic_load(&w->pending) == s->queue.waiting + running_jobs(s));
    check_holdings(w);
    if (s->running == 0) {
        CHECK(s->keeper.pages_reserved == 0);
        CHECK(stats.pages_used <= s->keeper.table.pages); /* conversations share pages */
    }
}

void world_check(const struct world *w) {
    check_caches(w);
    check_counts(w);
}

bool world_step(struct world *w) {
    bool failed = false;
    w->span_count = w->rows = w->want_count = 0;
    keeper_save(&w->sched.keeper, w->now_ns > 0 ? w->now_ns : clock_ns(), false);
    sched_step(&w->sched, &failed);
    sched_publish_finished(&w->sched);
    CHECK(w->sched.counters.preemptions == 0 || plan.rc == ERR_FULL);
    check_counts(w);
    if (++w->unchecked < w->options.check_each) return failed;
    w->unchecked = 0;
    check_caches(w);
    return failed;
}

void world_save_all(struct world *w) {
    for (int i = 0; keeper_unsaved(&w->sched.keeper); i++) {
        CHECK_MSG(i < 100000, "saving does not end");
        keeper_save(&w->sched.keeper, clock_ns(), true);
    }
}

void world_make_dir(char dir[64]) {
    const char *base = getenv("TMPDIR");
    CHECK(snprintf(dir, 64, "%.40s/keepd-XXXXXX", base ? base : "/tmp") < 64);
    CHECK(mkdtemp(dir));
}

void world_remove_dir(const char *dir) {
    DIR *list = opendir(dir);
    const struct dirent *entry;
    CHECK(list);
    while ((entry = readdir(list)) != NULL)
        if (entry->d_type == DT_REG) (void)unlinkat(dirfd(list), entry->d_name, 0);
    (void)unlinkat(dirfd(list), "daemons", AT_REMOVEDIR);
    closedir(list);
    CHECK(rmdir(dir) == 0);
}
