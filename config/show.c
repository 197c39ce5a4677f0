/* Prints the option table: as help for a terminal, as a manual page in roff, and with the values in
 * force as a configuration file. All three walk the same rows, so none can lack an option. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/check.h"
#include "config/table.h"

#define HELP_COLUMN    32
#define HELP_WIDTH     96
#define HELP_BYTES_MAX ((size_t)1 << 16)

/* Expects the cursor at HELP_COLUMN and starts further lines there. */
static void print_wrapped(FILE *out, const char *text) {
    int column = HELP_COLUMN;
    while (*text) {
        int size = (int)strcspn(text, " ");
        if (column == HELP_COLUMN) {
            column += fprintf(out, "%.*s", size, text);
        } else if (column + 1 + size <= HELP_WIDTH) {
            column += fprintf(out, " %.*s", size, text);
        } else {
            fprintf(out, "\n%*s%.*s", HELP_COLUMN, "", size, text);
            column = HELP_COLUMN + size;
        }
        text += size;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

/* Prints values with '|' between them, on further lines where they are too many for one. Returns
 * the column behind them. */
static int print_values(FILE *out, int column, const char *values) {
    const int first = column;
    while (*values) {
        int size = (int)strcspn(values, "|");
        size += values[size] == '|';
        if (column + size > HELP_WIDTH) {
            fprintf(out, "\n%*s", first, "");
            column = first;
        }
        column += fprintf(out, "%.*s", size, values);
        values += size;
    }
    return column;
}

static void print_option(FILE *out, const struct option *option) {
    struct buf text;
    int column = fprintf(out, "  --%s ", option->name);
    column = print_values(out, column, option->metavar ? option->metavar : "");
    if (column > HELP_COLUMN - 2)
        fprintf(out, "\n%*s", HELP_COLUMN, "");
    else
        fprintf(out, "%*s", HELP_COLUMN - column, "");
    bool bracket = option->fallback && option->type != FLAG;
    buf_open(&text, HELP_BYTES_MAX);
    buf_fmt(&text, "%s%s%s%s%s", option->help,
            option->type == BYTES ? " K, M or G may follow the number." : "", bracket ? " [" : "",
            bracket ? option->fallback : "", bracket ? "]" : "");
    CHECK(!text.failed);
    print_wrapped(out, text.data);
    buf_close(&text);
}

void config_help(FILE *out) {
    fputs(
        "Usage: keepd MODEL [options]     serves it; --model MODEL means the same\n"
        "       keepd chat [URL]      chats with a daemon: keepd chat --help\n"
        "       keepd bench MODEL     measures prompt and generation rates: keepd bench --help\n"
        "       keepd pull NAME       fetches a model of the Hugging Face Hub: keepd pull --help\n"
        "       keepd fit MODEL       fits retention gates to a model: keepd fit --help\n"
        "\n"
        "Serves a language model over the OpenAI HTTP API with a bounded key/value cache.\n"
        "Every option is also read from the environment (KEEPD_KV_BUDGET for --kv-budget) and\n"
        "from the file given with --config (kv-budget = 512). The command line overrides the\n"
        "environment, and the environment overrides the file. Defaults are in brackets.\n"
        "Names that llama-server, vLLM and SGLang have for the same options are understood.\n",
        out);
    for (size_t i = 0; i < config_option_count; i++) {
        if (config_options[i].name)
            print_option(out, &config_options[i]);
        else
            fprintf(out, "\n%s\n", config_options[i].help);
    }
}

/* --- the manual page --- */

/* Escapes characters that roff would interpret: backslashes, and a dot or quote at a line's start.
 */
static void man_text(FILE *out, const char *text) {
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\e", out);
        else if (*text == '-')
            fputs("\\-", out);
        else if (*text == '`' || *text == '\'')
            fputs("\\(aq", out);
        else if (*text == '|')
            fputs("|\\:", out); /* a long list of choices may go on in the next line */
        else
            fputc(*text, out);
    }
}

static void man_option(FILE *out, const struct option *option) {
    fputs(".TP\n.B ", out);
    man_text(out, "--");
    man_text(out, option->name);
    if (option->metavar) {
        fputs(" \\fI", out);
        man_text(out, option->metavar);
        fputs("\\fR", out);
    }
    fputc('\n', out);
    man_text(out, option->help);
    if (option->type == BYTES) fputs(" K, M or G may follow the number.", out);
    if (option->fallback && option->type != FLAG) {
        fputs(" Default: ", out);
        man_text(out, option->fallback);
        fputc('.', out);
    }
    if (option->traits & RELOADABLE) fputs(" Applied again on SIGHUP.", out);
    fputc('\n', out);
}

static const char man_head[] =
    ".ad l\n.SH NAME\nkeepd \\- serves a language model with a bounded key/value cache\n"
    ".SH SYNOPSIS\n.B keepd\n\\fIMODEL\\fR [\\fIoptions\\fR]\n"
    ".br\n.B keepd chat\n[\\fIURL\\fR] [\\fIoptions\\fR]\n"
    ".br\n.B keepd bench\n\\fIMODEL\\fR [\\fIoptions\\fR]\n"
    ".br\n.B keepd fit\n\\fIMODEL\\fR \\-\\-text \\fIFILE\\fR... [\\fIoptions\\fR]\n"
    ".br\n.B keepd pull\n\\fIOWNER/NAME:QUANTISATION\\fR\n"
    ".SH DESCRIPTION\n"
    "keepd serves a language model in Hugging Face format over the OpenAI HTTP API. The key/value "
    "cache of each conversation is bounded by a budget.\n.PP\n"
    "Every option is also read from the environment (KEEPD_KV_BUDGET for\n"
    ".BR \\-\\-kv\\-budget )\nand from the file given with\n.B \\-\\-config\n"
    "(kv\\-budget = 512). The command line overrides the environment, and the environment "
    "overrides the file. An option that may be given several times takes all its values from one "
    "of these sources.\n.PP\nThe model may also follow \\-\\-model. Names that llama\\-server, "
    "vLLM and SGLang have for the "
    "same options are understood on the command line.\n";

static const char man_tail[] =
    ".SH COMMANDS\n"
    ".TP\n.B keepd chat\nChats with a running daemon in a terminal, or answers the lines of a "
    "pipe. Without a URL: "
    "http://127.0.0.1:8080. \\fIkeepd chat \\-\\-help\\fR lists its options and \\fI/help\\fR its "
    "commands.\n"
    ".TP\n.B keepd bench\nMeasures how fast the machine reads prompts and generates, with the "
    "engine's options as given, and "
    "prints one table. \\fIkeepd bench \\-\\-help\\fR lists the others.\n"
    ".TP\n.B keepd fit\nFits retention gates, which the policy \\fIglobal\\fR needs, to a model on "
    "this "
    "machine, and prints what they lose beside other policies. \\fIkeepd fit \\-\\-help\\fR "
    "lists its options.\n"
    ".TP\n.B keepd pull\nFetches a model of the Hugging Face Hub into its cache, where "
    "\\-\\-model hf:\\fIOWNER/NAME:QUANTISATION\\fR finds it. \\fIkeepd pull \\-\\-help\\fR says "
    "what a name may be.\n"
    ".SH SIGNALS\n"
    ".TP\n.B SIGTERM, SIGINT\nRefuse new requests, finish accepted ones within drain\\-seconds, "
    "and exit. A second signal ends them at once.\n"
    ".TP\n.B SIGHUP\nRead the configuration again and apply the options that can change; the log "
    "names changed options that need a restart.\n"
    ".SH EXIT STATUS\n"
    ".TP\n.B 0\nEnded by a signal, or printed the requested text.\n"
    ".TP\n.B 1\nThe machine is at fault: a port in use, no memory, a failed device.\n"
    ".TP\n.B 78\nAn option or the model was rejected; restarting does not help.\n"
    ".SH ENVIRONMENT\n"
    "NOTIFY_SOCKET, WATCHDOG_USEC and LISTEN_FDS as systemd sets them.\n"
    "HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_HUB_OFFLINE as the Hugging Face Hub's own "
    "library reads them.\n"
    ".SH SEE ALSO\n.BR systemd.service (5)\n";

void config_man(FILE *out, const char *version) {
    fprintf(out, ".TH KEEPD 1 \"\" \"keepd %s\" \"User Commands\"\n%s.SH OPTIONS\n", version,
            man_head);
    for (size_t i = 0; i < config_option_count; i++) {
        if (config_options[i].name)
            man_option(out, &config_options[i]);
        else
            fprintf(out, ".SS %s\n", config_options[i].help);
    }
    fputs(man_tail, out);
}

/* --- values in force --- */

static void print_bytes(FILE *out, int64_t bytes) {
    static const char suffixes[] = "\0KMG";
    int unit = 0;
    while (unit < 3 && bytes && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    fprintf(out, "%" PRId64 "%.1s\n", bytes, &suffixes[unit]);
}

static void print_text(FILE *out, const struct option *option, const char *text) {
    if ((option->traits & SECRET))
        fputs("(hidden)\n", out);
    else
        fprintf(out, "%s\n", text);
}

static void print_choice(FILE *out, const char *choices, int index) {
    for (; index > 0; index--) choices += strcspn(choices, "|") + 1;
    fprintf(out, "%.*s\n", (int)strcspn(choices, "|"), choices);
}

/* Prints the fewest digits that read back as the same float. */
static void print_number(FILE *out, double number) {
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, number);
        if (strtof(text, NULL) == (float)number) break;
    }
    fprintf(out, "%s\n", text);
}

