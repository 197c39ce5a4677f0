/* Weights and products. A matrix keeps the file's layout, row-major [outputs][inputs], which is
 * what cuBLASLt takes as the transposed operand. */
#include <string.h>

#include "kernels/cuda/internal.h"
#include "kernels/number.h"

#define CONVERT_ELEMENTS ((int64_t)1 << 20) /* at a time, on their way to the device */

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

/* ---- Rounded on the way -----------------------------------------------------------------------
 */

uint16_t *rounded_take(struct cuda *cuda, int64_t count) {
    if (cuda->has_e4m3 || count == 0) return NULL;
    return static_cast<uint16_t *>(
        room_take(cuda, &cuda->rounded.room, (size_t)count * sizeof(uint16_t)));
}

void rounded_put(struct cuda *cuda, const float *y, int64_t count) {
    cuda->rounded.of = y;
    cuda->rounded.count = count;
    cuda->rounded.at = device_graphs(cuda->device)->queued;
}

const uint16_t *rounded_find(struct cuda *cuda, const float *x, int64_t count) {
    if (cuda->rounded.of != x || cuda->rounded.count != count ||
        cuda->rounded.at != device_graphs(cuda->device)->queued)
        return NULL;
    return static_cast<const uint16_t *>(cuda->rounded.room.mem);
}

/* ---- Loading --------------------------------------------------------------------------------- */

/* Files say how large a matrix is: all sizes are checked. */
static int measure(struct kern_weight *w, const struct kern_matrix *parts, int part_count,
                   struct fault *fault) {
    w->dtype = parts[0].dtype == KERN_E4M3 ? KERN_E4M3 : KERN_BF16;
    for (int i = 0; i < part_count; i++) {
        if (parts[i].rows < 1 || parts[i].cols < 1 || parts[i].cols != parts[0].cols ||
            parts[i].rows > INT32_MAX || parts[i].cols > INT32_MAX)
            return fault_set(fault, ERR_UNSUPPORTED, "", "a matrix of %lld x %lld",
                             (long long)parts[i].rows, (long long)parts[i].cols);
        CHECK((parts[i].dtype == KERN_E4M3) == (parts[i].scale != NULL));
        if (parts[i].dtype != w->dtype) w->dtype = KERN_F32;
        w->rows += parts[i].rows;
    }
    w->cols = parts[0].cols;
    if (w->rows > INT32_MAX) return fault_set(fault, ERR_UNSUPPORTED, "", "too many rows");
    return 0;
}

static int upload_wide(struct cuda *cuda, float *to, const struct kern_matrix *part) {
    int64_t count = part->rows * part->cols;
    size_t size = kern_dtype_bytes(part->dtype);
    const float *scale = part->scale;
    float *slice = static_cast<float *>(mem_try_alloc((size_t)CONVERT_ELEMENTS, sizeof *slice));
    if (!slice) return ERR_NOMEM;
    for (int64_t at = 0; at < count; at += CONVERT_ELEMENTS) {
        int64_t n = count - at < CONVERT_ELEMENTS ? count - at : CONVERT_ELEMENTS;
        const char *from = static_cast<const char *>(part->data) + (size_t)at * size;
        for (int64_t i = 0; i < n; i++)
            slice[i] = number_element(from + (size_t)i * size, part->dtype) *
                       (scale ? scale[(at + i) / part->cols] : 1);
        device_upload(cuda->device, to + at, slice, (size_t)n * sizeof *slice);
    }
    mem_free(slice);
    return 0;
}

/* E4M3 products are not for every device and every shape. */
static int check_e4m3(struct cuda *cuda, const struct kern_weight *w, struct fault *fault) {
    if (w->dtype != KERN_E4M3) return 0;
    if ((w->rows | w->cols) % DEVICE_E4M3_STEP)
        return fault_set(fault, ERR_UNSUPPORTED, "quantization",
                         "fp8 products need multiples of %d inputs and outputs, not %lld and %lld",
                         DEVICE_E4M3_STEP, (long long)w->cols, (long long)w->rows);
    return device_check_e4m3(cuda->device, w->rows, w->cols, fault);
}

