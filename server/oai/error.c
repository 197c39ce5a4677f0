#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "server/oai/fields.h"

static const char *error_type(int status) {
    switch (status) {
    case 401:
        return "authentication_error";
    case 404:
        return "not_found_error";
    case 503:
        return "service_unavailable_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

/* Replaces each U+0000, which has two bytes in a tree's strings, by one byte that is shown as
 * U+FFFD. */
static void mark_nuls(char *text) {
    for (char *nul = text; (nul = strstr(nul, JSON_NUL));) {
        size_t size = sizeof JSON_NUL - 1;
        memmove(nul + 1, nul + size, strlen(nul + size) + 1);
    }
}

int oai_refuse(struct oai_error *error, int status, const char *code, const char *param,
               const char *format, ...) {
    va_list args;
    *error = (struct oai_error){.status = status, .type = error_type(status), .code = code};
    snprintf(error->param, sizeof error->param, "%s", param ? param : "");
    va_start(args, format);
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
    mark_nuls(error->param);
    mark_nuls(error->message);
    return -1;
}

/* Refuses a prompt that is too long. The code is OpenAI's; the type and the numbers are
 * llama.cpp's, whose clients use them to offer a larger context. */
int oai_refuse_context(struct oai_error *error, size_t count, size_t context) {
    error->type = "exceed_context_size_error";
    error->prompt_tokens = count;
    error->context_tokens = context;
    return -1;
}

int oai_expected(struct oai_error *error, const char *field, const char *text, const cJSON *found) {
    return oai_refuse(error, 400, "invalid_value", field,
                      "Invalid value for '%s': expected %s, found %s.", field, text,
                      json_type_name(found));
}

int oai_refuse_fault(struct oai_error *error, const struct fault *fault) {
    switch (fault->code) {
    case ERR_NOMEM:
    case ERR_FULL:
    case ERR_BUSY:
        return oai_refuse(error, 503, "overloaded", NULL, "The server is short of memory: %s.",
                          fault->text);
    case ERR_STOPPED:
        return oai_refuse(error, 503, "stopped", NULL, "The server is shutting down.");
    case ERR_INTERNAL:
    case ERR_IO:
    case ERR_DEVICE:
        return oai_refuse(error, 500, err_name(fault->code), NULL, "%s", fault->text);
    case ERR_CONTEXT:
        return oai_refuse(error, 400, "context_length_exceeded", fault->field, "%s", fault->text);
    case ERR_UNSUPPORTED:
        return oai_refuse(error, 400, "unsupported_parameter", fault->field,
                          "Unsupported value for '%s': %s.", fault->field, fault->text);
    default:
        break;
    }
    if (!fault->field[0]) return oai_refuse(error, 400, "invalid_value", NULL, "%s", fault->text);
    return oai_refuse(error, 400, "invalid_value", fault->field, "Invalid value for '%s': %s.",
                      fault->field, fault->text);
}

/* Returns whether `field` begins with the alias; *index is the index at "[]", *rest what follows.
 */
static bool fits(const char *alias, const char *field, long *index, const char **rest) {
    for (; *alias; alias++) {
        if (alias[0] == '[' && alias[1] == ']') {
            char *end;
            if (field[0] != '[' || !isdigit((unsigned char)field[1])) return false;
            *index = strtol(field + 1, &end, 10);
            if (*end != ']') return false;
            field = end + 1;
            alias++;
        } else if (*alias != *field++) {
            return false;
        }
    }
    *rest = field;
    return strchr(".[", *field) != NULL; /* the NUL counts as found, too */
}

static void write_own(char path[OAI_PATH], const char *own, long index, const char *rest) {
    const char *mark = strstr(own, "[]");
    if (mark)
        oai_path(path, "%.*s[%ld]%s%s", (int)(mark - own), own, index, mark + 2, rest);
    else
        oai_path(path, "%s%s", own, rest);
}

/* Renames the field in the message, where it stands in quotes. */
static void rename_quoted(char *message, size_t size, const char *from, const char *to) {
    char quoted[OAI_PATH + 2], rest[sizeof((struct oai_error *)0)->message];
    snprintf(quoted, sizeof quoted, "'%s'", from);
    char *at = strstr(message, quoted);
    if (!at) return;
    snprintf(rest, sizeof rest, "%s", at + strlen(quoted));
    snprintf(at, size - (size_t)(at - message), "'%s'%s", to, rest);
}

static void rename_to(struct oai_error *error, const char *path) {
    rename_quoted(error->message, sizeof error->message, error->param, path);
    snprintf(error->param, sizeof error->param, "%s", path);
}

/* Renames a path below `tools`: some tools of a request are left out and others lie in a namespace,
 * so a tool's place in the chat is not its place in the request. The text of a custom tool's calls
 * is described by its `format`. */
static void rename_tool(const struct oai_request *request, struct oai_error *error) {
    const struct oai_tool_origin *tool;
    char path[OAI_PATH];
    const char *rest;
    long index = 0;
    if (!request->origins || !fits("tools[]", error->param, &index, &rest)) return;
    if (index >= request->origin_count) return;
    tool = &request->origins[index];
    if (tool->is_text && strncmp(rest, ".parameters", 11) == 0) rest = ".format.definition";
    oai_path(path, "%s%s", tool->path, rest);
    rename_to(error, path);
}

void oai_rename_field(const struct oai_request *request, struct oai_error *error) {
    char path[OAI_PATH];
    const char *rest;
    long index = 0;
    for (const struct oai_alias *a = request->kind->aliases; a && a->chat; a++) {
        if (!fits(a->chat, error->param, &index, &rest)) continue;
        write_own(path, a->own, index, rest);
        rename_to(error, path);
        break;
    }
    rename_tool(request, error);
}

void oai_path(char path[OAI_PATH], const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(path, OAI_PATH, format, args);
    va_end(args);
}

static void error_write_nullable(struct buf *out, const char *s) {
    if (s && *s)
        json_write_str(out, s, strlen(s));
    else
        buf_str(out, "null");
}

void oai_render_error(struct buf *out, const struct oai_error *error) {
    buf_str(out, "{\"error\":{\"message\":");
    json_write_str(out, error->message, strlen(error->message));
    buf_str(out, ",\"type\":");
    json_write_str(out, error->type, strlen(error->type));
    buf_str(out, ",\"param\":");
    error_write_nullable(out, error->param);
    buf_str(out, ",\"code\":");
    error_write_nullable(out, error->code);
    if (error->context_tokens)
        buf_fmt(out, ",\"n_prompt_tokens\":%zu,\"n_ctx\":%zu", error->prompt_tokens,
                error->context_tokens);
    buf_str(out, "}}");
}
