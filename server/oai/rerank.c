/* POST /v1/rerank and /v1/score: how well texts answer a query. The model judges each pair of
 * texts: it reads a chat that asks whether the document meets the requirements, and the score is
 * the probability of "yes" beside that of "no" as the first word of its answer. With the template
 * of Qwen3 this is the prompt of Qwen3-Reranker, token by token. A cross-encoder reads both texts
 * as its tokenizer joins them, and the score is its label. An encoder that makes vectors reads each
 * text alone, and the score is the cosine of the two vectors. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "server/oai/fields.h"

#define DEFAULT_TASK "Given a web search query, retrieve relevant passages that answer the query"

/* --- the model --- */

static int32_t first_token(const struct engine *engine, const char *text) {
    struct engine_ids ids = {0};
    struct arena arena;
    struct fault fault;
    arena_open(&arena, (size_t)1 << 20);
    int rc = engine_tokenize(engine, text, strlen(text), false, false, &arena, &ids, &fault);
    int32_t id = rc == 0 && ids.count > 0 ? ids.ids[0] : -1;
    arena_close(&arena);
    return id;
}

struct oai_verdict oai_find_verdict(const struct engine *engine) {
    struct oai_verdict verdict = {{first_token(engine, "yes"), first_token(engine, "no")}};
    if (verdict.ids[0] == verdict.ids[1] || verdict.ids[0] < 0 || verdict.ids[1] < 0)
        verdict = (struct oai_verdict){{-1, -1}};
    return verdict;
}

static int check_labels(struct oai_reader *r) {
    if (r->rules->info->labels > 1)
        return oai_refuse(r->error, 400, "unsupported_model", NULL,
                          "This model gives %d labels to a pair of texts, not one score.",
                          r->rules->info->labels);
    if (!json_get(r->body, "instruction")) return 0;
    return oai_refuse(
        r->error, 400, "unsupported_parameter", "instruction",
        "Unsupported parameter: 'instruction'. This model judges pairs of texts as it "
        "was trained to.");
}

/* Does the model compare texts by vectors? */
static bool compares_vectors(const struct oai_reader *r) {
    return r->rules->info->whole_texts && !r->rules->info->labels;
}

