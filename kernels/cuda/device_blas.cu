/* The products of kernels/cuda/device.h: cuBLASLt, which is loaded with the first device, and the
 * choice of its algorithms (products.h). */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_int.h"
#include "kernels/cuda/reduce.h"

extern "C" {
#include "base/log.h"
}

#define WORKSPACE_BYTES ((size_t)32 << 20) /* recommended for cuBLASLt on Hopper */
/* Memory of a comparison of products; larger ones are left out */
#define TRIAL_BYTES ((size_t)1 << 30)

/* ---- The library ---- */

#define BLAS_LIBRARY "libcublasLt.so.13"

#define BLAS_FUNCTIONS(X)                                                                          \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulAlgoCheck)                                                                     \
    X(cublasLtMatmulAlgoConfigGetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatrixLayoutSetAttribute)

/* Loaded with the first device, so that the program starts, and its CPU computes, on machines
 * without the library. */
static struct {
#define MEMBER(name) decltype(&::name) name;
    BLAS_FUNCTIONS(MEMBER)
#undef MEMBER
    char missing[200]; /* why it is not loaded; "": it is */
} lt;

static void load_blas(void) {
    void *handle = dlopen(BLAS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    const char *missing = handle ? NULL : dlerror();
#define LOAD(name)                                                                                 \
    lt.name = reinterpret_cast<decltype(lt.name)>(handle ? dlsym(handle, #name) : NULL);           \
    if (!lt.name && !missing) missing = BLAS_LIBRARY " lacks " #name;
    BLAS_FUNCTIONS(LOAD)
#undef LOAD
    snprintf(lt.missing, sizeof lt.missing, "%s", missing ? missing : "");
}

int blas_load(struct fault *fault) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, load_blas);
    return lt.missing[0] ? fault_set(fault, ERR_NOTFOUND, "device", "%s", lt.missing) : 0;
}

bool blas_open(struct device *device) {
    return device_ok(device, cudaMalloc(&device->blas.workspace, WORKSPACE_BYTES), "workspace") &&
           lt.cublasLtCreate(&device->blas.handle) == CUBLAS_STATUS_SUCCESS;
}

void blas_close(struct device *device) {
    if (device->blas.handle) lt.cublasLtDestroy(device->blas.handle);
    cudaFree(device->blas.workspace);
}

/* ---- Plans and algorithms ---- */

/* In column-major order, as cuBLASLt reads it, the row-major y = x w^T is y' = w'^T x' of the same
 * bytes, with m = outputs and n = rows. */
struct matmul_plan {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t w, x, y;
};

static void close_plan(struct matmul_plan *p) {
    if (p->operation) lt.cublasLtMatmulDescDestroy(p->operation);
    if (p->w) lt.cublasLtMatrixLayoutDestroy(p->w);
    if (p->x) lt.cublasLtMatrixLayoutDestroy(p->x);
    if (p->y) lt.cublasLtMatrixLayoutDestroy(p->y);
}

static bool set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                const void *value, size_t size) {
    return lt.cublasLtMatmulDescSetAttribute(operation, attribute, value, size) ==
           CUBLAS_STATUS_SUCCESS;
}

/* A scale per row of x and of w; on compute capability 9.0 only. */
static bool set_scales(cublasLtMatmulDesc_t operation, const struct matmul_args *a) {
    cublasLtMatmulMatrixScale_t vector = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    return set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &vector, sizeof vector) &&
           set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &vector, sizeof vector) &&
           set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a->w_scale, sizeof a->w_scale) &&
           set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a->x_scale, sizeof a->x_scale);
}

/* Sets a batch of products of one layout; `offset`: numbers from one product's operand to the
 * next. */
static bool set_batch(cublasLtMatrixLayout_t layout, int64_t parts, int64_t offset) {
    const int32_t count = static_cast<int32_t>(parts);
    return lt.cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                               sizeof count) == CUBLAS_STATUS_SUCCESS &&
           lt.cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                               &offset, sizeof offset) == CUBLAS_STATUS_SUCCESS;
}

