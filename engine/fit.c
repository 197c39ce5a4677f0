/* engine_fit_gates: texts to tokens, tokens to measurements, measurements to a file of gates. The
 * model is closed before the fit, so the two never need memory at once. Measurements are in the
 * work file, if there is one, and the fit loads them text by text. */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_fit.h"
#include "engine/engine_int.h"
#include "engine/fit_chats.h"
#include "engine/fit_pictures.h"
#include "engine/fit_work.h"
#include "fit/fit.h"
#include "fit/random.h"
#include "fit/rank.h"
#include "model/base_digest.h"
#include "model/save_gates.h"

#define TEXT_BYTES_MAX ((size_t)1 << 30) /* most memory that tokenising a file may take */
#define TEXTS_LEAST    48
#define TEXTS_MAX      128
#define TEXTS_WANTED   24 /* rather fewer entries of each than fewer texts */
#define ENTRIES        256
#define ENTRIES_LEAST  96
#define TOKENS_LEAST   (4 * WORTH_WINDOW)

struct fitting {
    const struct engine_options *options;
    const struct engine_fit *fit;
    struct text text;
    enum picture_kind form;         /* how the model sees pictures */
    struct engine_fit_text *pieces; /* [piece_count] */
    int piece_count, piece_room;
    int plain_chats;             /* read as plain text */
    int tokens, entries;         /* the most in a text */
    int rows;                    /* the most in a step */
    int short_pieces;            /* left out, because too little of them can be measured */
    struct worth_text most;      /* the sizes of a measurement, at most */
    struct worth_text *measured; /* [measured_count] of the first pieces */
    int64_t *records; /* [measured_count] places in the work file, which has the arrays; -1: none */
    struct worth_text loaded; /* arrays that those use in turns, with room for the largest */
    int measured_count, resumed;
    size_t measured_bytes; /* in memory */
    struct fit_work work;
    struct fit_pictures pictures;   /* while the model is open, if a piece shows any */
    uint8_t settings[SHA256_BYTES]; /* the model, and all options that change measurements */
    int64_t began_ns;
};

/* ---- Texts ---- */

/* The tokens of a text, and the pictures among them. */
struct fit_ids {
    struct tok_ids ids;
    struct text_pictures pictures; /* rows ascending */
    struct picture *const *held;   /* the same pictures */
};

static void close_piece(struct engine_fit_text *piece) {
    for (int i = 0; i < piece->picture_count; i++) picture_drop(piece->pictures[i]);
    mem_free(piece->pictures);
    mem_free(piece->picture_rows);
    mem_free(piece->ids);
    *piece = (struct engine_fit_text){0};
}

/* Copies the rows of pictures between two tokens, which part none of them, and holds the pictures.
 * Token `from` becomes token `before`. */
static int add_picture_rows(struct engine_fit_text *piece, const struct fit_ids *all, size_t from,
                            size_t to, size_t before) {
    const struct text_pictures *in = &all->pictures;
    int first = 0, count = 0;
    while (first < in->row_count && in->rows[first].at < from) first++;
    while (first + count < in->row_count && in->rows[first + count].at < to) count++;
    if (!count) return 0;
    const struct picture_rows *rows = in->rows + first;
    const int shown = rows->picture, pictures = rows[count - 1].picture - shown + 1;
    piece->picture_rows = mem_try_alloc((size_t)count, sizeof *piece->picture_rows);
    piece->pictures = mem_try_alloc((size_t)pictures, sizeof(struct picture *));
    if (!piece->picture_rows || !piece->pictures) return ERR_NOMEM;
    for (; piece->picture_count < pictures; piece->picture_count++)
        piece->pictures[piece->picture_count] =
            picture_hold(all->held[shown + piece->picture_count]);
    for (; piece->picture_row_count < count; piece->picture_row_count++) {
        struct picture_rows *copy = &piece->picture_rows[piece->picture_row_count];
        *copy = rows[piece->picture_row_count];
        copy->at += before - from;
        copy->picture -= shown;
    }
    return 0;
}

