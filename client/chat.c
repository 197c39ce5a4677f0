/* keepd-chat: a chat with a daemon in a terminal, or from a pipe: one message a line. The answers
 * go to stdout, all else to stderr, so that a pipe gets answers alone. `keepd chat` starts it.
 *
 * It is a program of its own, because it needs the libraries of an HTTP client and of a line
 * editor, which do not belong into the process that serves strangers. */
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <locale.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "client/dialogue.h"
#include "client/http.h"
#include "client/line.h"

#define DEFAULT_URL  "http://127.0.0.1:8080"
#define BRANCHES_MAX 16
#define SAY_MAX      4096 /* bytes of a line on stderr; the rest of a longer one is left out */
#define EXIT_USAGE   78

struct chat {
    struct http_options options;
    struct http *http;
    bool out_terminal; /* stdout is a terminal */
    bool err_terminal; /* stderr is a terminal */
    bool editing;      /* stdin and stdout are terminals: lines are edited */
    bool failed;       /* some request was not answered */
    bool blind;        /* the model sees no pictures */
    char *model;
    char policies[1024]; /* names with blanks around each; "" = unknown */
    char policy[64];     /* the server's own choice */
    int64_t budget;
    struct dialogue branches[BRANCHES_MAX]; /* an empty session: unused */
    int at;                                 /* the branch that is shown */
    struct dialogue_settings settings;
    char end;          /* last character of the answer so far; 0 = none */
    bool thinking;     /* the last piece was reasoning */
    bool reporting;    /* a line of progress is on the screen */
    char warning[400]; /* the last warning of the server that was shown */
};

/* ---- Output ---- */

/* Returns whether a character of UTF-8 controls a terminal: C0 except tab and newline, DEL, or C1,
 * whose first byte is C2. */
static bool is_terminal_control(const char *text) {
    unsigned char byte = (unsigned char)*text;
    if (byte == 0xc2) return (unsigned char)text[1] < 0xa0;
    return (byte < ' ' && byte != '\n' && byte != '\t') || byte == 0x7f;
}

/* Writes any text, as it may come from the server, a string of a tree (base/json.h). On a terminal,
 * control characters, which could move the cursor or set the title or the clipboard, are replaced,
 * and so are bytes that are no UTF-8, because some terminals read them as C1. */
static void print_clean_text(FILE *out, bool terminal, const char *text) {
    size_t left = strlen(text), size;
    if (!terminal) {
        char *decoded = mem_must_strdup(text);
        json_text(text, decoded, &size);
        fwrite(decoded, 1, size, out);
        mem_free(decoded);
        return;
    }
    for (; left > 0; text += size, left -= size) {
        if (utf8_step(text, left, &size) != UTF8_CHAR || is_terminal_control(text))
            fputs("\xef\xbf\xbd", out);
        else
            fwrite(text, 1, size, out);
    }
}

