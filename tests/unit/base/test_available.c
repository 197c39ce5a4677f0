#include "base/available.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((int64_t)1 << 20)

static char root[64];

static void put_file(const char *path, const char *text) {
    char whole[512];
    snprintf(whole, sizeof whole, "mkdir -p '%s%.*s'", root, (int)(strrchr(path, '/') - path),
             path);
    cr_assert_eq(system(whole), 0);
    snprintf(whole, sizeof whole, "%s%s", root, path);
    FILE *file = fopen(whole, "w");
    cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void make_root(void) {
    strcpy(root, "/tmp/keepd-available-XXXXXX");
    cr_assert_not_null(mkdtemp(root));
    put_file("/proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable:    1024000 kB\n");
}

static void remove_root(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", root);
    cr_assert_eq(system(command), 0);
}

TestSuite(available, .init = make_root, .fini = remove_root);

Test(available, the_system_without_limits) {
    cr_assert_eq(available_memory(root), 1000 * MIB);
    cr_assert_eq(total_memory(root), (int64_t)9000000 * 1024);
    put_file("/proc/self/cgroup", "0::/user.slice\n");
    put_file("/sys/fs/cgroup/user.slice/memory.max", "max\n");
    put_file("/sys/fs/cgroup/user.slice/memory.stat", "anon 1048576\n");
    cr_assert_eq(available_memory(root), 1000 * MIB);
}

/* In a container the mounted group is its own. */
Test(available, a_container) {
    put_file("/proc/self/cgroup", "0::/\n");
    put_file("/sys/fs/cgroup/memory.max", "104857600\n");
    put_file("/sys/fs/cgroup/memory.stat", "anon 4194304\nfile 50000000\n");
    cr_assert_eq(available_memory(root), 96 * MIB);
    put_file("/sys/fs/cgroup/memory.stat", "anon 204857600\n");
    cr_assert_eq(available_memory(root), 0);
}

/* MemoryMax of a unit, and of the slice around it. */
Test(available, a_service) {
    put_file("/proc/self/cgroup", "0::/system.slice/keepd.service\n");
    put_file("/sys/fs/cgroup/system.slice/keepd.service/memory.max", "104857600\n");
    put_file("/sys/fs/cgroup/system.slice/keepd.service/memory.stat", "anon 0\n");
    cr_assert_eq(available_memory(root), 100 * MIB);
    put_file("/sys/fs/cgroup/system.slice/memory.max", "524288000\n");
    put_file("/sys/fs/cgroup/system.slice/memory.stat", "anon 471859200\n");
    cr_assert_eq(available_memory(root), 50 * MIB);
    cr_assert_eq(total_memory(root), 100 * MIB);
}

Test(available, version_one) {
    put_file("/proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/c08c\n0::/\n");
    put_file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "104857600\n");
    put_file("/sys/fs/cgroup/memory/memory.stat", "rss 1\ntotal_rss 4194304\n");
    cr_assert_eq(available_memory(root), 96 * MIB);
    put_file("/sys/fs/cgroup/memory/docker/c08c/memory.limit_in_bytes", "10485760\n");
    put_file("/sys/fs/cgroup/memory/docker/c08c/memory.stat", "total_rss 0\n");
    cr_assert_eq(available_memory(root), 10 * MIB);
}

/* The limits have fewer cores than most machines, but one may have a single core. */
static int at_most_cores(int limit) {
    const int cores = available_cores("/nowhere");
    return limit < cores ? limit : cores;
}

Test(available, cores_without_limits) {
    cr_assert_geq(available_cores(root), 1);
    put_file("/proc/self/cgroup", "0::/system.slice/keepd.service\n");
    put_file("/sys/fs/cgroup/system.slice/keepd.service/cpu.max", "max 100000\n");
    cr_assert_eq(available_cores(root), available_cores("/nowhere"));
    put_file("/sys/fs/cgroup/system.slice/keepd.service/cpu.max", "no limit\n");
    cr_assert_eq(available_cores(root), available_cores("/nowhere"));
}

/* CPUQuota of a unit, rounded up, and that of the slice around it. */
Test(available, cores_of_a_service) {
    put_file("/proc/self/cgroup", "0::/system.slice/keepd.service\n");
    put_file("/sys/fs/cgroup/system.slice/keepd.service/cpu.max", "150000 100000\n");
    cr_assert_eq(available_cores(root), at_most_cores(2));
    put_file("/sys/fs/cgroup/system.slice/cpu.max", "20000 50000\n");
    cr_assert_eq(available_cores(root), 1);
}

Test(available, cores_of_a_container) {
    put_file("/proc/self/cgroup", "0::/\n");
    put_file("/sys/fs/cgroup/cpu.max", "100000 100000\n");
    cr_assert_eq(available_cores(root), 1);
    put_file("/sys/fs/cgroup/cpu.max", "6400000 100000\n");
    cr_assert_eq(available_cores(root), at_most_cores(64));
}

Test(available, cores_of_version_one) {
    put_file("/proc/self/cgroup", "4:cpu,cpuacct:/docker/c08c\n0::/\n");
    put_file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    put_file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    cr_assert_eq(available_cores(root), available_cores("/nowhere"));
    put_file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "90000\n");
    cr_assert_eq(available_cores(root), 1);
    put_file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    put_file("/proc/self/cgroup", "3:cpu:/keepd\n");
    cr_assert_eq(available_cores(root), available_cores("/nowhere"));
    put_file("/sys/fs/cgroup/cpu/keepd/cpu.cfs_quota_us", "100000\n");
    put_file("/sys/fs/cgroup/cpu/keepd/cpu.cfs_period_us", "100000\n");
    cr_assert_eq(available_cores(root), 1);
}
