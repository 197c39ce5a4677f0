#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"

static void write_char(struct buf *buf, const char *s, size_t length) {
    unsigned char c = (unsigned char)*s;
    switch (c) {
    case '"':
        buf_str(buf, "\\\"");
        break;
    case '\\':
        buf_str(buf, "\\\\");
        break;
    case '\n':
        buf_str(buf, "\\n");
        break;
    case '\r':
        buf_str(buf, "\\r");
        break;
    case '\t':
        buf_str(buf, "\\t");
        break;
    case '\b':
        buf_str(buf, "\\b");
        break;
    case '\f':
        buf_str(buf, "\\f");
        break;
    default:
        if (c < 0x20)
            buf_fmt(buf, "\\u%04x", c);
        else
            buf_add(buf, s, length);
    }
}

static bool needs_no_escape(unsigned char c) {
    return c >= 0x20 && c < 0x80 && c != '"' && c != '\\';
}

static void write_chars(struct buf *buf, const char *s, size_t n) {
    for (size_t i = 0, length; i < n; i += length) {
        length = 0;
        while (i + length < n && needs_no_escape((unsigned char)s[i + length])) length++;
        if (length)
            buf_add(buf, s + i, length);
        else if (utf8_step(s + i, n - i, &length) == UTF8_CHAR)
            write_char(buf, s + i, length);
        else
            buf_str(buf, "\xEF\xBF\xBD");
    }
}

void json_write_str(struct buf *buf, const char *s, size_t n) {
    buf_char(buf, '"');
    write_chars(buf, s, n);
    buf_char(buf, '"');
}

void json_write_num(struct buf *buf, double value) {
    char text[32];
    if (!isfinite(value)) {
        buf_str(buf, "null");
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    buf_str(buf, text);
}

/* Writes a string of a tree, whose U+0000 is the bytes JSON_NUL (json.h). */
static void write_json_string(struct buf *buf, const char *s) {
    const char *nul;
    if (!strstr(s, JSON_NUL)) {
        json_write_str(buf, s, strlen(s));
        return;
    }
    buf_char(buf, '"');
    for (; (nul = strstr(s, JSON_NUL)); s = nul + sizeof JSON_NUL - 1) {
        write_chars(buf, s, (size_t)(nul - s));
        buf_str(buf, "\\u0000");
    }
    write_chars(buf, s, strlen(s));
    buf_char(buf, '"');
}

static void write_json_members(struct buf *buf, const cJSON *node) {
    bool object = cJSON_IsObject(node);
    const cJSON *child;
    buf_char(buf, object ? '{' : '[');
    cJSON_ArrayForEach(child, node) {
        if (child != node->child) buf_char(buf, ',');
        if (object) {
            write_json_string(buf, child->string);
            buf_char(buf, ':');
        }
        json_write_node(buf, child);
    }
    buf_char(buf, object ? '}' : ']');
}

void json_write_node(struct buf *buf, const cJSON *node) {
    switch (node->type & 0xFF) {
    case cJSON_True:
        buf_str(buf, "true");
        break;
    case cJSON_False:
        buf_str(buf, "false");
        break;
    case cJSON_String:
        write_json_string(buf, node->valuestring);
        break;
    case cJSON_Array:
    case cJSON_Object:
        write_json_members(buf, node);
        break;
    case cJSON_Number:
        if (node->valuestring)
            buf_str(buf, node->valuestring);
        else
            json_write_num(buf, node->valuedouble);
        break;
    default:
        buf_str(buf, "null");
        break;
    }
}
