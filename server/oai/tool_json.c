/* A state machine over bytes, without a stack: the open containers are a depth and one bit for
 * each, array or object. */
#include "server/oai/tool_json.h"

#include <string.h>

#define DEPTH_MAX 64 /* bits of `arrays` */

enum state {
    VALUE, /* the first, so that a zeroed state is the beginning */
    VALUE_OR_END,
    KEY,
    KEY_OR_END,
    COLON,
    AFTER_VALUE,
    STRING,
    ESCAPE,
    HEX,
    LITERAL,
    /* in a number: its last character */
    MINUS,
    ZERO,
    WHOLE,
    POINT,
    FRACTION,
    EXPONENT,
    SIGN,
    POWER,
    BAD
};

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_hex(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

static bool in_array(const struct tool_json *json) {
    return json->arrays >> (json->depth - 1) & 1;
}

static enum state open_container(struct tool_json *json, bool array) {
    if (json->depth == DEPTH_MAX) return BAD;
    uint64_t bit = (uint64_t)1 << json->depth++;
    json->arrays = array ? json->arrays | bit : json->arrays & ~bit;
    return array ? VALUE_OR_END : KEY_OR_END;
}

static enum state close_container(struct tool_json *json, char c) {
    if (c != (in_array(json) ? ']' : '}')) return BAD;
    json->depth--;
    return AFTER_VALUE;
}

static enum state begin_string(struct tool_json *json, bool key) {
    json->key = key;
    return STRING;
}

static enum state begin_literal(struct tool_json *json, const char *rest) {
    json->literal = rest;
    return LITERAL;
}

static enum state begin_value(struct tool_json *json, char c) {
    if (c == '{' || c == '[') return open_container(json, c == '[');
    if (json->depth == 0) return BAD;
    switch (c) {
    case '"':
        return begin_string(json, false);
    case 't':
        return begin_literal(json, "rue");
    case 'f':
        return begin_literal(json, "alse");
    case 'n':
        return begin_literal(json, "ull");
    case '-':
        return MINUS;
    case '0':
        return ZERO;
    default:
        return is_digit(c) ? WHOLE : BAD;
    }
}

static enum state after_value(struct tool_json *json, char c) {
    if (c != ',') return close_container(json, c);
    return in_array(json) ? VALUE : KEY;
}

/* Reads a byte of a number, which ends at the first byte that cannot belong to it. */
static enum state in_number(struct tool_json *json, enum state state, char c) {
    bool exponent = c == 'e' || c == 'E';
    switch (state) {
    case MINUS:
        return c == '0' ? ZERO : is_digit(c) ? WHOLE : BAD;
    case POINT:
        return is_digit(c) ? FRACTION : BAD;
    case EXPONENT:
        if (c == '+' || c == '-') return SIGN;
        return is_digit(c) ? POWER : BAD;
    case SIGN:
        return is_digit(c) ? POWER : BAD;
    case ZERO:
    case WHOLE:
        if (c == '.') return POINT;
        break;
    default:
        break;
    }
    if (state != ZERO && is_digit(c)) return state;
    if (state != POWER && exponent) return EXPONENT;
    return tool_json_blank(c) ? AFTER_VALUE : after_value(json, c);
}

static enum state in_string(struct tool_json *json, char c) {
    if (c == '"') return json->key ? COLON : AFTER_VALUE;
    if (c == '\\') return ESCAPE;
    return (unsigned char)c < 0x20 ? BAD : STRING;
}

static enum state in_escape(struct tool_json *json, char c) {
    if (c == 'u') {
        json->left = 4;
        return HEX;
    }
    return c && strchr("\"\\/bfnrt", c) ? STRING : BAD;
}

static enum state in_literal(struct tool_json *json, char c) {
    if (c != *json->literal) return BAD;
    return *++json->literal ? LITERAL : AFTER_VALUE;
}

static enum state between(struct tool_json *json, enum state state, char c) {
    if (tool_json_blank(c)) return state;
    if (state == COLON) return c == ':' ? VALUE : BAD;
    if (state == AFTER_VALUE) return after_value(json, c);
    if (state == KEY_OR_END && c == '}') return close_container(json, c);
    if (state == VALUE_OR_END && c == ']') return close_container(json, c);
    if (state == KEY || state == KEY_OR_END) return c == '"' ? begin_string(json, true) : BAD;
    return begin_value(json, c);
}

static enum state next_state(struct tool_json *json, enum state state, char c) {
    switch (state) {
    case STRING:
        return in_string(json, c);
    case ESCAPE:
        return in_escape(json, c);
    case HEX:
        if (!is_hex(c)) return BAD;
        return --json->left ? HEX : STRING;
    case LITERAL:
        return in_literal(json, c);
    default:
        return state >= MINUS ? in_number(json, state, c) : between(json, state, c);
    }
}

struct tool_json tool_json_behind_member(void) {
    return (struct tool_json){.depth = 1, .state = AFTER_VALUE};
}

enum tool_json_step tool_json_step(struct tool_json *json, char byte) {
    enum state state = next_state(json, (enum state)json->state, byte);
    json->state = (uint8_t)state;
    if (state == BAD) return TOOL_JSON_BAD;
    return state == AFTER_VALUE && json->depth == 0 ? TOOL_JSON_DONE : TOOL_JSON_MORE;
}

/* Checks a value by reading it as the only element of an array: the comma and the end of the array
 * must not be reached. */
bool tool_json_is_value(const char *text, size_t size) {
    struct tool_json json = {0};
    if (size == 0 || tool_json_blank(text[0]) || tool_json_blank(text[size - 1])) return false;
    (void)tool_json_step(&json, '[');
    for (size_t i = 0; i < size; i++) {
        enum state before = (enum state)json.state;
        bool between = before != STRING && before != ESCAPE && before != HEX;
        if ((json.depth == 1 && between && text[i] == ',') ||
            tool_json_step(&json, text[i]) != TOOL_JSON_MORE)
            return false;
    }
    return tool_json_step(&json, ']') == TOOL_JSON_DONE;
}

bool tool_json_is_number(const char *text, size_t size) {
    bool begins = size > 0 && (text[0] == '-' || is_digit(text[0]));
    return begins && tool_json_is_value(text, size);
}

/* Writes the ends of all open containers, the innermost first. */
static void close_all(const struct tool_json *json, struct buf *out) {
    for (int depth = json->depth; depth-- > 0;)
        buf_char(out, json->arrays >> depth & 1 ? ']' : '}');
}

bool tool_json_close(const char *text, size_t size, struct buf *out) {
    struct tool_json json = {0}, good = {0};
    size_t good_end = 0, escape = 0, at = 0;
    enum tool_json_step step = TOOL_JSON_MORE;
    while (at < size && step == TOOL_JSON_MORE) {
        step = tool_json_step(&json, text[at]);
        if (step == TOOL_JSON_BAD) return false;
        enum state now = (enum state)json.state;
        if (now == ESCAPE) escape = at;
        if (text[at] == ',' && (now == VALUE || now == KEY)) { /* ends a number, too */
            good = json;
            good_end = at;
        }
        at++;
        if (now != AFTER_VALUE && now != KEY_OR_END && now != VALUE_OR_END) continue;
        good = json;
        good_end = at;
    }
    enum state state = (enum state)json.state;
    bool in_string = state == STRING || state == ESCAPE || state == HEX;
    bool number = state == ZERO || state == WHOLE || state == FRACTION || state == POWER;
    if (in_string && !json.key) {
        buf_add(out, text, state == STRING ? size : escape);
        buf_char(out, '"');
        close_all(&json, out);
    } else {
        buf_add(out, text, number ? size : good_end);
        close_all(number ? &json : &good, out);
    }
    return good_end > 0;
}
