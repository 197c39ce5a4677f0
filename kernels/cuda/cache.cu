/* Pages on the device: opening, a step's append, forks, truncation, reports.
 *
 * One launch appends to all streams of all layers, and one gives states their own pages. The host
 * never learns a length: it stores, per slot, whether the slot is in use, the next position, and
 * whether it was ever forked. */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/internal.h"

#define THREADS 256

/* ---- Opening ---- */

/* Sizes of a page: pages.cuh. */
struct page_shape {
    int row_bytes, slots, bytes; /* bytes: rows and their factors */
};

static struct page_shape latent_page(int row_bytes) {
    struct page_shape shape = {};
    shape.row_bytes = (row_bytes + PANEL_BYTES - 1) / PANEL_BYTES * PANEL_BYTES;
    shape.slots = LATENT_SLOTS;
    while (2 * shape.slots * shape.row_bytes <= LATENT_PAGE_MOST) shape.slots *= 2;
    shape.bytes = shape.slots * shape.row_bytes;
    return shape;
}

static struct page_shape device_page_shape(const struct kern_cache_options *o, int head_dim) {
    const int row_bytes = (int)row_code_bytes(o->dtype, head_dim);
    if (o->latent) return latent_page(row_bytes);
    int slots = page_slots_of(row_bytes);
    if (slots < 1) slots = 1; /* rows that check_options refuses */
    return {row_bytes, slots, PAGE_BYTES + 2 * slots * (int)row_factor_bytes(o->dtype)};
}

/* The shapes of the layers' pages with the most and with the fewest entries. The first are the
 * largest. */
struct page_shapes {
    struct page_shape most, least;
};

static struct page_shapes page_shapes_of_all(const struct kern_cache_options *o) {
    struct page_shapes all = {};
    for (int i = 0; i < (o->heads ? o->layers : 1); i++) {
        const int head_dim = o->heads ? o->heads[i].dim : o->head_dim;
        const struct page_shape shape = device_page_shape(o, head_dim);
        if (i == 0 || shape.slots > all.most.slots) all.most = shape;
        if (i == 0 || shape.slots < all.least.slots) all.least = shape;
    }
    return all;
}

void op_cache_info(const struct kern_cache_options *options, struct kern_cache_info *info) {
    const struct page_shapes shapes = page_shapes_of_all(options);
    info->page_slots = shapes.most.slots;
    info->page_slots_least = shapes.least.slots;
    info->member_slots = 0;
    info->state_slots = STATE_NUMBERS;
    /* factors; pos, log_beta, score, keys; reference count and place in the ring */
    info->page_bytes = shapes.most.bytes + (int64_t)shapes.most.slots * 16 + 8;
}

static int check_latent_rows(const struct kern_cache_options *o, struct fault *fault) {
    if (o->dtype != KERN_BF16)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_dtype",
                         "the CUDA cache holds latent vectors in bf16; f32 and fp8 are for the "
                         "CPU");
    if (o->latent % CHUNK_DIMS || o->head_dim % CHUNK_DIMS || o->latent > LATENT_VALUES_MAX ||
        o->head_dim > LATENT_DIM_MAX)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_lora_rank",
                         "the CUDA backend serves latent vectors of up to %d numbers, and up to %d "
                         "with those that rotate, both multiples of %d; this model has %d and %d",
                         LATENT_VALUES_MAX, LATENT_DIM_MAX, CHUNK_DIMS, o->latent, o->head_dim);
    if (o->heads_kv != 1 || o->latent < 0 || o->latent >= o->head_dim || o->states > 0)
        return fault_set(fault, ERR_INVALID, "cache",
                         "a latent vector of %d in keys of %d, %d KV heads and %d states",
                         o->latent, o->head_dim, o->heads_kv, o->states);
    return 0;
}

static int check_heads(const struct kern_cache_options *o, struct kern_heads heads,
                       struct fault *fault) {
    if (heads.kv < 1 || o->heads_q < 1 || o->heads_q % heads.kv != 0)
        return fault_set(fault, ERR_INVALID, "cache", "%d query heads on %d KV heads", o->heads_q,
                         heads.kv);
    if (heads.dim != 64 && heads.dim != 128 && heads.dim != 256 && heads.dim != WIDE_DIM)
        return fault_set(fault, ERR_UNSUPPORTED, "head_dim",
                         "the CUDA backend serves head sizes 64, 128, 256 and %d; this model has "
                         "%d",
                         WIDE_DIM, heads.dim);
    if (heads.dim == WIDE_DIM && o->dtype != KERN_BF16)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_dtype",
                         "the CUDA cache holds heads of %d numbers in bf16; f32, fp8, q8 and q4 "
                         "of them are for the CPU",
                         WIDE_DIM);
    if (o->heads_q / heads.kv > GROUP_MAX)
        return fault_set(fault, ERR_UNSUPPORTED, "cache",
                         "%d query heads share a KV head; the CUDA backend takes up to %d",
                         o->heads_q / heads.kv, GROUP_MAX);
    return 0;
}

/* The number of kinds of heads, at most one above KINDS_MAX. */
static int count_kinds(const struct kern_cache_options *o) {
    struct kern_heads kinds[KINDS_MAX + 1];
    int count = 0;
    for (int i = 0; i < o->layers && count <= KINDS_MAX; i++) {
        const struct kern_heads heads = kern_heads_of(o, i);
        int kind = 0;
        while (kind < count && (kinds[kind].kv != heads.kv || kinds[kind].dim != heads.dim)) kind++;
        if (kind == count) kinds[count++] = heads;
    }
    return count;
}

