/* File operations of the state directory. Writes are atomic (temporary name, sync, rename) and go
 * in synced pieces, so that the engine can tell a slow disk from one that hangs. */
#include "engine/disk/state_dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"

enum { NAME_BYTES = 48, PIECE_BYTES = 1 << 22 };
enum { SYNC_BYTES = 1 << 25 }; /* bytes written between two syncs */

/* ---- Names and bytes ---- */

static void format_file_name(uint64_t id, const char *suffix, char name[NAME_BYTES]) {
    snprintf(name, NAME_BYTES, "%016llx.%s", (unsigned long long)id, suffix);
}

/* Parses "<16 hex digits>.<suffix>", lower case. */
static bool parse_file_name(const char *name, const char *suffix, uint64_t *id) {
    char again[NAME_BYTES];
    *id = strtoull(name, NULL, 16);
    format_file_name(*id, suffix, again);
    return strcmp(name, again) == 0;
}

/* Unfinished files, by suffix: the daemon's own writing, and what a client uploads. */
static const char written_suffix[] = "tmp", uploaded_suffix[] = "part";

static void name_unfinished(uint64_t id, uint64_t writer, const char *suffix,
                            char name[NAME_BYTES]) {
    snprintf(name, NAME_BYTES, ".%016llx.%016llx.%s", (unsigned long long)id,
             (unsigned long long)writer, suffix);
}

/* The name of a file that this daemon is writing. */
static void temporary_of(const struct state_dir *dir, uint64_t id, char name[NAME_BYTES]) {
    name_unfinished(id, dir->lease.number, written_suffix, name);
}

static void upload_of(const struct state_dir *dir, uint64_t number, char name[NAME_BYTES]) {
    name_unfinished(number, dir->lease.number, uploaded_suffix, name);
}

/* Parses ".<16 hex digits>.<16 hex digits>.<suffix>". */
static bool parse_unfinished(const char *name, const char *suffix, uint64_t *writer) {
    char again[NAME_BYTES];
    if (name[0] != '.' || strlen(name) <= strlen(".0123456789abcdef.0123456789abcdef."))
        return false;
    *writer = strtoull(name + 18, NULL, 16);
    name_unfinished(strtoull(name + 1, NULL, 16), *writer, suffix, again);
    return strcmp(name, again) == 0;
}

/* Parses the name of a file that a daemon is writing. Versions without leases wrote names without
 * the writer's number: *writer is 0 then. */
static bool parse_temporary(const char *name, uint64_t *writer) {
    uint64_t id;
    *writer = 0;
    if (name[0] == '.' && parse_file_name(name + 1, written_suffix, &id)) return true;
    return parse_unfinished(name, written_suffix, writer);
}

