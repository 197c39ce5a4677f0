/* Latent attention: DeepSeek's, and that of the families which took it over. */
#include <math.h>

#include "base/json.h"
#include "model/config_family.h"
#include "model/internal.h"

/* transformers, DeepseekV3: all heads read one entry, whatever number of them the file says. The
 * two norms inside have an epsilon of their own. */
int model_config_read_latent(const cJSON *root, const struct family *family,
                             struct model_config *out, struct fault *fault) {
    static const char *const keys[] = {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                                       "v_head_dim"};
    int64_t n[4] = {0}, rank = model_config_has(root, "q_lora_rank") ? 0 : family->q_rank;
    bool neighbours = true;
    int rc = 0;
    for (size_t i = 0; i < 4 && !rc; i++) {
        if (!json_get(root, keys[i])) return fault_set(fault, ERR_INVALID, keys[i], "missing");
        rc = json_int(root, NULL, keys[i], 1, 1024, &n[i], fault);
    }
    if (!rc) rc = json_int(root, NULL, "q_lora_rank", 1, 1 << 16, &rank, fault);
    if (!rc) rc = json_bool(root, NULL, "rope_interleave", &neighbours, fault);
    if (rc) return rc;
    if (out->heads_q > KERN_LATENT_HEADS_MAX)
        return fault_set(fault, ERR_UNSUPPORTED, "num_attention_heads",
                         "%d heads with latent attention; at most %d are supported", out->heads_q,
                         KERN_LATENT_HEADS_MAX);
    if (n[0] % 2 || n[2] % 2)
        return fault_set(fault, ERR_UNSUPPORTED, n[0] % 2 ? keys[0] : keys[2],
                         "an odd number, %lld, is not supported",
                         (long long)(n[0] % 2 ? n[0] : n[2]));
    out->latent = (struct kern_latent){.heads = out->heads_q,
                                       .rank = (int)n[0],
                                       .still = (int)n[1],
                                       .turned = (int)n[2],
                                       .dim_v = (int)n[3],
                                       .neighbours = neighbours,
                                       .eps = 1e-6f};
    out->q_rank = (int)rank;
    out->q_latent = rank > 0;
    out->q_from_input = !rank;
    out->heads_kv = 1;
    out->head_dim = (int)(n[0] + n[2]);
    return 0;
}

int model_config_check_latent(const struct family *family, struct model_config *out,
                              struct fault *fault) {
    out->attend_scale = 1 / sqrtf((float)latent_query_dim(out));
    if (!out->qkv_bias) return 0;
    return fault_set(fault, ERR_UNSUPPORTED, "attention_bias", "true is not supported in %s models",
                     family->model_type);
}
