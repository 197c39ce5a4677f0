#include "daemon/hub_name.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"
#include "base/mem.h"

#define TREE_BYTES_MAX  ((size_t)64 << 20)
#define TREE_DEPTH_MAX  16
#define TREE_NODES_MAX  ((size_t)1 << 20)
#define SMALL_BYTES_MAX ((int64_t)256 << 20) /* size of a file beside the weights */
#define CACHE_ROOM      ((int64_t)256 << 20)
#define PROCESS_ROOM    ((int64_t)60 << 20)

#define HUB_MODULES "modules.json"

/* So no sum of the sizes of a repository's files overflows. */
_Static_assert(HUB_SIZE_MAX < (INT64_MAX - CACHE_ROOM - PROCESS_ROOM) / HUB_FILES_MAX,
               "sums of sizes fit");

#define COUNT(table) (sizeof(table) / sizeof *(table))

/* ---- Names ---- */

static const char repo_letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                   "0123456789._-";

bool hub_is_name(const char *text) {
    return strncmp(text, "hf:", 3) == 0;
}

/* Passes over what says that a name is one of the hub. */
static const char *skip_hub_prefix(const char *text, bool *address) {
    static const char *const fronts[] = {"https://huggingface.co/",
                                         "http://huggingface.co/",
                                         "https://hf.co/",
                                         "http://hf.co/",
                                         "huggingface.co/",
                                         "hf.co/",
                                         "hf://",
                                         "hf:"};
    *address = false;
    for (size_t i = 0; i < COUNT(fronts); i++)
        if (strncmp(text, fronts[i], strlen(fronts[i])) == 0) {
            *address = i < 6;
            return text + strlen(fronts[i]);
        }
    return text;
}

/* Checks one of the two parts of a repository's name: the hub permits 96 letters, and no two signs
 * that stand for a folder's slash in the cache. */
static bool is_repo_part(const char *part, size_t size) {
    if (size == 0 || size > 96 || part[0] == '.' || part[0] == '-') return false;
    if (part[size - 1] == '.' || part[size - 1] == '-') return false;
    for (size_t i = 0; i + 1 < size; i++)
        if ((part[i] == '-' || part[i] == '.') && part[i] == part[i + 1]) return false;
    return true;
}

/* A relative path without parts that lead elsewhere or that no name has. */
static bool is_hub_path(const char *path) {
    const size_t size = strlen(path);
    if (size == 0 || size >= HUB_PATH_MAX || path[0] == '/' || path[size - 1] == '/') return false;
    for (const char *at = path; *at; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7f || *at == '\\') return false;
    for (const char *part = path; part; part = strchr(part, '/') ? strchr(part, '/') + 1 : NULL) {
        const size_t n = strcspn(part, "/");
        if (n == 0 || n > 255 || (n <= 2 && strncmp(part, "..", n) == 0)) return false;
    }
    return true;
}

static bool is_hub_revision(const char *text) {
    return is_hub_path(text) &&
           !text[strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                              "0123456789._-/+")];
}

static int refuse_hub_name(const char *text, struct fault *fault) {
    return fault_set(fault, ERR_INVALID, "model",
                     "%.120s is no name of a model in the hub: hf:OWNER/NAME, perhaps with "
                     "@REVISION, and with :QUANTISATION or :FILE.gguf at the end",
                     text);
}

static bool copy_name_part(char *out, size_t room, const char *from, size_t size) {
    if (size == 0 || size >= room) return false;
    memcpy(out, from, size);
    out[size] = '\0';
    return true;
}

/* Reads the rest of an address behind the repository: /tree/REVISION, /blob/REVISION/FILE,
 * /resolve/REVISION/FILE. A revision in it has no slash. */
static bool parse_hub_address(const char *rest, struct hub_name *name) {
    char whole[512];
    if (strlen(rest) >= sizeof whole) return false;
    strcpy(whole, rest);
    whole[strcspn(whole, "?#")] = '\0';
    char *at = whole + (whole[0] == '/');
    if (!*at) return true;
    const size_t kind = strcspn(at, "/");
    const bool tree = strncmp(at, "tree", kind) == 0,
               file = strncmp(at, "blob", kind) == 0 || strncmp(at, "resolve", kind) == 0;
    if (!tree && !file) return false;
    at += kind + (at[kind] == '/');
    const size_t revision = strcspn(at, "/");
    if (!copy_name_part(name->revision, sizeof name->revision, at, revision)) return false;
    at += revision + (at[revision] == '/');
    if (!*at) return tree;
    return file && copy_name_part(name->pick, sizeof name->pick, at, strlen(at));
}