static int upload_parts(struct cuda *cuda, struct kern_weight *w, const struct kern_matrix *parts,
                        int part_count) {
    size_t size = kern_dtype_bytes(w->dtype);
    char *to = static_cast<char *>(w->data);
    float *scale = w->scale;
    int rc = 0;
    for (int i = 0; i < part_count && !rc; i++) {
        size_t part_bytes = (size_t)parts[i].rows * (size_t)parts[i].cols * size;
        if (parts[i].dtype == w->dtype && w->dtype != KERN_F32)
            device_upload(cuda->device, to, parts[i].data, part_bytes);
        else
            rc = upload_wide(cuda, reinterpret_cast<float *>(to), &parts[i]);
        if (scale) {
            device_upload(cuda->device, scale, parts[i].scale,
                          (size_t)parts[i].rows * sizeof *scale);
            scale += parts[i].rows;
        }
        to += part_bytes;
    }
    return rc ? rc : device_sync(cuda->device);
}

int op_weight_load(struct kern *kern, const struct kern_matrix *parts, int part_count,
                   enum kern_shard shard, struct kern_weight **out, struct fault *fault) {
    (void)shard; /* one rank */
    struct cuda *cuda = cuda_of(kern);
    CHECK(part_count >= 1);
    struct kern_weight *w = static_cast<struct kern_weight *>(mem_try_alloc(1, sizeof *w));
    if (!w) return fault_set(fault, ERR_NOMEM, "", "no memory for a weight");
    int rc = measure(w, parts, part_count, fault);
    if (!rc) rc = check_e4m3(cuda, w, fault);
    if (rc) {
        mem_free(w);
        return rc;
    }
    size_t bytes = (size_t)w->rows * (size_t)w->cols * kern_dtype_bytes(w->dtype);
    w->data = device_alloc(cuda->device, bytes);
    if (w->data && w->dtype == KERN_E4M3)
        w->scale =
            static_cast<float *>(device_alloc(cuda->device, (size_t)w->rows * sizeof *w->scale));
    bool room = w->data && (w->scale || w->dtype != KERN_E4M3);
    rc = room ? upload_parts(cuda, w, parts, part_count) : ERR_NOMEM;
    if (rc) {
        op_weight_free(kern, w);
        struct device_memory memory = device_memory(cuda->device);
        return fault_set(fault, rc, "", "a weight of %zu MiB: %s; %zu of the device's %zu MiB free",
                         bytes >> 20, err_text(rc), memory.unused >> 20, memory.total >> 20);
    }
    cuda->has_e4m3 |= w->dtype == KERN_E4M3;
    *out = w;
    return 0;
}

void op_weight_free(struct kern *kern, struct kern_weight *weight) {
    if (!weight) return;
    device_free(cuda_of(kern)->device, weight->data);
    device_free(cuda_of(kern)->device, weight->scale);
    mem_free(weight);
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Activations in the weight's numbers. False: no memory (the failure sticks). */
static bool narrow_inputs(struct cuda *cuda, const float *x, const struct kern_weight *weight,
                          struct matmul_args *args) {
    int rows = (int)args->rows;
    int64_t count = rows * weight->cols;
    args->x = weight->dtype == KERN_BF16 ? rounded_find(cuda, x, count) : NULL;
    if (args->x) return true;
    size_t scales = weight->scale ? (size_t)rows * sizeof *args->x_scale : 0;
    size_t bytes = (size_t)count * kern_dtype_bytes(weight->dtype);
    char *to = static_cast<char *>(room_take(cuda, &cuda->narrow, bytes + scales));
    if (!to) return false;
    args->x = to;
    if (weight->dtype == KERN_BF16) {
        narrow(cuda, reinterpret_cast<uint16_t *>(to), x, count);
        return true;
    }
    float *scale = reinterpret_cast<float *>(to + bytes);
    narrow_rows(cuda, reinterpret_cast<uint8_t *>(to), scale, x, rows, weight->cols);
    args->x_scale = scale;
    args->w_scale = weight->scale;
    args->bias = NULL; /* float32, which cuBLASLt does not add to E4M3 products */
    return true;
}

void op_matmul(struct kern *kern, float *y, const float *x, const struct kern_weight *weight,
               const float *bias, int rows, enum kern_matmul_mode mode) {
    struct cuda *cuda = cuda_of(kern);
    CHECK(rows >= 0);
    if (rows == 0) return;
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
                               mode == KERN_ADD};
    if (weight->dtype != KERN_F32 && !narrow_inputs(cuda, x, weight, &args)) return;
    device_matmul(cuda->device, &args);
    if (bias && !args.bias) add_bias(cuda, y, bias, rows, weight->rows);
}
