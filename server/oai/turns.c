/* Turns of a chat: what its template takes, and messages that become one turn of the user. */
#include <limits.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

#define PROBE_BYTES_MAX ((size_t)4 << 20)

const char *oai_message_text(const cJSON *message) {
    return json_get(message, "content")->valuestring;
}

bool oai_set_content(cJSON *message, struct buf *text) {
    cJSON *content = text->failed ? NULL : cJSON_CreateString(text->data ? text->data : "");
    const bool set = content && cJSON_ReplaceItemInObjectCaseSensitive(message, "content", content);
    if (content && !set) cJSON_Delete(content);
    buf_close(text);
    return set;
}

/* A turn to which messages are joined: the user's, or a result of a tool. Its text is copied once.
 */
struct turn {
    cJSON *message; /* NULL: no turn is open */
    bool asked;     /* an answer is due: the last turn, without calls and results, is the user's */
    bool result;    /* the text ends with the mark of a tool's result */
    cJSON *places;  /* where pictures stand in the text; NULL: none */
    struct buf text;
};

/* Opens a turn with a message, which becomes one of the user unless it keeps its role. */
static bool turn_open(struct turn *turn, cJSON *message, bool keeps_role) {
    cJSON *role = keeps_role ? NULL : cJSON_CreateString("user");
    if (!keeps_role && (!role || !cJSON_ReplaceItemInObjectCaseSensitive(message, "role", role))) {
        cJSON_Delete(role);
        return false;
    }
    turn->message = message;
    buf_open(&turn->text, OAI_CONTENT_BYTES_MAX);
    return true;
}

/* Counts the places of pictures from the end of the turn. */
static bool turn_put_places(struct turn *turn, cJSON *message) {
    const double size = (double)turn->text.size;
    cJSON *place, *places = turn->places;
    turn->places = NULL;
    cJSON_DeleteItemFromObjectCaseSensitive(message, ENGINE_CHAT_PICTURE_ENDS);
    if (!places) return true;
    cJSON_ArrayForEach(place, places) cJSON_SetNumberValue(place, size - place->valuedouble);
    if (cJSON_AddItemToObject(message, ENGINE_CHAT_PICTURE_ENDS, places)) return true;
    cJSON_Delete(places);
    return false;
}

static bool turn_close(struct turn *turn) {
    cJSON *message = turn->message;
    turn->message = NULL;
    if (!message) return true;
    const bool placed = turn_put_places(turn, message);
    return oai_set_content(message, &turn->text) && placed;
}

/* Notes the pictures of a message whose content ends where the turn's text does now. */
static bool turn_add_places(struct turn *turn, const cJSON *message) {
    const cJSON *end;
    cJSON_ArrayForEach(end, json_get(message, ENGINE_CHAT_PICTURE_ENDS)) {
        cJSON *place = cJSON_CreateNumber((double)turn->text.size - end->valuedouble);
        if (!turn->places) turn->places = cJSON_CreateArray();
        if (!place || !cJSON_AddItemToArray(turn->places, place)) {
            cJSON_Delete(place);
            return false;
        }
    }
    return true;
}

static bool turn_add(struct turn *turn, const cJSON *message, bool result) {
    if (turn->text.size) buf_str(&turn->text, result || turn->result ? "\n" : "\n\n");
    turn->result = result;
    if (result) buf_str(&turn->text, "<tool_response>\n");
    buf_str(&turn->text, oai_message_text(message));
    const bool added = turn_add_places(turn, message);
    if (result) buf_str(&turn->text, "\n</tool_response>");
    return added;
}

static bool is_result(const cJSON *message) {
    return oai_has_role(message, "tool") || oai_has_role(message, "function");
}

/* Calls and results are no turns where templates count these. */
static bool is_counted(const cJSON *message) {
    return !is_result(message) && !json_get(message, "tool_calls");
}

/* Returns whether a message of the system becomes part of the user's turn: where the template shows
 * none, or behind others, unless the template takes it in the place of an answer. */
static bool is_folded(const cJSON *messages, const cJSON *message, const struct oai_turns *turns,
                      bool asked) {
    if (!turns->alternate || !oai_has_role(message, "system")) return false;
    if (message == messages->child) return !turns->has_system;
    if (!turns->system_between || !asked) return true;
    const cJSON *next = message->next;
    while (next && !is_counted(next)) next = next->next;
    return next && !oai_has_role(next, "user");
}

