#include "engine/adapters.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/log.h"

/* ---- Names ---- */

static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/";

static int check_adapter_name(const char *field, const char *name, struct fault *fault) {
    const size_t size = strlen(name);
    if (size && size < ENGINE_ADAPTER_NAME && !name[strspn(name, allowed)]) return 0;
    return fault_set(fault, ERR_INVALID, field,
                     "'%.140s': the name of an adapter has 1 to %d letters, digits, dots, dashes, "
                     "underscores and slashes",
                     name, ENGINE_ADAPTER_NAME - 1);
}

int adapters_split(const char *text, char name[ENGINE_ADAPTER_NAME], const char **path,
                   struct fault *fault) {
    const char *sign = strchr(text, '=');
    char own[ENGINE_ADAPTER_NAME + 1];
    if (!sign || !sign[1])
        return fault_set(fault, ERR_INVALID, "lora",
                         "'%.100s': expected a name, an = sign and a path", text);
    snprintf(own, sizeof own, "%.*s", (int)(sign - text), text);
    *path = sign + 1;
    int rc = check_adapter_name("lora", own, fault);
    if (!rc) memcpy(name, own, ENGINE_ADAPTER_NAME);
    return rc;
}

/* ---- The table ---- */

void adapters_open(struct adapter_table *table, int most, int64_t bytes_most) {
    pthread_mutex_init(&table->reading, NULL);
    pthread_mutex_init(&table->lock, NULL);
    pthread_cond_init(&table->tried, NULL);
    table->most = most < MODEL_ADAPTERS_MAX ? most : MODEL_ADAPTERS_MAX;
    table->bytes_most = bytes_most;
}

void adapters_close(struct adapter_table *table) {
    for (int i = 0; i < MODEL_ADAPTERS_MAX; i++) adapter_close(table->slots[i].numbers);
    pthread_mutex_destroy(&table->reading);
    pthread_mutex_destroy(&table->lock);
    pthread_cond_destroy(&table->tried);
}

/* The slot that has this name now. */
static struct adapter_slot *slot_named(struct adapter_table *table, const char *name) {
    for (int i = 0; i < table->most; i++) {
        struct adapter_slot *slot = &table->slots[i];
        const bool taken = slot->state == ADAPTER_PLACING || slot->state == ADAPTER_SERVED;
        if (taken && strcmp(slot->name, name) == 0) return slot;
    }
    return NULL;
}

static int reserve_slot(struct adapter_table *table, const char *name, int *number,
                        struct fault *fault) {
    int rc = check_adapter_name("lora_name", name, fault);
    if (rc) return rc;
    if (slot_named(table, name))
        return fault_set(fault, ERR_INVALID, "lora_name", "an adapter has the name '%s' already",
                         name);
    for (int i = 0; i < table->most; i++) {
        if (table->slots[i].state != ADAPTER_FREE) continue;
        table->slots[i] = (struct adapter_slot){.state = ADAPTER_PLACING};
        snprintf(table->slots[i].name, sizeof table->slots[i].name, "%s", name);
        *number = i + 1;
        return 0;
    }
    return fault_set(fault, ERR_LIMIT, "max-loras", "at most %d adapters are served at once",
                     table->most);
}

static void free_slot(struct adapter_table *table, struct adapter_slot *slot) {
    adapter_close(slot->numbers);
    table->bytes -= slot->bytes;
    *slot = (struct adapter_slot){0};
}

/* Reads the files of an adapter that has a slot. `reading` is held, so other adapters can only give
 * memory back meanwhile. */
static int read_into_slot(struct adapter_table *table, const struct model_config *config,
                          struct adapter_slot *slot, const char *path, struct fault *fault) {
    struct adapter *numbers = NULL;
    pthread_mutex_lock(&table->lock);
    const int64_t left = table->bytes_most - table->bytes;
    pthread_mutex_unlock(&table->lock);
    const int rc = adapter_read(config, path, left, &numbers, fault);
    pthread_mutex_lock(&table->lock);
    if (rc) {
        free_slot(table, slot);
    } else {
        slot->bytes = (int64_t)numbers->bytes;
        slot->rank = numbers->rank;
        memcpy(slot->digest, numbers->digest, sizeof slot->digest);
        table->bytes += slot->bytes;
        slot->numbers = numbers;
        atomic_fetch_add(&table->changes, 1);
    }
    pthread_mutex_unlock(&table->lock);
    return rc;
}

int adapters_read(struct adapter_table *table, const struct model_config *config, const char *name,
                  const char *path, int *out, struct fault *fault) {
    pthread_mutex_lock(&table->lock);
    int rc = reserve_slot(table, name, out, fault);
    pthread_mutex_unlock(&table->lock);
    if (rc) return rc;
    pthread_mutex_lock(&table->reading);
    rc = read_into_slot(table, config, &table->slots[*out - 1], path, fault);
    pthread_mutex_unlock(&table->reading);
    return rc;
}

