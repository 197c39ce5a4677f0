/* The files that a state directory has: the index is built from the files' heads at the start, and
 * brought up to date when other daemons use the directory, too. All of this runs on the directory's
 * thread, except the scan at the start. Everything here may be done by several daemons at once:
 * each deletes what has gone, or the same files for room. */
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/disk/store_int.h"

#define SECOND_NS 1000000000

/* ---- Scanning ---- */

void store_forget_bad(struct directory *d, uint64_t id) {
    struct store_file *before = store_index_find(&d->index, id, true);
    if (before) store_index_drop(&d->index, before);
}

int store_note_file(struct directory *d, const struct store_file *file) {
    struct store_file *before = store_index_find(&d->index, file->head.id, file->bad);
    struct store_file copy = *file;
    if (before && !copy.owner) copy.owner = before->owner;
    if (before) store_index_drop(&d->index, before);
    copy.seen = d->listing;
    return store_index_add(&d->index, &copy);
}

static int note_locked(struct directory *d, const struct store_file *file) {
    pthread_mutex_lock(&d->lock);
    int rc = store_note_file(d, file);
    pthread_mutex_unlock(&d->lock);
    return rc;
}

static int scan_state(struct directory *d, uint64_t id) {
    struct store_file file = {0};
    struct state_dir_file on_disk = {0};
    struct fault fault = {0};
    int rc = state_dir_read_head(&d->dir, id, &on_disk, &file.head, &fault);
    if (rc == ERR_IO) { /* deleted meanwhile, or not a file */
        log_debug("state file %s skipped: %s", fault.field, fault.text);
        return 0;
    }
    if (rc == ERR_MALFORMED || rc == ERR_INVALID) {
        file.bad = state_dir_put_aside(&d->dir, id, fault.text);
        pthread_mutex_lock(&d->lock);
        d->stats.refused++;
        if (file.bad) store_forget_bad(d, id);
        pthread_mutex_unlock(&d->lock);
    }
    file.bytes = on_disk.bytes;
    file.used_unix = on_disk.used_unix;
    file.used_ns = on_disk.used_ns;
    file.head.id = id; /* the head of another version may differ */
    file.ours = rc == 0 && state_is_ours(&file.head, &d->options.identity);
    return note_locked(d, &file);
}

static int scan_bad(struct directory *d, uint64_t id) {
    struct state_dir_file on_disk;
    if (!state_dir_stat(&d->dir, id, true, &on_disk)) return 0;
    return note_locked(
        d, &(struct store_file){
               .head.id = id, .bytes = on_disk.bytes, .used_unix = on_disk.used_unix, .bad = true});
}

/* Reads the head of a file that is not known yet. */
static int scan_file(void *arg, uint64_t id, bool bad) {
    struct directory *d = arg;
    pthread_mutex_lock(&d->lock);
    struct store_file *file = store_index_find(&d->index, id, bad);
    if (file) file->seen = d->listing;
    bool known = file != NULL;
    for (int i = 0; i < d->remove_count; i++) known = known || d->removes[i].id == id;
    pthread_mutex_unlock(&d->lock);
    if (known) return 0;
    return bad ? scan_bad(d, id) : scan_state(d, id);
}

int store_scan(struct directory *d, struct fault *fault) {
    d->listing++;
    d->shared = d->dir.lease.count > 0;
    d->renewed_ns = clock_ns();
    int rc = state_dir_list(&d->dir, scan_file, d, &d->unfinished, fault);
    if (rc == 0) rc = store_index_sort(&d->index);
    if (rc == 0 || rc == ERR_IO) return rc;
    if (rc != ERR_LIMIT) return fault_set(fault, rc, "state-dir", "no memory");
    return fault_set(fault, rc, "state-dir", "holds more than %d state files", STORE_FILES_MAX);
}

/* ---- Beside other daemons ---- */

bool store_is_shared(struct directory *d) {
    pthread_mutex_lock(&d->lock);
    bool shared = d->shared;
    pthread_mutex_unlock(&d->lock);
    return shared;
}

static void list_again(struct directory *d, int64_t changed_ns) {
    struct fault fault = {0};
    int64_t unfinished;
    pthread_mutex_lock(&d->lock);
    d->listing++;
    uint64_t changes = d->index.changes;
    pthread_mutex_unlock(&d->lock);
    int rc = state_dir_list(&d->dir, scan_file, d, &unfinished, &fault);
    if (rc != 0) {
        log_warn("the state directory was not listed: %s",
                 rc == ERR_IO ? fault.text : err_text(rc));
        return; /* an incomplete listing proves nothing about what it does not show */
    }
    /* A change within the same tick of the file system's clock would not be seen. */
    bool settled = changed_ns / SECOND_NS < d->dir.lease.now_unix - 1;
    d->listed_at_ns = settled ? changed_ns : 0;
    pthread_mutex_lock(&d->lock);
    d->unfinished = unfinished;
    for (struct store_file *next, *file = d->index.oldest; file; file = next) {
        next = file->newer;
        if (file->seen != d->listing) store_index_drop(&d->index, file);
    }
    /* New files came in the order of the listing. Without memory for it they stay the newest. */
    if (d->index.changes != changes) (void)store_index_sort(&d->index);
    pthread_mutex_unlock(&d->lock);
}