/* Reads the rest of a name behind the repository: @REVISION and :PICK, in any order. */
static bool parse_hub_suffixes(const char *rest, struct hub_name *name) {
    while (*rest) {
        const size_t size = strcspn(rest + 1, *rest == '@' ? ":" : "@");
        const bool taken =
            *rest == '@'   ? copy_name_part(name->revision, sizeof name->revision, rest + 1, size)
            : *rest == ':' ? copy_name_part(name->pick, sizeof name->pick, rest + 1, size)
                           : false;
        if (!taken) return false;
        rest += 1 + size;
    }
    return true;
}

int hub_name_parse(const char *text, struct hub_name *name, struct fault *fault) {
    bool address;
    const char *at = skip_hub_prefix(text, &address);
    const size_t owner = strspn(at, repo_letters);
    *name = (struct hub_name){.revision = "main"};
    if (at[owner] != '/') return refuse_hub_name(text, fault);
    const size_t own = strspn(at + owner + 1, repo_letters), size = owner + 1 + own;
    if (!is_repo_part(at, owner) || !is_repo_part(at + owner + 1, own) ||
        !copy_name_part(name->repo, sizeof name->repo, at, size))
        return refuse_hub_name(text, fault);
    at += size;
    const bool good = address && (*at == '/' || *at == '?' || *at == '#')
                          ? parse_hub_address(at, name)
                          : parse_hub_suffixes(at, name);
    if (!good || !is_hub_revision(name->revision) || (name->pick[0] && !is_hub_path(name->pick)))
        return refuse_hub_name(text, fault);
    return 0;
}

void hub_name_write(const struct hub_name *name, char *out, size_t size) {
    const bool main_branch = strcmp(name->revision, "main") == 0;
    snprintf(out, size, "hf:%s%s%s%s%s", name->repo, main_branch ? "" : "@",
             main_branch ? "" : name->revision, name->pick[0] ? ":" : "", name->pick);
}

/* ---- Trees ---- */

/* Lower-case hexadecimal digits, as many as SHA-1 or SHA-256 has. */
static bool is_hub_oid(const char *text) {
    const size_t size = strlen(text);
    return (size == 40 || size == 64) && !text[strspn(text, "0123456789abcdef")];
}

static bool grow_tree(struct hub_tree *tree) {
    if (tree->count < tree->capacity) return true;
    const size_t more = tree->capacity ? 2 * tree->capacity : 64;
    struct hub_file *files =
        mem_try_realloc(tree->files, tree->capacity * sizeof *files, more * sizeof *files);
    if (!files) return false;
    tree->files = files;
    tree->capacity = more;
    return true;
}

int hub_tree_add(struct hub_tree *tree, const char *path, int64_t size, const char *oid,
                 struct fault *fault) {
    if (!is_hub_path(path) || size < 0 || size > HUB_SIZE_MAX || (oid[0] && !is_hub_oid(oid)))
        return fault_set(fault, ERR_MALFORMED, "model",
                         "the repository has a file whose name, size or sum is none");
    if (tree->count == HUB_FILES_MAX)
        return fault_set(fault, ERR_LIMIT, "model", "the repository has more than %d files",
                         HUB_FILES_MAX);
    const size_t length = strlen(path) + 1;
    char *copy = grow_tree(tree) ? mem_try_alloc(length, 1) : NULL;
    if (!copy) return fault_set(fault, ERR_NOMEM, "model", "no memory for the list of files");
    memcpy(copy, path, length);
    struct hub_file *file = &tree->files[tree->count++];
    *file = (struct hub_file){.path = copy, .size = size};
    memcpy(file->oid, oid, strlen(oid) + 1);
    return 0;
}