__attribute__((format(printf, 2, 3))) static void say_notice(const struct chat *chat,
                                                             const char *format, ...) {
    char text[SAY_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (chat->err_terminal) fputs("\033[2m", stderr);
    print_clean_text(stderr, chat->err_terminal, text);
    fputs(chat->err_terminal ? "\033[0m\n" : "\n", stderr);
}

static void clear_report(struct chat *chat) {
    if (chat->reporting) fputs("\r\033[K", stderr);
    chat->reporting = false;
}

static void show_answer_text(void *arg, const char *text, bool reasoning) {
    struct chat *chat = arg;
    clear_report(chat);
    if (reasoning && !chat->out_terminal) return;
    if (reasoning != chat->thinking) fputs(reasoning ? "\033[2m" : "\033[0m\n", stdout);
    chat->thinking = reasoning;
    print_clean_text(stdout, chat->out_terminal, text);
    chat->end = text[strlen(text) - 1];
    fflush(stdout);
}

static void show_progress(void *arg, int64_t read, int64_t total) {
    struct chat *chat = arg;
    if (!chat->err_terminal || total <= 0) return;
    fprintf(stderr, "\r\033[K\033[2mreading the prompt: %" PRId64 " of %" PRId64 " tokens\033[0m",
            read, total);
    chat->reporting = true;
}

static void report_wait(void *arg) {
    struct chat *chat = arg;
    if (!chat->err_terminal) return;
    fputs("\033[2mwaiting for the daemon; it may be loading its model or be busy (Ctrl-C gives "
          "up)\033[0m",
          stderr);
    chat->reporting = true;
}

static void end_shown_text(struct chat *chat) {
    clear_report(chat);
    if (chat->thinking) fputs("\033[0m", stdout);
    if (chat->end && chat->end != '\n') fputc('\n', stdout);
    fflush(stdout);
    chat->thinking = false;
    chat->end = 0;
}

/* Writes "policy global, budget 256". */
static void budget_text(const char *policy, int64_t budget, char *out, size_t size) {
    if (budget > 0)
        snprintf(out, size, "policy %.60s, budget %" PRId64, policy, budget);
    else
        snprintf(out, size, "policy %.60s, no budget", policy);
}

static void show_details(struct chat *chat, const struct dialogue_answer *answer) {
    char budget[128];
    char size[32] = "", rate[48] = "", reused[48] = "", shifts[48] = "";
    int64_t all = answer->kept + answer->evicted;
    if (answer->bytes > 0) snprintf(size, sizeof size, " (%.1f MB)", (double)answer->bytes * 1e-6);
    if (answer->cached > 0)
        snprintf(reused, sizeof reused, ", %" PRId64 " of them found", answer->cached);
    if (answer->shifts > 0) snprintf(shifts, sizeof shifts, ", %" PRId64 " shifts", answer->shifts);
    if (answer->per_second > 0) snprintf(rate, sizeof rate, "; %.0f tokens/s", answer->per_second);
    budget_text(answer->policy, answer->budget, budget, sizeof budget);
    say_notice(chat,
               "[%" PRId64 " tokens seen%s; %s; kept %" PRId64 " entries of %" PRId64
               "%s, evicted %" PRId64 "%s%s%s]",
               answer->seen, reused, budget, answer->kept, all, size, answer->evicted, shifts, rate,
               answer->cut ? "; cut at the limit of tokens" : "");
    if (answer->warning[0] && strcmp(answer->warning, chat->warning) != 0)
        say_notice(chat, "keepd chat: %s", answer->warning);
    snprintf(chat->warning, sizeof chat->warning, "%s", answer->warning);
}

/* ---- Failures ---- */

static void say_failure(struct chat *chat, struct http_answer *answer) {
    const char *url = chat->options.url;
    char text[320];
    chat->failed = true;
    if (answer->end == HTTP_FAILED && answer->refused) {
        say_notice(chat, "keepd chat: no daemon at %s (%s). Start one with: keepd --model MODEL",
                   url, answer->why);
    } else if (answer->end == HTTP_FAILED) {
        say_notice(chat, "keepd chat: %s: %s", url, answer->why);
    } else {
        dialogue_error_text(&answer->body, text, sizeof text);
        if (answer->status == 401)
            say_notice(chat,
                       chat->options.key
                           ? "keepd chat: the daemon does not know this API key (%s)"
                           : "keepd chat: the daemon wants an API key: set KEEPD_API_KEY or "
                             "give --api-key-file (%s)",
                       text);
        else if (answer->status == 503 || answer->status == 429)
            say_notice(chat, "keepd chat: the daemon is full: %s Try again in %ld s.", text,
                       answer->retry_seconds > 0 ? answer->retry_seconds : 1);
        else
            say_notice(chat, "keepd chat: status %ld: %s", answer->status, text);
    }
}

/* ---- A turn ---- */

static struct dialogue *current_branch(struct chat *chat) {
    return &chat->branches[chat->at];
}

static bool receive_events(void *arg, const char *data, size_t size) {
    return dialogue_answer_take(arg, data, size);
}

struct turn {
    struct dialogue_answer answer;
    struct chat *chat;
};

static void on_slow(void *arg) {
    report_wait(((struct turn *)arg)->chat);
}

/* The part of an interrupted answer that was read remains in the dialogue, as the user has seen
 * it. */
static void end_turn(struct turn *turn, struct http_answer *got) {
    struct chat *chat = turn->chat;
    struct dialogue_answer *answer = &turn->answer;
    bool answered = got->end == HTTP_ANSWERED && got->status == 200 && !answer->error[0];
    end_shown_text(chat);
    if (got->end == HTTP_INTERRUPTED) {
        say_notice(chat, "[stopped]");
    } else if (!answered && answer->error[0]) {
        chat->failed = true;
        say_notice(chat, "keepd chat: %s", answer->error);
    } else if (!answered) {
        say_failure(chat, got);
    } else if (!answer->ended) {
        chat->failed = true;
        say_notice(chat, "keepd chat: the answer was cut off");
    } else if (answer->has_details) {
        show_details(chat, answer);
    }
    if (answer->text.size > 0)
        dialogue_say(current_branch(chat), true, answer->text.data);
    else
        dialogue_take_back(current_branch(chat), 1);
}

static void ask_question(struct chat *chat, const char *text) {
    struct turn turn = {.chat = chat};
    struct http_answer got;
    struct buf body;
    if (!dialogue_say(current_branch(chat), false, text)) {
        say_notice(chat, "keepd chat: this dialogue is full; /new begins another one");
        chat->failed = true;
        return;
    }
    dialogue_answer_open(&turn.answer);
    turn.answer.show = show_answer_text;
    turn.answer.progress = show_progress;
    turn.answer.arg = chat;
    dialogue_write(current_branch(chat), &chat->settings, chat->model, &body);
    if (body.failed) {
        say_notice(chat,
                   "keepd chat: this dialogue is too long to be sent; /undo takes messages back");
        chat->failed = true;
        dialogue_take_back(current_branch(chat), 1);
        buf_close(&body);
        dialogue_answer_close(&turn.answer);
        return;
    }
    http_ask(chat->http, "/v1/chat/completions", current_branch(chat)->session, &body,
             receive_events, on_slow, &turn, &got);
    end_turn(&turn, &got);
    buf_close(&body);
    buf_close(&got.body);
    dialogue_answer_close(&turn.answer);
}

/* ---- Commands ---- */

static bool read_command_number(const char *text, int64_t *value) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end || errno || number < 0) return false;
    *value = number;
    return true;
}

