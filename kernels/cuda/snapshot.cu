/* Snapshots: a stream's block is assembled on the device, word by word, and copied out in one
 * piece; an import takes the reverse way. kernels/snapshot.h defines the format, so an export
 * undoes the swizzle of pages and an import applies it again.
 *
 * A block's size depends on its stream's length, which the host does not know: the lengths of the
 * last slot asked for are kept until something changes a slot. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/internal.h"
#include "kernels/snapshot.h"

#define THREADS 256

static struct snapshot_shape shape_of(const struct cuda *cuda) {
    return {&cuda->options, cuda->pages.page_slots, cuda->shapes, 0, cuda->pages.state_pages, 1,
            false};
}

/* ---- On the device ---- */

/* A stream's block: 32-bit words in the order of kernels/snapshot.h. Factors are halves of words,
 * and the last of an odd number of keys' factors shares its word with the first of the values'. */
struct block_args {
    struct pages pages; /* as they are for the stream */
    uint32_t *words;
    int32_t slot, stream, length;
    int64_t count, factor_word; /* all words, and those before the first factor */
};

/* Address of half `half` of the factors in the cache. */
static __device__ uint16_t *factor_home(const struct block_args &b, int64_t half) {
    const struct pages &p = b.pages;
    int value = half >= b.length, entry = (int)(half - (value ? b.length : 0));
    const int32_t *table = pages_table(p, b.slot, b.stream);
    return pages_factor(p, table[entry / p.page_slots], value, entry % p.page_slots);
}

/* Address of word `word` of the block in the cache, not of a word of factors. */
static __device__ uint32_t *word_home(const struct block_args &b, int64_t word) {
    const struct pages &p = b.pages;
    const int32_t *table = pages_table(p, b.slot, b.stream);
    int64_t sides = (int64_t)SNAPSHOT_SIDES * b.length, at = word - 1;
    if (at < sides) {
        int64_t side = pages_side(p, table, (int)(at % b.length));
        if (at < b.length) return (uint32_t *)&p.pos[side];
        return (uint32_t *)(at < 2 * (int64_t)b.length ? &p.log_beta[side] : &p.score[side]);
    }
    int row_words = p.latent ? p.head_dim / 2 : p.row_bytes / 4; /* without what pads a row */
    int64_t rows = (at - sides) / row_words;
    int column = (int)((at - sides) % row_words), value = rows >= b.length;
    int entry = (int)(rows - (value ? b.length : 0)), row = entry % p.page_slots;
    char *page = pages_at(p, table[entry / p.page_slots]);
    return (uint32_t *)(page + pages_chunk(p, value, row, column / 4)) + column % 4;
}

static __global__ void k_export(struct block_args b) {
    int64_t word = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (word >= b.count) return;
    if (word == 0)
        b.words[0] = (uint32_t)b.length;
    else if (word >= b.factor_word)
        b.words[word] = *factor_home(b, 2 * (word - b.factor_word)) |
                        (uint32_t)*factor_home(b, 2 * (word - b.factor_word) + 1) << 16;
    else
        b.words[word] = *word_home(b, word);
}

static __global__ void k_import(struct block_args b) {
    int64_t word = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (word == 0 || word >= b.count) return;
    if (word < b.factor_word) {
        *word_home(b, word) = b.words[word];
        return;
    }
    for (int half = 0; half < 2; half++)
        *factor_home(b, 2 * (word - b.factor_word) + half) = (uint16_t)(b.words[word] >> 16 * half);
}

/* Sets a stream's length and takes pages for it; enough are free. One thread. */
static __global__ void k_take(struct block_args b) {
    const struct pages &p = b.pages;
    int pages = pages_for(p, b.length);
    int32_t *table = pages_table(p, b.slot, b.stream);
    unsigned long long place = pages_take(p, pages);
    for (int page = 0; page < pages; page++) table[page] = pages_taken(p, place++);
    *pages_length(p, b.slot, b.stream) = b.length;
}

/* A state's numbers, out of its pages and into them: a thread each. */
struct state_args {
    struct pages pages;
    float *numbers;
    int32_t slot, row, count;
};

/* A slot whose first step the device has rejected has no pages: zeros. */
static __global__ void k_export_state(struct state_args a) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int32_t *table = pages_row(a.pages, a.slot, a.row);
    const bool has = *pages_length(a.pages, a.slot, a.row) > 0;
    if (i < a.count) a.numbers[i] = has ? *pages_number(a.pages, table, (int)i) : 0;
}

static __global__ void k_import_state(struct state_args a) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int32_t *table = pages_row(a.pages, a.slot, a.row);
    if (i < a.count) *pages_number(a.pages, table, (int)i) = a.numbers[i];
}

/* Takes pages for a state; enough are free. One thread. */
static __global__ void k_take_state(struct state_args a) {
    const struct pages &p = a.pages;
    int32_t *table = pages_row(p, a.slot, a.row);
    unsigned long long place = pages_take(p, p.state_pages);
    for (int page = 0; page < p.state_pages; page++) table[page] = pages_taken(p, place++);
    *pages_length(p, a.slot, a.row) = p.state_pages;
}

