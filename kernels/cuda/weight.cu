/* Weights and matrix products. A matrix keeps the file's layout, row-major [outputs][inputs], which
 * cuBLASLt accepts as the transposed operand. */
#include <string.h>

#include "kernels/cuda/experts.h"
#include "kernels/cuda/packed.cuh"
#include "kernels/cuda/products.h"
#include "kernels/cuda/reduce.h"
#include "kernels/number.h"

#define THREADS          256
#define CONVERT_ELEMENTS ((int64_t)1 << 20) /* elements converted at a time during an upload */
/* Rows of a vocabulary's products, buffered until the other ranks' parts arrive */
#define GATHER_ROWS 64

void *room_take(struct cuda *cuda, struct room *room, size_t bytes) {
    if (bytes > room->bytes) {
        device_free(cuda->device, room->mem);
        room->bytes = 0;
        room->mem = device_alloc(cuda->device, bytes);
        if (!room->mem) {
            device_failed(cuda->device, ERR_NOMEM);
            return NULL;
        }
        room->bytes = bytes;
    }
    device_forget(cuda->device, room->mem, room->bytes);
    return room->mem;
}

int room_reserve(struct cuda *cuda, struct room *room, size_t bytes) {
    if (bytes <= room->bytes) return 0;
    bytes += bytes / 8; /* so that few sequences more need no new one */
    void *mem = device_alloc(cuda->device, bytes);
    if (!mem) return ERR_NOMEM;
    device_free(cuda->device, room->mem);
    room->mem = mem;
    room->bytes = bytes;
    return 0;
}

/* ---- Rounded on the way ---- */

/* Memory for rounded activations; none if there is no memory (the device keeps the failure). */
static struct rounded rounded_place(struct cuda *cuda, struct room *room, int rows, int64_t cols,
                                    enum kern_dtype dtype) {
    size_t bytes = (size_t)rows * (size_t)cols * kern_dtype_bytes(dtype);
    size_t scales = dtype == KERN_E4M3 ? (size_t)rows * sizeof(float) : 0;
    char *mem = static_cast<char *>(room_take(cuda, room, bytes + scales));
    float *scale = mem && scales ? reinterpret_cast<float *>(mem + bytes) : NULL;
    return {mem, scale, dtype};
}

struct rounded rounded_take(struct cuda *cuda, int rows, int64_t cols) {
    enum kern_dtype dtype = cuda->layers_dtype;
    if (rows == 0 || (dtype == KERN_E4M3 && cols % DEVICE_E4M3_STEP)) return {NULL, NULL, dtype};
    return rounded_place(cuda, &cuda->rounded.room, rows, cols, dtype);
}

void rounded_put(struct cuda *cuda, struct rounded made, const float *y, int rows, int64_t cols) {
    cuda->rounded.made = made;
    cuda->rounded.of = y;
    cuda->rounded.rows = rows;
    cuda->rounded.cols = cols;
    cuda->rounded.at = device_graphs(cuda->device)->queued;
}

struct rounded rounded_find(const struct cuda *cuda, const float *x, int rows, int64_t cols,
                            enum kern_dtype dtype) {
    const auto &r = cuda->rounded;
    bool same = r.of == x && r.rows == rows && r.cols == cols && r.made.dtype == dtype &&
                r.at == device_graphs(cuda->device)->queued;
    return same ? r.made : rounded{NULL, NULL, dtype};
}

/* ---- Loading ---- */

/* The file states the size of a matrix: all sizes are checked for overflow. */
static int check_parts(const struct kern_matrix *parts, int part_count, struct fault *fault) {
    int64_t rows = 0;
    for (int i = 0; i < part_count; i++) {
        if (parts[i].rows < 1 || parts[i].cols < 1 || parts[i].cols != parts[0].cols ||
            parts[i].rows > INT32_MAX || parts[i].cols > INT32_MAX)
            return fault_set(fault, ERR_UNSUPPORTED, "", "a matrix of %lld x %lld",
                             (long long)parts[i].rows, (long long)parts[i].cols);
        CHECK((parts[i].dtype == KERN_E4M3) == (parts[i].scale != NULL));
        rows += parts[i].rows;
    }
    if (rows > INT32_MAX) return fault_set(fault, ERR_UNSUPPORTED, "", "too many rows");
    return 0;
}