static bool open_plan(struct matmul_plan *p, const struct matmul_args *a) {
    static const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF, CUDA_R_8F_E4M3};
    cudaDataType_t type = types[a->dtype];
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    memset(p, 0, sizeof *p);
    int64_t n = a->n, k = a->k, stride = a->stride ? a->stride : k;
    uint64_t rows_u = static_cast<uint64_t>(a->rows), n_u = static_cast<uint64_t>(n),
             k_u = static_cast<uint64_t>(k);
    bool good =
        lt.cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
            CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->w, type, k_u, n_u, stride) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->x, type, k_u, rows_u, stride) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->y, CUDA_R_32F, n_u, rows_u, n) == CUBLAS_STATUS_SUCCESS &&
        set(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (good && a->parts > 1)
        good = set_batch(p->w, a->parts, k) && set_batch(p->x, a->parts, k) &&
               set_batch(p->y, a->parts, a->rows * n);
    if (good && a->dtype == KERN_E4M3) good = set_scales(p->operation, a);
    if (good && a->bias)
        good = set(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue) &&
               set(p->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias);
    return good;
}

/* Without a split of k, sums of one output have one order for any number of rows, as far as the
 * kernel is the same: see products.h. */
static bool one_sum(const cublasLtMatmulAlgo_t *algorithm) {
    int32_t split = 1;
    uint32_t reduction = 0;
    size_t written;
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split,
                                            sizeof split, &written);
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                            &reduction, sizeof reduction, &written);
    return split <= 1 && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

static bool prefer(cublasLtMatmulPreference_t preference,
                   cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size) {
    return lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size) ==
           CUBLAS_STATUS_SUCCESS;
}

/* Finds algorithms with the reduction schemes of `mask` and none: for few rows, many faster ones
 * split k and would fill the list. Returns their number. */
static int find_algorithms(struct device *device, const struct matmul_plan *plan, uint32_t mask,
                           cublasLtMatmulHeuristicResult_t found[PRODUCT_FOUND]) {
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasLtMatmulPreference_t preference = NULL;
    const uint64_t workspace = WORKSPACE_BYTES;
    const uint32_t align = DEVICE_MATMUL_ALIGN;
    int count = 0;
    if (lt.cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS) return 0;
    bool good = prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                       sizeof workspace) &&
                prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &mask, sizeof mask);
    for (cublasLtMatmulPreferenceAttributes_t attribute : aligned)
        good = good && prefer(preference, attribute, &align, sizeof align);
    if (!good || lt.cublasLtMatmulAlgoGetHeuristic(
                     device->blas.handle, plan->operation, plan->w, plan->x, plan->y, plan->y,
                     preference, PRODUCT_FOUND, found, &count) != CUBLAS_STATUS_SUCCESS)
        count = 0;
    lt.cublasLtMatmulPreferenceDestroy(preference);
    return count;
}

static_assert(sizeof(struct product_algorithm) == sizeof(cublasLtMatmulAlgo_t),
              "products.h keeps the library's algorithms as they are");

/* Adds the algorithms with one order of sums: first those without a workspace, where parts of sums
 * could wait for each other. */
static int add_algorithms(const cublasLtMatmulHeuristicResult_t *list, int listed,
                          struct product_algorithm found[PRODUCT_FOUND]) {
    int count = 0;
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < listed; i++)
            if (list[i].state == CUBLAS_STATUS_SUCCESS && (list[i].workspaceSize > 0) == turn &&
                one_sum(&list[i].algo))
                memcpy(&found[count++], &list[i].algo, sizeof *found);
    return count;
}

/* Returns a product of this shape for which algorithms can be asked; its arrays are not read. */
static struct matmul_args args_of(const struct device *device, const struct product_shape *shape,
                                  int64_t rows) {
    const float *any = static_cast<const float *>(device->blas.workspace);
    return {NULL,        NULL,         NULL, shape->bias ? any : NULL,
            any,         any,          rows, shape->n,
            shape->k,    shape->dtype, 0,    shape->stride,
            shape->parts};
}

static int propose(void *arg, const struct product_shape *shape, int64_t rows,
                   struct product_algorithm found[PRODUCT_FOUND]) {
    static const uint32_t masks[] = {CUBLASLT_REDUCTION_SCHEME_NONE,
                                     CUBLASLT_REDUCTION_SCHEME_MASK};
    struct device *device = static_cast<struct device *>(arg);
    const struct matmul_args wanted = args_of(device, shape, rows);
    cublasLtMatmulHeuristicResult_t list[PRODUCT_FOUND];
    struct matmul_plan plan;
    int count = 0;
    bool good = open_plan(&plan, &wanted);
    for (int i = 0; good && count == 0 && i < 2; i++)
        count = add_algorithms(list, find_algorithms(device, &plan, masks[i], list), found);
    close_plan(&plan);
    return count;
}

