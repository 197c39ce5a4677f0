#include "base/available.h"

#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where a version of control groups has the limits of a kind. */
struct group_files {
    /* In a line of /proc/self/cgroup `marks` stands between the number and the path. */
    const char *marks;
    const char *mount, *limit;
    const char *used; /* memory: the name at the beginning of a line of memory.stat */
    const char
        *period; /* processor time: the file with the limit's period; NULL: it follows the limit */
};

static const struct group_files memory_files[] = {
    {"::", "/sys/fs/cgroup", "memory.max", "anon ", NULL},
    {":memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss ", NULL},
};

static const struct group_files time_files[] = {
    {"::", "/sys/fs/cgroup", "cpu.max", NULL, NULL},
    {":cpu,cpuacct:", "/sys/fs/cgroup/cpu,cpuacct", "cpu.cfs_quota_us", NULL, "cpu.cfs_period_us"},
    {":cpu:", "/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", NULL, "cpu.cfs_period_us"},
};

/* Returns the limit of a group, or what is left of it; INT64_MAX: the group has none. */
typedef int64_t group_limit(const char *root, const struct group_files *files, const char *group);

/* Returns the number after `prefix` in the first line that begins with it; -1: there is none. */
static int64_t find_number(const char *path, const char *prefix) {
    char line[256], *end;
    int64_t number = -1;
    FILE *file = fopen(path, "re");
    while (file && number < 0 && fgets(line, sizeof line, file)) {
        if (strncmp(line, prefix, strlen(prefix)) != 0) continue;
        long long value = strtoll(line + strlen(prefix), &end, 10);
        if (end > line + strlen(prefix)) number = value;
    }
    if (file) fclose(file);
    return number;
}

enum { GROUP_PATH_MAX = 2 * PATH_MAX };

static bool group_path(const char *root, const struct group_files *files, const char *group,
                       const char *name, char path[GROUP_PATH_MAX]) {
    int size = snprintf(path, GROUP_PATH_MAX, "%s%s%s/%s", root, files->mount, group, name);
    return size > 0 && size < GROUP_PATH_MAX;
}

static int64_t file_number(const char *root, const struct group_files *files, const char *group,
                           const char *name, const char *prefix) {
    char path[GROUP_PATH_MAX];
    return group_path(root, files, group, name, path) ? find_number(path, prefix) : -1;
}

static int64_t memory_limit(const char *root, const struct group_files *files, const char *group) {
    int64_t limit = file_number(root, files, group, files->limit, "");
    return limit < 0 ? INT64_MAX : limit;
}

static int64_t memory_left(const char *root, const struct group_files *files, const char *group) {
    int64_t limit = memory_limit(root, files, group);
    int64_t used = file_number(root, files, group, "memory.stat", files->used);
    if (limit == INT64_MAX || used < 0) return INT64_MAX;
    return limit > used ? limit - used : 0;
}

/* Cores that a group has time for: microseconds in every so many, rounded up. */
static int64_t time_limit(const char *root, const struct group_files *files, const char *group) {
    char path[GROUP_PATH_MAX];
    long long quota = -1, period = -1;
    if (!group_path(root, files, group, files->limit, path)) return INT64_MAX;
    FILE *file = fopen(path, "re");
    int count = file ? fscanf(file, "%lld %lld", &quota, &period) : 0; /* "max 100000" has none */
    if (file) fclose(file);
    if (count == 1 && files->period) period = file_number(root, files, group, files->period, "");
    if (quota <= 0 || period <= 0) return INT64_MAX;
    return (quota + period - 1) / period;
}

/* The process's own group: "" is the one that is mounted, which is all that a container sees. */
static void find_group(const char *root, const struct group_files *files, char group[PATH_MAX]) {
    char line[PATH_MAX + 64];
    group[0] = '\0';
    snprintf(line, sizeof line, "%s/proc/self/cgroup", root);
    FILE *file = fopen(line, "re");
    while (file && !group[0] && fgets(line, sizeof line, file)) {
        const char *rest = line + strspn(line, "0123456789");
        size_t size = strlen(files->marks);
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(rest, files->marks, size) == 0 && strlen(rest + size) < PATH_MAX)
            strcpy(group, rest + size);
    }
    if (file) fclose(file);
}

/* Returns the least of `most` and of what the groups around the process have. */
static int64_t least_of_groups(const char *root, const struct group_files *versions, size_t count,
                               group_limit *limit_of, int64_t most) {
    char group[PATH_MAX], *end;
    for (size_t i = 0; i < count; i++) {
        find_group(root, &versions[i], group);
        do {
            int64_t limit = limit_of(root, &versions[i], group);
            if (limit < most) most = limit;
            end = strrchr(group, '/');
            if (end) *end = '\0'; /* the group around it */
        } while (end);
    }
    return most;
}

static int64_t least_memory(const char *root, group_limit *limit_of, int64_t most) {
    return least_of_groups(root, memory_files, sizeof memory_files / sizeof *memory_files, limit_of,
                           most);
}

static int64_t system_bytes(const char *root, const char *line, int64_t unknown) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    int64_t kib = find_number(path, line);
    return kib > 0 ? kib * 1024 : unknown;
}

int64_t available_memory(const char *root) {
    return least_memory(root, memory_left, system_bytes(root, "MemAvailable:", (int64_t)1 << 30));
}

int64_t total_memory(const char *root) {
    return least_memory(root, memory_limit, system_bytes(root, "MemTotal:", INT64_MAX));
}

int available_cores(const char *root) {
    cpu_set_t set;
    const int cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    const int64_t least = least_of_groups(root, time_files, sizeof time_files / sizeof *time_files,
                                          time_limit, cores);
    return least > 1 ? (int)least : 1;
}
