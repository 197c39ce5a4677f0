/* Options of other servers (llama-server, vLLM, SGLang): what they are called here, that they
 * change nothing here, or what to do instead. One table, beside the option table. */
#ifndef KEEPD_CONFIG_FOREIGN_H
#define KEEPD_CONFIG_FOREIGN_H

#include <stdbool.h>
#include <stddef.h>

/* SAME: an option of keepd means the same and takes the same value. SET: an option of keepd with a
 * given value means the same. FRONT: an option of keepd means the same, with a text before the
 * value. NOTHING: the option is accepted with a note that says why it has no effect. INSTEAD: the
 * option is refused, and the text says what to do. */
enum foreign_kind { FOREIGN_SAME, FOREIGN_SET, FOREIGN_FRONT, FOREIGN_NOTHING, FOREIGN_INSTEAD };

/* How many arguments follow the name. A word is one of on, off, auto, true, false, 0 and 1. */
enum foreign_value { FOREIGN_FLAG, FOREIGN_ONE, FOREIGN_WORD };

struct foreign {
    const char *name;   /* with its dashes; a * at the end stands for any rest */
    const char *option; /* SAME, SET, FRONT: the option here */
    const char *text;   /* SET: the value; FRONT: what stands before it; NOTHING: why; INSTEAD: what
                           to do, after "use" or a verb */
    enum foreign_kind kind;
    enum foreign_value value;
};

/* A value that other servers call differently. */
struct foreign_word {
    const char *option, *word; /* "kv-dtype", "bfloat16" */
    const char *value;         /* "bf16" */
    const char *note;          /* why; NULL: the meaning is the same */
};

/* Finds an option by the first `size` bytes of `name`, with its dashes; an underscore counts as a
 * dash. NULL: unknown. */
const struct foreign *foreign_find(const char *name, size_t size);
const struct foreign_word *foreign_word_find(const char *option, const char *word);
bool foreign_is_word(const char *text); /* may follow a FOREIGN_WORD option */

/* Returns what to do in place of a command of another server, such as `keepd pull`; NULL: the
 * command is unknown, too. */
const char *foreign_command(const char *name);

#endif
