#include "engine/fit_work.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

/* Counts up when the same text would be measured in another way. */
static const char work_magic[8] = "keepdfw2";

struct record_head {
    char magic[8];
    uint8_t key[SHA256_BYTES];
    int32_t layers, heads, d_model, tokens, windows, entries;
};

/* ---- The lock ---- */

/* The file may have been removed, by the process that held the lock. */
static bool is_there(const struct fit_work *work) {
    struct stat open_file, named;
    return fstat(work->fd, &open_file) == 0 && stat(work->path, &named) == 0 &&
           open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev;
}

static int lock(const struct fit_work *work, int how) {
    int rc;
    do rc = flock(work->fd, how);
    while (rc && errno == EINTR);
    return rc ? errno : 0;
}

int fit_work_open(struct fit_work *work, const char *path, bool wait, void (*waiting)(void *arg),
                  void *arg, struct fault *fault) {
    *work = (struct fit_work){.fd = -1, .reading = true};
    if ((size_t)snprintf(work->path, sizeof work->path, "%s", path) >= sizeof work->path)
        return fault_set(fault, ERR_INVALID, "out", "the name is too long");
    for (;;) {
        work->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (work->fd < 0)
            return fault_set(fault, ERR_IO, "out", "%.200s: %s", path, strerror(errno));
        int failed = lock(work, LOCK_EX | LOCK_NB);
        if (failed == EWOULDBLOCK && wait) {
            if (waiting) waiting(arg);
            waiting = NULL; /* the caller is told once */
            failed = lock(work, LOCK_EX);
        }
        if (!failed && is_there(work)) return 0;
        close(work->fd);
        work->fd = -1;
        if (failed == EWOULDBLOCK)
            return fault_set(fault, ERR_BUSY, "out", "another process fits gates to this model");
        if (failed) return fault_set(fault, ERR_IO, "out", "%.200s: %s", path, strerror(failed));
    }
}

void fit_work_close(struct fit_work *work, bool done) {
    if (work->fd < 0) return;
    if (done) (void)unlink(work->path);
    close(work->fd);
    work->fd = -1;
}

/* ---- Records ---- */

size_t fit_work_room(const struct fit_work *work) {
    struct statvfs disk;
    struct stat file;
    if (fstatvfs(work->fd, &disk) || fstat(work->fd, &file)) return FIT_WORK_BYTES;
    const uint64_t half = ((uint64_t)disk.f_bavail * disk.f_frsize + (uint64_t)file.st_size) / 2;
    return half < FIT_WORK_BYTES ? (size_t)half : FIT_WORK_BYTES;
}

/* The arrays of a text, in their order in a record. */
struct part {
    void *data;
    size_t bytes;
};
enum { PARTS = 3 };

static void record_parts(const struct worth_text *text, struct part parts[PARTS]) {
    const size_t entries = (size_t)text->entries, layers = (size_t)text->layers;
    const size_t streams = (size_t)worth_text_stream(text, text->layers);
    const size_t width = (size_t)text->d_model;
    parts[0] = (struct part){text->at, entries * sizeof *text->at};
    parts[1] = (struct part){text->x, layers * entries * width * sizeof *text->x};
    parts[2] = (struct part){text->worths,
                             (size_t)text->windows * streams * entries * sizeof *text->worths};
}

static void digest_record(const struct record_head *head, const struct worth_text *text,
                          uint8_t out[SHA256_BYTES]) {
    struct part parts[PARTS];
    struct sha256_stream sum;
    record_parts(text, parts);
    sha256_begin(&sum);
    sha256_add(&sum, head, sizeof *head);
    for (int i = 0; i < PARTS; i++) sha256_add(&sum, parts[i].data, parts[i].bytes);
    sha256_end(&sum, out);
}

