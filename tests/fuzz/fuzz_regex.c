/* Regular expressions of clients. The first byte chooses the walk. */
#include "fuzz_constrain.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    fuzz_part(&(struct constrain_part){.kind = CONSTRAIN_REGEX,
                                       .field = "f",
                                       .text = (const char *)data + 1,
                                       .size = size - 1},
              data[0]);
    return 0;
}
