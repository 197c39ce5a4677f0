/* A request body, as the daemon's pool sees it. The first byte picks the endpoint, strictness and
 * whether the model calls tools.
 * What is accepted must lie within the limits the engine relies on. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/json.h"
#include "server/oai/kind.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct engine_info info = {
    .vocab = 1000,
    .max_logprobs = ENGINE_TOP_MAX,
    .max_model_len = 64,
    .loads_adapters = true,
    .sampling = {.temperature = 0.5f, .top_p = 0.9f, .min_p = 0, .repetition = 1, .top_k = 20}};

static void check_ids(const int32_t *ids, size_t count) {
    for (size_t i = 0; i < count; i++) CHECK(ids[i] >= 0 && ids[i] < info.vocab);
}

static void check_sampling(const struct engine_request *s) {
    CHECK(s->temperature >= 0 && s->temperature <= (float)OAI_TEMPERATURE_MAX);
    CHECK(s->top_p >= 0 && s->top_p <= 1);
    CHECK(s->min_p >= 0 && s->min_p <= 1 && s->repetition > 0 && s->top_k >= 0);
    CHECK(fabsf(s->presence) <= 2 && fabsf(s->frequency) <= 2);
    CHECK(s->prompt_top_logprobs >= 0 && s->prompt_top_logprobs <= ENGINE_TOP_MAX);
    CHECK(s->top_logprobs >= -1 && s->top_logprobs <= ENGINE_TOP_MAX && s->min_tokens >= 0);
    CHECK(s->stop_count >= 0 && s->stop_count <= OAI_STOPS_MAX);
    for (int32_t i = 0; i < s->stop_count; i++)
        CHECK(s->stops[i].size > 0 && s->stops[i].size <= OAI_STOP_BYTES);
    check_ids(s->stop_ids, (size_t)s->stop_id_count);
    for (int32_t i = 0; i < s->bias_count; i++) {
        check_ids(&s->bias[i].token, 1);
        CHECK(fabsf(s->bias[i].bias) <= 100);
    }
    CHECK(s->kv.budget == -1 || s->kv.budget > 0);
    CHECK(s->kv.option_count >= 0 && s->kv.option_count <= ENGINE_KV_OPTIONS);
    for (int32_t i = 0; i < s->kv.option_count; i++)
        CHECK(s->kv.options[i].name && s->kv.options[i].number >= 0);
}

static void check_accepted(struct oai_request *request, const struct oai_rules *rules,
                           const uint8_t *data) {
    struct oai_error error;
    if (request->kind->work) {
        CHECK(request->adapter);
        return;
    }
    check_sampling(&request->sampling);
    int32_t max_tokens = -1;
    CHECK(request->prompt_count >= 1 && request->prompt_count <= OAI_PROMPTS_MAX);
    CHECK(request->n >= 1 && request->n * request->prompt_count <= OAI_CHOICES_MAX);
    CHECK((request->context != NULL) + (request->prompts != NULL) == 1);
    for (int i = 0; request->prompts && i < request->prompt_count; i++) {
        const struct oai_prompt *prompt = &request->prompts[i];
        CHECK((prompt->text != NULL) + (prompt->ids != NULL) + (prompt->mixed != NULL) +
                  (prompt->pair != NULL) ==
              1);
        check_ids(prompt->ids, prompt->id_count);
    }
    CHECK(request->prompt_field && request->salt && request->session);
    CHECK((request->tools.count > 0) == (request->tools.form != NULL));
    CHECK(request->tools.count <= OAI_TOOLS_MAX);
    for (int i = 0; i < request->tools.count; i++)
        CHECK(strlen(request->tools.names[i]) <= OAI_TOOL_NAME_BYTES);
    if (!request->kind->form) return;
    if (oai_fit(request, request->prompt_field, data[0], rules, &max_tokens, &error)) return;
    CHECK(max_tokens >= 0 && max_tokens + data[0] <= info.max_model_len);
    CHECK(request->sampling.min_tokens <= max_tokens);
}

/* The bits that neither strictness nor tools take. */
static const struct oai_kind *kind_of(uint8_t byte) {
    int count = 0;
    while (oai_kind_at(count)) count++;
    return oai_kind_at(((byte & 3) + (byte >> 4) * 4) % count);
}

/* For texts that are counted in tokens. Lives as long as the program. */
static struct engine *text_engine(void) {
    static struct engine *engine;
    struct fault fault;
    if (!engine)
        CHECK(engine_open(&(struct engine_options){.model_dir = "m"}, &engine, &fault) == 0);
    return engine;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint8_t key[16];
    struct oai_rules rules = {.info = &info,
                              .names = {"m"},
                              .name_count = 1,
                              .body_bytes = 1 << 16,
                              .engine = text_engine()};
    struct oai_request request = {0};
    struct oai_error error = {0};
    struct arena arena;
    struct buf out;
    cJSON *tree = NULL;
    if (size == 0) return 0;
    rules.strict = data[0] & 4;
    rules.tools.form = data[0] & 8 ? &tool_forms[TOOL_FORMAT_HERMES] : NULL;
    arena_open(&arena, 1 << 20);
    int rc = oai_parse_json((const char *)data + 1, size - 1, &rules, &tree, &error);
    if (!rc) rc = oai_parse(kind_of(data[0]), tree, &rules, key, &arena, &request, &error);
    CHECK((rc == 0) == (error.status == 0));
    if (rc) {
        cJSON *object;
        const struct json_limits limits = {.bytes = 1 << 16, .depth = 4, .unique_keys = true};
        CHECK(error.status == 400 || error.status == 404);
        buf_open(&out, 1 << 16);
        oai_render_error(&out, &error);
        CHECK(json_parse(out.data, out.size, &limits, &object, NULL) == 0);
        json_free(object);
        buf_close(&out);
    } else {
        check_accepted(&request, &rules, data);
    }
    oai_request_close(&request);
    json_free(tree);
    arena_close(&arena);
    return 0;
}
