#include "config/entries.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"

#define ENDING ".gguf"

void entries_add(struct config *config, const char *names, const char *path) {
    struct config_model *models = mem_must_alloc(config->model_count + 1, sizeof *models);
    for (size_t i = 0; i < config->model_count; i++) models[i] = config->models[i];
    models[config->model_count++] =
        (struct config_model){.names = mem_must_strdup(names), .path = mem_must_strdup(path)};
    mem_free(config->models);
    config->models = models;
}

static bool entries_ends_with(const char *text, size_t size, const char *ending) {
    const size_t tail = strlen(ending);
    return size > tail && memcmp(text + size - tail, ending, tail) == 0;
}

/* Names a model by its path: "bundled/keepd-nano/" -> "keepd-nano", "a/b.gguf" -> "b"; links are
 * not followed, because files of the hub's cache have names and the files behind them have sums.
 * "." and ".." are resolved first. A model of the hub has the name that was given. The caller frees
 * the name. */
static char *name_of_path(const char *given) {
    const char *dots = strrchr(given, '.');
    const bool resolve = dots && !dots[1 + strspn(dots + 1, "/")];
    char *name, *real = resolve ? realpath(given, NULL) : NULL;
    const char *path = real ? real : given;
    if (strncmp(given, "hf:", 3) == 0)
        return mem_must_strdup(given + (strncmp(given, "hf://", 5) == 0 ? 5 : 3));
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    size_t start = end;
    while (start > 0 && path[start - 1] != '/') start--;
    if (entries_ends_with(path + start, end - start, ENDING)) end -= sizeof ENDING - 1;
    name = mem_must_alloc(end - start + 1, 1);
    memcpy(name, path + start, end - start);
    free(real);
    return name;
}

/* Returns the = sign behind a name; NULL: the whole text is a path. A name may have slashes, as
 * those of the hub, but does not begin like a path or an address. */
static const char *find_sign(const char *text) {
    const char *sign = strchr(text, '=');
    if (!sign || sign == text || strchr("/.~", *text) || strncmp(text, "hf:", 3) == 0) return NULL;
    if (strncmp(text, "http", 4) == 0 && strstr(text, "://")) return NULL;
    return access(text, F_OK) == 0 ? NULL : sign;
}

int entries_add_text(struct config *config, const char *text, struct fault *fault) {
    const char *sign = find_sign(text);
    char names[1024];
    if (!sign) {
        char *name = name_of_path(text);
        entries_add(config, name, text);
        mem_free(name);
        return 0;
    }
    if (!sign[1] || (size_t)(sign - text) >= sizeof names)
        return fault_set(fault, ERR_INVALID, "model",
                         "'%.100s': expected a path, or a name, an = sign and a path", text);
    snprintf(names, sizeof names, "%.*s", (int)(sign - text), text);
    entries_add(config, names, sign + 1);
    return 0;
}

/* Returns whether the file is not the first one of a split model, or no model of texts. */
static bool is_part(const char *name) {
    static const char digits[] = "0123456789";
    const char *of = strstr(name, "-of-0");
    return (of && of - name >= 5 && strspn(of - 5, digits) == 5 &&
            strncmp(of - 5, "00001", 5) != 0) ||
           strncmp(name, "mmproj", 6) == 0;
}

static bool is_model(const char *path, const char *name) {
    char config[4096];
    struct stat info;
    if (name[0] == '.' || stat(path, &info) != 0) return false;
    if (S_ISREG(info.st_mode))
        return entries_ends_with(name, strlen(name), ENDING) && !is_part(name);
    return (size_t)snprintf(config, sizeof config, "%s/config.json", path) < sizeof config &&
           access(config, F_OK) == 0;
}

int entries_add_folder(struct config *config, const char *folder, struct fault *fault) {
    struct dirent **found;
    const size_t before = config->model_count;
    int rc = 0, count = scandir(folder, &found, NULL, alphasort);
    if (count < 0)
        return fault_set(fault, ERR_IO, "models-dir", "%.200s: %s", folder, strerror(errno));
    for (int i = 0; i < count; i++) {
        char path[4096];
        const bool fits =
            (size_t)snprintf(path, sizeof path, "%s/%s", folder, found[i]->d_name) < sizeof path;
        if (!rc && fits && is_model(path, found[i]->d_name))
            rc = entries_add_text(config, path, fault);
        free(found[i]);
    }
    free(found);
    if (!rc && config->model_count == before)
        rc = fault_set(fault, ERR_NOTFOUND, "models-dir",
                       "%.200s has no model: no file NAME.gguf, and no directory with config.json",
                       folder);
    return rc;
}

bool entries_is_first(const char *names, const char *name) {
    const size_t size = strlen(name);
    return strcspn(names, ",") == size && strncmp(names, name, size) == 0;
}

struct config_model *entries_find(const struct config *config, const char *name) {
    for (size_t i = 0; i < config->model_count; i++)
        if (entries_is_first(config->models[i].names, name)) return &config->models[i];
    return NULL;
}

void entries_close(struct config *config) {
    for (size_t i = 0; i < config->model_count; i++) {
        mem_free(config->models[i].names);
        mem_free(config->models[i].path);
    }
    mem_free(config->models);
    config->models = NULL;
    config->model_count = 0;
}
