#include "daemon/hub_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"

#define SCAN_DEPTH_MAX 8
#define REF_BYTES_MAX  128
#define TOKEN_MAX      512
/* A list has at most HUB_FILES_MAX lines. */
#define LISTING_BYTES_MAX ((size_t)HUB_FILES_MAX * (HUB_PATH_MAX + 24))
#define LOCK_POLL_US      200000

/* ---- Environment ---- */

static const char *hub_env(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Writes `folder` and `rest`; ~ in front is the user's home. */
static bool write_folder_path(char *out, size_t size, const char *folder, const char *rest) {
    const char *home = hub_env("HOME");
    const bool own = folder[0] == '~' && (folder[1] == '/' || !folder[1]);
    if (own && !home) return false;
    const int n = snprintf(out, size, "%s%s%s", own ? home : "", folder + (own ? 1 : 0), rest);
    return n > 0 && (size_t)n < size;
}

/* The home of the hub's files, with `rest` behind it. */
static bool write_home_path(char *out, size_t size, const char *rest) {
    const char *home = hub_env("HF_HOME"), *service = hub_env("CACHE_DIRECTORY");
    const char *user = hub_env("XDG_CACHE_HOME");
    char tail[300], first[HUB_FOLDER_MAX];
    if (home) return write_folder_path(out, size, home, rest);
    snprintf(tail, sizeof tail, "/huggingface%s", rest);
    if (service && service[0] == '/') { /* the first of several */
        snprintf(first, sizeof first, "%.*s", (int)strcspn(service, ":"), service);
        return write_folder_path(out, size, first, tail);
    }
    if (user) return write_folder_path(out, size, user, tail);
    return write_folder_path(out, size, "~/.cache", tail);
}

bool hub_cache_folder(char *out, size_t size) {
    const char *given = hub_env("HF_HUB_CACHE");
    if (!given) given = hub_env("HUGGINGFACE_HUB_CACHE");
    return given ? write_folder_path(out, size, given, "") : write_home_path(out, size, "/hub");
}

static bool is_env_true(const char *value) {
    static const char *const words[] = {"1", "on", "yes", "true"};
    for (size_t i = 0; value && i < sizeof words / sizeof *words; i++)
        if (strcasecmp(value, words[i]) == 0) return true;
    return false;
}

bool hub_is_offline(void) {
    const char *hub = hub_env("HF_HUB_OFFLINE");
    return is_env_true(hub ? hub : hub_env("TRANSFORMERS_OFFLINE"));
}

const char *hub_endpoint(void) {
    const char *given = hub_env("HF_ENDPOINT");
    return given ? given : "https://huggingface.co";
}

/* Copies a token without the blanks around it. It stands in a header, so it has no others. */
static int copy_token(const char *text, const char *where, char *out, size_t size,
                      struct fault *fault) {
    text += strspn(text, " \t\r\n");
    const size_t n = strcspn(text, " \t\r\n");
    bool plain = n < size && !text[n + strspn(text + n, " \t\r\n")];
    for (size_t i = 0; i < n; i++) plain = plain && text[i] > 0x20 && text[i] < 0x7f;
    out[0] = '\0';
    if (!plain) return fault_set(fault, ERR_INVALID, "HF_TOKEN", "%s holds no token", where);
    memcpy(out, text, n);
    out[n] = '\0';
    return 0;
}

int hub_token(char *out, size_t size, struct fault *fault) {
    const char *given = hub_env("HF_TOKEN"), *path = hub_env("HF_TOKEN_PATH");
    char file[HUB_FOLDER_MAX], *data = NULL;
    size_t bytes;
    struct fault ignored;
    out[0] = '\0';
    if (is_env_true(hub_env("HF_HUB_DISABLE_IMPLICIT_TOKEN"))) return 0;
    if (!given) given = hub_env("HUGGING_FACE_HUB_TOKEN");
    if (given) return copy_token(given, "the environment", out, size, fault);
    if (!(path ? write_folder_path(file, sizeof file, path, "")
               : write_home_path(file, sizeof file, "/token")))
        return 0;
    if (file_read(file, TOKEN_MAX, &data, &bytes, &ignored)) return 0;
    int rc = copy_token(data, file, out, size, fault);
    mem_free(data);
    return rc;
}

/* ---- Paths ---- */

int hub_repo_open(const char *repo, struct hub_repo *out, struct fault *fault) {
    char cache[HUB_FOLDER_MAX];
    const int owner = (int)strcspn(repo, "/");
    if (!hub_cache_folder(cache, sizeof cache) || strlen(cache) > HUB_FOLDER_MAX - 300)
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "there is no folder for models of the hub: set HF_HOME");
    snprintf(out->folder, sizeof out->folder, "%.*s/models--%.*s--%.100s", HUB_FOLDER_MAX - 300,
             cache, owner, repo, repo + owner + 1);
    snprintf(out->locks, sizeof out->locks, "%.*s/.locks/models--%.*s--%.100s",
             HUB_FOLDER_MAX - 300, cache, owner, repo, repo + owner + 1);
    return 0;
}

