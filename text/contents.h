/* Contents of messages in the form that a template reads, and the pictures in them. Declarations
 * for text.c alone. */
#ifndef KEEPD_TEXT_CONTENTS_H
#define KEEPD_TEXT_CONTENTS_H

#include "text/text.h"

/* Replaces `messages` of a context by messages whose contents are lists of parts, {"type": "text",
 * "text": ...} and {"type": "image"}: those with pictures (TEXT_PICTURE_ENDS), and all whose
 * content is a string if `lists`. Other messages are references: where `messages` owns one, it must
 * be among the former. False: no memory. */
bool contents_divide(cJSON *context, bool lists);

/* Writes the pictures' prompts (picture_write_prompt) into the places where the template has put
 * marks. A mark that stands in the request's text is text. ERR_INVALID: the template
 * shows another number of pictures. The new text is in the arena. */
int contents_expand(struct chat_text *rendered, const struct text_pictures *pictures,
                    struct arena *arena, struct fault *fault);

/* Finds the token that stands for a picture. ERR_UNSUPPORTED: the vocabulary has none. */
int contents_find_mark(const struct tok *tok, enum picture_kind kind, struct arena *arena,
                       int32_t *id, struct fault *fault);

/* Finds the rows of the pictures' tiles in the tokens, pictures->rows. ERR_INVALID: they have not
 * as many marks as the pictures have rows. */
int contents_find_rows(const struct tok *tok, const struct tok_ids *ids,
                       struct text_pictures *pictures, struct arena *arena, struct fault *fault);

#endif