int adapters_wait(struct adapter_table *table, int number, int replicas, struct fault *fault) {
    struct adapter_slot *slot = &table->slots[number - 1];
    const uint64_t all = replicas == 64 ? UINT64_MAX : (1ull << replicas) - 1;
    pthread_mutex_lock(&table->lock);
    while (slot->asked != all) pthread_cond_wait(&table->tried, &table->lock);
    const int rc = slot->fault.code;
    if (rc && fault) *fault = slot->fault;
    struct adapter *numbers = slot->numbers;
    slot->numbers = NULL;
    pthread_mutex_unlock(&table->lock); /* the slot is still being placed, so it stays */
    adapter_close(numbers);
    pthread_mutex_lock(&table->lock);
    if (!rc)
        slot->state = ADAPTER_SERVED;
    else if (slot->placed)
        slot->state = ADAPTER_LEAVING;
    else
        free_slot(table, slot);
    atomic_fetch_add(&table->changes, 1);
    pthread_mutex_unlock(&table->lock);
    return rc;
}

static void place_slot(struct adapter_table *table, int index, uint64_t replica,
                       struct model *model) {
    struct adapter_slot *slot = &table->slots[index];
    const struct adapter *numbers = slot->numbers;
    struct fault fault = {0};
    pthread_mutex_unlock(&table->lock); /* the slot waits for this replica */
    int rc = model_place_adapter(model, index + 1, numbers, &fault);
    pthread_mutex_lock(&table->lock);
    slot->asked |= replica;
    if (!rc) slot->placed |= replica;
    if (rc && !slot->fault.code) slot->fault = fault;
    pthread_cond_broadcast(&table->tried);
}

void adapters_attend(struct adapter_table *table, int replica, struct model *model) {
    const uint64_t bit = 1ull << replica;
    pthread_mutex_lock(&table->lock);
    for (int i = 0; i < table->most; i++) {
        struct adapter_slot *slot = &table->slots[i];
        if (slot->state == ADAPTER_PLACING && slot->numbers && !(slot->asked & bit))
            place_slot(table, i, bit, model);
        if (slot->state != ADAPTER_LEAVING || slot->users || !(slot->placed & bit)) continue;
        pthread_mutex_unlock(&table->lock); /* the slot waits for this replica */
        model_remove_adapter(model, i + 1);
        pthread_mutex_lock(&table->lock);
        slot->placed &= ~bit;
        if (slot->placed) continue;
        log_info("adapter %s is unloaded", slot->name);
        free_slot(table, slot);
    }
    pthread_mutex_unlock(&table->lock);
}

/* ---- Use ---- */

bool adapters_find(struct adapter_table *table, const char *name, struct engine_adapter *out) {
    pthread_mutex_lock(&table->lock);
    struct adapter_slot *slot = slot_named(table, name);
    const bool found = slot && slot->state == ADAPTER_SERVED;
    if (found && out) {
        slot->users++;
        slot->requests++;
        out->number = (int32_t)(slot - table->slots) + 1;
        memcpy(out->digest, slot->digest, sizeof out->digest);
    }
    pthread_mutex_unlock(&table->lock);
    return found;
}

bool adapters_leave(struct adapter_table *table, int number) {
    pthread_mutex_lock(&table->lock);
    struct adapter_slot *slot = &table->slots[number - 1];
    CHECK(slot->users > 0);
    slot->users--;
    const bool goes = slot->state == ADAPTER_LEAVING && !slot->users;
    if (goes) atomic_fetch_add(&table->changes, 1);
    pthread_mutex_unlock(&table->lock);
    return goes;
}

bool adapters_remove(struct adapter_table *table, const char *name) {
    pthread_mutex_lock(&table->lock);
    struct adapter_slot *slot = slot_named(table, name);
    const bool found = slot && slot->state == ADAPTER_SERVED;
    if (found) {
        slot->state = ADAPTER_LEAVING;
        atomic_fetch_add(&table->changes, 1);
    }
    pthread_mutex_unlock(&table->lock);
    return found;
}

int adapters_list(struct adapter_table *table, struct engine_adapter_row *rows, int max) {
    int count = 0;
    pthread_mutex_lock(&table->lock);
    for (int i = 0; i < table->most && count < max; i++) {
        const struct adapter_slot *slot = &table->slots[i];
        if (slot->state != ADAPTER_SERVED) continue;
        struct engine_adapter_row *row = &rows[count++];
        *row = (struct engine_adapter_row){.rank = slot->rank,
                                           .bytes = slot->bytes,
                                           .users = slot->users,
                                           .requests = slot->requests};
        memcpy(row->name, slot->name, sizeof row->name);
        memcpy(row->digest, slot->digest, sizeof row->digest);
    }
    pthread_mutex_unlock(&table->lock);
    return count;
}
