#include "engine/store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

enum { REMOVES_MAX = 64, NAME_BYTES = 32, BUCKETS = STORE_FILES_MAX, PIECE_BYTES = 1 << 22 };
enum { SYNC_BYTES = 1 << 25 }; /* written from one sync to the next */

/* One file of the directory, as its head tells. */
struct store_file {
    struct state_head head;
    struct store_file *next_of_id, *next_of_prompt; /* in their buckets */
    struct store_file *older, *newer;               /* by their last use */
    int64_t bytes, used_unix;
    bool bad;                  /* <id>.bad */
    bool ours;                 /* of this model and these gates, and not bad */
    bool ignored;              /* by this process */
    const struct store *owner; /* which store made or found it; NULL: nobody yet */
};

enum write_state { WRITE_FREE, WRITE_READY, WRITE_RUNNING, WRITE_DONE };
enum read_state { READ_FREE, READ_WANTED, READ_RUNNING, READ_DONE };

/* What the stores of one directory share. */
struct directory {
    struct store_options options; /* done and arg are each store's own */
    int fd, lock_file;            /* descriptors */
    uint8_t key[SHA256_BYTES];
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* all below, and what the stores have in hand */
    pthread_cond_t work, settled;
    bool stop;
    struct store_file *by_id[BUCKETS], *by_prompt[BUCKETS];
    struct store_file *oldest, *newest;
    int file_count;
    uint64_t changes; /* grows when a search may find something else */
    struct store_stats stats;
    uint64_t removes[REMOVES_MAX];
    int remove_count;
    struct store *stores[STORES_MAX];
    int store_count;
    atomic_uint_fast64_t progress; /* pieces read and written, things done */
    int turn;                      /* whose work is looked at first */
    const struct store *serving;   /* the thread works for it */
};

struct store {
    struct directory *directory;
    int index; /* in its owner's words, see store_join */
    void (*done)(void *arg);
    void *arg;
    struct {
        enum write_state state;
        struct state_head head;
        char *data;
        size_t size;
        int code;
        bool removed; /* while it was written */
    } write;
    struct {
        enum read_state state;
        uint64_t id;
        char *data;
        struct state_view view;
        int code;
        bool removed;  /* while it was read */
        bool unwanted; /* likewise: freed at its end */
    } read;
};

/* ---- Names and files ------------------------------------------------------------------------- */

static void name_of(uint64_t id, const char *suffix, char name[NAME_BYTES]) {
    snprintf(name, NAME_BYTES, "%016llx.%s", (unsigned long long)id, suffix);
}

/* "<16 hex digits>.<suffix>", lower case. */
static bool parse_name(const char *name, const char *suffix, uint64_t *id) {
    char again[NAME_BYTES];
    *id = strtoull(name, NULL, 16);
    name_of(*id, suffix, again);
    return strcmp(name, again) == 0;
}