/* Adds the tokens [from, to) behind the `before` first ones. */
static int add_piece(struct fitting *f, const struct fit_ids *all, size_t before, size_t from,
                     size_t to) {
    const int32_t *ids = all->ids.ids;
    const size_t count = before + to - from;
    if (f->piece_count == f->piece_room) {
        const size_t had = (size_t)f->piece_room * sizeof *f->pieces;
        struct engine_fit_text *more =
            mem_try_realloc(f->pieces, had, 2 * had + 64 * sizeof *f->pieces);
        if (!more) return ERR_NOMEM;
        f->pieces = more;
        f->piece_room = 2 * f->piece_room + 64;
    }
    struct engine_fit_text *piece = &f->pieces[f->piece_count++];
    *piece = (struct engine_fit_text){.ids = mem_try_alloc(count, sizeof *piece->ids),
                                      .count = (int)count};
    if (!piece->ids) return ERR_NOMEM;
    memcpy(piece->ids, ids, before * sizeof *ids);
    memcpy(piece->ids + before, ids + from, (to - from) * sizeof *ids);
    return add_picture_rows(piece, all, from, to, before);
}

/* Leaves the last piece out if the windows that part no picture are too few. */
static void drop_short_piece(struct fitting *f) {
    struct engine_fit_text *piece = &f->pieces[f->piece_count - 1];
    struct kern_given given;
    struct worth_input input = {.count = piece->count, .given = &given, .given_count = 1};
    for (int i = piece->picture_row_count - 1; i >= 0; i--) {
        const struct picture_rows *rows = &piece->picture_rows[i];
        given = (struct kern_given){.row = (int32_t)rows->at,
                                    .count = rows->count,
                                    .together = piece->pictures[rows->picture]->together};
        input.count = worth_tokens(&input);
    }
    if (input.count >= 2 * WORTH_WINDOW) return;
    close_piece(piece);
    f->piece_count--;
    f->short_pieces++;
}

/* Returns where a piece from token `from` on ends: at `to`, or before a tile that it would part. */
static size_t piece_end(const struct text_pictures *pictures, size_t from, size_t to) {
    for (int i = 0; i < pictures->row_count; i++) {
        const struct picture_rows *rows = &pictures->rows[i];
        if (rows->at >= from && rows->at < to && rows->at + (size_t)rows->count > to)
            return rows->at;
    }
    return to;
}

/* Every piece begins with the tokens that the tokenizer puts in front of a text. */
static int divide_ids(struct fitting *f, const struct fit_ids *all, struct fault *fault) {
    const size_t before = (size_t)tok_added_before(f->text.tok), room = (size_t)f->tokens - before;
    int rc = 0;
    for (size_t at = before, end; at < all->ids.count && !rc; at = end) {
        end = all->ids.count - at < room ? all->ids.count : at + room;
        end = piece_end(&all->pictures, at, end);
        if (end == at)
            return fault_set(fault, ERR_LIMIT, "text",
                             "a tile of a picture has more tokens than a text, %d: send it with "
                             "'detail': 'low', or smaller",
                             f->tokens);
        if (before + end - at < (size_t)TOKENS_LEAST) continue;
        rc = add_piece(f, all, before, at, end);
        if (!rc) drop_short_piece(f);
    }
    return rc ? fault_set(fault, rc, "text", "no memory for its tokens") : 0;
}

static int divide_chats(struct fitting *f, const struct engine_fit_source *source,
                        struct arena *arena, struct fault *fault) {
    const char *text = source->text;
    int shown = 0, rc = 0;
    for (const char *end; !rc && (end = strchr(text, '\n')); text = end + 1) {
        struct fit_ids all = {.held = source->pictures + shown};
        all.pictures.kind = f->form;
        all.pictures.pictures = (const struct picture *const *)all.held;
        all.pictures.count = source->picture_count - shown;
        bool plain = false;
        rc = fit_chat_ids(&f->text, text, (size_t)(end - text), &all.pictures, arena, &all.ids,
                          &plain, fault);
        shown += all.pictures.count;
        if (!rc) rc = divide_ids(f, &all, fault);
        f->plain_chats += plain;
        arena_reset(arena);
    }
    return rc;
}