/* ---- Out ---- */

/* The lengths of the slot's rows on the host; NULL when the device failed. */
static const int32_t *lengths_of(struct cuda *cuda, int slot) {
    const struct pages *p = &cuda->pages;
    size_t rows = (size_t)p->rows;
    if (cuda->lengths_slot != slot) {
        cuda->lengths_slot = -1;
        if (device_download(cuda->device, cuda->lengths, p->lengths + (size_t)slot * rows,
                            rows * sizeof *cuda->lengths))
            return NULL;
        cuda->lengths_slot = slot;
    }
    return cuda->lengths;
}

size_t op_snapshot_size(struct kern *kern, int slot, int block) {
    struct cuda *cuda = cuda_of(kern);
    struct snapshot_shape shape = shape_of(cuda);
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots);
    CHECK(block >= 0 && block <= cuda->pages.rows);
    if (block == 0) return snapshot_arrays(&shape, cuda->slots[slot].window).size;
    if (block > cuda->pages.streams) return snapshot_state_size(&shape);
    const int32_t *lengths = lengths_of(cuda, slot);
    return lengths ? snapshot_stream_size(&shape, block - 1, lengths[block - 1], 0) : 0;
}

/* Converts queries to the snapshot's format: float32, scaled; and back, to the same bf16
 * numbers. */
static __global__ void k_export_ring(float *to, const uint16_t *ring, int64_t count, float scale) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = __fmul_rn(__uint_as_float((uint32_t)ring[i] << 16), scale);
}

static __global__ void k_import_ring(uint16_t *ring, const float *from, int64_t count,
                                     float scale) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) ring[i] = (uint16_t)ptx_pack_bf16(__fdiv_rn(from[i], scale), 0);
}

static int export_ring(struct cuda *cuda, const struct slot *slot, const struct snapshot_arrays *at,
                       char *to) {
    int64_t count = (int64_t)(ring_bytes(cuda, slot->window) / sizeof(uint16_t));
    size_t bytes = (size_t)count * sizeof(float);
    if (!slot->ring) return 0;
    float *words = static_cast<float *>(room_take(cuda, &cuda->gather, bytes));
    if (!words) return cache_sync(cuda);
    memcpy(to + at->ring_pos, slot->ring_pos, (size_t)slot->window * sizeof(int32_t));
    LAUNCH(cuda->device, k_export_ring, blocks_for(count, THREADS), THREADS, 0, words,
           (const uint16_t *)slot->ring, count, cuda->scale);
    return device_download(cuda->device, to + at->ring, words, bytes);
}

/* The device's part of block 0, apart from the ring. */
static float *weights_of(struct cuda *cuda, int slot) {
    return cuda->pages.weights + (int64_t)slot * cuda->options.layers;
}

static int export_slot(struct cuda *cuda, int slot, char *to) {
    struct snapshot_shape shape = shape_of(cuda);
    const struct slot *state = &cuda->slots[slot];
    const float no_threshold = NAN; /* entries are not merged here */
    const struct snapshot_slot head = {state->next_pos, state->window, state->measured};
    struct snapshot_arrays at = snapshot_arrays(&shape, state->window);
    memset(to, 0, at.size);
    snapshot_write_head(&shape, &head, to);
    int rc =
        device_download(cuda->device, to + at.weights, weights_of(cuda, slot), at.tau - at.weights);
    for (size_t byte = at.tau; byte < at.ring_pos; byte += sizeof no_threshold)
        memcpy(to + byte, &no_threshold, sizeof no_threshold);
    return rc ? rc : export_ring(cuda, state, &at, to);
}

/* The layer of a stream. */
static int layer_of_stream(const struct cuda *cuda, int stream) {
    int layer = 0;
    while (stream >= cuda->layers[layer].first + cuda->layers[layer].heads) layer++;
    return layer;
}

static struct block_args block_of(struct cuda *cuda, int slot, int stream, int32_t length,
                                  void *words) {
    struct snapshot_shape shape = shape_of(cuda);
    struct block_args b = {};
    b.pages = layer_pages(cuda, layer_of_stream(cuda, stream));
    b.words = static_cast<uint32_t *>(words);
    b.slot = slot;
    b.stream = stream;
    b.length = length;
    b.factor_word =
        (int64_t)(snapshot_part_at(&shape, stream, length, SNAPSHOT_KEY_FACTOR) / sizeof(uint32_t));
    b.count = (int64_t)(snapshot_stream_size(&shape, stream, length, 0) / sizeof(uint32_t));
    return b;
}

static struct state_args state_of(const struct cuda *cuda, int slot, int row, void *numbers) {
    return {cuda->pages, static_cast<float *>(numbers), slot, row, cuda->options.state_floats};
}

