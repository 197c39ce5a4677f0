#include "client/dialogue.h"

#include <inttypes.h>
#include <nettle/base64.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/json.h"
#include "base/mem.h"

#define BODY_BYTES_MAX ((size_t)64 << 20)
#define LINE_BYTES_MAX ((size_t)16 << 20)

/* Limit of a server's numbers, so that sums do not overflow */
#define NUMBER_MAX ((int64_t)1 << 53)

static const struct json_limits limits = {
    .bytes = LINE_BYTES_MAX, .depth = 64, .nodes = 1000000, .nuls = true};

/* ---- Messages ---- */

void dialogue_open(struct dialogue *dialogue) {
    unsigned char random[16];
    *dialogue = (struct dialogue){0};
    CHECK(getrandom(random, sizeof random, 0) == (ssize_t)sizeof random);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(dialogue->session + 2 * i, 3, "%02x", random[i]);
    buf_open(&dialogue->shown, BODY_BYTES_MAX);
}

void dialogue_close(struct dialogue *dialogue) {
    dialogue_take_back(dialogue, dialogue->count);
    mem_free(dialogue->messages);
    buf_close(&dialogue->shown);
    *dialogue = (struct dialogue){0};
}

static void write_picture_base64(struct buf *out, const char *file, size_t size) {
    enum { BYTES = 3 << 10 }; /* whole groups of three bytes */
    char text[BASE64_ENCODE_RAW_LENGTH(BYTES)];
    for (size_t at = 0; at < size; at += BYTES) {
        const size_t some = size - at < BYTES ? size - at : BYTES;
        base64_encode_raw(text, some, (const uint8_t *)file + at);
        buf_add(out, text, BASE64_ENCODE_RAW_LENGTH(some));
    }
}

bool dialogue_show(struct dialogue *dialogue, const char *file, size_t size) {
    static const char begin[] = "{\"type\":\"image_url\",\"image_url\":{\"url\":"
                                "\"data:application/octet-stream;base64,";
    struct buf *shown = &dialogue->shown;
    if (shown->size + size / 3 * 4 + 256 > shown->limit) return false;
    buf_str(shown, begin);
    write_picture_base64(shown, file, size);
    buf_str(shown, "\"}},");
    CHECK(!shown->failed);
    dialogue->shown_count++;
    return true;
}

void dialogue_hide(struct dialogue *dialogue) {
    buf_clear(&dialogue->shown);
    dialogue->shown_count = 0;
}

static bool append_dialogue_message(struct dialogue *dialogue, bool assistant, const char *pictures,
                                    const char *text) {
    if (dialogue->count == DIALOGUE_MESSAGES_MAX) return false;
    if (!dialogue->messages)
        dialogue->messages = mem_must_alloc(DIALOGUE_MESSAGES_MAX, sizeof *dialogue->messages);
    dialogue->messages[dialogue->count++] = (struct dialogue_message){
        assistant, pictures ? mem_must_strdup(pictures) : NULL, mem_must_strdup(text)};
    return true;
}

bool dialogue_say(struct dialogue *dialogue, bool assistant, const char *text) {
    const bool shows = !assistant && dialogue->shown_count > 0;
    if (!append_dialogue_message(dialogue, assistant, shows ? dialogue->shown.data : NULL, text))
        return false;
    if (shows) dialogue_hide(dialogue);
    return true;
}

void dialogue_take_back(struct dialogue *dialogue, int count) {
    for (; count > 0 && dialogue->count > 0; count--) {
        struct dialogue_message *message = &dialogue->messages[--dialogue->count];
        mem_free(message->pictures);
        mem_free(message->text);
    }
}

void dialogue_fork(const struct dialogue *from, struct dialogue *to) {
    dialogue_open(to);
    for (int i = 0; i < from->count; i++)
        append_dialogue_message(to, from->messages[i].assistant, from->messages[i].pictures,
                                from->messages[i].text);
}

/* ---- The request ---- */

static void write_dialogue_message(struct buf *body, const char *role, const char *pictures,
                                   const char *text, bool first) {
    buf_fmt(body, "%s{\"role\":\"%s\",\"content\":", first ? "" : ",", role);
    if (pictures) {
        buf_char(body, '[');
        buf_str(body, pictures);
        buf_str(body, "{\"type\":\"text\",\"text\":");
    }
    char *decoded = mem_must_strdup(text);
    size_t size;
    json_text(text, decoded, &size);
    json_write_str(body, decoded, size);
    mem_free(decoded);
    buf_str(body, pictures ? "}]}" : "}");
}

static void write_kv_settings(struct buf *body, const struct dialogue_settings *settings) {
    if (!settings->policy[0] && settings->budget < 0) return;
    buf_str(body, ",\"kv\":{");
    if (settings->policy[0]) {
        buf_str(body, "\"policy\":");
        json_write_str(body, settings->policy, strlen(settings->policy));
    }
    if (settings->budget >= 0)
        buf_fmt(body, "%s\"budget\":%" PRId64, settings->policy[0] ? "," : "", settings->budget);
    buf_char(body, '}');
}

void dialogue_write(const struct dialogue *dialogue, const struct dialogue_settings *settings,
                    const char *model, struct buf *body) {
    buf_open(body, BODY_BYTES_MAX);
    buf_str(body, "{\"model\":");
    json_write_str(body, model, strlen(model));
    buf_str(body, ",\"stream\":true,\"timings\":true,\"stream_options\":{\"include_usage\":true,"
                  "\"include_progress\":true},\"messages\":[");
    if (settings->system) write_dialogue_message(body, "system", NULL, settings->system, true);
    for (int i = 0; i < dialogue->count; i++) {
        const struct dialogue_message *message = &dialogue->messages[i];
        write_dialogue_message(body, message->assistant ? "assistant" : "user", message->pictures,
                               message->text, i == 0 && !settings->system);
    }
    buf_char(body, ']');
    if (settings->max_tokens >= 0) buf_fmt(body, ",\"max_tokens\":%" PRId64, settings->max_tokens);
    if (settings->seed >= 0) buf_fmt(body, ",\"seed\":%" PRId64, settings->seed);
    if (settings->temperature >= 0) {
        buf_str(body, ",\"temperature\":");
        json_write_num(body, settings->temperature);
    }
    write_kv_settings(body, settings);
    buf_char(body, '}');
}