/* The two functions below move *at behind the bytes. */
static bool read_record_bytes(int fd, void *data, size_t bytes, off_t *at) {
    for (size_t had = 0; had < bytes;) {
        const ssize_t got = pread(fd, (char *)data + had, bytes - had, *at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        had += (size_t)got;
        *at += got;
    }
    return true;
}

static bool write_record_bytes(int fd, const void *data, size_t bytes, off_t *at) {
    for (size_t had = 0; had < bytes;) {
        const ssize_t put = pwrite(fd, (const char *)data + had, bytes - had, *at);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        had += (size_t)put;
        *at += put;
    }
    return true;
}

static bool sizes_fit(const struct record_head *head, const struct worth_text *most) {
    return head->layers == most->layers && head->heads == most->heads &&
           head->d_model == most->d_model && head->tokens > 0 && head->tokens <= most->tokens &&
           head->entries > 0 && head->entries <= most->entries &&
           head->windows == head->tokens / WORTH_WINDOW;
}

/* False where there is no memory: then the text is measured, which says so. */
static bool open_text(const struct record_head *head, const struct worth_text *most,
                      struct worth_text *text) {
    const size_t layers = (size_t)head->layers;
    *text = (struct worth_text){.layers = head->layers,
                                .heads = head->heads,
                                .d_model = head->d_model,
                                .tokens = head->tokens,
                                .windows = head->windows,
                                .entries = head->entries};
    if (most->layer_heads) {
        text->layer_heads = mem_try_alloc(layers, sizeof *text->layer_heads);
        if (!text->layer_heads) return false;
        memcpy(text->layer_heads, most->layer_heads, layers * sizeof *text->layer_heads);
    }
    return worth_text_alloc(text) == 0;
}

/* Positions ascend within the text. */
static bool positions_fit(const struct worth_text *text) {
    for (int i = 0; i < text->entries; i++)
        if (text->at[i] < (i ? text->at[i - 1] + 1 : 0) || text->at[i] >= text->tokens)
            return false;
    return true;
}

static bool read_parts(int fd, const struct worth_text *text, off_t *at) {
    struct part parts[PARTS];
    bool good = true;
    record_parts(text, parts);
    for (int i = 0; i < PARTS && good; i++)
        good = read_record_bytes(fd, parts[i].data, parts[i].bytes, at);
    return good;
}

static bool read_record(const struct fit_work *work, const uint8_t key[SHA256_BYTES],
                        const struct worth_text *most, struct worth_text *text, off_t *at) {
    struct record_head head;
    uint8_t sum[SHA256_BYTES], stored[SHA256_BYTES];
    if (!read_record_bytes(work->fd, &head, sizeof head, at)) return false;
    if (memcmp(head.magic, work_magic, sizeof work_magic) != 0 ||
        memcmp(head.key, key, SHA256_BYTES) != 0 || !sizes_fit(&head, most))
        return false;
    bool good = open_text(&head, most, text) && read_parts(work->fd, text, at) &&
                read_record_bytes(work->fd, stored, sizeof stored, at);
    if (good) {
        digest_record(&head, text, sum);
        good = memcmp(sum, stored, sizeof sum) == 0 && positions_fit(text);
    }
    if (!good) worth_text_close(text);
    return good;
}

/* Keeps nothing more. */
static void end_keeping(struct fit_work *work, int why) {
    log_warn("%s: %s: what is measured from here on stays in memory, and is lost if the fit is "
             "interrupted",
             work->path, strerror(why));
    work->full = true;
    if (ftruncate(work->fd, work->end)) return; /* then the digest tells that the record is torn */
}

bool fit_work_take(struct fit_work *work, const uint8_t key[SHA256_BYTES],
                   const struct worth_text *most, struct worth_text *text) {
    if (work->fd < 0 || !work->reading) return false;
    off_t at = work->end;
    if (read_record(work, key, most, text, &at)) {
        work->end = at;
        return true;
    }
    work->reading = false;
    if (ftruncate(work->fd, work->end)) log_warn("%s: %s", work->path, strerror(errno));
    return false;
}

bool fit_work_keep(struct fit_work *work, const uint8_t key[SHA256_BYTES],
                   const struct worth_text *text) {
    struct record_head head = {.layers = text->layers,
                               .heads = text->heads,
                               .d_model = text->d_model,
                               .tokens = text->tokens,
                               .windows = text->windows,
                               .entries = text->entries};
    struct part parts[PARTS];
    uint8_t sum[SHA256_BYTES];
    if (work->fd < 0 || work->full) return false;
    memcpy(head.magic, work_magic, sizeof head.magic);
    memcpy(head.key, key, SHA256_BYTES);
    off_t at = work->end;
    record_parts(text, parts);
    digest_record(&head, text, sum);
    bool good = write_record_bytes(work->fd, &head, sizeof head, &at);
    for (int i = 0; i < PARTS && good; i++)
        good = write_record_bytes(work->fd, parts[i].data, parts[i].bytes, &at);
    good = good && write_record_bytes(work->fd, sum, sizeof sum, &at);
    if (good)
        work->end = at;
    else
        end_keeping(work, errno);
    return good;
}

bool fit_work_load(const struct fit_work *work, int64_t record, struct worth_text *text) {
    off_t at = record + (off_t)sizeof(struct record_head);
    errno = 0;
    if (read_parts(work->fd, text, &at)) return true;
    log_warn("%s: %s", work->path, errno ? strerror(errno) : "is shorter than it was");
    return false;
}
