/* The readers of the options' four sources. Every source is parsed by the same set_option, so a
 * value is checked alike wherever it comes from; sources are read strongest first, because command
 * line and environment may name the configuration file. */
#include "config/table.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "config/entries.h"
#include "config/foreign.h"

#define SECTION_BYTES 48 /* inih cuts longer names of sections off */

/* In the order of rising priority. */
enum source { FROM_DEFAULT, FROM_FILE, FROM_SECTION, FROM_ENVIRONMENT, FROM_FLAG };

struct loader {
    struct config *config;
    struct fault *fault;
    enum source source[CONFIG_OPTIONS_MAX];
    bool in_file[CONFIG_OPTIONS_MAX];
    FILE *file;
    const char *path;
    int line;               /* line number in the file */
    bool line_long;         /* the line was longer than inih's buffer */
    int rc;                 /* first error in the file */
    const char *section;    /* the model whose options are read, too; NULL: none */
    char read_section[256]; /* section of the last line; "" = none */
    bool added;             /* the models that the options name are known */
    bool named;             /* the command line names the model without --model */
};

/* --- names --- */

static const struct option *find_option(const char *name, size_t size) {
    for (size_t i = 0; i < config_option_count; i++)
        if (config_options[i].name && strlen(config_options[i].name) == size &&
            memcmp(config_options[i].name, name, size) == 0)
            return &config_options[i];
    return NULL;
}

/* Returns the fewest edits (insert, delete or replace a letter) that turn a into b. */
static size_t edit_distance(const char *a, size_t a_size, const char *b) {
    size_t row[64], b_size = strlen(b);
    CHECK(b_size < sizeof row / sizeof *row);
    for (size_t j = 0; j <= b_size; j++) row[j] = j;
    for (size_t i = 1; i <= a_size; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_size; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[b_size];
}

/* Returns the only option whose name ends with a hyphen and this name, such as kv-budget for
 * budget. NULL: there is none, or there are several. */
static const char *longer_name(const char *name, size_t size) {
    const char *found = NULL;
    for (size_t i = 0; i < config_option_count; i++) {
        const char *whole = config_options[i].name;
        size_t all = whole ? strlen(whole) : 0;
        if (all <= size + 1 || whole[all - size - 1] != '-') continue;
        if (memcmp(whole + all - size, name, size) != 0) continue;
        if (found) return NULL;
        found = whole;
    }
    return found;
}

/* Returns the option that was probably meant: the nearest name, with at most one edit per three
 * letters, else a longer name, else NULL. */
static const char *nearest_name(const char *name, size_t size) {
    const char *nearest = NULL;
    size_t least = size / 3 + 1;
    for (size_t i = 0; i < config_option_count; i++) {
        if (!config_options[i].name) continue;
        size_t distance = edit_distance(name, size, config_options[i].name);
        if (distance < least) {
            least = distance;
            nearest = config_options[i].name;
        }
    }
    return nearest ? nearest : longer_name(name, size);
}

/* Returns the option of keepd for a name that other servers use, without its dashes, such as
 * `ctx-size` in a file. */
static const char *own_name(const char *name) {
    char dashed[80];
    snprintf(dashed, sizeof dashed, "--%s", name);
    const struct foreign *foreign = foreign_find(dashed, strlen(dashed));
    return foreign ? foreign->option : NULL;
}

static int unknown_option(struct loader *load, const char *name, size_t size, const char *where) {
    int shown = size < 64 ? (int)size : 64;
    char field[65];
    snprintf(field, sizeof field, "%.*s", shown, name);
    const char *nearest = own_name(field);
    if (!nearest) nearest = nearest_name(name, (size_t)shown);
    return fault_set(load->fault, ERR_INVALID, field, "%s: unknown option '%s'%s%s%s", where, field,
                     nearest ? "; did you mean '" : "", nearest ? nearest : "",
                     nearest ? "'?" : "");
}

/* --- values --- */

static int64_t unit_factor(char suffix) {
    switch (suffix) {
    case 'K':
    case 'k':
        return (int64_t)1 << 10;
    case 'M':
    case 'm':
        return (int64_t)1 << 20;
    case 'G':
    case 'g':
        return (int64_t)1 << 30;
    default:
        return 0;
    }
}

static bool parse_integer(const char *text, bool units, int64_t *value) {
    char *end;
    if (!isdigit((unsigned char)text[text[0] == '-'])) return false; /* no blanks, no '+' */
    errno = 0;
    *value = strtoll(text, &end, 10);
    if (errno) return false;
    if (units && unit_factor(*end)) {
        if (__builtin_mul_overflow(*value, unit_factor(*end), value)) return false;
        end++;
    }
    return *end == '\0';
}

static bool parse_decimal(const struct option *option, const char *text, double *value) {
    char *end;
    if (!isdigit((unsigned char)text[0]) && text[0] != '.') return false; /* no blanks, no signs */
    *value = strtod(text, &end);
    if (*end || !(*value >= (double)option->min && *value <= (double)option->max)) return false;
    return !(option->traits & WHOLE) || *value == floor(*value);
}

static bool parse_flag(const char *text, bool *value) {
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on", "0", "1"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (strcmp(text, words[i]) != 0) continue;
        *value = i % 2;
        return true;
    }
    return false;
}

