#include "daemon/find_model.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* Whether a path that does not exist is the name of a model in the hub: OWNER/NAME, also behind a
 * host or as an address. A relative path has the same form, but its first folder exists. */
static bool is_hub_id(const char *text, struct hub_name *name) {
    static const char *const fronts[] = {"huggingface.co/", "hf.co/"};
    char folder[128];
    struct stat info;
    struct fault ignored;
    bool of_hub = strncmp(text, "hf://", 5) == 0;
    const char *host = strstr(text, "://") ? strstr(text, "://") + 3 : text;
    for (size_t i = 0; i < sizeof fronts / sizeof *fronts; i++)
        of_hub = of_hub || strncmp(host, fronts[i], strlen(fronts[i])) == 0;
    if ((host != text && !of_hub) || hub_name_parse(text, name, &ignored)) return false;
    snprintf(folder, sizeof folder, "%.*s", (int)strcspn(text, "/"), text);
    return of_hub || stat(folder, &info) != 0 || !S_ISDIR(info.st_mode);
}

/* Explains how to fetch a model that does not exist here: keepd downloads nothing that was not
 * named as a model of the hub. */
static int refuse_missing(const char *path, const char *why, struct fault *fault) {
    struct hub_name name;
    char id[700];
    if (is_hub_id(path, &name)) {
        hub_name_write(&name, id, sizeof id);
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "no such file or directory; for the model of the Hugging Face Hub: keepd "
                         "%.150s, or fetch it first with keepd pull %.150s",
                         id, id + strlen("hf:"));
    }
    if (strstr(path, "://"))
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "%.200s is a URL, and keepd downloads only from the Hugging Face Hub: "
                         "fetch a GGUF file with curl -fLO, and name the file",
                         path);
    if (path[0] == '~')
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "%.200s: %s; the shell replaces ~ only at the start of a word without "
                         "quotes",
                         path, why);
    return fault_set(fault, ERR_NOTFOUND, "model",
                     "%.200s: %s; a model is a directory or a GGUF file (make serve MODEL=smollm2 "
                     "fetches a small one)",
                     path, why);
}

/* Checks that the path is a directory or a file. The engine checks what is in it. */
static int check_model_path(const char *path, struct fault *fault) {
    struct stat info;
    if (stat(path, &info) == 0 && S_ISREG(info.st_mode)) return 0;
    DIR *dir = opendir(path);
    if (!dir) return refuse_missing(path, strerror(errno), fault);
    closedir(dir);
    return 0;
}

/* Finds a draft model that is named by its place in the hub; the engine checks a path. On failure
 * prints the reason and returns the exit status. */
static int find_draft_model(const struct config *config, enum hub_use use, struct start *start) {
    const char *draft = config->engine.draft_model;
    struct fault fault = {0};
    if (!draft || !hub_is_name(draft)) return 0;
    if (!hub_find(draft, use, start->draft_model, sizeof start->draft_model, &fault)) return 0;
    if (strcmp(fault.field, "model") == 0) strcpy(fault.field, "draft-model");
    return start_report(
        use == HUB_CACHED && fault.code == ERR_NOTFOUND ? "draft-model: a start fetches it" : "",
        &fault);
}

bool find_names_hub(const struct config *config) {
    const char *draft = config->engine.draft_model;
    return hub_is_name(config->engine.model_dir) || (draft && hub_is_name(draft));
}

int find_model(const struct config *config, enum hub_use use, struct start *start) {
    const char *model = config->engine.model_dir;
    struct fault fault = {0};
    if (!hub_is_name(model))
        return check_model_path(model, &fault) ? start_refuse("the model is refused", &fault)
                                               : find_draft_model(config, use, start);
    if (!hub_find(model, use, start->model, sizeof start->model, &fault))
        return find_draft_model(config, use, start);
    if (config->inspect && fault.code == ERR_NOTFOUND) {
        struct fault why = {0};
        if (hub_list(model, stdout, &why)) fault = why;
    } else if (use == HUB_CACHED && fault.code == ERR_NOTFOUND) {
        return start_report("model: a start fetches it", &fault);
    }
    return start_report("", &fault);
}