static int divide_text(struct fitting *f, const struct engine_fit_source *source,
                       struct arena *arena, struct fault *fault) {
    struct fit_ids all = {0};
    int rc = tok_encode(f->text.tok, source->text, source->size, TOK_TEMPLATE, NULL, 0,
                        SIZE_MAX / sizeof(int32_t), arena, &all.ids, fault);
    return rc ? rc : divide_ids(f, &all, fault);
}

static int divide_source(struct fitting *f, int index, struct arena *arena, struct fault *fault) {
    const struct engine_fit_source *source = &f->fit->sources[index];
    struct fault inner = {0};
    int rc = source->chats ? divide_chats(f, source, arena, &inner)
                           : divide_text(f, source, arena, &inner);
    if (!rc) return 0;
    return fault_set(fault, rc, "text", "file %d of %d: %.300s", index + 1, f->fit->source_count,
                     inner.text);
}

/* Puts the pieces into a random order. */
static void fitting_shuffle(struct engine_fit_text *pieces, int count, uint64_t *random) {
    for (int i = count - 1; i > 0; i--) {
        const int k = (int)(splitmix_next(random) % (uint64_t)(i + 1));
        const struct engine_fit_text piece = pieces[i];
        pieces[i] = pieces[k];
        pieces[k] = piece;
    }
}

/* Takes the pieces in turns from the files, whose pieces are in a random order: `ends` are where
 * each file's pieces end. */
static int mix_files(struct fitting *f, const int *ends, struct fault *fault) {
    const int files = f->fit->source_count;
    struct engine_fit_text *mixed = mem_try_alloc((size_t)f->piece_room, sizeof *mixed);
    if (!mixed) return fault_set(fault, ERR_NOMEM, "text", "no memory for its pieces");
    for (int turn = 0, count = 0; count < f->piece_count; turn++)
        for (int i = 0; i < files; i++) {
            const int at = (i ? ends[i - 1] : 0) + turn;
            if (at < ends[i]) mixed[count++] = f->pieces[at];
        }
    mem_free(f->pieces);
    f->pieces = mixed;
    return 0;
}

static int fitting_read_texts(struct fitting *f, uint64_t *random, struct fault *fault) {
    int *ends = mem_must_alloc((size_t)f->fit->source_count, sizeof *ends), rc = 0;
    for (int i = 0; i < f->fit->source_count && !rc; i++) {
        const int first = f->piece_count;
        struct arena arena;
        arena_open(&arena, TEXT_BYTES_MAX);
        rc = divide_source(f, i, &arena, fault);
        arena_close(&arena);
        fitting_shuffle(f->pieces + first, f->piece_count - first, random);
        ends[i] = f->piece_count;
    }
    if (f->plain_chats)
        log_info("the model has no chat template for %d of the chats: they are read as plain text",
                 f->plain_chats);
    if (f->short_pieces)
        log_info("%d texts are left out: of each, less than %d tokens could be measured without "
                 "parting a picture",
                 f->short_pieces, 2 * WORTH_WINDOW);
    if (!rc && f->piece_count < 2)
        rc =
            fault_set(fault, ERR_INVALID, "text",
                      "%d tokens or more are needed: at least two texts of at least %d tokens, one "
                      "of which is only evaluated",
                      f->tokens + TOKENS_LEAST, TOKENS_LEAST);
    if (!rc) rc = mix_files(f, ends, fault);
    mem_free(ends);
    return rc;
}

/* ---- Measuring ---- */

/* Wide models have gates with more numbers, which need more texts. */
static int texts_for(int d_model) {
    const int wanted = d_model / 12;
    return wanted < TEXTS_LEAST ? TEXTS_LEAST : wanted < TEXTS_MAX ? wanted : TEXTS_MAX;
}

/* How many pieces, and entries of each, fit the bound. Free memory and disks have no part in it,
 * so that a fit that was interrupted can go on. */
static int plan_measurement(struct fitting *f, const struct model_config *config) {
    const size_t room = f->work.fd >= 0 ? FIT_WORK_BYTES : ENGINE_FIT_BYTES;
    const int texts = texts_for(config->d_model);
    const int count = f->piece_count < texts ? f->piece_count : texts;
    for (f->entries = ENTRIES;; f->entries -= 32) {
        const size_t each = worth_text_bytes(config, f->tokens, f->entries);
        const size_t most = room / each;
        if (most >= (size_t)count) return count;
        if (most >= TEXTS_WANTED || f->entries <= ENTRIES_LEAST) return most > 2 ? (int)most : 2;
    }
}

