/* Pictures in messages: OpenAI's parts `image_url` and `input_image`, Anthropic's blocks `image`
 * and Ollama's lists of bytes. They are decoded later, on the same thread (server/pictures.c). */
#include <ctype.h>
#include <nettle/base64.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"
#include "base/mem.h"
#include "picture/picture.h"
#include "server/oai/rewrite.h"

/* A type of parts with a picture and the place of its address or its bytes. */
struct picture_part {
    const char *type, *outer, *inner;
    bool bare; /* the bytes in base64 stand without an address, and the type beside them */
};

static const struct picture_part picture_parts[] = {
    {"image_url", "image_url", "url", false},
    {"input_image", "image_url", "url", false},
    {"image", "source", "data", true},
};

static const struct picture_part *find_picture_part(const cJSON *part) {
    const cJSON *type = json_get(part, "type");
    for (size_t i = 0; i < sizeof picture_parts / sizeof *picture_parts; i++)
        if (cJSON_IsString(type) && strcmp(type->valuestring, picture_parts[i].type) == 0)
            return &picture_parts[i];
    return NULL;
}

bool oai_is_picture(const struct oai_reader *r, const cJSON *part) {
    return r->rules && r->rules->info->pictures && find_picture_part(part);
}

static bool is_remote(const char *address) {
    return strncasecmp(address, "http:", 5) == 0 || strncasecmp(address, "https:", 6) == 0;
}

/* Returns the base64 text behind the head of a `data:` address, an http(s) address itself, or NULL
 * with *error. */
static const char *read_address(const struct oai_reader *r, const char *address,
                                const char *field) {
    const char *comma = strchr(address, ',');
    if (is_remote(address)) {
        if (r->rules->fetches) return address;
        oai_invalid(r, field,
                    "this server fetches no pictures (--allow-image-urls): send the bytes, as "
                    "data:image/png;base64,...");
        return NULL;
    }
    if (strncasecmp(address, "data:", 5) != 0 || !comma) {
        oai_invalid(r, field, "expected data:image/png;base64,..., found '%.24s'", address);
        return NULL;
    }
    if (comma - address < 12 || strncasecmp(comma - 7, ";base64", 7) != 0) {
        oai_invalid(r, field, "expected the bytes in base64: data:image/png;base64,...");
        return NULL;
    }
    return comma + 1;
}

/* Reads the detail that the client wants: "low" is few tokens. The models' own names for it, such
 * as "original", are as good as "high". */
static int read_detail(const struct oai_reader *r, const cJSON *object, const char *path,
                       bool *low) {
    const cJSON *detail = json_get(object, "detail");
    char field[OAI_PATH];
    oai_path(field, "%s.detail", path);
    if (!detail) return 0;
    if (!cJSON_IsString(detail)) return oai_expected(r->error, field, "a string", detail);
    const char *name = detail->valuestring;
    if (strcmp(name, "low") != 0 && strcmp(name, "high") != 0 && strcmp(name, "auto") != 0 &&
        strcmp(name, "original") != 0)
        return oai_invalid(r, field, "expected 'low', 'high', 'auto' or 'original', found '%.32s'",
                           name);
    *low = strcmp(name, "low") == 0;
    return 0;
}

/* Finds the string with the picture in a part. OpenAI's older form has an object around the
 * address, its newer one and many clients have not. `field` becomes its path. */
static int find_source(const struct oai_reader *r, const cJSON *part, const char *path,
                       const struct picture_part *kind, char field[OAI_PATH], const cJSON **found) {
    const cJSON *outer = json_get(part, kind->outer);
    oai_path(field, "%s.%s", path, kind->outer);
    *found = outer;
    if (!outer) return oai_missing(r, field);
    if (cJSON_IsObject(outer)) {
        oai_path(field, "%s.%s.%s", path, kind->outer, kind->inner);
        *found = json_get(outer, kind->inner);
        if (!*found) return oai_missing(r, field);
    }
    if (kind->bare && !cJSON_IsObject(outer))
        return oai_expected(r->error, field, "an object", outer);
    return cJSON_IsString(*found) ? 0 : oai_expected(r->error, field, "a string", *found);
}

/* Anthropic names the kind of its sources: bytes, or an address. */
static int check_source(const struct oai_reader *r, const cJSON *part, const char *path,
                        const struct picture_part **kind) {
    static const struct picture_part by_url = {"image", "source", "url", false};
    const cJSON *source = json_get(part, "source");
    char field[OAI_PATH];
    oai_path(field, "%s.source.type", path);
    if (!json_get(source, "type") || oai_has_type(source, "base64")) return 0;
    if (!r->rules->fetches)
        return oai_invalid(r, field,
                           "this server fetches no pictures (--allow-image-urls): expected "
                           "'base64'");
    if (!oai_has_type(source, "url")) return oai_invalid(r, field, "expected 'base64' or 'url'");
    *kind = &by_url;
    return 0;
}

