/* The states of a connection's input: head, body, chunks, trailers. Heads and the lines between
 * chunks are held until they are complete and then checked; the bytes of bodies pass through.
 *
 * Lines must end in CRLF. A lone CR or LF, or a control character, is rejected at once, so that a
 * client that speaks another protocol gets an immediate answer. */
#include "server/framing.h"

#include <string.h>

#include "base/mem.h"

#define HELD_STEP      2048
#define CHUNK_LINE_MAX 256 /* a chunk's size with its extensions */
#define BLANK_MAX      8   /* empty lines before a request line are skipped (RFC 9112, 2.2) */

/* --- incomplete input --- */

static int hold_framing_byte(struct framing *f, char c) {
    if (f->held_size == f->held_capacity) {
        char *larger = mem_try_alloc(f->held_capacity + HELD_STEP, 1);
        if (!larger) return -1;
        if (f->held_size) memcpy(larger, f->held, f->held_size);
        mem_free(f->held);
        f->held = larger;
        f->held_capacity += HELD_STEP;
    }
    f->held[f->held_size++] = c;
    return 0;
}

static void release_held(struct framing *f) {
    mem_free(f->held);
    f->held = NULL;
    f->held_size = f->held_capacity = 0;
}

void framing_close(struct framing *framing) {
    release_held(framing);
}

/* --- rejecting --- */

static void end_input_framing(struct framing *f, const struct head_refusal *refusal) {
    f->refusal = *refusal;
    f->state = FRAMING_OVER;
    release_held(f);
}

/* Rejects the request and replaces it by a harmless one; a HEAD request by another HEAD, because
 * its answer has no body. */
