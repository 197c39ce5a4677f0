/* The option table as config/ itself sees it: config.c has the rows and reads values into them,
 * show.c prints them. */
#ifndef KEEPD_CONFIG_TABLE_H
#define KEEPD_CONFIG_TABLE_H

#include <stddef.h>

#include "config/config.h"

enum type { TEXT, LIST, CHOICE, INT, BYTES, FLAG };

/* What asks for one answer now (--help) stands on the command line only; a file that names a file
 * would need an order among files. */
enum trait { COMMAND_LINE = 1, NOT_IN_FILE = 2, RELOADABLE = 4, SECRET = 8 };

struct option {
    const char *name;
    enum type type;
    size_t offset;        /* in struct config */
    int64_t min, max;     /* INT, BYTES: the range; TEXT, LIST: min is the least length */
    const char *fallback; /* the default as one would write it; NULL: not set */
    const char *metavar;  /* what --help calls the value; CHOICE: the choices between bars */
    unsigned traits;      /* enum trait */
    const char *help;
};

extern const struct option config_options[];
extern const size_t config_option_count;

/* Where the option's value lies: char * (TEXT, CHOICE), struct config_list (LIST), int64_t (INT,
 * BYTES) or bool (FLAG). */
void *config_field(const struct config *config, const struct option *option);

#endif