static int write_fully(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ERR_IO;
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

/* A file may take longer than a lease lasts, so each piece keeps the daemon's lease. */
static void end_piece(struct state_dir *dir) {
    atomic_fetch_add(&dir->progress, 1);
    state_lease_keep(&dir->lease);
}

/* Writes and syncs in pieces, so that a slow disk can be told from one that hangs: a write to the
 * page cache is no progress on disk, and one sync at the end would take as long as all of them. */
static int write_all(struct state_dir *dir, int fd, const char *data, size_t size) {
    while (size > 0) {
        size_t piece = size > SYNC_BYTES ? SYNC_BYTES : size;
        if (write_fully(fd, data, piece) != 0 || fdatasync(fd) != 0) return ERR_IO;
        end_piece(dir);
        data += piece;
        size -= piece;
    }
    return 0;
}

static int read_fully(struct state_dir *dir, int fd, char *data, size_t size) {
    while (size > 0) {
        ssize_t n = read(fd, data, size > PIECE_BYTES ? PIECE_BYTES : size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ERR_IO; /* an error, or the file was truncated meanwhile */
        end_piece(dir);
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

/* Opens a regular file for reading. Never follows a link, and never blocks on a pipe. */
static int open_state_file(const struct state_dir *dir, const char *name, int access,
                           struct stat *stat_out) {
    int fd = openat(dir->fd, name, access | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, stat_out) == 0 && S_ISREG(stat_out->st_mode)) return fd;
    close(fd);
    errno = EINVAL;
    return -1;
}

/* ---- Opening ---- */

static int cannot_make(const char *path, struct fault *fault) {
    return fault_set(fault, ERR_IO, "state-dir", "%.200s cannot be made: %s", path,
                     strerror(errno));
}

static int open_path(struct state_dir *dir, struct fault *fault) {
    const char *path = dir->path;
    struct stat st;
    dir->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir->fd < 0 || fstat(dir->fd, &st) != 0)
        return fault_set(fault, ERR_IO, "state-dir", "%.200s cannot be opened: %s", path,
                         strerror(errno));
    if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return fault_set(fault, ERR_INVALID, "state-dir",
                         "others may write to %.200s; its mode should be 0700", path);
    if (faccessat(dir->fd, ".", W_OK | X_OK, AT_EACCESS) == 0) return 0;
    return fault_set(fault, ERR_IO, "state-dir", "%.200s cannot be written to: %s", path,
                     strerror(errno));
}

/* Daemons of earlier versions hold the lock exclusively, because they share the directory with
 * nobody; this version holds it shared, so that neither starts beside the other. A file system
 * without such locks has no such protection. */
static int lock_directory(struct state_dir *dir, struct fault *fault) {
    dir->lock_file = openat(dir->fd, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (dir->lock_file < 0)
        return fault_set(fault, ERR_IO, "state-dir", "its lock cannot be opened: %s",
                         strerror(errno));
    if (flock(dir->lock_file, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0;
    return fault_set(fault, ERR_BUSY, "state-dir",
                     "another keepd, of a version that shares nothing, uses %.200s", dir->path);
}

/* Reads the key. ERR_NOTFOUND: there is none yet; no fault is set. */
static int load_key(struct state_dir *dir, struct fault *fault) {
    struct stat st;
    int fd = open_state_file(dir, "key", O_RDONLY, &st), rc = 0;
    if (fd < 0 && errno == ENOENT) return ERR_NOTFOUND;
    if (fd < 0)
        return fault_set(fault, ERR_IO, "state-dir", "its key cannot be opened: %s",
                         strerror(errno));
    if ((st.st_mode & 077) != 0)
        rc = fault_set(fault, ERR_INVALID, "state-dir",
                       "its key may be read by others; make its mode 0600");
    else if (st.st_size != (off_t)sizeof dir->key ||
             read_fully(dir, fd, (char *)dir->key, sizeof dir->key) != 0)
        rc = fault_set(fault, ERR_INVALID, "state-dir", "its key is not %zu bytes long",
                       sizeof dir->key);
    close(fd);
    return rc;
}

/* Gives the key its name, unless another daemon was faster (ERR_BUSY). File systems without hard
 * links have a rename that replaces nothing. With the plain rename, which is left where there is
 * neither, the last of several daemons wins: the caller reads the key again (ERR_BUSY, too). */
static int name_key(struct state_dir *dir, const char *temporary) {
    if (linkat(dir->fd, temporary, dir->fd, "key", 0) == 0) {
        unlinkat(dir->fd, temporary, 0);
        return 0;
    }
    if (errno == EEXIST) return ERR_BUSY;
    if (errno != EPERM && errno != EOPNOTSUPP && errno != ENOSYS) return ERR_IO;
    if (renameat2(dir->fd, temporary, dir->fd, "key", RENAME_NOREPLACE) == 0) return 0;
    if (errno == EEXIST) return ERR_BUSY;
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) return ERR_IO;
    if (renameat(dir->fd, temporary, dir->fd, "key") != 0 || fsync(dir->fd) != 0) return ERR_IO;
    return ERR_BUSY;
}

/* Writes the key under a temporary name first, so that a key is never half written. When several
 * daemons begin at once, all take the key of the first. */
static int create_directory_key(struct state_dir *dir, struct fault *fault) {
    char temporary[NAME_BYTES];
    temporary_of(dir, 0, temporary);
    int fd = openat(dir->fd, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC,
                    (mode_t)0600);
    CHECK(getrandom(dir->key, sizeof dir->key, 0) == (ssize_t)sizeof dir->key);
    bool made = fd >= 0 && write_all(dir, fd, (const char *)dir->key, sizeof dir->key) == 0 &&
                fsync(fd) == 0;
    if (fd >= 0) close(fd);
    int rc = made ? name_key(dir, temporary) : ERR_IO;
    if (rc == 0 && fsync(dir->fd) != 0) rc = ERR_IO;
    if (rc == ERR_IO) /* before errno changes */
        fault_set(fault, rc, "state-dir", "its key cannot be written: %s", strerror(errno));
    if (rc != 0) unlinkat(dir->fd, temporary, 0);
    return rc == ERR_BUSY ? load_key(dir, fault) : rc;
}

static void begin_dir(struct state_dir *dir, const char *path) {
    dir->path = path;
    dir->fd = dir->lock_file = -1;
    dir->lease = (struct state_lease){.folder = -1, .file = -1};
    atomic_init(&dir->progress, 0);
}

int state_dir_open(struct state_dir *dir, const char *path, struct fault *fault) {
    begin_dir(dir, path);
    if (mkdir(path, 0700) != 0 && errno != EEXIST) return cannot_make(path, fault);
    int rc = open_path(dir, fault);
    if (rc == 0) rc = lock_directory(dir, fault);
    if (rc == 0) rc = state_lease_open(&dir->lease, dir->fd, fault);
    if (rc == 0) rc = load_key(dir, fault);
    return rc == ERR_NOTFOUND ? create_directory_key(dir, fault) : rc;
}

/* Checks that mkdir could create the directory. */
static int check_parent(const char *path, struct fault *fault) {
    char parent[PATH_MAX];
    if ((size_t)snprintf(parent, sizeof parent, "%s", path) >= sizeof parent) {
        errno = ENAMETOOLONG;
        return cannot_make(path, fault);
    }
    bool good = faccessat(AT_FDCWD, dirname(parent), W_OK | X_OK, AT_EACCESS) == 0;
    return good ? 0 : cannot_make(path, fault);
}

int state_dir_check(const char *path, struct fault *fault) {
    struct state_dir dir;
    struct stat st;
    begin_dir(&dir, path);
    if (lstat(path, &st) != 0)
        return errno == ENOENT ? check_parent(path, fault) : cannot_make(path, fault);
    int rc = open_path(&dir, fault);
    if (rc == 0) rc = load_key(&dir, fault);
    state_dir_close(&dir);
    return rc == ERR_NOTFOUND ? 0 : rc;
}

void state_dir_close(struct state_dir *dir) {
    state_lease_close(&dir->lease);
    if (dir->lock_file >= 0) close(dir->lock_file);
    if (dir->fd >= 0) close(dir->fd);
}

/* ---- Listing ---- */

/* Deletes a file that its daemon will not finish. Returns the size of one that it may. */
static int64_t visit_unfinished(const struct state_dir *dir, const char *name, uint64_t writer) {
    struct stat st = {0};
    if (writer == dir->lease.number) return 0;
    bool left = writer == 0 ? dir->lease.count == 0 : !state_lease_lives(&dir->lease, writer);
    if (left)
        unlinkat(dir->fd, name, 0);
    else if (fstatat(dir->fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return 0;
    return left ? 0 : st.st_size;
}

static int list_entry(const struct state_dir *dir, const char *name, state_dir_visit *visit,
                      void *arg, int64_t *unfinished) {
    uint64_t id, writer;
    if (parse_file_name(name, "state", &id)) return visit(arg, id, false);
    if (parse_file_name(name, "bad", &id)) return visit(arg, id, true);
    if (parse_temporary(name, &writer)) *unfinished += visit_unfinished(dir, name, writer);
    /* Nobody has checked an upload's bytes: they must not displace files that are good. */
    if (parse_unfinished(name, uploaded_suffix, &writer)) (void)visit_unfinished(dir, name, writer);
    return 0;
}

int state_dir_list(const struct state_dir *dir, state_dir_visit *visit, void *arg,
                   int64_t *unfinished, struct fault *fault) {
    int fd = openat(dir->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;
    int rc = 0;
    *unfinished = 0;
    if (!list) {
        if (fd >= 0) close(fd);
        return fault_set(fault, ERR_IO, "state-dir", "cannot be listed: %s", strerror(errno));
    }
    for (errno = 0; rc == 0 && (entry = readdir(list)) != NULL; errno = 0)
        rc = list_entry(dir, entry->d_name, visit, arg, unfinished);
    if (rc == 0 && errno != 0)
        rc = fault_set(fault, ERR_IO, "state-dir", "cannot be listed: %s", strerror(errno));
    closedir(list);
    return rc;
}

static struct state_dir_file file_of(const struct stat *st) {
    return (struct state_dir_file){st->st_size, st->st_mtime,
                                   (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec};
}

int64_t state_dir_changed_ns(const struct state_dir *dir) {
    struct stat st;
    int fd = openat(dir->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* also asks a server */
    int64_t ns = fd >= 0 && fstat(fd, &st) == 0 ? file_of(&st).used_ns : 0;
    if (fd >= 0) close(fd);
    return ns;
}

bool state_dir_stat(const struct state_dir *dir, uint64_t id, bool bad,
                    struct state_dir_file *out) {
    char name[NAME_BYTES];
    struct stat st;
    format_file_name(id, bad ? "bad" : "state", name);
    if (fstatat(dir->fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) return false;
    *out = file_of(&st);
    return true;
}

/* ---- Reading ---- */

int state_dir_read_head(struct state_dir *dir, uint64_t id, struct state_dir_file *out,
                        struct state_head *head, struct fault *fault) {
    char name[NAME_BYTES], bytes[STATE_HEAD_BYTES];
    struct stat st;
    format_file_name(id, "state", name);
    int fd = open_state_file(dir, name, O_RDONLY, &st);
    if (fd < 0) return fault_set(fault, ERR_IO, name, "%s", strerror(errno));
    *out = file_of(&st);
    int rc = 0;
    if ((size_t)st.st_size < sizeof bytes)
        rc = fault_set(fault, ERR_MALFORMED, name, "torn: shorter than its head");
    else if (read_fully(dir, fd, bytes, sizeof bytes) != 0)
        rc = fault_set(fault, ERR_IO, name, "cannot be read");
    else
        rc = state_parse_head(bytes, sizeof bytes, head, fault);
    close(fd);
    if (rc == 0 && head->file_size != (uint64_t)st.st_size)
        rc = fault_set(fault, ERR_MALFORMED, name, "torn: not as long as its head says");
    if (rc == 0 && head->id != id)
        rc = fault_set(fault, ERR_MALFORMED, name, "it belongs to another name");
    return rc;
}

/* Checks, before memory is allocated for a file, that the file is as long as its head says, and
 * that a file with this head can be so long. Reads the head and seeks back to the beginning. */
static int check_head_size(struct state_dir *dir, int fd, const char *name, size_t size,
                           struct fault *fault) {
    char bytes[STATE_HEAD_BYTES];
    struct state_head head;
    if (size < sizeof bytes + STATE_SEAL_BYTES)
        return fault_set(fault, ERR_MALFORMED, name, "torn: it has only %zu bytes", size);
    if (read_fully(dir, fd, bytes, sizeof bytes) != 0 || lseek(fd, 0, SEEK_SET) != 0)
        return fault_set(fault, ERR_IO, name, "cannot be read");
    int rc = state_parse_head(bytes, sizeof bytes, &head, fault);
    if (rc != 0) return rc;
    if (head.file_size != size)
        return fault_set(fault, ERR_MALFORMED, name, "torn: not as long as its head says");
    if (size > state_size_limit(&head, dir->state_bytes))
        return fault_set(fault, ERR_MALFORMED, name, "longer than its conversation can be");
    return 0;
}

bool state_dir_touch(const struct state_dir *dir, uint64_t id, struct state_dir_file *out) {
    char name[NAME_BYTES];
    struct stat st;
    format_file_name(id, "state", name);
    int fd = open_state_file(dir, name, O_RDONLY, &st);
    if (fd < 0) return false;
    bool touched = futimens(fd, NULL) == 0 && fstat(fd, &st) == 0;
    if (touched) *out = file_of(&st);
    close(fd);
    return touched;
}

int state_dir_read(struct state_dir *dir, uint64_t id, char **data, struct state_view *view,
                   struct state_dir_file *taken, struct fault *fault) {
    char name[NAME_BYTES];
    struct stat st;
    format_file_name(id, "state", name);
    int fd = open_state_file(dir, name, O_RDONLY, &st), rc = 0;
    if (fd < 0)
        return fault_set(fault, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, name, "%s",
                         strerror(errno));
    size_t size = (size_t)st.st_size;
    rc = check_head_size(dir, fd, name, size, fault);
    if (rc == 0) {
        *data = mem_try_alloc(size, 1);
        if (!*data)
            rc = fault_set(fault, ERR_NOMEM, name, "no memory for its %zu bytes", size);
        else if (read_fully(dir, fd, *data, size) != 0)
            rc = fault_set(fault, ERR_IO, name, "cannot be read");
    }
    (void)futimens(fd, NULL); /* a failure affects only the order of deletion */
    if (fstat(fd, &st) == 0) *taken = file_of(&st);
    close(fd);
    if (rc == 0) rc = state_check_seal(*data, size, dir->key, fault);
    if (rc == 0) rc = state_parse(*data, size, view, fault);
    if (rc == 0 && view->head.id != id)
        rc = fault_set(fault, ERR_INVALID, name, "it belongs to another name");
    return rc;
}

/* ---- Writing ---- */

static int write_temporary(struct state_dir *dir, const char *name, const char *data, size_t size) {
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(dir->fd, name, flags, 0600);
    if (fd < 0) return ERR_IO;
    int rc = write_all(dir, fd, data, size);
    if (rc == 0 && fsync(fd) != 0) rc = ERR_IO;
    if (close(fd) != 0) rc = ERR_IO;
    return rc;
}

int state_dir_write(struct state_dir *dir, uint64_t id, char *data, size_t size) {
    char name[NAME_BYTES], temporary[NAME_BYTES];
    format_file_name(id, "state", name);
    temporary_of(dir, id, temporary);
    state_seal(data, size, dir->key);
    bool copy = faccessat(dir->fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0; /* written before */
    errno = 0; /* the log shows the fault of the calls from here on */
    int rc = write_temporary(dir, temporary, data, size);
    bool renamed = rc == 0 && renameat(dir->fd, temporary, dir->fd, name) == 0;
    if (renamed && fsync(dir->fd) == 0) return 0;
    log_warn("state file %s cannot be written: %s", name, strerror(errno));
    unlinkat(dir->fd, temporary, 0);
    if (renamed && !copy) unlinkat(dir->fd, name, 0);
    return ERR_IO;
}

/* ---- Moving ---- */

int state_dir_create(const struct state_dir *dir, uint64_t number) {
    char name[NAME_BYTES];
    upload_of(dir, number, name);
    return openat(dir->fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                  (mode_t)0600);
}

int state_dir_append(struct state_dir *dir, int fd, const char *data, size_t size,
                     size_t *unsynced) {
    if (write_fully(fd, data, size) != 0) return ERR_IO;
    *unsynced += size;
    if (*unsynced < SYNC_BYTES) return 0;
    *unsynced = 0;
    atomic_fetch_add(&dir->progress, 1);
    return fdatasync(fd) == 0 ? 0 : ERR_IO;
}

int state_dir_adopt(struct state_dir *dir, uint64_t number, uint64_t id, struct fault *fault) {
    char name[NAME_BYTES], temporary[NAME_BYTES];
    format_file_name(id, "state", name);
    upload_of(dir, number, temporary);
    if (renameat(dir->fd, temporary, dir->fd, name) == 0 && fsync(dir->fd) == 0) return 0;
    fault_set(fault, ERR_IO, "state", "cannot be written: %s", strerror(errno));
    unlinkat(dir->fd, temporary, 0);
    return ERR_IO;
}

void state_dir_discard(const struct state_dir *dir, uint64_t number) {
    char name[NAME_BYTES];
    upload_of(dir, number, name);
    unlinkat(dir->fd, name, 0);
}

int state_dir_open_file(const struct state_dir *dir, uint64_t id, uint64_t *bytes) {
    char name[NAME_BYTES];
    struct stat st = {0};
    format_file_name(id, "state", name);
    int fd = open_state_file(dir, name, O_RDONLY, &st);
    *bytes = (uint64_t)st.st_size;
    return fd;
}

/* ---- Removing ---- */

bool state_dir_put_aside(const struct state_dir *dir, uint64_t id, const char *why) {
    char name[NAME_BYTES], bad[NAME_BYTES];
    format_file_name(id, "state", name);
    format_file_name(id, "bad", bad);
    log_error("state file %s refused: %s; kept as %s", name, why, bad);
    if (renameat(dir->fd, name, dir->fd, bad) == 0) return true;
    log_warn("state file %s cannot be renamed: %s", name, strerror(errno));
    return false;
}

void state_dir_delete(const struct state_dir *dir, uint64_t id, bool bad) {
    char name[NAME_BYTES];
    format_file_name(id, bad ? "bad" : "state", name);
    if (unlinkat(dir->fd, name, 0) == 0 || errno == ENOENT) return;
    int why = errno;
    struct stat st;
    /* A directory without permission may have files that can be written. */
    int fd = open_state_file(dir, name, O_WRONLY, &st);
    bool emptied = fd >= 0 && st.st_nlink == 1 && ftruncate(fd, 0) == 0; /* links are others' */
    log_warn("state file %s cannot be deleted: %s; %s", name, strerror(why),
             emptied ? "it was emptied" : "it stays");
    if (fd >= 0) close(fd);
}

bool state_dir_taken(const struct state_dir *dir, uint64_t id, int64_t since_ns) {
    struct state_dir_file file;
    if (!state_dir_stat(dir, id, false, &file) || file.used_ns <= since_ns) return false;
    return dir->lease.now_unix - file.used_unix <= STATE_LEASE_SECONDS;
}

void state_dir_sync(struct state_dir *dir) {
    (void)fsync(dir->fd);
    atomic_fetch_add(&dir->progress, 1);
}