static int check_head_rows(const struct kern_cache_options *o, struct fault *fault) {
    if (o->dtype != KERN_BF16 && o->dtype != KERN_E4M3 && o->dtype != KERN_ROW8)
        return fault_set(fault, ERR_UNSUPPORTED, "kv_dtype",
                         "the CUDA cache holds bf16, fp8 or q8; f32 and q4 are for the CPU");
    for (int i = 0; i < o->layers; i++) {
        const int rc = check_heads(o, kern_heads_of(o, i), fault);
        if (rc) return rc;
    }
    if (count_kinds(o) > KINDS_MAX)
        return fault_set(fault, ERR_UNSUPPORTED, "cache",
                         "the layers have heads of more than %d kinds", KINDS_MAX);
    if (o->rank_cap > 0 && o->heads)
        return fault_set(fault, ERR_UNSUPPORTED, "rank_cap",
                         "layers whose heads differ have no cap of ranks");
    return 0;
}

static int check_options(const struct kern_cache_options *o, struct fault *fault) {
    if (o->layers < 1 || o->heads_kv < 1 || o->heads_q < 1 || (o->latent && o->heads))
        return fault_set(fault, ERR_INVALID, "cache", "%d layers of %d query heads on %d KV heads",
                         o->layers, o->heads_q, o->heads_kv);
    int rc = o->latent ? check_latent_rows(o, fault) : check_head_rows(o, fault);
    if (rc) return rc;
    if (o->slots < 1 || o->max_positions < 1 || o->max_positions > 1 << 30)
        return fault_set(fault, ERR_INVALID, "cache", "slots and max_positions must be positive");
    if (o->pages < 1 || o->pages > INT32_MAX)
        return fault_set(fault, ERR_INVALID, "kv_pool_bytes",
                         "the pool would have %lld pages; 1 to %d are possible",
                         (long long)o->pages, INT32_MAX);
    if ((int64_t)o->layers * o->heads_kv > 1 << 20 ||
        (int64_t)o->layers * o->heads_q * o->head_dim > INT32_MAX)
        return fault_set(fault, ERR_LIMIT, "cache",
                         "more than 2^20 streams, or 2^31 numbers of a token's queries");
    if (o->rank_cap != 0 && !(o->rank_cap >= 1))
        return fault_set(fault, ERR_INVALID, "cache", "rank_cap must be 0 or at least 1");
    if (o->states < 0 || (o->states > 0 && o->state_floats < 1))
        return fault_set(fault, ERR_INVALID, "cache", "states without numbers");
    if (o->states > 1 << 20 || o->state_floats > 1 << 30)
        return fault_set(fault, ERR_LIMIT, "cache",
                         "more than 2^20 states, or 2^30 numbers of a state");
    return 0;
}

/* The number of the kind of these heads of the model; kind_count: there is none yet. */
static int find_kind(const struct cuda *cuda, struct kern_heads heads) {
    int kind = 0;
    while (kind < cuda->kind_count &&
           (cuda->kinds[kind].heads_model != heads.kv || cuda->kinds[kind].head_dim != heads.dim))
        kind++;
    return kind;
}

/* Adds a layer to its kind, and to what is counted over all layers. */
static void count_layer(struct cuda *cuda, const struct kern_cache_options *model,
                        struct kern_heads heads) {
    const int index = find_kind(cuda, heads);
    struct heads_kind *kind = &cuda->kinds[index];
    if (index == cuda->kind_count) {
        const struct page_shape page = device_page_shape(model, heads.dim);
        CHECK(cuda->kind_count < KINDS_MAX);
        cuda->kind_count++;
        *kind = {heads.kv,
                 heads.dim,
                 model->heads_q / heads.kv,
                 shard_heads(cuda->comm, model->heads_q, heads.kv),
                 page.row_bytes,
                 page.slots,
                 0};
        if (kind->group > cuda->group_most) cuda->group_most = kind->group;
    }
    kind->layers++;
    cuda->queries += kind_query_width(kind);
    cuda->pages.streams += kind->shard.heads_kv;
    cuda->pages.model_streams += heads.kv;
}

/* Sets everything that follows from the options, for this rank's part. */
static void set_shape(struct cuda *cuda, const struct kern_cache_options *model) {
    struct pages *p = &cuda->pages;
    struct kern_cache_options *o = &cuda->options;
    *o = *model;
    cuda->shard = shard_heads(cuda->comm, model->heads_q, model->heads_kv);
    o->heads_q = cuda->shard.heads_q;
    o->heads_kv = cuda->shard.heads_kv;
    cuda->kind_count = cuda->group_most = 0;
    cuda->queries = p->streams = p->model_streams = 0;
    for (int i = 0; i < model->layers; i++) count_layer(cuda, model, kern_heads_of(model, i));
    p->count = o->pages;
    p->layers = o->layers;
    p->heads_kv = o->heads_kv;
    p->heads_model = model->heads_kv;
    p->head_dim = o->head_dim;
    const struct page_shapes shapes = page_shapes_of_all(model);
    p->row_bytes = shapes.least.row_bytes;
    p->page_slots = p->side_slots = shapes.most.slots;
    p->page_bytes = shapes.most.bytes;
    p->scaled = row_scaled(o->dtype);
    p->latent = o->latent > 0;
    p->narrow = o->dtype == KERN_E4M3 || p->scaled;
    p->stream_pages = (o->max_positions + shapes.least.slots - 1) / shapes.least.slots;
    o->state_floats = kern_state_part(model, cuda->comm->ranks);
    p->rows = p->streams + o->states;
    p->state_pages = o->states ? (o->state_floats + STATE_NUMBERS - 1) / STATE_NUMBERS : 0;
    p->slot_pages = (int64_t)p->streams * p->stream_pages + (int64_t)o->states * p->state_pages;
}

/* Fills the places of layers and streams. */
static void make_places(const struct cuda *cuda, const struct kern_cache_options *model,
                        struct layer_place *layers, struct stream_place *streams) {
    struct layer_place at = {};
    for (int i = 0; i < model->layers; i++) {
        at.kind = find_kind(cuda, kern_heads_of(model, i));
        const struct heads_kind *kind = &cuda->kinds[at.kind];
        at.heads = kind->shard.heads_kv;
        at.heads_model = kind->heads_model;
        at.head_first = kind->shard.first;
        at.slots = kind->page_slots;
        layers[i] = at;
        cuda->shapes[i] = {kind->shard.heads_q, at.heads, kind->head_dim, at.slots};
        for (int head = 0; head < at.heads; head++)
            streams[at.first + head] = {i, head, at.slots, at.kind};
        at.first += at.heads;
        at.model_first += at.heads_model;
        at.query += (int32_t)kind_query_width(kind);
    }
}

