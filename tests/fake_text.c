/* The fake engine's tokens and its chat template; fake_engine.c says what they are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/json.h"
#include "engine/engine_text.h"
#include "tests/fake_engine.h"

enum { IDS_MAX = 1 << 20 };

const char *const fake_special_names[] = {
    "<|im_start|>",   "<|im_end|>",     "<|endoftext|>",  "<think>",   "</think>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|start|>", "<|channel|>",
    "<|message|>",    "<|end|>",        "<|constrain|>",  "<|call|>",  "<|return|>"};

const char *fake_tool_template(void) {
    static const char *const forms[][2] = {
        {"hermes", "<tool_call>\\n{\"name\": "},
        {"llama3", "{\"name\": function name, \"parameters\": "},
        {"mistral", "[TOOL_CALLS]["},
        {"qwen3_coder", "<tool_call>\\n<function=f>\\n<parameter="},
        {"seed_oss", "<seed:tool_call>\n<function=f>\n<parameter="},
        {"glm45", "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>"},
        {"glm47", "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"},
        {"minimax_m2", "<minimax:tool_call>\n<invoke name=\"f\">"},
        {"deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"},
        {"kimi_k2", "<|tool_calls_section_begin|><|tool_call_argument_begin|>"},
        {"granite", "<|tool_call|><|start_of_role|>"},
        {"lfm2", "<|tool_list_start|>"},
        {"gemma4", "<|tool_call>call:f{}<tool_call|>"},
        {"deepseek_v32", "<｜DSML｜function_calls><｜DSML｜parameter"},
        {"harmony", "<|channel|>commentary to=functions."}};
    static char text[256];
    const char *form = getenv("KEEPD_FAKE_TOOLS");
    if (!form) return "fake";
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (strcmp(form, forms[i][0]) == 0)
            snprintf(text, sizeof text, "{{ tools }}%s", forms[i][1]);
    return text;
}

static int add_ids(struct arena *arena, struct engine_ids *out, size_t most, struct fault *fault) {
    out->count = 0;
    if (most > IDS_MAX) return fault_set(fault, ERR_LIMIT, NULL, "more than %d tokens", IDS_MAX);
    out->ids = arena_alloc(arena, most + 1, sizeof *out->ids);
    return out->ids ? 0 : fault_set(fault, ERR_NOMEM, NULL, "the prompt needs too much memory");
}

static void add_bytes(struct engine_ids *out, const char *text, size_t size) {
    for (size_t i = 0; i < size; i++) out->ids[out->count++] = (unsigned char)text[i];
}

int engine_tokenize(const struct engine *e, const char *text, size_t size, bool add_special,
                    bool parse_special, struct arena *arena, struct engine_ids *out,
                    struct fault *fault) {
    (void)add_special;
    int rc = add_ids(arena, out, size, fault);
    for (size_t i = 0; !rc && i < size;) {
        int special = -1;
        for (int k = 0; k < engine_info(e)->vocab - IM_START; k++)
            if ((parse_special || (IM_START + k >= THINK && IM_START + k < VOCAB_THINK)) &&
                strncmp(text + i, fake_special_names[k], strlen(fake_special_names[k])) == 0)
                special = k;
        if (special >= 0) {
            out->ids[out->count++] = IM_START + special;
            i += strlen(fake_special_names[special]);
        } else {
            add_bytes(out, text + i++, 1);
        }
    }
    return rc;
}

int engine_tokenize_pair(const struct engine *e, const char *first, const char *second, size_t most,
                         struct arena *arena, struct engine_ids *out, struct fault *fault) {
    (void)e, (void)most;
    int rc = add_ids(arena, out, strlen(first) + strlen(second), fault);
    if (rc == 0) add_bytes(out, first, strlen(first));
    out->second = out->count;
    if (rc == 0) add_bytes(out, second, strlen(second));
    return rc;
}

static void write_calls(struct buf *out, const cJSON *message) {
    const cJSON *call;
    bool first = json_get(message, "content")->valuestring[0] == '\0';
    cJSON_ArrayForEach(call, json_get(message, "tool_calls")) {
        const cJSON *function = json_get(call, "function");
        buf_fmt(out, "%s<tool_call>\n{\"name\": \"%s\", \"arguments\": ", first ? "" : "\n",
                json_get(function, "name")->valuestring);
        if (json_get(function, "arguments")) json_write_node(out, json_get(function, "arguments"));
        buf_str(out, "}\n</tool_call>");
        first = false;
    }
}

enum { PICTURE_TEXT = 64 };

/* Writes a content. A picture is text, "[WIDTHxHEIGHT, ROWSxCOLUMNS, DIGEST]" with the digest's
 * first four bytes. Returns how many pictures it has. */