static int refuse_pair_fields(struct oai_reader *r) {
    static const char *const names[] = {"instruction", "use_activation", "raw_scores"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (json_get(r->body, names[i]))
            return oai_refuse(r->error, 400, "unsupported_parameter", names[i],
                              "Unsupported parameter: '%s'. This model makes vectors of texts, and "
                              "scores are the cosines of these.",
                              names[i]);
    return 0;
}

static int check_judge(struct oai_reader *r) {
    if (r->rules->info->labels) return check_labels(r);
    if (compares_vectors(r)) return refuse_pair_fields(r);
    if (json_get(r->body, "truncate_prompt_tokens"))
        return oai_refuse(r->error, 400, "unsupported_parameter", "truncate_prompt_tokens",
                          "Unsupported parameter: 'truncate_prompt_tokens'. This model reads both "
                          "texts in a chat, which is not shortened.");
    if (!r->rules->info->has_chat_template)
        return oai_refuse(r->error, 400, "unsupported_model", NULL,
                          "This model has no chat template in which it could be asked about a "
                          "text; the option --chat-template gives it one.");
    if (r->rules->verdict.ids[0] < 0)
        return oai_refuse(r->error, 400, "unsupported_model", NULL,
                          "\"yes\" and \"no\" do not begin with different tokens in this model's "
                          "vocabulary, so it cannot judge texts.");
    return 0;
}

/* --- requests --- */

static const char *rerank_text_of(const cJSON *node) {
    const cJSON *text = cJSON_IsObject(node) ? json_get(node, "text") : node;
    return cJSON_IsString(text) ? text->valuestring : NULL;
}

/* Reads a text or a list of texts, each a string or an object with one; *one: it is no list. */
static int read_rerank_texts(struct oai_reader *r, const char *name, const char ***texts,
                             int *count, bool *one) {
    const cJSON *side = json_get(r->body, name), *node;
    char path[OAI_PATH];
    if (!side) return oai_missing_here(r, name);
    *one = !cJSON_IsArray(side);
    *count = *one ? 1 : cJSON_GetArraySize(side);
    if (*count < 1) return oai_invalid(r, name, "expected at least one text");
    if (*count > OAI_INPUTS_MAX)
        return oai_invalid(r, name, "expected at most %d texts, found %d", OAI_INPUTS_MAX, *count);
    *texts = arena_alloc(r->arena, (size_t)*count, sizeof **texts);
    if (!*texts) return oai_no_memory(r);
    node = *one ? side : side->child;
    for (int i = 0; i < *count; i++, node = node->next) {
        if (((*texts)[i] = rerank_text_of(node))) continue;
        oai_path(path, *one ? "%s" : "%s[%d]", name, i);
        return oai_invalid(r, path, "expected a string or an object with 'text', found %s",
                           json_type_name(node));
    }
    return 0;
}

static struct oai_text copy_document(const struct oai_reader *r, const char *text) {
    struct oai_text copy = {0};
    copy.text = json_arena_text(r->arena, text, &copy.size);
    char *own = copy.text ? arena_alloc(r->arena, copy.size + 1, 1) : NULL;
    if (own) memcpy(own, copy.text, copy.size);
    copy.text = own;
    return copy;
}

/* Makes a prompt of each text: the queries are the last. */
static int add_compared(struct oai_reader *r, const char *const *queries, int query_count,
                        const char *const *documents, int count) {
    struct oai_request *out = r->out;
    const int all = count + query_count;
    if (all > OAI_INPUTS_MAX + 1)
        return oai_invalid(r, out->prompt_field,
                           "this model reads each text alone: expected at most %d texts on both "
                           "sides together, found %d",
                           OAI_INPUTS_MAX + 1, all);
    out->prompts = arena_alloc(r->arena, (size_t)all, sizeof *out->prompts);
    if (!out->prompts) return oai_no_memory(r);
    for (int i = 0; i < count; i++) out->prompts[i] = (struct oai_prompt){.text = documents[i]};
    for (int i = 0; i < query_count; i++)
        out->prompts[count + i] = (struct oai_prompt){.text = queries[i]};
    out->prompt_count = all;
    out->query_count = query_count;
    out->add_special = true;
    out->sampling.dimensions = out->dimensions = r->rules->info->width;
    return oai_read_pooling(r);
}

/* Makes a prompt of each pair: `count` documents, one query or as many. */
static int add_pairs(struct oai_reader *r, const char *const *queries, int query_count,
                     const char *const *documents, int count) {
    struct oai_request *out = r->out;
    const char *task = DEFAULT_TASK;
    if (compares_vectors(r)) return add_compared(r, queries, query_count, documents, count);
    if (oai_get_str(r, NULL, r->body, "instruction", &task)) return -1;
    out->prompts = arena_alloc(r->arena, (size_t)count, sizeof *out->prompts);
    if (!out->prompts) return oai_no_memory(r);
    for (int i = 0; i < count; i++) {
        struct oai_pair *pair = arena_alloc(r->arena, 1, sizeof *pair);
        if (!pair) return oai_no_memory(r);
        *pair = (struct oai_pair){task, queries[query_count > 1 ? i : 0], documents[i]};
        out->prompts[i] = (struct oai_prompt){.pair = pair};
    }
    out->prompt_count = count;
    return 0;
}

/* vLLM's field: false asks for the label itself, which only cross-encoders have. */
static int read_activation(struct oai_reader *r) {
    const struct engine_info *info = r->rules->info;
    const bool raw = r->out->bare_ranking && json_get(r->body, "raw_scores");
    const char *field = raw ? "raw_scores" : "use_activation";
    bool activation = !info->labels || info->label_sigmoid, value = activation;
    if (oai_get_bool(r, NULL, r->body, field, &value)) return -1;
    activation = raw ? !value : value;
    r->out->raw_labels = !activation;
    if (activation || info->labels) return 0;
    return oai_refuse(r->error, 400, "unsupported_parameter", field,
                      "Unsupported value for '%s': this model's scores are probabilities.", field);
}

static int judge_pairs(struct oai_reader *r) {
    struct engine_request *sampling = &r->out->sampling;
    if (r->out->query_count) return oai_read_truncation(r);
    if (read_activation(r)) return -1;
    sampling->pooling = r->rules->info->labels ? ENGINE_POOL_LABELS : ENGINE_POOL_NEXT;
    sampling->judged = r->rules->verdict.ids;
    sampling->judged_count = 2;
    sampling->choices = 1;
    sampling->kv.reuse = sampling->kv.retain = false;
    sampling->kv.overflow = ENGINE_OVERFLOW_ERROR;
    r->out->max_tokens = 0;
    return oai_read_truncation(r);
}

cJSON *oai_pair_context(const struct oai_pair *pair) {
    static const char system[] =
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        "provided. Note that the answer can only be \"yes\" or \"no\".";
    struct buf text;
    cJSON *context = cJSON_CreateObject();
    cJSON *messages = context ? cJSON_AddArrayToObject(context, "messages") : NULL;
    cJSON *first = cJSON_CreateObject(), *second = cJSON_CreateObject();
    buf_open(&text, SIZE_MAX / 2);
    buf_fmt(&text, "<Instruct>: %s\n<Query>: %s\n<Document>: %s", pair->task, pair->query,
            pair->document);
    bool made = messages && first && second && !text.failed;
    made = made && cJSON_AddStringToObject(first, "role", "system") &&
           cJSON_AddStringToObject(first, "content", system) &&
           cJSON_AddStringToObject(second, "role", "user") &&
           cJSON_AddStringToObject(second, "content", text.data) &&
           cJSON_AddTrueToObject(context, "add_generation_prompt") &&
           cJSON_AddFalseToObject(context, "enable_thinking");
    buf_close(&text);
    if (made) {
        cJSON_AddItemToArray(messages, first);
        cJSON_AddItemToArray(messages, second);
        return context;
    }
    cJSON_Delete(first);
    cJSON_Delete(second);
    cJSON_Delete(context);
    return NULL;
}

static const struct oai_field rerank_fields[] = {
    {"query", OAI_ANY},
    {"documents", OAI_ANY},
    {"texts", OAI_ANY},
    {"top_n", OAI_ANY},
    {"return_documents", OAI_ANY},
    {"return_text", OAI_ANY},
    {"raw_scores", OAI_ANY},
    {"instruction", OAI_ANY},
    {"use_activation", OAI_ANY},
    {"user", OAI_ANY},
    {"priority", OAI_ANY},
    {"request_id", OAI_ANY},
    {"max_tokens_per_doc", OAI_NEVER},
    {"max_chunks_per_doc", OAI_NEVER},
    {"rank_fields", OAI_NEVER},
    {"truncate_prompt_tokens", OAI_ANY},
    {NULL, OAI_ANY},
};

/* Keeps the texts of the documents, for the answer, beyond the body. */
static int keep_documents(struct oai_reader *r, const char *const *documents, int count) {
    struct oai_text *kept = arena_alloc(r->arena, (size_t)count, sizeof *kept);
    if (!kept) return oai_no_memory(r);
    for (int i = 0; i < count; i++) {
        kept[i] = copy_document(r, documents[i]);
        if (!kept[i].text) return oai_no_memory(r);
    }
    r->out->documents = kept;
    return 0;
}

static int parse_rerank(struct oai_reader *r) {
    struct oai_request *out = r->out;
    const bool texts = json_get(r->body, "texts") != NULL; /* Text Embeddings Inference's shape */
    const char *query = NULL, **documents = NULL, *field = texts ? "texts" : "documents";
    bool returned = !texts, one = false;
    int count = 0;
    out->prompt_field = field;
    out->query_field = "query";
    out->prompt_list = true;
    out->bare_ranking = texts;
    if (texts && json_get(r->body, "documents"))
        return oai_invalid(r, "texts", "give either 'texts' or 'documents'");
    if (check_judge(r) || oai_get_str(r, NULL, r->body, "query", &query)) return -1;
    if (!query) return oai_missing_here(r, "query");
    if (read_rerank_texts(r, field, &documents, &count, &one)) return -1;
    if (one) return oai_invalid(r, field, "expected an array of texts");
    out->top = count;
    if (oai_get_int(r, NULL, r->body, "top_n", 1, INT32_MAX, &out->top) ||
        oai_get_bool(r, NULL, r->body, texts ? "return_text" : "return_documents", &returned) ||
        add_pairs(r, &query, 1, documents, count) ||
        (returned && keep_documents(r, documents, count)))
        return -1;
    if (out->top > count) out->top = count;
    return judge_pairs(r);
}

static const struct oai_field score_fields[] = {
    {"text_1", OAI_ANY},      {"text_2", OAI_ANY},
    {"instruction", OAI_ANY}, {"use_activation", OAI_ANY},
    {"user", OAI_ANY},        {"priority", OAI_ANY},
    {"request_id", OAI_ANY},  {"truncate_prompt_tokens", OAI_ANY},
    {NULL, OAI_ANY},
};

static int parse_score(struct oai_reader *r) {
    struct oai_request *out = r->out;
    const char **first = NULL, **second = NULL;
    bool one = false, other = false;
    int first_count = 0, count = 0;
    if (check_judge(r) || read_rerank_texts(r, "text_1", &first, &first_count, &one) ||
        read_rerank_texts(r, "text_2", &second, &count, &other))
        return -1;
    out->prompt_field = "text_2";
    out->query_field = "text_1";
    out->prompt_list = !other;
    out->query_list = !one;
    if (first_count > 1 && first_count != count)
        return oai_invalid(r, "text_2",
                           "expected as many texts as 'text_1' has (%d), or one text there; "
                           "found %d",
                           first_count, count);
    if (add_pairs(r, first, first_count, second, count)) return -1;
    return judge_pairs(r);
}

/* --- answers --- */

/* Sums are of doubles, in the numbers' order. A vector of zeros is like no other. */
static double cosine_of(const float *a, const float *b, int count) {
    double product = 0, a_sum = 0, b_sum = 0;
    for (int i = 0; i < count; i++) {
        product += (double)a[i] * (double)b[i];
        a_sum += (double)a[i] * (double)a[i];
        b_sum += (double)b[i] * (double)b[i];
    }
    return a_sum > 0 && b_sum > 0 ? product / sqrt(a_sum) / sqrt(b_sum) : 0;
}

/* Returns how many scores the answer has. */
static int score_count_of(const struct oai_answer *answer) {
    return answer->job_count - answer->request->query_count;
}

/* The vectors' cosine, the model's label, or the softmax over both words. */
static double rerank_score_of(const struct oai_answer *answer, int index) {
    const struct engine_info *info = answer->rules->info;
    const struct oai_request *request = answer->request;
    const float *pooled = answer->jobs[index].pooled;
    const int query = score_count_of(answer) + (request->query_count > 1 ? index : 0);
    if (request->query_count)
        return cosine_of(pooled, answer->jobs[query].pooled, request->dimensions);
    const double label = (double)pooled[0];
    if (info->labels) return request->raw_labels ? label : 1 / (1 + exp(-label));
    return 1 / (1 + exp((double)pooled[1] - (double)pooled[0]));
}

struct ranked {
    double score;
    int index;
};

/* The best first; of equals that which came first. */
static int compare_ranked(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? 1 : -1;
    return x->index - y->index;
}

static void rerank_write_result(struct buf *out, const struct oai_request *request,
                                const struct ranked *ranked) {
    const bool bare = request->bare_ranking;
    buf_fmt(out, "{\"index\":%d,\"%s\":", ranked->index, bare ? "score" : "relevance_score");
    json_write_num(out, ranked->score);
    if (request->documents) {
        const struct oai_text *document = &request->documents[ranked->index];
        buf_str(out, bare ? ",\"text\":" : ",\"document\":{\"text\":");
        json_write_str(out, document->text, document->size);
        if (!bare) buf_char(out, '}');
    }
    buf_char(out, '}');
}

static void write_ranked(struct buf *out, const struct oai_request *request,
                         const struct ranked *ranked) {
    buf_char(out, '[');
    for (int i = 0; i < request->top; i++) {
        if (i) buf_char(out, ',');
        rerank_write_result(out, request, &ranked[i]);
    }
    buf_char(out, ']');
}

static void write_ranking(struct buf *out, const struct oai_answer *answer) {
    const struct oai_request *request = answer->request;
    const int count = score_count_of(answer);
    struct ranked *ranked = mem_try_alloc((size_t)count, sizeof *ranked);
    if (!ranked) {
        out->failed = true;
        return;
    }
    for (int i = 0; i < count; i++) ranked[i] = (struct ranked){rerank_score_of(answer, i), i};
    qsort(ranked, (size_t)count, sizeof *ranked, compare_ranked);
    if (request->bare_ranking) {
        write_ranked(out, request, ranked);
    } else {
        buf_fmt(out, "{\"id\":\"%s\",\"model\":", answer->id);
        json_write_str(out, answer->model, strlen(answer->model));
        buf_str(out, ",\"results\":");
        write_ranked(out, request, ranked);
        oai_render_read_usage(out, answer);
        buf_char(out, '}');
    }
    mem_free(ranked);
}

static void rerank_write_scores(struct buf *out, const struct oai_answer *answer) {
    buf_fmt(out,
            "{\"id\":\"%s\",\"object\":\"list\",\"created\":%" PRId64 ",\"model\":", answer->id,
            answer->created);
    json_write_str(out, answer->model, strlen(answer->model));
    buf_str(out, ",\"data\":[");
    for (int i = 0; i < score_count_of(answer); i++) {
        buf_fmt(out, "%s{\"index\":%d,\"object\":\"score\",\"score\":", i ? "," : "", i);
        json_write_num(out, rerank_score_of(answer, i));
        buf_char(out, '}');
    }
    buf_char(out, ']');
    oai_render_read_usage(out, answer);
    buf_char(out, '}');
}

/* --- the rows --- */

static const struct oai_form ranking = {
    .id_prefix = "rerank-",
    .may_be_empty = true,
    .answer = write_ranking,
};

static const struct oai_form scores = {
    .id_prefix = "score-",
    .may_be_empty = true,
    .answer = rerank_write_scores,
};

const struct oai_kind oai_rerank = {
    .path = "/v1/rerank",
    .schema = "RerankRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = rerank_fields,
    .parse = parse_rerank,
    .form = &ranking,
};

/* Cohere's clients ask for this path. */
const struct oai_kind oai_rerank_v2 = {
    .path = "/v2/rerank",
    .schema = "RerankRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = rerank_fields,
    .parse = parse_rerank,
    .form = &ranking,
};

const struct oai_kind oai_score = {
    .path = "/v1/score",
    .schema = "ScoreRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = score_fields,
    .parse = parse_score,
    .form = &scores,
};
