/* Files of published models (tests/data/published.jsonl, made by training/published.py), and files
 * that leave a field out (tests/data/defaults.jsonl, made by training/defaults.py). */
#include <cjson/cJSON.h>
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/internal.h"

#define PUBLISHED_LINE_MAX (1 << 16)

static int parse_tree(const cJSON *tree, struct model_config *out, struct fault *fault) {
    char *text = cJSON_PrintUnformatted(tree);
    *fault = (struct fault){0};
    const int rc = model_config_parse(text, strlen(text), NULL, 0, 0, out, fault);
    cJSON_free(text);
    return rc;
}

/* Calls `check` with each line; returns how many there are. */
static int each_line(const char *name, void (*check)(const cJSON *line)) {
    static char text[PUBLISHED_LINE_MAX];
    char path[PATH_MAX];
    int count = 0;
    snprintf(path, sizeof path, "%s/tests/data/%s", KEEPD_SOURCE_DIR, name);
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file, "%s", path);
    for (; fgets(text, sizeof text, file); count++) {
        cJSON *line = cJSON_Parse(text);
        cr_assert_not_null(line, "%s: line %d", name, count + 1);
        check(line);
        cJSON_Delete(line);
    }
    fclose(file);
    return count;
}

static int64_t number_of(const cJSON *line, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    cr_assert(cJSON_IsNumber(item), "%s", name);
    return (int64_t)item->valuedouble; /* below 2^53 */
}

static void check_published(const cJSON *line) {
    const char *name = cJSON_GetObjectItemCaseSensitive(line, "model")->valuestring;
    struct model_config c;
    struct fault fault;
    if (parse_tree(cJSON_GetObjectItemCaseSensitive(line, "config"), &c, &fault)) {
        cr_expect(false, "%s: %s: %s", name, fault.field, fault.text);
        return;
    }
    cr_expect_eq(model_count_numbers(&c).all, number_of(line, "numbers"), "%s: %lld numbers", name,
                 (long long)model_count_numbers(&c).all);
    cr_expect_eq(model_entry_numbers(&c), number_of(line, "entry"), "%s: %lld for a token", name,
                 (long long)model_entry_numbers(&c));
    cr_expect_eq(c.max_positions, number_of(line, "positions"), "%s: %d positions", name,
                 c.max_positions);
    int windowed = 0;
    for (int i = 0; i < c.layers; i++) windowed += c.per_layer[i].sliding_window > 0;
    cr_expect_eq(windowed, number_of(line, "windowed"), "%s: %d windows", name, windowed);
    cr_expect_eq(c.state_layers, number_of(line, "states"), "%s: %d states", name, c.state_layers);
    model_config_close(&c);
}

Test(published, models_are_read_as_transformers_reads_them) {
    cr_assert(each_line("published.jsonl", check_published) >= 40);
}

/* ---- Fields that a file leaves out ---- */

static bool same_floats(const float *a, const float *b, int count) {
    return (!a && !b) || (a && b && memcmp(a, b, (size_t)count * sizeof *a) == 0);
}

/* Owned arrays are compared, and then their pointers are alike. */
static bool same_configs(struct model_config *a, struct model_config *b) {
    const int half = a->head_dim / 2, layers = a->layers;
    if (b->head_dim / 2 != half || b->layers != layers || b->cache_layers != a->cache_layers)
        return false;
    bool same = same_floats(a->inv_freq, b->inv_freq, half) &&
                same_floats(a->inv_freq_local, b->inv_freq_local, half) && !a->heads == !b->heads &&
                !a->axes == !b->axes;
    same = same && (!a->axes || memcmp(a->axes, b->axes, (size_t)half) == 0);
    for (int i = 0; i < layers && same; i++) {
        const struct model_layer_config *x = &a->per_layer[i], *y = &b->per_layer[i];
        same = x->mixer == y->mixer && x->attends_too == y->attends_too && x->index == y->index &&
               x->heads_kv == y->heads_kv && x->head_dim == y->head_dim && x->reads == y->reads &&
               x->keys_are_values == y->keys_are_values && x->wide_ff == y->wide_ff &&
               x->sliding_window == y->sliding_window && x->rotated == y->rotated &&
               x->local == y->local && x->routed == y->routed && x->no_network == y->no_network;
    }
    struct model_config left = *a, right = *b;
    left.heads = right.heads = NULL;
    left.axes = right.axes = NULL;
    left.inv_freq = left.inv_freq_local = left.inv_freq_none = NULL;
    right.inv_freq = right.inv_freq_local = right.inv_freq_none = NULL;
    left.per_layer = right.per_layer = NULL;
    left.rotations = right.rotations = NULL;
    return same && memcmp(&left, &right, sizeof left) == 0;
}