static size_t weight_bytes(const struct kern_weight *w) {
    if (kern_dtype_blocks(w->dtype)) return packed_code_bytes(w);
    return (size_t)w->rows * (size_t)w->cols * kern_dtype_bytes(w->dtype);
}

/* The number format of a product's activations. */
static enum kern_dtype inputs_dtype(const struct kern_weight *w) {
    return kern_dtype_blocks(w->dtype) ? KERN_F16 : w->dtype;
}

static void measure(struct kern_weight *w, const struct kern_matrix *own) {
    w->dtype = own[0].dtype;
    w->cols = own[0].cols;
    for (int i = 0; i < w->parts; i++) {
        if (kern_dtype_blocks(w->dtype))
            w->dtype = packed_join(w->dtype, own[i].dtype);
        else if (own[i].dtype != own[0].dtype)
            w->dtype = KERN_F32;
        w->rows += own[i].rows;
    }
}

/* Takes this rank's part of each part. */
static void take_parts(const struct cuda *cuda, struct kern_weight *w,
                       const struct kern_matrix *parts, int part_count, struct kern_matrix *own) {
    w->parts = part_count;
    for (int i = 0; i < part_count; i++) {
        own[i] = shard_matrix(cuda->comm, &parts[i], w->shard, &w->part[i]);
        w->part[i].first += w->rows_model;
        w->rows_model += parts[i].rows;
    }
}

/* A part's factor is multiplied into its numbers, or into its rows' factors where it has some. */
static float factor_of(const struct kern_matrix *part) {
    return part->factor > 0 ? part->factor : 1;
}

/* Are the part's numbers uploaded as they are? */
static bool is_plain(const struct kern_matrix *part, enum kern_dtype dtype) {
    return dtype == part->dtype && (dtype == KERN_E4M3 || factor_of(part) == 1);
}

/* F32, BF16 or F16. */
static void put_number(char *to, enum kern_dtype dtype, float x) {
    const uint16_t half = dtype == KERN_F16 ? number_to_f16(x) : number_to_bf16(x);
    if (dtype == KERN_F32)
        memcpy(to, &x, sizeof x);
    else
        memcpy(to, &half, sizeof half);
}

/* Packs consecutive rows, in the weight's number format. */
static void pack_rows(char *to, enum kern_dtype dtype, const struct kern_matrix *part, int64_t row,
                      int64_t rows) {
    size_t from_size = kern_dtype_bytes(part->dtype), size = kern_dtype_bytes(dtype);
    for (int64_t r = row; r < row + rows; r++, to += (size_t)part->cols * size) {
        const char *from =
            static_cast<const char *>(part->data) + (size_t)(r * part->stride) * from_size;
        const float scale = (part->scale ? part->scale[r] : 1) * factor_of(part);
        if (is_plain(part, dtype)) {
            memcpy(to, from, (size_t)part->cols * size);
            continue;
        }
        for (int64_t i = 0; i < part->cols; i++)
            put_number(to + (size_t)i * size, dtype,
                       number_element(from + (size_t)i * from_size, part->dtype) * scale);
    }
}

/* Numbers that are converted and rows that are not consecutive go through a host buffer. */
static int upload_part(struct cuda *cuda, char *to, enum kern_dtype dtype,
                       const struct kern_matrix *part) {
    size_t row_bytes = (size_t)part->cols * kern_dtype_bytes(dtype);
    if (is_plain(part, dtype) && part->stride == part->cols) {
        device_upload(cuda->device, to, part->data, (size_t)part->rows * row_bytes);
        return 0;
    }
    int64_t most = part->cols < CONVERT_ELEMENTS ? CONVERT_ELEMENTS / part->cols : 1;
    char *slice = static_cast<char *>(mem_try_alloc((size_t)most, row_bytes));
    if (!slice) return ERR_NOMEM;
    for (int64_t row = 0, rows; row < part->rows; row += rows) {
        rows = part->rows - row < most ? part->rows - row : most;
        pack_rows(slice, dtype, part, row, rows);
        device_upload(cuda->device, to + (size_t)row * row_bytes, slice, (size_t)rows * row_bytes);
    }
    mem_free(slice);
    return 0;
}

