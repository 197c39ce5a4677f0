#include "server/keys.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/mem.h"
#include "server/sip.h"

/* --- reading --- */

static const struct key_settings plain_settings = {.weight = 1};

static int add_key(struct keys *keys, const char *text, const struct key_settings *settings,
                   uint32_t line, const char *option, struct fault *fault) {
    size_t size = strlen(text);
    if (keys->count == KEYS_MAX)
        return fault_set(fault, ERR_LIMIT, option, "more than %d keys", KEYS_MAX);
    if (size > KEY_BYTES_MAX)
        return fault_set(fault, ERR_LIMIT, option, "a key is longer than %d bytes", KEY_BYTES_MAX);
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)text[i] <= ' ' || (unsigned char)text[i] >= 0x7f)
            return fault_set(fault, ERR_INVALID, option,
                             "a key holds a blank or a byte that cannot stand in a header");
    struct key *key = &keys->items[keys->count];
    key->listed = (uint32_t)keys->count++;
    key->line = line;
    key->settings = *settings;
    key->added = keys->reading;
    sip_hash128(keys->secret, text, size, key->digest);
    return 0;
}

static bool is_key_name(const char *text) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                  "-_.";
    size_t size = strlen(text);
    return size > 0 && size <= KEY_NAME_MAX && strspn(text, allowed) == size;
}

static bool read_setting_number(const char *text, int64_t most, int64_t *value) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end || errno || number < 1 || number > most) return false;
    *value = number;
    return true;
}

/* Reads one setting after a key. A fault does not repeat the setting's text, which may be the rest
 * of a secret. */
static int read_setting(char *text, struct key_settings *settings, const char *option,
                        struct fault *fault) {
    char *value = strchr(text, '=');
    int64_t weight = settings->weight;
    bool ok = true;
    if (value) *value++ = '\0';
    if (value && strcmp(text, "name") == 0) {
        ok = is_key_name(value);
        if (ok) strcpy(settings->name, value);
    } else if (value && strcmp(text, "weight") == 0) {
        ok = read_setting_number(value, KEY_WEIGHT_MAX, &weight);
        settings->weight = (int32_t)weight;
    } else if (value && strcmp(text, "pages") == 0) {
        ok = read_setting_number(value, INT64_MAX, &settings->pages_max);
    } else if (value && strcmp(text, "pins") == 0) {
        ok = read_setting_number(value, INT64_MAX, &settings->pins_max);
    } else if (value && strcmp(text, "requests") == 0) {
        ok = read_setting_number(value, INT32_MAX, &settings->requests_max);
    } else {
        return fault_set(fault, ERR_INVALID, option,
                         "after a key there may be name=TEXT, weight=N, pages=N, pins=N and "
                         "requests=N, separated by blanks");
    }
    if (ok) return 0;
    return fault_set(fault, ERR_INVALID, option, "%s after a key must be %s", text,
                     strcmp(text, "name") == 0     ? "1 to 32 letters, digits, '-', '_' or '.'"
                     : strcmp(text, "weight") == 0 ? "a whole number from 1 to 1000"
                                                   : "a whole number from 1 on");
}

/* Adds the key and the settings of one line, which has this number and no line end. */
static int add_key_line(struct keys *keys, char *text, uint32_t line, const char *option,
                        struct fault *fault) {
    struct key_settings settings = plain_settings;
    char *rest, *key = strtok_r(text, " \t", &rest), *setting;
    int rc = 0;
    while (!rc && (setting = strtok_r(NULL, " \t", &rest)))
        rc = read_setting(setting, &settings, option, fault);
    if (!rc && settings.name[0] && ++keys->named > KEY_NAMES_MAX)
        rc = fault_set(fault, ERR_LIMIT, option, "more than %d keys with names", KEY_NAMES_MAX);
    return rc ? rc : add_key(keys, key, &settings, line, option, fault);
}

/* Returns the line without its newline and surrounding blanks; NULL if it holds no key. */
static char *key_of_line(char *line) {
    line += strspn(line, " \t");
    size_t size = strlen(line);
    while (size && strchr(" \t\r\n", line[size - 1])) line[--size] = '\0';
    return size && *line != '#' ? line : NULL;
}

static int read_key_file(struct keys *keys, const char *path, struct fault *fault) {
    static const char option[] = "api-key-file";
    char line[KEY_BYTES_MAX + 256], *key;
    size_t before = keys->count;
    uint32_t number = 0;
    int rc = 0;
    FILE *file = fopen(path, "re");
    if (!file)
        return fault_set(fault, ERR_IO, option, "cannot open %.200s: %s", path, strerror(errno));
    while (!rc && fgets(line, sizeof line, file)) {
        number++;
        if (!strchr(line, '\n') && !feof(file))
            rc = fault_set(fault, ERR_LIMIT, option, "a line is longer than %zu bytes",
                           sizeof line - 2);
        else if ((key = key_of_line(line)))
            rc = add_key_line(keys, key, number, option, fault);
    }
    if (!rc && ferror(file))
        rc = fault_set(fault, ERR_IO, option, "cannot read %.200s: %s", path, strerror(errno));
    if (!rc && keys->count == before)
        rc = fault_set(fault, ERR_INVALID, option, "%.200s holds no key", path);
    explicit_bzero(line, sizeof line);
    fclose(file);
    return rc;
}