/* Fields that keepd asks for where transformers has a default, which is one model's size and says
 * nothing about another's. keepd's name of a field that has several, or what it needs instead, is
 * in the second column; in the third the family that asks for it, where others do not. */
static const struct asked {
    const char *field, *named, *family;
} asked[] = {
    {"hidden_size", "hidden_size", NULL},
    {"intermediate_size", "intermediate_size", NULL},
    {"max_position_embeddings", "max_position_embeddings", NULL},
    {"num_attention_heads", "num_attention_heads", NULL},
    {"num_hidden_layers", "num_hidden_layers", NULL},
    {"vocab_size", "vocab_size", NULL},
    {"moe_intermediate_size", "moe_intermediate_size", NULL},
    {"moe_intermediate_size", "intermediate_size", "qwen3_5_moe_text"},
    {"moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "nemotron_h"},
    {"num_experts_per_tok", "num_experts_per_tok", NULL},
    {"moe_k", "num_experts_per_tok", "ernie4_5_moe"},
    {"num_local_experts", "num_local_experts", NULL},
    {"num_experts", "num_local_experts", NULL},
    {"n_routed_experts", "num_local_experts", NULL},
    {"moe_num_experts", "num_local_experts", "ernie4_5_moe"},
    {"kv_lora_rank", "kv_lora_rank", NULL},
    {"qk_nope_head_dim", "qk_nope_head_dim", NULL},
    {"qk_rope_head_dim", "qk_rope_head_dim", NULL},
    {"v_head_dim", "v_head_dim", NULL},
    {"layer_types", "layer_types", "granitemoehybrid"},
    {"layers_block_type", "layers_block_type", "nemotron_h"},
    {"rope_parameters", "rope_scaling", "gpt_oss"},
    {"rope_parameters", "rope_parameters", "ministral3"},
    {"rope_parameters", "rope_parameters", "mistral4"},
};

/* Does the fault say that the family's field is missing, in so many words? */
static bool asks_for(const char *family, const char *field, const struct fault *fault) {
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        const struct asked *a = &asked[i];
        if (!strcmp(a->field, field) && !strcmp(a->named, fault->field) &&
            (!a->family || !strcmp(a->family, family)))
            return !strcmp(fault->text, "missing");
    }
    /* 4096 numbers are no multiple of GLM-4.5's 96 heads */
    return !strcmp(field, "head_dim") && !strcmp(family, "glm4_moe") &&
           !strcmp(fault->field, "hidden_size") && strstr(fault->text, "head_dim is missing");
}

static void check_without(struct model_config *whole, const cJSON *line, const char *field) {
    const char *family = cJSON_GetObjectItemCaseSensitive(line, "model_type")->valuestring;
    struct model_config part;
    struct fault fault;
    cJSON *less = cJSON_Duplicate(line, true);
    cJSON_DeleteItemFromObjectCaseSensitive(less, field);
    if (parse_tree(less, &part, &fault)) {
        cr_expect(asks_for(family, field, &fault), "%s without %s: %s: %s", family, field,
                  fault.field, fault.text);
    } else {
        cr_expect(same_configs(whole, &part), "%s without %s", family, field);
        model_config_close(&part);
    }
    cJSON_Delete(less);
}

static void check_defaults(const cJSON *line) {
    const char *family = cJSON_GetObjectItemCaseSensitive(line, "model_type")->valuestring;
    /* the default of the whole checkpoint is another one than that of its text part */
    const bool of_whole = strstr(line->child->child->valuestring, "Conditional");
    struct model_config whole;
    struct fault fault;
    if (parse_tree(line, &whole, &fault)) {
        cr_expect(false, "%s: %s: %s", family, fault.field, fault.text);
        return;
    }
    for (const cJSON *field = line->child; field; field = field->next)
        if (!strstr(field->string, "_token_id") && /* the tokenizer's, where files say none */
            !(of_whole && !strcmp(field->string, "tie_word_embeddings")))
            check_without(&whole, line, field->string);
    model_config_close(&whole);
}

Test(published, a_field_that_is_left_out_is_the_default_of_transformers) {
    cr_assert(each_line("defaults.jsonl", check_defaults) >= 40);
}
