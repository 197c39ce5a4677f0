/* Body -> checked request with its prompt as tokens, in the thread pool. Touches its own exchange
 * and immutable data only; the loop leaves the exchange alone meanwhile (but for `gone`). */
#include <string.h>
#include <sys/random.h>

#include "base/check.h"
#include "base/json.h"
#include "server/http.h"
#include "server/sip.h"

#define ARENA_BYTES    ((size_t)64 << 20)
#define ARENA_PER_BYTE 32

/* Conversations are found only by the same key with the same salt on the same model. The hash is
 * keyed by a secret of this process, so nobody can aim at another's space. */
static int set_space(struct exchange *ex) {
    const struct server *server = ex->server;
    const char *parts[] = {server->options.api_key ? server->options.api_key : "", ex->request.salt,
                           server->rules.names[0]};
    struct buf text;
    buf_open(&text, 1 << 20);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint64_t size = strlen(parts[i]); /* before each part, so that no two joinings are equal */
        buf_add(&text, &size, sizeof size);
        buf_str(&text, parts[i]);
    }
    bool failed = text.failed;
    if (!failed) sip_hash128(server->space_key, text.data, text.size, ex->request.sampling.space);
    buf_close(&text);
    return failed ? oai_refuse(&ex->error, 503, "overloaded", NULL, "Out of memory.") : 0;
}

/* Templates and tokenizers name their own places; a client knows its fields. */
static void name_field(struct fault *fault, const struct oai_request *request) {
    const char *field = request->prompt_field;
    if (fault->code == ERR_NOMEM || !field || strcmp(fault->field, field) == 0) return;
    struct fault own = *fault;
    fault_set(fault, own.code, field, "%s%s%s", own.field, own.field[0] ? ": " : "", own.text);
}

static int find_prompt(struct exchange *ex) {
    const struct oai_request *request = &ex->request;
    const struct engine *engine = ex->server->engine;
    struct fault fault = {0};
    int rc = 0;
    if (request->context)
        rc = engine_render_chat(engine, request->context, &ex->arena, &ex->prompt, &fault);
    else if (request->text)
        rc = engine_tokenize(engine, request->text, strlen(request->text), request->add_special,
                             request->parse_special, &ex->arena, &ex->prompt, &fault);
    else
        ex->prompt = (struct engine_ids){(int32_t *)(uintptr_t)request->ids, request->id_count};
    if (!rc) return 0;
    if (!fault.code) fault_set(&fault, rc, NULL, "%s", err_text(rc));
    if (rc == ERR_LIMIT && !fault.field[0] && request->kind != OAI_TOKENIZE)
        return oai_refuse(&ex->error, 400, "context_length_exceeded", request->prompt_field,
                          "This model's maximum context length is %d tokens. However, your %s "
                          "resulted in %s. Please reduce the length of the %s.",
                          ex->server->rules.info->max_model_len, request->prompt_field, fault.text,
                          request->prompt_field);
    name_field(&fault, request);
    return oai_refuse_fault(&ex->error, &fault);
}

static int make_seed(struct exchange *ex) {
    if (ex->request.seed_given) return 0;
    uint64_t *seed = &ex->request.sampling.seed;
    CHECK(getrandom(seed, sizeof *seed, 0) == (ssize_t)sizeof *seed);
    return 0;
}

static int finish_generation(struct exchange *ex) {
    struct engine_request *sampling = &ex->request.sampling;
    struct fault fault = {0};
    if (oai_fit(&ex->request, ex->prompt.count, &ex->server->rules, &ex->error)) return -1;
    sampling->prompt = ex->prompt.ids;
    sampling->prompt_count = (int32_t)ex->prompt.count;
    if (make_seed(ex) || set_space(ex)) return -1;
    if (engine_check(ex->server->engine, sampling, &fault))
        return oai_refuse_fault(&ex->error, &fault);
    return 0;
}

static int finish_text(struct exchange *ex) {
    struct answer *answer = &ex->answer;
    if (ex->request.kind == OAI_TOKENIZE)
        oai_render_tokens(&answer->body, ex->server->engine, &ex->prompt,
                          ex->request.return_token_strs);
    else
        oai_render_text(&answer->body, ex->server->engine, ex->request.ids, ex->request.id_count);
    answer->status = 200;
    return 0;
}

static int prepare(struct exchange *ex) {
    enum oai_kind kind = ex->request.kind;
    const struct oai_rules *rules = &ex->server->rules;
    if (oai_parse_json(ex->body.data ? ex->body.data : "", ex->body.size, rules, &ex->tree,
                       &ex->error) ||
        oai_parse(kind, ex->tree, rules, &ex->arena, &ex->request, &ex->error) || find_prompt(ex))
        return -1;
    return kind == OAI_CHAT || kind == OAI_COMPLETION ? finish_generation(ex) : finish_text(ex);
}

void prepare_run(uv_work_t *work) {
    struct exchange *ex = work->data;
    arena_open(&ex->arena, ARENA_BYTES + ARENA_PER_BYTE * ex->body.size);
    prepare(ex);
    /* What the job needs lies in the arena; the tree is many times the body and goes now. */
    oai_request_close(&ex->request);
    json_free(ex->tree);
    ex->tree = NULL;
    ex->request.text = ex->request.salt = NULL;
}