static void print_value(FILE *out, const struct config *config, const struct option *option) {
    const void *field = config_field(config, option);
    switch (option->type) {
    case INT:
        fprintf(out, "%" PRId64 "\n", config_integer(config, option));
        break;
    case BYTES:
        print_bytes(out, config_integer(config, option));
        break;
    case ENUM:
        print_choice(out, option->metavar, (int)config_integer(config, option));
        break;
    case NUM:
        print_number(out, config_number(config, option));
        break;
    case FLAG:
        fputs(*(const bool *)field ? "true\n" : "false\n", out);
        break;
    default:
        print_text(out, option, *(char *const *)field);
    }
}

static void print_list(FILE *out, const struct option *option, const struct server_list *list) {
    if (!list->count) fprintf(out, "# %s =\n", option->name);
    for (size_t i = 0; i < list->count; i++) {
        fprintf(out, "%s = ", option->name);
        print_text(out, option, list->items[i]);
    }
}

void config_print(const struct config *config, FILE *out) {
    for (size_t i = 0; i < config_option_count; i++) {
        const struct option *option = &config_options[i];
        const void *field = config_field(config, option);
        bool text = option->type == TEXT || option->type == CHOICE;
        if (!option->name || option->traits & (COMMAND_LINE | NOT_IN_FILE)) continue;
        if (option->type == LIST) {
            print_list(out, option, field);
        } else if ((text && !*(char *const *)field) ||
                   (option->type == NUM && isnan(config_number(config, option)))) {
            fprintf(out, "# %s =\n", option->name);
        } else {
            fprintf(out, "%s = ", option->name);
            print_value(out, config, option);
        }
    }
}