static void set_whole(struct chat *chat, const char *name, const char *text, int64_t *value) {
    if (strcmp(text, "default") == 0)
        *value = -1;
    else if (*text && !read_command_number(text, value))
        say_notice(chat, "%s takes a whole number or `default`, not '%.40s'", name, text);
    if (*value < 0)
        say_notice(chat, "%s: the server's default", name);
    else
        say_notice(chat, "%s: %" PRId64, name, *value);
}

static void on_budget(struct chat *chat, const char *text) {
    set_whole(chat, "budget", text, &chat->settings.budget);
    if (chat->settings.budget < 0 && chat->budget > 0)
        say_notice(chat, "(%" PRId64 " entries per head)", chat->budget);
}

static void on_tokens(struct chat *chat, const char *text) {
    set_whole(chat, "tokens", text, &chat->settings.max_tokens);
}

static void on_seed(struct chat *chat, const char *text) {
    set_whole(chat, "seed", text, &chat->settings.seed);
}

static void on_temperature(struct chat *chat, const char *text) {
    char *end;
    double value = strtod(text, &end);
    if (strcmp(text, "default") == 0)
        chat->settings.temperature = -1;
    else if (*text && (end == text || *end || !(value >= 0 && value <= 2)))
        say_notice(chat, "temperature takes a number from 0 to 2 or `default`, not '%.40s'", text);
    else if (*text)
        chat->settings.temperature = value;
    if (chat->settings.temperature < 0)
        say_notice(chat, "temperature: the server's default");
    else
        say_notice(chat, "temperature: %g", chat->settings.temperature);
}