/* Copies the places to the device, and those of layers to the host's array. */
static int place_layers(struct cuda *cuda, const struct kern_cache_options *model) {
    const size_t layers = (size_t)model->layers, count = (size_t)cuda->pages.streams;
    struct stream_place *streams =
        static_cast<struct stream_place *>(mem_try_alloc(count, sizeof *streams));
    if (!streams) return ERR_NOMEM;
    make_places(cuda, model, cuda->layers, streams);
    device_upload(cuda->device, const_cast<struct layer_place *>(cuda->pages.layer_places),
                  cuda->layers, layers * sizeof *cuda->layers);
    device_upload(cuda->device, const_cast<struct stream_place *>(cuda->pages.stream_places),
                  streams, count * sizeof *streams);
    mem_free(streams);
    return 0;
}

/* Lists all device memory of a cache of this shape; returns the number of regions. The pool is
 * zeroed once: freed pages then hold old numbers, and kernels mask those. */
static int list_regions(struct cuda *cuda, struct region *regions) {
    struct pages *p = &cuda->pages;
    size_t count = (size_t)p->count, side = count * (size_t)p->side_slots;
    size_t slots = (size_t)cuda->options.slots;
    size_t layers = (size_t)p->layers * slots;
    const struct region own[] = {
        {(void **)&p->pool, count, (size_t)p->page_bytes, true},
        {(void **)&p->pos, side, sizeof *p->pos, true},
        {(void **)&p->log_beta, side, sizeof *p->log_beta, true},
        {(void **)&p->score, side, sizeof *p->score, true},
        {(void **)&p->keys, side, sizeof *p->keys, false},
        {(void **)&p->refs, count, sizeof *p->refs, true},
        {(void **)&p->ring, count, sizeof *p->ring, false},
        {(void **)&p->tables, slots * (size_t)p->slot_pages, sizeof *p->tables, false},
        {(void **)&p->lengths, slots * (size_t)p->rows, sizeof *p->lengths, true},
        {(void **)&p->weights, layers, sizeof *p->weights, true},
        {(void **)&p->state, 1, sizeof *p->state, true},
        {(void **)&p->stream_places, (size_t)p->streams, sizeof *p->stream_places, false},
        {(void **)&p->layer_places, (size_t)p->layers, sizeof *p->layer_places, false},
    };
    int listed = sizeof own / sizeof *own;
    memcpy(regions, own, sizeof own);
    listed += attend_regions(cuda, regions + listed);
    CHECK(listed <= REGIONS_MAX);
    return listed;
}

static int alloc_regions(struct cuda *cuda) {
    struct region regions[REGIONS_MAX];
    int count = list_regions(cuda, regions);
    for (int i = 0; i < count; i++) {
        size_t bytes;
        if (__builtin_mul_overflow(regions[i].count, regions[i].size, &bytes)) return ERR_NOMEM;
        *regions[i].array = device_alloc(cuda->device, bytes);
        if (!*regions[i].array) return ERR_NOMEM;
        if (regions[i].zero) device_zero(cuda->device, *regions[i].array, bytes);
    }
    return 0;
}

/* ---- How large it may be ---- */

/* SIZE_MAX: too large for a number. */
static size_t cache_bytes(const struct cuda *cuda, const struct kern_cache_options *options,
                          int64_t pages) {
    struct cuda shape = {};
    struct kern_cache_options o = *options;
    struct region regions[REGIONS_MAX];
    size_t total = 0, bytes;
    o.pages = pages;
    shape.comm = cuda->comm;
    set_shape(&shape, &o);
    int count = list_regions(&shape, regions);
    for (int i = 0; i < count; i++)
        if (__builtin_mul_overflow(regions[i].count, regions[i].size, &bytes) ||
            __builtin_add_overflow(total, bytes, &total))
            return SIZE_MAX;
    return total;
}

/* Memory that stays free for later allocations: the rooms of the largest step, a twentieth for
 * everything that grows with the steps (rooms of eviction, staged lists, graphs), and a ring of 16
 * queries for every slot. */
static size_t margin(const struct cuda *cuda, const struct device_memory *memory,
                     const struct kern_cache_options *options) {
    struct cuda shape = {};
    shape.comm = cuda->comm;
    set_shape(&shape, options);
    const size_t ring = options->latent ? 0 : ring_bytes(&shape, 16); /* see rule_fits */
    return rooms_bytes(cuda, options) + memory->total / 20 + (size_t)options->slots * ring;
}

static size_t mib(size_t bytes) {
    return bytes >> 20;
}

int op_cache_fit(struct kern *kern, const struct kern_cache_options *options, int64_t *pages,
                 struct fault *fault) {
    struct device_memory memory = device_memory(cuda_of(kern)->device);
    struct kern_cache_options one = *options;
    one.pages = 1;
    int rc = check_options(&one, fault);
    if (rc) return rc;
    struct cuda shape = {};
    shape.comm = cuda_of(kern)->comm;
    set_shape(&shape, options);
    size_t spare = margin(cuda_of(kern), &memory, options),
           room = memory.unused > spare ? memory.unused - spare : 0;
    int64_t low = 0, high = (int64_t)(room / (size_t)shape.pages.page_bytes);
    if (high > INT32_MAX) high = INT32_MAX;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (cache_bytes(cuda_of(kern), options, middle) <= room)
            low = middle;
        else
            high = middle - 1;
    }
    *pages = low;
    if (low >= shape.pages.streams + (int64_t)options->states * shape.pages.state_pages) return 0;
    return fault_set(fault, ERR_NOMEM, "kv-pool-bytes",
                     "%zu of the device's %zu MiB are free, of which %zu stay free for steps; the "
                     "tables of %d sequences and conversations of %d positions take %zu MiB, and "
                     "no token has a page; lower max-model-len, max-conversations or max-num-seqs",
                     mib(memory.unused), mib(memory.total), mib(spare), options->slots,
                     options->max_positions, mib(cache_bytes(cuda_of(kern), options, 0)));
}