static bool multiply_with(struct device *device, const struct matmul_args *a,
                          const struct product_algorithm *algorithm) {
    const float one = 1, beta = a->add ? 1 : 0;
    cublasLtMatmulAlgo_t algo;
    struct matmul_plan plan = {};
    memcpy(&algo, algorithm, sizeof algo);
    bool good =
        open_plan(&plan, a) &&
        lt.cublasLtMatmul(device->blas.handle, plan.operation, &one, a->w, plan.w, a->x, plan.x,
                          &beta, a->y, plan.y, a->y, plan.y, &algo, device->blas.workspace,
                          WORKSPACE_BYTES, device->stream) == CUBLAS_STATUS_SUCCESS;
    close_plan(&plan);
    return good;
}

/* ---- Comparing ---- */

/* Numbers between 2^-7 and 1 with random signs, the same for each index. */
static __global__ void k_random(void *to, int64_t count, enum kern_dtype dtype) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint32_t h = (uint32_t)i * 0x9E3779B1u + 0x85EBCA6Bu;
    h = (h ^ h >> 15) * 0x2C1B3C6Du;
    h ^= h >> 13;
    if (dtype == KERN_F32)
        static_cast<uint32_t *>(to)[i] = (h & 0x80000000u) | (0x3C000000u + (h & 0x03FFFFFFu));
    else if (dtype == KERN_BF16)
        static_cast<uint16_t *>(to)[i] = (uint16_t)((h & 0x8000u) | (0x3C00u + (h & 0x03FFu)));
    else if (dtype == KERN_F16)
        static_cast<uint16_t *>(to)[i] = (uint16_t)((h & 0x8000u) | (0x2000u + (h & 0x1BFFu)));
    else
        static_cast<uint8_t *>(to)[i] = (uint8_t)((h & 0x80u) | (0x08u + (h & 0x2Fu)));
}

static __global__ void k_differ(const uint32_t *a, const uint32_t *b, int64_t count,
                                uint32_t *differ) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && a[i] != b[i]) *differ = 1;
}

/* Memory of a trial, freed at its end. */
struct trial {
    float *y[3]; /* `outputs` numbers each */
    void *x;     /* [rows][stride] random numbers */
    float *scale, *bias;
    uint32_t *differ;
    char *memory;
    int64_t outputs;
};

static char *take(char *&at, size_t bytes) {
    char *here = at;
    at += (bytes + 255) / 256 * 256;
    return here;
}

/* Without memory for a trial, nothing is known: false. */
static bool trial_open(struct device *device, struct trial *t, const struct matmul_args *a) {
    const enum kern_dtype dtype = static_cast<enum kern_dtype>(a->dtype);
    const int threads = 256;
    t->outputs = a->rows * a->n * (a->parts > 1 ? a->parts : 1);
    int64_t inputs = a->rows * (a->stride ? a->stride : a->k);
    size_t y = (size_t)t->outputs * sizeof(float), x = (size_t)inputs * kern_dtype_bytes(dtype);
    size_t bytes = 3 * y + x + (size_t)(a->rows + a->n) * sizeof(float) + 8 * 256;
    t->memory = bytes <= TRIAL_BYTES && !device->lost
                    ? static_cast<char *>(device_alloc(device, bytes))
                    : NULL;
    if (!t->memory) return false;
    char *at = t->memory;
    for (float *&each : t->y) each = reinterpret_cast<float *>(take(at, y));
    t->x = take(at, x);
    t->scale = reinterpret_cast<float *>(take(at, (size_t)a->rows * sizeof(float)));
    t->bias = reinterpret_cast<float *>(take(at, (size_t)a->n * sizeof(float)));
    t->differ = reinterpret_cast<uint32_t *>(take(at, sizeof *t->differ));
    k_random<<<blocks_for(inputs, threads), threads, 0, device->stream>>>(t->x, inputs, dtype);
    k_random<<<blocks_for(a->rows, threads), threads, 0, device->stream>>>(t->scale, a->rows,
                                                                           KERN_F32);
    k_random<<<blocks_for(a->n, threads), threads, 0, device->stream>>>(t->bias, a->n, KERN_F32);
    return true;
}

/* The weight's arguments with the trial's arrays. */
static struct matmul_args trial_args(const struct trial *t, struct matmul_args a, float *y) {
    a.y = y;
    a.x = t->x;
    a.x_scale = a.dtype == KERN_E4M3 ? t->scale : NULL;
    a.bias = a.bias ? t->bias : NULL;
    return a;
}

