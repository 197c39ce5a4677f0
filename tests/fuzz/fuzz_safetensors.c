/* Any bytes as a safetensors file: a table that is given out lies inside the file, whole. */
#include <string.h>

#include "base/check.h"
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
    tensor_file_close(&file);
    return 0;
}
