/* The memory that this process may still use. Pure but for the files that it reads; any thread. */
#ifndef KEEPD_BASE_AVAILABLE_H
#define KEEPD_BASE_AVAILABLE_H

#include <stdint.h>

/* Returns bytes: what the system has left, and at most what the limits of the process's control
 * groups leave, of its own group and of every group around it (a service's MemoryMax, a container's
 * limit; cgroup v2 and v1). The page cache does not count as used, because the kernel reclaims it.
 * `root`: "" in a daemon; tests have a directory with files of their own. */
int64_t available_memory(const char *root);
/* The same without regard to what is in use: the system's memory, or the smallest of the limits. */
int64_t total_memory(const char *root);

#endif
