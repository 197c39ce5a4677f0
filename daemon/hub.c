#include "daemon/hub.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/available.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sha1.h"
#include "base/sha256.h"
#include "daemon/hub_cache.h"
#include "daemon/hub_http.h"
#include "daemon/progress.h"

#define ANSWER_BYTES_MAX ((size_t)64 << 20) /* size of a list of files, and of an index */
#define PAGES_MAX        64
#define ATTEMPTS         5                    /* in a row that bring next to nothing */
#define PROGRESS_BYTES   ((int64_t)256 << 10) /* an attempt that brings so much counts as none */
#define PAUSE_MS         1000                 /* after the first failure, then twice as long */
#define DISK_SPARE       ((int64_t)16 << 20)  /* for what is written beside the files */
#define LIST_BYTES_MAX   ((size_t)1 << 20)
#define READ_BYTES       ((size_t)1 << 20)

struct hub {
    struct hub_name name;
    struct hub_repo repo;
    struct hub_http *http;
    bool has_token;
    char commit[HUB_COMMIT_SIZE];
    struct hub_tree tree;
    struct hub_choice choice;
    bool unlisted; /* the cache has a directory, and nothing says which files it needs */
    char missing[HUB_PATH_MAX]; /* a file of the directory that the cache lacks; "": unknown */
    struct progress progress;
    int64_t done, total; /* bytes of those that had to be fetched */
};

/* ---- Asking ---- */

static void pause_before_retry(int failures, int wait_s) {
    const char *test = getenv("KEEPD_TEST_HUB_PAUSE_MS");
    int64_t ms = test ? atoi(test) : (int64_t)PAUSE_MS << (failures - 1);
    if (!test && (int64_t)wait_s * 1000 > ms) ms = (int64_t)wait_s * 1000;
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    (void)nanosleep(&time, NULL);
}

static int refuse_gated(const struct hub *hub, struct fault *fault) {
    return fault_set(fault, ERR_NOTFOUND, "model", "%s is gated: accept its terms at %.100s/%s%s",
                     hub->name.repo, hub_endpoint(), hub->name.repo,
                     hub->has_token ? " with the account that the token belongs to"
                                    : ", then give a token of that account: HF_TOKEN=..., or hf "
                                      "auth login");
}

/* Says what an answer means for who named the model. */
static int explain_hub_answer(const struct hub *hub, const struct hub_answer *answer, int rc,
                              struct fault *fault) {
    const char *repo = hub->name.repo, *code = answer->code;
    char why[200];
    if (strcmp(code, "GatedRepo") == 0) return refuse_gated(hub, fault);
    if (strcmp(code, "RevisionNotFound") == 0)
        return fault_set(fault, ERR_NOTFOUND, "model", "%s has no revision '%s'", repo,
                         hub->name.revision);
    if (answer->status == 401 && hub->has_token)
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "the hub has no %s that the token may see%s%.150s: check the name, and "
                         "HF_TOKEN",
                         repo, answer->message[0] ? ": " : "", answer->message);
    if (answer->status == 401)
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "the hub has no %s, or it is private: check the name, or give a token "
                         "that may see it: HF_TOKEN=..., or hf auth login",
                         repo);
    if (answer->status == 403)
        return fault_set(fault, ERR_NOTFOUND, "model", "the token may not read %s%s%.150s", repo,
                         answer->message[0] ? ": " : "", answer->message);
    if (answer->status == 404)
        return fault_set(fault, ERR_NOTFOUND, "model", "the hub has no %s%s%.150s", repo,
                         answer->message[0] ? ": " : "", answer->message);
    if (answer->status == 429)
        return fault_set(fault, rc, "model", "the hub asks to wait: too many requests%s",
                         hub->has_token ? "" : "; with a token (HF_TOKEN) it allows more");
    if (answer->unreachable && fault) {
        snprintf(why, sizeof why, "%.190s", fault->text);
        return fault_set(fault, rc, "model",
                         "the hub cannot be reached (%s). Is there a network? HF_ENDPOINT names "
                         "another address of it",
                         why);
    }
    return rc;
}

static bool add_hub_text(void *arg, const struct hub_answer *answer, const char *data,
                         size_t size) {
    (void)answer;
    buf_add(arg, data, size);
    return !((struct buf *)arg)->failed;
}

/* Gets a short text. Tries again if the failure may be temporary, but not if the hub cannot be
 * reached. */