bool hub_is_commit(const char *text) {
    return strlen(text) == HUB_COMMIT_SIZE - 1 && !text[strspn(text, "0123456789abcdef")];
}

bool hub_snapshot_path(const struct hub_repo *repo, const char *commit, const char *path, char *out,
                       size_t size) {
    const int n =
        snprintf(out, size, "%s/snapshots/%s%s%s", repo->folder, commit, path[0] ? "/" : "", path);
    return n > 0 && (size_t)n < size;
}

bool hub_blob_path(const struct hub_repo *repo, const char *oid, const char *end, char *out,
                   size_t size) {
    const int n = snprintf(out, size, "%s/blobs/%s%s", repo->folder, oid, end);
    return n > 0 && (size_t)n < size;
}

static int hub_path_fault(const char *path, struct fault *fault) {
    return fault_set(fault, ERR_IO, "model", "%.300s: %s", path, strerror(errno));
}

int hub_make_folders(const char *file, struct fault *fault) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", file);
    for (char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST) return hub_path_fault(path, fault);
        *at = '/';
    }
    return 0;
}

int64_t hub_disk_free(const struct hub_repo *repo) {
    char path[HUB_FOLDER_MAX];
    struct statvfs info;
    strcpy(path, repo->folder);
    for (;;) { /* the nearest folder that is there */
        char *slash = strrchr(path, '/');
        if (statvfs(path, &info) == 0) break;
        if (!slash || slash == path) return INT64_MAX;
        *slash = '\0';
    }
    const uint64_t bytes = (uint64_t)info.f_bavail * info.f_frsize;
    return bytes < INT64_MAX ? (int64_t)bytes : INT64_MAX;
}

/* ---- Revisions ---- */

static bool ref_path(const struct hub_repo *repo, const char *revision, char *out, size_t size) {
    const int n = snprintf(out, size, "%s/refs/%s", repo->folder, revision);
    return n > 0 && (size_t)n < size;
}

bool hub_ref_read(const struct hub_repo *repo, const char *revision, char commit[HUB_COMMIT_SIZE]) {
    char path[PATH_MAX], *data = NULL;
    size_t size = 0;
    struct fault ignored;
    if (hub_is_commit(revision)) {
        strcpy(commit, revision);
        return true;
    }
    if (!ref_path(repo, revision, path, sizeof path) ||
        file_read(path, REF_BYTES_MAX, &data, &size, &ignored))
        return false;
    data[strcspn(data, " \r\n")] = '\0';
    const bool good = hub_is_commit(data);
    if (good) strcpy(commit, data);
    mem_free(data);
    return good;
}

/* Puts a file in place whole: written beside it and renamed. The path has room for the name beside
 * it. */
static int write_whole_file(const char *path, const char *data, size_t size, struct fault *fault) {
    char fresh[PATH_MAX];
    snprintf(fresh, sizeof fresh, "%.*s.%ld.tmp", (int)sizeof fresh - 32, path, (long)getpid());
    int rc = hub_make_folders(path, fault);
    if (rc) return rc;
    FILE *file = fopen(fresh, "we");
    bool good = file && fwrite(data, 1, size, file) == size;
    if (file && fclose(file) != 0) good = false;
    if (good && rename(fresh, path) == 0) return 0;
    rc = hub_path_fault(fresh, fault);
    (void)unlink(fresh);
    return rc;
}

int hub_ref_write(const struct hub_repo *repo, const char *revision, const char *commit,
                  struct fault *fault) {
    char path[PATH_MAX], before[HUB_COMMIT_SIZE];
    if (hub_is_commit(revision)) return 0;
    if (hub_ref_read(repo, revision, before) && strcmp(before, commit) == 0) return 0;
    if (!ref_path(repo, revision, path, sizeof path - 32)) return 0;
    return write_whole_file(path, commit, strlen(commit), fault);
}

/* ---- Lists of files ---- */

static bool listing_path(const struct hub_repo *repo, const char *commit, char *out, size_t size) {
    const int n = snprintf(out, size, "%s/.keepd/%s", repo->folder, commit);
    return n > 0 && (size_t)n < size;
}

