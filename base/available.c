#include "base/available.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The files of a version of control groups. */
struct group_files {
    /* In a line of /proc/self/cgroup `marks` stands between the number and the path. */
    const char *marks;
    const char *mount, *limit;
    const char *used; /* the name at the beginning of a line of memory.stat */
};

static const struct group_files versions[] = {
    {"::", "/sys/fs/cgroup", "memory.max", "anon "},
    {":memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss "},
};

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

static int64_t file_number(const char *root, const struct group_files *files, const char *group,
                           const char *name, const char *prefix) {
    char path[2 * PATH_MAX];
    int size = snprintf(path, sizeof path, "%s%s%s/%s", root, files->mount, group, name);
    return size > 0 && (size_t)size < sizeof path ? find_number(path, prefix) : -1;
}

/* Returns the bytes of one group's limit, or what it leaves; INT64_MAX: it has none. */
static int64_t group_bytes(const char *root, const struct group_files *files, const char *group,
                           bool left) {
    int64_t limit = file_number(root, files, group, files->limit, "");
    int64_t used = left ? file_number(root, files, group, "memory.stat", files->used) : 0;
    if (limit < 0 || used < 0) return INT64_MAX;
    return limit > used ? limit - used : 0;
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

/* Returns the least of `bytes` and of what the groups around the process say. */
static int64_t least_bytes(const char *root, int64_t bytes, bool left) {
    char group[PATH_MAX], *end;
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        find_group(root, &versions[i], group);
        do {
            int64_t most = group_bytes(root, &versions[i], group, left);
            if (most < bytes) bytes = most;
            end = strrchr(group, '/');
            if (end) *end = '\0'; /* the group around it */
        } while (end);
    }
    return bytes;
}

static int64_t system_bytes(const char *root, const char *line, int64_t unknown) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    int64_t kib = find_number(path, line);
    return kib > 0 ? kib * 1024 : unknown;
}

int64_t available_memory(const char *root) {
    return least_bytes(root, system_bytes(root, "MemAvailable:", (int64_t)1 << 30), true);
}

int64_t total_memory(const char *root) {
    return least_bytes(root, system_bytes(root, "MemTotal:", INT64_MAX), false);
}