/* How many of `count` pieces the disk has room for; memory has some where it is full. */
static int pieces_with_room(const struct fitting *f, const struct model_config *config, int count) {
    if (f->work.fd < 0) return count;
    const size_t disk = fit_work_room(&f->work);
    const size_t room = disk > ENGINE_FIT_BYTES ? disk : ENGINE_FIT_BYTES;
    const size_t fit = room / worth_text_bytes(config, f->tokens, f->entries);
    if (fit >= (size_t)count) return count;
    const int measured = fit > 2 ? (int)fit : 2;
    log_warn("%d of %d texts will be measured: their measurements may take half of the free disk, "
             "%zu MB of it, in %s",
             measured, count, room / 1000000, f->work.path);
    return measured;
}

static bool fitting_may_continue(const struct fitting *f, enum engine_fit_work work, int done,
                                 int total, double lost) {
    const int64_t minute = 60000000000, spent = clock_ns() - f->began_ns;
    const int64_t limit = f->fit->minutes * minute;
    const bool late = limit > 0 && spent > (work == ENGINE_FIT_MEASURING ? limit / 4 * 3 : limit);
    const bool wanted = !f->fit->progress || f->fit->progress(f->fit->arg, work, done, total, lost);
    return wanted && !late;
}

/* Returns the device that measures: a fit without --device runs on the CPU. */
static const char *device_of(const struct engine_options *o) {
    return !o->device || strcmp(o->device, "auto") == 0 ? "cpu" : o->device;
}

static int sum_settings(struct fitting *f, struct fault *fault) {
    const struct engine_options *o = f->options;
    struct base_digest base = {0};
    struct sha256_stream sum;
    int rc = o->random_weights ? 0 : base_digest_of(o->model_dir, o->max_model_len, &base, fault);
    sha256_begin(&sum);
    sha256_add(&sum, &base, sizeof base);
    const char *const texts[] = {o->quantization, device_of(o), o->cpu_path, o->cpu_activations};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i]) sha256_add(&sum, texts[i], strlen(texts[i]) + 1);
    sha256_end(&sum, f->settings);
    return rc;
}

static void piece_key(const struct fitting *f, const struct engine_fit_text *piece, uint64_t seed,
                      uint8_t key[SHA256_BYTES]) {
    struct sha256_stream sum;
    sha256_begin(&sum);
    sha256_add(&sum, f->settings, sizeof f->settings);
    sha256_add(&sum, &f->tokens, sizeof f->tokens);
    sha256_add(&sum, &f->entries, sizeof f->entries);
    sha256_add(&sum, &seed, sizeof seed);
    sha256_add(&sum, piece->ids, (size_t)piece->count * sizeof *piece->ids);
    sha256_end(&sum, key);
}

/* The arrays of the text are in the work file from `record` on, and leave the memory. */
static void leave_arrays(struct fitting *f, int index, int64_t record) {
    f->records[index] = record;
    worth_text_free(&f->measured[index]);
}

/* Measures a text, or finds what an earlier fit has measured. *new: measured. */
static int measure_piece(struct fitting *f, struct worth *worth, const struct model_config *config,
                         int index, int count, uint64_t seed, bool *new, struct fault *fault) {
    struct engine_fit_text *piece = &f->pieces[index];
    struct worth_text *text = &f->measured[index];
    const int64_t record = f->work.end;
    uint8_t key[SHA256_BYTES];
    if (piece->picture_row_count) fit_pictures_write_ids(&f->pictures, piece);
    piece_key(f, piece, seed, key);
    *new = !fit_work_take(&f->work, key, &f->most, text);
    if (!*new) {
        leave_arrays(f, index, record);
        return 0;
    }
    if (index == f->resumed)
        (void)fitting_may_continue(f, ENGINE_FIT_MEASURING, index, count, INFINITY);
    struct worth_input input = {.tokens = piece->ids, .count = piece->count};
    int rc = piece->picture_row_count ? fit_pictures_encode(&f->pictures, piece, &input) : 0;
    if (rc) return fault_set(fault, rc, "text", "its pictures cannot be encoded: %s", err_text(rc));
    rc = worth_measure(worth, &input, seed, text, fault);
    if (rc) return rc;
    if (fit_work_keep(&f->work, key, text))
        leave_arrays(f, index, record);
    else
        f->measured_bytes += worth_text_bytes(config, text->tokens, text->entries);
    return 0;
}

