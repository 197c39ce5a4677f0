/* Rewrites a request in another form as a chat, which the common readers then read. Fields that
 * only the other form has are checked here under their own names; errors of the common readers are
 * renamed by the kind's aliases. */
#ifndef KEEPD_SERVER_OAI_REWRITE_H
#define KEEPD_SERVER_OAI_REWRITE_H

#include "server/oai/fields.h"

/* A text of the open message: a string of the tree that grows while parts are joined to it. */
struct oai_joined {
    cJSON *node;       /* NULL: no part yet */
    size_t size, room; /* bytes of text, and of its memory */
};

struct oai_rewrite {
    struct oai_reader *r; /* the chat becomes its body */
    const cJSON *body;    /* as it was sent */
    cJSON *chat;          /* owned by the request */
    cJSON *messages;
    cJSON *open; /* the assistant's message that further parts join; NULL = none */
    struct oai_joined answer, thought; /* texts of `open` */
    bool thinks, speaks, calls;        /* the parts that `open` has */
    bool whole; /* all parts since `open` began belong to one message, in any order */
    struct oai_tool_origin *origins; /* one for each of the chat's tools; in the arena */
    int tool_count, tool_places;     /* tools of the chat; places of `origins` */
    const char **referred; /* names in the first OAI_TOOLS_MAX references to tools; in the arena */
    int referred_count, shown_count; /* number of all names; number of references that were shown */
    struct oai_drop *drops;          /* results that are left out (edits.h), by id; in the arena */
    size_t drop_count;
    size_t thoughts_from; /* messages before this one have no thoughts */
    bool thoughtless;     /* the present message is one of them */
    cJSON *places; /* pictures of the next message, as places in its text; NULL: it has none */
};

/* The functions below return 0, or -1 with the reader's error. */

/* Begins a chat with all fields that the kind shares with others. */
int oai_rewrite_open(struct oai_rewrite *w, struct oai_reader *r);
/* Adds a field and takes over `item`, also on failure. NULL: no memory. */
int oai_rewrite_put(struct oai_rewrite *w, const char *name, cJSON *item);
/* Adds a field with a reference to `node`; NULL: adds none. */
int oai_rewrite_link(struct oai_rewrite *w, const char *name, const cJSON *node);
/* If `from` has a member `name`, links it into `to` under the name `as`. */
int oai_rewrite_member(struct oai_rewrite *w, cJSON *to, const char *as, const cJSON *from,
                       const char *name);

/* Sets the chat's response_format from a format whose members, besides its type "json_schema", are
 * those of the chat's json_schema. */
int oai_rewrite_schema(struct oai_rewrite *w, const cJSON *format);

/* Rewrites the body's tools: `add` gets each of them and adds those that the model may call, by
 * oai_rewrite_tool. A tool may have an array `tools` of its own. */
int oai_rewrite_tools(struct oai_rewrite *w,
                      int (*add)(struct oai_rewrite *w, const cJSON *tool, const char *path));
/* Adds a function to the chat's tools. *function: the copy, to which the caller adds members other
 * than the name. `origin` is copied, but not its texts, which are the body's or in the arena;
 * `path` is the tool's. A function of a namespace keeps its name unless an earlier tool has it. */
int oai_rewrite_tool(struct oai_rewrite *w, const struct oai_tool_origin *origin, const char *path,
                     cJSON **function);
/* Marks the last tool as one that a message shows instead of the list of tools. */
int oai_rewrite_defer(struct oai_rewrite *w);
/* Returns the name by which the model knows a tool of the client; `space`: its namespace, or NULL.
 */
const char *oai_rewrite_name(const struct oai_rewrite *w, const char *space, const char *name);
/* Returns whether "type" has this value. */
bool oai_has_type(const cJSON *node, const char *type);
/* Notes in the log, once for each type, that tools of this type are left out of the prompt. */
void oai_rewrite_leave_out(const char *type);

/* Reads a picture (oai_is_picture) of the next message, which stands behind `at` bytes of its text.
 */
int oai_rewrite_picture(struct oai_rewrite *w, const cJSON *part, const char *path, size_t at);
/* Reads a picture in base64 (oai_add_base64) that stands in front of the next message's text. */
int oai_rewrite_base64(struct oai_rewrite *w, const cJSON *node, const char *path);
/* Adds a message of the user or the system. */
int oai_rewrite_message(struct oai_rewrite *w, const char *role, const char *text);
/* Adds the answer to a call. */
int oai_rewrite_result(struct oai_rewrite *w, const char *call, const char *text);
/* Add the parts of an answer. The parts of one turn are one message. */
int oai_rewrite_thought(struct oai_rewrite *w, const char *text);
int oai_rewrite_answer(struct oai_rewrite *w, const char *text);
int oai_rewrite_call(struct oai_rewrite *w, const char *id, const char *name,
                     const cJSON *arguments); /* a string or an object; NULL: none */

/* Lets the model continue the last message if it is the assistant's and has text. */
int oai_rewrite_continue(struct oai_rewrite *w);

/* A type of parts and the member that has its text; NULL: it is a picture. */
struct oai_part_type {
    const char *type, *member;
};
/* Ends a list of types in which parts of other types, such as images, are replaced by a text that
 * says what was left out. For results of tools, which a client cannot take back. */
#define OAI_PARTS_ELSE                                                                             \
    { NULL, "" }
/* Returns a text, or the parts of an array joined by line breaks. `types`: the types of parts that
 * are read, ended by {NULL, NULL} or OAI_PARTS_ELSE. The text lies in the arena or the tree. */
int oai_rewrite_join(struct oai_rewrite *w, const cJSON *node, const char *path,
                     const struct oai_part_type *types, const char **text);
/* Reads a part's text; `path` names the part. */
int oai_rewrite_part(struct oai_rewrite *w, const cJSON *part, const char *path,
                     const struct oai_part_type *types, const char **text);

/* Reads a string that must be present. */
int oai_rewrite_string(struct oai_rewrite *w, const cJSON *object, const char *path,
                       const char *key, const char **value);
/* Answers 400: `field` has a value that keepd does not support. Returns -1. */
int oai_rewrite_refuse(struct oai_rewrite *w, const char *field, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
