#include "engine/disk/store_move.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/disk/store_int.h"

struct store_upload {
    struct directory *directory;
    uint8_t space[16];
    uint64_t number; /* number in the temporary name */
    int fd;          /* -1: not made yet */
    int64_t counted; /* bytes that it adds to directory->uploading */
    bool kept;
    uint64_t seen;   /* bytes so far */
    size_t unsynced; /* bytes written since the last sync, see state_dir_append */
    struct state_head head;
    char head_bytes[STATE_HEAD_BYTES];
    uint8_t seal[STATE_SEAL_BYTES];
    struct sha256_stream hash;
};

static int64_t upload_max(const struct directory *d) {
    return d->options.bytes / STORE_UPLOADS_SHARE;
}

int store_open_file(struct store *store, uint64_t id, int *fd, uint64_t *bytes,
                    struct fault *fault) {
    *fd = state_dir_open_file(&store->directory->dir, id, bytes);
    if (*fd >= 0) return 0;
    return fault_set(fault, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, "state", "%s",
                     strerror(errno));
}

int64_t store_upload_max(const struct store *store) {
    return upload_max(store->directory);
}

int store_upload_open(struct store *store, const uint8_t space[16], struct store_upload **out,
                      struct fault *fault) {
    struct store_upload *upload = mem_try_alloc(1, sizeof *upload);
    *out = upload;
    if (!upload) return fault_set(fault, ERR_NOMEM, "state", "no memory");
    *upload = (struct store_upload){.directory = store->directory, .fd = -1};
    memcpy(upload->space, space, sizeof upload->space);
    CHECK(getrandom(&upload->number, sizeof upload->number, 0) == (ssize_t)sizeof upload->number);
    sha256_begin(&upload->hash);
    return 0;
}

/* Charges bytes to the uploads. Only bytes that have come count, so a slow upload does not keep
 * others away by what its head announces. */
static int charge_upload(struct store_upload *upload, size_t size, struct fault *fault) {
    struct directory *d = upload->directory;
    pthread_mutex_lock(&d->lock);
    bool fits = (int64_t)size <= upload_max(d) - d->uploading;
    if (fits) d->uploading += (int64_t)size;
    pthread_mutex_unlock(&d->lock);
    if (!fits)
        return fault_set(fault, ERR_FULL, "state",
                         "uploads that have not ended take a quarter of state-bytes");
    upload->counted += (int64_t)size;
    return 0;
}

/* Checks everything that can be checked before the seal is there. */
static int check_head(struct store_upload *upload, struct fault *fault) {
    const struct state_head *head = &upload->head;
    int rc = state_parse_head(upload->head_bytes, sizeof upload->head_bytes, &upload->head, fault);
    if (rc != 0) return rc;
    if (!state_is_ours(head, &upload->directory->options.identity))
        return fault_set(fault, ERR_INVALID, "state",
                         "it belongs to another model, other gates or another cache format");
    if (memcmp(head->space, upload->space, sizeof head->space) != 0)
        return fault_set(fault, ERR_INVALID, "state",
                         "it belongs to another API key, cache_salt or model name");
    if (head->file_size < STATE_HEAD_BYTES + STATE_SEAL_BYTES ||
        head->file_size > state_size_limit(head, upload->directory->options.state_bytes))
        return fault_set(fault, ERR_MALFORMED, "state", "longer than its conversation can be");
    int64_t most = upload_max(upload->directory), size = (int64_t)head->file_size;
    if (size <= most) return 0;
    return fault_set(fault, ERR_LIMIT, "state",
                     "%lld bytes; an upload may have %lld, a quarter of state-bytes",
                     (long long)size, (long long)most);
}

static int begin_upload_file(struct store_upload *upload, struct fault *fault) {
    int rc = check_head(upload, fault);
    if (rc != 0) return rc;
    upload->fd = state_dir_create(&upload->directory->dir, upload->number);
    if (upload->fd < 0)
        return fault_set(fault, ERR_IO, "state", "cannot be written: %s", strerror(errno));
    return 0;
}

/* Hashes the bytes before the seal, and remembers those of the seal. */
static void hash_upload(struct store_upload *upload, const char *data, size_t size) {
    uint64_t sealed = upload->head.file_size - STATE_SEAL_BYTES, at = upload->seen;
    size_t hashed = at >= sealed ? 0 : sealed - at < size ? (size_t)(sealed - at) : size;
    sha256_add(&upload->hash, data, hashed);
    if (hashed < size) memcpy(upload->seal + (at + hashed - sealed), data + hashed, size - hashed);
}

static int add_upload_content(struct store_upload *upload, const char *data, size_t size,
                              struct fault *fault) {
    if (size > upload->head.file_size - upload->seen)
        return fault_set(fault, ERR_MALFORMED, "state", "longer than its head says");
    int rc = charge_upload(upload, size, fault);
    if (rc != 0) return rc;
    hash_upload(upload, data, size);
    upload->seen += size;
    struct state_dir *dir = &upload->directory->dir;
    if (state_dir_append(dir, upload->fd, data, size, &upload->unsynced) == 0) return 0;
    return fault_set(fault, ERR_IO, "state", "cannot be written: %s", strerror(errno));
}

int store_upload_add(struct store_upload *upload, const char *data, size_t size,
                     struct fault *fault) {
    if (upload->seen < STATE_HEAD_BYTES) {
        size_t part = STATE_HEAD_BYTES - (size_t)upload->seen;
        if (part > size) part = size;
        memcpy(upload->head_bytes + upload->seen, data, part);
        upload->seen += part;
        if (upload->seen < STATE_HEAD_BYTES) return 0;
        int rc = begin_upload_file(upload, fault);
        upload->seen = 0;
        if (rc == 0) rc = add_upload_content(upload, upload->head_bytes, STATE_HEAD_BYTES, fault);
        if (rc != 0) return rc;
        data += part;
        size -= part;
    }
    return size > 0 ? add_upload_content(upload, data, size, fault) : 0;
}

int store_upload_end(struct store_upload *upload, struct store_row *row, struct fault *fault) {
    struct directory *d = upload->directory;
    uint8_t digest[SHA256_BYTES];
    if (upload->fd < 0 || upload->seen < upload->head.file_size)
        return fault_set(fault, ERR_MALFORMED, "state", "torn: it has only %llu bytes",
                         (unsigned long long)upload->seen);
    sha256_end(&upload->hash, digest);
    int rc = state_compare_seal(digest, upload->seal, d->dir.key, fault);
    if (rc != 0) return rc;
    if (fsync(upload->fd) != 0)
        return fault_set(fault, ERR_IO, "state", "cannot be written: %s", strerror(errno));
    struct store_adoption adoption = {.number = upload->number, .head = &upload->head};
    store_adopt(d, &adoption);
    upload->kept = adoption.fault.code == 0;
    *row = (struct store_row){.id = upload->head.id,
                              .tokens = upload->head.token_count,
                              .bytes = (int64_t)upload->head.file_size};
    if (!upload->kept) *fault = adoption.fault;
    return adoption.fault.code;
}

void store_upload_close(struct store_upload *upload) {
    if (!upload) return;
    struct directory *d = upload->directory;
    pthread_mutex_lock(&d->lock);
    d->uploading -= upload->counted;
    pthread_mutex_unlock(&d->lock);
    if (upload->fd >= 0) {
        close(upload->fd);
        if (!upload->kept) state_dir_discard(&d->dir, upload->number);
    }
    mem_free(upload);
}
