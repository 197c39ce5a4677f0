/* A request parsed from text, with all objects that must live as long. */
#ifndef KEEPD_TESTS_UNIT_SERVER_OAI_OAI_CASE_H
#define KEEPD_TESTS_UNIT_SERVER_OAI_OAI_CASE_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "server/oai/kind.h"

struct oai_case {
    struct engine_info info;
    struct oai_rules rules;
    struct arena arena;
    cJSON *tree;
    struct oai_request request;
    struct oai_error error;
};

static inline void case_open(struct oai_case *c) {
    *c = (struct oai_case){.info = {.vocab = 1000,
                                    .max_logprobs = ENGINE_TOP_MAX,
                                    .max_model_len = 100,
                                    .sampling = {NAN, NAN, NAN, NAN, -1}}};
    c->rules = (struct oai_rules){.info = &c->info,
                                  .names = {"m", "alias"},
                                  .name_count = 2,
                                  .default_max_tokens = 50,
                                  .seed = -1,
                                  .body_bytes = 1 << 20};
    arena_open(&c->arena, 1 << 20);
}

/* 0 or -1, as oai_parse. */
static inline int case_parse(struct oai_case *c, const struct oai_kind *kind, const char *body) {
    static const uint8_t key[16];
    if (oai_parse_json(body, strlen(body), &c->rules, &c->tree, &c->error)) return -1;
    return oai_parse(kind, c->tree, &c->rules, key, &c->arena, &c->request, &c->error);
}

static inline void case_close(struct oai_case *c) {
    oai_request_close(&c->request);
    json_free(c->tree);
    c->tree = NULL;
    arena_close(&c->arena);
}

#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

#endif
