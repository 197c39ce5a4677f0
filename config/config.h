/* Options: one table (table.c) with name, type, range, default, reloadable and help feeds flags,
 * environment (KEEPD_KV_BUDGET for --kv-budget) and the configuration file (inih; key = value).
 * Order: flags over environment over file over defaults. The command line also takes the options of
 * other servers (foreign.h), `serve` in front and the model without a name. Only the program
 * (daemon/) includes this.
 *
 * Several models. --model may be given several times, --models-dir names a folder of them, and a
 * section of the file names one and has options that apply to this model alone. The options of the
 * command line and the environment outrank those of a section. */
#ifndef KEEPD_CONFIG_CONFIG_H
#define KEEPD_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "base/log.h"
#include "engine/engine_options.h"
#include "server/server.h"

struct config_model {
    char *names; /* with commas between them */
    char *path;
    bool pinned; /* --pin names it */
};

enum config_fit { CONFIG_FIT_AUTO, CONFIG_FIT_NEVER };

/* The table writes into the structs that the users of the options take. Texts and lists in them
 * belong to struct config until config_close. Members of `engine` and `server` that are not options
 * are 0. */
struct config {
    struct engine_options engine;    /* without `sampling`: see below */
    struct engine_sampling sampling; /* for engine.sampling */
    struct server_model model;       /* names: by default the name of the model's directory */
    struct server_options server;    /* without `models` */
    struct server_list model_texts;  /* --model */
    char *models_dir;
    struct server_list pins;     /* names of models */
    struct config_model *models; /* [model_count] all models; the first is engine.model_dir */
    size_t model_count;
    bool sections;                    /* models have options of their own */
    struct server_list section_lines; /* lines of sections: "[NAME] option\nvalue" */
    char *config_file;                /* --config */
    enum config_fit fit;
    enum log_level log_level;
    enum log_format log_format;
    enum config_reasoning { CONFIG_REASONING_AUTO, CONFIG_REASONING_NONE } reasoning_parser;
    char *inspect;     /* a model to describe, in place of engine.model_dir */
    char *quantize_to; /* where the model is saved with rounded matrices */
    char *completion;  /* a shell: bash, zsh, fish */
    bool check_config, help, man, version;
    struct server_list notes; /* warnings about the sources, for the log */
};

/* Fills *config; on failure nothing is left to close. ERR_INVALID (ERR_IO, ERR_MALFORMED or
 * ERR_LIMIT for the file) names the option in fault->field and the source in the text. With --help,
 * --man or --version on the command line nothing else is read or required. */
int config_load(int argc, char **argv, char **envp, struct config *config, struct fault *fault);
/* The same with the options of one model of `base`, which was loaded from the same sources, where
 * they have sections. */
int config_load_model(int argc, char **argv, char **envp, const struct config *base, size_t model,
                      struct config *config, struct fault *fault);
void config_close(struct config *config);

bool config_is_option(const char *name); /* "kv-policy" */

/* For SIGHUP: takes the values of options marked RELOADABLE from `fresh`, which was loaded with the
 * same arguments. Other options keep their values until a restart. `changed` is called for every
 * option whose value differs; `taken` tells whether it was applied. An option of a section has its
 * name in front, "[NAME] option", and is never taken. */
void config_reload(struct config *config, struct config *fresh,
                   void (*changed)(void *arg, const char *option, bool taken), void *arg);

void config_man(FILE *out, const char *version); /* writes the options as the page keepd.1 */
void config_help(FILE *out);                     /* writes the options for --help */
/* Writes a completion script from the table; shell: "bash", "zsh" or "fish". */
void config_complete(FILE *out, const char *shell);
void config_print(const struct config *config, FILE *out); /* effective values, for --check-config;
                                                               secrets are masked */

#endif