/* Are `count` numbers of both arrays equal? */
static bool trial_equal(struct device *device, const struct trial *t, const float *a,
                        const float *b, int64_t count) {
    uint32_t differ = 1;
    if (!device_ok(device, cudaMemsetAsync(t->differ, 0, sizeof differ, device->stream), "memset"))
        return false;
    k_differ<<<blocks_for(count, 256), 256, 0, device->stream>>>(
        reinterpret_cast<const uint32_t *>(a), reinterpret_cast<const uint32_t *>(b), count,
        t->differ);
    return device_ok(device,
                     cudaMemcpyAsync(&differ, t->differ, sizeof differ, cudaMemcpyDefault,
                                     device->stream),
                     "copy") &&
           device_ok(device, cudaStreamSynchronize(device->stream), "a product") && !differ;
}

static void trial_close(struct device *device, const struct trial *t) {
    if (t->memory) device_ok(device, cudaFree(t->memory), "cudaFree");
}

static bool same_bits(void *arg, const struct product_shape *, int64_t rows,
                      const struct product_algorithm *first,
                      const struct product_algorithm *second) {
    struct device *device = static_cast<struct device *>(arg);
    struct matmul_args a = *device->blas.trial;
    struct trial t = {};
    a.rows = rows;
    bool same = trial_open(device, &t, &a);
    if (same) {
        const struct matmul_args one = trial_args(&t, a, t.y[0]), two = trial_args(&t, a, t.y[1]);
        same = multiply_with(device, &one, first) && multiply_with(device, &two, second) &&
               trial_equal(device, &t, t.y[0], t.y[1], t.outputs);
    }
    trial_close(device, &t);
    return same;
}

static bool multiply_found(struct device *device, const struct matmul_args *a);

/* Adds one part after the other to y[1]. */
static bool multiply_in_turn(struct device *device, const struct trial *t, struct matmul_args a) {
    const size_t bytes = (size_t)a.k * kern_dtype_bytes(static_cast<enum kern_dtype>(a.dtype));
    const int64_t parts = a.parts;
    bool good = true;
    a = trial_args(t, a, t->y[1]);
    a.parts = 0;
    a.add = true;
    for (int64_t part = 0; part < parts && good; part++) {
        good = multiply_found(device, &a);
        a.x = static_cast<const char *>(a.x) + bytes;
        a.w = static_cast<const char *>(a.w) + bytes;
    }
    return good;
}

/* Compares how weight.cu multiplies few rows and how it does many, on the same random rows. */
static bool same_in_turn(void *arg, const struct product_shape *shape) {
    struct device *device = static_cast<struct device *>(arg);
    struct matmul_args a = *device->blas.trial;
    struct trial t = {};
    a.rows = 2 * PRODUCT_PARTS_ROWS;
    bool same = trial_open(device, &t, &a);
    if (same) {
        const int64_t count = a.rows * a.n;
        const struct matmul_args at_once = trial_args(&t, a, t.y[0]);
        for (int i = 1; i < 3; i++)
            k_random<<<blocks_for(count, 256), 256, 0, device->stream>>>(t.y[i], count, KERN_F32);
        same = multiply_found(device, &at_once) && multiply_in_turn(device, &t, a);
        device_add_parts(device, t.y[2], t.y[0], static_cast<int>(shape->parts), count, true);
        same = same && trial_equal(device, &t, t.y[1], t.y[2], count);
    }
    trial_close(device, &t);
    return same;
}

static struct product_library library_of(struct device *device) {
    return {device, propose, same_bits, same_in_turn};
}

static struct product_shape shape_of(const struct matmul_args *a) {
    return {a->n,
            a->k,
            static_cast<enum kern_dtype>(a->dtype),
            a->bias != NULL,
            a->stride ? a->stride : a->k,
            a->parts ? a->parts : 1};
}

/* False: the library has no algorithm, or refuses the one it has. */
static bool multiply_found(struct device *device, const struct matmul_args *a) {
    const struct product_library library = library_of(device);
    const struct product_shape shape = shape_of(a);
    const struct product_algorithm *algorithm =
        products_find(&device->blas.products, &library, &shape, a->rows);
    return algorithm && multiply_with(device, a, algorithm);
}

void device_matmul_compare(struct device *device, const struct matmul_args *weight) {
    const struct product_library library = library_of(device);
    const struct product_shape shape = shape_of(weight);
    device->blas.trial = weight;
    if (!device->lost) products_compare(&device->blas.products, &library, &shape);
    device->blas.trial = NULL;
}