static void refuse_request(struct framing *f, const struct head_refusal *refusal, bool is_head,
                           struct buf *out) {
    f->requests++;
    buf_str(out, is_head ? "HEAD" : "GET");
    buf_str(out, " / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    end_input_framing(f, refusal);
}

static void refuse_text(struct framing *f, int status, const char *code, const char *text,
                        struct buf *out) {
    const struct head_refusal refusal = {status, code, text};
    bool is_head = f->held_size >= 5 && memcmp(f->held, "HEAD ", 5) == 0;
    refuse_request(f, &refusal, is_head, out);
}

/* Rejects the body. Called only between chunks, where the body can be ended. */
static void refuse_body(struct framing *f, int status, const char *code, const char *text,
                        struct buf *out) {
    const struct head_refusal refusal = {status, code, text};
    buf_str(out, "0\r\n\r\n");
    end_input_framing(f, &refusal);
}

static void refuse_chunk(struct framing *f, struct buf *out) {
    refuse_body(f, 400, NULL, "The chunked body is malformed.", out);
}

/* --- heads --- */

static void end_request_head(struct framing *f, struct buf *out) {
    struct head head;
    head_read(f->held, f->held_size, &head, out);
    if (head.refusal.status) {
        refuse_request(f, &head.refusal, head.is_head, out);
        return;
    }
    f->requests++;
    f->left = head.length;
    f->body = 0;
    f->state = head.chunked ? FRAMING_CHUNK_SIZE : head.length ? FRAMING_BODY : FRAMING_HEAD;
    release_held(f);
}

/* Returns the byte before the last one that was read of the head. */
static char before_last(const struct framing *f) {
    return f->held_size < 2 ? '\0' : f->held[f->held_size - 2];
}

static bool is_head_end(const struct framing *f) {
    return f->held_size >= 4 && memcmp(f->held + f->held_size - 4, "\r\n\r\n", 4) == 0;
}

static int take_head_byte(struct framing *f, const struct framing_limits *limits, char c,
                          struct buf *out) {
    bool blank = !f->held_size && (c == '\r' || c == '\n');
    if (blank && ++f->blank <= BLANK_MAX) return 0;
    f->blank = 0;
    if (hold_framing_byte(f, c)) return -1;
    bool control = ((unsigned char)c < ' ' && c != '\t' && c != '\r' && c != '\n') || c == 0x7f;
    bool after_cr = before_last(f) == '\r';
    if (control || (c == '\n') != after_cr)
        refuse_text(f, 400, NULL,
                    "This is not an HTTP request: a line must end in CRLF and contain no control "
                    "characters.",
                    out);
    else if (f->held_size > limits->head_bytes)
        refuse_text(f, 431, "headers_too_large", "The headers are too large.", out);
    else if (c == '\n' && is_head_end(f))
        end_request_head(f, out);
    return 0;
}

/* --- chunked bodies --- */

static void begin_chunk(struct framing *f, const struct framing_limits *limits, struct buf *out) {
    if (!head_read_chunk_size(f->held, f->held_size - 2, &f->left)) {
        refuse_chunk(f, out);
        return;
    }
    if (f->left > limits->body_bytes - f->body || f->body > limits->body_bytes) {
        refuse_body(f, 413, "request_too_large", "The body is larger than --max-body-bytes allows.",
                    out);
        return;
    }
    f->body += f->left;
    f->state = f->left ? FRAMING_CHUNK : FRAMING_TRAILER;
    f->blank = 0;
    if (f->left) buf_fmt(out, "%llx\r\n", (unsigned long long)f->left);
    release_held(f);
}

static void end_framing_line(struct framing *f, const struct framing_limits *limits,
                             struct buf *out) {
    bool empty = f->held_size == 2;
    if (f->state == FRAMING_CHUNK_SIZE) {
        begin_chunk(f, limits, out);
        return;
    }
    release_held(f);
    if (f->state == FRAMING_CHUNK_END) {
        f->state = FRAMING_CHUNK_SIZE; /* the CRLF was passed on with the chunk */
    } else if (empty) {
        buf_str(out, "0\r\n\r\n"); /* trailers are dropped: no handler reads them */
        f->state = FRAMING_HEAD;
        f->blank = 0;
    }
}

static int take_line_byte(struct framing *f, const struct framing_limits *limits, char c,
                          struct buf *out) {
    bool trailer = f->state == FRAMING_TRAILER;
    size_t longest = trailer                         ? limits->head_bytes
                     : f->state == FRAMING_CHUNK_END ? 2
                                                     : CHUNK_LINE_MAX;
    if (hold_framing_byte(f, c)) return -1;
    if (trailer && ++f->blank > limits->head_bytes) longest = 0;
    if (f->held_size > longest || (c == '\n') != (before_last(f) == '\r'))
        refuse_chunk(f, out);
    else if (f->state == FRAMING_CHUNK_END && c != "\r\n"[f->held_size - 1])
        refuse_chunk(f, out);
    else if (c == '\n')
        end_framing_line(f, limits, out);
    return 0;
}

/* --- bodies --- */

static size_t take_body(struct framing *f, const char *data, size_t size, struct buf *out) {
    if (size > f->left) size = (size_t)f->left;
    buf_add(out, data, size);
    f->left -= size;
    if (f->left) return size;
    if (f->state == FRAMING_CHUNK) buf_str(out, "\r\n");
    f->state = f->state == FRAMING_CHUNK ? FRAMING_CHUNK_END : FRAMING_HEAD;
    return size;
}

bool framing_passes(struct framing *framing, size_t size) {
    if (framing->state != FRAMING_BODY || size > framing->left) return false;
    framing->left -= size;
    if (!framing->left) framing->state = FRAMING_HEAD;
    return true;
}

int framing_feed(struct framing *framing, const struct framing_limits *limits, const char *data,
                 size_t size, struct buf *out) {
    size_t at = 0;
    while (at < size && framing->state != FRAMING_OVER) {
        int rc = 0;
        if (framing->state == FRAMING_BODY || framing->state == FRAMING_CHUNK)
            at += take_body(framing, data + at, size - at, out);
        else if (framing->state == FRAMING_HEAD)
            rc = take_head_byte(framing, limits, data[at++], out);
        else
            rc = take_line_byte(framing, limits, data[at++], out);
        if (rc) return -1;
    }
    return out->failed ? -1 : 0;
}
