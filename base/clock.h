/* Monotonic time in nanoseconds, and wall time in seconds for `created` fields. */
#ifndef KEEPD_BASE_CLOCK_H
#define KEEPD_BASE_CLOCK_H

#include <stdint.h>

int64_t clock_ns(void);
int64_t clock_unix_seconds(void);

#endif