static void on_policy(struct chat *chat, const char *text) {
    char word[80];
    snprintf(word, sizeof word, " %.60s ", text);
    if (strcmp(text, "default") == 0)
        chat->settings.policy[0] = '\0';
    else if (*text && chat->policies[0] && !strstr(chat->policies, word))
        say_notice(chat, "unknown policy '%.40s'; there are%s", text, chat->policies);
    else if (*text)
        snprintf(chat->settings.policy, sizeof chat->settings.policy, "%s", text);
    say_notice(chat, "policy: %s%s",
               chat->settings.policy[0] ? chat->settings.policy : chat->policy,
               chat->settings.policy[0] ? "" : " (the server's default)");
}

static void on_system(struct chat *chat, const char *text) {
    mem_free(chat->settings.system);
    chat->settings.system = *text ? mem_must_strdup(text) : NULL;
    say_notice(chat, *text ? "system message set" : "no system message");
}

/* Returns the path that a user wrote, perhaps in quotes or behind ~, as terminals paste it. */
static char *read_path(const char *text) {
    const size_t size = strlen(text);
    const char *home = text[0] == '~' && text[1] == '/' ? getenv("HOME") : NULL;
    const bool quoted = size > 1 && strchr("'\"", text[0]) && text[size - 1] == text[0];
    const size_t room = size + (home ? strlen(home) : 0) + 1;
    char *path = mem_must_alloc(room, 1);
    if (quoted)
        memcpy(path, text + 1, size - 2);
    else
        snprintf(path, room, "%s%s", home ? home : "", home ? text + 1 : text);
    return path;
}

static void show_picture(struct chat *chat, const char *path) {
    struct dialogue *dialogue = current_branch(chat);
    struct fault fault = {0};
    char *file;
    size_t size;
    if (file_read(path, DIALOGUE_PICTURE_MAX, &file, &size, &fault))
        say_notice(chat, "/image: %s: %s", path, fault.text);
    else if (!size)
        say_notice(chat, "/image: %s: is empty", path);
    else if (!dialogue_show(dialogue, file, size))
        say_notice(chat, "/image: %s: the next message has no room for it", path);
    else
        say_notice(chat, "pictures of the next message: %d", dialogue->shown_count);
    mem_free(file);
}

static void on_image(struct chat *chat, const char *text) {
    if (chat->blind) {
        say_notice(chat, "/image: %s sees no pictures", chat->model);
    } else if (*text) {
        char *path = read_path(text);
        show_picture(chat, path);
        mem_free(path);
    } else {
        dialogue_hide(current_branch(chat));
        say_notice(chat, "the next message has no pictures");
    }
}

static void on_new(struct chat *chat, const char *text) {
    (void)text;
    dialogue_close(current_branch(chat));
    dialogue_open(current_branch(chat));
    say_notice(chat, "a new dialogue");
}

static void on_undo(struct chat *chat, const char *text) {
    struct dialogue *dialogue = current_branch(chat);
    (void)text;
    bool answered = dialogue->count > 0 && dialogue->messages[dialogue->count - 1].assistant;
    dialogue_take_back(dialogue, answered ? 2 : 1);
    say_notice(chat, "%d messages", dialogue->count);
}

static void on_fork(struct chat *chat, const char *text) {
    int to = 0;
    (void)text;
    while (to < BRANCHES_MAX && chat->branches[to].session[0]) to++;
    if (to == BRANCHES_MAX) {
        say_notice(chat, "there are %d branches already", BRANCHES_MAX);
        return;
    }
    dialogue_fork(current_branch(chat), &chat->branches[to]);
    say_notice(chat, "branch %d, with the %d messages of branch %d", to + 1,
               current_branch(chat)->count, chat->at + 1);
    chat->at = to;
}

static void on_go(struct chat *chat, const char *text) {
    int64_t branch;
    if (read_command_number(text, &branch) && branch >= 1 && branch <= BRANCHES_MAX &&
        chat->branches[branch - 1].session[0])
        chat->at = (int)branch - 1;
    for (int i = 0; i < BRANCHES_MAX; i++)
        if (chat->branches[i].session[0])
            say_notice(chat, "%c branch %d: %d messages", i == chat->at ? '*' : ' ', i + 1,
                       chat->branches[i].count);
}