/* ---- The answer ---- */

void dialogue_answer_open(struct dialogue_answer *answer) {
    *answer = (struct dialogue_answer){0};
    buf_open(&answer->line, LINE_BYTES_MAX);
    buf_open(&answer->text, LINE_BYTES_MAX);
}

void dialogue_answer_close(struct dialogue_answer *answer) {
    buf_close(&answer->line);
    buf_close(&answer->text);
}

static const char *member_text(const cJSON *object, const char *key) {
    const char *text = NULL;
    struct fault fault = {0};
    return object && json_str(object, "", key, &text, &fault) == 0 ? text : NULL;
}

static int64_t number_of(const cJSON *object, const char *key) {
    int64_t value = 0;
    struct fault fault = {0};
    if (object) (void)json_int(object, "", key, 0, NUMBER_MAX, &value, &fault);
    return value;
}

static void read_answer_choice(struct dialogue_answer *answer, const cJSON *choice) {
    const cJSON *delta = json_get(choice, "delta");
    const char *content = member_text(delta, "content"),
               *thought = member_text(delta, "reasoning_content");
    const char *finish = member_text(choice, "finish_reason");
    if (thought && *thought && answer->show) answer->show(answer->arg, thought, true);
    if (content && *content) {
        buf_str(&answer->text, content);
        if (answer->show) answer->show(answer->arg, content, false);
    }
    if (!finish) return;
    answer->ended = true;
    answer->cut = strcmp(finish, "length") == 0;
}

static void copy_member_text(char *out, size_t size, const char *text) {
    snprintf(out, size, "%s", text ? text : "");
}

static void take_usage(struct dialogue_answer *answer, const cJSON *usage) {
    const cJSON *details = json_get(usage, "kv_details");
    if (!details) return;
    answer->has_details = true;
    answer->answer_tokens = number_of(usage, "completion_tokens");
    answer->cached = number_of(json_get(usage, "prompt_tokens_details"), "cached_tokens");
    answer->seen = number_of(details, "seen_tokens");
    answer->kept = number_of(details, "kept_entries");
    answer->evicted = number_of(details, "evicted_entries");
    answer->shifts = number_of(details, "shifts");
    answer->bytes = number_of(details, "bytes");
    answer->budget = number_of(details, "budget");
    copy_member_text(answer->policy, sizeof answer->policy, member_text(details, "policy"));
    copy_member_text(answer->warning, sizeof answer->warning, member_text(details, "warning"));
}

static void take_event(struct dialogue_answer *answer, const cJSON *event) {
    const cJSON *error = json_get(event, "error"), *progress = json_get(event, "prompt_progress");
    const cJSON *choices = json_get(event, "choices"), *usage = json_get(event, "usage");
    struct fault fault = {0};
    const char *message = member_text(error, "message");
    if (error)
        snprintf(answer->error, sizeof answer->error, "%s",
                 message ? message : "the answer failed");
    if (progress && answer->progress)
        answer->progress(answer->arg, number_of(progress, "processed"),
                         number_of(progress, "total"));
    if (choices && cJSON_IsArray(choices) && choices->child)
        read_answer_choice(answer, choices->child);
    if (usage) take_usage(answer, usage);
    const cJSON *timings = json_get(event, "timings");
    if (timings)
        (void)json_num(timings, "", "predicted_per_second", 0, 1e12, &answer->per_second, &fault);
}

/* Reads one line of the stream. Lines other than data, such as comments, are skipped. */
static bool take_line(struct dialogue_answer *answer, const char *line, size_t size) {
    static const char data[] = "data: ";
    struct fault fault = {0};
    cJSON *event = NULL;
    if (size < sizeof data - 1 || memcmp(line, data, sizeof data - 1) != 0) return true;
    line += sizeof data - 1;
    size -= sizeof data - 1;
    if (size == 6 && memcmp(line, "[DONE]", 6) == 0) return true;
    if (json_parse(line, size, &limits, &event, &fault) != 0) return false;
    if (cJSON_IsObject(event)) take_event(answer, event);
    json_free(event);
    return true;
}

bool dialogue_answer_take(struct dialogue_answer *answer, const char *data, size_t size) {
    struct buf *line = &answer->line;
    while (size > 0) {
        const char *end = memchr(data, '\n', size);
        size_t part = end ? (size_t)(end - data) : size;
        buf_add(line, data, part);
        if (line->failed) return false;
        if (!end) return true;
        if (line->size > 0 && line->data[line->size - 1] == '\r') line->size--;
        if (line->size > 0 && !take_line(answer, line->data, line->size)) return false;
        buf_clear(line);
        data += part + 1;
        size -= part + 1;
    }
    return true;
}

void dialogue_error_text(const struct buf *body, char *out, size_t size) {
    struct fault fault = {0};
    cJSON *tree = NULL;
    const char *message = NULL;
    if (body->data && json_parse(body->data, body->size, &limits, &tree, &fault) == 0)
        message = member_text(json_get(tree, "error"), "message");
    snprintf(out, size, "%.300s", message ? message : body->data ? body->data : "");
    json_free(tree);
}