static int fitting_measure_pieces(struct fitting *f, struct worth *worth,
                                  const struct model_config *config, int count, uint64_t *random,
                                  struct fault *fault) {
    int rc = 0;
    f->measured = mem_must_alloc((size_t)count, sizeof *f->measured);
    f->records = mem_must_alloc((size_t)count, sizeof *f->records);
    for (int i = 0; i < count && !rc && (i < 2 || f->measured_bytes < ENGINE_FIT_BYTES); i++) {
        bool new;
        f->records[i] = -1;
        rc = measure_piece(f, worth, config, i, count, splitmix_next(random), &new, fault);
        if (rc) break;
        f->measured_count++;
        f->resumed += !new;
        if (new && !fitting_may_continue(f, ENGINE_FIT_MEASURING, i + 1, count, INFINITY) && i > 0)
            break;
    }
    return rc;
}

static bool any_pictures(const struct fitting *f) {
    for (int i = 0; i < f->piece_count; i++)
        if (f->pieces[i].picture_row_count) return true;
    return false;
}

static int fitting_measure_model(struct fitting *f, struct kern *kern, uint64_t *random,
                                 struct fault *fault) {
    struct model_options options = engine_model_options(f->options);
    options.gates = "";
    options.rows_max = f->rows;
    options.logits_max = 1;
    struct model *model = NULL;
    struct worth *worth = NULL;
    int rc = model_open(kern, &options, &model, fault);
    if (rc) return rc;
    const struct model_config *config = model_config(model);
    const int count = plan_measurement(f, config);
    f->most = (struct worth_text){.layers = config->cache_layers,
                                  .heads = config->heads_kv,
                                  .d_model = config->d_model,
                                  .tokens = f->tokens,
                                  .windows = f->tokens / WORTH_WINDOW,
                                  .entries = f->entries};
    const struct worth_options what = {.rows = f->rows,
                                       .tokens = f->tokens,
                                       .entries = f->entries,
                                       .kv_type = config->dtype == KERN_F32 ? KERN_F32 : KERN_BF16};
    rc = worth_layer_heads(config, &f->most.layer_heads);
    if (rc) fault_set(fault, rc, "", "no memory for the sizes of %d layers", config->cache_layers);
    if (!rc) rc = worth_open(kern, model, &what, &worth, fault);
    if (!rc && any_pictures(f)) {
        const struct encoder_side side = {f->options, model};
        rc = fit_pictures_open(&side, &f->pictures, fault);
    }
    if (!rc) fitting_shuffle(f->pieces, count, random);
    const int measured = rc ? 0 : pieces_with_room(f, config, count);
    if (!rc) rc = fitting_measure_pieces(f, worth, config, measured, random, fault);
    fit_pictures_close(&f->pictures);
    worth_close(worth);
    model_close(model);
    return rc;
}

static int fitting_measure(struct fitting *f, uint64_t *random, struct fault *fault) {
    struct engine_options o = *f->options;
    struct kern *kern = NULL;
    o.device = device_of(&o);
    if (strcmp(o.device, "cpu") == 0) o.tensor_parallel_size = 1; /* the result is that of all */
    const struct backend_options backend = engine_backend(&o, 1);
    int rc = backend_open(&backend, &kern, fault);
    if (rc) return rc;
    if (kern->ops->bind) kern->ops->bind(kern);
    rc = fitting_measure_model(f, kern, random, fault);
    kern->ops->close(kern);
    return rc;
}

/* ---- Fitting and writing ---- */

static void use_loaded(struct worth_text *text, const struct worth_text *loaded) {
    text->at = loaded->at;
    text->x = loaded->x;
    text->worths = loaded->worths;
}