static int add_content(struct engine_ids *out, const cJSON *message, const char *content,
                       size_t size, const struct picture *const *pictures) {
    const cJSON *end;
    size_t at = 0;
    int count = 0;
    cJSON_ArrayForEach(end, json_get(message, ENGINE_CHAT_PICTURE_ENDS)) {
        const struct picture *picture = pictures[count++];
        const size_t place = size - (size_t)end->valuedouble;
        const uint8_t *digest = picture->digest;
        char text[PICTURE_TEXT];
        add_bytes(out, content + at, place - at);
        at = place;
        snprintf(text, sizeof text, "[%dx%d, %dx%d, %02x%02x%02x%02x]", picture->width,
                 picture->height, picture->rows, picture->columns, digest[0], digest[1], digest[2],
                 digest[3]);
        add_bytes(out, text, strlen(text));
    }
    add_bytes(out, content + at, size - at);
    return count;
}

static size_t rendered_size(const cJSON *messages) {
    const cJSON *message;
    size_t size = 16;
    cJSON_ArrayForEach(message, messages) {
        size += strlen(json_get(message, "role")->valuestring) + 4;
        size += strlen(json_get(message, "content")->valuestring);
        struct buf calls;
        buf_open(&calls, IDS_MAX);
        write_calls(&calls, message);
        size += calls.size;
        buf_close(&calls);
    }
    return size;
}

static void add_calls(struct engine_ids *out, const cJSON *message) {
    struct buf calls;
    buf_open(&calls, IDS_MAX);
    write_calls(&calls, message);
    add_bytes(out, calls.data, calls.size);
    buf_close(&calls);
}

void fake_wait_at_gate(void) {
    const char *gate = getenv("KEEPD_FAKE_GATE");
    while (gate && access(gate, F_OK)) usleep(1000);
}

static int render_published(const struct fake_template *published, const cJSON *context,
                            struct arena *arena, struct engine_ids *out, struct fault *fault) {
    const char *text;
    int rc = fake_template_render(published, context, arena, &text, fault);
    if (rc == 0) rc = add_ids(arena, out, strlen(text), fault);
    if (rc == 0) add_bytes(out, text, strlen(text));
    return rc;
}

/* Lengths are checked behind the template. */
int engine_render_chat(const struct engine *e, const struct engine_chat *chat, struct arena *arena,
                       struct engine_ids *out, struct fault *fault) {
    const cJSON *context = chat->context, *messages = json_get(context, "messages"), *message;
    const struct picture *const *pictures = chat->pictures;
    if (!engine_info(e)->has_chat_template)
        return fault_set(fault, ERR_UNSUPPORTED, "messages", "this model has no chat template");
    if (fake_template(e)->chat)
        return render_published(fake_template(e), context, arena, out, fault);
    int rc = add_ids(arena, out,
                     rendered_size(messages) + (size_t)chat->picture_count * PICTURE_TEXT, fault);
    if (rc) return rc;
    cJSON_ArrayForEach(message, messages) {
        const char *role = json_get(message, "role")->valuestring;
        const char *content = json_get(message, "content")->valuestring;
        if (strstr(content, "at the gate")) fake_wait_at_gate();
        if (strstr(content, "refuse this template"))
            return fault_set(fault, ERR_INVALID, "chat template line 1", "the template refuses it");
        out->ids[out->count++] = IM_START;
        add_bytes(out, role, strlen(role));
        add_bytes(out, "\n", 1);
        size_t size;
        content = json_arena_text(arena, content, &size);
        if (!content) return fault_set(fault, ERR_NOMEM, NULL, "no memory for a message");
        pictures += add_content(out, message, content, size, pictures);
        add_calls(out, message);
        if (!message->next && cJSON_IsTrue(json_get(context, "continue_final_message"))) return 0;
        out->ids[out->count++] = IM_END;
        add_bytes(out, "\n", 1);
    }
    if (cJSON_IsTrue(json_get(context, "add_generation_prompt"))) {
        if (fake_has_channels(e)) {
            out->ids[out->count++] = START;
            add_bytes(out, "assistant", 9);
            return 0;
        }
        out->ids[out->count++] = IM_START;
        add_bytes(out, "assistant\n", 10);
        if (fake_opens_thought(e)) out->ids[out->count++] = THINK;
        if (fake_opens_thought(e)) out->ids[out->count++] = '\n';
    }
    return 0;
}

