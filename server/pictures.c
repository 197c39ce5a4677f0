/* The pictures of a request: from base64 in its body to tiles. Runs in the libuv worker, as
 * prepare.c does, and waits there for the processes that decode (picture/decoder.h). */
#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "picture/decoder.h"
#include "server/fetch.h"
#include "server/loop.h"

static int read_picture(const struct exchange *ex, const struct oai_picture *from, int64_t deadline,
                        struct picture **out, struct fault *fault) {
    const struct fetch_limits limits = {PICTURE_FILE_MAX, deadline, &ex->left};
    struct picture_rgb rgb = {0};
    uint8_t *bytes;
    size_t size = 0;
    if (atomic_load_explicit(&ex->left, memory_order_relaxed))
        return fault_set(fault, ERR_STOPPED, NULL, "nobody waits for the picture");
    int rc = from->remote
                 ? fetch_read(ex->server->fetch, from->base64, &limits, &bytes, &size, fault)
                 : oai_decode_base64(from, &bytes, &size, fault);
    if (!rc) rc = picture_read(bytes, size, deadline, &rgb, fault);
    mem_free(bytes);
    if (!rc) rc = picture_prepare(&rgb, ex->model->rules.info->pictures, from->low, out, fault);
    mem_free(rgb.pixels);
    return rc;
}

static int refuse_picture(struct exchange *ex, const struct oai_picture *from,
                          const struct fault *why) {
    struct fault fault;
    fault_set(&fault, why->code, from->field, "%s", why->text);
    return oai_refuse_fault(&ex->error, &fault);
}

/* Ends before the pictures that no longer fit the context are decoded. */
static int check_picture_tokens(struct exchange *ex, int64_t tokens) {
    const struct oai_request *request = &ex->request;
    if (tokens < request->longest) return 0;
    oai_refuse(
        &ex->error, 400, "context_length_exceeded", request->prompt_field,
        "This model's maximum context length is %d tokens. However, your pictures alone have "
        "%lld. Please send fewer, or with 'detail': 'low'.",
        request->longest, (long long)tokens);
    return oai_refuse_context(&ex->error, (size_t)tokens, (size_t)request->longest);
}

int prepare_pictures(struct exchange *ex) {
    const struct oai_request *request = &ex->request;
    const int64_t deadline = clock_ns() + (int64_t)PICTURES_DECODE_MS * 1000000;
    int64_t tokens = 0;
    if (!request->picture_count || ex->pictures) return 0;
    if (request->truncate)
        return oai_refuse(&ex->error, 400, "invalid_value", "truncate_prompt_tokens",
                          "Invalid value for 'truncate_prompt_tokens': a prompt with pictures is "
                          "not cut.");
    if (request->sampling.prompt_logprobs)
        return oai_refuse(&ex->error, 400, "unsupported_parameter", "prompt_logprobs",
                          "Unsupported value for 'prompt_logprobs': a prompt with pictures has no "
                          "scores.");
    ex->pictures = mem_try_alloc((size_t)request->picture_count, sizeof *ex->pictures);
    if (!ex->pictures) {
        exchange_refuse_memory(ex);
        return -1;
    }
    for (int i = 0; i < request->picture_count; i++) {
        struct fault fault = {0};
        if (read_picture(ex, &request->pictures[i], deadline, &ex->pictures[i], &fault))
            return refuse_picture(ex, &request->pictures[i], &fault);
        request->pictures[i].prepared = ex->pictures[i];
        ex->picture_count++;
        tokens += (int64_t)ex->pictures[i]->tiles * ex->pictures[i]->tile_tokens;
        if (check_picture_tokens(ex, tokens)) return -1;
    }
    return 0;
}