static float *alloc_floats(struct cuda *cuda, int64_t count) {
    return static_cast<float *>(device_alloc(cuda->device, (size_t)count * sizeof(float)));
}

/* False: the device has no memory for all of it. */
static bool alloc_weight(struct cuda *cuda, struct kern_weight *w) {
    bool packed = kern_dtype_blocks(w->dtype), scaled = w->dtype == KERN_E4M3 || packed;
    bool biased = w->shard == KERN_SHARD_ROWS && w->rows < w->rows_model;
    w->data = device_alloc(cuda->device, weight_bytes(w));
    if (w->data && scaled)
        w->scale = alloc_floats(cuda, packed ? (int64_t)packed_factor_count(w) : w->rows);
    if (w->data && biased) w->bias = alloc_floats(cuda, w->rows);
    return w->data && (w->scale || !scaled) && (w->bias || !biased);
}

static int upload_scales(struct cuda *cuda, float *to, const struct kern_matrix *part) {
    float *scales = static_cast<float *>(mem_try_alloc((size_t)part->rows, sizeof *scales));
    if (!scales) return ERR_NOMEM;
    for (int64_t row = 0; row < part->rows; row++) scales[row] = part->scale[row] * factor_of(part);
    device_upload(cuda->device, to, scales, (size_t)part->rows * sizeof *to);
    mem_free(scales);
    return 0;
}

static int upload_parts(struct cuda *cuda, struct kern_weight *w, const struct kern_matrix *own) {
    size_t row_bytes = (size_t)w->cols * kern_dtype_bytes(w->dtype);
    char *to = static_cast<char *>(w->data);
    float *scale = w->scale;
    bool packed = kern_dtype_blocks(w->dtype);
    int rc = packed ? packed_upload(cuda, w, own) : 0;
    for (int i = 0; i < w->parts && !rc && !packed; i++) {
        rc = upload_part(cuda, to, w->dtype, &own[i]);
        to += (size_t)own[i].rows * row_bytes;
        if (!scale || rc) continue;
        rc = upload_scales(cuda, scale, &own[i]);
        scale += own[i].rows;
    }
    return rc ? rc : device_sync(cuda->device);
}

/* E4M3 products are not available on every device and for every shape. */
static int check_e4m3(struct cuda *cuda, const struct kern_weight *w, struct fault *fault) {
    if (w->dtype != KERN_E4M3) return 0;
    if ((w->rows | w->cols) % DEVICE_E4M3_STEP)
        return fault_set(fault, ERR_UNSUPPORTED, "quantization",
                         "fp8 products need multiples of %d inputs and outputs, not %lld and %lld",
                         DEVICE_E4M3_STEP, (long long)w->cols, (long long)w->rows);
    int capability = device_capability(cuda->device);
    if (capability != 90)
        return fault_set(fault, ERR_UNSUPPORTED, "quantization",
                         "fp8 products with a scale per row need compute capability 9.0 (Hopper); "
                         "the device has %d.%d",
                         capability / 10, capability % 10);
    return device_check_e4m3(cuda->device, w->rows, w->cols, fault);
}

/* A block's inputs stay together, and lanes read several at once. */
static int check_blocks(const struct kern_weight *w, struct fault *fault) {
    if (!kern_dtype_blocks(w->dtype) || w->cols % KERN_BLOCK == 0) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "",
                     "weights in blocks need multiples of %d inputs on every rank, not %lld",
                     KERN_BLOCK, (long long)w->cols);
}

/* Notes the number of outputs that wait for other ranks' parts; see matmul_reserve. */
static void note_width(struct cuda *cuda, const struct kern_weight *w) {
    size_t row =
        (size_t)w->cols * sizeof(uint16_t) + sizeof(float); /* 16 bits, or fp8 and a scale */
    if (row > cuda->narrow_row) cuda->narrow_row = row;
    size_t sums = packed_sums(w) * sizeof(float);
    if (sums > cuda->sums_row) cuda->sums_row = sums;
    if (w->shard == KERN_SHARD_COLS && w->rows > cuda->summed) cuda->summed = w->rows;
    if (w->shard == KERN_SHARD_VOCAB && w->rows_model > cuda->gathered)
        cuda->gathered = w->rows_model;
}

