/* Turns of a chat: what its template takes, and messages that become one turn of the user. */
#include <limits.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

#define TURN_BYTES_MAX  (256u << 20) /* the body is bounded below this long before */
#define PROBE_BYTES_MAX ((size_t)1 << 20)

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

/* A turn of the user, to which messages are joined. Its text is copied once. */
struct turn {
    cJSON *message; /* NULL: no turn is open */
    bool result;    /* the text ends with a tool's result */
    cJSON *places;  /* where pictures stand in the text; NULL: none */
    struct buf text;
};

/* Turns a message into one of the user. */
static bool turn_open(struct turn *turn, cJSON *message) {
    cJSON *role = cJSON_CreateString("user");
    if (!role || !cJSON_ReplaceItemInObjectCaseSensitive(message, "role", role)) {
        cJSON_Delete(role);
        return false;
    }
    turn->message = message;
    buf_open(&turn->text, TURN_BYTES_MAX);
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

/* Returns whether the message becomes part of the user's turn though it is none of the user's: one
 * of the system where the template shows none, or behind others. */
static bool is_folded(const cJSON *messages, const cJSON *message, const struct oai_turns *turns) {
    return turns->alternate && oai_has_role(message, "system") &&
           (!turns->has_system || message != messages->child);
}

static bool is_result(const cJSON *message) {
    return oai_has_role(message, "tool") || oai_has_role(message, "function");
}

bool oai_join_turns(cJSON *messages, const struct oai_turns *turns, bool results) {
    struct turn turn = {0};
    bool written = true;
    for (cJSON *message = messages->child, *next; message && written; message = next) {
        const bool user = oai_has_role(message, "user");
        const bool result = results && is_result(message);
        const bool opens =
            result || is_folded(messages, message, turns) || (user && turns->alternate);
        next = message->next;
        if (!opens && !user) written = turn_close(&turn);
        if (written && opens && !turn.message) written = turn_open(&turn, message);
        if (!written || !turn.message) continue;
        written = turn_add(&turn, message, result);
        if (message != turn.message) cJSON_Delete(cJSON_DetachItemViaPointer(messages, message));
        if (!opens) written = turn_close(&turn) && written;
    }
    return turn_close(&turn) && written;
}

/* --- the probes --- */

/* Renders a chat, written in JSON. false: it is refused. */
static bool render_turns(const struct engine *engine, const char *chat, struct arena *arena,
                         struct engine_ids *ids) {
    struct fault fault;
    cJSON *context = cJSON_Parse(chat);
    const struct engine_chat plain = {.context = context, .longest = INT_MAX};
    const bool rendered = context && !engine_render_chat(engine, &plain, arena, ids, &fault);
    cJSON_Delete(context);
    return rendered;
}

#define CHAT(messages)   "{\"messages\":[" messages "]}"
#define TURN(role, text) "{\"role\":\"" role "\",\"content\":\"" text "\"}"

struct oai_turns oai_find_turns(const struct engine *engine) {
    static const char word[] = CHAT(TURN("system", "word") "," TURN("user", "hello"));
    static const char none[] = CHAT(TURN("system", "") "," TURN("user", "hello"));
    static const char one[] = CHAT(TURN("user", "hello"));
    static const char two[] = CHAT(TURN("user", "hello") "," TURN("user", "hello"));
    struct engine_ids ids[2] = {{0}}, other;
    struct oai_turns turns = {0};
    struct arena arena;
    if (!engine_info(engine)->has_chat_template) return turns;
    arena_open(&arena, PROBE_BYTES_MAX);
    turns.has_system = render_turns(engine, word, &arena, &ids[0]) &&
                       render_turns(engine, none, &arena, &ids[1]) && ids[0].count != ids[1].count;
    turns.alternate =
        render_turns(engine, one, &arena, &other) && !render_turns(engine, two, &arena, &other);
    arena_close(&arena);
    return turns;
}