/* Texts in the file share one set of arrays: this overwrites those of the text that was loaded
 * before. */
static bool fitting_load(void *arg, int index) {
    struct fitting *f = arg;
    struct worth_text *text = &f->measured[index];
    if (f->records[index] < 0) return true;
    use_loaded(text, &f->loaded);
    return fit_work_load(&f->work, f->records[index], text);
}

static bool step_done(void *arg, int step, int steps, double lost) {
    return fitting_may_continue(arg, ENGINE_FIT_FITTING, step, steps, lost);
}

/* Numbers of a layer as a file has them. */
static void copy_layer_numbers(void *arg, int layer, float *w1, float *b1, float *last,
                               float *bias) {
    fit_net_numbers(arg, layer, w1, b1, last, bias);
}

static int open_out(const struct fitting *f, struct save_files *files, struct fault *fault) {
    return f->fit->how == ENGINE_FIT_NEW ? save_files_open(files, "out", f->fit->out, false, fault)
                                         : save_files_replace(files, "out", f->fit->out, fault);
}

static int write_gates(const struct fitting *f, struct fit_net *net, struct fault *fault) {
    struct save_files files;
    struct save_gates gates = {.header = gates_header_unknown,
                               .d_model = net->d_model,
                               .layer = copy_layer_numbers,
                               .arg = net};
    gates.header.width = FIT_WIDTH;
    gates.header.layers = net->layers;
    gates.header.heads = net->heads;
    gates.header.trained_budget = f->tokens / 8;
    gates.header.horizon = 1;
    gates.header.sinks = FIT_SINKS;
    gates.header.recent = FIT_RECENT;
    int rc = f->options->random_weights
                 ? 0
                 : base_digest_of(f->options->model_dir, f->options->max_model_len,
                                  &gates.header.base, fault);
    if (!rc) rc = open_out(f, &files, fault);
    return rc ? rc : save_files_close(&files, save_gates(&files, &gates, fault), fault);
}

static int fit_measured(struct fitting *f, struct engine_fitted *out, struct fault *fault) {
    const struct fit_options options = {.steps = f->fit->steps,
                                        .seed = f->fit->seed,
                                        .progress = step_done,
                                        .load = fitting_load,
                                        .arg = f};
    struct cpu_team *team;
    struct fit_net net;
    struct fit_result result;
    bool any = false;
    for (int i = 0; i < f->measured_count; i++) any = any || f->records[i] >= 0;
    f->loaded = f->most;
    int rc = any ? worth_text_alloc(&f->loaded) : 0;
    if (rc) return fault_set(fault, rc, "", "no memory for a text that was measured");
    rc = cpu_team_open(backend_threads(f->options->threads), &team);
    if (rc) return fault_set(fault, rc, "threads", "%s", err_text(rc));
    rc = fit_gates(&options, f->measured, f->measured_count, team, &net, &result, fault);
    cpu_team_close(team);
    if (rc) return rc;
    out->texts = f->measured_count;
    out->resumed = f->resumed;
    out->entries = f->entries;
    out->steps = result.steps;
    out->best = result.best;
    out->before = result.before;
    out->lost = result.lost;
    rc = write_gates(f, &net, fault);
    fit_net_close(&net);
    return rc;
}

/* The pieces that were held out go to the caller. */
static void return_held_out(struct fitting *f, struct engine_fitted *out) {
    out->held_out = mem_must_alloc((size_t)f->measured_count, sizeof *out->held_out);
    for (int i = 0; i < f->measured_count; i += FIT_HELD_OUT) {
        out->held_out[out->held_out_count++] = f->pieces[i];
        f->pieces[i] = (struct engine_fit_text){0};
    }
}

void engine_fitted_close(struct engine_fitted *fitted) {
    for (int i = 0; i < fitted->held_out_count; i++) close_piece(&fitted->held_out[i]);
    mem_free(fitted->held_out);
    *fitted = (struct engine_fitted){0};
}

/* ---- The whole ---- */

