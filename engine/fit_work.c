#include "engine/fit_work.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
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

static bool read_record_bytes(int fd, void *data, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        const ssize_t got = read(fd, (char *)data + had, bytes - had);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        had += (size_t)got;
    }
    return true;
}

static bool write_record_bytes(int fd, const void *data, size_t bytes) {
    for (size_t had = 0; had < bytes;) {
        const ssize_t put = write(fd, (const char *)data + had, bytes - had);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        had += (size_t)put;
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
    struct part parts[PARTS];
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
    record_parts(text, parts);
    text->at = mem_try_alloc(parts[0].bytes, 1);
    text->x = mem_try_alloc(parts[1].bytes, 1);
    text->worths = mem_try_alloc(parts[2].bytes, 1);
    return text->at && text->x && text->worths;
}

/* Positions ascend within the text. */
static bool positions_fit(const struct worth_text *text) {
    for (int i = 0; i < text->entries; i++)
        if (text->at[i] < (i ? text->at[i - 1] + 1 : 0) || text->at[i] >= text->tokens)
            return false;
    return true;
}

static bool read_record(const struct fit_work *work, const uint8_t key[SHA256_BYTES],
                        const struct worth_text *most, struct worth_text *text) {
    struct record_head head;
    struct part parts[PARTS];
    uint8_t sum[SHA256_BYTES], stored[SHA256_BYTES];
    if (!read_record_bytes(work->fd, &head, sizeof head)) return false;
    if (memcmp(head.magic, work_magic, sizeof work_magic) != 0 ||
        memcmp(head.key, key, SHA256_BYTES) != 0 || !sizes_fit(&head, most))
        return false;
    bool good = open_text(&head, most, text);
    if (good) record_parts(text, parts);
    for (int i = 0; i < PARTS && good; i++)
        good = read_record_bytes(work->fd, parts[i].data, parts[i].bytes);
    good = good && read_record_bytes(work->fd, stored, sizeof stored);
    if (good) {
        digest_record(&head, text, sum);
        good = memcmp(sum, stored, sizeof sum) == 0 && positions_fit(text);
    }
    if (!good) worth_text_close(text);
    return good;
}

/* Keeps nothing more. */
static void end_keeping(struct fit_work *work, off_t whole, int why) {
    log_warn("%s: %s: what is measured from here on stays in memory, and is lost if the fit is "
             "interrupted",
             work->path, strerror(why));
    work->full = true;
    if (ftruncate(work->fd, whole)) return; /* then the digest tells that the record is torn */
}

bool fit_work_take(struct fit_work *work, const uint8_t key[SHA256_BYTES],
                   const struct worth_text *most, struct worth_text *text) {
    if (work->fd < 0 || !work->reading) return false;
    const off_t at = lseek(work->fd, 0, SEEK_CUR);
    if (read_record(work, key, most, text)) return true;
    work->reading = false;
    if (at < 0 || ftruncate(work->fd, at) || lseek(work->fd, at, SEEK_SET) < 0)
        log_warn("%s: %s", work->path, strerror(errno));
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
    const off_t at = lseek(work->fd, 0, SEEK_CUR);
    record_parts(text, parts);
    digest_record(&head, text, sum);
    bool good = write_record_bytes(work->fd, &head, sizeof head);
    for (int i = 0; i < PARTS && good; i++)
        good = write_record_bytes(work->fd, parts[i].data, parts[i].bytes);
    good = good && write_record_bytes(work->fd, sum, sizeof sum);
    if (!good) end_keeping(work, at, errno);
    return good;
}

void fit_work_again(struct fit_work *work) {
    work->reading = work->fd >= 0 && lseek(work->fd, 0, SEEK_SET) == 0;
}