/* ---- Opening and closing ---- */

static __global__ void k_fill_ring(struct pages p) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.ring[i] = (int32_t)i;
    if (i == 0) p.state->tail = (unsigned long long)p.count;
}

static int alloc_pages(struct cuda *cuda, const struct kern_cache_options *model) {
    const struct pages *p = &cuda->pages;
    int rc = alloc_regions(cuda);
    if (!rc) rc = place_layers(cuda, model);
    if (rc) return rc;
    LAUNCH(cuda->device, k_fill_ring, blocks_for(p->count, THREADS), THREADS, 0, *p);
    return device_sync(cuda->device);
}

void cache_close(struct cuda *cuda) {
    struct region regions[REGIONS_MAX];
    int count = cuda->options.layers > 0 ? list_regions(cuda, regions) : 0;
    for (int i = 0; i < count; i++) {
        device_free(cuda->device, *regions[i].array);
        *regions[i].array = NULL;
    }
    for (int i = 0; cuda->slots && i < cuda->options.slots; i++) ring_give(cuda, &cuda->slots[i]);
    rings_close(cuda);
    mass_close(cuda);
    mem_free(cuda->slots);
    mem_free(cuda->lengths);
    mem_free(cuda->attended);
    mem_free(cuda->layers);
    mem_free(cuda->shapes);
    mem_free(cuda->step.host);
    memset(&cuda->pages, 0, sizeof cuda->pages);
    memset(&cuda->step, 0, sizeof cuda->step);
    cuda->slots = NULL;
    cuda->lengths = NULL;
    cuda->attended = NULL;
    cuda->layers = NULL;
    cuda->shapes = NULL;
    cuda->has_cache = false;
}

/* Rules that need more than attention are refused when a sequence wants them (op_prepare). */
static int check_shared(const struct cuda *cuda, struct fault *fault) {
    size_t attention = attend_shared(cuda), moves = compact_shared(cuda);
    size_t needs = attention > moves ? attention : moves, has = device_shared(cuda->device);
    if (needs <= has) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "device",
                     "a block of the device has %zu KiB of shared memory; heads of %d numbers need "
                     "%zu KiB",
                     has >> 10, cuda->options.head_dim, (needs + 1023) >> 10);
}

int op_cache_open(struct kern *kern, const struct kern_cache_options *options,
                  struct fault *fault) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(!cuda->has_cache);
    int rc = check_options(options, fault);
    if (rc) return rc;
    set_shape(cuda, options);
    rc = check_shared(cuda, fault);
    if (rc) return rc;
    cuda->scale = 1 / sqrtf((float)options->head_dim); /* until attention sets another one */
    cuda->slots =
        static_cast<struct slot *>(mem_try_alloc((size_t)options->slots, sizeof *cuda->slots));
    cuda->lengths =
        static_cast<int32_t *>(mem_try_alloc((size_t)cuda->pages.rows, sizeof *cuda->lengths));
    cuda->lengths_slot = -1;
    cuda->attended = static_cast<struct attended *>(
        mem_try_alloc((size_t)options->layers, sizeof *cuda->attended));
    cuda->layers = static_cast<struct layer_place *>(
        mem_try_alloc((size_t)options->layers, sizeof *cuda->layers));
    cuda->shapes = static_cast<struct snapshot_layer *>(
        mem_try_alloc((size_t)options->layers, sizeof *cuda->shapes));
    rc = ERR_NOMEM;
    if (cuda->slots && cuda->lengths && cuda->attended && cuda->layers && cuda->shapes)
        rc = alloc_pages(cuda, options);
    if (!rc) rc = rooms_reserve(cuda);
    if (rc) {
        cache_close(cuda);
        (void)device_sync(cuda->device);
        return fault_set(fault, rc, "kv_pool_bytes",
                         "%lld pages of %d bytes, their records, tables and plans take %zu MiB; "
                         "%zu MiB of the device's memory are free",
                         (long long)options->pages, cuda->pages.page_bytes,
                         mib(cache_bytes(cuda, options, options->pages)),
                         mib(device_memory(cuda->device).unused));
    }
    cuda->has_cache = true;
    cuda->state = {};
    cuda->state.tail = (unsigned long long)cuda->pages.count;
    cuda->state_known = true;
    return 0;
}

/* ---- A step ---- */

/* The step writes into pages [from, to) of a row, which must be private. Of a stream these are the
 * partly filled page, or all pages if attention is added up; of a state they are all pages. */
struct written {
    int from, to;
};

static __device__ struct written pages_written(const struct pages &p, const struct span &s,
                                               int row) {
    int length = *pages_length(p, s.slot, row);
    if (row >= p.streams) return {0, length};
    const int slots = p.stream_places[row].slots;
    return {s.adds ? 0 : length / slots, (length + slots - 1) / slots};
}

/* A thread per row: counts the pages that its new entries, or a new state, need. */
static __global__ void k_claim(struct pages p, const struct span *spans, int count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)count * p.rows || pages_failed(p)) return;
    const struct span s = spans[i / p.rows];
    int row = (int)(i % p.rows), length = *pages_length(p, s.slot, row);
    int need = row < p.streams
                   ? pages_of_row(p, row, length + s.count) - pages_of_row(p, row, length)
                   : p.state_pages - length;
    if (need) atomicAdd(&p.state->need, (unsigned long long)need);
}

/* A warp per row: drops references to shared pages that the step writes; the last owner keeps
 * the page. The table then contains ~page; k_copy_shared and k_own_states make private copies. */
