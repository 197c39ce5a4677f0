#include "server/move.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/loop.h"

struct move {
    struct exchange *next; /* the next one in server->moves_waiting */
    uv_work_cb work;       /* the work that waits for a thread */
    uv_after_work_cb after;
    struct engine_upload *upload; /* NULL: the file leaves, or nothing has come yet */
    uint8_t space[16];
    uint64_t id;
    int fd;            /* the file that leaves; -1 = none */
    uint64_t at, size; /* bytes read of the file that leaves, and all its bytes */
    char *buffer;      /* [MOVE_BYTES] */
    size_t filled, taken;
    bool working; /* a thread has the buffer, or will have it */
    bool last;    /* the body is complete */
    bool sends;   /* the answer is the file (a download) */
    bool comes;   /* the body is the file (an upload) */
    struct engine_conversation_row row;
    int rc;
    struct fault fault;
};

static bool open_move(struct exchange *ex) {
    struct move *move = mem_try_alloc(1, sizeof *move);
    char *buffer = move ? mem_try_alloc(MOVE_BYTES, 1) : NULL;
    if (!buffer) exchange_refuse_memory(ex);
    if (!buffer || !exchange_hold(ex, MOVE_BYTES)) {
        mem_free(buffer);
        mem_free(move);
        exchange_refuse(ex);
        return false;
    }
    *move = (struct move){.fd = -1, .buffer = buffer};
    ex->move = move;
    return true;
}

void move_close(struct exchange *ex) {
    struct move *move = ex->move;
    if (!move) return;
    ex->move = NULL;
    engine_upload_close(move->upload);
    if (move->fd >= 0) close(move->fd);
    mem_free(move->buffer);
    mem_free(move);
}

/* Refuses the move with a status that depends on whether the file, the request or this server is at
 * fault. */
static void refuse_move(struct exchange *ex, const struct fault *fault) {
    struct oai_error *error = &ex->error;
    switch (fault->code) {
    case ERR_MALFORMED:
    case ERR_INVALID:
        oai_refuse(error, 400, "invalid_state", NULL, "The state is refused: %s.", fault->text);
        break;
    case ERR_LIMIT:
        oai_refuse(error, 413, "request_too_large", NULL, "The state is refused: %s.", fault->text);
        break;
    case ERR_UNSUPPORTED:
        oai_refuse(error, 400, "unsupported_state", NULL, "The state cannot be used: %s.",
                   fault->text);
        break;
    case ERR_NOTFOUND:
        oai_refuse(error, 404, "conversation_not_found", "id", "There is no such conversation.");
        break;
    case ERR_FULL:
        oai_refuse(error, 503, "overloaded", NULL, "The state cannot be taken now: %s.",
                   fault->text);
        break;
    default:
        oai_refuse_fault(error, fault);
        break;
    }
    exchange_refuse(ex);
}

/* ---- A file comes ---- */

/* Returns whether the client has another upload. Slow uploads of one client must not take the bytes
 * of all others. */
static bool client_uploads(const struct exchange *ex) {
    for (const struct conn *conn = ex->server->conns; conn; conn = conn->next) {
        const struct exchange *other = conn->exchange;
        if (other && other != ex && other->move && other->move->comes &&
            memcmp(other->client.id, ex->client.id, sizeof other->client.id) == 0)
            return true;
    }
    return false;
}

bool move_begin(struct exchange *ex, uint64_t size, const uint8_t space[16]) {
    int64_t most = engine_upload_max(ex->model->engine);
    struct fault fault;
    if (most >= 0 && size > (uint64_t)most) {
        fault_set(&fault, ERR_LIMIT, "state",
                  "%" PRIu64 " bytes; an upload may have %" PRId64 ", a quarter of state-bytes",
                  size, most);
        refuse_move(ex, &fault);
        return false;
    }
    if (client_uploads(ex)) {
        fault_set(&fault, ERR_FULL, "state", "another upload of this client has not ended");
        refuse_move(ex, &fault);
        return false;
    }
    if (!open_move(ex)) return false;
    ex->move->comes = true;
    memcpy(ex->move->space, space, sizeof ex->move->space);
    return true;
}

/* On a thread of libuv: writes what the buffer has. */
static void write_work(uv_work_t *work) {
    struct exchange *ex = work->data;
    struct move *move = ex->move;
    int rc = 0;
    if (!move->upload)
        rc = engine_upload_open(ex->model->engine, move->space, &move->upload, &move->fault);
    if (rc == 0 && move->filled > 0)
        rc = engine_upload_add(move->upload, move->buffer, move->filled, &move->fault);
    if (rc == 0 && move->last) rc = engine_upload_end(move->upload, &move->row, &move->fault);
    move->rc = rc;
}

/* Gives waiting moves to the threads, in the order in which they came. */
static void start_next(struct server *server) {
    while (server->moves_waiting && server->moves_working < MOVES_AT_ONCE) {
        struct exchange *ex = server->moves_waiting;
        server->moves_waiting = ex->move->next;
        server->moves_working++;
        ex->work.data = ex;
        CHECK(uv_queue_work(&server->loop, &ex->work, ex->move->work, ex->move->after) == 0);
    }
}

