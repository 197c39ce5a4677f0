/* Writes completion scripts for shells from the option table: what an option's value may be follows
 * from its type and the name of its value. */
#include <string.h>

#include "config/table.h"
#include "paging/names.h"

/* Returns whether the option's value is a path. */
static bool takes_path(const struct option *option) {
    static const char *const names[] = {"MODEL", "FILE", "DIR", "PATH"};
    for (size_t i = 0; option->metavar && i < sizeof names / sizeof *names; i++)
        if (strcmp(option->metavar, names[i]) == 0) return true;
    return false;
}

/* Returns the choices of a value, between separators; "" = any value. */
static const char *option_choices(const struct option *option) {
    if (option->type == CHOICE || option->type == ENUM) return option->metavar;
    if (option->metavar && strcmp(option->metavar, "POLICY") == 0) return "auto, " POLICY_NAMES;
    return "";
}

static void print_choices(FILE *out, const struct option *option) {
    const char *text = option_choices(option);
    for (const char *gap = ""; *text; gap = " ") {
        int size = (int)strcspn(text, "|, ");
        fprintf(out, "%s%.*s", gap, size, text);
        text += size;
        text += strspn(text, "|, ");
    }
}

/* Writes the first sentence of the help without its full stop, with a backslash before each of the
 * `escaped` characters. Apostrophes become right single quotation marks, because all three shells
 * get the text in apostrophes. */
static void print_sentence(FILE *out, const struct option *option, const char *escaped) {
    const char *end = strstr(option->help, ". ");
    const char *last = end ? end : option->help + strlen(option->help) - 1;
    for (const char *at = option->help; at < last; at++) {
        if (*at == '\'') {
            fputs("\u2019", out);
            continue;
        }
        if (strchr(escaped, *at)) fputc('\\', out);
        fputc(*at, out);
    }
}

static void bash_case(FILE *out, const struct option *option) {
    if (option->type == FLAG) return;
    fprintf(out, "    --%s) ", option->name);
    if (takes_path(option)) {
        fputs("COMPREPLY=($(compgen -f -- \"$word\")) ;;\n", out);
        return;
    }
    fputs("COMPREPLY=($(compgen -W '", out);
    print_choices(out, option);
    fputs("' -- \"$word\")) ;;\n", out);
}

/* COMP_WORDBREAKS contains `=`, so that --option=value arrives as three words. */
static void print_bash(FILE *out) {
    fputs("# bash completion of keepd: keepd --completion bash\n"
          "_keepd() {\n"
          "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
          "    if [[ $word == = ]]; then word=; elif [[ $before == = ]]; then\n"
          "        before=${COMP_WORDS[COMP_CWORD - 2]}\n"
          "    fi\n"
          "    compopt -o filenames 2>/dev/null\n"
          "    case $before in\n"
          "    bench | fit) COMPREPLY=($(compgen -f -- \"$word\")) ; return ;;\n",
          out);
    for (size_t i = 0; i < config_option_count; i++)
        if (config_options[i].name) bash_case(out, &config_options[i]);
    fputs("    *) COMPREPLY=($(compgen -W '", out);
    for (size_t i = 0; i < config_option_count; i++)
        if (config_options[i].name) fprintf(out, "--%s ", config_options[i].name);
    fputs("chat bench fit pull ", out);
    fputs("' -- \"$word\")) ;;\n    esac\n}\ncomplete -F _keepd keepd\n", out);
}

static void print_zsh(FILE *out) {
    fputs("#compdef keepd\n# zsh completion of keepd: keepd --completion zsh\n_arguments "
          "\"1::command:(chat bench fit pull)\"",
          out);
    for (size_t i = 0; i < config_option_count; i++) {
        const struct option *option = &config_options[i];
        if (!option->name) continue;
        fprintf(out, " \\\n  '%s--%s%s[", option->type == LIST ? "*" : "", option->name,
                option->type == FLAG ? "" : "=");
        print_sentence(out, option, "[]:\\");
        fputc(']', out);
        if (takes_path(option)) {
            fprintf(out, ":%s:_files", option->metavar);
        } else if (*option_choices(option)) {
            fprintf(out, ":%s:(",
                    option->type == CHOICE || option->type == ENUM ? "value" : option->metavar);
            print_choices(out, option);
            fputc(')', out);
        } else if (option->type != FLAG) {
            fprintf(out, ":%s: ", option->metavar);
        }
        fputc('\'', out);
    }
    fputc('\n', out);
}

static void print_fish(FILE *out) {
    fputs("# fish completion of keepd: keepd --completion fish\ncomplete -c keepd -f\n"
          "complete -c keepd -n __fish_is_first_arg -a chat -d 'Chats with a daemon'\n"
          "complete -c keepd -n __fish_is_first_arg -a bench -d 'Measures this machine'\n"
          "complete -c keepd -n __fish_is_first_arg -a fit -d 'Fits retention gates'\n"
          "complete -c keepd -n __fish_is_first_arg -a pull -d 'Fetches a model'\n",
          out);
    for (size_t i = 0; i < config_option_count; i++) {
        const struct option *option = &config_options[i];
        if (!option->name) continue;
        fprintf(out, "complete -c keepd -l %s%s", option->name,
                takes_path(option)     ? " -r -F"
                : option->type == FLAG ? ""
                                       : " -x");
        if (*option_choices(option)) {
            fputs(" -a '", out);
            print_choices(out, option);
            fputc('\'', out);
        }
        fputs(" -d '", out);
        print_sentence(out, option, "\\");
        fputs("'\n", out);
    }
}

void config_complete(FILE *out, const char *shell) {
    if (strcmp(shell, "bash") == 0)
        print_bash(out);
    else if (strcmp(shell, "zsh") == 0)
        print_zsh(out);
    else
        print_fish(out);
}
