/* The stores of a state directory and the thread that reads and writes for them, so that the engine
 * thread does not wait for the disk. One lock guards the index and each store's pending read and
 * write. Only the scan at the start, and deletions when too many wait, run on a caller's thread. */
#include "engine/disk/store.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/disk/store_int.h"

/* ---- Opening ---- */

static void *directory_main(void *arg);

static int open_directory(struct directory *d, struct fault *fault) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->work, &monotonic);
    pthread_cond_init(&d->settled, NULL);
    pthread_condattr_destroy(&monotonic);
    int rc = state_dir_open(&d->dir, d->options.dir, fault);
    d->dir.state_bytes = d->options.state_bytes;
    if (rc == 0) rc = store_scan(d, fault);
    if (rc == 0) rc = store_make_space(d, 0, 0); /* the bound may be lower than at the last start */
    if (rc == 0) store_expire(d);
    if (rc != 0 || d->options.inline_io) return rc;
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
    store_index_close(&d->index);
    state_dir_close(&d->dir);
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
    int rc = open_directory(d, fault);
    if (rc == 0)
        *out = add_store(d, options->done, options->arg);
    else
        close_directory(d);
    return rc;
}

struct store *store_join(struct store *with, void (*done)(void *arg), void *arg) {
    return add_store(with->directory, done, arg);
}

/* Returns whether the thread has no work for the store and is not calling its `done`. The lock is
 * held. */
static bool is_settled(const struct store *store) {
    bool writes = store->write.state == WRITE_READY || store->write.state == WRITE_RUNNING;
    bool reads = store->read.state == READ_WANTED || store->read.state == READ_RUNNING;
    return !writes && !reads && !store->directory->waking && store->directory->serving != store;
}

/* The lock is held. */
static void detach_store(struct directory *d, const struct store *store) {
    int at = 0;
    for (struct store_file *file = d->index.oldest; file; file = file->newer)
        if (file->owner == store) file->owner = NULL;
    d->index.changes++;
    while (d->stores[at] != store) at++;
    d->stores[at] = d->stores[--d->store_count];
}

