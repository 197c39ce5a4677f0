/* Any bytes as a safetensors file: a table that is given out lies inside the file, whole. Its
 * matrices in 4 bits are then joined and read; the last byte says of which kind they are. */
#include <string.h>

#include "base/check.h"
#include "kernels/blocks.h"
#include "model/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_tensor(const struct tensor *tensor, const uint8_t *data, size_t size) {
    const uint8_t *begin = tensor->data;
    volatile uint8_t seen = 0;
    CHECK(begin >= data + 8 && begin <= data + size);
    CHECK(tensor->bytes <= (size_t)(data + size - begin));
    CHECK(tensor->dims >= 0 && tensor->dims <= TENSOR_DIMS_MAX);
    if (tensor->bytes) seen = (uint8_t)(begin[0] ^ begin[tensor->bytes - 1]);
    (void)seen;
}

/* Reads the first and the last row. */
static void read_matrix(const struct tensor *tensor) {
    const int64_t rows = tensor->shape[0], cols = tensor->shape[1];
    float numbers[KERN_BLOCK];
    CHECK(tensor->dims == 2 && rows > 0 && cols > 0 && cols % KERN_BLOCK == 0);
    for (int64_t row = 0; row<rows; row += rows> 1 ? rows - 1 : 1) {
        packed_read(tensor->packed, row, 0, KERN_BLOCK, numbers);
        packed_read(tensor->packed, row, cols - KERN_BLOCK, KERN_BLOCK, numbers);
    }
}

static void check_joined(struct tensor_file *file, const uint8_t *data, size_t size) {
    const uint8_t last = data[size - 1];
    const struct packing how = {.kind = (enum packing_kind)(PACKING_AWQ + last % 6),
                                .group = last / 4 % 4 * KERN_BLOCK,
                                .symmetric = last & 16,
                                .less_one = last & 32,
                                .reordered = last & 64};
    struct packed_set *set = NULL;
    struct fault fault = {0};
    int rc = packed_join(&how, file->tensors, &file->count, &set, &fault);
    CHECK((rc == 0) == (fault.code == 0));
    for (size_t i = 0; rc == 0 && i < file->count; i++) {
        check_tensor(&file->tensors[i], data, size);
        CHECK(i == 0 || strcmp(file->tensors[i - 1].name, file->tensors[i].name) < 0);
        if (file->tensors[i].packed) read_matrix(&file->tensors[i]);
    }
    packed_close(set);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct tensor_file file;
    struct fault fault = {0};
    size_t total = 0;
    int rc = safetensors_parse(data, size, &file, &fault);
    CHECK((rc == 0) == (fault.code == 0));
    for (size_t i = 0; i < file.count; i++) {
        check_tensor(&file.tensors[i], data, size);
        CHECK(i == 0 || strcmp(file.tensors[i - 1].name, file.tensors[i].name) < 0);
        total += file.tensors[i].bytes;
    }
    CHECK(total <= size);
    if (rc == 0) check_joined(&file, data, size);
    tensor_file_close(&file);
    return 0;
}
