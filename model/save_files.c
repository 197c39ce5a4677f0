#include "model/save_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

#define COPIED_AT_ONCE ((size_t)1 << 20)

/* The folder of templates in a model's directory (text/text.c). */
#define TEMPLATES "additional_chat_templates"

static int io(struct fault *fault, const char *option, const char *path) {
    return fault_set(fault, ERR_IO, option, "%.200s: %s", path, strerror(errno));
}

static int join(char out[PATH_MAX], const char *option, const char *folder, const char *name,
                struct fault *fault) {
    const int n = snprintf(out, PATH_MAX, name ? "%s/%s" : "%s", folder, name);
    if (n >= 0 && n < PATH_MAX) return 0;
    return fault_set(fault, ERR_INVALID, option, "a file's name is too long");
}

/* ---- Beginning and end ---- */

/* Creates the new directory, or an empty new file, so that another run finds it. */
static int create(const struct save_files *files) {
    if (files->directory) return mkdir(files->partial, 0777);
    const int fd = open(files->partial, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return fd < 0 ? -1 : close(fd);
}

int save_files_open(struct save_files *files, const char *option, const char *to, bool directory,
                    struct fault *fault) {
    struct stat info;
    size_t size = strlen(to);
    while (size > 1 && to[size - 1] == '/') size--;
    *files = (struct save_files){.option = option, .directory = directory};
    if (size + sizeof ".partial" > sizeof files->partial)
        return fault_set(fault, ERR_INVALID, option, "the name is too long");
    snprintf(files->to, sizeof files->to, "%.*s", (int)size, to);
    snprintf(files->partial, sizeof files->partial, "%.*s.partial", (int)size, to);
    if (lstat(files->to, &info) == 0)
        return fault_set(fault, ERR_INVALID, option, "%.200s exists, and is not overwritten",
                         files->to);
    if (create(files) == 0) return 0;
    if (errno != EEXIST) return io(fault, files->option, files->partial);
    return fault_set(fault, ERR_INVALID, option,
                     "%.200s exists: another run writes it, or did not end; remove it then",
                     files->partial);
}

int save_files_replace(struct save_files *files, const char *option, const char *to,
                       struct fault *fault) {
    *files = (struct save_files){.option = option, .replace = true};
    if (join(files->to, option, to, NULL, NULL) || join(files->partial, option, to, NULL, NULL) ||
        strlen(to) + sizeof ".partial" > sizeof files->partial)
        return fault_set(fault, ERR_INVALID, option, "the name is too long");
    strcat(files->partial, ".partial");
    const int fd =
        open(files->partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    return fd < 0 || close(fd) ? io(fault, option, files->partial) : 0;
}

static int sync_folder(const char *path) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return ERR_IO;
    const int rc = fsync(fd) ? ERR_IO : 0;
    close(fd);
    return rc;
}

/* Writes the name of the folder that holds `path`. */
static void parent_of(const char *path, char out[PATH_MAX]) {
    const char *end = strrchr(path, '/');
    snprintf(out, PATH_MAX, "%.*s", end ? (int)(end - path + (end == path)) : 1, end ? path : ".");
}

static void remove_folder(const char *path) {
    DIR *folder = opendir(path);
    const struct dirent *entry;
    char inner[PATH_MAX];
    while (folder && (entry = readdir(folder))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (join(inner, "", path, entry->d_name, NULL) || !unlink(inner)) continue;
        if (!strcmp(entry->d_name, TEMPLATES)) remove_folder(inner);
    }
    if (folder) closedir(folder);
    (void)rmdir(path);
}

/* Gives the result its name. If another process has created a file of this name in the meantime,
 * that file stays. */
static int give_name(const struct save_files *files) {
    if (files->replace) return rename(files->partial, files->to);
    const int rc = renameat2(AT_FDCWD, files->partial, AT_FDCWD, files->to, RENAME_NOREPLACE);
    if (rc == 0 || (errno != EINVAL && errno != ENOSYS)) return rc;
    return rename(files->partial, files->to); /* the file system does not know that flag */
}

int save_files_close(const struct save_files *files, int rc, struct fault *fault) {
    char parent[PATH_MAX];
    parent_of(files->to, parent);
    if (!rc && files->directory && sync_folder(files->partial))
        rc = io(fault, files->option, files->partial);
    if (!rc && give_name(files)) rc = io(fault, files->option, files->to);
    if (!rc) return sync_folder(parent) ? io(fault, files->option, parent) : 0;
    if (files->directory)
        remove_folder(files->partial);
    else
        (void)unlink(files->partial);
    return rc;
}

/* ---- One file ---- */

int save_files_begin(const struct save_files *files, const char *name, struct save_file *out,
                     struct fault *fault) {
    out->option = files->option;
    int rc = join(out->path, files->option, files->partial, name, fault);
    if (rc) return rc;
    out->file = fopen(out->path, name ? "wbx" : "wb");
    return out->file ? 0 : io(fault, out->option, out->path);
}

int save_files_put(const struct save_file *file, const void *data, size_t bytes,
                   struct fault *fault) {
    if (bytes == 0 || fwrite(data, 1, bytes, file->file) == bytes) return 0;
    return io(fault, file->option, file->path);
}

int save_files_end(const struct save_file *file, int rc, struct fault *fault) {
    if (!rc && (fflush(file->file) || fsync(fileno(file->file))))
        rc = io(fault, file->option, file->path);
    if (fclose(file->file) && !rc) rc = io(fault, file->option, file->path);
    return rc;
}

int save_files_write(const struct save_files *files, const char *name, const struct buf *content,
                     struct fault *fault) {
    struct save_file file;
    if (content->failed) return fault_set(fault, ERR_NOMEM, "model", "no memory for %s", name);
    int rc = save_files_begin(files, name, &file, fault);
    if (rc) return rc;
    return save_files_end(&file, save_files_put(&file, content->data, content->size, fault), fault);
}

int save_files_copy(const struct save_files *files, const char *from, const char *name,
                    struct fault *fault) {
    struct save_file to;
    FILE *source = fopen(from, "rbe");
    if (!source) return io(fault, files->option, from);
    int rc = save_files_begin(files, name, &to, fault);
    if (!rc) {
        char *part = mem_must_alloc(COPIED_AT_ONCE, 1);
        size_t got;
        while (!rc && (got = fread(part, 1, COPIED_AT_ONCE, source)) > 0)
            rc = save_files_put(&to, part, got, fault);
        if (!rc && ferror(source)) rc = io(fault, files->option, from);
        mem_free(part);
        rc = save_files_end(&to, rc, fault);
    }
    fclose(source);
    return rc;
}

/* ---- Files beside the weights ---- */

static bool is_carried(const char *name) {
    static const char *const ends[] = {".safetensors", ".index.json", ".bin",      ".pt",
                                       ".pth",         ".gguf",       ".onnx",     ".h5",
                                       ".msgpack",     ".sha256",     "SHA256SUMS"};
    const size_t size = strlen(name);
    if (name[0] == '.' || !strcmp(name, "config.json")) return false;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const size_t end = strlen(ends[i]);
        if (size >= end && !strcmp(name + size - end, ends[i])) return false;
    }
    return true;
}

