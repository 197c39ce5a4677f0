/* On a device there is no order to choose: what tests/emu/both.h calls does nothing. */
#include <stdint.h>

void emu_set_seed(uint64_t seed);

void emu_set_seed(uint64_t seed) {
    (void)seed;
}
