/* Pictures of requests: from the bytes of a file to the tiles that a vision encoder reads.
 *
 * Two steps. picture_decode reads a file and is run in a process without rights (decoder.h),
 * because the bytes are a stranger's. picture_prepare then resizes, cuts and orders the pixels as
 * the model's published processor does. Both are pure functions for any thread.
 *
 * Sources: the resizing is that of Pillow (its separable convolution with fixed-point coefficients
 * and a rounding to bytes between the two passes), bit for bit. Sizes and tiles follow the
 * Idefics3 processor (Laurencon et al. 2024, "Building and better understanding vision-language
 * models", section 3.2), Qwen2-VL's (arXiv 2409.12191, section 2.1: naive dynamic resolution),
 * Gemma 3's (arXiv 2503.19786, section 2.1), without pan and scan, or Pixtral's (arXiv 2410.07073,
 * section 2). */
#ifndef KEEPD_PICTURE_PICTURE_H
#define KEEPD_PICTURE_PICTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/sha256.h"

/* Bounds, checked before anything of their size is allocated. */
#define PICTURE_FILE_MAX ((size_t)20 << 20) /* bytes of a file */
#define PICTURE_EDGE_MAX 16384              /* pixels of a side */
#ifndef PICTURE_PIXELS_MAX
#define PICTURE_PIXELS_MAX (32u << 20) /* width * height of a file */
#endif
#define PICTURE_TILES_MAX  101  /* tiles of a prepared picture */
#define PICTURE_TOKENS_MAX 4096 /* rows of embeddings of a tile */
#define PICTURE_LOW_EDGE   512  /* as OpenAI describes "detail": "low" */
#define PICTURE_LOW_PIXELS (PICTURE_LOW_EDGE * PICTURE_LOW_EDGE)
#define PICTURE_LINE_MAX   4096               /* pixels of a tile's longer side, with LINES */
#define PICTURE_MEMORY_MAX ((int64_t)1 << 30) /* bytes of all prepared pictures together */

/* How a picture becomes tiles. */
enum picture_kind {
    PICTURE_NONE,     /* the model takes no pictures */
    PICTURE_IDEFICS3, /* Idefics3, SmolVLM: square tiles in rows, then the whole picture as one tile
                       */
    PICTURE_SMART,    /* Qwen2.5-VL, Qwen3-VL: the whole picture as one tile of its own shape */
    PICTURE_STRETCHED, /* Gemma 3: the whole picture as one square tile, whatever its shape is */
    PICTURE_LINES, /* Pixtral, Mistral Small 3: the whole picture as one tile of its own shape; in
                      the prompt each line of its grid ends with a token of its own */
};

/* Filters, with the numbers that preprocessor_config.json uses ("resample"). */
enum picture_filter {
    PICTURE_LANCZOS = 1, /* three lobes */
    PICTURE_BILINEAR = 2,
    PICTURE_BICUBIC = 3, /* a = -0.5 */
};

/* A model's files say this about its pictures. The model sets every member when it is loaded
 * (preprocessor_config.json, processor_config.json, or the metadata of a GGUF file of type mmproj);
 * constant from then on. */
struct picture_form {
    enum picture_kind kind;
    enum picture_filter filter;
    int token_edge;      /* pixels of the side of the square that one row of embeddings shows */
    int tile_tokens_max; /* rows of embeddings of a tile, at most */
    int tile_edge;       /* pixels of a tile's side ("max_image_size.longest_edge"); 0: a picture's
                            own shape decides */
    int longest_edge;    /* the longer side is resized to this first ("size.longest_edge"); LINES:
                            if it is longer */
    bool together;       /* in the text model a tile's rows see each other in both directions */
    bool splits;         /* do_image_splitting: false = the whole picture as one tile, no others */
    int min_pixels, max_pixels; /* bounds of a tile with the picture's shape ("size.shortest_edge",
                                   "size.longest_edge") */
    double rescale;             /* rescale_factor, usually 1 / 255 */
    float mean[3];              /* "image_mean", of red, green, blue */
    float deviation[3];         /* "image_std" */
};

