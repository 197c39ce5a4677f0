/* A device does not see the host's backend. */
#include "kernels/cpu/cpu.h"