static __global__ void k_give_up(struct pages p, const struct span *spans, int count) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (i >= (int64_t)count * p.rows || pages_failed(p)) return;
    const struct span s = spans[i / p.rows];
    int32_t *table = pages_row(p, s.slot, (int)(i % p.rows));
    struct written pages = pages_written(p, s, (int)(i % p.rows));
    for (int page = pages.from + lane; page < pages.to; page += 32) {
        uint32_t *refs = &p.refs[table[page]];
        if (atomicSub(refs, 1u) > 1u) {
            table[page] = ~table[page];
            atomicAdd(&p.state->need, 1ull);
        } else {
            atomicAdd(refs, 1u);
        }
    }
}

/* One thread: are there enough pages on this rank? */
static __global__ void k_judge(struct pages p) {
    bool full = p.state->need > p.state->tail - p.state->head;
    p.state->verdict = pages_failed(p) ? p.state->error : full ? ERR_FULL : 0;
    p.state->need = 0;
}

/* One thread: unless there are enough pages on every rank, no rank changes anything. */
static __global__ void k_decide(struct pages p) {
    if (p.state->verdict) pages_fail(p, (int)p.state->verdict);
}

void cache_decide(struct cuda *cuda) {
    LAUNCH(cuda->device, k_judge, 1, 1, 0, cuda->pages);
    join_reduce(cuda, &cuda->pages.state->verdict, 1, COMM_I64, COMM_MIN);
    LAUNCH(cuda->device, k_decide, 1, 1, 0, cuda->pages);
}

/* A warp per stream: copies the shared pages it gave up, or restores the references. */
static __global__ void k_copy_shared(struct pages p, const struct span *spans, int count) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (i >= (int64_t)count * p.streams) return;
    const struct span s = spans[i / p.streams];
    int32_t *table = pages_table(p, s.slot, (int)(i % p.streams));
    struct written pages = pages_written(p, s, (int)(i % p.streams));
    bool failed = pages_failed(p);
    for (int page = pages.from; page < pages.to; page++) {
        int32_t from = ~table[page], to = 0;
        if (from < 0) continue;
        __syncwarp();
        if (lane == 0 && failed) atomicAdd(&p.refs[from], 1u);
        if (lane == 0) to = failed ? from : pages_taken(p, pages_take(p, 1));
        to = __shfl_sync(WARP_ALL, to, 0);
        if (!failed) pages_copy(p, to, from, lane, 32);
        __syncwarp();
        if (lane == 0) table[page] = to;
    }
}

/* A block per state of a span, a warp per page: copies the pages it gave up, or restores their
 * references; takes the pages of a new state and fills them with zeros. */
static __global__ void k_own_states(struct pages p, const struct span *spans) {
    const struct span s = spans[blockIdx.y];
    const int row = p.streams + (int)blockIdx.x, lane = threadIdx.x % 32;
    int32_t *table = pages_row(p, s.slot, row), *length = pages_length(p, s.slot, row);
    const bool failed = pages_failed(p), fresh = *length == 0;
    const int count = fresh && !failed ? p.state_pages : *length;
    for (int page = (int)threadIdx.x / 32; page < count; page += (int)blockDim.x / 32) {
        const int32_t from = fresh ? 0 : ~table[page];
        int32_t to = from;
        if (from < 0) continue;
        __syncwarp();
        if (lane == 0 && failed) atomicAdd(&p.refs[from], 1u);
        if (lane == 0 && !failed) to = pages_taken(p, pages_take(p, 1));
        to = __shfl_sync(WARP_ALL, to, 0);
        if (!failed && !fresh) pages_copy(p, to, from, lane, 32);
        for (int i = lane; fresh && i < PAGE_BYTES / 16; i += 32)
            ((uint4 *)pages_at(p, to))[i] = {};
        __syncwarp();
        if (lane == 0) table[page] = to;
    }
    __syncthreads();
    if (threadIdx.x == 0) *length = count;
}

/* A thread per stream: pages, positions, the new length. */
static __global__ void k_append(struct pages all, const struct span *spans, int count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)count * all.streams || pages_failed(all)) return;
    const struct span s = spans[i / all.streams];
    int stream = (int)(i % all.streams);
    const struct stream_place place = all.stream_places[stream];
    const struct pages p = pages_with(all, place.slots);
    int32_t *table = pages_table(p, s.slot, stream);
    int32_t *length = pages_length(p, s.slot, stream);
    int from = pages_for(p, *length), to = pages_for(p, *length + s.count);
    if (to > from) {
        unsigned long long place = pages_take(p, to - from);
        for (int page = from; page < to; page++) table[page] = pages_taken(p, place++);
    }
    for (int entry = *length, k = 0; k < s.count; entry++, k++) {
        int64_t side = pages_side(p, table, entry);
        p.pos[side] = s.pos + k;
        p.score[side] = s.score;
    }
    *length += s.count;
    if (s.begins && place.head == 0)
        p.weights[(int64_t)s.slot * p.layers + place.layer] = 0; /* not measured */
}

static bool any_shared(const struct cuda *cuda, const struct kern_batch *batch) {
    for (int i = 0; i < batch->span_count; i++)
        if (cuda->slots[batch->spans[i].slot].shared) return true;
    return false;
}

static void append(struct cuda *cuda, const struct kern_batch *batch) {
    const struct step *step = &cuda->step;
    const struct pages *p = &cuda->pages;
    int64_t streams = (int64_t)step->span_count * p->streams;
    int64_t rows = (int64_t)step->span_count * p->rows;
    bool shared = any_shared(cuda, batch);
    LAUNCH(cuda->device, k_claim, blocks_for(rows, THREADS), THREADS, 0, *p, step->spans,
           step->span_count);
    if (shared)
        LAUNCH(cuda->device, k_give_up, blocks_for(rows, THREADS / 32), THREADS, 0, *p, step->spans,
               step->span_count);
    cache_decide(cuda);
    if (shared)
        LAUNCH(cuda->device, k_copy_shared, blocks_for(streams, THREADS / 32), THREADS, 0, *p,
               step->spans, step->span_count);
    if (cuda->options.states > 0)
        LAUNCH(cuda->device, k_own_states,
               dim3((unsigned)cuda->options.states, (unsigned)step->span_count), THREADS, 0, *p,
               step->spans);
    LAUNCH(cuda->device, k_append, blocks_for(streams, THREADS), THREADS, 0, *p, step->spans,
           step->span_count);
}