/* The arguments of a product of one part. */
static struct matmul_args part_of(struct matmul_args whole, int parts) {
    whole.stride = whole.k;
    whole.k /= parts;
    return whole;
}

/* Chooses how parts are multiplied, and notes the memory that they need. False: the library cannot
 * multiply them at once. */
static bool compare_parts(struct cuda *cuda, const struct matmul_args *loaded, int parts) {
    struct matmul_args part = part_of(*loaded, parts), batch = part;
    size_t row = (size_t)parts * (size_t)loaded->n * sizeof(float);
    batch.parts = parts;
    if (!device_matmul_has(cuda->device, &batch)) return false;
    device_matmul_compare(cuda->device, &part);
    device_matmul_compare(cuda->device, &batch);
    size_t *most =
        device_matmul_in_turn(cuda->device, &batch) ? &cuda->parts_row : &cuda->parts_row_many;
    if (row > *most) *most = row;
    return true;
}

/* Chooses how the products of a weight are computed. Returns the number of parts in which its
 * inputs are cut. */
static int compare_products(struct cuda *cuda, enum kern_shard shard, struct matmul_args loaded) {
    const int parts = product_parts(loaded.n, loaded.k, (enum kern_dtype)loaded.dtype);
    if (parts > 1 && compare_parts(cuda, &loaded, parts)) return parts;
    device_matmul_compare(cuda->device, &loaded);
    if (shard == KERN_SHARD_ROWS && loaded.dtype != KERN_E4M3) {
        loaded.bias = static_cast<const float *>(loaded.w); /* not read: the shape with one */
        device_matmul_compare(cuda->device, &loaded);
    }
    return 1;
}

int op_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                   enum kern_shard shard, struct kern_weight **out, struct fault *fault) {
    struct cuda *cuda = cuda_of(kern);
    struct kern_matrix own[PARTS_MAX];
    CHECK(part_count >= 1 && part_count <= PARTS_MAX);
    int rc = check_parts(parts, part_count, fault);
    if (rc) return rc;
    struct kern_weight *w = static_cast<struct kern_weight *>(mem_try_alloc(1, sizeof *w));
    if (!w) return fault_set(fault, ERR_NOMEM, "", "no memory for a weight");
    w->shard = shard;
    take_parts(cuda, w, parts, part_count, own);
    measure(w, own);
    rc = check_e4m3(cuda, w, fault);
    if (!rc) rc = check_blocks(w, fault);
    if (rc) {
        mem_free(w);
        return rc;
    }
    size_t bytes = weight_bytes(w);
    rc = alloc_weight(cuda, w) ? upload_parts(cuda, w, own) : ERR_NOMEM;
    if (rc) {
        op_weight_free(kern, w);
        struct device_memory memory = device_memory(cuda->device);
        return fault_set(fault, rc, "", "a weight of %zu MiB: %s; %zu of the device's %zu MiB free",
                         bytes >> 20, err_text(rc), memory.unused >> 20, memory.total >> 20);
    }
    note_width(cuda, w);
    struct matmul_args loaded = {};
    loaded.w = w->data;
    loaded.w_scale = w->scale;
    loaded.n = w->rows;
    loaded.k = w->cols;
    loaded.dtype = w->dtype;
    w->cut = kern_dtype_blocks(w->dtype) ? 1 : compare_products(cuda, w->shard, loaded);
    bool of_layers = shard == KERN_SHARD_ROWS || shard == KERN_SHARD_COLS;
    if (w->dtype == KERN_E4M3) cuda->layers_dtype = KERN_E4M3;
    if (inputs_dtype(w) == KERN_F16 && of_layers && cuda->layers_dtype == KERN_BF16)
        cuda->layers_dtype = KERN_F16;
    *out = w;
    return 0;
}

void op_weight_free(struct kern *kern, struct kern_weight *weight) {
    if (!weight) return;
    device_free(cuda_of(kern)->device, weight->data);
    device_free(cuda_of(kern)->device, weight->bias);
    device_free(cuda_of(kern)->device, weight->scale);
    if (weight->owns_heads) device_free(cuda_of(kern)->device, weight->head);
    mem_free(weight);
}

/* ---- Products ---- */

