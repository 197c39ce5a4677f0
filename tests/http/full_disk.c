/* A disk with little left, for test_hub.py: it is loaded before the C library (LD_PRELOAD).
 * FULL_DISK_LEFT: bytes that file systems say are left. FULL_DISK_WRITES: bytes that may be written
 * to files whose name ends with .incomplete, in all. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

int statvfs(const char *path, struct statvfs *out) {
    __typeof__(statvfs) *real = (__typeof__(real))dlsym(RTLD_NEXT, "statvfs");
    const char *left = getenv("FULL_DISK_LEFT");
    int rc = real(path, out);
    if (rc == 0 && left) out->f_bavail = strtoull(left, NULL, 10) / out->f_frsize;
    return rc;
}

static int is_limited(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 11) return 0;
    path[size] = '\0';
    return strcmp(path + size - 11, ".incomplete") == 0;
}

ssize_t write(int fd, const void *data, size_t size) {
    static size_t written;
    __typeof__(write) *real = (__typeof__(real))dlsym(RTLD_NEXT, "write");
    const char *most = getenv("FULL_DISK_WRITES");
    if (!most || !is_limited(fd)) return real(fd, data, size);
    const size_t left = strtoull(most, NULL, 10) - written;
    if (left == 0) {
        errno = ENOSPC;
        return -1;
    }
    const ssize_t n = real(fd, data, size < left ? size : left);
    if (n > 0) written += (size_t)n;
    return n;
}
