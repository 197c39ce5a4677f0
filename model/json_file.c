#include "model/json_file.h"

#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"

#define FILE_BYTES_MAX ((size_t)4 << 20)

int json_file_read(const char *dir, const char *name, cJSON **out, struct fault *fault) {
    static const struct json_limits limits = {
        .bytes = FILE_BYTES_MAX, .depth = 64, .nodes = 100000, .file = true};
    char path[PATH_MAX], *text = NULL;
    size_t size = 0;
    struct fault inner = {0};
    *out = NULL;
    const int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof path || access(path, F_OK) != 0) return 0;
    int rc = file_read(path, FILE_BYTES_MAX, &text, &size, fault);
    if (rc == 0) {
        rc = json_parse(text, size, &limits, out, &inner);
        if (rc != 0) fault_set(fault, rc, name, "%s", inner.text);
    }
    mem_free(text);
    return rc;
}
