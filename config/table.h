/* The option table as config/ itself sees it: table.c holds the rows, config.c reads values into
 * struct config, show.c prints them. */
#ifndef KEEPD_CONFIG_TABLE_H
#define KEEPD_CONFIG_TABLE_H

#include <stddef.h>

#include "config/config.h"

enum type { TEXT, LIST, CHOICE, ENUM, INT, BYTES, FLAG, NUM };

/* Traits of options. COMMAND_LINE: the option asks for one answer now, such as --help. NOT_IN_FILE:
 * --config, because files that name files would need an order. WHOLE: a NUM without a fraction. */
enum trait { COMMAND_LINE = 1, NOT_IN_FILE = 2, RELOADABLE = 4, SECRET = 8, WHOLE = 16 };

struct option {
    const char *name;
    enum type type;
    size_t offset, size;  /* where the value is in struct config */
    int64_t min, max;     /* INT, BYTES, NUM: the range; TEXT, LIST: min is the least length */
    const char *fallback; /* the default in the syntax of a value; NULL: not set */
    const char *metavar;  /* name of the value in --help; CHOICE, ENUM: the choices between bars */
    unsigned traits;      /* enum trait */
    const char *help;
};

/* Two members of a row: where the value is, and its size. */
#define AT(field) offsetof(struct config, field), sizeof(((struct config *)NULL)->field)

#define CONFIG_OPTIONS_MAX 192 /* rows, for arrays beside the table */

extern const struct option config_options[];
extern const size_t config_option_count;

/* Returns the address of the option's value: char * (TEXT, CHOICE), struct server_list (LIST), bool
 * (FLAG), an int or a number of 64 bits, by its size (INT, BYTES), an enum that counts the choices
 * (ENUM), a float that is NAN if not set or, with WHOLE, an int that is -1 if not set (NUM). */
void *config_field(const struct config *config, const struct option *option);
int64_t config_integer(const struct config *config,
                       const struct option *option); /* INT, BYTES, ENUM */
double config_number(const struct config *config,
                     const struct option *option); /* NUM; NAN: not set */

#endif
