#include "base/check.h"
#include "picture/picture.h"

/* Marks of the Idefics3 processor. */
#define IDEFICS3_IMAGE  "<image>"
#define IDEFICS3_AROUND "<fake_token_around_image>"
#define IDEFICS3_WHOLE  "<global-img>"

#define QWEN_IMAGE "<|image_pad|>" /* templates write what stands around it */

/* Marks of the Gemma 3 processor. */
#define GEMMA_START "<start_of_image>"
#define GEMMA_END   "<end_of_image>"

/* Marks of the Pixtral processor. */
#define PIXTRAL_IMAGE "[IMG]"
#define PIXTRAL_BREAK "[IMG_BREAK]"
#define PIXTRAL_END   "[IMG_END]"

const char *picture_mark(enum picture_kind kind) {
    static const char *const marks[] = {
        [PICTURE_IDEFICS3] = IDEFICS3_IMAGE,
        [PICTURE_SMART] = QWEN_IMAGE,
        [PICTURE_STRETCHED] = GEMMA_START,
        [PICTURE_LINES] = PIXTRAL_IMAGE,
    };
    CHECK((size_t)kind < sizeof marks / sizeof *marks && marks[kind]);
    return marks[kind];
}

int picture_marks_before(enum picture_kind kind) {
    return kind == PICTURE_STRETCHED;
}

int picture_run(enum picture_kind kind, const struct picture *picture) {
    return kind == PICTURE_LINES ? picture->tile_columns : picture->tile_tokens;
}

static void write_picture_marks(const char *mark, int count, struct buf *out) {
    for (int i = 0; i < count; i++) buf_str(out, mark);
}

static void write_tile(const struct picture *picture, const char *mark, struct buf *out) {
    write_picture_marks(mark, picture->tile_tokens, out);
}

void picture_write_prompt(enum picture_kind kind, const struct picture *picture, struct buf *out) {
    const char *mark = picture_mark(kind);
    if (kind == PICTURE_SMART) {
        write_tile(picture, mark, out);
        return;
    }
    if (kind == PICTURE_LINES) {
        for (int row = 0; row < picture->tile_rows; row++) {
            write_picture_marks(mark, picture->tile_columns, out);
            buf_str(out, row + 1 < picture->tile_rows ? PIXTRAL_BREAK : PIXTRAL_END);
        }
        return;
    }
    if (kind == PICTURE_STRETCHED) {
        buf_str(out, "\n\n" GEMMA_START);
        write_tile(picture, mark, out);
        buf_str(out, GEMMA_END "\n\n");
        return;
    }
    for (int row = 1; row <= picture->rows; row++) {
        for (int column = 1; column <= picture->columns; column++) {
            buf_fmt(out, IDEFICS3_AROUND "<row_%d_col_%d>", row, column);
            write_tile(picture, mark, out);
        }
        buf_char(out, '\n');
    }
    if (picture->rows) buf_char(out, '\n');
    buf_str(out, IDEFICS3_AROUND IDEFICS3_WHOLE);
    write_tile(picture, mark, out);
    buf_str(out, IDEFICS3_AROUND);
}
