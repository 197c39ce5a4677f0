/* text_ends: how a model's tokenizer and its chat template say that an answer is complete.
 *
 * Files disagree: a base model that was tuned for chats often keeps its own end in config.json,
 * while its answers end as the template ends them. */
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "text/text.h"

#define ENDS_BYTES_MAX ((size_t)64 << 20)
#define ENDS_IDS_MAX   ((size_t)1 << 16)

static void ends_add_end(int32_t id, int32_t *ends, size_t *count) {
    for (size_t i = 0; i < *count; i++)
        if (ends[i] == id) return;
    ends[(*count)++] = id;
}

/* A name that is one token, as eos_token is. */
static void add_named_end(const struct text *text, const char *name, struct arena *arena,
                          int32_t *ends, size_t *count) {
    struct tok_ids ids = {0};
    if (name[0] &&
        tok_encode(text->tok, name, strlen(name), TOK_SPECIALS, NULL, 0, ENDS_IDS_MAX, arena, &ids,
                   NULL) == 0 &&
        ids.count == 1)
        ends_add_end(ids.ids[0], ends, count);
}

/* A chat whose last message is an assistant's; `cut`: rendered up to the end of its content. */
static cJSON *sample_chat(bool cut) {
    static const char source[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"ping\"}, "
        "{\"role\": \"assistant\", \"content\": \"pong\"}], \"add_generation_prompt\": false}";
    cJSON *chat = NULL;
    (void)json_parse(source, strlen(source), &(struct json_limits){.bytes = 512, .depth = 8}, &chat,
                     NULL);
    if (!chat || !cut || cJSON_AddBoolToObject(chat, "continue_final_message", true)) return chat;
    json_free(chat);
    return NULL;
}

static bool render_sample(const struct text *text, bool cut, struct arena *arena,
                          struct tok_ids *ids) {
    struct fault ignored;
    cJSON *chat = sample_chat(cut);
    const bool rendered =
        chat && text_render_chat(text, chat, NULL, ENDS_IDS_MAX, arena, ids, &ignored) == 0;
    json_free(chat);
    return rendered;
}

static bool ends_is_blank(const struct text *text, int32_t id) {
    const char *bytes = NULL;
    size_t size = tok_bytes(text->tok, id, &bytes);
    while (size > 0 && utf8_is_blank(bytes[size - 1])) size--;
    return size == 0;
}

/* The token behind the assistant's content, if white space alone is between them, and it is none of
 * the ordinary tokens: those would be found in texts. */
static void add_turn_end(const struct text *text, struct arena *arena, int32_t *ends,
                         size_t *count) {
    struct tok_ids whole = {0}, cut = {0};
    if (!text->chat || !render_sample(text, false, arena, &whole) ||
        !render_sample(text, true, arena, &cut) || cut.count >= whole.count ||
        (cut.count > 0 && memcmp(cut.ids, whole.ids, cut.count * sizeof *cut.ids) != 0))
        return;
    size_t at = cut.count;
    while (at < whole.count && ends_is_blank(text, whole.ids[at])) at++;
    if (at < whole.count && tok_is_added(text->tok, whole.ids[at]))
        ends_add_end(whole.ids[at], ends, count);
}

size_t text_ends(const struct text *text, int32_t ends[TEXT_ENDS_MAX]) {
    struct arena arena;
    size_t count = 0;
    arena_open(&arena, ENDS_BYTES_MAX);
    add_named_end(text, text->eos, &arena, ends, &count);
    add_turn_end(text, &arena, ends, &count);
    arena_close(&arena);
    return count;
}
