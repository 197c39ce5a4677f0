/* Whole regular files, read into memory or mapped. */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"

static int io_fault(struct fault *fault, const char *path) {
    int rc = errno == ENOENT || errno == ENOTDIR ? ERR_NOTFOUND : ERR_IO;
    return fault_set(fault, rc, path, "%s", strerror(errno));
}

/* Opens a regular file. O_NONBLOCK: opening a pipe must not block. */
static int open_file_to_read(const char *path, int *fd, size_t *size, struct fault *fault) {
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0) return io_fault(fault, path);
    int rc = fstat(*fd, &st) ? io_fault(fault, path) : 0;
    if (!rc && !S_ISREG(st.st_mode)) rc = fault_set(fault, ERR_IO, path, "is not a regular file");
    if (!rc && (uint64_t)st.st_size > SIZE_MAX / 2)
        rc = fault_set(fault, ERR_LIMIT, path, "is too large");
    if (rc) {
        close(*fd);
        return rc;
    }
    *size = (size_t)st.st_size;
    return 0;
}

/* Reads into `data`. *size: on entry the capacity of `data`, on return the bytes read. */
static int read_file_bytes(int fd, char *data, size_t *size, const char *path,
                           struct fault *fault) {
    size_t got = 0;
    while (got < *size) {
        ssize_t n = read(fd, data + got, *size - got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return io_fault(fault, path);
        if (n == 0) break;
        got += (size_t)n;
    }
    *size = got;
    return 0;
}

int file_read(const char *path, size_t limit, char **data, size_t *size, struct fault *fault) {
    int fd;
    *data = NULL;
    *size = 0;
    int rc = open_file_to_read(path, &fd, size, fault);
    if (rc) return rc;
    if (*size > limit) {
        rc = fault_set(fault, ERR_LIMIT, path, "is larger than %zu bytes", limit);
        goto out;
    }
    *data = mem_try_alloc(*size + 1, 1);
    if (!*data) {
        rc = fault_set(fault, ERR_NOMEM, path, "not enough memory for %zu bytes", *size);
        goto out;
    }
    rc = read_file_bytes(fd, *data, size, path, fault);
out:
    close(fd);
    if (rc) {
        mem_free(*data);
        *data = NULL;
        *size = 0;
    } else {
        (*data)[*size] = '\0';
    }
    return rc;
}

int file_map(const char *path, const void **data, size_t *size, struct fault *fault) {
    int fd;
    *data = NULL;
    int rc = open_file_to_read(path, &fd, size, fault);
    if (rc) return rc;
    if (*size == 0) {
        rc = fault_set(fault, ERR_MALFORMED, path, "is empty");
    } else {
        void *map = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) rc = io_fault(fault, path);
        if (!rc) *data = map;
    }
    close(fd);
    return rc;
}

static int copy_file(int fd, const char *path, size_t size, const void **data,
                     struct fault *fault) {
    size_t got = size;
    void *copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return fault_set(fault, ERR_NOMEM, path, "not enough memory for %zu bytes", size);
    int rc = read_file_bytes(fd, copy, &got, path, fault);
    if (!rc && got < size) rc = fault_set(fault, ERR_IO, path, "was shortened while it was read");
    if (rc)
        munmap(copy, size);
    else
        *data = copy;
    return rc;
}

int file_map_copy(const char *path, size_t limit, const void **data, size_t *size,
                  struct fault *fault) {
    int fd;
    *data = NULL;
    int rc = open_file_to_read(path, &fd, size, fault);
    if (rc) return rc;
    if (*size == 0)
        rc = fault_set(fault, ERR_MALFORMED, path, "is empty");
    else if (*size > limit)
        rc = fault_set(fault, ERR_LIMIT, path, "is larger than %zu bytes", limit);
    else
        rc = copy_file(fd, path, *size, data, fault);
    close(fd);
    return rc;
}

void file_unmap(const void *data, size_t size) {
    if (data) munmap((void *)(uintptr_t)data, size);
}
