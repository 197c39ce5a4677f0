#include "tests/golden/replay.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/internal.h"
#include "kernels/ranks.h"

static const char *const kv_names[] = {[KERN_F32] = "f32",
                                       [KERN_BF16] = "bf16",
                                       [KERN_E4M3] = "fp8",
                                       [KERN_ROW8] = "q8",
                                       [KERN_ROW4] = "q4"};

const char *replay_kv_name(enum kern_dtype dtype) {
    return kv_names[dtype];
}

int replay_kv_dtype(const char *name, enum kern_dtype *dtype, struct fault *fault) {
    for (size_t i = 0; i < sizeof kv_names / sizeof *kv_names; i++) {
        if (!kv_names[i] || strcmp(name, kv_names[i]) != 0) continue;
        *dtype = (enum kern_dtype)i;
        return 0;
    }
    return fault_set(fault, ERR_INVALID, "kv_dtype", "'%.20s' is not f32, bf16, fp8, q8 or q4",
                     name);
}

bool replay_path_available(const char *path) {
    struct kern *kern = NULL;
    struct fault fault = {0};
    if (cpu_open(&(struct cpu_options){.path = path, .threads = 1}, &kern, &fault)) {
        CHECK(strcmp(path, "reference") != 0 && strcmp(path, "portable") != 0);
        printf("skip: path %s: %s\n", path, fault.text);
        return false;
    }
    kern->ops->close(kern);
    return true;
}

static int open_cache(struct replay *replay, const struct replay_options *options,
                      struct fault *fault) {
    const struct model_config *c = model_config(replay->model);
    struct kern_cache_info info;
    struct kern_cache_options cache = model_cache_options(c);
    const int ranks = options->ranks > 0 ? options->ranks : 1;
    cache.dtype = options->kv_dtype;
    replay->kern->ops->cache_info(&cache, &info);
    cache.pages = model_pages(c, &info, options->positions_max + info.page_slots) * options->slots;
    if (ranks > 1)
        cache.pages += (int64_t)c->state_layers * options->slots; /* rounded up on each */
    if (options->pages) cache.pages = options->pages;
    cache.slots = options->slots;
    cache.max_positions = options->positions_max;
    return replay->kern->ops->cache_open(replay->kern, &cache, fault);
}

int replay_open(const struct replay_options *options, struct replay *out, struct fault *fault) {
    const struct cpu_options cpu = {.path = options->path,
                                    .activations = options->exact ? CPU_F32 : CPU_INT8,
                                    .threads = options->threads};
    const struct model_options model = {.dir = options->dir,
                                        .gates = options->gates,
                                        .rows_max = options->rows_max,
                                        .logits_max = options->rows_max,
                                        .owner = options->owner ? options->owner->model : NULL,
                                        .random_weights = options->random_weights,
                                        .threads = options->threads,
                                        .quantization = options->quantization};
    *out = (struct replay){0};
    int rc = ranks_open_cpu(&cpu, options->ranks > 0 ? options->ranks : 1, &out->kern, fault);
    if (!rc) rc = model_open(out->kern, &model, &out->model, fault);
    if (!rc) rc = open_cache(out, options, fault);
    if (rc) {
        replay_close(out);
        return rc;
    }
    out->layers = model_config(out->model)->cache_layers;
    out->states = model_config(out->model)->state_layers;
    out->heads_kv = model_config(out->model)->heads_kv;
    const struct kern_cache_options cache = model_cache_options(model_config(out->model));
    out->streams = (int)kern_streams(&cache);
    out->vocab = model_config(out->model)->vocab;
    return 0;
}

void replay_close(struct replay *replay) {
    model_close(replay->model);
    if (replay->kern) replay->kern->ops->close(replay->kern);
    *replay = (struct replay){0};
}

#define PARTS_MAX 16