/* Returns the number of the choice, in the order of the row; -1: it is none of them. */
static int find_choice(const char *choices, const char *text) {
    size_t size = strlen(text);
    int index = 0;
    for (const char *p = choices; *p; p += strspn(p, "|"), index++) {
        size_t n = strcspn(p, "|");
        if (n == size && memcmp(p, text, n) == 0) return index;
        p += n;
    }
    return -1;
}

static int wrong_value(struct loader *load, const struct option *option, const char *text,
                       const char *where) {
    const char *shown = (option->traits & SECRET) ? "(hidden)" : text;
    switch (option->type) {
    case INT:
    case BYTES:
        return fault_set(load->fault, ERR_INVALID, option->name,
                         "%s: %s must be a whole number from %" PRId64 " to %" PRId64
                         "%s, not '%.64s'",
                         where, option->name, option->min, option->max,
                         option->type == BYTES ? ", K, M or G may follow" : "", shown);
    case NUM:
        return fault_set(load->fault, ERR_INVALID, option->name,
                         "%s: %s must be a %snumber from %" PRId64 " to %" PRId64 ", not '%.64s'",
                         where, option->name, option->traits & WHOLE ? "whole " : "", option->min,
                         option->max, shown);
    case CHOICE:
    case ENUM:
        return fault_set(load->fault, ERR_INVALID, option->name,
                         "%s: %s must be one of %s, not '%.64s'", where, option->name,
                         option->metavar, shown);
    case FLAG:
        return fault_set(load->fault, ERR_INVALID, option->name,
                         "%s: %s must be true or false, not '%.64s'", where, option->name, shown);
    default:
        return fault_set(load->fault, ERR_INVALID, option->name, "%s: %s must not be empty", where,
                         option->name);
    }
}

void *config_field(const struct config *config, const struct option *option) {
    return (char *)config + option->offset;
}

int64_t config_integer(const struct config *config, const struct option *option) {
    const void *field = config_field(config, option);
    return option->size == sizeof(int) ? *(const int *)field : *(const int64_t *)field;
}

static void store_integer(struct config *config, const struct option *option, int64_t number) {
    void *field = config_field(config, option);
    if (option->size == sizeof(int))
        *(int *)field = (int)number;
    else
        *(int64_t *)field = number;
}

double config_number(const struct config *config, const struct option *option) {
    const void *field = config_field(config, option);
    if (!(option->traits & WHOLE)) return *(const float *)field;
    return *(const int *)field < 0 ? NAN : *(const int *)field;
}

static void store_number(struct config *config, const struct option *option, double number) {
    void *field = config_field(config, option);
    if (option->traits & WHOLE)
        *(int *)field = isnan(number) ? -1 : (int)number;
    else
        *(float *)field = (float)number;
}

static void clear_list(struct server_list *list) {
    for (size_t i = 0; i < list->count; i++) mem_free(list->items[i]);
    mem_free(list->items);
    *list = (struct server_list){0};
}

static void add_to_list(struct server_list *list, const char *text) {
    char **items = mem_must_alloc(list->count + 1, sizeof *items);
    for (size_t i = 0; i < list->count; i++) items[i] = list->items[i];
    items[list->count] = mem_must_strdup(text);
    mem_free(list->items);
    *list = (struct server_list){items, list->count + 1};
}

