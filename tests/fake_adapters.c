/* Adapters of the fake engine: names and digests, those of their paths. They change no answer. One
 * whose path holds "broken" or "absent" is refused, and one whose path holds "gated" waits for the
 * file of KEEPD_FAKE_GATE. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/sha256.h"
#include "tests/fake_engine.h"

static struct engine_adapter_row *find_fake_adapter(struct fake_adapters *adapters,
                                                    const char *name) {
    for (int i = 0; i < adapters->max && *name; i++)
        if (strcmp(adapters->rows[i].name, name) == 0) return &adapters->rows[i];
    return NULL;
}

static int add_fake_adapter(struct fake_adapters *adapters, const char *name, const char *path,
                            struct fault *fault) {
    if (strstr(path, "broken"))
        return fault_set(fault, ERR_UNSUPPORTED, "use_dora", "the fake adapter is broken");
    if (strstr(path, "absent"))
        return fault_set(fault, ERR_NOTFOUND, "lora_path", "the fake adapter is absent");
    if (find_fake_adapter(adapters, name))
        return fault_set(fault, ERR_INVALID, "lora_name", "an adapter has the name '%s' already",
                         name);
    for (int i = 0; i < adapters->max; i++) {
        struct engine_adapter_row *row = &adapters->rows[i];
        if (row->name[0] || row->users) continue;
        *row = (struct engine_adapter_row){.rank = 8, .bytes = 1024};
        snprintf(row->name, sizeof row->name, "%s", name);
        sha256(path, strlen(path), row->digest);
        return 0;
    }
    return fault_set(fault, ERR_LIMIT, "max-loras", "at most %d adapters are served at once",
                     adapters->max);
}

int engine_adapter_load(struct engine *e, const char *name, const char *path, struct fault *fault) {
    struct fake_adapters *adapters = fake_adapters(e);
    static atomic_int loads;
    CHECK(atomic_fetch_add(&loads, 1) == 0); /* the server loads one at a time */
    if (strstr(path, "gated")) fake_wait_at_gate();
    pthread_mutex_lock(&adapters->mutex);
    int rc = add_fake_adapter(adapters, name, path, fault);
    pthread_mutex_unlock(&adapters->mutex);
    atomic_fetch_sub(&loads, 1);
    return rc;
}

int engine_adapter_unload(struct engine *e, const char *name) {
    struct fake_adapters *adapters = fake_adapters(e);
    pthread_mutex_lock(&adapters->mutex);
    struct engine_adapter_row *row = find_fake_adapter(adapters, name);
    if (row) row->name[0] = '\0';
    pthread_mutex_unlock(&adapters->mutex);
    return row ? 0 : ERR_NOTFOUND;
}

bool engine_adapter_take(struct engine *e, const char *name, struct engine_adapter *out) {
    struct fake_adapters *adapters = fake_adapters(e);
    pthread_mutex_lock(&adapters->mutex);
    struct engine_adapter_row *row = find_fake_adapter(adapters, name);
    if (row && out) {
        row->users++;
        row->requests++;
        out->number = (int32_t)(row - adapters->rows) + 1;
        memcpy(out->digest, row->digest, sizeof out->digest);
    }
    pthread_mutex_unlock(&adapters->mutex);
    return row != NULL;
}

void engine_adapter_leave(struct engine *e, int32_t number) {
    struct fake_adapters *adapters = fake_adapters(e);
    pthread_mutex_lock(&adapters->mutex);
    CHECK(adapters->rows[number - 1].users > 0);
    adapters->rows[number - 1].users--;
    pthread_mutex_unlock(&adapters->mutex);
}

int engine_adapters(struct engine *e, struct engine_adapter_row *rows, int max) {
    struct fake_adapters *adapters = fake_adapters(e);
    int count = 0;
    pthread_mutex_lock(&adapters->mutex);
    for (int i = 0; i < adapters->max && count < max; i++)
        if (adapters->rows[i].name[0]) rows[count++] = adapters->rows[i];
    pthread_mutex_unlock(&adapters->mutex);
    return count;
}

int fake_adapters_open(struct fake_adapters *adapters, const struct engine_options *options,
                       struct fault *fault) {
    int rc = 0;
    pthread_mutex_init(&adapters->mutex, NULL);
    adapters->max = (int)options->max_adapters;
    for (size_t i = 0; i < options->adapter_count && !rc; i++) {
        char name[ENGINE_ADAPTER_NAME];
        const char *text = options->adapters[i], *sign = strchr(text, '=');
        struct fault inner = {0};
        if (!sign) return fault_set(fault, ERR_INVALID, "lora", "'%s' has no = sign", text);
        snprintf(name, sizeof name, "%.*s", (int)(sign - text), text);
        rc = add_fake_adapter(adapters, name, sign + 1, &inner);
        if (rc) fault_set(fault, rc, "lora", "%s: %s", sign + 1, inner.text);
    }
    return rc;
}