/* ---- The batch on the device ---- */

static bool same_batch(const struct step *step, const struct kern_batch *batch) {
    if (step->rows != batch->rows || step->span_count != batch->span_count || !step->host)
        return false;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *a = &step->host[i], *b = &batch->spans[i];
        if (a->slot != b->slot || a->row != b->row || a->count != b->count || a->pos != b->pos)
            return false;
    }
    return true;
}

static void keep_host_spans(struct step *step, const struct kern_batch *batch) {
    if (batch->span_count > step->host_room) {
        mem_free(step->host);
        step->host_room = batch->span_count;
        step->host = static_cast<struct kern_span *>(
            mem_must_alloc((size_t)batch->span_count, sizeof *step->host));
    }
    memcpy(step->host, batch->spans, (size_t)batch->span_count * sizeof *step->host);
    step->rows = batch->rows;
    step->span_count = batch->span_count;
}

/* Host arrays of one batch, consecutive in one allocation: spans, tiles of each kind of heads, then
 * the int32s. */
struct lists {
    char *mem;
    size_t bytes;
    struct prefill_tile *tiles[KINDS_MAX];
    struct span *spans;
    int32_t *row_span, *decode;
};

/* The most tiles of a kind. */
static size_t tiles_most(const struct heads_kind *kind, const struct kern_batch *batch) {
    return (size_t)batch->rows * (size_t)kind->shard.queries / PREFILL_ROWS +
           (size_t)batch->span_count;
}

static struct lists alloc_lists(const struct cuda *cuda, const struct kern_batch *batch) {
    size_t spans = (size_t)batch->span_count, rows = (size_t)batch->rows;
    size_t tiles = 0;
    struct lists l = {};
    for (int k = 0; k < cuda->kind_count; k++) tiles += tiles_most(&cuda->kinds[k], batch);
    l.bytes =
        tiles * sizeof *l.tiles[0] + spans * sizeof *l.spans + (rows + spans) * sizeof(int32_t);
    l.mem = static_cast<char *>(mem_must_alloc(l.bytes, 1));
    l.spans = reinterpret_cast<struct span *>(l.mem);
    struct prefill_tile *next = reinterpret_cast<struct prefill_tile *>(l.spans + spans);
    for (int k = 0; k < cuda->kind_count; k++) {
        l.tiles[k] = next;
        next += tiles_most(&cuda->kinds[k], batch);
    }
    l.row_span = reinterpret_cast<int32_t *>(next);
    l.decode = l.row_span + rows;
    return l;
}

static void stage_lists(struct cuda *cuda, const struct lists *l) {
    struct step *step = &cuda->step;
    const char *mem = static_cast<const char *>(device_stage(cuda->device, l->mem, l->bytes));
    auto place = [&](const void *host) {
        return mem ? mem + (static_cast<const char *>(host) - l->mem) : NULL;
    };
    step->spans = reinterpret_cast<const struct span *>(place(l->spans));
    for (int k = 0; k < cuda->kind_count; k++)
        step->tiles[k].list = reinterpret_cast<const struct prefill_tile *>(place(l->tiles[k]));
    step->row_span = reinterpret_cast<const int32_t *>(place(l->row_span));
    step->decode = reinterpret_cast<const int32_t *>(place(l->decode));
}

static struct span make_span(const struct cuda *cuda, const struct kern_span *from) {
    const struct slot *slot = &cuda->slots[from->slot];
    struct span s = {};
    s.slot = from->slot;
    s.row = from->row;
    s.count = from->count;
    s.pos = from->pos;
    s.window = rule_window(from->rule);
    s.ring = s.window > 0 ? slot->ring : NULL;
    s.adds = rule_adds(from->rule);
    bool scored = from->rule && from->rule->score == KERN_SCORE_ATTENTION;
    s.score = scored && !s.adds ? SCORE_NONE : 0;
    s.begins = !slot->in_use;
    return s;
}

/* Cuts the rows of a span into tiles of a kind, late ones first, because they see the most entries.
 */
static void cut_span(struct lists *l, struct prefill_tiles *tiles, int kind, int span, int rows) {
    const int last = (rows - 1) / PREFILL_ROWS * PREFILL_ROWS;
    for (int first = last; first >= 0; first -= PREFILL_ROWS)
        l->tiles[kind][tiles->count++] = {span, first};
}

/* Spans of one row decode; longer spans are cut into tiles. */
static void stage_batch(struct cuda *cuda, const struct kern_batch *batch) {
    struct step *step = &cuda->step;
    struct lists l = alloc_lists(cuda, batch);
    step->decode_count = 0;
    for (struct prefill_tiles &tiles : step->tiles) tiles.count = 0;
    step->keeps = false;
    for (bool &has : step->has_angles) has = false;
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        CHECK(s->row >= 0 && s->count > 0 && s->row <= batch->rows - s->count);
        l.spans[i] = make_span(cuda, s);
        step->keeps = step->keeps || l.spans[i].ring || l.spans[i].adds;
        for (int k = 0; k < s->count; k++) l.row_span[s->row + k] = i;
        if (s->count == 1) {
            l.decode[step->decode_count++] = i;
            continue;
        }
        for (int k = 0; k < cuda->kind_count; k++)
            cut_span(&l, &step->tiles[k], k, i, s->count * cuda->kinds[k].shard.queries);
    }
    keep_host_spans(step, batch);
    stage_lists(cuda, &l);
    mem_free(l.mem);
    if (!mass_stage(cuda, batch))
        step->spans = NULL; /* treated like missing memory for its own lists */
}

const struct step *step_of(struct cuda *cuda, const struct kern_batch *batch) {
    if (!same_batch(&cuda->step, batch)) stage_batch(cuda, batch);
    return &cuda->step;
}