static int read_tree_item(struct hub_tree *tree, const cJSON *item, struct fault *fault) {
    const char *type = "", *path = "", *oid = "";
    int64_t size = 0;
    const cJSON *lfs = json_get(item, "lfs");
    int rc = json_str(item, "tree", "type", &type, fault);
    if (rc || strcmp(type, "file") != 0) return rc;
    rc = json_str(item, "tree", "path", &path, fault);
    if (!rc) rc = json_str(lfs ? lfs : item, "tree", "oid", &oid, fault);
    if (!rc) rc = json_int(lfs ? lfs : item, "tree", "size", 0, HUB_SIZE_MAX, &size, fault);
    if (rc) return rc;
    if (!is_hub_oid(oid))
        return fault_set(fault, ERR_MALFORMED, "model", "the hub gives no sum of %.200s", path);
    return hub_tree_add(tree, path, size, oid, fault);
}

int hub_tree_read(struct hub_tree *tree, const char *json, size_t size, struct fault *fault) {
    const struct json_limits limits = {
        .bytes = TREE_BYTES_MAX, .depth = TREE_DEPTH_MAX, .nodes = TREE_NODES_MAX};
    cJSON *root = NULL;
    int rc = json_parse(json, size, &limits, &root, fault);
    if (rc == 0 && !cJSON_IsArray(root))
        rc = fault_set(fault, ERR_MALFORMED, "model", "the hub's list of files is no list");
    const cJSON *item = rc == 0 ? root->child : NULL;
    for (; rc == 0 && item; item = item->next)
        if (cJSON_IsObject(item)) rc = read_tree_item(tree, item, fault);
    json_free(root);
    return rc;
}

void hub_tree_close(struct hub_tree *tree) {
    for (size_t i = 0; i < tree->count; i++) mem_free(tree->files[i].path);
    mem_free(tree->files);
    *tree = (struct hub_tree){0};
}

static int hub_by_path(const void *a, const void *b) {
    return strcmp(((const struct hub_file *)a)->path, ((const struct hub_file *)b)->path);
}

static void sort_hub_tree(struct hub_tree *tree) {
    if (tree->count) qsort(tree->files, tree->count, sizeof *tree->files, hub_by_path);
}

struct hub_file *hub_tree_find(const struct hub_tree *tree, const char *path) {
    char copy[HUB_PATH_MAX];
    struct hub_file wanted = {.path = copy};
    if (tree->count == 0 || strlen(path) >= sizeof copy) return NULL;
    strcpy(copy, path);
    return bsearch(&wanted, tree->files, tree->count, sizeof wanted, hub_by_path);
}

/* ---- GGUF models ---- */

static const char *file_name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool ends_without_case(const char *text, size_t size, const char *end) {
    const size_t tail = strlen(end);
    return size > tail && strncasecmp(text + size - tail, end, tail) == 0;
}

/* Looks for `word` in the path, in any case; with a border of a word before and behind it. `end`:
 * nothing follows it in the first `size` bytes. */
static bool has_path_word(const char *path, size_t size, const char *word, bool end) {
    const size_t length = strlen(word);
    for (size_t i = 0; i + length <= size; i++) {
        if (strncasecmp(path + i, word, length) != 0) continue;
        const char before = i ? path[i - 1] : '/',
                   behind = i + length < size ? path[i + length] : '/';
        if (isalnum((unsigned char)before) || before == '_') continue;
        if (isalnum((unsigned char)behind) || behind == '_') continue;
        if (!end || i + length == size) return true;
    }
    return false;
}

/* "a/b-Q8_0-00002-of-00003.gguf": the size of "a/b-Q8_0", part 2 of 3. */
static size_t split_part_path(const char *path, int *part, int *parts) {
    static const char form[] = "-00000-of-00000";
    const size_t size = strlen(path) - strlen(".gguf"), tail = sizeof form - 1;
    *part = *parts = 1;
    if (size <= tail) return size;
    const char *end = path + size - tail;
    for (size_t i = 0; i < tail; i++)
        if (form[i] == '0' ? !isdigit((unsigned char)end[i]) : end[i] != form[i]) return size;
    *part = atoi(end + 1);
    *parts = atoi(end + 10);
    return size - tail;
}

static bool is_model_gguf(const char *path) {
    static const char *const others[] = {"mmproj", "imatrix", "mtp-", "eagle3-", "dflash-"};
    const char *base = file_name_of(path);
    if (!ends_without_case(path, strlen(path), ".gguf")) return false;
    for (size_t i = 0; i < COUNT(others); i++)
        if (strcasestr(base, others[i])) return false;
    return true;
}