static void on_help(struct chat *chat, const char *text);

static const struct command {
    const char *name, *help;
    void (*run)(struct chat *chat, const char *text);
} commands[] = {
    {"/help", "shows this list", on_help},
    {"/policy", "[NAME|default]  which entries are kept", on_policy},
    {"/budget", "[N|default]  entries kept per head", on_budget},
    {"/tokens", "[N|default]  the longest answer", on_tokens},
    {"/temperature", "[X|default]", on_temperature},
    {"/seed", "[N|default]", on_seed},
    {"/system", "[TEXT]  sets the system message, or removes it", on_system},
    {"/image", "[FILE]  adds a picture to the next message, or removes those", on_image},
    {"/new", "begins a new dialogue", on_new},
    {"/undo", "takes back the last question and its answer", on_undo},
    {"/fork", "goes on in a copy of the dialogue", on_fork},
    {"/go", "[N]  lists the branches, or goes to one", on_go},
    {"/quit", "ends, as Ctrl-D does; Ctrl-C stops an answer", NULL},
};
#define COMMANDS (sizeof commands / sizeof *commands)

static void on_help(struct chat *chat, const char *text) {
    (void)text;
    for (size_t i = 0; i < COMMANDS; i++)
        say_notice(chat, "%-13s %s", commands[i].name, commands[i].help);
}

/* Returns false after the command that ends the chat. Blanks around its argument are cut off. */
static bool run_command(struct chat *chat, const char *line) {
    size_t size = strcspn(line, " \t");
    char *rest = mem_must_strdup(line + size + strspn(line + size, " \t"));
    bool more = true;
    for (size_t end = strlen(rest); end > 0 && strchr(" \t", rest[end - 1]);) rest[--end] = '\0';
    for (size_t i = 0; i < COMMANDS; i++) {
        if (strlen(commands[i].name) != size || memcmp(commands[i].name, line, size) != 0) continue;
        more = commands[i].run != NULL;
        if (more) commands[i].run(chat, rest);
        mem_free(rest);
        return more;
    }
    say_notice(chat, "unknown command '%.*s'; /help lists them", (int)(size < 40 ? size : 40),
               line);
    mem_free(rest);
    return true;
}

/* ---- Start ---- */

static void take_info(struct chat *chat, const cJSON *info) {
    struct fault fault = {0};
    const char *name = "", *policy = "";
    const cJSON *policies = json_get(info, "kv_policies");
    bool sees = true; /* an older daemon does not say, and refuses the picture itself */
    (void)json_bool(info, "", "sees_pictures", &sees, &fault);
    chat->blind = !sees;
    (void)json_str(info, "", "served_model_name", &name, &fault);
    (void)json_str(info, "", "kv_policy", &policy, &fault);
    (void)json_int(info, "", "kv_budget", 0, INT64_MAX, &chat->budget, &fault);
    chat->model = mem_must_strdup(name);
    snprintf(chat->policy, sizeof chat->policy, "%s", policy);
    const cJSON *one;
    cJSON_ArrayForEach(one, policies) {
        size_t used = strlen(chat->policies);
        if (cJSON_IsString(one))
            snprintf(chat->policies + used, sizeof chat->policies - used, "%s%s ",
                     used > 0 ? "" : " ", one->valuestring);
    }
}

/* Only the first answer shows the policy: a budget does not apply to every one. */
static void print_greeting(const struct chat *chat) {
    const struct dialogue_settings *settings = &chat->settings;
    const char *policy = settings->policy[0] ? settings->policy : chat->policy;
    bool none = strcmp(policy, "full") == 0;
    char budget[128];
    if (!chat->editing) return;
    budget_text(policy,
                none                    ? 0
                : settings->budget >= 0 ? settings->budget
                                        : chat->budget,
                budget, sizeof budget);
    say_notice(chat, "%s at %s, %s. /help lists the commands.", chat->model, chat->options.url,
               budget);
}