static int store_picture(struct oai_reader *r, const char *base64, bool remote, bool low,
                         const char *field) {
    if (r->out->picture_count == OAI_PICTURES_MAX)
        return oai_invalid(r, field, "a request may have at most %d pictures", OAI_PICTURES_MAX);
    if (!r->out->pictures)
        r->out->pictures = arena_alloc(r->arena, OAI_PICTURES_MAX, sizeof *r->out->pictures);
    const char *name = arena_strndup(r->arena, field, strlen(field));
    if (!r->out->pictures || !name) return oai_no_memory(r);
    r->out->pictures[r->out->picture_count++] =
        (struct oai_picture){base64, strlen(base64), remote, low, name, NULL};
    return 0;
}

int oai_add_base64(struct oai_reader *r, const cJSON *node, const char *path) {
    if (!cJSON_IsString(node)) return oai_expected(r->error, path, "a string", node);
    if (is_remote(node->valuestring) || strncasecmp(node->valuestring, "data:", 5) == 0)
        return oai_invalid(r, path, "expected the bytes in base64 alone, found '%.24s'",
                           node->valuestring);
    return store_picture(r, node->valuestring, false, false, path);
}

int oai_add_picture(struct oai_reader *r, const cJSON *part, const char *path) {
    const struct picture_part *kind = find_picture_part(part);
    const cJSON *source;
    char field[OAI_PATH];
    bool low = false;
    if (kind->bare && check_source(r, part, path, &kind)) return -1;
    if (find_source(r, part, path, kind, field, &source)) return -1;
    const char *base64 =
        kind->bare ? source->valuestring : read_address(r, source->valuestring, field);
    if (!base64 || read_detail(r, part, path, &low)) return -1;
    if (cJSON_IsObject(json_get(part, kind->outer))) {
        char outer[OAI_PATH];
        oai_path(outer, "%s.%s", path, kind->outer);
        if (read_detail(r, json_get(part, kind->outer), outer, &low)) return -1;
    }
    return store_picture(r, base64, !kind->bare && is_remote(base64), low, field);
}

/* Returns a character of base64 and sets *at behind it. Addresses may write it as %2B, and in the
 * alphabet for addresses (RFC 4648, section 5). */
static char next_base64(const struct oai_picture *from, size_t *at) {
    unsigned char c = (unsigned char)from->base64[(*at)++];
    if (c == '%' && from->size - *at >= 2) {
        const char hex[3] = {from->base64[*at], from->base64[*at + 1], 0};
        if (isxdigit((unsigned char)hex[0]) && isxdigit((unsigned char)hex[1])) {
            c = (unsigned char)strtoul(hex, NULL, 16);
            *at += 2;
        }
    }
    return (char)(c == '-' ? '+' : c == '_' ? '/' : c);
}

/* Returns false for text that is not in base64. White space is allowed, as in MIME, and the signs
 * at the end may be missing. */
static bool write_base64_bytes(const struct oai_picture *from, uint8_t *bytes, size_t *size) {
    struct base64_decode_ctx decoder;
    *size = 0;
    base64_decode_init(&decoder);
    for (size_t at = 0; at < from->size;) {
        const int count = base64_decode_single(&decoder, bytes + *size, next_base64(from, &at));
        if (count < 0) return false;
        *size += (size_t)count;
    }
    for (int i = 0; i < 2 && !base64_decode_final(&decoder); i++)
        if (base64_decode_single(&decoder, bytes + *size, '=') < 0) return false;
    return base64_decode_final(&decoder);
}

int oai_decode_base64(const struct oai_picture *from, uint8_t **bytes, size_t *size,
                      struct fault *fault) {
    *bytes = NULL;
    if (from->size / 4 > PICTURE_FILE_MAX / 3)
        return fault_set(fault, ERR_LIMIT, NULL, "a picture's file may have at most %zu bytes",
                         PICTURE_FILE_MAX);
    *bytes = mem_try_alloc(BASE64_DECODE_LENGTH(from->size) + 1, 1);
    if (!*bytes) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    if (write_base64_bytes(from, *bytes, size)) return 0;
    return fault_set(fault, ERR_MALFORMED, NULL, "the bytes of the picture are not in base64");
}