/* The name of a quantisation: Q4_K_M, IQ4_XS, BF16, MXFP4. */
static bool is_quantisation(const char *text, size_t size) {
    static const char *const fronts[] = {"IQ", "Q", "TQ", "BF", "F", "FP", "MXFP", "NVFP"};
    for (size_t i = 0; i < COUNT(fronts); i++) {
        const size_t n = strlen(fronts[i]);
        if (size > n && strncasecmp(text, fronts[i], n) == 0 && isdigit((unsigned char)text[n]))
            return true;
    }
    return false;
}

/* The last part of the name if it is a quantisation, with UD- in front; else the whole name. */
static void write_quantisation(const char *path, size_t size, char out[64]) {
    const char *base = file_name_of(path), *end = path + size, *last = end;
    while (last > base && last[-1] != '-' && last[-1] != '.') last--;
    const bool known = is_quantisation(last, (size_t)(end - last));
    if (known && last - base >= 3 && strncasecmp(last - 3, "UD-", 3) == 0) last -= 3;
    if (!known) last = base;
    snprintf(out, 64, "%.*s", (int)(end - last), last);
}

static int hub_by_size(const void *a, const void *b) {
    const struct hub_model *x = a, *y = b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* The first part of the model of which this file is one. */
static struct hub_model *find_model_of_part(const struct hub_tree *tree, struct hub_model *models,
                                            size_t count, const char *path, size_t size,
                                            int parts) {
    for (size_t i = 0; i < count; i++) {
        const char *other = tree->files[models[i].first].path;
        int part, others;
        if (split_part_path(other, &part, &others) == size && others == parts &&
            strncmp(other, path, size) == 0)
            return &models[i];
    }
    return NULL;
}

size_t hub_models(const struct hub_tree *tree, struct hub_model *out) {
    size_t count = 0;
    for (size_t i = 0; i < tree->count; i++) {
        const char *path = tree->files[i].path;
        int part, parts;
        if (!is_model_gguf(path)) continue;
        const size_t size = split_part_path(path, &part, &parts);
        struct hub_model *model =
            parts > 1 ? find_model_of_part(tree, out, count, path, size, parts) : NULL;
        if (!model) {
            if (count == HUB_MODELS_MAX) continue;
            model = &out[count++];
            *model = (struct hub_model){.first = i, .parts = parts};
            write_quantisation(path, size, model->label);
        }
        if (part == 1) model->first = i;
        model->found++;
        model->bytes += tree->files[i].size;
    }
    qsort(out, count, sizeof *out, hub_by_size);
    return count;
}

int64_t hub_need(int64_t bytes) {
    return bytes + CACHE_ROOM + PROCESS_ROOM;
}

bool hub_is_read(const char *label) {
    static const char *const unread[] = {"IQ1", "IQ2", "IQ3", "TQ"};
    const char *name = strncasecmp(label, "UD-", 3) == 0 ? label + 3 : label;
    for (size_t i = 0; i < COUNT(unread); i++)
        if (strncasecmp(name, unread[i], strlen(unread[i])) == 0) return false;
    return true;
}

/* ---- Choosing ---- */

static size_t model_stem_size(const struct hub_tree *tree, const struct hub_model *model) {
    int part, parts;
    return split_part_path(tree->files[model->first].path, &part, &parts);
}

/* The model that a pick names: a file by its path or its name, else the shortest name that ends
 * with the quantisation, else the shortest that has it anywhere, in a folder's name, too. */
static const struct hub_model *find_picked(const struct hub_tree *tree,
                                           const struct hub_model *models, size_t count,
                                           const char *pick) {
    const struct hub_model *found = NULL;
    for (int pass = 0; pass < 4 && !found; pass++)
        for (size_t i = 0; i < count; i++) {
            const char *path = tree->files[models[i].first].path;
            const size_t size = model_stem_size(tree, &models[i]);
            const bool fits = pass == 0   ? strcmp(path, pick) == 0
                              : pass == 1 ? strcmp(file_name_of(path), pick) == 0
                                          : has_path_word(path, size, pick, pass == 2);
            if (fits && (!found || size < model_stem_size(tree, found))) found = &models[i];
        }
    return found;
}

/* The quantisations of a default, best first: what loses little at 4 bits, then more bits. */
static const struct hub_model *find_default(const struct hub_tree *tree,
                                            const struct hub_model *models, size_t count) {
    static const char *const order[] = {"Q4_K_M", "Q4_K_S", "Q4_K_XL", "Q4_K_L", "IQ4_XS", "IQ4_NL",
                                        "Q4_1",   "Q4_0",   "MXFP4",   "Q5_K_M", "Q5_K_S", "Q5_1",
                                        "Q5_0",   "Q6_K",   "Q8_0",    "Q3_K_L", "Q3_K_M", "Q3_K_S",
                                        "Q2_K",   "BF16",   "F16",     "F32"};
    for (size_t i = 0; i < COUNT(order); i++) {
        const struct hub_model *found = find_picked(tree, models, count, order[i]);
        if (found) return found;
    }
    return count ? &models[0] : NULL;
}

static int want_model_parts(struct hub_tree *tree, const struct hub_model *model,
                            struct fault *fault) {
    const char *first = tree->files[model->first].path;
    const size_t size = model_stem_size(tree, model);
    if (model->found != model->parts)
        return fault_set(fault, ERR_NOTFOUND, "model", "%.200s: the repository has %d of %d parts",
                         first, model->found, model->parts);
    for (size_t i = 0; i < tree->count; i++) {
        const char *path = tree->files[i].path;
        int part, parts;
        if (is_model_gguf(path) && split_part_path(path, &part, &parts) == size &&
            parts == model->parts && strncmp(path, first, size) == 0)
            tree->files[i].wanted = true;
    }
    return 0;
}

static bool hub_is_weights(const char *path) {
    return ends_without_case(path, strlen(path), ".safetensors") && !strchr(path, '/') &&
           strncmp(path, "adapter_model", 13) != 0 && strncmp(path, "consolidated", 12) != 0 &&
           strcmp(path, "gates.safetensors") != 0;
}

static bool is_directory_model(const struct hub_tree *tree) {
    bool config = false, weights = false;
    for (size_t i = 0; i < tree->count; i++) {
        config = config || strcmp(tree->files[i].path, "config.json") == 0;
        weights = weights || hub_is_weights(tree->files[i].path);
    }
    return config && weights;
}

/* The files beside the weights that a directory needs. modules.json may name any folder for the
 * settings of vectors (model/pooling.h); without it they are in 1_Pooling. */
static bool is_beside_weights(const char *path, bool has_modules) {
    static const char *const names[] = {"config.json",
                                        "generation_config.json",
                                        "tokenizer.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "tokenizer_config.json",
                                        "added_tokens.json",
                                        "special_tokens_map.json",
                                        "chat_template.json",
                                        "chat_template.jinja",
                                        "hf_quant_config.json",
                                        "tokenizer.model",
                                        "tekken.json",
                                        HUB_INDEX,
                                        "gates.safetensors",
                                        "preprocessor_config.json",
                                        HUB_MODULES,
                                        "config_sentence_transformers.json",
                                        "sentence_bert_config.json",
                                        "1_Pooling/config.json",
                                        "additional_chat_templates/tool_use.jinja"};
    for (size_t i = 0; i < COUNT(names); i++)
        if (strcmp(path, names[i]) == 0) return true;
    return has_modules && strchr(path, '/') &&
           (strcmp(file_name_of(path), "config.json") == 0 ||
            ends_without_case(path, strlen(path), "_dense/model.safetensors"));
}

static int choose_directory(struct hub_tree *tree, struct hub_choice *choice, struct fault *fault) {
    struct hub_file *whole = hub_tree_find(tree, "model.safetensors");
    const bool index = hub_tree_find(tree, HUB_INDEX) != NULL;
    const bool has_modules = hub_tree_find(tree, HUB_MODULES) != NULL;
    choice->format = HUB_DIRECTORY;
    snprintf(choice->label, sizeof choice->label, "safetensors");
    if (!whole && !index)
        return fault_set(fault, ERR_NOTFOUND, "model",
                         "the repository has neither model.safetensors nor " HUB_INDEX);
    for (size_t i = 0; i < tree->count; i++) {
        struct hub_file *file = &tree->files[i];
        file->wanted = is_beside_weights(file->path, has_modules) && file->size <= SMALL_BYTES_MAX;
    }
    if (!index) {
        whole->wanted = true;
        choice->bytes = whole->size;
    }
    return 0;
}

static int choose_gguf(const struct hub_name *name, struct hub_tree *tree,
                       const struct hub_model *models, size_t count, struct hub_choice *choice,
                       struct fault *fault) {
    const struct hub_model *model = name->pick[0] ? find_picked(tree, models, count, name->pick)
                                                  : find_default(tree, models, count);
    if (!model)
        return fault_set(fault, ERR_NOTFOUND, "model", "%s has no GGUF file for '%.200s'",
                         name->repo, name->pick);
    choice->format = HUB_GGUF;
    choice->by_default = !name->pick[0] && count > 1;
    choice->file = model->first;
    choice->bytes = model->bytes;
    memcpy(choice->label, model->label, sizeof choice->label);
    return want_model_parts(tree, model, fault);
}

int hub_choose(const struct hub_name *name, struct hub_tree *tree, struct hub_choice *choice,
               struct fault *fault) {
    struct hub_model *models = mem_must_alloc(HUB_MODELS_MAX, sizeof *models);
    int rc;
    sort_hub_tree(tree);
    const size_t count = hub_models(tree, models);
    *choice = (struct hub_choice){0};
    for (size_t i = 0; i < tree->count; i++) tree->files[i].wanted = false;
    if (!name->pick[0] && is_directory_model(tree))
        rc = choose_directory(tree, choice, fault);
    else if (count == 0)
        rc = fault_set(fault, ERR_NOTFOUND, "model",
                       "%s has no model that keepd reads: no GGUF file%s", name->repo,
                       is_directory_model(tree) ? "; it is a directory of safetensors: leave out "
                                                  "what stands behind the colon"
                                                : ", and not config.json with *.safetensors");
    else
        rc = choose_gguf(name, tree, models, count, choice, fault);
    mem_free(models);
    return rc;
}

int hub_want_shards(struct hub_tree *tree, const char *json, size_t size, int64_t *bytes,
                    struct fault *fault) {
    const struct json_limits limits = {
        .bytes = TREE_BYTES_MAX, .depth = TREE_DEPTH_MAX, .nodes = TREE_NODES_MAX, .file = true};
    cJSON *root = NULL;
    int rc = json_parse(json, size, &limits, &root, fault);
    const cJSON *map = rc == 0 ? json_get(root, "weight_map") : NULL;
    if (rc == 0 && !cJSON_IsObject(map))
        rc = fault_set(fault, ERR_MALFORMED, HUB_INDEX, "has no weight_map");
    const cJSON *item = rc == 0 ? map->child : NULL;
    const char *last = NULL;
    for (; rc == 0 && item; item = item->next) {
        const char *path = cJSON_IsString(item) ? item->valuestring : "";
        if (last && strcmp(path, last) == 0) continue; /* neighbours are mostly in one file */
        last = path;
        struct hub_file *file = hub_tree_find(tree, path);
        if (!file)
            rc =
                fault_set(fault, ERR_NOTFOUND, HUB_INDEX, "names %.200s, which is not there", path);
        else if (!file->wanted)
            *bytes += file->size;
        if (file) file->wanted = true;
    }
    json_free(root);
    return rc;
}

/* ---- Lists for people ---- */

static void describe_model(const char *label, int64_t bytes, const char *fits, const char *end,
                           struct buf *out) {
    buf_fmt(out, "  %-16s %8.2f GB, needs %.2f GB of memory: %s%s\n", label, (double)bytes * 1e-9,
            (double)hub_need(bytes) * 1e-9, fits, end);
}

void hub_describe(const struct hub_tree *tree, int64_t memory, size_t chosen, struct buf *out) {
    static const char *const words[] = {"does not fit", "fits"};
    struct hub_model *models = mem_must_alloc(HUB_MODELS_MAX, sizeof *models);
    const size_t count = hub_models(tree, models);
    int64_t bytes = 0;
    for (size_t i = 0; i < tree->count; i++)
        if (hub_is_weights(tree->files[i].path)) bytes += tree->files[i].size;
    if (is_directory_model(tree))
        describe_model("safetensors", bytes, words[hub_need(bytes) <= memory], "", out);
    for (size_t i = 0; i < count; i++) {
        const struct hub_model *model = &models[i];
        const char *fits = !hub_is_read(model->label)     ? "is not read by keepd"
                           : model->found != model->parts ? "is not complete"
                                                          : words[hub_need(model->bytes) <= memory];
        describe_model(model->label, model->bytes, fits,
                       model->first == chosen ? "  <- chosen" : "", out);
    }
    mem_free(models);
}