int hub_listing_write(const struct hub_repo *repo, const char *commit, const struct hub_tree *tree,
                      struct fault *fault) {
    char path[PATH_MAX];
    struct buf text;
    if (!listing_path(repo, commit, path, sizeof path - 32)) return 0;
    buf_open(&text, LISTING_BYTES_MAX);
    for (size_t i = 0; i < tree->count; i++)
        buf_fmt(&text, "%" PRId64 " %s\n", tree->files[i].size, tree->files[i].path);
    int rc = text.failed ? fault_set(fault, ERR_NOMEM, "model", "no memory for the list of files")
                         : write_whole_file(path, text.data ? text.data : "", text.size, fault);
    buf_close(&text);
    return rc;
}

bool hub_listing_read(const struct hub_repo *repo, const char *commit, struct hub_tree *tree) {
    char path[PATH_MAX], *data = NULL, *next;
    size_t bytes = 0;
    struct fault ignored;
    if (!listing_path(repo, commit, path, sizeof path) ||
        file_read(path, LISTING_BYTES_MAX, &data, &bytes, &ignored))
        return false;
    bool good = bytes > 0 && strlen(data) == bytes;
    for (char *line = data; good && *line; line = next) {
        char *name, *end = strchr(line, '\n');
        errno = 0;
        const long long size = strtoll(line, &name, 10);
        good = end && errno == 0 && name != line && *name == ' ';
        if (!good) break;
        *end = '\0';
        next = end + 1;
        good = hub_tree_add(tree, name + 1, size, "", &ignored) == 0;
    }
    mem_free(data);
    return good;
}

/* ---- Snapshots ---- */

static int scan_snapshot_folder(const char *folder, size_t root, int depth, struct hub_tree *tree,
                                struct fault *fault) {
    DIR *dir = opendir(folder);
    const struct dirent *entry;
    struct stat info;
    char path[PATH_MAX];
    int rc = 0;
    while (dir && rc == 0 && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        const int n = snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (n < 0 || (size_t)n >= sizeof path || stat(path, &info) != 0) continue;
        if (S_ISDIR(info.st_mode) && depth < SCAN_DEPTH_MAX)
            rc = scan_snapshot_folder(path, root, depth + 1, tree, fault);
        else if (S_ISREG(info.st_mode) && strlen(path + root) < HUB_PATH_MAX)
            rc = hub_tree_add(tree, path + root, info.st_size, "", fault);
    }
    if (dir) closedir(dir);
    return rc;
}

int hub_snapshot_scan(const struct hub_repo *repo, const char *commit, struct hub_tree *tree,
                      struct fault *fault) {
    char folder[PATH_MAX];
    if (!hub_snapshot_path(repo, commit, "", folder, sizeof folder)) return 0;
    return scan_snapshot_folder(folder, strlen(folder) + 1, 0, tree, fault);
}

int hub_link(const struct hub_repo *repo, const char *commit, const struct hub_file *file,
             struct fault *fault) {
    char path[PATH_MAX], fresh[PATH_MAX], target[PATH_MAX] = "../../";
    struct stat info;
    if (!hub_snapshot_path(repo, commit, file->path, path, sizeof path - 32))
        return fault_set(fault, ERR_LIMIT, "model", "%.200s: the path is too long", file->path);
    if (stat(path, &info) == 0 && info.st_size == file->size) return 0;
    int rc = hub_make_folders(path, fault);
    if (rc) return rc;
    size_t size = strlen(target);
    for (const char *at = strchr(file->path, '/'); at; at = strchr(at + 1, '/')) {
        memcpy(target + size, "../", 4);
        size += 3;
    }
    snprintf(target + size, sizeof target - size, "blobs/%s", file->oid);
    snprintf(fresh, sizeof fresh, "%.*s.%ld.tmp", (int)sizeof fresh - 32, path, (long)getpid());
    (void)unlink(fresh);
    if (symlink(target, fresh) == 0 && rename(fresh, path) == 0) return 0;
    rc = hub_path_fault(path, fault);
    (void)unlink(fresh);
    return rc;
}

/* ---- Locks ---- */

int hub_lock(const struct hub_repo *repo, const char *oid, void (*waits)(const char *oid), int *fd,
             struct fault *fault) {
    char path[PATH_MAX];
    *fd = -1;
    const int n = snprintf(path, sizeof path, "%s/%s.lock", repo->locks, oid);
    if (n < 0 || (size_t)n >= sizeof path) return 0;
    int rc = hub_make_folders(path, fault);
    if (rc) return rc;
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (*fd < 0) return hub_path_fault(path, fault);
    while (flock(*fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR) { /* a file system without locks */
            close(*fd);
            *fd = -1;
            return 0;
        }
        if (waits) waits(oid);
        waits = NULL;
        (void)usleep(LOCK_POLL_US);
    }
    return 0;
}