/* Updates the host's knowledge of a slot after the step. */
static void note_span(struct cuda *cuda, const struct kern_span *s) {
    struct slot *slot = &cuda->slots[s->slot];
    slot->in_use = true;
    slot->next_pos = s->pos + s->count;
    slot->entries_most += (int64_t)cuda->pages.streams * s->count;
    /* Entries that were taken back may still be counted; a slot never holds more than fits its
     * pages. */
    const int64_t most = slot->pages * cuda->pages.page_slots;
    if (most > 0 && slot->entries_most > most) slot->entries_most = most;
    for (int i = s->count > slot->window ? s->count - slot->window : 0; i < s->count; i++)
        slot->ring_pos[(s->pos + i) % slot->window] = s->pos + i;
}

/* Starts a repeated region: a step that only decodes equals the last one with as many rows, because
 * lengths, tables and tokens are on the device. */
static void repeat_step(struct cuda *cuda, const struct kern_batch *batch) {
    if (batch->rows > GRAPH_ROWS_MAX || batch->rows != batch->span_count) return;
    if (cuda->eager || !device_may_repeat(cuda->device)) return;
    uint64_t key = (uint64_t)batch->rows * 2 + any_shared(cuda, batch);
    graph_begin(device_graphs(cuda->device), cuda->device, key);
}

/* Allocates all host memory and rooms that the step requires. */
static int prepare_step(struct cuda *cuda, const struct kern_batch *batch) {
    for (int i = 0; i < batch->span_count; i++)
        if (ring_take(cuda, &cuda->slots[batch->spans[i].slot], rule_window(batch->spans[i].rule)))
            return ERR_NOMEM;
    if (matmul_reserve(cuda, batch->rows)) return ERR_NOMEM;
    repeat_step(cuda, batch);
    stage_batch(cuda, batch);
    return cuda->step.spans ? 0 : ERR_NOMEM;
}

int op_begin_step(struct kern *kern, const struct kern_batch *batch) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache);
    for (int i = 0; i < batch->span_count; i++) {
        const struct kern_span *s = &batch->spans[i];
        CHECK(s->slot >= 0 && s->slot < cuda->options.slots);
        CHECK(s->count > 0 && s->pos >= cuda->slots[s->slot].next_pos);
        if (s->pos > cuda->options.max_positions - s->count) return ERR_LIMIT;
        if (s->rule && !rule_fits(cuda, s->rule)) return ERR_UNSUPPORTED;
    }
    cache_changes(cuda);
    int rc = join_agree(cuda, prepare_step(cuda, batch));
    if (rc) {
        (void)cache_sync(cuda); /* reported here and not again */
        return rc;
    }
    append(cuda, batch);
    attend_plan(cuda);
    for (int i = 0; i < batch->span_count; i++) note_span(cuda, &batch->spans[i]);
    return 0;
}

/* The device has rejected a step or an eviction, for which the bounds were already lowered: nothing
 * is known of a slot but its tokens. */
static void forget_bounds(struct cuda *cuda) {
    for (int i = 0; i < cuda->options.slots; i++)
        cuda->slots[i].entries_most = (int64_t)cuda->pages.streams * cuda->slots[i].next_pos;
}

/* Reads the state once per step, together with the tokens if the step samples; later calls without
 * changes need no read. */
int cache_sync(struct cuda *cuda) {
    struct pages_state *state = &cuda->state;
    bool reads = cuda->has_cache && !cuda->state_known;
    cuda->step.rows = -1; /* staged lists are valid until the sync */
    graph_end(device_graphs(cuda->device), cuda->device);
    if (reads) device_fetch(cuda->device, state, cuda->pages.state, sizeof *state);
    int rc = device_sync(cuda->device);
    if (reads) cuda->state_known = rc == 0;
    if (rc || !reads || !state->error) return rc;
    device_zero(cuda->device, &cuda->pages.state->error, sizeof state->error);
    rc = state->error;
    state->error = 0;
    forget_bounds(cuda);
    return rc;
}

/* ---- Slots ---- */

/* A block per row: keeps the entries before `pos`, frees the other pages; a state goes as a whole,
 * with all entries. Also runs after errors: a slot must always be releasable. */
static __global__ void k_truncate(struct pages p, int slot, int32_t pos) {
    const int row = (int)blockIdx.x;
    const int32_t *table = pages_row(p, slot, row);
    int32_t *length = pages_length(p, slot, row);
    int old = *length, left = 0;
    if (pos > 0)
        left = row < p.streams ? pages_before(pages_of_stream(p, row), table, old, pos) : old;
    for (int page = pages_of_row(p, row, left) + (int)threadIdx.x; page < pages_of_row(p, row, old);
         page += (int)blockDim.x)
        pages_drop(p, table[page]);
    __syncthreads();
    if (threadIdx.x == 0) *length = left;
}

static void truncate_slot(struct cuda *cuda, int slot, int32_t pos) {
    cache_changes(cuda);
    LAUNCH(cuda->device, k_truncate, (unsigned)cuda->pages.rows, 64, 0, cuda->pages, slot, pos);
    struct slot *state = &cuda->slots[slot];
    int64_t most = (int64_t)cuda->pages.streams * pos;
    if (state->next_pos > pos) state->next_pos = pos;
    if (state->entries_most > most) state->entries_most = most;
}

int op_truncate(struct kern *kern, int slot, int32_t pos) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots && pos >= 0);
    if (cuda->options.states > 0 && cuda->slots[slot].next_pos > pos) return ERR_UNSUPPORTED;
    truncate_slot(cuda, slot, pos);
    return 0;
}

void op_release(struct kern *kern, int slot) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots);
    if (cuda->slots[slot].in_use) truncate_slot(cuda, slot, 0);
    ring_give(cuda, &cuda->slots[slot]);
    cuda->forked_entries -= cuda->slots[slot].forked;
    cuda->slots[slot] = {};
}

