#include "model/digest_field.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

int digest_field_read(const cJSON *object, const char *path, const char *key, char out[SHA256_HEX],
                      struct fault *fault) {
    char field[96];
    const char *hex = "";
    int rc = json_str(object, path, key, &hex, fault);
    if (rc || !*hex) return rc;
    snprintf(field, sizeof field, "%s.%s", path, key);
    return digest_read(hex, field, out, fault);
}

int digest_read(const char *hex, const char *field, char out[SHA256_HEX], struct fault *fault) {
    const size_t size = strlen(hex);
    if (size != SHA256_HEX - 1 || strspn(hex, "0123456789abcdefABCDEF") != size)
        return fault_set(fault, ERR_INVALID, field, "expected 64 hex digits");
    for (size_t i = 0; i <= size; i++) out[i] = (char)tolower((unsigned char)hex[i]);
    return 0;
}