void store_close(struct store *store) {
    if (!store) return;
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    while (!is_settled(store)) pthread_cond_wait(&d->settled, &d->lock);
    detach_store(d, store);
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

void store_derive_space_key(const struct state_dir *dir, uint8_t out[16]) {
    static const char purpose[] = "keepd space key";
    uint8_t derived[SHA256_BYTES];
    sha256_hmac(dir->key, purpose, sizeof purpose, derived);
    memcpy(out, derived, 16);
}

void store_space_key(const struct store *store, uint8_t out[16]) {
    store_derive_space_key(&store->directory->dir, out);
}

/* ---- I/O (the store's thread; the lock is not held) ---- */

static void run_write(struct store *store) {
    struct directory *d = store->directory;
    struct store_file file = {.head = store->write.head,
                              .bytes = (int64_t)store->write.size,
                              .used_unix = clock_unix_seconds(),
                              .ours = true,
                              .owner = store};
    char *data = store->write.data; /* owned by this thread while RUNNING */
    size_t size = store->write.size;
    int rc = store_make_space(d, 1, (int64_t)size);
    if (rc == ERR_LIMIT)
        log_warn("conversation=%016llx not written: its %zu bytes are more than state-bytes",
                 (unsigned long long)file.head.id, size);
    if (rc == 0) rc = state_dir_write(&d->dir, file.head.id, data, size);
    bool written = rc == 0; /* if not, a file with this name is an earlier copy, and good */
    mem_free(data);
    struct state_dir_file on_disk;
    if (rc == 0 && state_dir_stat(&d->dir, file.head.id, false, &on_disk))
        file.used_ns = file.own_ns = on_disk.used_ns;
    pthread_mutex_lock(&d->lock);
    bool removed = store->write.removed;
    if (rc == 0 && !removed) rc = store_note_file(d, &file);
    d->stats.written += rc == 0;
    d->stats.failed += rc != 0;
    d->index.changes++; /* the conversation is a file now, or will not be one */
    store->write.data = NULL;
    store->write.rc = rc;
    store->write.state = WRITE_DONE;
    pthread_mutex_unlock(&d->lock);
    /* A file that is not in the index stays beside other daemons: the next listing finds it. */
    bool lost = written && rc != 0 && !store_is_shared(d);
    if (removed || lost) state_dir_delete(&d->dir, file.head.id, false);
}

/* Reservations rely on the most members that the policy keeps, so a file with more is refused.
 * Entries need no check: a request that continues with more entries reserves more pages. */
static int check_member_count(const struct state_view *view, struct fault *fault) {
    const struct kv_params *kv = &view->head.kv;
    int32_t most = kern_members_max(&kv->rule, kv->budget);
    if (view->report.members <= most) return 0;
    return fault_set(fault, ERR_MALFORMED, "state-dir",
                     "%d members in a stream, its policy keeps %d", view->report.members, most);
}

/* Reads a whole file and checks that it is of this model and that the backend can import it. */
static int read_checked_state(struct directory *d, uint64_t id, char **data,
                              struct state_view *view, struct state_dir_file *taken,
                              struct fault *fault) {
    int rc = state_dir_read(&d->dir, id, data, view, taken, fault);
    if (rc != 0) return rc;
    if (!state_is_ours(&view->head, &d->options.identity))
        return fault_set(fault, ERR_INVALID, "state-dir", "it belongs to another model or gates");
    if (d->options.check) rc = d->options.check(d->options.backend, view, fault);
    return rc == 0 ? check_member_count(view, fault) : rc;
}

static void refuse_file(struct directory *d, uint64_t id, const struct fault *fault) {
    bool aside = state_dir_put_aside(&d->dir, id, fault->text);
    pthread_mutex_lock(&d->lock);
    if (aside) store_forget_bad(d, id);
    struct store_file *file = store_index_find(&d->index, id, false);
    bool deleted = !file; /* deleted while it was read: the renamed file is deleted, too */
    if (!deleted) store_index_refuse(&d->index, file, aside);
    d->stats.refused++;
    pthread_mutex_unlock(&d->lock);
    if (deleted && aside) state_dir_delete(&d->dir, id, true);
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
    struct state_dir_file taken = {0};
    struct fault fault = {0};
    int rc = read_checked_state(d, id, &data, &view, &taken, &fault);
    if (rc == ERR_MALFORMED || rc == ERR_INVALID)
        refuse_file(d, id, &fault);
    else if (rc != 0)
        log_warn("state file of conversation=%016llx: %s", (unsigned long long)id, fault.text);
    /* Otherwise the file is good, or could not be read this time, and stays in place. */
    if (rc == ERR_UNSUPPORTED || rc == ERR_LIMIT) store_ignore(store, id);
    pthread_mutex_lock(&d->lock);
    if (rc == 0 && store->read.removed) rc = ERR_NOTFOUND;
    if (rc != 0) {
        state_view_close(&view);
        mem_free(data);
        data = NULL;
    }
    struct store_file *file = store_index_find(&d->index, id, false);
    if (file && rc == ERR_NOTFOUND)
        store_index_drop(&d->index, file); /* deleted from outside */
    else if (file)
        store_index_touch(&d->index, file, clock_unix_seconds(), taken.used_ns);
    if (rc == 0 && file) file->own_ns = taken.used_ns;
    d->stats.read += rc == 0;
    store->read.data = data;
    store->read.view = view;
    store->read.rc = rc;
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

/* Returns the next store that wants this work; stores take turns. The lock is held. */
static struct store *next_store(struct directory *d, bool (*wants)(const struct store *)) {
    for (int i = 0; i < d->store_count; i++) {
        struct store *store = d->stores[(d->turn + i) % d->store_count];
        if (!wants(store)) continue;
        d->turn = (d->turn + i + 1) % d->store_count;
        return store;
    }
    return NULL;
}

/* Runs one read or write for the store. The lock is held; it is released during the work. */
static void run_unlocked(struct store *store, void (*run)(struct store *)) {
    struct directory *d = store->directory;
    d->serving = store;
    pthread_mutex_unlock(&d->lock);
    run(store);
    atomic_fetch_add(&d->dir.progress, 1);
    if (store->done) store->done(store->arg);
    pthread_mutex_lock(&d->lock);
    d->serving = NULL;
    pthread_cond_broadcast(&d->settled);
}

/* Deletes a file; one that a newer turn replaced stays if another daemon continues it, too. */
static void run_remove(struct directory *d, const struct store_removal *removal) {
    bool stays = removal->replaced && store_is_shared(d) &&
                 state_dir_taken(&d->dir, removal->id, removal->own_ns);
    if (stays) return;
    state_dir_delete(&d->dir, removal->id, false);
    state_dir_sync(&d->dir);
}

/* Sets a file's time of last use. */
static void run_touch(struct directory *d, uint64_t id) {
    struct state_dir_file on_disk;
    if (!state_dir_touch(&d->dir, id, &on_disk)) return;
    pthread_mutex_lock(&d->lock);
    struct store_file *file = store_index_find(&d->index, id, false);
    if (file) file->used_ns = file->own_ns = on_disk.used_ns;
    pthread_mutex_unlock(&d->lock);
}

static void run_adoption(struct directory *d, struct store_adoption *adoption) {
    const struct state_head *head = adoption->head;
    struct store_file file = {.head = *head,
                              .bytes = (int64_t)head->file_size,
                              .used_unix = clock_unix_seconds(),
                              .ours = true};
    struct fault *fault = &adoption->fault;
    struct state_dir_file on_disk;
    if (store_make_space(d, 1, file.bytes) != 0)
        fault_set(fault, ERR_LIMIT, "state", "longer than the whole directory may be");
    else
        (void)state_dir_adopt(&d->dir, adoption->number, head->id, fault);
    if (fault->code == 0 && state_dir_stat(&d->dir, head->id, false, &on_disk))
        file.used_ns = on_disk.used_ns;
    pthread_mutex_lock(&d->lock);
    if (fault->code == 0 && store_note_file(d, &file) != 0)
        fault_set(fault, ERR_NOMEM, "state", "no memory");
    adoption->done = true;
    pthread_cond_broadcast(&d->settled);
    pthread_mutex_unlock(&d->lock);
}

/* Wakes every replica, because jobs may wait for the listing. The list of stores is copied under
 * the lock; while `waking` is set, no store is closed. */
static void wake_stores(struct directory *d) {
    struct store *stores[STORES_MAX];
    pthread_mutex_lock(&d->lock);
    int count = d->store_count;
    memcpy(stores, d->stores, sizeof stores);
    d->waking = true;
    pthread_mutex_unlock(&d->lock);
    for (int i = 0; i < count; i++)
        if (stores[i]->done) stores[i]->done(stores[i]->arg);
    pthread_mutex_lock(&d->lock);
    d->waking = false;
    pthread_cond_broadcast(&d->settled);
    pthread_mutex_unlock(&d->lock);
}

/* Runs one task: deletions and touches first, then listings and reads, because jobs wait for them,
 * then writes. Returns false when there is none. The lock is held, and released during the work. */
static bool run_one(struct directory *d) {
    struct store *store;
    if (d->remove_count > 0) {
        struct store_removal removal = d->removes[d->remove_count - 1]; /* stays until it is done */
        pthread_mutex_unlock(&d->lock);
        run_remove(d, &removal);
        pthread_mutex_lock(&d->lock);
        int at = 0; /* others may have been added meanwhile */
        while (d->removes[at].id != removal.id) at++;
        d->removes[at] = d->removes[--d->remove_count];
    } else if (d->touch_count > 0) {
        uint64_t id = d->touches[--d->touch_count];
        pthread_mutex_unlock(&d->lock);
        run_touch(d, id);
        pthread_mutex_lock(&d->lock);
    } else if (d->adoptions) {
        struct store_adoption *adoption = d->adoptions;
        d->adoptions = adoption->next;
        pthread_mutex_unlock(&d->lock);
        run_adoption(d, adoption);
        wake_stores(d); /* a job may wait for just this conversation */
        pthread_mutex_lock(&d->lock);
    } else if (d->list_wanted) {
        d->list_wanted = false;
        pthread_mutex_unlock(&d->lock);
        store_refresh(d);
        wake_stores(d);
        pthread_mutex_lock(&d->lock);
    } else if ((store = next_store(d, wants_read)) != NULL) {
        store->read.state = READ_RUNNING;
        run_unlocked(store, run_read);
    } else if ((store = next_store(d, wants_write)) != NULL) {
        store->write.state = WRITE_RUNNING;
        run_unlocked(store, run_write);
    } else {
        return false;
    }
    return true;
}

/* The directory's thread. It ends only when all work is done: a conversation that was handed over
 * is always written. */
static void *directory_main(void *arg) {
    struct directory *d = arg;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        if (store_renew_due(d)) {
            pthread_mutex_unlock(&d->lock);
            store_renew(d);
            pthread_mutex_lock(&d->lock);
        }
        if (run_one(d)) continue;
        if (d->stop) break;
        struct timespec next = store_renewal(d);
        pthread_cond_timedwait(&d->work, &d->lock, &next);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Wakes the thread, or does the work here with inline_io. The lock is held. */
static void begin_work(struct directory *d) {
    if (!d->options.inline_io)
        pthread_cond_signal(&d->work);
    else
        while (run_one(d)) continue;
}

void store_adopt(struct directory *d, struct store_adoption *adoption) {
    pthread_mutex_lock(&d->lock);
    adoption->next = d->adoptions;
    d->adoptions = adoption;
    begin_work(d);
    while (!adoption->done) pthread_cond_wait(&d->settled, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

/* ---- Finding ---- */

/* A file that belongs to a store may be used by that store only. */
static bool may_use(const struct store *store, const struct store_file *file) {
    return !file->owner || file->owner == store;
}

static bool is_writing(const struct store *store, uint64_t id) {
    return (store->write.state == WRITE_READY || store->write.state == WRITE_RUNNING) &&
           store->write.head.id == id;
}

typedef void note_file(void *to, const struct store_file *file, int32_t usable, bool hinted);

static void consider(struct conversation_search *search, const struct store_file *file,
                     note_file *note, void *to) {
    const struct state_head *head = &file->head;
    const struct conversation_key key = {.space = head->space,
                                         .kv = &head->kv,
                                         .prompt_end = head->prompt_end,
                                         .token_count = head->token_count,
                                         .prompt_hash = head->prompt_hash,
                                         .token_hash = head->token_hash};
    int32_t usable = file->ours && !file->ignored ? conversation_usable(search, &key) : 0;
    uint64_t hint = search->query->hint;
    if (usable > 0) note(to, file, usable, hint != 0 && head->hint == hint);
}

/* Computes the hashes of the prompt before the lock is taken, because a long prompt takes time;
 * skipped when there are no files. */
static void prepare_search(struct directory *d, struct conversation_search *search) {
    pthread_mutex_lock(&d->lock);
    bool any = d->index.count > 0;
    pthread_mutex_unlock(&d->lock);
    if (any) (void)conversation_search_hashes(search);
}

/* Notes the files that serve the search: those whose prompt is a prefix of the query's, found by
 * the index, and those that are being written. The lock is held. */
static void search_files(struct directory *d, struct conversation_search *search, note_file *note,
                         void *to) {
    const struct conversation_query *query = search->query;
    const uint64_t *hashes = d->index.count > 0 ? conversation_search_hashes(search) : NULL;
    for (int32_t n = 1; hashes && n < query->prompt_count; n++)
        for (const struct store_file *file =
                 store_index_of_prompt(&d->index, query->space, hashes[n]);
             file; file = file->next_of_prompt)
            if (file->head.prompt_end == n) consider(search, file, note, to);
    for (int i = 0; i < d->store_count; i++) {
        const struct store *store = d->stores[i]; /* store_load waits for what it writes */
        bool written = is_writing(store, store->write.head.id) && !store->write.removed;
        const struct store_file file = {.head = store->write.head, .ours = written, .owner = store};
        consider(search, &file, note, to);
    }
}

/* The best file found so far for one store. */
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

bool store_fresh(struct store *store, int64_t since_ns) {
    struct directory *d = store->directory;
    if (d->options.inline_io) store_renew(d);
    pthread_mutex_lock(&d->lock);
    if (d->shared && d->listed_ns < since_ns) {
        d->list_wanted = true;
        begin_work(d);
    }
    bool fresh = !d->shared || d->listed_ns >= since_ns;
    pthread_mutex_unlock(&d->lock);
    return fresh;
}

uint64_t store_find(struct store *store, const struct conversation_query *query, int32_t least) {
    struct directory *d = store->directory;
    struct conversation_search search = {.query = query};
    struct found found = {.store = store, .usable = least};
    prepare_search(d, &search);
    pthread_mutex_lock(&d->lock);
    search_files(d, &search, note_best, &found);
    struct store_file *file = found.id != 0 ? store_index_find(&d->index, found.id, false) : NULL;
    if (file && file->owner != store) {
        file->owner = store;
        d->index.changes++;
    }
    pthread_mutex_unlock(&d->lock);
    conversation_search_close(&search);
    return found.id;
}

static void note_affinity(void *to, const struct store_file *file, int32_t usable, bool hinted) {
    struct conversation_affinity *of = to;
    if (file->owner) conversation_affinity_note(&of[file->owner->index], usable, hinted);
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
    uint64_t changes = d->index.changes;
    pthread_mutex_unlock(&d->lock);
    return changes;
}

uint64_t store_progress(struct store *store) {
    return atomic_load(&store->directory->dir.progress);
}

bool store_has(struct store *store, uint64_t id) {
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    bool has = store_index_find(&d->index, id, false) != NULL;
    pthread_mutex_unlock(&d->lock);
    return has;
}

bool store_may_return(struct store *store, uint64_t id, int64_t size) {
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    bool gone = !d->shared && !store_index_find(&d->index, id, false);
    bool fits = d->index.bytes + d->unfinished <= d->options.bytes - size;
    pthread_mutex_unlock(&d->lock);
    return gone && fits;
}

void store_ignore(struct store *store, uint64_t id) {
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    struct store_file *file = store_index_find(&d->index, id, false);
    if (file) file->ignored = true;
    d->index.changes++;
    pthread_mutex_unlock(&d->lock);
}

void store_touch(struct store *store, uint64_t id) {
    struct directory *d = store->directory;
    pthread_mutex_lock(&d->lock);
    struct store_file *file = store_index_find(&d->index, id, false);
    bool full = d->touch_count == TOUCHES_MAX, wanted = file != NULL;
    for (int i = 0; i < d->touch_count; i++) wanted = wanted && d->touches[i] != id;
    if (file) store_index_touch(&d->index, file, clock_unix_seconds(), 0);
    if (wanted && !full) {
        d->touches[d->touch_count++] = id;
        begin_work(d);
    }
    pthread_mutex_unlock(&d->lock);
    if (wanted && full) run_touch(d, id); /* rare: slow rather than unbounded */
}

/* ---- Writing ---- */

bool store_can_save(struct store *store) {
    pthread_mutex_lock(&store->directory->lock);
    bool free_now = store->write.state == WRITE_FREE;
    pthread_mutex_unlock(&store->directory->lock);
    return free_now;
}

void store_save(struct store *store, const struct state_head *head, char *data, size_t size) {
    pthread_mutex_lock(&store->directory->lock);
    CHECK(store->write.state == WRITE_FREE && head->id != 0 && data && head->file_size == size);
    store->write.state = WRITE_READY;
    store->write.head = *head;
    store->write.data = data;
    store->write.size = size;
    store->write.removed = false;
    store->directory->index.changes++;
    begin_work(store->directory);
    pthread_mutex_unlock(&store->directory->lock);
}

bool store_saved(struct store *store, uint64_t *id, int *rc) {
    pthread_mutex_lock(&store->directory->lock);
    bool done = store->write.state == WRITE_DONE;
    if (done) {
        *id = store->write.head.id;
        *rc = store->write.rc;
        store->write.state = WRITE_FREE;
    }
    pthread_mutex_unlock(&store->directory->lock);
    return done;
}

static int remove_file(struct store *store, uint64_t id, bool replaced) {
    struct directory *d = store->directory;
    int rc = ERR_NOTFOUND;
    pthread_mutex_lock(&d->lock);
    if (is_writing(store, id)) {
        store->write.removed = true;
        d->index.changes++;
        rc = 0;
    }
    if (store->read.state != READ_FREE && store->read.id == id) store->read.removed = true;
    struct store_file *file = store_index_find(&d->index, id, false);
    if (file && !may_use(store, file)) file = NULL;
    bool full = d->remove_count == REMOVES_MAX;
    if (file) {
        const struct store_removal removal = {id, replaced, file->own_ns};
        store_index_drop(&d->index, file);
        if (!full) d->removes[d->remove_count++] = removal;
        if (!full) begin_work(d);
        rc = 0;
    }
    pthread_mutex_unlock(&d->lock);
    if (file && full) state_dir_delete(&d->dir, id, false); /* rare: slow rather than unbounded */
    return rc;
}

int store_remove(struct store *store, uint64_t id) {
    return remove_file(store, id, false);
}

void store_remove_replaced(struct store *store, uint64_t id) {
    (void)remove_file(store, id, true);
}

/* ---- Reading ---- */

int store_load(struct store *store, uint64_t id, const struct state_view **view) {
    int rc = ERR_BUSY;
    pthread_mutex_lock(&store->directory->lock);
    if (store->read.state == READ_DONE && store->read.id != id) clear_read(store);
    if (store->read.id == id) store->read.unwanted = false;
    if (store->read.state == READ_FREE && !is_writing(store, id)) {
        store->read.id = id;
        store->read.state = READ_WANTED;
        begin_work(store->directory);
    }
    if (store->read.state == READ_DONE) {
        rc = store->read.removed ? ERR_NOTFOUND : store->read.rc;
        *view = &store->read.view;
        if (rc != 0) clear_read(store);
    }
    pthread_mutex_unlock(&store->directory->lock);
    return rc;
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

/* ---- Observation ---- */

void store_stats(struct store *store, struct store_stats *out) {
    const struct directory *d = store->directory;
    pthread_mutex_lock(&store->directory->lock);
    *out = d->stats;
    out->files = d->index.ours;
    out->bytes = d->index.bytes;
    pthread_mutex_unlock(&store->directory->lock);
}

int store_list(struct store *store, const struct engine_conversation_filter *filter,
               struct store_row *rows, int max) {
    const struct directory *d = store->directory;
    int count = 0;
    pthread_mutex_lock(&store->directory->lock);
    for (const struct store_file *file = d->index.newest; file && count < max; file = file->older) {
        if (!file->ours) continue;
        if (!engine_conversation_is(filter, file->head.space, file->head.id)) continue;
        rows[count] = (struct store_row){.id = file->head.id,
                                         .hint = file->head.hint,
                                         .kv = file->head.kv,
                                         .tokens = file->head.token_count,
                                         .ttl = file->head.ttl,
                                         .bytes = file->bytes,
                                         .used_unix = file->used_unix};
        memcpy(rows[count++].space, file->head.space, sizeof rows->space);
    }
    pthread_mutex_unlock(&store->directory->lock);
    return count;
}
