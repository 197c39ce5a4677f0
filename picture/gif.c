/* GIF, the first frame: our own reader, because the format is small and the known library is rarely
 * kept. Sources: CompuServe, "Graphics Interchange Format, version 89a"; Welch 1984, "A Technique
 * for High-Performance Data Compression". Where the format leaves a choice, pixels are Pillow's. */
#include <string.h>

#include "base/mem.h"
#include "picture/codec.h"

#define GIF_CODE_BITS_MAX 12
#define GIF_CODES         (1 << GIF_CODE_BITS_MAX)

/* A file being read, and its first frame. */
struct gif_reading {
    const uint8_t *data;
    size_t size, at;
    size_t block; /* bytes left of the present block of data */
    uint32_t bits;
    int bit_count;                /* bits that `bits` holds, the next one lowest */
    int left, top, width, height; /* the frame, on the screen */
    bool interlaced;
    int transparent; /* index of a colour; -1: none */
    uint8_t colours[256][3];
    struct fault *fault;
};

static int gif_damaged(const struct gif_reading *g, const char *why) {
    return fault_set(g->fault, ERR_MALFORMED, NULL, "the GIF file is damaged: %s", why);
}

/* Returns the next `size` bytes, or NULL where the file ends before. */
static const uint8_t *take_gif_bytes(struct gif_reading *g, size_t size) {
    if (size > g->size - g->at) return NULL;
    g->at += size;
    return g->data + g->at - size;
}

static int gif_number(const uint8_t *bytes) {
    return bytes[0] | bytes[1] << 8;
}

/* --- blocks in front of the pixels --- */

/* Reads the table of colours that the flags announce. Colours without an entry are grey. */
static int read_gif_colours(struct gif_reading *g, int flags) {
    const size_t size = 3u << ((flags & 7) + 1);
    if (!(flags & 0x80)) return 0;
    const uint8_t *colours = take_gif_bytes(g, size);
    if (!colours) return gif_damaged(g, "it ends early");
    for (int i = 0; i < 256; i++) memset(g->colours[i], i, 3);
    memcpy(g->colours, colours, size);
    return 0;
}

/* Reads an extension, of which only the index of the transparent colour matters. */
static int read_gif_extension(struct gif_reading *g) {
    const uint8_t *label = take_gif_bytes(g, 1), *count;
    for (bool first = true; label && (count = take_gif_bytes(g, 1)); first = false) {
        const uint8_t *block = take_gif_bytes(g, *count);
        if (!block) break;
        if (!*count) return 0;
        if (first && *label == 0xf9 && *count >= 4 && block[0] & 1) g->transparent = block[3];
    }
    return gif_damaged(g, "it ends early");
}

/* Reads up to the first frame's description, `frame`. */
static int find_gif_frame(struct gif_reading *g, const uint8_t **frame) {
    const uint8_t *kind;
    while ((kind = take_gif_bytes(g, 1)) && *kind == '!') {
        int rc = read_gif_extension(g);
        if (rc) return rc;
    }
    *frame = kind && *kind == ',' ? take_gif_bytes(g, 9) : NULL;
    return *frame ? 0 : gif_damaged(g, "it has no frame");
}

/* Reads everything in front of the first frame's pixels and sets the picture's size: a screen that
 * is too small for the frame grows. */
static int read_gif_head(struct gif_reading *g, struct picture_rgb *out) {
    const uint8_t *frame, *screen = take_gif_bytes(g, 13);
    if (!screen) return gif_damaged(g, "it ends early");
    int rc = read_gif_colours(g, screen[10]);
    if (!rc) rc = find_gif_frame(g, &frame);
    if (rc) return rc;
    g->left = gif_number(frame);
    g->top = gif_number(frame + 2);
    g->width = gif_number(frame + 4);
    g->height = gif_number(frame + 6);
    g->interlaced = frame[8] & 0x40;
    if (!g->width || !g->height) return gif_damaged(g, "its first frame has no pixels");
    out->width = gif_number(screen + 6);
    out->height = gif_number(screen + 8);
    if (out->width < g->left + g->width) out->width = g->left + g->width;
    if (out->height < g->top + g->height) out->height = g->top + g->height;
    rc = picture_check_size((uint64_t)out->width, (uint64_t)out->height, g->fault);
    return rc ? rc : read_gif_colours(g, frame[8]);
}

