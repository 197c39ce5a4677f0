/* How values of a GGUF file's metadata are found and checked, and fields of config.json set. */
#include "model/translation.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

const char *translation_key(const struct translation *t, const char *name, char out[KEY_MAX]) {
    snprintf(out, KEY_MAX, "%s%s", name[0] == '.' ? t->architecture : "", name);
    return out;
}

int translation_no_memory(const struct translation *t) {
    return fault_set(t->fault, ERR_NOMEM, NULL, "not enough memory for the configuration");
}

int translation_set(const struct translation *t, cJSON *object, const char *name, double value) {
    return cJSON_AddNumberToObject(object, name, value) ? 0 : translation_no_memory(t);
}

bool translation_has(const struct translation *t, const char *name) {
    char key[KEY_MAX];
    return gguf_find(t->gguf, translation_key(t, name, key)) != NULL;
}

int translation_int(const struct translation *t, const char *name, int64_t *value) {
    char key[KEY_MAX];
    return gguf_int(t->gguf, translation_key(t, name, key), INT32_MIN, INT32_MAX, value, t->fault);
}

/* 0 counts as absent. */
int translation_more(const struct translation *t, const char *name, int64_t *value) {
    int64_t found = 0;
    int rc = translation_int(t, name, &found);
    if (!rc && found) *value = found;
    return rc;
}

int translation_num(const struct translation *t, const char *name, double *value) {
    char key[KEY_MAX];
    return gguf_num(t->gguf, translation_key(t, name, key), -DBL_MAX, DBL_MAX, value, t->fault);
}

/* NUL-terminated; "" where it is absent. */
int translation_text(const struct translation *t, const char *name, char out[TEXT_MAX]) {
    char key[KEY_MAX];
    struct gguf_string text = {.data = ""};
    int rc = gguf_str(t->gguf, translation_key(t, name, key), &text, t->fault);
    if (!rc && (text.size >= TEXT_MAX || memchr(text.data, '\0', text.size)))
        rc = fault_set(t->fault, ERR_INVALID, key, "expected a short string");
    snprintf(out, TEXT_MAX, "%.*s", rc ? 0 : (int)text.size, text.data);
    return rc;
}

int translation_copy(const struct translation *t, const struct row *rows, size_t count,
                     cJSON *object) {
    int rc = 0;
    for (size_t i = 0; i < count && !rc; i++) {
        int64_t whole = -1;
        double number = 0;
        if (!translation_has(t, rows[i].gguf)) continue;
        const bool num = rows[i].kind == KIND_NUM, token = rows[i].kind == KIND_TOKEN;
        rc = num     ? translation_num(t, rows[i].gguf, &number)
             : token ? gguf_token(t->gguf, rows[i].gguf, &whole, t->fault)
                     : translation_int(t, rows[i].gguf, &whole);
        if (!num) number = (double)whole;
        const bool none = (rows[i].kind == KIND_MORE && whole <= 0) || (token && whole < 0);
        if (!rc && !none) rc = translation_set(t, object, rows[i].json, number);
    }
    return rc;
}

const struct tensor *translation_tensor(const struct translation *t, enum role role) {
    char name[TENSOR_NAME_MAX];
    tensor_name(name, NAMING_GGUF, role, 0, 0);
    return weights_find(t->weights, name);
}

/* Finds an array with an element for each layer; NULL: the file has one value for all, or none. */
int translation_list(const struct translation *t, const char *name, enum gguf_type type,
                     const struct gguf_value **list) {
    char key[KEY_MAX];
    *list = gguf_find(t->gguf, translation_key(t, name, key));
    if (!*list || !(*list)->array) {
        *list = NULL;
        return 0;
    }
    int rc = gguf_array(t->gguf, key, type, list, t->fault);
    if (!rc && (*list)->count > LAYERS_MAX)
        rc = fault_set(t->fault, ERR_INVALID, key, "more elements than a model has layers");
    return rc;
}

bool translation_add_id(cJSON *list, int64_t id) {
    cJSON *number = cJSON_CreateNumber((double)id);
    return number && cJSON_AddItemToArray(list, number);
}

/* Does any layer have it? */
bool translation_has_tensor(const struct translation *t, const char *name) {
    char full[TENSOR_NAME_MAX];
    for (int i = 0; i < LAYERS_MAX; i++) {
        snprintf(full, sizeof full, "blk.%d.%s", i, name);
        if (weights_find(t->weights, full)) return true;
    }
    return false;
}
