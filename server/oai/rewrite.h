/* A request in another form, written again in that of a chat, which the common readers then read.
 * Fields that only the other form has are checked here under their own names; errors of the common
 * readers are renamed by the kind's aliases. */
#ifndef KEEPD_SERVER_OAI_REWRITE_H
#define KEEPD_SERVER_OAI_REWRITE_H

#include "server/oai/fields.h"

/* A text of the message that is open, in which parts are joined: a string of the tree that grows.
 */
struct oai_joined {
    cJSON *node;       /* NULL: no part yet */
    size_t size, room; /* bytes of text, and of its memory */
};

struct oai_rewrite {
    struct oai_reader *r; /* the chat becomes its body */
    const cJSON *body;    /* as it came */
    cJSON *chat;          /* owned by the request */
    cJSON *messages;
    cJSON *open; /* the assistant's message that further parts join; NULL = none */
    struct oai_joined answer, thought; /* texts of `open` */
    bool thinks, speaks, calls;        /* parts that `open` has */
    bool whole; /* all parts since `open` began are of one message, in whatever order they come */
    struct oai_tool_origin *origins; /* one for each of the chat's tools; in the arena */
    int tool_count, tool_places;     /* tools of the chat; places of `origins` */
    const char **referred; /* names in the first OAI_TOOLS_MAX references to tools; in the arena */
    int referred_count, shown_count; /* all names; references shown so far */
    struct oai_drop *drops;          /* results that are left out (edits.h), by id; in the arena */
    size_t drop_count;
    size_t thoughts_from; /* messages before this one have no thoughts */
    bool thoughtless;     /* the present message is one of them */
};

/* The functions below return 0, or -1 with the reader's error. */

/* Begins a chat with all fields that the kind shares with others. */
int oai_rewrite_open(struct oai_rewrite *w, struct oai_reader *r);
/* Adds a field; takes `item` in any case. NULL: no memory. */
int oai_rewrite_put(struct oai_rewrite *w, const char *name, cJSON *item);
/* Adds a field whose value is that of `node`; NULL: none. */
int oai_rewrite_link(struct oai_rewrite *w, const char *name, const cJSON *node);
/* If `from` has a member `name`, links it into `to` under the name `as`. */
int oai_rewrite_member(struct oai_rewrite *w, cJSON *to, const char *as, const cJSON *from,
                       const char *name);

/* Sets the chat's response_format from a format whose members, besides its type "json_schema", are
 * those of the chat's json_schema. */
int oai_rewrite_schema(struct oai_rewrite *w, const cJSON *format);

/* Rewrites the body's tools: `add` gets each of them, and adds those that the model may call by
 * oai_rewrite_tool. A tool may have an array `tools` of its own. */
int oai_rewrite_tools(struct oai_rewrite *w,
                      int (*add)(struct oai_rewrite *w, const cJSON *tool, const char *path));
/* Adds a function to the chat's tools. *function: the copy, to which the caller adds members other
 * than the name. `origin` is copied, but not its texts, which are the body's or in the arena;
 * `path` is the tool's. A function of a namespace keeps its name unless an earlier tool has it. */
int oai_rewrite_tool(struct oai_rewrite *w, const struct oai_tool_origin *origin, const char *path,
                     cJSON **function);
/* Marks the last tool as one that a message shows, not the list of tools. */
int oai_rewrite_defer(struct oai_rewrite *w);
/* Returns the name by which the model knows a tool of the client; `space`: its namespace, or NULL.
 */
const char *oai_rewrite_name(const struct oai_rewrite *w, const char *space, const char *name);
/* Is the value of "type" this one? */
bool oai_has_type(const cJSON *node, const char *type);
/* Notes in the log, once for each type, that tools of this type are left out of the prompt. */
void oai_rewrite_leave_out(const char *type);

/* Adds a message of the user or the system. */
int oai_rewrite_message(struct oai_rewrite *w, const char *role, const char *text);
/* Adds the answer to a call. */
int oai_rewrite_result(struct oai_rewrite *w, const char *call, const char *text);
/* Add parts of an answer. The parts of one turn are one message. */
int oai_rewrite_thought(struct oai_rewrite *w, const char *text);
int oai_rewrite_answer(struct oai_rewrite *w, const char *text);
int oai_rewrite_call(struct oai_rewrite *w, const char *id, const char *name,
                     const cJSON *arguments); /* a string or an object; NULL: none */

/* A type of parts and the member that has its text. */
struct oai_part_type {
    const char *type, *member;
};
/* The end of a list of types: parts of all others, such as images, are replaced by a text that says
 * what was left out. For results of tools, which a client cannot take back. */
#define OAI_PARTS_ELSE                                                                             \
    { NULL, "" }
/* A text, or an array of parts of these types (ended by {NULL, NULL} or OAI_PARTS_ELSE), joined by
 * line breaks. The text lies in the arena or the tree. */
int oai_rewrite_join(struct oai_rewrite *w, const cJSON *node, const char *path,
                     const struct oai_part_type *types, const char **text);
/* Reads a part's text; `path` names the part. */
int oai_rewrite_part(struct oai_rewrite *w, const cJSON *part, const char *path,
                     const struct oai_part_type *types, const char **text);

/* Reads a string that must be present. */
int oai_rewrite_string(struct oai_rewrite *w, const cJSON *object, const char *path,
                       const char *key, const char **value);
/* Answers 400: `field` has a value that keepd does not serve. Returns -1. */
int oai_rewrite_refuse(struct oai_rewrite *w, const char *field, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