int op_snapshot_export(struct kern *kern, int slot, int block, void *to) {
    struct cuda *cuda = cuda_of(kern);
    size_t bytes = op_snapshot_size(kern, slot, block);
    if (block == 0) return export_slot(cuda, slot, static_cast<char *>(to));
    if (bytes == 0) return ERR_DEVICE;
    void *words = room_take(cuda, &cuda->gather, bytes);
    if (!words) return cache_sync(cuda);
    if (block > cuda->pages.streams) {
        const struct state_args a = state_of(cuda, slot, block - 1, words);
        LAUNCH(cuda->device, k_export_state, blocks_for(a.count, THREADS), THREADS, 0, a);
        return device_download(cuda->device, to, words, bytes);
    }
    struct block_args b = block_of(cuda, slot, block - 1, cuda->lengths[block - 1], words);
    LAUNCH(cuda->device, k_export, blocks_for(b.count, THREADS), THREADS, 0, b);
    return device_download(cuda->device, to, words, bytes);
}

/* ---- In ---- */

int op_snapshot_check(struct kern *kern, const struct kern_block *blocks, int count, int32_t tokens,
                      struct kern_report *report, struct fault *fault) {
    struct snapshot_shape shape = shape_of(cuda_of(kern));
    struct snapshot_slot head;
    return snapshot_check(&shape, blocks, count, tokens, &head, report, fault);
}

static int64_t pages_free(struct cuda *cuda) {
    struct kern_cache_stats stats;
    op_cache_stats(&cuda->base, &stats);
    return cuda->pages.count - stats.pages_used;
}

/* The block is copied to the device before its pages are taken. */
static int import_stream(struct cuda *cuda, int slot, int stream, const struct kern_block *block) {
    struct slot *state = &cuda->slots[slot];
    const int32_t slots = cuda->layers[layer_of_stream(cuda, stream)].slots;
    int32_t length = snapshot_length(block);
    if ((length + slots - 1) / slots > pages_free(cuda)) return ERR_FULL;
    void *words = room_take(cuda, &cuda->gather, block->size);
    if (!words) return cache_sync(cuda);
    device_upload(cuda->device, words, block->data, block->size);
    struct block_args b = block_of(cuda, slot, stream, length, words);
    LAUNCH(cuda->device, k_take, 1, 1, 0, b);
    LAUNCH(cuda->device, k_import, blocks_for(b.count, THREADS), THREADS, 0, b);
    state->entries_most += length;
    return cache_sync(cuda);
}

static int import_state(struct cuda *cuda, int slot, int row, const struct kern_block *block) {
    if (cuda->pages.state_pages > pages_free(cuda)) return ERR_FULL;
    void *words = room_take(cuda, &cuda->gather, block->size);
    if (!words) return cache_sync(cuda);
    device_upload(cuda->device, words, block->data, block->size);
    const struct state_args a = state_of(cuda, slot, row, words);
    LAUNCH(cuda->device, k_take_state, 1, 1, 0, a);
    LAUNCH(cuda->device, k_import_state, blocks_for(a.count, THREADS), THREADS, 0, a);
    return cache_sync(cuda);
}

/* Block 0: weights and queries; room is allocated before pages are taken. */
static int import_slot(struct cuda *cuda, int slot, const struct snapshot_slot *head,
                       const struct kern_block *block) {
    struct snapshot_shape shape = shape_of(cuda);
    struct snapshot_arrays at = snapshot_arrays(&shape, head->window);
    struct slot *state = &cuda->slots[slot];
    const char *from = static_cast<const char *>(block->data);
    int64_t count = (int64_t)(ring_bytes(cuda, head->window) / sizeof(uint16_t));
    int rc = ring_take(cuda, state, head->window);
    if (rc) return rc;
    device_upload(cuda->device, weights_of(cuda, slot), from + at.weights, at.tau - at.weights);
    if (!state->ring) return 0;
    size_t bytes = (size_t)count * sizeof(float);
    float *words = static_cast<float *>(room_take(cuda, &cuda->gather, bytes));
    if (!words) return cache_sync(cuda);
    memcpy(state->ring_pos, from + at.ring_pos, (size_t)head->window * sizeof(int32_t));
    device_upload(cuda->device, words, from + at.ring, bytes);
    LAUNCH(cuda->device, k_import_ring, blocks_for(count, THREADS), THREADS, 0, state->ring,
           (const float *)words, count, cuda->scale);
    return 0;
}

int op_snapshot_import(struct kern *kern, int slot, int block, const struct kern_block *from) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots);
    CHECK(block >= 0 && block <= cuda->pages.rows && cuda->slots[slot].in_use == (block > 0));
    cache_changes(cuda);
    if (block > cuda->pages.streams) return import_state(cuda, slot, block - 1, from);
    if (block > 0) return import_stream(cuda, slot, block - 1, from);
    struct snapshot_slot head = snapshot_read_slot(from);
    cuda->slots[slot].in_use = true;
    int rc = import_slot(cuda, slot, &head, from);
    if (rc) return rc;
    cuda->slots[slot].next_pos = head.next_pos;
    cuda->slots[slot].measured = head.measured;
    return 0;
}