/* --- pixels --- */

/* Returns the next code, or -1 where the data end. */
static int next_gif_code(struct gif_reading *g, int width) {
    while (g->bit_count < width) {
        const uint8_t *byte;
        if (!g->block) {
            if (!(byte = take_gif_bytes(g, 1)) || !*byte) return -1;
            g->block = *byte;
        }
        if (!(byte = take_gif_bytes(g, 1))) return -1;
        g->block--;
        g->bits |= (uint32_t)*byte << g->bit_count;
        g->bit_count += 8;
    }
    const int code = (int)(g->bits & ((1u << width) - 1));
    g->bits >>= width;
    g->bit_count -= width;
    return code;
}

/* Decompresses `count` indices of colours. Every text of the dictionary stands already among the
 * indices: that of the code before, and one more index, the first of this code's. */
static int read_gif_indices(struct gif_reading *g, int root_bits, uint8_t *indices, size_t count) {
    const int clear = 1 << root_bits, end = clear + 1;
    int next = end + 1, width = root_bits + 1;
    size_t at[GIF_CODES], length[GIF_CODES], from = 0, size = 0;
    for (size_t done = 0; done < count;) {
        const int code = next_gif_code(g, width);
        if (code < 0 || code == end) return gif_damaged(g, "it ends early");
        if (code == clear) {
            next = end + 1;
            width = root_bits + 1;
            size = 0;
            continue;
        }
        if (size && next < GIF_CODES) {
            at[next] = from;
            length[next++] = size + 1;
            if (next == 1 << width && width < GIF_CODE_BITS_MAX) width++;
        }
        if (code >= next) return gif_damaged(g, "it has an unknown code");
        from = done;
        size = code < clear ? 1 : length[code];
        if (size > count - done) size = count - done;
        if (code < clear) indices[done] = (uint8_t)code;
        /* Bytes are copied one by one, because a text may reach into its own copy. */
        for (size_t i = 0; code > end && i < size; i++) indices[done + i] = indices[at[code] + i];
        done += size;
    }
    return 0;
}

static void write_gif_row(const struct gif_reading *g, const uint8_t *indices, uint8_t *to) {
    for (int x = 0; x < g->width; x++, to += 3) memcpy(to, g->colours[indices[x]], 3);
}

/* Lays the frame on the screen; around it is the transparent colour, or the first. */
static void write_gif_pixels(const struct gif_reading *g, const uint8_t *indices,
                             struct picture_rgb *out) {
    static const struct { int first, step; } passes[] = {{0, 1}, {0, 8}, {4, 8}, {2, 4}, {1, 2}};
    const int begin = g->interlaced ? 1 : 0, end = g->interlaced ? 5 : 1;
    const size_t pixels = (size_t)out->width * (size_t)out->height;
    const uint8_t *around = g->colours[g->transparent < 0 ? 0 : g->transparent];
    for (size_t i = 0; i < pixels; i++) memcpy(out->pixels + 3 * i, around, 3);
    for (int i = begin; i < end; i++) {
        for (int y = passes[i].first; y < g->height; y += passes[i].step, indices += g->width) {
            const size_t at = (size_t)(g->top + y) * (size_t)out->width + (size_t)g->left;
            write_gif_row(g, indices, out->pixels + at * 3);
        }
    }
}

int gif_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault) {
    struct gif_reading g = {.data = data, .size = size, .transparent = -1, .fault = fault};
    for (int i = 0; i < 256; i++) memset(g.colours[i], i, 3);
    int rc = read_gif_head(&g, out);
    if (rc) return rc;
    if (g.transparent >= 0) memset(g.colours[g.transparent], 255, 3);
    const uint8_t *root_bits = take_gif_bytes(&g, 1);
    if (!root_bits || *root_bits < 1 || *root_bits > 8)
        return gif_damaged(&g, "its codes have an impossible size");
    rc = picture_open_pixels(out, 3, fault);
    if (rc) return rc;
    const size_t count = (size_t)g.width * (size_t)g.height;
    uint8_t *indices = mem_try_alloc(count, 1);
    if (!indices) return fault_set(fault, ERR_NOMEM, NULL, "not enough memory for the picture");
    rc = read_gif_indices(&g, *root_bits, indices, count);
    if (!rc) write_gif_pixels(&g, indices, out);
    mem_free(indices);
    return rc;
}