static void on_slow_start(void *arg) {
    report_wait(arg);
}

/* Asks the daemon what it serves. */
static bool connect_daemon(struct chat *chat) {
    static const struct json_limits limits = {.bytes = 1 << 20, .depth = 32, .nodes = 100000};
    struct http_answer answer;
    struct fault fault = {0};
    cJSON *info = NULL;
    bool chats = true, ok = false;
    http_ask(chat->http, "/server_info", NULL, NULL, NULL, on_slow_start, chat, &answer);
    clear_report(chat);
    if (answer.end == HTTP_INTERRUPTED) {
        say_notice(chat, "[stopped]");
    } else if (answer.end != HTTP_ANSWERED || (answer.status != 200 && answer.status != 404)) {
        say_failure(chat, &answer);
    } else if (answer.status == 404 || !answer.body.data ||
               json_parse(answer.body.data, answer.body.size, &limits, &info, &fault) != 0 ||
               !json_get(info, "served_model_name")) {
        say_notice(chat, "keepd chat: the server at %s is not keepd", chat->options.url);
    } else {
        (void)json_bool(info, "", "has_chat_template", &chats, &fault);
        take_info(chat, info);
        ok = chats;
        if (!chats)
            say_notice(chat, "keepd chat: this model has no chat template, so it cannot chat");
    }
    json_free(info);
    buf_close(&answer.body);
    return ok;
}

static void run_dialogue(struct chat *chat) {
    struct line *line = line_open(chat->editing);
    const char *text = "";
    for (bool more = true; more;) {
        enum line_end end = line_read(line, &text);
        if (end == LINE_CLEARED) continue;
        if (end == LINE_ENDED) break;
        text += strspn(text, " \t");
        if (*text == '/')
            more = run_command(chat, text);
        else if (*text)
            ask_question(chat, text);
    }
    line_close(line);
    if (chat->editing) fputc('\n', stdout);
}

/* ---- Arguments ---- */

static const char usage[] =
    "Usage: keepd chat [URL] [options]\n"
    "\n"
    "Chats with a daemon. On a terminal lines can be edited, and Ctrl-C stops an answer; from a "
    "pipe\n"
    "each line is a message. Answers go to stdout, all else to stderr.\n"
    "\n"
    "  URL                  http://, https:// or unix:/path [KEEPD_URL in the environment, or\n"
    "                       " DEFAULT_URL "]\n"
    "  --api-key-file FILE  file whose first line is the API key; KEEPD_API_KEY in the "
    "environment\n"
    "                       is the key itself\n"
    "  --cacert FILE        certificates to trust for https\n"
    "  --policy NAME, --budget N, --tokens N, --temperature X, --seed N, --system TEXT\n"
    "                       as the commands of the same names: /help lists them\n"
    "  --help               print this text\n";

/* Reads the first word of the first line that holds a key, as the daemon reads its key file. */
static bool read_key_file_line(const char *path, char *key, size_t size) {
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file && !found && fgets(key, (int)size, file)) {
        size_t blank = strspn(key, " \t");
        memmove(key, key + blank, strlen(key) - blank + 1);
        key[strcspn(key, " \t\r\n")] = '\0';
        found = *key && *key != '#';
    }
    if (file) fclose(file);
    return found;
}

static const struct option long_options[] = {{"api-key-file", required_argument, NULL, 'k'},
                                             {"cacert", required_argument, NULL, 'c'},
                                             {"policy", required_argument, NULL, 'p'},
                                             {"budget", required_argument, NULL, 'b'},
                                             {"tokens", required_argument, NULL, 'n'},
                                             {"temperature", required_argument, NULL, 't'},
                                             {"seed", required_argument, NULL, 's'},
                                             {"system", required_argument, NULL, 'y'},
                                             {"help", no_argument, NULL, 'h'},
                                             {NULL, 0, NULL, 0}};

static bool report_usage_error(const char *text) {
    fprintf(stderr, "keepd chat: %s (keepd chat --help describes the arguments)\n", text);
    return false;
}

