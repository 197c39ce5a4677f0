/* POST /v1/embeddings: texts in, one vector for each. The engine reads each text as a prompt, in
 * the same steps as chats, and hands over the hidden states of its tokens, pooled; here vectors are
 * shortened, normalised and written. */
#include <inttypes.h>
#include <math.h>
#include <nettle/base64.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "server/oai/fields.h"

/* --- the request --- */

static const struct oai_field fields[] = {
    {"input", OAI_ANY},
    {"encoding_format", OAI_ANY},
    {"embed_dtype", OAI_ANY},
    {"endianness", OAI_ANY},
    {"dimensions", OAI_ANY},
    {"user", OAI_ANY},
    {"normalize", OAI_ANY},
    {"prompt_name", OAI_ANY},
    {"add_special_tokens", OAI_ANY},
    {"truncate_prompt_tokens", OAI_ANY},
    {"priority", OAI_ANY},
    {"request_id", OAI_ANY},
    {"embedding_types", OAI_NEVER},
    {NULL, OAI_ANY},
};

int oai_read_pooling(struct oai_reader *r) {
    const struct engine_info *info = r->rules->info;
    struct engine_request *sampling = &r->out->sampling;
    if (info->labels)
        return oai_refuse(r->error, 400, "unsupported_model", NULL,
                          "This model judges pairs of texts and makes no vectors: it serves "
                          "/v1/rerank and /v1/score.");
    if (info->pooling == ENGINE_POOL_NONE)
        return oai_refuse(r->error, 400, "unsupported_model", NULL,
                          "This model's files ask for %s, which this server does not have. Its "
                          "option --pooling chooses another way.",
                          info->pooling_other);
    sampling->pooling = info->pooling;
    sampling->choices = 1;
    sampling->kv.reuse = sampling->kv.retain = false;
    sampling->kv.overflow = ENGINE_OVERFLOW_ERROR;
    r->out->max_tokens = 0;
    r->out->parse_special = true;
    return 0;
}

/* Texts of numbers are written on the loop, where nobody else is served meanwhile; base64 costs an
 * eighth of it. */
int oai_check_numbers(const struct oai_reader *r, const char *field) {
    const struct oai_request *out = r->out;
    const int64_t numbers = (int64_t)out->prompt_count * out->dimensions;
    const int64_t most = out->base64 ? OAI_NUMBERS_BASE64 : OAI_NUMBERS_FLOAT;
    if (numbers <= most) return 0;
    return oai_invalid(r, field,
                       "an answer has at most %lld numbers in this encoding_format, and %d inputs "
                       "of %d dimensions have %lld; send fewer inputs at a time%s",
                       (long long)most, out->prompt_count, out->dimensions, (long long)numbers,
                       out->base64 ? "" : ", or ask for base64");
}

/* vLLM's fields choose other numbers; a client that asks for them would misread these. */
static int check_number_format(struct oai_reader *r) {
    const char *type = NULL, *order = NULL;
    if (oai_get_str(r, NULL, r->body, "embed_dtype", &type) ||
        oai_get_str(r, NULL, r->body, "endianness", &order))
        return -1;
    if (type && strcmp(type, "float32") != 0)
        return oai_invalid(r, "embed_dtype", "expected \"float32\", found \"%.40s\"", type);
    if (!order || strcmp(order, "native") == 0 || strcmp(order, "little") == 0) return 0;
    return oai_invalid(r, "endianness", "expected \"native\" or \"little\", found \"%.40s\"",
                       order);
}

static int read_vector_encoding(struct oai_reader *r) {
    const char *format = NULL;
    if (check_number_format(r) || oai_get_str(r, NULL, r->body, "encoding_format", &format))
        return -1;
    r->out->base64 = format && strcmp(format, "base64") == 0;
    if (!format || r->out->base64 || strcmp(format, "float") == 0) return 0;
    return oai_invalid(r, "encoding_format", "expected \"float\" or \"base64\", found \"%.40s\"",
                       format);
}

static int refuse_prompt_name(const struct oai_reader *r, const char *name) {
    const struct engine_info *info = r->rules->info;
    char names[256] = "";
    size_t used = 0;
    for (int i = 0; i < info->prompt_count && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s\"%.40s\"", i ? ", " : "",
                                 info->prompts[i].name);
    return oai_invalid(r, "prompt_name", "\"%.40s\" is no prompt of the model's files; %s%s", name,
                       names[0] ? "they have " : "they name none", names);
}

/* Puts a prompt that the model's files name in front of the texts, as sentence-transformers does.
 */
