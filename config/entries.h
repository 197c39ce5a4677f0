/* The list of models that the options name: --model, --models-dir and sections of the file. */
#ifndef KEEPD_CONFIG_ENTRIES_H
#define KEEPD_CONFIG_ENTRIES_H

#include "config/config.h"

/* Adds a model: `names` with commas between them, owned copies of both. */
void entries_add(struct config *config, const char *names, const char *path);
/* Adds "PATH", "NAME=PATH" or "NAME,ALIAS=PATH". ERR_INVALID. */
int entries_add_text(struct config *config, const char *text, struct fault *fault);
/* Adds the models of a folder: GGUF files, the first ones of split ones, and directories with a
 * config.json, sorted by name. ERR_IO, ERR_NOTFOUND: there is none. */
int entries_add_folder(struct config *config, const char *folder, struct fault *fault);
/* Returns whether this is the first one of names with commas between them. */
bool entries_is_first(const char *names, const char *name);
/* Finds the model with this first name; NULL: there is none. */
struct config_model *entries_find(const struct config *config, const char *name);
void entries_close(struct config *config);

#endif