static __device__ void share_row(const struct pages &p, int32_t *to, const int32_t *from,
                                 int pages) {
    for (int page = threadIdx.x; page < pages; page += (int)blockDim.x) {
        to[page] = from[page];
        atomicAdd(&p.refs[from[page]], 1u);
    }
}

static __global__ void k_fork(struct pages p, int from, int to) {
    int row = blockIdx.x, length = *pages_length(p, from, row);
    share_row(p, pages_row(p, to, row), pages_row(p, from, row), pages_of_row(p, row, length));
    if (threadIdx.x != 0) return;
    *pages_length(p, to, row) = length;
    if (row >= p.streams || p.stream_places[row].head > 0) return;
    const int layer = p.stream_places[row].layer;
    p.weights[(int64_t)to * p.layers + layer] = p.weights[(int64_t)from * p.layers + layer];
}

int op_fork(struct kern *kern, int from, int to) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(cuda->has_cache && from >= 0 && from < cuda->options.slots);
    CHECK(to >= 0 && to < cuda->options.slots);
    CHECK(cuda->slots[from].in_use && !cuda->slots[to].in_use);
    struct slot *source = &cuda->slots[from], *target = &cuda->slots[to];
    int rc = ring_take(cuda, target, source->window);
    if (!rc) rc = attend_grow(cuda, cuda->forked_entries + source->entries_most);
    rc = join_agree(cuda, rc);
    if (rc) return rc;
    cache_changes(cuda);
    LAUNCH(cuda->device, k_fork, (unsigned)cuda->pages.rows, 64, 0, cuda->pages, from, to);
    if (source->ring)
        device_copy(cuda->device, target->ring, source->ring, ring_bytes(cuda, source->window));
    source->shared = true;
    struct slot own = *target;
    *target = *source;
    target->ring = own.ring;
    target->adds = own.adds;
    target->pages = own.pages;
    target->forked = source->entries_most;
    cuda->forked_entries += target->forked;
    return 0;
}

/* ---- Reports ---- */

/* A block per stream: copies its entries to their place in the list of all. */
static __global__ void k_gather(struct pages all, int slot, const int32_t *first, int32_t *pos,
                                float *log_beta) {
    int stream = blockIdx.x, length = *pages_length(all, slot, stream);
    const struct pages p = pages_of_stream(all, stream);
    const int32_t *table = pages_table(p, slot, stream);
    for (int i = threadIdx.x; i < length; i += (int)blockDim.x) {
        int64_t side = pages_side(p, table, i), to = (int64_t)first[stream] + i;
        pos[to] = p.pos[side];
        log_beta[to] = p.log_beta[side];
    }
}

static int report_entries(struct cuda *cuda, int slot, const int32_t *lengths,
                          struct kern_report *report) {
    const struct pages *p = &cuda->pages;
    size_t count = report->entries, bytes = count * sizeof(int32_t);
    int32_t *first = static_cast<int32_t *>(mem_try_alloc((size_t)p->streams, sizeof *first));
    char *mem = static_cast<char *>(room_take(cuda, &cuda->gather, 2 * bytes));
    const void *staged = NULL;
    for (int s = 1; first && s < p->streams; s++) first[s] = first[s - 1] + lengths[s - 1];
    if (first && mem)
        staged = device_stage(cuda->device, first, (size_t)p->streams * sizeof *first);
    mem_free(first);
    if (!staged) { /* reported here and not to later steps */
        int rc = cache_sync(cuda);
        return rc ? rc : ERR_NOMEM;
    }
    LAUNCH(cuda->device, k_gather, (unsigned)p->streams, THREADS, 0, *p, slot,
           static_cast<const int32_t *>(staged), reinterpret_cast<int32_t *>(mem),
           reinterpret_cast<float *>(mem + bytes));
    int rc = 0;
    if (report->positions) rc = device_download(cuda->device, report->positions, mem, bytes);
    if (!rc && report->log_beta)
        rc = device_download(cuda->device, report->log_beta, mem + bytes, bytes);
    return rc;
}

int op_report(struct kern *kern, int slot, struct kern_report *report) {
    struct cuda *cuda = cuda_of(kern);
    const struct pages *p = &cuda->pages;
    CHECK(cuda->has_cache && slot >= 0 && slot < cuda->options.slots);
    size_t rows = (size_t)p->rows;
    int32_t *lengths = static_cast<int32_t *>(mem_try_alloc(rows, sizeof *lengths));
    if (!lengths) return ERR_NOMEM;
    report->entries = 0;
    report->pages = 0;
    int rc = device_download(cuda->device, lengths, p->lengths + (size_t)slot * rows,
                             rows * sizeof *lengths);
    for (int row = p->streams; row < p->rows && !rc; row++) report->pages += lengths[row];
    for (int layer = 0, s = 0; layer < p->layers && !rc; layer++)
        for (const int end = s + cuda->layers[layer].heads; s < end; s++) {
            const int slots = cuda->layers[layer].slots;
            if (report->lengths) report->lengths[s] = lengths[s];
            report->entries += (size_t)lengths[s];
            report->pages += (lengths[s] + slots - 1) / slots;
        }
    report->rank_entries = report->entries;
    report->rank_pages = report->pages;
    report->state_bytes =
        cuda->slots[slot].in_use
            ? (size_t)cuda->options.states * (size_t)cuda->options.state_floats * sizeof(float)
            : 0;
    if (!rc && report->entries && (report->positions || report->log_beta))
        rc = report->entries > report->entries_max ? ERR_LIMIT
                                                   : report_entries(cuda, slot, lengths, report);
    mem_free(lengths);
    return rc;
}

void op_cache_stats(struct kern *kern, struct kern_cache_stats *stats) {
    struct cuda *cuda = cuda_of(kern);
    struct pages_state state = cuda->state;
    if (!cuda->state_known)
        (void)device_download(cuda->device, &state, cuda->pages.state, sizeof state);
    stats->pages_used = cuda->pages.count - (int64_t)(state.tail - state.head);
    stats->rank_pages_used = stats->pages_used;
    stats->entries_evicted = state.evicted;
    stats->rank_cap_hits = state.hits;
}
