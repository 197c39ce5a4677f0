/* The memory and the cores that this process may use. Pure but for the files that it reads; any
 * thread. */
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

/* Returns a number of cores, at least 1: those that the process's affinity allows, and at most as
 * many as the control groups around it have processor time for, rounded up (a service's CPUQuota, a
 * container's limit). Threads beyond it would use up the time of a period together, and then all
 * wait for the next one. */
int available_cores(const char *root);

#endif