/* Stores a text, or adds it to a list. `stronger`: the value's source outranks the source of the
 * list's present items. */
static void store_string(struct config *config, const struct option *option, const char *text,
                         bool stronger) {
    struct server_list *list = config_field(config, option);
    if (option->type != LIST) {
        char **field = config_field(config, option);
        mem_free(*field);
        *field = mem_must_strdup(text);
        return;
    }
    if (stronger) clear_list(list);
    add_to_list(list, text);
}

__attribute__((format(printf, 2, 3))) static void add_note(struct loader *load, const char *format,
                                                           ...) {
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    add_to_list(&load->config->notes, text);
}

/* Returns keepd's name of a value that has another name in other servers. */
static const char *own_word(struct loader *load, const struct option *option, const char *text,
                            const char *where) {
    const struct foreign_word *word = foreign_word_find(option->name, text);
    if (!word) return text;
    if (word->note)
        add_note(load, "%s: %s is %s here, not %s: %s", where, option->name, word->value, text,
                 word->note);
    return word->value;
}

/* Checks the value, and stores it unless a stronger source has set the option. */
static int set_option(struct loader *load, const struct option *option, const char *text,
                      enum source source, const char *where) {
    size_t index = (size_t)(option - config_options);
    bool store = source >= load->source[index];
    int64_t number = 0;
    double real = NAN;
    bool flag = false;
    if (option->type == CHOICE || option->type == ENUM) text = own_word(load, option, text, where);
    switch (option->type) {
    case INT:
    case BYTES:
        if (!parse_integer(text, option->type == BYTES, &number) || number < option->min ||
            number > option->max)
            return wrong_value(load, option, text, where);
        if (store) store_integer(load->config, option, number);
        break;
    case NUM:
        if (!parse_decimal(option, text, &real)) return wrong_value(load, option, text, where);
        if (store) store_number(load->config, option, real);
        break;
    case ENUM:
        number = find_choice(option->metavar, text);
        if (number < 0) return wrong_value(load, option, text, where);
        if (store) store_integer(load->config, option, number);
        break;
    case FLAG:
        if (!parse_flag(text, &flag)) return wrong_value(load, option, text, where);
        if (store) *(bool *)config_field(load->config, option) = flag;
        break;
    case CHOICE:
    case LIST:
    case TEXT:
        if (option->type == CHOICE ? find_choice(option->metavar, text) < 0
                                   : (int64_t)strlen(text) < option->min)
            return wrong_value(load, option, text, where);
        if (store) store_string(load->config, option, text, source > load->source[index]);
        break;
    }
    if (store) load->source[index] = source;
    return 0;
}

/* --- sources --- */

static void load_defaults(struct loader *load) {
    for (size_t i = 0; i < config_option_count; i++) {
        const struct option *option = &config_options[i];
        CHECK_MSG(option->type != INT || option->size > sizeof(int) || option->max <= INT_MAX,
                  "range of %s", option->name);
        if (option->name && option->type == NUM) store_number(load->config, option, NAN);
        if (!option->fallback) continue;
        int rc = set_option(load, option, option->fallback, FROM_DEFAULT, "default");
        CHECK_MSG(rc == 0, "default of %s", option->name);
    }
}

/* Reads one flag, and its value if that is the next argument. *used: number of arguments read. */
static int load_flag(struct loader *load, const struct option *option, const char *value,
                     char **args, int *used) {
    *used = 1;
    if (load->named && strcmp(option->name, "model") == 0)
        return fault_set(load->fault, ERR_INVALID, "model",
                         "command line: the model is named twice");
    if (value) {
        value++;
    } else if (option->type == FLAG) {
        value = "true";
    } else {
        value = args[1];
        *used = 2;
        if (!value)
            return fault_set(load->fault, ERR_INVALID, option->name,
                             "command line: %.60s needs a value", args[0]);
    }
    return set_option(load, option, value, FROM_FLAG, "command line");
}

