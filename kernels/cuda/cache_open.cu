/* The cache on the device: which models it serves, the sizes of pages and the places of streams,
 * its memory, how many pages fit, and opening and closing. cache.cu has what happens in between. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/internal.h"

#define THREADS 256

/* ---- Shapes ---- */

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