/* Returns whether it is a regular file that can be read. */
static bool is_readable(const char *path) {
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) return false;
    if (access(path, R_OK) == 0) return true;
    log_warn("%s is left out: %s", path, strerror(errno));
    return false;
}

/* Copies the files of a folder. `inner`: its name in the model's directory, or NULL for the
 * directory itself. */
static int copy_folder(const struct save_files *files, const char *from, const char *inner,
                       struct fault *fault) {
    DIR *folder = opendir(from);
    const struct dirent *entry;
    int rc = 0;
    if (!folder) return io(fault, files->option, from);
    while (!rc && (entry = readdir(folder))) {
        char path[PATH_MAX], name[PATH_MAX];
        if (!is_carried(entry->d_name)) continue;
        rc = join(path, files->option, from, entry->d_name, fault);
        if (!rc)
            rc = inner ? join(name, files->option, inner, entry->d_name, fault)
                       : join(name, files->option, entry->d_name, NULL, fault);
        if (!rc && is_readable(path)) rc = save_files_copy(files, path, name, fault);
    }
    closedir(folder);
    return rc;
}

/* Copies the settings of a module of sentence-transformers, if the folder is one's. The saved file
 * of weights has its tensors. */
static int copy_module(const struct save_files *files, const char *from, const char *folder,
                       struct fault *fault) {
    char inside[PATH_MAX], path[PATH_MAX], made[PATH_MAX], name[PATH_MAX];
    int rc = join(inside, files->option, from, folder, fault);
    if (!rc) rc = join(path, files->option, inside, "config.json", fault);
    if (rc || access(path, F_OK)) return rc;
    rc = join(made, files->option, files->partial, folder, fault);
    if (!rc) rc = join(name, files->option, folder, "config.json", fault);
    if (rc) return rc;
    if (mkdir(made, 0777)) return io(fault, files->option, made);
    rc = save_files_copy(files, path, name, fault);
    return !rc && sync_folder(made) ? io(fault, files->option, made) : rc;
}

static int copy_modules(const struct save_files *files, const char *from, struct fault *fault) {
    DIR *folder = opendir(from);
    const struct dirent *entry;
    int rc = 0;
    if (!folder) return io(fault, files->option, from);
    while (!rc && (entry = readdir(folder)))
        if (entry->d_name[0] != '.') rc = copy_module(files, from, entry->d_name, fault);
    closedir(folder);
    return rc;
}

int save_files_copy_others(const struct save_files *files, const char *from, struct fault *fault) {
    char templates[PATH_MAX], made[PATH_MAX];
    int rc = copy_folder(files, from, NULL, fault);
    if (!rc) rc = copy_modules(files, from, fault);
    if (!rc) rc = join(templates, files->option, from, TEMPLATES, fault);
    if (!rc) rc = join(made, files->option, files->partial, TEMPLATES, fault);
    if (rc || access(templates, F_OK)) return rc;
    if (mkdir(made, 0777)) return io(fault, files->option, made);
    rc = copy_folder(files, templates, TEMPLATES, fault);
    return !rc && sync_folder(made) ? io(fault, files->option, made) : rc;
}