static int get_hub_text(struct hub *hub, const char *path, struct buf *body,
                        struct hub_answer *answer, struct fault *fault) {
    int rc;
    for (int failures = 0;; pause_before_retry(failures, answer->wait_s)) {
        buf_clear(body);
        rc = hub_http_get(hub->http, path, 0, false, add_hub_text, body, answer, fault);
        if (rc == ERR_STOPPED)
            return fault_set(fault, ERR_LIMIT, "model", "the hub's answer has more than %zu bytes",
                             ANSWER_BYTES_MAX);
        if (rc == 0 || !answer->again || answer->unreachable || ++failures == ATTEMPTS) break;
        log_warn("%s; asking again%s", fault->text,
                 failures + 1 == ATTEMPTS ? " for the last time" : "");
    }
    return rc ? explain_hub_answer(hub, answer, rc, fault) : 0;
}

/* Adds a text to an address: letters that an address has no place for are escaped. */
static void add_escaped(struct buf *out, const char *text, const char *also) {
    for (; *text; text++) {
        const char c = *text;
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
            strchr("-._~", c) || strchr(also, c))
            buf_char(out, c);
        else
            buf_fmt(out, "%%%02X", (unsigned)(unsigned char)c);
    }
}

/* Asks for the commit of the revision. */
static int get_hub_commit(struct hub *hub, struct fault *fault) {
    const struct json_limits limits = {.bytes = ANSWER_BYTES_MAX, .depth = 64, .nodes = 1 << 20};
    struct hub_answer answer;
    struct buf path, body;
    cJSON *root = NULL;
    const char *sha = "";
    buf_open(&path, 4096);
    buf_open(&body, ANSWER_BYTES_MAX);
    buf_fmt(&path, "/api/models/%s/revision/", hub->name.repo);
    add_escaped(&path, hub->name.revision, "");
    int rc = get_hub_text(hub, path.data, &body, &answer, fault);
    if (!rc) rc = json_parse(body.data ? body.data : "", body.size, &limits, &root, fault);
    if (!rc) rc = json_str(root, "", "sha", &sha, fault);
    if (!rc && !hub_is_commit(sha))
        rc = fault_set(fault, ERR_MALFORMED, "model", "%.100s gives no commit: is it a hub?",
                       hub_endpoint());
    if (!rc) strcpy(hub->commit, sha);
    json_free(root);
    buf_close(&path);
    buf_close(&body);
    return rc;
}

static int get_hub_tree(struct hub *hub, struct fault *fault) {
    struct hub_answer answer;
    struct buf body;
    char path[1024];
    int rc = 0;
    buf_open(&body, ANSWER_BYTES_MAX);
    snprintf(path, sizeof path, "/api/models/%s/tree/%s?recursive=true", hub->name.repo,
             hub->commit);
    for (int page = 0; !rc && path[0]; page++) {
        if (page == PAGES_MAX) {
            rc = fault_set(fault, ERR_LIMIT, "model", "the list of files has more than %d pages",
                           PAGES_MAX);
            break;
        }
        rc = get_hub_text(hub, path, &body, &answer, fault);
        if (!rc) rc = hub_tree_read(&hub->tree, body.data ? body.data : "", body.size, fault);
        if (!rc) memcpy(path, answer.next, sizeof path);
    }
    buf_close(&body);
    return rc;
}

/* ---- Sums ---- */

/* The sum by which the hub knows a file: git's own for small files, of a text in front and of the
 * file; else SHA-256. */
struct sum {
    bool large;
    struct sha256_stream sha256;
    struct sha1_stream sha1;
};

static void sum_begin(struct sum *sum, const struct hub_file *file) {
    char front[40];
    sum->large = strlen(file->oid) == 64;
    sha256_begin(&sum->sha256);
    sha1_begin(&sum->sha1);
    const int size = snprintf(front, sizeof front, "blob %" PRId64, file->size) + 1; /* and NUL */
    sha1_add(&sum->sha1, front, (size_t)size);
}

static void sum_add(struct sum *sum, const void *data, size_t size) {
    if (sum->large)
        sha256_add(&sum->sha256, data, size);
    else
        sha1_add(&sum->sha1, data, size);
}