/* Suspends the connection and starts work on a thread; `after` resumes it. An exchange has at most
 * one such work at a time. */
static void start_move_work(struct exchange *ex, uv_work_cb work, uv_after_work_cb after) {
    struct exchange **end = &ex->server->moves_waiting;
    CHECK(!ex->move->working); /* no thread may have the buffer */
    while (*end) end = &(*end)->move->next;
    *end = ex;
    ex->move->next = NULL;
    ex->move->work = work;
    ex->move->after = after;
    ex->move->working = true;
    ex->refs++;
    ex->server->works++;
    exchange_suspend(ex);
    start_next(ex->server);
}

static void end_move_work(struct exchange *ex, int status) {
    CHECK(ex->move->working && ex->server->works > 0);
    ex->move->working = false;
    ex->server->works--;
    ex->server->moves_working--;
    start_next(ex->server);
    if (status != 0)
        ex->move->rc =
            fault_set(&ex->move->fault, ERR_STOPPED, "state", "the server is shutting down");
}

static void after_write(uv_work_t *work, int status) {
    struct exchange *ex = work->data;
    struct move *move = ex->move;
    end_move_work(ex, status);
    move->filled = 0;
    if (move->rc != 0) {
        refuse_move(ex, &move->fault);
    } else if (move->last) {
        oai_render_uploaded(&ex->answer.body, &move->row);
        ex->answer.status = 200;
        exchange_ready(ex);
    }
    exchange_resume(ex);
    exchange_unref(ex);
}

size_t move_receive(struct exchange *ex, const char *data, size_t size) {
    struct move *move = ex->move;
    size_t left = MOVE_BYTES - move->filled;
    CHECK(!move->working);
    if (size > left) size = left;
    memcpy(move->buffer + move->filled, data, size);
    move->filled += size;
    if (move->filled == MOVE_BYTES) start_move_work(ex, write_work, after_write);
    return size;
}

void move_finish(struct exchange *ex) {
    ex->move->last = true;
    exchange_set_state(ex, EXCHANGE_PREPARING);
    start_move_work(ex, write_work, after_write);
}

/* ---- A file leaves ---- */

/* On a thread of libuv: opens the file, or reads the next bytes of it. */
static void read_work(uv_work_t *work) {
    struct exchange *ex = work->data;
    struct move *move = ex->move;
    ssize_t n;
    move->rc = 0;
    if (move->fd < 0)
        move->rc =
            engine_state_open(ex->model->engine, move->id, &move->fd, &move->size, &move->fault);
    if (move->rc != 0) return;
    do n = pread(move->fd, move->buffer, MOVE_BYTES, (off_t)move->at);
    while (n < 0 && errno == EINTR);
    move->filled = n > 0 ? (size_t)n : 0;
    move->taken = 0;
    move->at += move->filled;
    if (n <= 0) /* the size is known, so the end of the file is not reached here */
        move->rc = fault_set(&move->fault, ERR_IO, "state", "cannot be read");
}

static void after_open(uv_work_t *work, int status) {
    struct exchange *ex = work->data;
    end_move_work(ex, status);
    if (ex->move->rc != 0) {
        refuse_move(ex, &ex->move->fault);
    } else {
        ex->move->sends = true;
        ex->answer.status = 200;
        ex->answer.content_type = "application/octet-stream";
        exchange_ready(ex);
    }
    exchange_resume(ex);
    exchange_unref(ex);
}

void move_send(struct exchange *ex, uint64_t id) {
    if (!open_move(ex)) return;
    ex->move->id = id;
    exchange_set_state(ex, EXCHANGE_PREPARING);
    start_move_work(ex, read_work, after_open);
}

bool move_sends(const struct exchange *ex) {
    return ex->move && ex->move->sends;
}

static void after_read(uv_work_t *work, int status) {
    struct exchange *ex = work->data;
    end_move_work(ex, status);
    if (ex->move->rc != 0 && !exchange_is_gone(ex))
        log_warn("a state file cannot be sent: %s", ex->move->fault.text);
    exchange_resume(ex);
    exchange_unref(ex);
}

/* The function by which libmicrohttpd reads the file. */
static ssize_t read_move_file(void *cls, uint64_t position, char *to, size_t max) {
    struct exchange *ex = cls;
    struct move *move = ex->move;
    (void)position;
    if (exchange_is_gone(ex) || move->rc != 0) return MHD_CONTENT_READER_END_WITH_ERROR;
    size_t size = move->filled - move->taken;
    if (size > max) size = max;
    memcpy(to, move->buffer + move->taken, size);
    move->taken += size;
    if (size > 0) return (ssize_t)size;
    if (move->at == move->size) return MHD_CONTENT_READER_END_OF_STREAM;
    start_move_work(ex, read_work, after_read);
    return 0;
}

struct MHD_Response *move_response(struct exchange *ex) {
    return MHD_create_response_from_callback(ex->move->size, 64 << 10, read_move_file, ex, NULL);
}