static int by_digest(const void *a, const void *b) {
    return memcmp(((const struct key *)a)->digest, ((const struct key *)b)->digest,
                  sizeof((const struct key *)a)->digest);
}

static int by_listing(const void *a, const void *b) {
    const struct key *x = a, *y = b;
    int order = by_digest(x, y);
    return order ? order : (x->listed > y->listed) - (x->listed < y->listed);
}

static bool equal_settings(const struct key_settings *a, const struct key_settings *b) {
    return strcmp(a->name, b->name) == 0 && a->weight == b->weight &&
           a->pages_max == b->pages_max && a->pins_max == b->pins_max &&
           a->requests_max == b->requests_max;
}

/* Sorts the keys and removes duplicates, of which the last row remains: with two rows, requests
 * would be counted in one of them, and a reload might keep the other. Two lines of the file for one
 * key with different settings are refused, because one of them would have no effect. */
static int sort_keys(struct keys *keys, struct fault *fault) {
    size_t kept = 0;
    qsort(keys->items, keys->count, sizeof *keys->items, by_listing);
    for (size_t i = 0; i < keys->count; i++) {
        const struct key *key = &keys->items[i];
        struct key *last = kept ? &keys->items[kept - 1] : NULL;
        bool again = last && by_digest(last, key) == 0;
        if (again && last->line && !equal_settings(&last->settings, &key->settings))
            return fault_set(fault, ERR_INVALID, "api-key-file",
                             "line %" PRIu32 " has the key of line %" PRIu32 " with other settings",
                             key->line, last->line);
        if (again && last->settings.name[0]) keys->named--;
        if (!again) kept++;
        keys->items[kept - 1] = *key;
    }
    keys->count = kept;
    return 0;
}

size_t keys_inherit(struct keys *keys, const struct keys *before) {
    size_t compared = 0;
    for (size_t i = 0, at = 0; i < keys->count && at < before->count; compared++) {
        int order = by_digest(&before->items[at], &keys->items[i]);
        if (order == 0) {
            struct key_settings settings = keys->items[i].settings;
            keys->items[i] = before->items[at];
            keys->items[i].settings = settings;
        }
        if (order <= 0) at++;
        if (order >= 0) i++;
    }
    return compared;
}

int keys_open(struct keys *keys, char *const *texts, size_t text_count, const char *file,
              const struct keys *before, struct fault *fault) {
    int rc = 0;
    *keys = (struct keys){.reading = before ? before->reading + 1 : 1};
    if (before)
        memcpy(keys->secret, before->secret, sizeof keys->secret);
    else
        CHECK(getrandom(keys->secret, sizeof keys->secret, 0) == sizeof keys->secret);
    keys->items = mem_must_alloc(KEYS_MAX, sizeof *keys->items);
    for (size_t i = 0; i < text_count && !rc; i++)
        rc = add_key(keys, texts[i], &plain_settings, 0, "api-key", fault);
    if (!rc && file) rc = read_key_file(keys, file, fault);
    if (!rc) rc = sort_keys(keys, fault);
    if (before) (void)keys_inherit(keys, before);
    keys->anyone = before ? before->anyone : (struct key){.added = keys->reading};
    keys->anyone.settings = plain_settings;
    if (rc) keys_close(keys);
    return rc;
}

void keys_close(struct keys *keys) {
    mem_free(keys->items);
    *keys = (struct keys){0};
}

/* --- asking --- */

static bool equal_digests(const uint8_t *a, const uint8_t *b) {
    unsigned difference = 0;
    for (size_t i = 0; i < 16; i++) difference |= a[i] ^ b[i];
    return difference == 0;
}

struct key *keys_find(struct keys *keys, const char *text) {
    uint8_t digest[16];
    struct key *found = NULL;
    size_t size = strlen(text);
    if (!keys->count) return &keys->anyone;
    if (size > KEY_BYTES_MAX) return NULL;
    sip_hash128(keys->secret, text, size, digest);
    for (size_t i = 0; i < keys->count; i++)
        if (equal_digests(keys->items[i].digest, digest)) found = &keys->items[i];
    return found;
}

struct key *keys_by_digest(struct keys *keys, const uint8_t digest[16]) {
    size_t from = 0, to = keys->count;
    if (!keys->count) return &keys->anyone;
    while (from < to) { /* to the end of the keys up to this one */
        size_t middle = from + (to - from) / 2;
        if (memcmp(keys->items[middle].digest, digest, sizeof keys->items[middle].digest) <= 0)
            from = middle + 1;
        else
            to = middle;
    }
    if (from == 0 || !equal_digests(keys->items[from - 1].digest, digest)) return NULL;
    return &keys->items[from - 1];
}

int64_t key_spend(struct key *key, int64_t per_minute, int64_t now_ns) {
    const double per_ns = (double)per_minute / 60e9;
    if (per_minute <= 0) return 0;
    key->allowance = key->refilled_ns
                         ? key->allowance + (double)(now_ns - key->refilled_ns) * per_ns
                         : (double)per_minute;
    if (key->allowance > (double)per_minute) key->allowance = (double)per_minute;
    key->refilled_ns = now_ns;
    if (key->allowance < 1) return (int64_t)((1 - key->allowance) / per_ns / 1e6) + 1;
    key->allowance -= 1;
    return 0;
}