bool device_matmul_has(struct device *device, const struct matmul_args *args) {
    const struct product_library library = library_of(device);
    const struct product_shape shape = shape_of(args);
    return products_has(&device->blas.products, &library, &shape);
}

bool device_matmul_in_turn(struct device *device, const struct matmul_args *args) {
    const struct product_shape shape = shape_of(args);
    return products_in_turn(&device->blas.products, &shape);
}

/* ---- Reporting ---- */

static int attribute(const cublasLtMatmulAlgo_t *algorithm,
                     cublasLtMatmulAlgoConfigAttributes_t which) {
    int32_t value = 0;
    size_t written;
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, which, &value, sizeof value, &written);
    return value;
}

static struct cuda_product describe(struct device *device, const struct product_entry *product,
                                    int bucket) {
    const struct product_shape *shape = &product->shape;
    int64_t rows = product_bucket_rows(bucket);
    const struct matmul_args args = args_of(device, shape, rows);
    const struct product_choice *choice = &product->choices[bucket];
    const struct product_choice *own = &product->choices[product_bucket(PRODUCT_ROWS)];
    cublasLtMatmulHeuristicResult_t result = {};
    cublasLtMatmulAlgo_t algo;
    struct matmul_plan plan;
    memcpy(&algo, &choice->algorithm, sizeof algo);
    if (open_plan(&plan, &args))
        (void)lt.cublasLtMatmulAlgoCheck(device->blas.handle, plan.operation, plan.w, plan.x,
                                         plan.y, plan.y, &algo, &result);
    close_plan(&plan);
    return {shape->n,
            shape->k,
            rows,
            attribute(&algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
            attribute(&algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
            attribute(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
            result.wavesCount,
            memcmp(&choice->algorithm, &own->algorithm, sizeof algo) == 0};
}

int device_products(struct device *device, struct cuda_product *list, int most) {
    const struct products *products = &device->blas.products;
    int count = 0;
    for (int i = 0; i < products->count; i++)
        for (int b = 0; b < PRODUCT_BUCKETS && count < most; b++)
            if (!products->list[i].choices[b].refuses)
                list[count++] = describe(device, &products->list[i], b);
    return count;
}

/* ---- Multiplying ---- */

/* Multiplies with the shape's algorithm. The library's documents do not exclude that it rejects
 * this number of rows. Another algorithm is then used for it, so that a row's result may depend on
 * the other rows; this is logged once. */
static void multiply(struct device *device, const struct matmul_args *a) {
    const struct product_library library = library_of(device);
    const struct product_shape shape = shape_of(a);
    const struct product_algorithm *algorithm;
    if (device->lost) return;
    while ((algorithm = products_find(&device->blas.products, &library, &shape, a->rows))) {
        if (multiply_with(device, a, algorithm)) return;
        if (products_refused(&device->blas.products, &library, &shape, a->rows))
            log_warn("cuda: products of %lld x %lld have another algorithm for %lld rows: the last "
                     "bits of their sums depend on how many rows are computed together",
                     (long long)a->n, (long long)a->k, (long long)a->rows);
    }
    log_error("cuda: cuBLASLt refuses a product of %lld x %lld x %lld", (long long)a->rows,
              (long long)a->n, (long long)a->k);
    device_failed(device, ERR_DEVICE);
}

static void run_matmul(struct device *device, const void *data) {
    const struct matmul_args *a = static_cast<const struct matmul_args *>(data);
    char name[64];
    if (!device->timings) return multiply(device, a);
    snprintf(name, sizeof name, "product %lld x %lld", (long long)a->n, (long long)a->k);
    struct timed *timed = device_time_begin(device, name);
    multiply(device, a);
    device_time_end(device, timed);
}

void device_matmul(struct device *device, const struct matmul_args *args) {
    CHECK(args->dtype != KERN_E4M3 || (args->x_scale && args->w_scale && !args->bias));
    graph_add(&device->graphs, device, run_matmul, args, sizeof *args);
}

int device_check_e4m3(struct device *device, int64_t n, int64_t k, struct fault *fault) {
    const struct product_library library = library_of(device);
    const struct product_shape shape = {n, k, KERN_E4M3, false, k, 1};
    if (products_find(&device->blas.products, &library, &shape, PRODUCT_ROWS)) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "quantization",
                     "cuBLASLt has no fp8 product of %lld inputs and %lld outputs", (long long)k,
                     (long long)n);
}