static void refresh_index(struct directory *d) {
    int64_t begun_ns = clock_ns(), changed_ns = state_dir_changed_ns(&d->dir);
    if (changed_ns == 0 || changed_ns != d->listed_at_ns) list_again(d, changed_ns);
    atomic_fetch_add(&d->dir.progress, 1);
    pthread_mutex_lock(&d->lock);
    d->listed_ns = begun_ns;
    pthread_mutex_unlock(&d->lock);
}

bool store_renew_due(const struct directory *d) {
    return clock_ns() - d->renewed_ns >= (int64_t)STATE_RENEW_SECONDS * SECOND_NS;
}

struct timespec store_renewal(const struct directory *d) {
    int64_t at = d->renewed_ns + (int64_t)STATE_RENEW_SECONDS * SECOND_NS;
    return (struct timespec){at / SECOND_NS, at % SECOND_NS};
}

void store_renew(struct directory *d) {
    int before = d->dir.lease.count;
    state_lease_renew(&d->dir.lease);
    d->renewed_ns = clock_ns();
    /* The end of a lease leaves the directory as it is, but more may be deleted there. */
    if (d->dir.lease.count < before) d->listed_at_ns = 0;
    pthread_mutex_lock(&d->lock);
    /* After the last of the others has ended, once more, for what it left behind. */
    d->list_wanted |= d->shared || d->dir.lease.count > 0;
    d->shared = d->dir.lease.count > 0;
    pthread_mutex_unlock(&d->lock);
    store_expire(d);
}

/* ---- Deleting files for space ---- */

/* Returns whether another daemon has used the file since the listing: then it is not the oldest. */
static bool was_used(struct directory *d, uint64_t id) {
    struct state_dir_file on_disk;
    bool used = false;
    if (!store_is_shared(d) || !state_dir_stat(&d->dir, id, false, &on_disk)) return false;
    pthread_mutex_lock(&d->lock);
    struct store_file *file = store_index_find(&d->index, id, false);
    if (file && on_disk.used_ns > file->used_ns) {
        store_index_touch(&d->index, file, on_disk.used_unix, on_disk.used_ns);
        used = true;
    }
    pthread_mutex_unlock(&d->lock);
    return used;
}

/* Returns the id of the file that must go before `count` more of `size` bytes fit; 0: they fit, or
 * there is nothing left to delete. */
static uint64_t next_to_delete(struct directory *d, int count, int64_t size, bool *bad) {
    pthread_mutex_lock(&d->lock);
    const struct store_file *first = store_index_first_to_go(&d->index, clock_unix_seconds());
    bool fits = d->index.bytes + d->unfinished <= d->options.bytes - size &&
                d->index.count <= STORE_FILES_MAX - count;
    uint64_t id = fits || !first ? 0 : first->head.id;
    *bad = id != 0 && first->bad;
    pthread_mutex_unlock(&d->lock);
    return id;
}

static void delete_file(struct directory *d, uint64_t id, bool bad, const char *why) {
    pthread_mutex_lock(&d->lock);
    struct store_file *file = store_index_find(&d->index, id, bad);
    if (file) store_index_drop(&d->index, file);
    pthread_mutex_unlock(&d->lock);
    if (!file) return;
    log_debug("state file of conversation=%016llx deleted reason=%s", (unsigned long long)id, why);
    state_dir_delete(&d->dir, id, bad);
}

static void delete_until_fits(struct directory *d, int count, int64_t size) {
    uint64_t id;
    bool bad;
    while ((id = next_to_delete(d, count, size, &bad)) != 0)
        if (bad || !was_used(d, id)) delete_file(d, id, bad, "bytes");
}

int store_make_space(struct directory *d, int count, int64_t size) {
    if (size > d->options.bytes) return ERR_LIMIT;
    if (store_is_shared(d)) refresh_index(d);
    delete_until_fits(d, count, size);
    return 0;
}

void store_refresh(struct directory *d) {
    refresh_index(d);
    delete_until_fits(d, 0, 0);
}

/* ---- Time to live ---- */

/* Returns the id of the expired file that was used longest ago; 0: there is none. */
static uint64_t next_expired(struct directory *d) {
    uint64_t id = 0;
    pthread_mutex_lock(&d->lock);
    for (const struct store_file *file = d->index.oldest; file && id == 0; file = file->newer)
        if (!file->bad && file->head.ttl > 0 &&
            file->used_unix + file->head.ttl <= d->dir.lease.now_unix)
            id = file->head.id;
    pthread_mutex_unlock(&d->lock);
    return id;
}

/* Deletes expired files. If another daemon has used a file, seeing that moves it behind all that
 * were used longer ago. */
void store_expire(struct directory *d) {
    uint64_t id;
    while ((id = next_expired(d)) != 0)
        if (!was_used(d, id)) delete_file(d, id, false, "expired");
}