/* Rounds activations to the number format of the weight's products. False: no memory (the device
 * keeps the failure). */
static bool narrow_inputs(struct cuda *cuda, const float *x, const struct kern_weight *weight,
                          struct matmul_args *args) {
    int rows = (int)args->rows;
    enum kern_dtype dtype = inputs_dtype(weight);
    struct rounded made = rounded_find(cuda, x, rows, weight->cols, dtype);
    if (!made.x) {
        made = rounded_place(cuda, &cuda->narrow, rows, weight->cols, dtype);
        if (!made.x) return false;
        narrow(cuda, made, x, rows, weight->cols);
    }
    args->x = made.x;
    args->x_scale = made.scale;
    args->w_scale = weight->scale;
    if (weight->scale)
        args->bias = NULL; /* float32, which cuBLASLt does not add in such products */
    return true;
}

static void multiply_packed(struct cuda *cuda, const struct matmul_args *args,
                            const struct kern_weight *weight, const float *bias) {
    const size_t bytes = (size_t)args->rows * packed_sums(weight) * sizeof(float);
    float *sums = NULL;
    if (bytes > 0) {
        sums = static_cast<float *>(room_take(cuda, &cuda->sums, bytes));
        if (!sums) return;
    }
    packed_multiply(cuda, args->y, args->x, weight, bias, sums, (int)args->rows, args->add);
}

/* Multiplies the parts of a weight's inputs; see products.h. */
static void multiply_parts(struct cuda *cuda, struct matmul_args args, int parts) {
    const size_t bytes =
        (size_t)args.k / (size_t)parts * kern_dtype_bytes((enum kern_dtype)args.dtype);
    const char *x = static_cast<const char *>(args.x), *w = static_cast<const char *>(args.w);
    const int64_t count = args.rows * args.n;
    const bool add = args.add;
    float *y = args.y;
    args = part_of(args, parts);
    args.parts = parts;
    if (args.rows > PRODUCT_PARTS_ROWS && device_matmul_in_turn(cuda->device, &args)) {
        args.parts = 0;
        for (int part = 0; part < parts; part++) {
            args.x = x + (size_t)part * bytes;
            args.w = w + (size_t)part * bytes;
            args.add = add || part > 0;
            device_matmul(cuda->device, &args);
        }
        return;
    }
    args.y = static_cast<float *>(
        room_take(cuda, &cuda->parts, (size_t)(parts * count) * sizeof *args.y));
    args.add = false;
    if (!args.y) return;
    device_matmul(cuda->device, &args);
    device_add_parts(cuda->device, y, args.y, parts, count, add);
}

/* Multiplies this rank's inputs and outputs. */
static void multiply(struct cuda *cuda, float *y, const float *x, const struct kern_weight *weight,
                     const float *bias, int rows, enum kern_matmul_mode mode) {
    struct matmul_args args = {y,
                               x,
                               weight->data,
                               bias,
                               NULL,
                               NULL,
                               rows,
                               weight->rows,
                               weight->cols,
                               weight->dtype,
                               mode == KERN_ADD,
                               0,
                               0};
    if (weight->dtype != KERN_F32 && !narrow_inputs(cuda, x, weight, &args)) return;
    if (kern_dtype_blocks(weight->dtype)) {
        multiply_packed(cuda, &args, weight, bias);
        return;
    }
    if (weight->cut > 1) {
        args.bias = NULL;
        multiply_parts(cuda, args, weight->cut);
    } else {
        device_matmul(cuda->device, &args);
    }
    if (bias && !args.bias) add_bias(cuda, y, bias, rows, weight->rows);
}

/* ---- Several ranks ---- */

/* This rank's part of the bias of a joined weight. */
static const float *own_bias(struct cuda *cuda, const struct kern_weight *w, const float *bias) {
    float *to = w->bias;
    if (!bias || !to) return bias;
    for (int i = 0; i < w->parts; i++) {
        device_copy(cuda->device, to, bias + w->part[i].first,
                    (size_t)w->part[i].count * sizeof *to);
        to += w->part[i].count;
    }
    return w->bias;
}

static size_t gather_stride(const struct cuda *cuda, int64_t outputs) {
    size_t ranks = (size_t)cuda->comm->ranks;
    return GATHER_ROWS * (((size_t)outputs + ranks - 1) / ranks);
}