/* Returns false if an option was refused, and after --help. */
static bool chat_read_option(struct chat *chat, int option, char *key, size_t key_size,
                             int *status) {
    struct dialogue_settings *settings = &chat->settings;
    char *end;
    switch (option) {
    case 'k':
        if (!read_key_file_line(optarg, key, key_size))
            return report_usage_error("--api-key-file holds no key");
        chat->options.key = key;
        return true;
    case 'c':
        chat->options.cacert = optarg;
        return true;
    case 'p':
        snprintf(settings->policy, sizeof settings->policy, "%s", optarg);
        return true;
    case 'b':
        return read_command_number(optarg, &settings->budget) ||
               report_usage_error("--budget takes a whole number");
    case 'n':
        return read_command_number(optarg, &settings->max_tokens) ||
               report_usage_error("--tokens takes a whole number");
    case 's':
        return read_command_number(optarg, &settings->seed) ||
               report_usage_error("--seed takes a whole number");
    case 't':
        settings->temperature = strtod(optarg, &end);
        return (end != optarg && !*end && settings->temperature >= 0) ||
               report_usage_error("--temperature takes a number");
    case 'y':
        mem_free(settings->system);
        settings->system = mem_must_strdup(optarg);
        return true;
    case 'h':
        fputs(usage, stdout);
        *status = EXIT_SUCCESS;
        return false;
    default:
        return report_usage_error("unknown option");
    }
}

/* Returns whether the key can be sent: a line break in it would begin another header. */
static bool is_key(const char *key) {
    for (; key && *key; key++)
        if ((unsigned char)*key <= ' ' || (unsigned char)*key >= 0x7f) return false;
    return true;
}

static bool read_chat_arguments(struct chat *chat, int argc, char **argv, char *key,
                                size_t key_size, char *url, size_t url_size, int *status) {
    const char *given = getenv("KEEPD_API_KEY");
    *status = EXIT_USAGE;
    const char *where = getenv("KEEPD_URL");
    if (given && *given) chat->options.key = given;
    if (!where || !*where) where = DEFAULT_URL;
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, "", long_options, NULL)) != -1;)
        if (!chat_read_option(chat, option, key, key_size, status)) return false;
    if (argc - optind > 1) return report_usage_error("more than one URL");
    if (!is_key(chat->options.key))
        return report_usage_error(
            "the API key has a blank or a byte that cannot stand in a header");
    snprintf(url, url_size, "%s", optind < argc ? argv[optind] : where);
    for (size_t size = strlen(url); size > 0 && url[size - 1] == '/';) url[--size] = '\0';
    if (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0 &&
        strncmp(url, "unix:/", 6) != 0)
        return report_usage_error("the URL begins with http://, https:// or unix:/");
    chat->options.url = url;
    return true;
}

int main(int argc, char **argv) {
    struct chat chat = {.out_terminal = isatty(STDOUT_FILENO),
                        .err_terminal = isatty(STDERR_FILENO),
                        .editing = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)};
    char key[2048], url[1024];
    int status;
    setlocale(LC_CTYPE, "");
    signal(SIGPIPE, SIG_IGN);
    chat.settings =
        (struct dialogue_settings){.budget = -1, .max_tokens = -1, .seed = -1, .temperature = -1};
    if (read_chat_arguments(&chat, argc, argv, key, sizeof key, url, sizeof url, &status)) {
        chat.http = http_open(&chat.options);
        dialogue_open(current_branch(&chat));
        status = chat.http && connect_daemon(&chat) ? EXIT_SUCCESS : EXIT_FAILURE;
        if (status == EXIT_SUCCESS) {
            print_greeting(&chat);
            run_dialogue(&chat);
            if (chat.failed) status = EXIT_FAILURE;
        }
        if (chat.http) http_close(chat.http);
    }
    for (int i = 0; i < BRANCHES_MAX; i++) dialogue_close(&chat.branches[i]);
    mem_free(chat.settings.system);
    mem_free(chat.model);
    return status;
}
