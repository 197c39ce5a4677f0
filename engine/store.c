#include "engine/store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
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

enum { REMOVES_MAX = 64, NAME_BYTES = 32 };

/* One file of the directory, as its head tells. */
struct store_file {
    struct state_head head;
    int64_t bytes, used_unix;
    bool bad;     /* <id>.bad */
    bool ours;    /* of this model and these gates, and not bad */
    bool ignored; /* by this process */
};

enum write_state { WRITE_FREE, WRITE_READY, WRITE_RUNNING, WRITE_DONE };
enum read_state { READ_FREE, READ_WANTED, READ_RUNNING, READ_DONE };

struct store {
    struct store_options options;
    int dir, lock_file; /* descriptors */
    uint8_t key[SHA256_BYTES];
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* all below */
    pthread_cond_t work;
    bool stop;
    struct store_file *files; /* in no order */
    int file_count, file_room;
    struct store_stats stats;
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
        bool removed; /* while it was read */
    } read;
    uint64_t removes[REMOVES_MAX];
    int remove_count;
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

static int write_all(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t n = write(fd, data, size > 1 << 26 ? 1 << 26 : size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ERR_IO;
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

static int read_all(int fd, char *data, size_t size) {
    while (size > 0) {
        ssize_t n = read(fd, data, size > 1 << 26 ? 1 << 26 : size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ERR_IO; /* shorter than it was a moment ago, too */
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

/* Opens a regular file for reading, never a link, and never waits for a pipe's other end. */
static int open_regular(const struct store *store, const char *name, struct stat *stat_out) {
    int fd = openat(store->dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, stat_out) == 0 && S_ISREG(stat_out->st_mode)) return fd;
    close(fd);
    errno = EINVAL;
    return -1;
}

/* ---- The index (under the lock, or before the thread) ---------------------------------------- */

static struct store_file *find_file(struct store *store, uint64_t id, bool bad) {
    for (int i = 0; i < store->file_count; i++)
        if (store->files[i].head.id == id && store->files[i].bad == bad) return &store->files[i];
    return NULL;
}

static void drop_file(struct store *store, struct store_file *file) {
    store->stats.bytes -= file->bytes;
    store->stats.files -= file->ours;
    *file = store->files[--store->file_count];
}

static int add_file(struct store *store, const struct store_file *file) {
    if (store->file_count == store->file_room) {
        int room = store->file_room > 0 ? store->file_room * 2 : 64;
        if (store->file_count >= STORE_FILES_MAX) return ERR_LIMIT;
        struct store_file *files = mem_try_realloc(
            store->files, (size_t)store->file_room * sizeof *files, (size_t)room * sizeof *files);
        if (files == NULL) return ERR_NOMEM;
        store->files = files;
        store->file_room = room;
    }
    store->files[store->file_count++] = *file;
    store->stats.bytes += file->bytes;
    store->stats.files += file->ours;
    return 0;
}

static struct store_file *oldest_file(struct store *store) {
    struct store_file *oldest = NULL;
    for (int i = 0; i < store->file_count; i++) {
        struct store_file *file = &store->files[i];
        if (oldest == NULL || file->used_unix < oldest->used_unix) oldest = file;
    }
    return oldest;
}

/* ---- Scanning -------------------------------------------------------------------------------- */

static void put_aside(struct store *store, uint64_t id, const char *why) {
    char name[NAME_BYTES], bad[NAME_BYTES];
    name_of(id, "state", name);
    name_of(id, "bad", bad);
    log_error("state file %s refused: %s; kept as %s", name, why, bad);
    if (renameat(store->dir, name, store->dir, bad) != 0)
        log_warn("state file %s cannot be renamed: %s", name, strerror(errno));
}

/* Reads one head; what is wrong with it is in *fault. */
static int read_head(struct store *store, const char *name, uint64_t id, struct store_file *file,
                     struct fault *fault) {
    char bytes[STATE_HEAD_BYTES];
    struct stat st;
    int fd = open_regular(store, name, &st);
    if (fd < 0) return fault_set(fault, ERR_IO, name, "%s", strerror(errno));
    file->bytes = st.st_size;
    file->used_unix = st.st_mtime;
    int code = 0;
    if ((size_t)st.st_size < sizeof bytes)
        code = fault_set(fault, ERR_MALFORMED, name, "torn: shorter than its head");
    else if (read_all(fd, bytes, sizeof bytes) != 0)
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

static int scan_state(struct store *store, const char *name, uint64_t id) {
    struct store_file file = {0};
    struct fault fault = {0};
    int code = read_head(store, name, id, &file, &fault);
    if (code == ERR_IO) {
        log_warn("state file %s skipped: %s", name, fault.text);
        return 0;
    }
    if (code == ERR_MALFORMED || code == ERR_INVALID) {
        put_aside(store, id, fault.text);
        store->stats.refused++;
        file.bad = true;
    }
    file.head.id = id; /* whatever the head of a foreign version said */
    file.ours = code == 0 && state_is_ours(&file.head, &store->options.identity);
    return add_file(store, &file);
}

static int scan_bad(struct store *store, const char *name, uint64_t id) {
    struct stat st;
    struct store_file file = {.bad = true};
    if (fstatat(store->dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0) return 0;
    file.head.id = id;
    file.bytes = st.st_size;
    file.used_unix = st.st_mtime;
    return add_file(store, &file);
}

static int scan_entry(struct store *store, const char *name) {
    uint64_t id;
    if (parse_name(name, "state", &id)) return scan_state(store, name, id);
    if (parse_name(name, "bad", &id)) return scan_bad(store, name, id);
    if (name[0] == '.' && parse_name(name + 1, "tmp", &id)) unlinkat(store->dir, name, 0);
    return 0;
}

static int scan(struct store *store, struct fault *fault) {
    int fd = openat(store->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;
    int code = 0;
    if (dir == NULL) {
        if (fd >= 0) close(fd);
        return fault_set(fault, ERR_IO, "state-dir", "cannot be listed: %s", strerror(errno));
    }
    while (code == 0 && (entry = readdir(dir)) != NULL) code = scan_entry(store, entry->d_name);
    closedir(dir);
    if (code != ERR_LIMIT) return code == 0 ? 0 : fault_set(fault, code, "state-dir", "no memory");
    return fault_set(fault, code, "state-dir", "holds more than %d state files", STORE_FILES_MAX);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int open_dir(struct store *store, struct fault *fault) {
    const char *path = store->options.dir;
    struct stat st;
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return fault_set(fault, ERR_IO, "state-dir", "%.200s cannot be made: %s", path,
                         strerror(errno));
    store->dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->dir < 0 || fstat(store->dir, &st) != 0)
        return fault_set(fault, ERR_IO, "state-dir", "%.200s cannot be opened: %s", path,
                         strerror(errno));
    if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return fault_set(fault, ERR_INVALID, "state-dir",
                         "others may write to %.200s; its mode should be 0700", path);
    return 0;
}

static int take_lock(struct store *store, struct fault *fault) {
    store->lock_file = openat(store->dir, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (store->lock_file < 0)
        return fault_set(fault, ERR_IO, "state-dir", "its lock cannot be opened: %s",
                         strerror(errno));
    if (flock(store->lock_file, LOCK_EX | LOCK_NB) == 0) return 0;
    return fault_set(fault, ERR_BUSY, "state-dir", "another keepd uses %.200s", store->options.dir);
}

/* Under a name of its own first, so that a key is never half there. */
static int make_key(struct store *store, struct fault *fault) {
    int fd =
        openat(store->dir, ".key.tmp", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    CHECK(getrandom(store->key, sizeof store->key, 0) == (ssize_t)sizeof store->key);
    bool made = fd >= 0 && write_all(fd, (const char *)store->key, sizeof store->key) == 0 &&
                fsync(fd) == 0;
    if (fd >= 0) close(fd);
    if (made && renameat(store->dir, ".key.tmp", store->dir, "key") == 0 && fsync(store->dir) == 0)
        return 0;
    return fault_set(fault, ERR_IO, "state-dir", "its key cannot be written: %s", strerror(errno));
}

static int load_key(struct store *store, struct fault *fault) {
    struct stat st;
    int fd = open_regular(store, "key", &st), code = 0;
    if (fd < 0 && errno == ENOENT) return make_key(store, fault);
    if (fd < 0)
        return fault_set(fault, ERR_IO, "state-dir", "its key cannot be opened: %s",
                         strerror(errno));
    if ((st.st_mode & 077) != 0)
        code = fault_set(fault, ERR_INVALID, "state-dir",
                         "its key may be read by others; make its mode 0600");
    else if (st.st_size != (off_t)sizeof store->key ||
             read_all(fd, (char *)store->key, sizeof store->key) != 0)
        code = fault_set(fault, ERR_INVALID, "state-dir", "its key is not %zu bytes long",
                         sizeof store->key);
    close(fd);
    return code;
}

static void *store_main(void *arg);

int store_open(const struct store_options *options, struct store **out, struct fault *fault) {
    struct store *store = mem_must_alloc(1, sizeof *store);
    *out = NULL;
    store->options = *options;
    store->dir = store->lock_file = -1;
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->work, NULL);
    int code = open_dir(store, fault);
    if (code == 0) code = take_lock(store, fault);
    if (code == 0) code = load_key(store, fault);
    if (code == 0) code = scan(store, fault);
    if (code == 0 && !options->inline_io) {
        store->started = pthread_create(&store->thread, NULL, store_main, store) == 0;
        if (!store->started)
            code = fault_set(fault, ERR_NOMEM, "state-dir", "its thread cannot be started");
    }
    if (code != 0) {
        store_close(store);
        return code;
    }
    *out = store;
    return 0;
}

void store_close(struct store *store) {
    if (store == NULL) return;
    pthread_mutex_lock(&store->lock);
    store->stop = true;
    pthread_cond_signal(&store->work);
    pthread_mutex_unlock(&store->lock);
    if (store->started) pthread_join(store->thread, NULL);
    mem_free(store->write.data);
    state_view_close(&store->read.view);
    mem_free(store->read.data);
    mem_free(store->files);
    if (store->lock_file >= 0) close(store->lock_file);
    if (store->dir >= 0) close(store->dir);
    pthread_cond_destroy(&store->work);
    pthread_mutex_destroy(&store->lock);
    mem_free(store);
}

const struct state_identity *store_identity(const struct store *store) {
    return &store->options.identity;
}

void store_space_key(const struct store *store, uint8_t out[16]) {
    static const char purpose[] = "keepd space key";
    uint8_t derived[SHA256_BYTES];
    sha256_hmac(store->key, purpose, sizeof purpose, derived);
    memcpy(out, derived, 16);
}

/* ---- I/O (the store's thread; the lock is not held) ------------------------------------------ */

static void unlink_file(struct store *store, uint64_t id, bool bad) {
    char name[NAME_BYTES];
    name_of(id, bad ? "bad" : "state", name);
    if (unlinkat(store->dir, name, 0) != 0 && errno != ENOENT)
        log_warn("state file %s cannot be deleted: %s", name, strerror(errno));
}

/* Deletes files, the one used longest ago first, until `size` more bytes and one more file fit. */
static int make_space(struct store *store, int64_t size) {
    if (size > store->options.bytes) return ERR_LIMIT;
    for (;;) {
        pthread_mutex_lock(&store->lock);
        bool fits = store->stats.bytes <= store->options.bytes - size &&
                    store->file_count < STORE_FILES_MAX;
        struct store_file *oldest = fits ? NULL : oldest_file(store), gone = {0};
        if (oldest != NULL) {
            gone = *oldest;
            drop_file(store, oldest);
        }
        pthread_mutex_unlock(&store->lock);
        if (fits) return 0;
        CHECK(oldest != NULL);
        log_debug("state file of conversation=%016llx deleted reason=bytes",
                  (unsigned long long)gone.head.id);
        unlink_file(store, gone.head.id, gone.bad);
    }
}

static int write_temporary(struct store *store, const char *name, const char *data, size_t size) {
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(store->dir, name, flags, 0600);
    if (fd < 0) return ERR_IO;
    int code = write_all(fd, data, size);
    if (code == 0 && fsync(fd) != 0) code = ERR_IO;
    if (close(fd) != 0) code = ERR_IO;
    return code;
}

static int write_file(struct store *store, uint64_t id, const char *data, size_t size) {
    char name[NAME_BYTES], temporary[NAME_BYTES + 1] = ".";
    name_of(id, "state", name);
    name_of(id, "tmp", temporary + 1);
    int code = write_temporary(store, temporary, data, size);
    if (code == 0 &&
        (renameat(store->dir, temporary, store->dir, name) != 0 || fsync(store->dir) != 0))
        code = ERR_IO;
    if (code == 0) return 0;
    log_warn("state file %s cannot be written: %s", name, strerror(errno));
    unlinkat(store->dir, temporary, 0);
    return code;
}

static void run_write(struct store *store) {
    struct store_file file = {.head = store->write.head,
                              .bytes = (int64_t)store->write.size,
                              .used_unix = clock_unix_seconds(),
                              .ours = true};
    char *data = store->write.data; /* ours while RUNNING */
    size_t size = store->write.size;
    int code = make_space(store, (int64_t)size);
    if (code == ERR_LIMIT)
        log_warn("conversation=%016llx not written: its %zu bytes are more than state-bytes",
                 (unsigned long long)file.head.id, size);
    if (code == 0) {
        state_seal(data, size, store->key);
        code = write_file(store, file.head.id, data, size);
    }
    mem_free(data);
    pthread_mutex_lock(&store->lock);
    bool removed = store->write.removed;
    if (code == 0 && !removed) code = add_file(store, &file);
    store->stats.written += code == 0;
    store->stats.failed += code != 0;
    store->write.data = NULL;
    store->write.code = code;
    store->write.state = WRITE_DONE;
    pthread_mutex_unlock(&store->lock);
    if (removed || code != 0) unlink_file(store, file.head.id, false);
}

/* A whole file, and what is in it. The time of its use is kept as the file's. */
static int read_file(struct store *store, uint64_t id, char **data, struct state_view *view,
                     struct fault *fault) {
    char name[NAME_BYTES];
    struct stat st;
    name_of(id, "state", name);
    int fd = open_regular(store, name, &st), code = 0;
    if (fd < 0) return fault_set(fault, ERR_IO, name, "%s", strerror(errno));
    size_t size = (size_t)st.st_size;
    *data = mem_try_alloc(size > 0 ? size : 1, 1);
    if (*data == NULL)
        code = fault_set(fault, ERR_NOMEM, name, "no memory for its %zu bytes", size);
    else if (read_all(fd, *data, size) != 0)
        code = fault_set(fault, ERR_IO, name, "cannot be read");
    (void)futimens(fd, NULL); /* only its place in the order of deletion depends on it */
    close(fd);
    if (code == 0) code = state_check_seal(*data, size, store->key, fault);
    if (code == 0) code = state_parse(*data, size, view, fault);
    if (code != 0) return code;
    if (view->head.id == id && state_is_ours(&view->head, &store->options.identity)) return 0;
    return fault_set(fault, ERR_INVALID, name, "it belongs to another name, model or gates");
}

static bool is_refusal(int code) {
    return code == ERR_MALFORMED || code == ERR_INVALID || code == ERR_UNSUPPORTED;
}

static void refuse_file(struct store *store, uint64_t id, const struct fault *fault) {
    put_aside(store, id, fault->text);
    pthread_mutex_lock(&store->lock);
    struct store_file *file = find_file(store, id, false);
    if (file != NULL && file->ours) store->stats.files--;
    if (file != NULL) file->bad = true, file->ours = false;
    store->stats.refused++;
    pthread_mutex_unlock(&store->lock);
}

static void run_read(struct store *store) {
    uint64_t id = store->read.id;
    char *data = NULL;
    struct state_view view = {0};
    struct fault fault = {0};
    int code = read_file(store, id, &data, &view, &fault);
    if (is_refusal(code))
        refuse_file(store, id, &fault);
    else if (code != 0)
        log_warn("state file of conversation=%016llx: %s", (unsigned long long)id, fault.text);
    pthread_mutex_lock(&store->lock);
    if (code == 0 && store->read.removed) code = ERR_NOTFOUND;
    if (code != 0) {
        state_view_close(&view);
        mem_free(data);
        data = NULL;
    }
    struct store_file *file = find_file(store, id, false);
    if (file != NULL) file->used_unix = clock_unix_seconds();
    store->stats.read += code == 0;
    store->read.data = data;
    store->read.view = view;
    store->read.code = code;
    store->read.state = READ_DONE;
    pthread_mutex_unlock(&store->lock);
}

/* One thing to do, what somebody waits for first; false when there is nothing. The lock is held,
 * and released meanwhile. */
static bool run_one(struct store *store) {
    if (store->remove_count > 0) {
        uint64_t id = store->removes[--store->remove_count];
        pthread_mutex_unlock(&store->lock);
        unlink_file(store, id, false);
        (void)fsync(store->dir);
    } else if (store->read.state == READ_WANTED) {
        store->read.state = READ_RUNNING;
        pthread_mutex_unlock(&store->lock);
        run_read(store);
    } else if (store->write.state == WRITE_READY) {
        store->write.state = WRITE_RUNNING;
        pthread_mutex_unlock(&store->lock);
        run_write(store);
    } else {
        return false;
    }
    if (store->options.done != NULL) store->options.done(store->options.arg);
    pthread_mutex_lock(&store->lock);
    return true;
}

/* What was handed over is written before the end: it is whole, and somebody may count on it. */
static void *store_main(void *arg) {
    struct store *store = arg;
    pthread_mutex_lock(&store->lock);
    while (run_one(store) || !store->stop)
        if (store->remove_count == 0 && store->read.state != READ_WANTED &&
            store->write.state != WRITE_READY && !store->stop)
            pthread_cond_wait(&store->work, &store->lock);
    pthread_mutex_unlock(&store->lock);
    return NULL;
}

/* Lets the thread begin, or does the work here. The lock is held. */
static void begin_work(struct store *store) {
    if (!store->options.inline_io)
        pthread_cond_signal(&store->work);
    else
        while (run_one(store)) continue;
}

/* ---- Finding --------------------------------------------------------------------------------- */

/* hashes[i] is that of the first i tokens. */
static uint64_t *prefix_hashes(const int32_t *tokens, int32_t count) {
    uint64_t *hashes = mem_try_alloc((size_t)count + 1, sizeof *hashes);
    if (hashes == NULL) return NULL;
    hashes[0] = CONVERSATION_HASH;
    for (int32_t i = 0; i < count; i++) hashes[i + 1] = conversation_hash(hashes[i], &tokens[i], 1);
    return hashes;
}

/* Tokens of a file that the query would surely use; 0 = it does not serve. */
static int32_t usable_tokens(const struct state_head *head, const struct conversation_query *query,
                             const uint64_t *hashes) {
    int32_t most = query->prompt_count - 1; /* one is left to compute */
    if (head->prompt_end > most || hashes[head->prompt_end] != head->prompt_hash) return 0;
    if (head->token_count > most || hashes[head->token_count] != head->token_hash)
        return head->prompt_end;
    return head->token_count;
}

static bool may_serve(const struct store_file *file, const struct conversation_query *query) {
    return file->ours && !file->ignored &&
           memcmp(file->head.space, query->space, sizeof file->head.space) == 0 &&
           kv_params_equal(&file->head.kv, query->kv);
}

static bool is_writing(const struct store *store, uint64_t id) {
    return (store->write.state == WRITE_READY || store->write.state == WRITE_RUNNING) &&
           store->write.head.id == id;
}

/* A search under way. */
struct search {
    const struct conversation_query *query;
    uint64_t *hashes; /* of the prompt's prefixes, once they are needed */
    uint64_t id;      /* the best so far */
    int32_t usable;
};

static void consider(struct search *search, const struct store_file *file) {
    const struct conversation_query *query = search->query;
    if (!may_serve(file, query)) return;
    if (search->hashes == NULL) search->hashes = prefix_hashes(query->prompt, query->prompt_count);
    if (search->hashes == NULL) return; /* no memory: it is as if there was none */
    int32_t usable = usable_tokens(&file->head, query, search->hashes);
    bool hinted = query->hint != 0 && file->head.hint == query->hint;
    bool equal = search->id != 0 && usable == search->usable;
    if (usable <= search->usable && !(equal && hinted)) return;
    search->id = file->head.id;
    search->usable = usable;
}

uint64_t store_find(struct store *store, const struct conversation_query *query, int32_t least) {
    struct search search = {.query = query, .usable = least};
    pthread_mutex_lock(&store->lock);
    for (int i = 0; i < store->file_count; i++) consider(&search, &store->files[i]);
    /* What is being written is as good as there: store_load waits for it. */
    struct store_file written = {.head = store->write.head, .ours = true};
    if (is_writing(store, written.head.id) && !store->write.removed) consider(&search, &written);
    pthread_mutex_unlock(&store->lock);
    mem_free(search.hashes);
    return search.id;
}

bool store_has(struct store *store, uint64_t id) {
    pthread_mutex_lock(&store->lock);
    bool has = find_file(store, id, false) != NULL;
    pthread_mutex_unlock(&store->lock);
    return has;
}

void store_ignore(struct store *store, uint64_t id) {
    pthread_mutex_lock(&store->lock);
    struct store_file *file = find_file(store, id, false);
    if (file != NULL) file->ignored = true;
    pthread_mutex_unlock(&store->lock);
}

/* ---- Writing --------------------------------------------------------------------------------- */

bool store_can_save(struct store *store) {
    pthread_mutex_lock(&store->lock);
    bool free_now = store->write.state == WRITE_FREE;
    pthread_mutex_unlock(&store->lock);
    return free_now;
}

void store_save(struct store *store, const struct state_head *head, char *data, size_t size) {
    pthread_mutex_lock(&store->lock);
    CHECK(store->write.state == WRITE_FREE);
    store->write.state = WRITE_READY;
    store->write.head = *head;
    store->write.data = data;
    store->write.size = size;
    store->write.removed = false;
    begin_work(store);
    pthread_mutex_unlock(&store->lock);
}

bool store_saved(struct store *store, uint64_t *id, int *code) {
    pthread_mutex_lock(&store->lock);
    bool done = store->write.state == WRITE_DONE;
    if (done) {
        *id = store->write.head.id;
        *code = store->write.code;
        store->write.state = WRITE_FREE;
    }
    pthread_mutex_unlock(&store->lock);
    return done;
}

int store_remove(struct store *store, uint64_t id) {
    int code = ERR_NOTFOUND;
    pthread_mutex_lock(&store->lock);
    if (is_writing(store, id)) {
        store->write.removed = true;
        code = 0;
    }
    if (store->read.state != READ_FREE && store->read.id == id) store->read.removed = true;
    struct store_file *file = find_file(store, id, false);
    bool full = store->remove_count == REMOVES_MAX;
    if (file != NULL) {
        drop_file(store, file);
        if (!full) store->removes[store->remove_count++] = id;
        if (!full) begin_work(store);
        code = 0;
    }
    pthread_mutex_unlock(&store->lock);
    if (file != NULL && full)
        unlink_file(store, id, false); /* seldom: better slow than unbounded */
    return code;
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* The lock is held. */
static void clear_read(struct store *store) {
    state_view_close(&store->read.view);
    mem_free(store->read.data);
    store->read.data = NULL;
    store->read.removed = false;
    store->read.state = READ_FREE;
}

int store_load(struct store *store, uint64_t id, const struct state_view **view) {
    int code = ERR_BUSY;
    pthread_mutex_lock(&store->lock);
    if (store->read.state == READ_DONE && store->read.id != id) clear_read(store);
    if (store->read.state == READ_FREE && !is_writing(store, id)) {
        store->read.id = id;
        store->read.state = READ_WANTED;
        begin_work(store);
    }
    if (store->read.state == READ_DONE) {
        code = store->read.removed ? ERR_NOTFOUND : store->read.code;
        *view = &store->read.view;
        if (code != 0) clear_read(store);
    }
    pthread_mutex_unlock(&store->lock);
    return code;
}

void store_unload(struct store *store) {
    pthread_mutex_lock(&store->lock);
    if (store->read.state == READ_DONE) clear_read(store);
    pthread_mutex_unlock(&store->lock);
}

/* ---- Observation ----------------------------------------------------------------------------- */

void store_stats(struct store *store, struct store_stats *out) {
    pthread_mutex_lock(&store->lock);
    *out = store->stats;
    pthread_mutex_unlock(&store->lock);
}

int store_list(struct store *store, struct store_row *rows, int max) {
    int count = 0;
    pthread_mutex_lock(&store->lock);
    for (int i = 0; i < store->file_count && count < max; i++) {
        const struct store_file *file = &store->files[i];
        if (!file->ours) continue;
        rows[count] = (struct store_row){.id = file->head.id,
                                         .hint = file->head.hint,
                                         .kv = file->head.kv,
                                         .tokens = file->head.token_count,
                                         .bytes = file->bytes,
                                         .used_unix = file->used_unix};
        memcpy(rows[count++].space, file->head.space, sizeof rows->space);
    }
    pthread_mutex_unlock(&store->lock);
    return count;
}
