/* config.json, then after a NUL generation_config.json. What is accepted must be within bounds. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_config(const struct model_config *c) {
    CHECK(c->layers >= 1 && c->layers <= 512 && c->vocab >= 1 && c->max_positions >= 1);
    CHECK(c->heads_kv >= 1 && c->heads_q % c->heads_kv == 0);
    CHECK(c->head_dim >= 2 && c->head_dim <= 1024 && c->head_dim % 2 == 0);
    CHECK((int64_t)c->heads_q * c->head_dim <= 1 << 20 && c->d_model >= 1 && c->d_ff >= 1);
    CHECK(c->bos >= -1 && c->bos < c->vocab);
    CHECK(c->eos_count >= 0 && c->eos_count <= MODEL_EOS_MAX && c->top_k >= -1);
    for (int i = 0; i < c->eos_count; i++) CHECK(c->eos[i] >= 0 && c->eos[i] < c->vocab);
    CHECK(isfinite(c->rope_scale) && c->rope_scale > 0);
    for (int j = 0; j < c->head_dim / 2; j++)
        CHECK(isfinite(c->inv_freq[j]) && c->inv_freq[j] >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *config = (const char *)data;
    const char *end = size ? memchr(data, 0, size) : NULL;
    const char *generation = end ? end + 1 : NULL;
    size_t config_size = end ? (size_t)(end - config) : size;
    struct model_config out;
    struct fault fault = {0};
    int rc = model_config_parse(config, config_size, generation,
                                generation ? size - config_size - 1 : 0, 0, &out, &fault);
    CHECK(rc == fault.code && (rc == 0) == (out.inv_freq != NULL));
    CHECK(!rc || (fault.field[0] && fault.text[0]));
    if (!rc) check_config(&out);
    model_config_close(&out);
    return 0;
}