static void sum_end(struct sum *sum, char out[65]) {
    uint8_t digest[SHA256_BYTES];
    if (sum->large)
        sha256_end(&sum->sha256, digest);
    else
        sha1_end(&sum->sha1, digest);
    const size_t size = sum->large ? SHA256_BYTES : SHA1_BYTES;
    for (size_t i = 0; i < size; i++) snprintf(out + 2 * i, 3, "%02x", digest[i]);
}

/* ---- One file ---- */

/* A file that is being fetched. */
struct part {
    struct hub *hub;
    const struct hub_file *file;
    char path[PATH_MAX];
    int fd;
    int64_t size; /* bytes that are here */
    struct sum sum;
    bool begun;   /* the answer has brought something */
    bool spoiled; /* the answer brought more than the file has */
    struct fault *fault;
};

static int part_disk_fault(const struct part *part, struct fault *fault) {
    const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    return fault_set(fault, ERR_IO, "model", "%.200s: %s%s", part->path, strerror(errno),
                     full ? "; what has arrived is kept, and keepd pull goes on from there" : "");
}

/* Begins the file anew. Its bytes are to be fetched on top of what was to be fetched. */
static int empty_part(struct part *part, struct fault *fault) {
    if (ftruncate(part->fd, 0) != 0 || lseek(part->fd, 0, SEEK_SET) != 0)
        return part_disk_fault(part, fault);
    part->hub->total += part->size;
    part->size = 0;
    sum_begin(&part->sum, part->file);
    return 0;
}

/* Reads what an earlier attempt has fetched, because the checksum covers the whole file. */
static int resume_part(struct part *part, struct fault *fault) {
    struct stat info;
    sum_begin(&part->sum, part->file);
    if (fstat(part->fd, &info) != 0) return part_disk_fault(part, fault);
    if (info.st_size > part->file->size) return empty_part(part, fault);
    char *data = mem_must_alloc(READ_BYTES, 1);
    ssize_t size;
    while ((size = read(part->fd, data, READ_BYTES)) > 0) {
        sum_add(&part->sum, data, (size_t)size);
        part->size += size;
    }
    mem_free(data);
    return size < 0 ? part_disk_fault(part, fault) : 0;
}

