#include "base/kind.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/utf8.h"

#define TEXT_SHOWN 48 /* bytes of a text that a message repeats */
#define ZEROS      64 /* no format begins with as many zero bytes */

static const char *const wanted_names[] = {
    [KIND_GGUF] = "a GGUF file", [KIND_SAFETENSORS] = "safetensors", [KIND_JSON] = "JSON"};

/* Formats and the bytes that they have at byte `at`. */
static const struct signature {
    const char *bytes;
    size_t size, at;
    const char *what, *next;
} signatures[] = {
#define CONVERT       "get the model as safetensors or GGUF, or convert it"
#define BEGINS(bytes) (bytes), sizeof(bytes) - 1, 0
    {BEGINS("%PDF-"), "a PDF document", "download the model instead"},
    {BEGINS("PK\3\4"), "a zip archive, as PyTorch's checkpoints (.bin, .pt, .pth) are", CONVERT},
    {BEGINS("\x80\2"), "a Python pickle, as PyTorch's older checkpoints are", CONVERT},
    {BEGINS("\x89HDF"), "an HDF5 file, as Keras' weights are", CONVERT},
    {BEGINS("tjgg"), "a file in llama.cpp's older format GGJT", "get the model as GGUF"},
    {BEGINS("fmgg"), "a file in llama.cpp's older format GGMF", "get the model as GGUF"},
    {BEGINS("lmgg"), "a file in llama.cpp's older format GGML", "get the model as GGUF"},
    {BEGINS("\x1f\x8b"), "a gzip archive", "unpack it"},
    {BEGINS("\x28\xb5\x2f\xfd"), "a zstd archive", "unpack it"},
    {BEGINS("BZh"), "a bzip2 archive", "unpack it"},
    {BEGINS("\xfd"
            "7zXZ"),
     "an xz archive", "unpack it"},
    {BEGINS("7z\xbc\xaf"), "a 7-Zip archive", "unpack it"},
    {"ustar", 5, 257, "a tar archive", "unpack it"},
    {BEGINS("\x7f"
            "ELF"),
     "a program", "name a model"},
    {BEGINS("\x89PNG"), "a PNG image", "name a model"},
    {BEGINS("\xff\xd8\xff"), "a JPEG image", "name a model"},
#undef BEGINS
#undef CONVERT
};

/* The file that is checked, as messages name it. */
struct subject {
    const char *data;
    size_t size;
    enum file_kind wanted;
    const char *field, *name;
    struct fault *fault;
};

static int refuse_other_kind(const struct subject *s, const char *what, const char *next) {
    return fault_set(s->fault, ERR_UNSUPPORTED, s->field, "%.160s is %s, not %s: %s", s->name, what,
                     wanted_names[s->wanted], next);
}

static bool has_bytes_at(const char *data, size_t size, const char *with) {
    const size_t n = strlen(with);
    return size >= n && strncasecmp(data, with, n) == 0;
}

/* Refuses a pointer of Git LFS: a few lines in place of the file, in which "size N" is the file's
 * size. */
static int check_pointer(const struct subject *s) {
    char what[96], text[512] = "";
    if (!has_bytes_at(s->data, s->size, "version https://git-lfs")) return 0;
    snprintf(text, sizeof text, "%.*s", (int)(s->size < sizeof text ? s->size : sizeof text - 1),
             s->data);
    const char *line = strstr(text, "\nsize ");
    const long long bytes = line ? strtoll(line + 6, NULL, 10) : 0;
    if (bytes > 0)
        snprintf(what, sizeof what, "a Git LFS pointer to a file of %.1f MB", (double)bytes * 1e-6);
    else
        snprintf(what, sizeof what, "a Git LFS pointer");
    return refuse_other_kind(s, what, "run 'git lfs pull', or download the file itself");
}

static size_t skip_leading_blanks(const char *data, size_t size) {
    size_t at = has_bytes_at(data, size, "\xEF\xBB\xBF") ? 3 : 0;
    while (at < size && utf8_is_blank(data[at])) at++;
    return at;
}

static bool is_gguf(const char *data, size_t size) {
    return size >= 4 && memcmp(data, "GGUF", 4) == 0;
}