static int read_prompt_name(struct oai_reader *r) {
    const struct engine_info *info = r->rules->info;
    const char *name = NULL;
    int i = 0;
    if (oai_get_str(r, NULL, r->body, "prompt_name", &name)) return -1;
    if (!name) return 0;
    while (i < info->prompt_count && strcmp(info->prompts[i].name, name) != 0) i++;
    if (i == info->prompt_count) return refuse_prompt_name(r, name);
    const char *before = info->prompts[i].text;
    for (i = 0; i < r->out->prompt_count; i++) {
        struct oai_prompt *prompt = &r->out->prompts[i];
        if (!prompt->text)
            return oai_invalid(r, "prompt_name", "a prompt is put in front of texts, not of ids");
        const size_t size = strlen(before) + strlen(prompt->text) + 1;
        char *text = arena_alloc(r->arena, size, 1);
        if (!text) return oai_no_memory(r);
        snprintf(text, size, "%s%s", before, prompt->text);
        prompt->text = text;
    }
    return 0;
}

static int parse(struct oai_reader *r) {
    struct oai_request *out = r->out;
    bool normalise = true;
    const char *unused = NULL;
    out->dimensions = r->rules->info->width;
    if (oai_read_pooling(r) || oai_read_texts(r, "input", OAI_INPUTS_MAX) || read_prompt_name(r) ||
        read_vector_encoding(r) ||
        oai_get_int(r, NULL, r->body, "dimensions", 1, out->dimensions, &out->dimensions) ||
        oai_get_bool(r, NULL, r->body, "normalize", &normalise) || oai_read_truncation(r) ||
        oai_get_str(r, NULL, r->body, "user", &unused))
        return -1;
    out->raw_vectors = !normalise;
    out->sampling.dimensions = out->dimensions;
    return oai_check_numbers(r, "input");
}

/* --- the answer --- */

/* The norm is summed in double, in the numbers' order. A vector of zeros stays as it is. */
static void shorten_vector(float *to, const float *from, int count, bool raw) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += (double)from[i] * (double)from[i];
    const double norm = raw || !(sum > 0) ? 1 : sqrt(sum);
    for (int i = 0; i < count; i++) to[i] = (float)((double)from[i] / norm);
}

static void write_floats(struct buf *out, const float *vector, int count) {
    buf_char(out, '[');
    for (int i = 0; i < count; i++) buf_fmt(out, i ? ",%.9g" : "%.9g", (double)vector[i]);
    buf_char(out, ']');
}

/* The numbers' bytes, little-endian, as OpenAI's SDK for Python reads them. */
static void write_base64(struct buf *out, const float *vector, int count) {
    enum { NUMBERS = 48, BYTES = 4 * NUMBERS }; /* whole groups of three bytes */
    uint8_t bytes[BYTES];
    char text[BASE64_ENCODE_RAW_LENGTH(BYTES)];
    buf_char(out, '"');
    for (int at = 0; at < count; at += NUMBERS) {
        const int some = count - at < NUMBERS ? count - at : NUMBERS;
        for (int i = 0; i < some; i++) {
            uint32_t word;
            memcpy(&word, &vector[at + i], sizeof word);
            for (int k = 0; k < 4; k++) bytes[4 * i + k] = (uint8_t)(word >> (8 * k));
        }
        base64_encode_raw(text, (size_t)some * 4, bytes);
        buf_add(out, text, BASE64_ENCODE_RAW_LENGTH((size_t)some * 4));
    }
    buf_char(out, '"');
}

/* The job's vector stays as it is: an answer may be written twice. */
void oai_write_vector(struct buf *out, const struct oai_request *request, const float *pooled) {
    const int count = request->dimensions;
    float *vector = mem_try_alloc((size_t)count, sizeof *vector);
    if (!vector) {
        out->failed = true;
        return;
    }
    shorten_vector(vector, pooled, count, request->raw_vectors);
    if (request->base64)
        write_base64(out, vector, count);
    else
        write_floats(out, vector, count);
    mem_free(vector);
}

static void write_answer(struct buf *out, const struct oai_answer *answer) {
    buf_str(out, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < answer->job_count; i++) {
        buf_fmt(out, "%s{\"object\":\"embedding\",\"index\":%d,\"embedding\":", i ? "," : "", i);
        oai_write_vector(out, answer->request, answer->jobs[i].pooled);
        buf_char(out, '}');
    }
    buf_str(out, "],\"model\":");
    json_write_str(out, answer->model, strlen(answer->model));
    oai_render_read_usage(out, answer);
    buf_char(out, '}');
}

void oai_render_read_usage(struct buf *out, const struct oai_answer *answer) {
    const uint64_t tokens = oai_prompt_total(answer);
    buf_fmt(out, ",\"usage\":{\"prompt_tokens\":%" PRIu64 ",\"total_tokens\":%" PRIu64 "}", tokens,
            tokens);
}

/* --- the row --- */

static const struct oai_form form = {
    .id_prefix = "embd-",
    .may_be_empty = true,
    .answer = write_answer,
};

const struct oai_kind oai_embeddings = {
    .path = "/v1/embeddings",
    .schema = "EmbeddingsRequest",
    .groups = OAI_FIELDS_ANY,
    .fields = fields,
    .parse = parse,
    .form = &form,
};