static bool write_part_bytes(struct part *part, const char *data, size_t size) {
    while (size > 0) {
        const ssize_t n = write(part->fd, data, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        sum_add(&part->sum, data, (size_t)n);
        part->size += n;
        part->hub->done += n;
        data += n;
        size -= (size_t)n;
    }
    return true;
}

/* Takes bytes from where the answer says that it begins: where the part ends, or at the beginning
 * if the hub sends the whole file. */
static bool add_part_bytes(void *arg, const struct hub_answer *answer, const char *data,
                           size_t size) {
    struct part *part = arg;
    struct hub *hub = part->hub;
    if (!part->begun && answer->from != part->size) {
        if (answer->from != 0) {
            fault_set(part->fault, ERR_IO, "model", "%.200s: the hub sends another part of it",
                      part->file->path);
            return false;
        }
        if (empty_part(part, part->fault)) return false;
    }
    part->begun = true;
    if ((int64_t)size > part->file->size - part->size) {
        part->spoiled = true;
        return false;
    }
    if (!write_part_bytes(part, data, size)) {
        (void)part_disk_fault(part, part->fault);
        return false;
    }
    progress_note(&hub->progress, (uint64_t)hub->done, (uint64_t)hub->total, hub->choice.label);
    return true;
}

/* Fetches what is missing. An attempt that brought PROGRESS_BYTES new bytes does not count as
 * failed. So the number of attempts is bounded by the file's size over PROGRESS_BYTES, plus a few.
 */
static int fetch_rest(struct part *part, struct fault *fault) {
    struct hub *hub = part->hub;
    struct hub_answer answer = {0};
    struct buf path;
    int64_t most = part->size;
    int rc = 0, failures = 0;
    buf_open(&path, 4096);
    buf_fmt(&path, "/%s/resolve/%s/", hub->name.repo, hub->commit);
    add_escaped(&path, part->file->path, "/");
    while (part->size < part->file->size && !part->spoiled) {
        part->begun = false;
        part->fault = fault;
        rc = hub_http_get(hub->http, path.data, part->size, true, add_part_bytes, part, &answer,
                          fault);
        if (rc == ERR_STOPPED && part->spoiled) break;
        if (rc == 0 && part->size < part->file->size) {
            answer.again = true; /* an answer that was short without saying so */
            rc = fault_set(fault, ERR_IO, "model", "%.200s: the answer ended early",
                           part->file->path);
        }
        if (rc == 0) break;
        failures = part->size >= most + PROGRESS_BYTES ? 0 : failures + 1;
        if (part->size > most) most = part->size;
        if (answer.status == 416 && part->size > 0) {
            if ((rc = empty_part(part, fault)) != 0) break;
            answer.again = true;
        }
        if (!answer.again || failures == ATTEMPTS) break;
        log_warn("%s; going on at byte %" PRId64 "%s", fault->text, part->size,
                 failures + 1 == ATTEMPTS ? " for the last time" : "");
        pause_before_retry(failures ? failures : 1, answer.wait_s);
    }
    buf_close(&path);
    if (part->spoiled) return 0; /* finish_part refuses it */
    if (rc == ERR_STOPPED) return fault->code;
    return rc ? explain_hub_answer(hub, &answer, rc, fault) : 0;
}

/* Gives the file its name if it is the one that the hub has; else it is deleted. */
static int finish_part(struct part *part, const char *blob, struct fault *fault) {
    char sum[65];
    sum_end(&part->sum, sum);
    if (part->spoiled || strcmp(sum, part->file->oid) != 0) {
        (void)unlink(part->path);
        return fault_set(fault, ERR_IO, "model",
                         "%.150s: what arrived has %s, and the hub says %.12s...: it was deleted; "
                         "pull again, or ask who runs the address in between",
                         part->file->path,
                         part->spoiled ? "more bytes than it should" : "another sum",
                         part->file->oid);
    }
    if (fdatasync(part->fd) != 0) return part_disk_fault(part, fault);
    if (rename(part->path, blob) != 0) return part_disk_fault(part, fault);
    return 0;
}

static void log_blob_wait(const char *oid) {
    log_info("another process fetches %.12s...: waiting for it", oid);
}

static bool has_blob(const struct hub *hub, const struct hub_file *file) {
    char path[PATH_MAX];
    struct stat info;
    return hub_blob_path(&hub->repo, file->oid, "", path, sizeof path) && stat(path, &info) == 0 &&
           S_ISREG(info.st_mode) && info.st_size == file->size;
}

static int fetch_blob(struct hub *hub, const struct hub_file *file, struct fault *fault) {
    struct part part = {.hub = hub, .file = file, .fd = -1, .fault = fault};
    char blob[PATH_MAX];
    int lock = -1;
    if (!hub_blob_path(&hub->repo, file->oid, "", blob, sizeof blob) ||
        !hub_blob_path(&hub->repo, file->oid, ".incomplete", part.path, sizeof part.path))
        return fault_set(fault, ERR_LIMIT, "model", "%.200s: the path is too long", file->path);
    int rc = hub_make_folders(blob, fault);
    if (!rc) rc = hub_lock(&hub->repo, file->oid, log_blob_wait, &lock, fault);
    if (!rc && !has_blob(hub, file)) { /* another process may have fetched it meanwhile */
        part.fd = open(part.path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (part.fd < 0) rc = part_disk_fault(&part, fault);
        if (!rc) rc = resume_part(&part, fault);
        if (!rc) rc = fetch_rest(&part, fault);
        if (!rc) rc = finish_part(&part, blob, fault);
        if (part.fd >= 0) close(part.fd);
    }
    if (lock >= 0) close(lock);
    return rc;
}

/* ---- All files ---- */

/* Bytes of the wanted files that are not here yet. */
static int64_t missing_bytes(const struct hub *hub) {
    int64_t bytes = 0;
    for (size_t i = 0; i < hub->tree.count; i++) {
        const struct hub_file *file = &hub->tree.files[i];
        char part[PATH_MAX];
        struct stat info;
        if (!file->wanted || has_blob(hub, file)) continue;
        bytes += file->size;
        if (hub_blob_path(&hub->repo, file->oid, ".incomplete", part, sizeof part) &&
            stat(part, &info) == 0 && info.st_size <= file->size)
            bytes -= info.st_size;
    }
    return bytes;
}

static int check_disk_space(const struct hub *hub, int64_t missing, struct fault *fault) {
    const int64_t left = hub_disk_free(&hub->repo);
    if (missing == 0 || left >= missing + DISK_SPARE) return 0;
    return fault_set(fault, ERR_IO, "model",
                     "%.2f GB are to be fetched, and the disk of %.200s has %.2f GB left; HF_HOME "
                     "names another folder",
                     (double)missing * 1e-9, hub->repo.folder, (double)left * 1e-9);
}

static int fetch_wanted(struct hub *hub, struct fault *fault) {
    hub->total = missing_bytes(hub);
    hub->done = 0;
    int rc = check_disk_space(hub, hub->total, fault);
    for (size_t i = 0; rc == 0 && i < hub->tree.count; i++) {
        const struct hub_file *file = &hub->tree.files[i];
        if (!file->wanted) continue;
        if (!has_blob(hub, file)) rc = fetch_blob(hub, file, fault);
        if (!rc) rc = hub_link(&hub->repo, hub->commit, file, fault);
    }
    return rc;
}

/* Marks the weights of a directory by its index, which is in the snapshot. */
static int want_by_index(struct hub *hub, struct fault *fault) {
    char path[PATH_MAX], *data = NULL;
    size_t size = 0;
    if (hub->choice.format != HUB_DIRECTORY || !hub_tree_find(&hub->tree, HUB_INDEX)) return 0;
    if (!hub_snapshot_path(&hub->repo, hub->commit, HUB_INDEX, path, sizeof path)) return 0;
    int rc = file_read(path, ANSWER_BYTES_MAX, &data, &size, fault);
    if (!rc) rc = hub_want_shards(&hub->tree, data, size, &hub->choice.bytes, fault);
    mem_free(data);
    return rc;
}

static int write_model_path(const struct hub *hub, char *path, size_t size, struct fault *fault) {
    const char *file = hub->choice.format == HUB_GGUF ? hub->tree.files[hub->choice.file].path : "";
    if (hub_snapshot_path(&hub->repo, hub->commit, file, path, size)) return 0;
    return fault_set(fault, ERR_LIMIT, "model", "the path of the cache is too long");
}

/* ---- The cache ---- */

static bool lists_tokenizer(const struct hub_tree *tree) {
    return hub_tree_find(tree, "tokenizer.json") || hub_tree_find(tree, "vocab.json");
}

/* Checks that a directory is here whole, by the list of the commit's files that a fetch has left.
 * A model of a GGUF file needs no list: its parts name one another. */
static int check_listed(struct hub *hub) {
    struct hub_tree listed = {0};
    struct hub_choice choice;
    struct fault ignored;
    const bool there = hub_listing_read(&hub->repo, hub->commit, &listed);
    const bool chosen = there && hub_choose(&hub->name, &listed, &choice, &ignored) == 0;
    if (!chosen || choice.format != HUB_DIRECTORY) {
        hub->unlisted = hub->choice.format == HUB_DIRECTORY;
    } else {
        for (size_t i = 0; i < listed.count && !hub->missing[0]; i++)
            if (listed.files[i].wanted && !hub_tree_find(&hub->tree, listed.files[i].path))
                snprintf(hub->missing, sizeof hub->missing, "%s", listed.files[i].path);
    }
    hub_tree_close(&listed);
    return hub->missing[0] ? ERR_NOTFOUND : 0;
}

/* Finds the model among the files that are here. `trusting`: also a directory of which nothing says
 * whether all files are here. */
static int find_hub_cached(struct hub *hub, bool trusting, char *path, size_t size,
                           struct fault *fault) {
    char name[700];
    int rc = ERR_NOTFOUND;
    struct fault why = {0};
    hub_name_write(&hub->name, name, sizeof name);
    if (hub_ref_read(&hub->repo, hub->name.revision, hub->commit)) {
        rc = hub_snapshot_scan(&hub->repo, hub->commit, &hub->tree, &why);
        if (!rc) rc = hub_choose(&hub->name, &hub->tree, &hub->choice, &why);
        const int listed = check_listed(hub);
        if (!rc) rc = listed;
        if (!rc && hub->choice.format == HUB_DIRECTORY && !lists_tokenizer(&hub->tree))
            rc = ERR_NOTFOUND;
        if (!rc) rc = want_by_index(hub, &why);
        hub->unlisted = !rc && hub->unlisted;
    }
    if (!rc && hub->unlisted && trusting)
        log_warn("whether the cache has all files of %.200s is not known: another program fetched "
                 "them, or an earlier keepd",
                 name);
    if (!rc && (!hub->unlisted || trusting)) return write_model_path(hub, path, size, fault);
    hub_tree_close(&hub->tree);
    return fault_set(fault, ERR_NOTFOUND, "model", "%.200s is not in the cache, or not all of it",
                     name);
}

static int refuse_offline(const struct hub *hub, struct fault *fault) {
    char name[700];
    hub_name_write(&hub->name, name, sizeof name);
    return fault_set(fault, ERR_NOTFOUND, "model",
                     "HF_HUB_OFFLINE is set, and %.130s does not hold %.60s of %.100s: fetch it "
                     "where there is a network, with keepd pull",
                     hub->repo.folder, hub->missing[0] ? hub->missing : "all files", name);
}

/* ---- The hub ---- */

/* Bytes of memory that are left on this machine. A test may name others. */
static int64_t memory_left(void) {
    const char *test = getenv("KEEPD_TEST_MEMORY");
    return test ? atoll(test) : available_memory("");
}

static void print_models(const struct hub *hub, size_t chosen, FILE *out) {
    const int64_t memory = memory_left();
    struct buf text;
    buf_open(&text, LIST_BYTES_MAX);
    hub_describe(&hub->tree, memory, chosen, &text);
    fprintf(out, "%s has these models; %.2f GB of memory are available here:\n%s", hub->name.repo,
            (double)memory * 1e-9, text.data ? text.data : "  none that keepd reads\n");
    fflush(out);
    buf_close(&text);
}

/* A model that nobody has named is not fetched for nothing. */
static int check_model_memory(const struct hub *hub, struct fault *fault) {
    const int64_t need = hub_need(hub->choice.bytes), memory = memory_left();
    if (need <= memory) return 0;
    if (!hub->choice.by_default) {
        log_warn("%s needs %.2f GB of memory, and %.2f GB are available here", hub->name.repo,
                 (double)need * 1e-9, (double)memory * 1e-9);
        return 0;
    }
    return fault_set(fault, ERR_INVALID, "model",
                     "%s needs %.2f GB of memory, and %.2f GB are available here: name what is to "
                     "be fetched, hf:%s:%s or a smaller one",
                     hub->choice.label, (double)need * 1e-9, (double)memory * 1e-9, hub->name.repo,
                     hub->choice.label);
}

static int open_hub(struct hub *hub, struct fault *fault) {
    char token[513];
    int rc = hub_token(token, sizeof token, fault);
    hub->has_token = token[0] != '\0';
    if (!rc) rc = hub_http_open(hub_endpoint(), token, &hub->http, fault);
    if (rc) return rc;
    if (hub->unlisted) { /* the cached commit, which the hub may have deleted */
        rc = get_hub_tree(hub, fault);
        if (rc != ERR_NOTFOUND) return rc;
        hub_tree_close(&hub->tree);
    }
    rc = get_hub_commit(hub, fault);
    return rc ? rc : get_hub_tree(hub, fault);
}

/* Where the list cannot be written, the next start asks the hub again. */
static void write_hub_listing(const struct hub *hub) {
    struct fault why = {0};
    if (hub_listing_write(&hub->repo, hub->commit, &hub->tree, &why)) log_warn("%s", why.text);
}

/* Fetches the model from the hub. */
static int find_in_hub(struct hub *hub, char *path, size_t size, struct fault *fault) {
    int rc = open_hub(hub, fault);
    if (rc) return rc;
    rc = hub_choose(&hub->name, &hub->tree, &hub->choice, fault);
    if (rc || hub->choice.by_default) print_models(hub, rc ? SIZE_MAX : hub->choice.file, stderr);
    if (rc) return rc;
    const bool directory = hub->choice.format == HUB_DIRECTORY;
    const bool indexed = directory && hub_tree_find(&hub->tree, HUB_INDEX);
    if (!indexed) rc = check_model_memory(hub, fault);
    if (rc) return rc;
    if (directory) write_hub_listing(hub);
    progress_open(&hub->progress, PROGRESS_FETCHING, isatty(STDERR_FILENO));
    rc = fetch_wanted(hub, fault);
    if (!rc && indexed) { /* the weights are known now */
        rc = want_by_index(hub, fault);
        if (!rc) rc = check_model_memory(hub, fault);
        if (!rc) rc = fetch_wanted(hub, fault);
    }
    progress_close(&hub->progress, rc == 0);
    if (!rc) rc = hub_ref_write(&hub->repo, hub->name.revision, hub->commit, fault);
    return rc ? rc : write_model_path(hub, path, size, fault);
}

static void close_hub(struct hub *hub) {
    hub_http_close(hub->http);
    hub_tree_close(&hub->tree);
    mem_free(hub);
}

static int open_named_hub(const char *text, struct hub **out, struct fault *fault) {
    struct hub *hub = mem_must_alloc(1, sizeof *hub);
    int rc = hub_name_parse(text, &hub->name, fault);
    if (!rc) rc = hub_repo_open(hub->name.repo, &hub->repo, fault);
    if (rc)
        mem_free(hub);
    else
        *out = hub;
    return rc;
}

int hub_find(const char *text, enum hub_use use, char *path, size_t size, struct fault *fault) {
    struct hub *hub;
    int rc = open_named_hub(text, &hub, fault);
    if (rc) return rc;
    const bool offline = hub_is_offline(), here = use != HUB_PULL || offline;
    const bool trusting = offline || use == HUB_CACHED;
    rc = here ? find_hub_cached(hub, trusting, path, size, fault) : ERR_NOTFOUND;
    if (rc == ERR_NOTFOUND && offline)
        rc = refuse_offline(hub, fault);
    else if (rc == ERR_NOTFOUND && use != HUB_CACHED)
        rc = find_in_hub(hub, path, size, fault);
    if (rc && hub->unlisted)
        log_warn("the cache may have all files of %.200s: HF_HUB_OFFLINE=1 serves what the cache "
                 "has",
                 text);
    close_hub(hub);
    return rc;
}

int hub_list(const char *text, FILE *out, struct fault *fault) {
    struct hub *hub;
    int rc = open_named_hub(text, &hub, fault);
    if (rc) return rc;
    rc = hub_is_offline() ? refuse_offline(hub, fault) : open_hub(hub, fault);
    if (!rc) {
        const int chosen = hub_choose(&hub->name, &hub->tree, &hub->choice, fault);
        print_models(
            hub, chosen == 0 && hub->choice.format == HUB_GGUF ? hub->choice.file : SIZE_MAX, out);
    }
    close_hub(hub);
    return rc;
}

/* ---- keepd pull ---- */

static void pull_help(FILE *out) {
    fputs("Usage: keepd pull OWNER/NAME[@REVISION][:QUANTISATION | :FILE.gguf]\n"
          "\n"
          "Fetches a model of the Hugging Face Hub into its cache on this machine, which "
          "transformers\n"
          "and llama.cpp use, too, and prints its path. Without a quantisation: the files of a\n"
          "directory of safetensors; of a repository with GGUF files the one in 4 bits (Q4_K_M if\n"
          "there is one), after a list of all, with what fits into this machine's memory.\n"
          "\n"
          "A fetch that was interrupted goes on where it was. What has arrived is checked by the\n"
          "hub's sums. Serve with: keepd hf:OWNER/NAME:QUANTISATION, which fetches nothing where\n"
          "the files are here.\n"
          "\n"
          "Environment: HF_TOKEN, for gated and private models (or the file that hf auth login\n"
          "writes); HF_HOME or HF_HUB_CACHE, where the cache is; HF_ENDPOINT, another address of "
          "the\n"
          "hub; HF_HUB_OFFLINE=1, to fetch nothing; https_proxy.\n",
          out);
}

int hub_command(int argc, char **argv) {
    struct fault fault = {0};
    char path[PATH_MAX];
    if (argc == 3 && (strcmp(argv[2], "--help") == 0 || strcmp(argv[2], "-h") == 0)) {
        pull_help(stdout);
        return EXIT_SUCCESS;
    }
    if (argc != 3 || argv[2][0] == '-') {
        fprintf(stderr, "keepd: pull: expected one name, OWNER/NAME:QUANTISATION (pull --help)\n");
        return 78;
    }
    int rc = hub_find(argv[2], HUB_PULL, path, sizeof path, &fault);
    if (rc == 0) {
        printf("%s\n", path);
        return EXIT_SUCCESS;
    }
    fprintf(stderr, "keepd: cannot fetch %.200s: %s\n", argv[2], fault.text);
    return rc == ERR_IO || rc == ERR_NOMEM ? EXIT_FAILURE : 78;
}