/* Bytes for `rows` rows; none for a single rank. */
static size_t partial_bytes(const struct cuda *cuda, int rows) {
    size_t sums = (size_t)rows * (size_t)cuda->summed;
    size_t parts = (size_t)cuda->comm->ranks * gather_stride(cuda, cuda->gathered);
    if (cuda->comm->ranks == 1) return 0;
    return (sums > parts ? sums : parts) * sizeof(float);
}

int matmul_reserve(struct cuda *cuda, int rows) {
    const struct comm *comm = cuda->comm;
    size_t bytes = partial_bytes(cuda, rows), squares = 0;
    if (cuda->options.qk_norm_wide)
        squares = (size_t)rows * (size_t)(cuda->options.heads_q + cuda->options.heads_kv) *
                  (size_t)comm->ranks * sizeof(float);
    const size_t of_states = (size_t)rows * (size_t)cuda->options.state_heads * sizeof(float);
    if (squares < of_states) squares = of_states;
    if (bytes && !room_take(cuda, &cuda->partial, bytes)) return ERR_NOMEM;
    if (!comm->ops->reserve) return 0;
    return comm->ops->reserve(comm, bytes > squares ? bytes : squares);
}

enum {
    ROOM_NARROW,
    ROOM_ROUNDED,
    ROOM_HIDDEN,
    ROOM_ANGLES,
    ROOM_MORE_ANGLES,
    ROOM_SAMPLE,
    ROOM_SQUARES,
    ROOM_ROTATED,
    ROOM_SUMS,
    ROOM_PARTS,
    ROOMS
};

/* Sizes for the largest step, without other ranks' parts. */
static void measure_rooms(const struct cuda *cuda, const struct kern_cache_options *o,
                          size_t bytes[ROOMS]) {
    size_t rows = (size_t)o->rows_max;
    bytes[ROOM_NARROW] = bytes[ROOM_ROUNDED] = rows * cuda->narrow_row;
    bytes[ROOM_HIDDEN] = gate_bytes(cuda, o->rows_max);
    bytes[ROOM_ANGLES] = bytes[ROOM_MORE_ANGLES] = rows * (size_t)o->head_dim * sizeof(float);
    bytes[ROOM_SQUARES] =
        rows * (size_t)((o->heads_q + o->heads_kv) * cuda->comm->ranks) * sizeof(float);
    const size_t of_states = rows * (size_t)o->state_heads * sizeof(float);
    if (bytes[ROOM_SQUARES] < of_states) bytes[ROOM_SQUARES] = of_states;
    bytes[ROOM_ROTATED] =
        row_scaled(o->dtype) ? rows * (size_t)(o->heads_q * o->head_dim) * sizeof(float) : 0;
    bytes[ROOM_SUMS] = rows * cuda->sums_row;
    const size_t few = rows < PRODUCT_PARTS_ROWS ? rows : PRODUCT_PARTS_ROWS;
    const size_t in_turn = few * cuda->parts_row, at_once = rows * cuda->parts_row_many;
    bytes[ROOM_PARTS] = in_turn > at_once ? in_turn : at_once;
    bytes[ROOM_SAMPLE] = sample_bytes(o->logits_max, o->vocab);
}

size_t rooms_bytes(const struct cuda *cuda, const struct kern_cache_options *options) {
    size_t bytes[ROOMS], all = partial_bytes(cuda, options->rows_max);
    if (options->rows_max == 0) return 0;
    measure_rooms(cuda, options, bytes);
    for (size_t each : bytes) all += each;
    return all;
}

int rooms_reserve(struct cuda *cuda) {
    const struct kern_cache_options *o = &cuda->options;
    struct room *const rooms[ROOMS] = {&cuda->narrow,
                                       &cuda->rounded.room,
                                       &cuda->hidden,
                                       &cuda->ropes[0].angles,
                                       &cuda->ropes[1].angles,
                                       &cuda->sample,
                                       &cuda->squares,
                                       &cuda->rotated,
                                       &cuda->sums,
                                       &cuda->parts};
    size_t bytes[ROOMS];
    if (o->rows_max == 0) return 0;
    measure_rooms(cuda, o, bytes);
    for (int i = 0; i < ROOMS; i++)
        if (bytes[i] > 0 && !room_take(cuda, rooms[i], bytes[i])) return ERR_NOMEM;
    for (struct cuda_rope &rope : cuda->ropes) {
        if (!rope.freq)
            rope.freq = static_cast<float *>(
                device_alloc(cuda->device, (size_t)o->head_dim / 2 * sizeof *rope.freq));
        if (!rope.freq) return ERR_NOMEM;
    }
    return matmul_reserve(cuda, o->rows_max);
}