/* Reads an option of another server whose value here has a text in front. */
static int load_behind(struct loader *load, const struct foreign *foreign, const char *value,
                       char **args, int *used) {
    const char *own = value ? value + 1 : args[1];
    char text[1024];
    if (!own)
        return fault_set(load->fault, ERR_INVALID, foreign->name,
                         "command line: %.60s needs a value", args[0]);
    snprintf(text, sizeof text, "=%s%s", foreign->text, own);
    int rc =
        load_flag(load, find_option(foreign->option, strlen(foreign->option)), text, args, used);
    *used = value ? 1 : 2;
    return rc;
}

/* Reads an option of another server. `value` begins with its = sign; NULL: there is none. */
static int load_foreign(struct loader *load, const struct foreign *foreign, const char *value,
                        char **args, int *used) {
    int size = (int)(value ? (size_t)(value - args[0]) : strlen(args[0]));
    *used = 1;
    switch (foreign->kind) {
    case FOREIGN_SAME:
        return load_flag(load, find_option(foreign->option, strlen(foreign->option)), value, args,
                         used);
    case FOREIGN_FRONT:
        return load_behind(load, foreign, value, args, used);
    case FOREIGN_SET:
        if (value)
            return fault_set(load->fault, ERR_INVALID, foreign->name,
                             "command line: %.*s takes no value; leave it out", size, args[0]);
        return set_option(load, find_option(foreign->option, strlen(foreign->option)),
                          foreign->text, FROM_FLAG, "command line");
    case FOREIGN_NOTHING:
        if (!value && args[1] &&
            (foreign->value == FOREIGN_ONE ||
             (foreign->value == FOREIGN_WORD && foreign_is_word(args[1]))))
            *used = 2;
        add_note(load, "command line: %.*s changes nothing here: %s", size, args[0], foreign->text);
        return 0;
    default:
        return fault_set(load->fault, ERR_INVALID, foreign->name,
                         "command line: %.*s is not an option of keepd; %s", size, args[0],
                         foreign->text);
    }
}

/* Finds --kv-budget, also as --kv_budget, which other servers allow. */
static const struct option *find_flag(const char *arg, size_t size) {
    char name[64];
    if (strncmp(arg, "--", 2) != 0 || size - 2 >= sizeof name) return NULL;
    for (size_t i = 2; i < size; i++) name[i - 2] = arg[i] == '_' ? '-' : arg[i];
    return find_option(name, size - 2);
}

/* Returns the command that a first word probably means, with at most one edit per three letters;
 * NULL: none. */