static bool is_safetensors(const char *data, size_t size) {
    uint64_t header = 0;
    for (int i = 7; size > 8 && i >= 0; i--) header = header << 8 | (unsigned char)data[i];
    return size > 8 && header > 1 && header < UINT64_C(1) << 27 && data[8] == '{';
}

/* Refuses a file of text, for example a server's error message that was saved in place of the file.
 */
static int refuse_text_file(const struct subject *s) {
    char what[TEXT_SHOWN + 48];
    const size_t from = skip_leading_blanks(s->data, s->size);
    size_t shown = 0;
    while (from + shown < s->size && shown < TEXT_SHOWN) {
        const unsigned char c = (unsigned char)s->data[from + shown];
        if (c == '\n' || c == '\r') break;
        if (c < 0x20 || c > 0x7e) return 0;
        shown++;
    }
    if (shown < 4) return 0;
    snprintf(what, sizeof what, "a text that begins with \"%.*s\"", (int)shown, s->data + from);
    return refuse_other_kind(s, what, "download the file again, or name the folder of a model");
}

static int check_formats(const struct subject *s) {
    const size_t blank = skip_leading_blanks(s->data, s->size), left = s->size - blank;
    const char *text = s->data + blank;
    if (has_bytes_at(text, left, "<!doctype") || has_bytes_at(text, left, "<html") ||
        has_bytes_at(text, left, "<?xml"))
        return refuse_other_kind(
            s, "a web page", "the download saved a page about the file; use the link to the file");
    for (size_t i = 0; i < sizeof signatures / sizeof signatures[0]; i++) {
        const struct signature *other = &signatures[i];
        if (s->size >= other->at + other->size &&
            memcmp(s->data + other->at, other->bytes, other->size) == 0)
            return refuse_other_kind(s, other->what, other->next);
    }
    if (s->wanted != KIND_GGUF && is_gguf(s->data, s->size))
        return refuse_other_kind(s, "a GGUF file", "name it as --model FILE.gguf");
    if (s->wanted != KIND_SAFETENSORS && is_safetensors(s->data, s->size))
        return refuse_other_kind(
            s, "a file in safetensors",
            "name the folder that holds it with config.json and tokenizer.json");
    return 0;
}

int kind_check(const void *data, size_t size, enum file_kind wanted, const char *field,
               const char *name, struct fault *fault) {
    const struct subject s = {data, size, wanted, field, name, fault};
    size_t zeros = 0;
    if (size == 0)
        return fault_set(fault, ERR_MALFORMED, field, "%.160s is empty: download it again", name);
    /* A length at the beginning may look like another format's first bytes. */
    if ((wanted == KIND_SAFETENSORS && is_safetensors(data, size)) ||
        (wanted == KIND_GGUF && is_gguf(data, size)))
        return 0;
    int rc = check_pointer(&s);
    if (!rc) rc = check_formats(&s);
    if (rc) return rc;
    while (zeros < size && zeros < ZEROS && !s.data[zeros]) zeros++;
    if (zeros == ZEROS)
        return fault_set(fault, ERR_MALFORMED, field,
                         "%.160s begins with zeros: its download did not finish; download it again",
                         name);
    return wanted == KIND_JSON ? 0 : refuse_text_file(&s);
}

int kind_incomplete(const char *field, size_t size, size_t needed, struct fault *fault) {
    static const struct {
        const char *name;
        double bytes;
    } units[] = {{"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}, {"bytes", 1}};
    size_t unit = 0;
    if (!needed)
        return fault_set(fault, ERR_MALFORMED, field,
                         "the file is incomplete: it ends here; download it again");
    while (unit < 3 && (double)needed < 2 * units[unit].bytes) unit++;
    const int digits = (double)(needed - size) < units[unit].bytes && unit < 3 ? 3 : 0;
    return fault_set(fault, ERR_MALFORMED, field,
                     "the file is incomplete: %.*f of %.*f %s; download it again", digits,
                     (double)size / units[unit].bytes, digits, (double)needed / units[unit].bytes,
                     units[unit].name);
}
