#include "model/path.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/kind.h"

#define NAMES_MAX 4096 /* a folder with more names is not examined */
#define NAME_ROOM 256

/* Kinds of files, by their names. A name belongs to the first row that it fits. */
enum found {
    FOUND_CONFIG,
    FOUND_INDEX,
    FOUND_ADAPTER,
    FOUND_TOKENIZER,
    FOUND_PIECES,
    FOUND_UNFINISHED,
    FOUND_GGUF,
    FOUND_CONSOLIDATED,
    FOUND_ADAPTER_WEIGHTS,
    FOUND_GATES,
    FOUND_WEIGHTS,
    FOUND_PYTORCH,
    FOUND_OTHERS,
    FOUND_SNAPSHOTS,
    FOUND_KINDS
};

static const struct {
    enum found kind;
    bool end; /* true: the name ends so; false: it is the whole name */
    const char *name;
} name_rows[] = {
    {FOUND_CONFIG, false, "config.json"},
    {FOUND_INDEX, false, "model.safetensors.index.json"},
    {FOUND_ADAPTER, false, "adapter_config.json"},
    {FOUND_TOKENIZER, false, "tokenizer.json"},
    {FOUND_TOKENIZER, false, "vocab.json"},
    {FOUND_PIECES, false, "tokenizer.model"},
    {FOUND_PIECES, false, "tekken.json"},
    {FOUND_UNFINISHED, true, ".incomplete"},
    {FOUND_UNFINISHED, true, ".part"},
    {FOUND_UNFINISHED, true, ".partial"},
    {FOUND_UNFINISHED, true, ".aria2"},
    {FOUND_UNFINISHED, true, ".crdownload"},
    {FOUND_GGUF, true, ".gguf"},
    {FOUND_CONSOLIDATED, false, "consolidated.safetensors"},
    {FOUND_ADAPTER_WEIGHTS, false, "adapter_model.safetensors"},
    {FOUND_GATES, false, "gates.safetensors"},
    {FOUND_GATES, true, ".gates.safetensors"}, /* as keepd fit names them */
    {FOUND_WEIGHTS, true, ".safetensors"},
    {FOUND_PYTORCH, true, ".bin"},
    {FOUND_PYTORCH, true, ".pt"},
    {FOUND_PYTORCH, true, ".pth"},
    {FOUND_PYTORCH, true, ".ckpt"},
    {FOUND_OTHERS, true, ".onnx"},
    {FOUND_OTHERS, true, ".h5"},
    {FOUND_OTHERS, true, ".msgpack"},
    {FOUND_OTHERS, true, ".npz"},
    {FOUND_SNAPSHOTS, false, "snapshots"}, /* a folder of the Hugging Face cache */
};

/* The files of a folder: how many there are of each kind, and the alphabetically first name of
 * each. */
struct folder {
    const char *path;
    int count[FOUND_KINDS];
    char first[FOUND_KINDS][NAME_ROOM];
};

static bool fits_row(const char *name, const char *wanted, bool end) {
    const size_t size = strlen(name), tail = strlen(wanted);
    return end ? size > tail && strcmp(name + size - tail, wanted) == 0 : strcmp(name, wanted) == 0;
}

static void note_name(struct folder *f, const char *name) {
    for (size_t i = 0; i < sizeof name_rows / sizeof name_rows[0]; i++) {
        if (!fits_row(name, name_rows[i].name, name_rows[i].end)) continue;
        char *first = f->first[name_rows[i].kind];
        if (f->count[name_rows[i].kind]++ == 0 || strcmp(name, first) < 0)
            snprintf(first, NAME_ROOM, "%s", name);
        return;
    }
}

static bool read_folder(struct folder *f) {
    DIR *dir = opendir(f->path);
    const struct dirent *entry;
    if (!dir) return false;
    int count = 0;
    while (count <= NAMES_MAX && (entry = readdir(dir)) != NULL) {
        note_name(f, entry->d_name);
        count++;
    }
    closedir(dir);
    return count <= NAMES_MAX;
}

/* ---- Messages ---- */

#define FOLDER "%.140s "

static int say_gguf(const struct folder *f, struct fault *fault) {
    const char *name = f->first[FOUND_GGUF];
    const int others = f->count[FOUND_GGUF] - 1;
    if (others > 0)
        return fault_set(fault, ERR_INVALID, "model",
                         FOLDER
                         "holds GGUF files: name one of them, such as %.140s/%.100s (or one of "
                         "%d others; of a model in several files the first)",
                         f->path, f->path, name, others);
    return fault_set(fault, ERR_INVALID, "model",
                     FOLDER "holds a GGUF file: name it, %.140s/%.100s", f->path, f->path, name);
}

static int say_snapshots(const struct folder *f, struct fault *fault) {
    return fault_set(fault, ERR_INVALID, "model",
                     FOLDER "is a folder of the Hugging Face cache: name the one inside that holds "
                            "config.json, %.140s/snapshots/...",
                     f->path, f->path);
}

