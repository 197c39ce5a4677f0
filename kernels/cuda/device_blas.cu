/* The products of kernels/cuda/device.h: cuBLASLt, which is loaded with the first device, and the
 * choice of its algorithms (products.h). */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_int.h"

extern "C" {
#include "base/log.h"
}

#define WORKSPACE_BYTES ((size_t)32 << 20) /* recommended for cuBLASLt on Hopper */
#define TRIAL_BYTES                                                                                \
    ((size_t)1 << 30) /* memory of a comparison of products; larger ones are left out */

/* ---- The library ----------------------------------------------------------------------------- */

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
    X(cublasLtMatrixLayoutDestroy)

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

/* ---- Plans and algorithms -------------------------------------------------------------------- */

/* Row-major y = x w^T is, column by column, y' = w'^T x' of the same bytes: m = n, n = rows. */
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

static bool open_plan(struct matmul_plan *p, const struct matmul_args *a) {
    static const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF, CUDA_R_8F_E4M3};
    cudaDataType_t type = types[a->dtype];
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    memset(p, 0, sizeof *p);
    int64_t n = a->n, k = a->k;
    uint64_t rows_u = static_cast<uint64_t>(a->rows), n_u = static_cast<uint64_t>(n),
             k_u = static_cast<uint64_t>(k);
    bool good =
        lt.cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
            CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->w, type, k_u, n_u, k) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->x, type, k_u, rows_u, k) == CUBLAS_STATUS_SUCCESS &&
        lt.cublasLtMatrixLayoutCreate(&p->y, CUDA_R_32F, n_u, rows_u, n) == CUBLAS_STATUS_SUCCESS &&
        set(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
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

static int propose(void *arg, const struct product_shape *shape, int64_t rows,
                   struct product_algorithm found[PRODUCT_FOUND]) {
    static const uint32_t masks[] = {CUBLASLT_REDUCTION_SCHEME_NONE,
                                     CUBLASLT_REDUCTION_SCHEME_MASK};
    struct device *device = static_cast<struct device *>(arg);
    const float *any =
        static_cast<const float *>(device->blas.workspace); /* for the query, not read */
    const struct matmul_args wanted = {NULL,     NULL,         NULL, shape->bias ? any : NULL,
                                       any,      any,          rows, shape->n,
                                       shape->k, shape->dtype, 0};
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

/* ---- Comparing ------------------------------------------------------------------------------- */

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

/* Fills the rows and their scales, multiplies twice and compares, in `memory`. */
static bool trial_equal(struct device *device, char *memory, struct matmul_args a,
                        const struct product_algorithm *first,
                        const struct product_algorithm *second) {
    const int threads = 256;
    int64_t outputs = a.rows * a.n, inputs = a.rows * a.k;
    size_t bytes = (size_t)outputs * sizeof(float);
    uint32_t differ = 1, *flag = reinterpret_cast<uint32_t *>(memory + 2 * bytes);
    float *scale = reinterpret_cast<float *>(flag) + DEVICE_MATMUL_ALIGN;
    void *x =
        scale + (a.rows + DEVICE_MATMUL_ALIGN - 1) / DEVICE_MATMUL_ALIGN * DEVICE_MATMUL_ALIGN;
    a.x = x;
    if (a.dtype == KERN_E4M3) a.x_scale = scale;
    k_random<<<blocks_for(inputs, threads), threads, 0, device->stream>>>(
        x, inputs, static_cast<enum kern_dtype>(a.dtype));
    k_random<<<blocks_for(a.rows, threads), threads, 0, device->stream>>>(scale, a.rows, KERN_F32);
    a.y = reinterpret_cast<float *>(memory);
    bool good = multiply_with(device, &a, first);
    a.y = reinterpret_cast<float *>(memory + bytes);
    good = good && multiply_with(device, &a, second) &&
           device_ok(device, cudaMemsetAsync(flag, 0, sizeof *flag, device->stream), "memset");
    k_differ<<<blocks_for(outputs, threads), threads, 0, device->stream>>>(
        reinterpret_cast<const uint32_t *>(memory),
        reinterpret_cast<const uint32_t *>(memory + bytes), outputs, flag);
    return good &&
           device_ok(
               device,
               cudaMemcpyAsync(&differ, flag, sizeof differ, cudaMemcpyDefault, device->stream),
               "copy") &&
           device_ok(device, cudaStreamSynchronize(device->stream), "a product") && !differ;
}

/* Without memory for a comparison, nothing is known. */
static bool same_bits(void *arg, const struct product_shape *shape, int64_t rows,
                      const struct product_algorithm *first,
                      const struct product_algorithm *second) {
    struct device *device = static_cast<struct device *>(arg);
    struct matmul_args a = *device->blas.trial;
    a.rows = rows;
    size_t bytes = 2 * (size_t)(rows * shape->n) * sizeof(float) +
                   (size_t)(rows + 3 * DEVICE_MATMUL_ALIGN) * sizeof(float) +
                   (size_t)(rows * shape->k) * kern_dtype_bytes(shape->dtype);
    char *memory = bytes <= TRIAL_BYTES ? static_cast<char *>(device_alloc(device, bytes)) : NULL;
    bool same = memory && !device->lost && trial_equal(device, memory, a, first, second);
    if (memory) device_ok(device, cudaFree(memory), "cudaFree");
    return same;
}

static struct product_shape shape_of(const struct matmul_args *a) {
    return {a->n, a->k, static_cast<enum kern_dtype>(a->dtype), a->bias != NULL};
}

void device_matmul_compare(struct device *device, const struct matmul_args *weight) {
    const struct product_library library = {device, propose, same_bits};
    const struct product_shape shape = shape_of(weight);
    device->blas.trial = weight;
    if (!device->lost) products_compare(&device->blas.products, &library, &shape);
    device->blas.trial = NULL;
}

/* ---- Reporting ------------------------------------------------------------------------------- */

static int attribute(const cublasLtMatmulAlgo_t *algorithm,
                     cublasLtMatmulAlgoConfigAttributes_t which) {
    int32_t value = 0;
    size_t written;
    lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, which, &value, sizeof value, &written);
    return value;
}

static struct cuda_product describe(struct device *device, const struct product *product,
                                    int bucket) {
    const struct product_shape *shape = &product->shape;
    const float *any = static_cast<const float *>(device->blas.workspace); /* not read */
    int64_t rows = product_bucket_rows(bucket);
    const struct matmul_args args = {NULL,     NULL,         NULL, shape->bias ? any : NULL,
                                     any,      any,          rows, shape->n,
                                     shape->k, shape->dtype, 0};
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

/* ---- Multiplying ----------------------------------------------------------------------------- */

/* If the shape's algorithm rejects so many rows, which no document excludes, another one is used
 * for these: then a row's result may depend on the other rows, which is logged once. */
static void run_matmul(struct device *device, const void *data) {
    const struct matmul_args *a = static_cast<const struct matmul_args *>(data);
    const struct product_library library = {device, propose, same_bits};
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

void device_matmul(struct device *device, const struct matmul_args *args) {
    CHECK(args->dtype != KERN_E4M3 || (args->x_scale && args->w_scale && !args->bias));
    graph_add(&device->graphs, device, run_matmul, args, sizeof *args);
}

int device_check_e4m3(struct device *device, int64_t n, int64_t k, struct fault *fault) {
    const struct product_library library = {device, propose, same_bits};
    const struct product_shape shape = {n, k, KERN_E4M3, false};
    if (products_find(&device->blas.products, &library, &shape, PRODUCT_ROWS)) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "quantization",
                     "cuBLASLt has no fp8 product of %lld inputs and %lld outputs", (long long)k,
                     (long long)n);
}