static const char *nearest_command(const char *word) {
    static const char *const commands[] = {"serve", "chat", "bench",  "fit",
                                           "pull",  "help", "version"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (edit_distance(word, strlen(word), commands[i]) <= strlen(commands[i]) / 3)
            return commands[i];
    return NULL;
}

/* Reads an argument without dashes: a command, or the model without --model. */
static int load_word(struct loader *load, int index, const char *word) {
    const char *instead = index == 1 ? foreign_command(word) : NULL;
    const char *meant = index == 1 ? nearest_command(word) : NULL;
    if (index == 1 && strcmp(word, "serve") == 0) return 0;
    if (index == 1 && (strcmp(word, "help") == 0 || strcmp(word, "version") == 0)) {
        *(word[0] == 'h' ? &load->config->help : &load->config->version) = true;
        return 0;
    }
    if (instead && access(word, F_OK) != 0)
        return fault_set(load->fault, ERR_INVALID, word,
                         "command line: '%.64s' is not a command of keepd; %s", word, instead);
    if (meant && access(word, F_OK) != 0)
        return fault_set(load->fault, ERR_INVALID, word,
                         "command line: '%.64s' is not a command of keepd; did you mean '%s'?",
                         word, meant);
    if (load->named || load->config->model_texts.count) {
        meant = nearest_command(
            load->config->model_texts.items[0]); /* a folder has the name of the command */
        return fault_set(
            load->fault, ERR_INVALID, word,
            "command line: unexpected argument '%.64s': the model is named already%s%s%s", word,
            meant ? "; did you mean '" : "", meant ? meant : "",
            meant ? "' by the word before?" : "");
    }
    load->named = true;
    return set_option(load, find_option("model", 5), word, FROM_FLAG, "command line");
}

static int load_argument(struct loader *load, int index, char **args, int *used) {
    const char *value = strchr(args[0], '=');
    size_t size = value ? (size_t)(value - args[0]) : strlen(args[0]);
    const struct option *option = find_flag(args[0], size);
    const struct foreign *foreign = option ? NULL : foreign_find(args[0], size);
    *used = 1;
    if (strcmp(args[0], "-h") == 0) {
        load->config->help = true;
        return 0;
    }
    if (option) return load_flag(load, option, value, args, used);
    if (foreign) return load_foreign(load, foreign, value, args, used);
    if (args[0][0] != '-') return load_word(load, index, args[0]);
    size_t dashes = strncmp(args[0], "--", 2) == 0 ? 2 : 1;
    return unknown_option(load, args[0] + dashes, size - dashes, "command line");
}

/* "kv-budget" -> "KEEPD_KV_BUDGET" */
static void environment_name(const struct option *option, char *out, size_t size) {
    snprintf(out, size, "KEEPD_%s", option->name);
    for (char *p = out; *p; p++) *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
}

/* Notes a variable whose name is nearly that of an option. This is not an error, because
 * Kubernetes, containers and keepd's own programs have variables with similar names. Names of three
 * letters are near to too many: KEEPD_BIN is no KEEPD_PIN. */
static void note_variable(struct loader *load, const char *entry) {
    static const char prefix[] = "KEEPD_";
    char name[64], best[80];
    size_t size = strcspn(entry, "="), skip = sizeof prefix - 1;
    if (size <= skip || size - skip >= sizeof name || strncmp(entry, prefix, skip) != 0) return;
    for (size_t i = skip; i < size; i++)
        name[i - skip] = entry[i] == '_' ? '-' : (char)tolower((unsigned char)entry[i]);
    name[size - skip] = '\0';
    const char *nearest = own_name(name);
    if (find_option(name, size - skip)) return;
    if (!nearest && size - skip > 3) nearest = nearest_name(name, size - skip);
    if (!nearest) return;
    environment_name(find_option(nearest, strlen(nearest)), best, sizeof best);
    add_note(load, "environment: %.*s is no option of keepd and is ignored; did you mean %s?",
             (int)size, entry, best);
}

/* Unknown KEEPD_ variables are ignored: other programs may use them (tests, containers). */
static int load_environment(struct loader *load, char **envp) {
    for (char **entry = envp; entry && *entry; entry++) note_variable(load, *entry);
    for (size_t i = 0; i < config_option_count; i++) {
        char name[64];
        if (!config_options[i].name || config_options[i].traits & COMMAND_LINE) continue;
        environment_name(&config_options[i], name, sizeof name);
        for (char **entry = envp; entry && *entry; entry++) {
            size_t size = strlen(name);
            if (strncmp(*entry, name, size) != 0 || (*entry)[size] != '=') continue;
            int rc =
                set_option(load, &config_options[i], *entry + size + 1, FROM_ENVIRONMENT, name);
            if (rc) return rc;
        }
    }
    return 0;
}

/* Replaces inih's fgets: counts lines and detects a line that does not fit inih's buffer. */
static char *read_line(char *line, int size, void *stream) {
    struct loader *load = stream;
    if (load->line_long || !fgets(line, size, load->file)) return NULL;
    load->line++;
    load->line_long = !strchr(line, '\n') && !feof(load->file);
    return line;
}

/* Adds the models that --model and --models-dir name, once: before the first section, or after the
 * file. */
static int add_models(struct loader *load) {
    struct config *config = load->config;
    int rc = 0;
    for (size_t i = 0; i < config->model_texts.count && !rc && !load->added; i++)
        rc = entries_add_text(config, config->model_texts.items[i], load->fault);
    if (!rc && config->models_dir && !load->added)
        rc = entries_add_folder(config, config->models_dir, load->fault);
    load->added = true;
    return rc;
}

/* Returns whether the option may differ between the models of one server: those of the engine and
 * of requests, but not those of the directory of conversations, which all models share. */
static bool is_of_model(const struct option *option) {
    static const struct {
        size_t from, size;
    } parts[] = {{AT(engine)}, {AT(sampling)}, {AT(model)}, {AT(reasoning_parser)}};
    if (option->traits & COMMAND_LINE || strncmp(option->name, "state-", 6) == 0) return false;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (option->offset >= parts[i].from && option->offset < parts[i].from + parts[i].size)
            return true;
    return false;
}

/* Adds names to those of a model. */
static void add_model_names(struct config_model *model, const char *names) {
    const size_t size = strlen(model->names) + strlen(names) + sizeof ",";
    char *all = mem_must_alloc(size, 1);
    snprintf(all, size, "%s,%s", model->names, names);
    mem_free(model->names);
    model->names = all;
}

static void note_section_line(struct config *config, const char *section, const char *option,
                              const char *value) {
    const size_t size = strlen(section) + strlen(option) + strlen(value) + sizeof "[] \n";
    char *line = mem_must_alloc(size, 1);
    snprintf(line, size, "[%s] %s\n%s", section, option, value);
    add_to_list(&config->section_lines, line);
    mem_free(line);
}

/* Reads a line of a section, which names a model, or has an option of one. */
static int load_section_entry(struct loader *load, const char *section, const struct option *option,
                              const char *value, const char *where) {
    const bool path = strcmp(option->name, "model") == 0;
    int rc = add_models(load);
    if (rc) return rc;
    if (strlen(section) > SECTION_BYTES)
        return fault_set(load->fault, ERR_LIMIT, option->name,
                         "%s: the name of the section has more than %d bytes; a short one may have "
                         "the long name as served-model-name",
                         where, SECTION_BYTES);
    struct config_model *model = entries_find(load->config, section);
    if (load->in_file[option - config_options])
        return fault_set(load->fault, ERR_INVALID, option->name, "%s: %s is given twice", where,
                         option->name);
    load->in_file[option - config_options] = true;
    load->config->sections = true;
    note_section_line(load->config, section, option->name, value);
    if (path && !load->section) {
        if (model)
            return fault_set(load->fault, ERR_INVALID, "model",
                             "%s: two models have the name '%.100s'", where, section);
        entries_add(load->config, section, value);
        return 0;
    }
    if (!path && !is_of_model(option))
        return fault_set(load->fault, ERR_INVALID, option->name,
                         "%s: %s is an option of the server, and stands before the first section",
                         where, option->name);
    if (!load->section && !model)
        return fault_set(
            load->fault, ERR_INVALID, "model",
            "%s: no model has the name '%.100s': give model = MODEL first, or the name "
            "with --model",
            where, section);
    if (!load->section && strcmp(option->name, "served-model-name") == 0)
        add_model_names(model, value);
    if (path || strcmp(option->name, "served-model-name") == 0) return 0;
    if (load->section && strcmp(section, load->section) == 0)
        return set_option(load, option, value, FROM_SECTION, where);
    /* Checked for every model, so that a wrong value is found at the start. */
    enum source *source = &load->source[option - config_options], kept = *source;
    *source = FROM_FLAG;
    rc = set_option(load, option, value, FROM_SECTION, where);
    *source = kept;
    return rc;
}

static int load_file_entry(struct loader *load, const char *section, const char *name,
                           const char *value) {
    char where[256];
    snprintf(where, sizeof where, "%s line %d", load->path, load->line);
    const struct option *option = find_option(name, strlen(name));
    if (!option) return unknown_option(load, name, strlen(name), where);
    if (strcmp(section, load->read_section) != 0) {
        snprintf(load->read_section, sizeof load->read_section, "%s", section);
        memset(load->in_file, 0, sizeof load->in_file);
    }
    if (*section) return load_section_entry(load, section, option, value, where);
    if (option->traits & (COMMAND_LINE | NOT_IN_FILE))
        return fault_set(load->fault, ERR_INVALID, option->name,
                         "%s: %s cannot stand in a configuration file", where, option->name);
    /* This refuses indented lines as well, which inih reports as a second value. */
    if (option->type != LIST && load->in_file[option - config_options])
        return fault_set(load->fault, ERR_INVALID, option->name,
                         "%s: %s is given twice; a line that begins with a blank goes on with the "
                         "option above",
                         where, option->name);
    load->in_file[option - config_options] = true;
    return set_option(load, option, value, FROM_FILE, where);
}

static int on_file_entry(void *user, const char *section, const char *name, const char *value) {
    struct loader *load = user;
    if (load->rc == 0 && !load->line_long) load->rc = load_file_entry(load, section, name, value);
    return load->rc == 0;
}

static int load_file(struct loader *load) {
    load->path = load->config->config_file;
    if (!load->path) return 0;
    load->file = fopen(load->path, "re");
    if (!load->file)
        return fault_set(load->fault, ERR_IO, "config", "cannot open %.256s: %s", load->path,
                         strerror(errno));
    int line = ini_parse_stream(read_line, load, on_file_entry, load);
    if (!load->rc && load->line_long)
        load->rc = fault_set(load->fault, ERR_LIMIT, "config", "%.256s line %d: line too long",
                             load->path, load->line);
    else if (!load->rc && ferror(load->file))
        load->rc = fault_set(load->fault, ERR_IO, "config", "cannot read %.256s", load->path);
    else if (!load->rc && line)
        load->rc = fault_set(load->fault, ERR_MALFORMED, "config",
                             "%.256s line %d: expected `name = value`", load->path, line);
    fclose(load->file);
    return load->rc;
}

/* --- the whole --- */

static int check_together(struct config *config, struct fault *fault) {
    if (config->engine.kv_budget_max && config->engine.kv_budget > config->engine.kv_budget_max)
        return fault_set(fault, ERR_INVALID, "kv-budget", "kv-budget %d is above kv-budget-max %d",
                         config->engine.kv_budget, config->engine.kv_budget_max);
    if (config->engine.max_num_batched_tokens < config->engine.max_num_seqs)
        return fault_set(fault, ERR_INVALID, "max-num-batched-tokens",
                         "max-num-batched-tokens %d is below max-num-seqs %d"
                         ": each running sequence needs one token per step",
                         config->engine.max_num_batched_tokens, config->engine.max_num_seqs);
    return 0;
}

/* A single model may also be pinned by the name that --served-model-name gives it. */
static int pin_models(struct config *config, struct fault *fault) {
    for (size_t i = 0; i < config->pins.count; i++) {
        const char *pin = config->pins.items[i], *own = config->model.names;
        struct config_model *model = entries_find(config, pin);
        if (!model && config->model_count == 1 && own && entries_is_first(own, pin))
            model = config->models;
        if (!model)
            return fault_set(fault, ERR_INVALID, "pin", "no model has the name '%.100s'", pin);
        model->pinned = true;
    }
    return 0;
}

static int check_models(struct config *config, struct fault *fault) {
    if (config->inspect) {
        entries_close(config);
        int rc = entries_add_text(config, config->inspect, fault);
        if (rc) return rc;
    }
    if (!config->model_count)
        return fault_set(fault, ERR_INVALID, "model",
                         "no model given: keepd MODEL, where MODEL is a model directory or a GGUF "
                         "file; make serve serves the bundled one");
    if (config->model_count > 1 && config->model.names)
        return fault_set(fault, ERR_INVALID, "served-model-name",
                         "names one model, and there are %zu: give --model NAME,ALIAS=MODEL",
                         config->model_count);
    return config->inspect ? 0 : pin_models(config, fault);
}

/* Sets what the rest of the program reads of the one model. */
static void take_model(struct config *config, const struct config_model *model) {
    config->engine.model_dir = mem_must_strdup(model->path);
    if (!config->model.names) config->model.names = mem_must_strdup(model->names);
}

static int load_sources(struct loader *load, int argc, char **argv, char **envp) {
    int rc = 0;
    load_defaults(load);
    /* The strongest source is read first, because the first two can name the file. */
    for (int i = 1, used; i < argc && !rc; i += used) rc = load_argument(load, i, argv + i, &used);
    const struct config *config = load->config;
    if (rc || config->help || config->man || config->version || config->completion) return rc;
    rc = load_environment(load, envp);
    if (!rc) rc = load_file(load);
    return rc ? rc : add_models(load);
}

static int config_load_all(int argc, char **argv, char **envp, const struct config *base,
                           size_t model, struct config *config, struct fault *fault) {
    struct loader load = {.config = config, .fault = fault};
    char section[256] = "";
    memset(config, 0, sizeof *config);
    if (base) {
        const char *names = base->models[model].names;
        snprintf(section, sizeof section, "%.*s", (int)strcspn(names, ","), names);
        load.section = section;
    }
    int rc = load_sources(&load, argc, argv, envp);
    if (!rc && (config->help || config->man || config->version || config->completion)) return 0;
    if (!rc && !base) rc = check_models(config, fault);
    if (!rc) take_model(config, base ? &base->models[model] : &config->models[0]);
    if (!rc) rc = check_together(config, fault);
    config->engine.kv_budget_given =
        load.source[find_option("kv-budget", 9) - config_options] != FROM_DEFAULT;
    if (rc) config_close(config);
    return rc;
}

int config_load(int argc, char **argv, char **envp, struct config *config, struct fault *fault) {
    return config_load_all(argc, argv, envp, NULL, 0, config, fault);
}

int config_load_model(int argc, char **argv, char **envp, const struct config *base, size_t model,
                      struct config *config, struct fault *fault) {
    return config_load_all(argc, argv, envp, base, model, config, fault);
}

void config_close(struct config *config) {
    for (size_t i = 0; i < config_option_count; i++) {
        const struct option *option = &config_options[i];
        if (!option->name) continue;
        if (option->type == LIST) clear_list(config_field(config, option));
        if (option->type == TEXT || option->type == CHOICE)
            mem_free(*(char **)config_field(config, option));
    }
    clear_list(&config->notes);
    clear_list(&config->section_lines);
    entries_close(config);
    mem_free((char *)(uintptr_t)config->engine.model_dir);
    memset(config, 0, sizeof *config);
}

bool config_is_option(const char *name) {
    return find_option(name, strlen(name)) != NULL;
}

/* --- reloading --- */

static bool equal_text_lists(const struct server_list *a, const struct server_list *b) {
    if (a->count != b->count) return false;
    for (size_t i = 0; i < a->count; i++)
        if (strcmp(a->items[i], b->items[i]) != 0) return false;
    return true;
}

static bool equal_fields(const struct config *a, const struct config *b,
                         const struct option *option) {
    const void *x = config_field(a, option), *y = config_field(b, option);
    if (option->type == LIST) return equal_text_lists(x, y);
    if (option->type != TEXT && option->type != CHOICE) return memcmp(x, y, option->size) == 0;
    const char *s = *(char *const *)x, *t = *(char *const *)y;
    return s && t ? strcmp(s, t) == 0 : s == t;
}

/* Returns whether the list has this line of a section, or, with `any_value`, one of its option. */
static bool has_section_line(const struct server_list *lines, const char *line, bool any_value) {
    const size_t size = strcspn(line, "\n");
    for (size_t i = 0; i < lines->count; i++) {
        const char *other = lines->items[i];
        const bool same_option = strcspn(other, "\n") == size && memcmp(other, line, size) == 0;
        if (any_value ? same_option : strcmp(other, line) == 0) return true;
    }
    return false;
}

/* Calls `changed` for the lines that `other` does not have; with `gone`, only for those whose
 * option it does not have either. */
static void report_section_lines(const struct server_list *lines, const struct server_list *other,
                                 bool gone,
                                 void (*changed)(void *arg, const char *option, bool taken),
                                 void *arg) {
    char name[256];
    for (size_t i = 0; i < lines->count; i++) {
        const char *line = lines->items[i];
        if (has_section_line(other, line, gone)) continue;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(line, "\n"), line);
        changed(arg, name, false);
    }
}

void config_reload(struct config *config, struct config *fresh,
                   void (*changed)(void *arg, const char *option, bool taken), void *arg) {
    for (size_t i = 0; i < config_option_count; i++) {
        const struct option *option = &config_options[i];
        char kept[sizeof(struct server_list)];
        if (!option->name || equal_fields(config, fresh, option)) continue;
        bool taken = option->traits & RELOADABLE;
        changed(arg, option->name, taken);
        if (!taken) continue;
        void *old = config_field(config, option), *new = config_field(fresh, option);
        memcpy(kept, old, option->size);
        memcpy(old, new, option->size);
        memcpy(new, kept, option->size);
    }
    report_section_lines(&fresh->section_lines, &config->section_lines, false, changed, arg);
    report_section_lines(&config->section_lines, &fresh->section_lines, true, changed, arg);
}