/* Checks that the numbers are possible: ERR_INVALID or ERR_UNSUPPORTED; the field is that of
 * preprocessor_config.json. */
int picture_check_form(const struct picture_form *form, struct fault *fault);

/* Fills the encoder's inputs of the 256 values of a byte, for each channel: the float32 numbers
 * (rescale * byte - mean) / deviation that the published processors compute. */
void picture_fill_values(const struct picture_form *form, float values[3][256]);

/* Pixels of a decoded file: 8 bits of red, green and blue, rows from the top without gaps. */
struct picture_rgb {
    int width, height;
    uint8_t *pixels; /* [height][width][3]; mem_free */
};

/* A prepared picture. Immutable; shared by counting: whoever keeps a pointer holds a count. */
struct picture {
    int tiles;         /* in the order in which the encoder and the prompt have them */
    int rows, columns; /* the grid of the tiles but the last, which shows the whole picture;
                          0, 0: there is one tile only */
    int tile_width, tile_height; /* pixels; all tiles are equal */
    int tile_rows, tile_columns; /* the grid of a tile's rows of embeddings, row after row */
    int tile_tokens;             /* rows of embeddings of a tile: tile_rows * tile_columns */
    bool together;               /* the form's */
    int width, height;           /* the file's, for reports */
    uint8_t *pixels; /* [tiles][3][tile_height][tile_width]: bytes, which picture_fill_values makes
                        numbers */
    uint8_t digest[SHA256_BYTES]; /* over the tiles and their order: equal digests, equal
                                     embeddings under the same model */
    int counts;                   /* owned by picture_hold and picture_drop */
};

/* Returns the most rows of embeddings that a picture of kind SMART can have. */
int picture_smart_tokens(const struct picture_form *form);

/* Returns whether a picture's tiles have a shape that this form makes. */
bool picture_is_of_form(const struct picture *picture, const struct picture_form *form);

/* Reads a PNG, JPEG, WebP or GIF file, of a GIF the first frame. Pixels under transparent ones are
 * white. The orientation that a camera noted in the file is not applied, as in the published
 * processors. Errors have no field: ERR_MALFORMED, ERR_UNSUPPORTED (another format, an animation),
 * ERR_LIMIT (too large; found in the header, before anything is decoded), ERR_NOMEM. */
int picture_decode(const void *data, size_t size, struct picture_rgb *out, struct fault *fault);

/* `low`: the client wants few details ("detail": "low"): one tile with the whole picture, whatever
 * the form says; where the picture's shape decides on the tile, one of at most PICTURE_LOW_PIXELS.
 * *out has one count. Errors: ERR_NOMEM, ERR_LIMIT (a shape with too many tiles), ERR_BUSY
 * (PICTURE_MEMORY_MAX is used up). */
int picture_prepare(const struct picture_rgb *rgb, const struct picture_form *form, bool low,
                    struct picture **out, struct fault *fault);

/* The text that a chat template writes for a picture, a token of the model. */
const char *picture_mark(enum picture_kind kind);
/* Appends what the processor puts in the mark's place. The mark stands in it once for each row of
 * embeddings, tile after tile, behind as many more as picture_marks_before says. (Gemma 3's
 * processor has another token in the rows, which not all vocabularies have; there is no embedding
 * of it in use.) */
void picture_write_prompt(enum picture_kind kind, const struct picture *picture, struct buf *out);

int picture_marks_before(enum picture_kind kind);
/* Returns how many rows of embeddings follow each other in the prompt, between other tokens. */
int picture_run(enum picture_kind kind, const struct picture *picture);

struct picture *picture_hold(struct picture *picture); /* returns its argument */
void picture_drop(struct picture *picture);            /* NULL allowed */
/* Returns the bytes of all prepared pictures' tiles, at most PICTURE_MEMORY_MAX. */
int64_t picture_bytes_held(void);

/* Rows of a prompt whose embeddings come from a tile: `count` rows from row `at`. */
struct picture_rows {
    size_t at;
    int count;   /* picture_run */
    int picture; /* index of the request's pictures */
    int tile;
    int first; /* the first one's number in the tile */
};

#endif