int32_t engine_chat_border(const struct engine *e, const cJSON *context,
                           const struct engine_ids *ids) {
    (void)e;
    (void)context;
    (void)ids;
    return 0; /* the fake engine shares nothing */
}

static const unsigned char *byte_table(void) {
    static const unsigned char table[256] = {
#define R1(n)  n
#define R4(n)  R1(n), R1(n + 1), R1(n + 2), R1(n + 3)
#define R16(n) R4(n), R4(n + 4), R4(n + 8), R4(n + 12)
#define R64(n) R16(n), R16(n + 16), R16(n + 32), R16(n + 48)
        R64(0), R64(64), R64(128), R64(192)};
    return table;
}

size_t engine_token_bytes(const struct engine *e, int32_t id, const char **bytes) {
    if (id < 0 || id >= engine_info(e)->vocab) return 0;
    if (id >= IM_START) {
        *bytes = fake_special_names[id - IM_START];
        return strlen(*bytes);
    }
    *bytes = (const char *)byte_table() + id;
    return 1;
}

size_t engine_first_bytes(const struct engine *e, int32_t id, const char **bytes) {
    return engine_token_bytes(e, id, bytes);
}

/* A byte that is no character by itself is spelled as SentencePiece does. */
size_t engine_token_name(const struct engine *e, int32_t id, const char **name) {
    static _Thread_local char byte[8];
    if (id < 0x80 || id > 0xFF) return engine_token_bytes(e, id, name);
    *name = byte;
    return (size_t)snprintf(byte, sizeof byte, "<0x%02X>", (unsigned)id);
}

int engine_added_after(const struct engine *e) {
    (void)e;
    return 0;
}

int engine_added_before(const struct engine *e) {
    (void)e;
    return 0;
}

int engine_render_template(const char *source, const cJSON *context, struct arena *arena,
                           const char **out, struct fault *fault) {
    *out = NULL;
    if (!strstr(source, "{%"))
        return fault_set(fault, ERR_UNSUPPORTED, NULL, "the fake's own template renders no calls");
    struct fake_template published = {0};
    int rc = chat_open(source, strlen(source), &published.chat, fault);
    if (rc == 0) rc = fake_template_render(&published, context, arena, out, fault);
    fake_template_close(&published);
    return rc;
}

/* The fake's special tokens are none of the tags. */
void engine_show_tokens(struct engine *e, const char *text, size_t size) {
    (void)e, (void)text, (void)size;
}

bool engine_can_show(const struct engine *e, const char *text, size_t size) {
    (void)e;
    const char *end = getenv("KEEPD_FAKE_END");
    return !memmem(text, size, "<|im_end|>", 10) && !(end && memmem(text, size, end, strlen(end)));
}

bool engine_token_is_special(const struct engine *e, int32_t id) {
    (void)e;
    return (id >= IM_START && id < VOCAB) || (id >= FIM_PREFIX && id < VOCAB_CHANNELS);
}