/* Explains a folder without weights, or with weights in another format. */
static int say_weights(const struct folder *f, struct fault *fault) {
    const int rc = ERR_NOTFOUND;
    if (f->count[FOUND_UNFINISHED])
        return fault_set(fault, rc, "model",
                         FOLDER "holds an unfinished download, %.80s: let it finish", f->path,
                         f->first[FOUND_UNFINISHED]);
    if (f->count[FOUND_PYTORCH])
        return fault_set(fault, rc, "model",
                         FOLDER
                         "holds weights of PyTorch (%.80s), which are not read: get the model "
                         "as safetensors or GGUF, or convert it",
                         f->path, f->first[FOUND_PYTORCH]);
    if (f->count[FOUND_CONSOLIDATED])
        return fault_set(fault, rc, "model",
                         FOLDER "holds consolidated.safetensors, Mistral's own form, which is not "
                                "read: download config.json and model*.safetensors, too",
                         f->path);
    if (f->count[FOUND_OTHERS])
        return fault_set(fault, rc, "model",
                         FOLDER
                         "holds weights in a format that is not read (%.80s): get the model as "
                         "safetensors or GGUF",
                         f->path, f->first[FOUND_OTHERS]);
    if (f->count[FOUND_CONFIG])
        return fault_set(fault, rc, "model",
                         FOLDER "holds config.json and no weights: neither model.safetensors nor "
                                "model.safetensors.index.json; download them, too",
                         f->path);
    if (f->count[FOUND_TOKENIZER] || f->count[FOUND_PIECES])
        return fault_set(fault, rc, "model",
                         FOLDER "holds a tokenizer and no model: download config.json and "
                                "*.safetensors, too",
                         f->path);
    return fault_set(fault, rc, "model",
                     FOLDER "holds no model: expected config.json, tokenizer.json and "
                            "*.safetensors, or name a GGUF file",
                     f->path);
}

static int check_folder(const char *path, bool config_only, struct fault *fault) {
    struct folder f = {.path = path};
    if (!read_folder(&f)) return 0;
    const bool weights = f.count[FOUND_WEIGHTS] || f.count[FOUND_INDEX];
    if (f.count[FOUND_CONFIG] && config_only) return 0;
    if (f.count[FOUND_CONFIG] && weights) {
        if (f.count[FOUND_TOKENIZER] || !f.count[FOUND_PIECES]) return 0;
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         FOLDER
                         "holds %.80s and no tokenizer.json, which keepd reads: download it, "
                         "too, or make it with transformers (AutoTokenizer, "
                         "save_pretrained)",
                         path, f.first[FOUND_PIECES]);
    }
    if (f.count[FOUND_ADAPTER] && !weights)
        return fault_set(fault, ERR_UNSUPPORTED, "model",
                         FOLDER "holds an adapter (LoRA), not a whole model: merge it with its "
                                "base model",
                         path);
    if (f.count[FOUND_GGUF] && !weights) return say_gguf(&f, fault);
    if (f.count[FOUND_SNAPSHOTS] && !f.count[FOUND_CONFIG]) return say_snapshots(&f, fault);
    if (weights)
        return fault_set(fault, ERR_NOTFOUND, "model",
                         FOLDER "holds weights and no config.json: download the other files of the "
                                "model, too",
                         path);
    return say_weights(&f, fault);
}

/* Explains a path to a file beside a config.json: the file is part of a model, so the fault names
 * the directory. */
static int name_folder(const char *path, int rc, struct fault *fault) {
    const char *end = strrchr(path, '/');
    const int size = end ? (int)(end - path) : 0;
    char beside[PATH_MAX];
    const int n = snprintf(beside, sizeof beside, "%.*s%sconfig.json", size, path, end ? "/" : "");
    if (n < 0 || (size_t)n >= sizeof beside || access(beside, F_OK) != 0) return rc;
    return fault_set(fault, ERR_INVALID, "model",
                     "%.200s is one file of a model: name its directory, %.*s", path,
                     end ? size : 1, end ? path : ".");
}

static int check_file(const char *path, struct fault *fault) {
    char bytes[KIND_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const ssize_t size = fd < 0 ? -1 : read(fd, bytes, sizeof bytes);
    if (fd >= 0) close(fd);
    const int rc = size < 0 ? 0 : kind_check(bytes, (size_t)size, KIND_GGUF, "model", path, fault);
    const bool gguf =
        size < 0 || fits_row(path, ".gguf", true) || (size >= 4 && memcmp(bytes, "GGUF", 4) == 0);
    return gguf ? rc : name_folder(path, rc, fault);
}

int model_path_check(const char *path, bool config_only, struct fault *fault) {
    struct stat info;
    if (stat(path, &info) != 0) return 0;
    if (S_ISDIR(info.st_mode)) return check_folder(path, config_only, fault);
    return S_ISREG(info.st_mode) ? check_file(path, fault) : 0;
}