/* Refuses what a start would refuse, before anything is written; no gates are needed. */
int engine_find_gates(const struct engine_options *options, struct engine_found *found,
                      struct fault *fault) {
    struct engine_options check = *options;
    struct engine *engine;
    check.check_only = true;
    check.progress = NULL;
    engine_fit_options(&check);
    check.kv_policy = "full";
    check.device = "cpu";
    check.found = found;
    int rc = engine_open(&check, &engine, fault);
    if (!rc && found->whole_texts)
        rc = fault_set(fault, ERR_UNSUPPORTED, "model",
                       "it reads texts both ways and evicts nothing: gates are not fitted to it");
    return rc;
}

/* Finds out before the work whether its result can be written. */
static int try_out(const struct fitting *f, struct fault *fault) {
    struct save_files files;
    struct fault none;
    int rc = open_out(f, &files, fault);
    if (!rc) save_files_close(&files, ERR_STOPPED, &none);
    return rc;
}

static void note_waiting(void *arg) {
    const struct fitting *f = arg;
    if (f->fit->progress) f->fit->progress(f->fit->arg, ENGINE_FIT_WAITING, 0, 1, INFINITY);
}

static int open_work(struct fitting *f, struct fault *fault) {
    const bool needed = f->fit->how != ENGINE_FIT_NEW;
    struct fault own = {0};
    int rc =
        f->fit->work ? fit_work_open(&f->work, f->fit->work, needed, note_waiting, f, &own) : 0;
    if (rc && needed) return fault_set(fault, rc, own.field, "%s", own.text);
    if (rc) log_info("what is measured is lost if the fit is interrupted: %s", own.text);
    return 0;
}

/* Is there what this process would make, because another one has made it in the meantime? */
static bool gates_are_made(const struct fitting *f) {
    struct engine_found found = {0};
    struct fault ignored;
    if (f->fit->how != ENGINE_FIT_ONCE) return false;
    const bool made = engine_find_gates(f->options, &found, &ignored) == 0 && found.has_gates;
    mem_free(found.tool_template);
    return made;
}

static int fit_to(struct fitting *f, struct engine_fitted *out, struct fault *fault) {
    uint64_t random = f->fit->seed;
    int rc = try_out(f, fault);
    if (!rc) rc = sum_settings(f, fault);
    if (!rc) rc = text_open(f->options->model_dir, f->options->chat_template, &f->text, fault);
    if (!rc) rc = fitting_read_texts(f, &random, fault);
    if (!rc) rc = fitting_measure(f, &random, fault);
    if (!rc) rc = fit_measured(f, out, fault);
    if (!rc) return_held_out(f, out);
    return rc;
}

static void close_fitting(struct fitting *f) {
    for (int i = 0; i < f->measured_count; i++) {
        if (f->records[i] >= 0) use_loaded(&f->measured[i], &(struct worth_text){0});
        worth_text_close(&f->measured[i]);
    }
    worth_text_free(&f->loaded);
    for (int i = 0; i < f->piece_count; i++) close_piece(&f->pieces[i]);
    worth_text_close(&f->most);
    mem_free(f->measured);
    mem_free(f->records);
    mem_free(f->pieces);
    text_close(&f->text);
}

int engine_fit_gates(const struct engine_options *options, const struct engine_fit *fit,
                     struct engine_fitted *out, struct fault *fault) {
    struct engine_options own = *options;
    struct engine_found found = {0};
    *out = (struct engine_fitted){0};
    struct fitting f = {.options = options, .fit = fit, .began_ns = clock_ns(), .work.fd = -1};
    own.gates = ""; /* gates that are there do not matter */
    int rc = engine_find_gates(&own, &found, fault);
    if (rc) return rc;
    mem_free(found.tool_template);
    f.form = found.pictures.kind;
    /* A step has all of a text where a step's end could part pictures. */
    f.rows = found.pictures.together ? ENGINE_FIT_TOKENS : WORTH_ROWS;
    f.tokens = found.max_model_len < ENGINE_FIT_TOKENS ? found.max_model_len : ENGINE_FIT_TOKENS;
    rc = open_work(&f, fault);
    if (rc) return rc;
    out->found = gates_are_made(&f);
    if (!out->found) rc = fit_to(&f, out, fault);
    fit_work_close(&f.work, rc == 0 || f.measured_count == 0);
    close_fitting(&f);
    if (rc) engine_fitted_close(out);
    return rc;
}
