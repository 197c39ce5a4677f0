/* Reads a request's head before libmicrohttpd does, for two reasons. libmicrohttpd 0.9.75 answers
 * some malformed heads by itself, with the response header block written twice; and it accepts
 * heads that HTTP forbids because intermediaries read them differently (two Host fields, white
 * space before a colon, continuation lines). A head that passes is rewritten in normal form
 * for libmicrohttpd. */
#include "server/head.h"

#include <string.h>
#include <strings.h>

#define CHUNK_MAX ((uint64_t)1 << 62)

struct span {
    const char *at;
    size_t size;
};

struct reader {
    struct head *head;
    struct span method, target, authority; /* authority: that of an absolute target; else empty */
    bool http11;
    int fields, hosts, lengths, transfers;
};

/* --- characters --- */

static bool is_head_digit(char c) {
    return c >= '0' && c <= '9';
}

static int head_hex_value(char c) {
    if (is_head_digit(c)) return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool is_token_char(char c) {
    return is_head_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool is_head_token(struct span s) {
    for (size_t i = 0; i < s.size; i++)
        if (!is_token_char(s.at[i])) return false;
    return s.size > 0;
}

static bool is_visible(char c) {
    return c > ' ' && c < 0x7f;
}

static bool is_field_char(char c) {
    return c == '\t' || (unsigned char)c >= ' ';
}

/* --- spans --- */

static bool span_is(struct span s, const char *text) {
    return s.size == strlen(text) && strncasecmp(s.at, text, s.size) == 0;
}

static bool span_begins(struct span s, const char *text) {
    size_t size = strlen(text);
    return s.size >= size && strncasecmp(s.at, text, size) == 0;
}

static struct span span_from(struct span s, size_t at) {
    return (struct span){s.at + at, s.size - at};
}

static size_t span_find(struct span s, char c) {
    const char *at = s.size ? memchr(s.at, c, s.size) : NULL;
    return at ? (size_t)(at - s.at) : s.size;
}

static struct span span_trim(struct span s) {
    while (s.size && (*s.at == ' ' || *s.at == '\t')) s = span_from(s, 1);
    while (s.size && (s.at[s.size - 1] == ' ' || s.at[s.size - 1] == '\t')) s.size--;
    return s;
}

/* Returns the next line without its CRLF; *rest begins after it. */
static struct span next_line(struct span *rest) {
    struct span line = {rest->at, span_find(*rest, '\n')};
    *rest = span_from(*rest, line.size < rest->size ? line.size + 1 : line.size);
    if (line.size && line.at[line.size - 1] == '\r') line.size--;
    return line;
}

static bool is_host(struct span s) {
    for (size_t i = 0; i < s.size; i++)
        if (!is_visible(s.at[i]) || strchr("/?#,", s.at[i])) return false;
    return true;
}

/* --- rejecting --- */

static int refuse_head(struct reader *r, int status, const char *code, const char *text) {
    r->head->refusal = (struct head_refusal){status, code, text};
    return -1;
}

static int refuse_malformed_head(struct reader *r, const char *text) {
    return refuse_head(r, 400, NULL, text);
}

/* --- the request line --- */

static int read_version(struct reader *r, struct span version) {
    if (version.size != 8 || memcmp(version.at, "HTTP/", 5) != 0 || !is_head_digit(version.at[5]) ||
        version.at[6] != '.' || !is_head_digit(version.at[7]))
        return refuse_malformed_head(r, "The request line must end in 'HTTP/1.1'.");
    if (version.at[5] != '1' || version.at[7] > '1')
        return refuse_head(r, 505, "unsupported_http_version",
                           "Only HTTP/1.1 and HTTP/1.0 are supported.");
    r->http11 = version.at[7] == '1';
    return 0;
}

/* Checks the target. %00 is allowed in a query, where it is data; in a path it would cut the path
 * short. */
static int check_request_target(struct reader *r) {
    const struct span t = r->target;
    size_t path = span_find(t, '?');
    int parameters = 0;
    for (size_t i = 0; i < t.size; i++) {
        if (!is_visible(t.at[i]) || t.at[i] == '#')
            return refuse_malformed_head(
                r, "The request target contains a character that must be escaped.");
        parameters += t.at[i] == '&';
        if (t.at[i] != '%') continue;
        if (t.size - i < 3 || head_hex_value(t.at[i + 1]) < 0 || head_hex_value(t.at[i + 2]) < 0)
            return refuse_malformed_head(
                r, "The request target contains an incomplete escape sequence.");
        if (i < path && t.at[i + 1] == '0' && t.at[i + 2] == '0')
            return refuse_malformed_head(r, "The path contains the escape sequence %00.");
    }
    if (parameters >= HEAD_PARAMETERS_MAX)
        return refuse_malformed_head(r, "The query of the request target has too many parameters.");
    return 0;
}

/* Reads the target. "http://authority/path" becomes "/path", and the authority replaces the Host
 * field (RFC 9112, 3.2.2). */
static int read_target(struct reader *r, struct span target) {
    r->target = target;
    if (span_begins(target, "http://") || span_begins(target, "https://")) {
        struct span rest = span_from(target, span_find(target, '/') + 2);
        size_t path = span_find(rest, '/'), query = span_find(rest, '?');
        r->authority = (struct span){rest.at, path < query ? path : query};
        r->target = span_from(rest, r->authority.size);
        if (!r->authority.size || !is_host(r->authority) ||
            span_find(r->authority, '@') < r->authority.size)
            return refuse_malformed_head(r, "The request target has no valid authority.");
    } else if (!(span_is(target, "*") && span_is(r->method, "OPTIONS")) &&
               (!target.size || *target.at != '/')) {
        return refuse_malformed_head(r, "The request target must be a path or an http URL.");
    }
    return check_request_target(r);
}

static int read_request_line(struct reader *r, struct span line) {
    size_t first = span_find(line, ' ');
    r->method = (struct span){line.at, first};
    if (first == line.size || !is_head_token(r->method))
        return refuse_malformed_head(r, "The request line must begin with a method and one space.");
    r->head->is_head = r->method.size == 4 && memcmp(r->method.at, "HEAD", 4) == 0;
    struct span rest = span_from(line, first + 1);
    size_t second = span_find(rest, ' ');
    if (second == rest.size || span_find(span_from(rest, second + 1), ' ') < rest.size - second - 1)
        return refuse_malformed_head(
            r, "The request line must consist of a method, a target without spaces "
               "and a version.");
    if (read_version(r, span_from(rest, second + 1))) return -1;
    return read_target(r, (struct span){rest.at, second});
}

/* --- fields --- */

static int read_length(struct reader *r, struct span value) {
    uint64_t length = 0;
    r->lengths++;
    if (!value.size) return refuse_malformed_head(r, "Content-Length must be a decimal number.");
    for (size_t i = 0; i < value.size; i++) {
        if (!is_head_digit(value.at[i]))
            return refuse_malformed_head(r, "Content-Length must be a decimal number.");
        if (length > CHUNK_MAX / 16)
            return refuse_head(r, 413, "request_too_large", "The body is too large.");
        length = length * 10 + (uint64_t)(value.at[i] - '0');
    }
    r->head->length = length;
    return 0;
}

static int read_transfer(struct reader *r, struct span value) {
    r->transfers++;
    if (!span_is(value, "chunked"))
        return refuse_head(r, 501, "unsupported_transfer_encoding",
                           "The only supported Transfer-Encoding is 'chunked'.");
    r->head->chunked = true;
    return 0;
}

static int read_host(struct reader *r, struct span value) {
    r->hosts++;
    return is_host(value)
               ? 0
               : refuse_malformed_head(r, "The Host field contains a character that no host has.");
}

static void write_field(struct buf *out, const char *name, size_t name_size, struct span value) {
    buf_add(out, name, name_size);
    buf_str(out, ": ");
    buf_add(out, value.at, value.size);
    buf_str(out, "\r\n");
}

static int read_field(struct reader *r, struct span line, struct buf *out) {
    size_t colon = span_find(line, ':');
    struct span name = {line.at, colon};
    int rc = 0;
    if (colon == line.size || !is_head_token(name))
        return refuse_malformed_head(r,
                                     "A header line must consist of a name, a colon and a value.");
    for (size_t i = colon; i < line.size; i++)
        if (!is_field_char(line.at[i]) || line.at[i] == 0x7f)
            return refuse_malformed_head(r, "A header value contains a control character.");
    if (++r->fields > HEAD_FIELDS_MAX)
        return refuse_head(r, 431, "headers_too_large",
                           "The request has more than 128 header fields.");
    struct span value = span_trim(span_from(line, colon + 1));
    bool host = span_is(name, "Host");
    if (host)
        rc = read_host(r, value);
    else if (span_is(name, "Content-Length"))
        rc = read_length(r, value);
    else if (span_is(name, "Transfer-Encoding"))
        rc = read_transfer(r, value);
    if (rc || span_is(name, "Cookie") || (host && r->authority.size)) return rc;
    write_field(out, name.at, name.size, value);
    return 0;
}

/* Refuses two statements of where the body ends. An intermediary may have believed the other one;
 * then what follows would be a request that somebody else wrote (RFC 9112, 6.3). */
static int check_fields(struct reader *r) {
    if (r->lengths + r->transfers > 1)
        return refuse_malformed_head(
            r, "A request must have at most one Content-Length or Transfer-Encoding.");
    if (r->transfers && !r->http11)
        return refuse_malformed_head(r, "An HTTP/1.0 request cannot have a Transfer-Encoding.");
    if (r->hosts > 1) return refuse_malformed_head(r, "The request has more than one Host field.");
    if (!r->hosts && r->http11) return refuse_malformed_head(r, "The request has no Host field.");
    return 0;
}

/* --- the whole --- */

static void write_request_line(const struct reader *r, struct buf *out) {
    buf_add(out, r->method.at, r->method.size);
    buf_char(out, ' ');
    if (!r->target.size || (*r->target.at != '/' && *r->target.at != '*')) buf_char(out, '/');
    buf_add(out, r->target.at, r->target.size);
    buf_str(out, r->http11 ? " HTTP/1.1\r\n" : " HTTP/1.0\r\n");
    if (r->authority.size) write_field(out, "Host", 4, r->authority);
}

static int read_head_lines(struct reader *r, struct span rest, struct buf *out) {
    if (read_request_line(r, next_line(&rest))) return -1;
    write_request_line(r, out);
    while (rest.size) {
        struct span line = next_line(&rest);
        if (line.size && read_field(r, line, out)) return -1;
    }
    buf_str(out, "\r\n");
    return check_fields(r);
}

void head_read(const char *data, size_t size, struct head *head, struct buf *out) {
    struct reader r = {.head = head};
    size_t before = out->size;
    *head = (struct head){0};
    if (!read_head_lines(&r, (struct span){data, size}, out) || out->failed) return;
    out->size = before;
    if (out->data) out->data[before] = '\0';
}

bool head_read_chunk_size(const char *line, size_t size, uint64_t *chunk) {
    size_t digits = 0;
    *chunk = 0;
    for (; digits < size && head_hex_value(line[digits]) >= 0; digits++) {
        if (*chunk > CHUNK_MAX / 16) return false;
        *chunk = *chunk * 16 + (uint64_t)head_hex_value(line[digits]);
    }
    struct span rest = span_trim((struct span){line + digits, size - digits});
    for (size_t i = 0; i < rest.size; i++)
        if (!is_field_char(rest.at[i]) || rest.at[i] == 0x7f) return false;
    return digits > 0 && (!rest.size || *rest.at == ';');
}