/* Returns the memory that matmul_reserve allocated. If a rank has none, the device is lost on all
 * ranks. */
float *partial_take(struct cuda *cuda, size_t floats) {
    float *mem = static_cast<float *>(room_take(cuda, &cuda->partial, floats * sizeof *mem));
    if (!mem) device_lose(cuda->device);
    return mem;
}

static __global__ void k_finish(float *y, const float *sums, const float *bias, int64_t count,
                                int width, bool add) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float sum = bias ? sums[i] + bias[i % width] : sums[i];
    y[i] = add ? y[i] + sum : sum;
}

static void multiply_summed(struct cuda *cuda, float *y, const float *x,
                            const struct kern_weight *w, const float *bias, int rows,
                            enum kern_matmul_mode mode) {
    size_t count = (size_t)rows * (size_t)w->rows;
    float *sums = partial_take(cuda, count);
    if (sums) multiply(cuda, sums, x, w, NULL, rows, KERN_SET);
    join_reduce(cuda, sums, count, COMM_F32, COMM_SUM);
    if (!sums) return;
    LAUNCH(cuda->device, k_finish, blocks_for((int64_t)count, THREADS), THREADS, 0, y, sums, bias,
           (int64_t)count, (int)w->rows, mode == KERN_ADD);
}

struct join_args {
    float *y;
    const float *parts; /* [ranks][GATHER_ROWS][the rank's outputs] */
    int64_t stride, outputs;
    int32_t ranks, rows;
};

/* A thread per output; blocks (part, row). */
static __global__ void k_join(const struct join_args a) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    int rank = 0;
    if (at >= a.outputs) return;
    while (a.outputs * (rank + 1) / a.ranks <= at) rank++;
    int64_t first = a.outputs * rank / a.ranks, end = a.outputs * (rank + 1) / a.ranks;
    a.y[row * a.outputs + at] = a.parts[rank * a.stride + row * (end - first) + at - first];
}

/* Rank 0 joins the parts of each row. */
static void multiply_gathered(struct cuda *cuda, float *y, const float *x,
                              const struct kern_weight *w, int rows) {
    size_t stride = gather_stride(cuda, w->rows_model), ranks = (size_t)cuda->comm->ranks;
    float *parts = partial_take(cuda, ranks * stride);
    float *own = parts ? parts + (size_t)cuda->comm->rank * stride : NULL;
    for (int row = 0; row < rows; row += GATHER_ROWS) {
        int count = rows - row < GATHER_ROWS ? rows - row : GATHER_ROWS;
        if (own) multiply(cuda, own, x + row * w->cols, w, NULL, count, KERN_SET);
        join_gather(cuda, parts, stride * sizeof *parts);
        if (!parts || cuda->comm->rank > 0) continue;
        const struct join_args args = {y + row * w->rows_model, parts,      (int64_t)stride,
                                       w->rows_model,           (int)ranks, count};
        LAUNCH(cuda->device, k_join, dim3(blocks_for(w->rows_model, THREADS), (unsigned)count),
               THREADS, 0, args);
    }
}

void op_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
               const float *bias, int rows, enum kern_matmul_mode mode) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(rows >= 0);
    if (rows == 0) return;
    if (cuda->comm->ranks > 1 && weight->shard == KERN_SHARD_COLS) {
        multiply_summed(cuda, y, x, weight, bias, rows, mode);
    } else if (cuda->comm->ranks > 1 && weight->shard == KERN_SHARD_VOCAB) {
        CHECK(!bias && mode == KERN_SET);
        multiply_gathered(cuda, y, x, weight, rows);
    } else {
        multiply(cuda, y, x, weight, own_bias(cuda, weight, bias), rows, mode);
    }
}