/* `pictures`: those of the only part. */
static int step_parts(struct replay *replay, const struct replay_part *parts, int part_count,
                      const struct replay_pictures *pictures, float *logits) {
    struct kern_span spans[PARTS_MAX];
    int rows = 0;
    CHECK(part_count <= PARTS_MAX);
    for (int i = 0; i < part_count; i++) {
        spans[i] = (struct kern_span){.slot = parts[i].slot,
                                      .row = rows,
                                      .count = parts[i].count,
                                      .pos = parts[i].pos,
                                      .behind = pictures->behind,
                                      .rule = parts[i].rule};
        rows += parts[i].count;
    }
    int32_t *tokens = mem_must_alloc((size_t)rows, sizeof *tokens);
    int32_t *want = mem_must_alloc((size_t)rows, sizeof *want);
    for (int i = 0; i < part_count; i++)
        memcpy(tokens + spans[i].row, parts[i].tokens, (size_t)parts[i].count * sizeof *tokens);
    for (int i = 0; i < rows; i++) want[i] = i;
    const struct kern_batch batch = {.tokens = tokens,
                                     .spans = spans,
                                     .rows = rows,
                                     .span_count = part_count,
                                     .given = pictures->given,
                                     .given_count = pictures->given_count,
                                     .places = pictures->places};
    const float *device = NULL;
    int rc = model_step(replay->model, &batch, want, logits ? rows : 0, &device);
    if (!rc) rc = replay->kern->ops->sync(replay->kern);
    if (!rc && logits)
        rc = replay->kern->ops->download(replay->kern, logits, device,
                                         (size_t)rows * (size_t)replay->vocab * sizeof *logits);
    mem_free(tokens);
    mem_free(want);
    return rc;
}

int replay_step(struct replay *replay, const struct replay_part *parts, int part_count,
                float *logits) {
    const struct replay_pictures none = {0};
    return step_parts(replay, parts, part_count, &none, logits);
}

int replay_step_pictures(struct replay *replay, const struct replay_part *part,
                         const struct replay_pictures *pictures, float *logits) {
    return step_parts(replay, part, 1, pictures, logits);
}

int replay_run(struct replay *replay, int slot, const int32_t *tokens, int count, const int *splits,
               int split_count, float *logits) {
    for (int pos = 0, i = 0; pos < count; i++) {
        int size = splits[i < split_count ? i : split_count - 1];
        if (size > count - pos) size = count - pos;
        const struct replay_part part = {
            .slot = slot, .pos = pos, .count = size, .tokens = tokens + pos};
        float *rows = logits ? logits + (size_t)pos * (size_t)replay->vocab : NULL;
        int rc = replay_step(replay, &part, 1, rows);
        if (rc) return rc;
        pos += size;
    }
    return 0;
}

void replay_entries(struct kern *kern, int slot, bool values, float *to) {
    const struct cpu_cache *cache = &cpu_of(kern)->cache;
    for (int stream = 0; stream < cache->streams; stream++) {
        const struct cpu_stream view = cpu_cache_stream_at(cache, slot, stream);
        const int dim = view.layer->head_dim, slots = view.layer->page_slots;
        for (int i = 0; i < view.length; i++, to += dim) {
            uint32_t page = view.pages[i / slots];
            cpu_cache_wide_row(cache, view.layer, page, values, i % slots, to);
            cpu_cache_rotate(cache, to, dim);
        }
    }
}

void replay_members_open(struct kern *kern, int slot, struct replay_members *out) {
    const struct cpu_cache *cache = &cpu_of(kern)->cache;
    size_t streams = (size_t)cache->streams, room = 1;
    for (int stream = 0; stream < cache->streams; stream++)
        room += (size_t)cpu_cache_members(cache, slot, stream).length;
    *out = (struct replay_members){.streams = streams,
                                   .lengths = mem_must_alloc(streams, sizeof *out->lengths),
                                   .centre = mem_must_alloc(room, sizeof *out->centre),
                                   .pos = mem_must_alloc(room, sizeof *out->pos),
                                   .gain = mem_must_alloc(room, sizeof *out->gain)};
    for (int stream = 0; stream < cache->streams; stream++) {
        struct cpu_stream members = cpu_cache_members(cache, slot, stream);
        out->lengths[stream] = members.length;
        for (int32_t i = 0; i < members.length; i++, out->count++) {
            const struct cpu_member *member = cpu_cache_member(cache, members.pages, i);
            out->centre[out->count] = member->centre;
            out->pos[out->count] = member->pos;
            out->gain[out->count] = member->gain;
        }
    }
}

void replay_members_close(struct replay_members *members) {
    mem_free(members->lengths);
    mem_free(members->centre);
    mem_free(members->pos);
    mem_free(members->gain);
}

double replay_logprob(const float *logits, int vocab, int32_t token) {
    double top = logits[0], sum = 0;
    for (int i = 1; i < vocab; i++) top = fmax(top, logits[i]);
    for (int i = 0; i < vocab; i++) sum += exp(logits[i] - top);
    return logits[token] - top - log(sum);
}

int32_t replay_argmax(const float *logits, int vocab) {
    int32_t best = 0;
    for (int i = 1; i < vocab; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    return best;
}