static int write_piece(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ERR_IO;
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

/* In pieces, so that a slow disk can be told from one that hangs; what the page cache takes is no
 * progress, and one sync at the end would take as long as all of them. */
static int write_all(struct directory *d, int fd, const char *data, size_t size) {
    while (size > 0) {
        size_t piece = size > SYNC_BYTES ? SYNC_BYTES : size;
        if (write_piece(fd, data, piece) != 0 || fdatasync(fd) != 0) return ERR_IO;
        atomic_fetch_add(&d->progress, 1);
        data += piece;
        size -= piece;
    }
    return 0;
}

static int read_all(struct directory *d, int fd, char *data, size_t size) {
    while (size > 0) {
        ssize_t n = read(fd, data, size > PIECE_BYTES ? PIECE_BYTES : size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ERR_IO; /* shorter than it was a moment ago, too */
        atomic_fetch_add(&d->progress, 1);
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

/* Opens a regular file for reading, never a link, and never waits for a pipe's other end. */
static int open_regular(const struct directory *d, const char *name, struct stat *stat_out) {
    int fd = openat(d->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, stat_out) == 0 && S_ISREG(stat_out->st_mode)) return fd;
    close(fd);
    errno = EINVAL;
    return -1;
}

/* ---- The index (under the lock, or before the thread) ---------------------------------------- */

static struct store_file **bucket_of_id(struct directory *d, uint64_t id) {
    return &d->by_id[id % BUCKETS];
}

/* Spaces are secret hashes: nobody fills another's bucket by choosing prompts. */
static struct store_file **bucket_of_prompt(struct directory *d, const uint8_t *space,
                                            uint64_t hash) {
    uint64_t secret;
    memcpy(&secret, space, sizeof secret);
    return &d->by_prompt[(hash ^ secret) % BUCKETS];
}

static struct store_file *find_file(struct directory *d, uint64_t id, bool bad) {
    struct store_file *file = *bucket_of_id(d, id);
    while (file != NULL && (file->head.id != id || file->bad != bad)) file = file->next_of_id;
    return file;
}

static void unlink_age(struct directory *d, struct store_file *file) {
    *(file->older != NULL ? &file->older->newer : &d->oldest) = file->newer;
    *(file->newer != NULL ? &file->newer->older : &d->newest) = file->older;
}

static void link_newest(struct directory *d, struct store_file *file) {
    file->older = d->newest;
    file->newer = NULL;
    *(d->newest != NULL ? &d->newest->newer : &d->oldest) = file;
    d->newest = file;
}

static void drop_file(struct directory *d, struct store_file *file) {
    struct store_file **link = bucket_of_id(d, file->head.id);
    while (*link != file) link = &(*link)->next_of_id;
    *link = file->next_of_id;
    link = bucket_of_prompt(d, file->head.space, file->head.prompt_hash);
    while (*link != file) link = &(*link)->next_of_prompt;
    *link = file->next_of_prompt;
    unlink_age(d, file);
    d->file_count--;
    d->changes++;
    d->stats.bytes -= file->bytes;
    d->stats.files -= file->ours;
    mem_free(file);
}

/* As the newest. */
static int add_file(struct directory *d, const struct store_file *copy) {
    if (d->file_count >= STORE_FILES_MAX) return ERR_LIMIT;
    struct store_file *file = mem_try_alloc(1, sizeof *file);
    if (file == NULL) return ERR_NOMEM;
    *file = *copy;
    struct store_file **of_id = bucket_of_id(d, file->head.id);
    struct store_file **of_prompt = bucket_of_prompt(d, file->head.space, file->head.prompt_hash);
    file->next_of_id = *of_id;
    *of_id = file;
    file->next_of_prompt = *of_prompt;
    *of_prompt = file;
    link_newest(d, file);
    d->file_count++;
    d->changes++;
    d->stats.bytes += file->bytes;
    d->stats.files += file->ours;
    return 0;
}

static int compare_age(const void *a, const void *b) {
    const struct store_file *x = *(struct store_file *const *)a,
                            *y = *(struct store_file *const *)b;
    return (x->used_unix > y->used_unix) - (x->used_unix < y->used_unix);
}

/* After the scan, which meets them in any order. */
static int sort_by_age(struct directory *d) {
    size_t count = 0;
    if (d->file_count == 0) return 0;
    struct store_file **all = mem_try_alloc((size_t)d->file_count, sizeof(struct store_file *));
    if (all == NULL) return ERR_NOMEM;
    for (struct store_file *file = d->oldest; file != NULL; file = file->newer) all[count++] = file;
    qsort(all, count, sizeof *all, compare_age);
    d->oldest = d->newest = NULL;
    for (size_t i = 0; i < count; i++) link_newest(d, all[i]);
    mem_free(all);
    return 0;
}

/* ---- Scanning -------------------------------------------------------------------------------- */

/* False: it keeps its name, and is refused again at the next start. */
static bool put_aside(struct directory *d, uint64_t id, const char *why) {
    char name[NAME_BYTES], bad[NAME_BYTES];
    name_of(id, "state", name);
    name_of(id, "bad", bad);
    log_error("state file %s refused: %s; kept as %s", name, why, bad);
    if (renameat(d->fd, name, d->fd, bad) == 0) return true;
    log_warn("state file %s cannot be renamed: %s", name, strerror(errno));
    return false;
}

/* Where one was put aside under this id before, the new one has taken its place. */
static void forget_bad(struct directory *d, uint64_t id) {
    struct store_file *before = find_file(d, id, true);
    if (before != NULL) drop_file(d, before);
}

/* Reads one head; what is wrong with it is in *fault. */
static int read_head(struct directory *d, const char *name, uint64_t id, struct store_file *file,
                     struct fault *fault) {
    char bytes[STATE_HEAD_BYTES];
    struct stat st;
    int fd = open_regular(d, name, &st);
    if (fd < 0) return fault_set(fault, ERR_IO, name, "%s", strerror(errno));
    file->bytes = st.st_size;
    file->used_unix = st.st_mtime;
    int code = 0;
    if ((size_t)st.st_size < sizeof bytes)
        code = fault_set(fault, ERR_MALFORMED, name, "torn: shorter than its head");
    else if (read_all(d, fd, bytes, sizeof bytes) != 0)
        code = fault_set(fault, ERR_IO, name, "cannot be read");
    else
        code = state_parse_head(bytes, sizeof bytes, &file->head, fault);
    close(fd);
    if (code == 0 && file->head.file_size != (uint64_t)st.st_size)
        code = fault_set(fault, ERR_MALFORMED, name, "torn: not as long as its head says");
    if (code == 0 && file->head.id != id)
        code = fault_set(fault, ERR_MALFORMED, name, "it belongs to another name");
    return code;
}

static int scan_state(struct directory *d, const char *name, uint64_t id) {
    struct store_file file = {0};
    struct fault fault = {0};
    int code = read_head(d, name, id, &file, &fault);
    if (code == ERR_IO) {
        log_warn("state file %s skipped: %s", name, fault.text);
        return 0;
    }
    if (code == ERR_MALFORMED || code == ERR_INVALID) {
        d->stats.refused++;
        file.bad = put_aside(d, id, fault.text);
        if (file.bad) forget_bad(d, id);
    }
    file.head.id = id; /* whatever the head of a foreign version said */
    file.ours = code == 0 && state_is_ours(&file.head, &d->options.identity);
    return add_file(d, &file);
}

static int scan_bad(struct directory *d, const char *name, uint64_t id) {
    struct stat st;
    struct store_file file = {.bad = true};
    if (fstatat(d->fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) return 0;
    file.head.id = id;
    file.bytes = st.st_size;
    file.used_unix = st.st_mtime;
    forget_bad(d, id); /* the listing may show again what was put aside a moment ago */
    return add_file(d, &file);
}

static int scan_entry(struct directory *d, const char *name) {
    uint64_t id;
    if (parse_name(name, "state", &id)) return scan_state(d, name, id);
    if (parse_name(name, "bad", &id)) return scan_bad(d, name, id);
    if (name[0] == '.' && parse_name(name + 1, "tmp", &id)) unlinkat(d->fd, name, 0);
    return 0;
}

static int scan(struct directory *d, struct fault *fault) {
    int fd = openat(d->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;
    int code = 0;
    if (dir == NULL) {
        if (fd >= 0) close(fd);
        return fault_set(fault, ERR_IO, "state-dir", "cannot be listed: %s", strerror(errno));
    }
    while (code == 0 && (entry = readdir(dir)) != NULL) code = scan_entry(d, entry->d_name);
    closedir(dir);
    if (code == 0) code = sort_by_age(d);
    if (code != ERR_LIMIT) return code == 0 ? 0 : fault_set(fault, code, "state-dir", "no memory");
    return fault_set(fault, code, "state-dir", "holds more than %d state files", STORE_FILES_MAX);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int open_dir(struct directory *d, struct fault *fault) {
    const char *path = d->options.dir;
    struct stat st;
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return fault_set(fault, ERR_IO, "state-dir", "%.200s cannot be made: %s", path,
                         strerror(errno));
    d->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (d->fd < 0 || fstat(d->fd, &st) != 0)
        return fault_set(fault, ERR_IO, "state-dir", "%.200s cannot be opened: %s", path,
                         strerror(errno));
    if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return fault_set(fault, ERR_INVALID, "state-dir",
                         "others may write to %.200s; its mode should be 0700", path);
    return 0;
}

static int take_lock(struct directory *d, struct fault *fault) {
    d->lock_file = openat(d->fd, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (d->lock_file < 0)
        return fault_set(fault, ERR_IO, "state-dir", "its lock cannot be opened: %s",
                         strerror(errno));
    if (flock(d->lock_file, LOCK_EX | LOCK_NB) == 0) return 0;
    return fault_set(fault, ERR_BUSY, "state-dir", "another keepd uses %.200s", d->options.dir);
}

/* Under a name of its own first, so that a key is never half there. */
static int make_key(struct directory *d, struct fault *fault) {
    int fd = openat(d->fd, ".key.tmp", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    CHECK(getrandom(d->key, sizeof d->key, 0) == (ssize_t)sizeof d->key);
    bool made =
        fd >= 0 && write_all(d, fd, (const char *)d->key, sizeof d->key) == 0 && fsync(fd) == 0;
    if (fd >= 0) close(fd);
    if (made && renameat(d->fd, ".key.tmp", d->fd, "key") == 0 && fsync(d->fd) == 0) return 0;
    return fault_set(fault, ERR_IO, "state-dir", "its key cannot be written: %s", strerror(errno));
}

static int load_key(struct directory *d, struct fault *fault) {
    struct stat st;
    int fd = open_regular(d, "key", &st), code = 0;
    if (fd < 0 && errno == ENOENT) return make_key(d, fault);
    if (fd < 0)
        return fault_set(fault, ERR_IO, "state-dir", "its key cannot be opened: %s",
                         strerror(errno));
    if ((st.st_mode & 077) != 0)
        code = fault_set(fault, ERR_INVALID, "state-dir",
                         "its key may be read by others; make its mode 0600");
    else if (st.st_size != (off_t)sizeof d->key ||
             read_all(d, fd, (char *)d->key, sizeof d->key) != 0)
        code = fault_set(fault, ERR_INVALID, "state-dir", "its key is not %zu bytes long",
                         sizeof d->key);
    close(fd);
    return code;
}

static void *directory_main(void *arg);
static int make_space(struct directory *d, int count, int64_t size);

static int open_directory(struct directory *d, struct fault *fault) {
    d->fd = d->lock_file = -1;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->work, NULL);
    pthread_cond_init(&d->settled, NULL);
    int code = open_dir(d, fault);
    if (code == 0) code = take_lock(d, fault);
    if (code == 0) code = load_key(d, fault);
    if (code == 0) code = scan(d, fault);
    if (code == 0) code = make_space(d, 0, 0); /* they may have been allowed more before */
    if (code != 0 || d->options.inline_io) return code;
    d->started = pthread_create(&d->thread, NULL, directory_main, d) == 0;
    if (d->started) return 0;
    return fault_set(fault, ERR_NOMEM, "state-dir", "its thread cannot be started");
}

static void close_directory(struct directory *d) {
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_signal(&d->work);
    pthread_mutex_unlock(&d->lock);
    if (d->started) pthread_join(d->thread, NULL);
    while (d->oldest != NULL) drop_file(d, d->oldest);
    if (d->lock_file >= 0) close(d->lock_file);
    if (d->fd >= 0) close(d->fd);
    pthread_cond_destroy(&d->settled);
    pthread_cond_destroy(&d->work);
    pthread_mutex_destroy(&d->lock);
    mem_free(d);
}

static struct store *add_store(struct directory *d, void (*done)(void *arg), void *arg) {
    struct store *store = mem_must_alloc(1, sizeof *store);
    *store = (struct store){.directory = d, .done = done, .arg = arg};
    pthread_mutex_lock(&d->lock);
    CHECK(d->store_count < STORES_MAX);
    store->index = d->store_count;
    d->stores[d->store_count++] = store;
    pthread_mutex_unlock(&d->lock);
    return store;
}

int store_open(const struct store_options *options, struct store **out, struct fault *fault) {
    struct directory *d = mem_must_alloc(1, sizeof *d);
    *out = NULL;
    d->options = *options;
    int code = open_directory(d, fault);
    if (code == 0)
        *out = add_store(d, options->done, options->arg);
    else
        close_directory(d);
    return code;
}

struct store *store_join(struct store *with, void (*done)(void *arg), void *arg) {
    return add_store(with->directory, done, arg);
}

/* The thread has nothing to do for it, and is not just telling it so. The lock is held. */
static bool is_settled(const struct store *store) {
    bool writes = store->write.state == WRITE_READY || store->write.state == WRITE_RUNNING;
    bool reads = store->read.state == READ_WANTED || store->read.state == READ_RUNNING;
    return !writes && !reads && store->directory->serving != store;
}

/* The lock is held. */
static void leave_directory(struct directory *d, const struct store *store) {
    int at = 0;
    for (struct store_file *file = d->oldest; file != NULL; file = file->newer)
        if (file->owner == store) file->owner = NULL;
    d->changes++;
    while (d->stores[at] != store) at++;
    d->stores[at] = d->stores[--d->store_count];
}

void store_close(struct store *store) {
    if (store == NULL) return;
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    while (!is_settled(store)) pthread_cond_wait(&d->settled, &d->lock);
    leave_directory(d, store);
    bool last = d->store_count == 0;
    pthread_mutex_unlock(&d->lock);
    mem_free(store->write.data);
    state_view_close(&store->read.view);
    mem_free(store->read.data);
    mem_free(store);
    if (last) close_directory(d);
}

const struct state_identity *store_identity(const struct store *store) {
    return &store->directory->options.identity;
}

void store_space_key(const struct store *store, uint8_t out[16]) {
    static const char purpose[] = "keepd space key";
    uint8_t derived[SHA256_BYTES];
    sha256_hmac(store->directory->key, purpose, sizeof purpose, derived);
    memcpy(out, derived, 16);
}

/* ---- I/O (the store's thread; the lock is not held) ------------------------------------------ */

static void unlink_file(struct directory *d, uint64_t id, bool bad) {
    char name[NAME_BYTES];
    name_of(id, bad ? "bad" : "state", name);
    if (unlinkat(d->fd, name, 0) != 0 && errno != ENOENT)
        log_warn("state file %s cannot be deleted: %s", name, strerror(errno));
}

/* Deletes files, the one used longest ago first, until `count` more of `size` bytes fit. */
static int make_space(struct directory *d, int count, int64_t size) {
    if (size > d->options.bytes) return ERR_LIMIT;
    for (;;) {
        pthread_mutex_lock(&d->lock);
        bool fits =
            d->stats.bytes <= d->options.bytes - size && d->file_count <= STORE_FILES_MAX - count;
        uint64_t id = fits ? 0 : d->oldest->head.id;
        bool bad = !fits && d->oldest->bad;
        if (!fits) drop_file(d, d->oldest);
        pthread_mutex_unlock(&d->lock);
        if (fits) return 0;
        log_debug("state file of conversation=%016llx deleted reason=bytes",
                  (unsigned long long)id);
        unlink_file(d, id, bad);
    }
}

static int write_temporary(struct directory *d, const char *name, const char *data, size_t size) {
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(d->fd, name, flags, 0600);
    if (fd < 0) return ERR_IO;
    int code = write_all(d, fd, data, size);
    if (code == 0 && fsync(fd) != 0) code = ERR_IO;
    if (close(fd) != 0) code = ERR_IO;
    return code;
}

static int write_file(struct directory *d, uint64_t id, const char *data, size_t size) {
    char name[NAME_BYTES], temporary[NAME_BYTES + 1] = ".";
    name_of(id, "state", name);
    name_of(id, "tmp", temporary + 1);
    int code = write_temporary(d, temporary, data, size);
    if (code == 0 && (renameat(d->fd, temporary, d->fd, name) != 0 || fsync(d->fd) != 0))
        code = ERR_IO;
    if (code == 0) return 0;
    log_warn("state file %s cannot be written: %s", name, strerror(errno));
    unlinkat(d->fd, temporary, 0);
    return code;
}

static void run_write(struct store *store) {
    struct directory *d = store->directory;
    struct store_file file = {.head = store->write.head,
                              .bytes = (int64_t)store->write.size,
                              .used_unix = clock_unix_seconds(),
                              .ours = true,
                              .owner = store};
    char *data = store->write.data; /* ours while RUNNING */
    size_t size = store->write.size;
    int code = make_space(d, 1, (int64_t)size);
    if (code == ERR_LIMIT)
        log_warn("conversation=%016llx not written: its %zu bytes are more than state-bytes",
                 (unsigned long long)file.head.id, size);
    if (code == 0) {
        state_seal(data, size, d->key);
        code = write_file(d, file.head.id, data, size);
    }
    mem_free(data);
    pthread_mutex_lock(&d->lock);
    bool removed = store->write.removed;
    if (code == 0 && !removed) code = add_file(d, &file);
    d->stats.written += code == 0;
    d->stats.failed += code != 0;
    d->changes++; /* it is a file now, or is not to be */
    store->write.data = NULL;
    store->write.code = code;
    store->write.state = WRITE_DONE;
    pthread_mutex_unlock(&d->lock);
    if (removed || code != 0) unlink_file(d, file.head.id, false);
}

/* Reservations rely on what its policy keeps at most. Entries need no look: whoever goes on with
 * more reserves for more. */
static int check_members(const struct state_view *view, const char *name, struct fault *fault) {
    const struct kv_params *kv = &view->head.kv;
    int32_t most = kern_members_max(&kv->rule, kv->budget);
    if (view->report.members <= most) return 0;
    return fault_set(fault, ERR_MALFORMED, name, "%d members in a stream, its policy keeps %d",
                     view->report.members, most);
}

/* A whole file, and what is in it. The time of its use is kept as the file's. */
static int read_file(struct directory *d, uint64_t id, char **data, struct state_view *view,
                     struct fault *fault) {
    char name[NAME_BYTES];
    struct stat st;
    name_of(id, "state", name);
    int fd = open_regular(d, name, &st), code = 0;
    if (fd < 0)
        return fault_set(fault, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, name, "%s",
                         strerror(errno));
    size_t size = (size_t)st.st_size;
    *data = mem_try_alloc(size > 0 ? size : 1, 1);
    if (*data == NULL)
        code = fault_set(fault, ERR_NOMEM, name, "no memory for its %zu bytes", size);
    else if (read_all(d, fd, *data, size) != 0)
        code = fault_set(fault, ERR_IO, name, "cannot be read");
    (void)futimens(fd, NULL); /* only its place in the order of deletion depends on it */
    close(fd);
    if (code == 0) code = state_check_seal(*data, size, d->key, fault);
    if (code == 0) code = state_parse(*data, size, view, fault);
    if (code != 0) return code;
    if (view->head.id != id || !state_is_ours(&view->head, &d->options.identity))
        return fault_set(fault, ERR_INVALID, name, "it belongs to another name, model or gates");
    if (d->options.check != NULL) code = d->options.check(d->options.backend, view, fault);
    return code == 0 ? check_members(view, name, fault) : code;
}

static bool is_refusal(int code) {
    return code == ERR_MALFORMED || code == ERR_INVALID;
}

static void refuse_file(struct directory *d, uint64_t id, const struct fault *fault) {
    bool aside = put_aside(d, id, fault->text);
    pthread_mutex_lock(&d->lock);
    if (aside) forget_bad(d, id);
    struct store_file *file = find_file(d, id, false);
    bool deleted = file == NULL; /* while it was read: then nothing of it stays */
    if (!deleted) {
        d->stats.files -= file->ours;
        d->changes++;
        file->bad = aside;
        file->ours = false;
    }
    d->stats.refused++;
    pthread_mutex_unlock(&d->lock);
    if (deleted && aside) unlink_file(d, id, true);
}

/* It may be good, but not here; or it could not be read this time. */
static void leave_file(struct store *store, uint64_t id, const struct fault *fault) {
    log_warn("state file of conversation=%016llx: %s", (unsigned long long)id, fault->text);
    if (fault->code == ERR_UNSUPPORTED || fault->code == ERR_LIMIT) store_ignore(store, id);
}

static void touch_file(struct directory *d, struct store_file *file) {
    file->used_unix = clock_unix_seconds();
    unlink_age(d, file);
    link_newest(d, file);
}

/* The lock is held. */
static void clear_read(struct store *store) {
    state_view_close(&store->read.view);
    mem_free(store->read.data);
    store->read.data = NULL;
    store->read.removed = store->read.unwanted = false;
    store->read.state = READ_FREE;
}

static void run_read(struct store *store) {
    struct directory *d = store->directory;
    uint64_t id = store->read.id;
    char *data = NULL;
    struct state_view view = {0};
    struct fault fault = {0};
    int code = read_file(d, id, &data, &view, &fault);
    if (is_refusal(code))
        refuse_file(d, id, &fault);
    else if (code != 0)
        leave_file(store, id, &fault);
    pthread_mutex_lock(&d->lock);
    if (code == 0 && store->read.removed) code = ERR_NOTFOUND;
    if (code != 0) {
        state_view_close(&view);
        mem_free(data);
        data = NULL;
    }
    struct store_file *file = find_file(d, id, false);
    if (file != NULL && code == ERR_NOTFOUND)
        drop_file(d, file); /* somebody else deleted it */
    else if (file != NULL)
        touch_file(d, file);
    d->stats.read += code == 0;
    store->read.data = data;
    store->read.view = view;
    store->read.code = code;
    store->read.state = READ_DONE;
    if (store->read.unwanted) clear_read(store);
    pthread_mutex_unlock(&d->lock);
}

static bool wants_read(const struct store *store) {
    return store->read.state == READ_WANTED;
}

static bool wants_write(const struct store *store) {
    return store->write.state == WRITE_READY;
}

/* They take turns. The lock is held. */
static struct store *next_store(struct directory *d, bool (*wants)(const struct store *)) {
    for (int i = 0; i < d->store_count; i++) {
        struct store *store = d->stores[(d->turn + i) % d->store_count];
        if (!wants(store)) continue;
        d->turn = (d->turn + i + 1) % d->store_count;
        return store;
    }
    return NULL;
}

/* The lock is held, and released meanwhile. */
static void serve(struct store *store, void (*run)(struct store *)) {
    struct directory *d = store->directory;
    d->serving = store;
    pthread_mutex_unlock(&d->lock);
    run(store);
    atomic_fetch_add(&d->progress, 1);
    if (store->done != NULL) store->done(store->arg);
    pthread_mutex_lock(&d->lock);
    d->serving = NULL;
    pthread_cond_broadcast(&d->settled);
}

/* One thing to do, what somebody waits for first; false when there is nothing. The lock is held,
 * and released meanwhile. */
static bool run_one(struct directory *d) {
    struct store *store;
    if (d->remove_count > 0) {
        uint64_t id = d->removes[--d->remove_count];
        pthread_mutex_unlock(&d->lock);
        unlink_file(d, id, false);
        (void)fsync(d->fd);
        atomic_fetch_add(&d->progress, 1);
        pthread_mutex_lock(&d->lock);
    } else if ((store = next_store(d, wants_read)) != NULL) {
        store->read.state = READ_RUNNING;
        serve(store, run_read);
    } else if ((store = next_store(d, wants_write)) != NULL) {
        store->write.state = WRITE_RUNNING;
        serve(store, run_write);
    } else {
        return false;
    }
    return true;
}

/* What was handed over is written before the end: it is whole, and somebody may count on it. */
static void *directory_main(void *arg) {
    struct directory *d = arg;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        if (run_one(d)) continue;
        if (d->stop) break;
        pthread_cond_wait(&d->work, &d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Lets the thread begin, or does the work here. The lock is held. */
static void begin_work(struct directory *d) {
    if (!d->options.inline_io)
        pthread_cond_signal(&d->work);
    else
        while (run_one(d)) continue;
}

/* ---- Finding --------------------------------------------------------------------------------- */

/* Files of others are theirs alone. */
static bool may_use(const struct store *store, const struct store_file *file) {
    return file->owner == NULL || file->owner == store;
}

static bool is_writing(const struct store *store, uint64_t id) {
    return (store->write.state == WRITE_READY || store->write.state == WRITE_RUNNING) &&
           store->write.head.id == id;
}

/* What a store is writing is as good as there: store_load waits for it. */
static struct store_file written_file(struct store *store) {
    bool there = is_writing(store, store->write.head.id) && !store->write.removed;
    return (struct store_file){.head = store->write.head, .ours = there, .owner = store};
}

static int32_t usable_tokens(struct conversation_search *search, const struct store_file *file) {
    const struct state_head *head = &file->head;
    const struct conversation_key key = {.space = head->space,
                                         .kv = &head->kv,
                                         .prompt_end = head->prompt_end,
                                         .token_count = head->token_count,
                                         .prompt_hash = head->prompt_hash,
                                         .token_hash = head->token_hash};
    return file->ours && !file->ignored ? conversation_usable(search, &key) : 0;
}

typedef void note_file(void *to, const struct store_file *file, int32_t usable, bool hinted);

static void consider(struct conversation_search *search, const struct store_file *file,
                     note_file *note, void *to) {
    int32_t usable = usable_tokens(search, file);
    uint64_t hint = search->query->hint;
    if (usable > 0) note(to, file, usable, hint != 0 && file->head.hint == hint);
}

/* The hashes of a long prompt take their time: before the lock is taken, unless nobody needs them.
 */
static void prepare_search(struct directory *d, struct conversation_search *search) {
    pthread_mutex_lock(&d->lock);
    bool any = d->file_count > 0;
    pthread_mutex_unlock(&d->lock);
    if (any) (void)conversation_search_hashes(search);
}

/* Notes the files that serve: by the index those whose prompt is a beginning of the query's, and
 * those that are being written. The lock is held. */
static void search_files(struct directory *d, struct conversation_search *search, note_file *note,
                         void *to) {
    const struct conversation_query *query = search->query;
    const uint64_t *hashes = d->file_count > 0 ? conversation_search_hashes(search) : NULL;
    for (int32_t n = 1; hashes != NULL && n < query->prompt_count; n++)
        for (const struct store_file *file = *bucket_of_prompt(d, query->space, hashes[n]);
             file != NULL; file = file->next_of_prompt)
            if (file->head.prompt_end == n) consider(search, file, note, to);
    for (int i = 0; i < d->store_count; i++) {
        struct store_file written = written_file(d->stores[i]);
        consider(search, &written, note, to);
    }
}

/* The best so far for one store. */
struct found {
    const struct store *store;
    uint64_t id;
    int32_t usable;
};

static void note_best(void *to, const struct store_file *file, int32_t usable, bool hinted) {
    struct found *found = to;
    bool equal = found->id != 0 && usable == found->usable;
    if (!may_use(found->store, file)) return;
    if (usable <= found->usable && !(equal && hinted)) return;
    found->id = file->head.id;
    found->usable = usable;
}

uint64_t store_find(struct store *store, const struct conversation_query *query, int32_t least) {
    struct directory *d = store->directory;
    struct conversation_search search = {.query = query};
    struct found found = {.store = store, .usable = least};
    prepare_search(d, &search);
    pthread_mutex_lock(&d->lock);
    search_files(d, &search, note_best, &found);
    struct store_file *file = found.id != 0 ? find_file(d, found.id, false) : NULL;
    if (file != NULL && file->owner != store) {
        file->owner = store;
        d->changes++;
    }
    pthread_mutex_unlock(&d->lock);
    conversation_search_close(&search);
    return found.id;
}

static void note_affinity(void *to, const struct store_file *file, int32_t usable, bool hinted) {
    struct conversation_affinity *of = to;
    if (file->owner != NULL) conversation_affinity_note(&of[file->owner->index], usable, hinted);
}

void store_affinity(struct store *store, struct conversation_search *search,
                    struct conversation_affinity *of) {
    struct directory *d = store->directory;
    prepare_search(d, search);
    pthread_mutex_lock(&d->lock);
    search_files(d, search, note_affinity, of);
    pthread_mutex_unlock(&d->lock);
}

uint64_t store_changes(struct store *store) {
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    uint64_t changes = d->changes;
    pthread_mutex_unlock(&d->lock);
    return changes;
}

uint64_t store_progress(struct store *store) {
    return atomic_load(&store->directory->progress);
}

bool store_has(struct store *store, uint64_t id) {
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    bool has = find_file(d, id, false) != NULL;
    pthread_mutex_unlock(&d->lock);
    return has;
}

void store_ignore(struct store *store, uint64_t id) {
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    struct store_file *file = find_file(d, id, false);
    if (file != NULL) file->ignored = true;
    d->changes++;
    pthread_mutex_unlock(&d->lock);
}

/* ---- Writing --------------------------------------------------------------------------------- */

bool store_can_save(struct store *store) {
    pthread_mutex_lock(&store->directory->lock);
    bool free_now = store->write.state == WRITE_FREE;
    pthread_mutex_unlock(&store->directory->lock);
    return free_now;
}

void store_save(struct store *store, const struct state_head *head, char *data, size_t size) {
    pthread_mutex_lock(&store->directory->lock);
    CHECK(store->write.state == WRITE_FREE);
    store->write.state = WRITE_READY;
    store->write.head = *head;
    store->write.data = data;
    store->write.size = size;
    store->write.removed = false;
    store->directory->changes++;
    begin_work(store->directory);
    pthread_mutex_unlock(&store->directory->lock);
}

bool store_saved(struct store *store, uint64_t *id, int *code) {
    pthread_mutex_lock(&store->directory->lock);
    bool done = store->write.state == WRITE_DONE;
    if (done) {
        *id = store->write.head.id;
        *code = store->write.code;
        store->write.state = WRITE_FREE;
    }
    pthread_mutex_unlock(&store->directory->lock);
    return done;
}

int store_remove(struct store *store, uint64_t id) {
    struct directory *d = store->directory;
    int code = ERR_NOTFOUND;
    pthread_mutex_lock(&d->lock);
    if (is_writing(store, id)) {
        store->write.removed = true;
        d->changes++;
        code = 0;
    }
    if (store->read.state != READ_FREE && store->read.id == id) store->read.removed = true;
    struct store_file *file = find_file(d, id, false);
    if (file != NULL && !may_use(store, file)) file = NULL;
    bool full = d->remove_count == REMOVES_MAX;
    if (file != NULL) {
        drop_file(d, file);
        if (!full) d->removes[d->remove_count++] = id;
        if (!full) begin_work(d);
        code = 0;
    }
    pthread_mutex_unlock(&d->lock);
    if (file != NULL && full) unlink_file(d, id, false); /* seldom: better slow than unbounded */
    return code;
}

/* ---- Reading --------------------------------------------------------------------------------- */

int store_load(struct store *store, uint64_t id, const struct state_view **view) {
    int code = ERR_BUSY;
    pthread_mutex_lock(&store->directory->lock);
    if (store->read.state == READ_DONE && store->read.id != id) clear_read(store);
    if (store->read.id == id) store->read.unwanted = false;
    if (store->read.state == READ_FREE && !is_writing(store, id)) {
        store->read.id = id;
        store->read.state = READ_WANTED;
        begin_work(store->directory);
    }
    if (store->read.state == READ_DONE) {
        code = store->read.removed ? ERR_NOTFOUND : store->read.code;
        *view = &store->read.view;
        if (code != 0) clear_read(store);
    }
    pthread_mutex_unlock(&store->directory->lock);
    return code;
}

bool store_loading(struct store *store, uint64_t id) {
    pthread_mutex_lock(&store->directory->lock);
    bool reading = store->read.state == READ_WANTED || store->read.state == READ_RUNNING;
    bool loading = reading || is_writing(store, id);
    pthread_mutex_unlock(&store->directory->lock);
    return loading;
}

void store_unload(struct store *store) {
    pthread_mutex_lock(&store->directory->lock);
    if (store->read.state == READ_RUNNING)
        store->read.unwanted = true;
    else
        clear_read(store);
    pthread_mutex_unlock(&store->directory->lock);
}

/* ---- Observation ----------------------------------------------------------------------------- */

void store_stats(struct store *store, struct store_stats *out) {
    pthread_mutex_lock(&store->directory->lock);
    *out = store->directory->stats;
    pthread_mutex_unlock(&store->directory->lock);
}

int store_list(struct store *store, const struct engine_conversation_filter *filter,
               struct store_row *rows, int max) {
    const struct directory *d = store->directory;
    int count = 0;
    pthread_mutex_lock(&store->directory->lock);
    for (const struct store_file *file = d->newest; file != NULL && count < max;
         file = file->older) {
        if (!file->ours) continue;
        if (!engine_conversation_is(filter, file->head.space, file->head.id)) continue;
        rows[count] = (struct store_row){.id = file->head.id,
                                         .hint = file->head.hint,
                                         .kv = file->head.kv,
                                         .tokens = file->head.token_count,
                                         .bytes = file->bytes,
                                         .used_unix = file->used_unix};
        memcpy(rows[count++].space, file->head.space, sizeof rows->space);
    }
    pthread_mutex_unlock(&store->directory->lock);
    return count;
}