bool oai_join_turns(cJSON *messages, const struct oai_turns *turns, bool results) {
    struct turn turn = {0};
    bool written = true;
    for (cJSON *message = messages->child, *next; message && written; message = next) {
        const bool user = oai_has_role(message, "user"), result = is_result(message);
        const bool kept = result && !results && turns->results_last && turn.asked;
        const bool asks =
            user || (result && results) || is_folded(messages, message, turns, turn.asked);
        const bool opens = kept || (asks && (!user || turns->alternate));
        next = message->next;
        if (!asks) written = turn_close(&turn);
        if (asks || is_counted(message)) turn.asked = asks;
        if (written && opens && !turn.message) written = turn_open(&turn, message, kept);
        if (!written || !turn.message) continue;
        written = turn_add(&turn, message, result && results);
        if (message != turn.message) cJSON_Delete(cJSON_DetachItemViaPointer(messages, message));
        if (!opens) written = turn_close(&turn) && written;
    }
    return turn_close(&turn) && written;
}

/* --- the probes --- */

/* How a probe is rendered: by the engine, or by a template's source alone. */
struct turns_renderer {
    const struct engine *engine; /* NULL: by the source */
    const char *source;
    struct arena arena;
};

/* Renders a chat, written in JSON. Returns its size, in tokens or bytes; 0: it is refused. */
static size_t render_turns(struct turns_renderer *renderer, const char *chat) {
    struct fault fault;
    struct engine_ids ids = {0};
    const char *text = "";
    cJSON *context = cJSON_Parse(chat);
    const struct engine_chat plain = {.context = context, .longest = INT_MAX};
    bool rendered = context != NULL;
    if (rendered && renderer->engine)
        rendered = !engine_render_chat(renderer->engine, &plain, &renderer->arena, &ids, &fault);
    else if (rendered)
        rendered =
            !engine_render_template(renderer->source, context, &renderer->arena, &text, &fault);
    cJSON_Delete(context);
    if (!rendered) return 0;
    return renderer->engine ? ids.count : strlen(text);
}

#define CHAT(messages)                                                                             \
    "{\"messages\":[" messages "],\"add_generation_prompt\":false,\"bos_token\":\"\","             \
    "\"eos_token\":\"\"}"
#define TURN(role, text) "{\"role\":\"" role "\",\"content\":\"" text "\"}"
#define HELLO            TURN("user", "hello")
#define ANSWER           TURN("assistant", "good day")
/* Mistral's templates take no ids of another length. */
#define CALLED                                                                                     \
    "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"abcdefghi\",\"type\":"     \
    "\"function\",\"function\":{\"name\":\"look\",\"arguments\":{}}}]},"                           \
    "{\"role\":\"tool\",\"tool_call_id\":\"abcdefghi\",\"name\":\"look\",\"content\":\"rain\"}"

/* Returns whether the template takes both chats, and shows what differs between them. */
static bool shows_difference(struct turns_renderer *renderer, const char *with,
                             const char *without) {
    const size_t size = render_turns(renderer, with), other = render_turns(renderer, without);
    return size && other && size != other;
}

static struct oai_turns probe_turns(struct turns_renderer *renderer) {
    struct oai_turns turns = {0};
    arena_open(&renderer->arena, PROBE_BYTES_MAX);
    turns.has_system = shows_difference(renderer, CHAT(TURN("system", "word") "," HELLO),
                                        CHAT(TURN("system", "") "," HELLO));
    turns.alternate =
        render_turns(renderer, CHAT(HELLO)) && !render_turns(renderer, CHAT(HELLO "," HELLO));
    if (turns.alternate) {
        turns.system_between =
            shows_difference(renderer, CHAT(HELLO "," TURN("system", "word") "," HELLO),
                             CHAT(HELLO "," TURN("system", "") "," HELLO));
        turns.results_last = render_turns(renderer, CHAT(HELLO "," CALLED "," ANSWER)) &&
                             !render_turns(renderer, CHAT(HELLO "," CALLED "," HELLO "," ANSWER));
    }
    arena_close(&renderer->arena);
    return turns;
}

struct oai_turns oai_find_turns(const struct engine *engine) {
    if (!engine_info(engine)->has_chat_template) return (struct oai_turns){0};
    return probe_turns(&(struct turns_renderer){.engine = engine});
}

struct oai_turns oai_turns_of(const char *chat_template) {
    if (!chat_template) return (struct oai_turns){0};
    return probe_turns(&(struct turns_renderer){.source = chat_template});
}
