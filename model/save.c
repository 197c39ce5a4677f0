/* Saves a rounded model. First it makes a plan: which tensors of the files the model uses, and
 * which of them are rounded, by the same walk over slots as loading. Then it writes the head of the
 * new file, whose sizes follow from the plan, and the tensors one by one: copied, or rounded a few
 * rows at a time. */
#include "model/save.h"

#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "kernels/moments.h"
#include "model/base_digest.h"
#include "model/blocks.h"
#include "model/calibrate.h"
#include "model/internal.h"
#include "model/rounding.h"
#include "model/rows.h"
#include "model/save_files.h"
#include "model/vision_weights.h"

#define HEAD_MAX        ((size_t)100 << 20)
#define CONFIG_MAX      ((size_t)16 << 20)
#define NUMBERS_AT_ONCE ((int64_t)4 << 20)
#define ALIGNMENT       32 /* alignment of a GGUF file that states none */

/* The plan for a tensor of the source, by its index in the table. */
struct planned {
    bool used, rounded;
    enum kern_dtype dtype;      /* if it is rounded: KERN_Q8 or KERN_Q4M */
    const struct slot *slot;    /* the slot that it belongs to in this layer */
    int layer, expert, experts; /* expert: number of the matrix; experts: matrices in the tensor */
    int64_t rows, cols;         /* if it is rounded: sizes of all its matrices together */
    size_t bytes;               /* size in the new file */
};

struct saving {
    const struct model_options *options;
    struct model_config config;
    struct weights *weights;
    enum naming naming;
    struct planned *plan; /* [tensors] */
    bool mostly_rounded;  /* rounded tensors take more than half of the new file */
    struct cpu_team *team;
    struct calibration *calibration; /* NULL: none */
    float *inputs;                   /* [cols] of the matrix that is being rounded */
    char *numbers;                   /* rows of the source, converted before they are rounded */
    struct block *blocks;            /* the same rows, rounded */
    uint8_t *bytes;                  /* the same rows in the new file's form */
    struct save_file file;
    uint64_t done;
    size_t written;
    struct fault *fault;
};

/* ---- The plan ---- */

static size_t count_of(const struct saving *s) {
    return weights_count(s->weights);
}

static struct planned *planned_of(struct saving *s, const struct tensor *tensor) {
    return &s->plan[tensor - weights_at(s->weights, 0)];
}

/* Finds a tensor and marks it as used. NULL: the files have none of this name. */
static const struct tensor *use(struct saving *s, const char *name) {
    const struct tensor *tensor = weights_find(s->weights, name);
    if (tensor) planned_of(s, tensor)->used = true;
    return tensor;
}

/* Plans to round a tensor. `place`: its slot, layer, expert and type. */
static int plan_rounding(struct saving *s, const char *name, const struct tensor *tensor,
                         const struct planned *place) {
    struct planned *p = planned_of(s, tensor);
    const int last = tensor->dims - 1;
    size_t bytes;
    (void)gguf_format_block(block_format_of(place->dtype), &bytes);
    *p = *place;
    p->used = p->rounded = true;
    p->cols = tensor->shape[last];
    p->rows = 1;
    for (int i = 0; i < last; i++) p->rows *= tensor->shape[i];
    p->bytes = (size_t)p->rows * (size_t)(p->cols / KERN_BLOCK) * bytes;
    if (p->cols % KERN_BLOCK == 0) return 0;
    return fault_set(s->fault, ERR_UNSUPPORTED, name,
                     "rows of %lld numbers are no whole blocks of %d: the model can be rounded "
                     "while it loads, but not saved",
                     (long long)p->cols, KERN_BLOCK);
}

static int plan_matrix(struct saving *s, const struct slot *slot, enum role role, int layer,
                       int expert) {
    char name[TENSOR_NAME_MAX], other[TENSOR_NAME_MAX];
    tensor_name(name, s->naming, role, layer, expert);
    const struct tensor *tensor = use(s, name);
    const enum quantization to = rounding_format(&s->config, slot, layer, s->options->quantization);
    if (!tensor) return 0; /* an LM head that is the embeddings has no tensor */
    if (tensor_is_split_mxfp4(s->naming, role)) {
        snprintf(other, sizeof other, "%.*sscales", (int)(strlen(name) - strlen("blocks")), name);
        (void)use(s, other);
    }
    if (to == QUANTIZE_NONE && tensor->packed)
        return fault_set(s->fault, ERR_UNSUPPORTED, name,
                         "stays unrounded, and FP8 in blocks cannot be saved");
    if (to == QUANTIZE_NONE || planned_of(s, tensor)->rounded ||
        rounding_is_done(s->weights, s->naming, slot, layer, expert))
        return 0;
    const struct planned place = {.dtype = to == QUANTIZE_Q8 ? KERN_Q8 : KERN_Q4M,
                                  .slot = slot,
                                  .layer = layer,
                                  .expert = expert,
                                  .experts =
                                      tensor_is_stacked(s->naming, role) ? s->config.experts : 1};
    return plan_rounding(s, name, tensor, &place);
}

static int plan_slot(struct saving *s, const struct slot *slot, int layer) {
    int rc = 0;
    for (int i = 0; i < slot->count && !rc; i++) {
        const bool each = slot->experts && !tensor_is_stacked(s->naming, slot->parts[i]);
        const int experts = each ? s->config.experts : 1;
        for (int e = 0; e < experts && !rc; e++) {
            char name[TENSOR_NAME_MAX];
            tensor_name(name, s->naming, slot->parts[i], layer, e);
            if (slot->matrix)
                rc = plan_matrix(s, slot, slot->parts[i], layer, e);
            else
                (void)use(s, name);
        }
    }
    return rc;
}

static int refuse_few_bits(struct fault *fault) {
    return fault_set(fault, ERR_UNSUPPORTED, "quantize-to",
                     "the model's matrices are in few bits already");
}

/* Plans the other tensors. A GGUF file keeps all its tensors: the configuration knows those that no
 * slot has. A directory keeps its encoder of pictures as it is. */
static int plan_rest(struct saving *s) {
    const bool gguf = naming_is_gguf(s->naming);
    size_t rounded = 0, all = 0;
    struct vision_config vision = {0};
    struct fault why = {0};
    if (!gguf && vision_config_of_directory(s->options->dir, &vision, &why)) {
        log_warn("the saved model takes no pictures: %s: %s", why.field, why.text);
        vision.layers = 0;
    }
    for (size_t i = 0; i < count_of(s); i++) {
        struct planned *p = &s->plan[i];
        p->used |=
            gguf || (vision.layers && vision_weights_own(&vision, weights_at(s->weights, i)->name));
        if (p->used && !p->rounded) p->bytes = weights_at(s->weights, i)->bytes;
        if (p->rounded) rounded += p->bytes;
        if (p->used) all += p->bytes;
    }
    s->mostly_rounded = rounded > all / 2;
    return rounded ? 0 : refuse_few_bits(s->fault);
}

static int make_plan(struct saving *s) {
    s->naming = tensor_naming(&s->config, weights_gguf(s->weights) != NULL);
    s->plan = mem_try_alloc(count_of(s), sizeof *s->plan);
    if (!s->plan) return fault_set(s->fault, ERR_NOMEM, "model", "no memory for a table");
    int rc = 0;
    for (size_t i = 0; i < end_slot_count && !rc; i++)
        if (slot_wanted_outside(&end_slots[i], &s->config)) rc = plan_slot(s, &end_slots[i], -1);
    if (!rc && !s->config.tied_embeddings && !s->config.both_ways)
        rc = plan_slot(s, &slot_head, -1);
    for (int l = 0; l < s->config.layers && !rc; l++)
        for (size_t i = 0; i < layer_slot_count && !rc; i++)
            if (slot_wanted(&layer_slots[i], &s->config, l)) rc = plan_slot(s, &layer_slots[i], l);
    return rc ? rc : plan_rest(s);
}

/* ---- Tensors ---- */

static int save_put(struct saving *s, const void *data, size_t bytes) {
    return save_files_put(&s->file, data, bytes, s->fault);
}

/* Rounds rows. `scales`: of an E4M3 matrix; `inputs`: see quantize_blocks; `factors`: see
 * moments_quantize. */
static int round_rows(struct saving *s, const struct tensor *tensor, const struct planned *p,
                      const float *scales, const float *inputs, const float *factors, int64_t first,
                      int64_t count) {
    const struct rows rows = {.tensor = tensor, .first = first, .count = count};
    char *room = rows_need_room(&rows) ? s->numbers : NULL;
    struct fault fault = {0};
    const int64_t bad = scales ? -1 : rows_read(&rows, room, s->team);
    if (bad >= 0)
        return fault_set(s->fault, ERR_INVALID, tensor->name, "element %lld is not a finite number",
                         (long long)bad);
    const struct kern_matrix m = {.data = room ? room : rows_at(&rows),
                                  .dtype = rows_dtype(&rows),
                                  .rows = count,
                                  .cols = p->cols,
                                  .scale = scales ? scales + first : NULL};
    int rc = factors ? moments_quantize(&m, factors, s->blocks, s->team, &fault)
                     : quantize_blocks(&m, p->dtype, inputs, s->blocks, s->team, &fault);
    if (rc) return fault_set(s->fault, rc, tensor->name, "%s", fault.text);
    const size_t blocks = (size_t)(count * (p->cols / KERN_BLOCK));
    block_write(p->dtype, s->blocks, blocks, s->bytes);
    return save_put(s, s->bytes, p->bytes / (size_t)p->rows * (size_t)count);
}

/* Rounds matrix `index` of a tensor that has several. */
static int round_matrix(struct saving *s, const struct tensor *tensor, const struct planned *p,
                        const float *scales, int index) {
    const int64_t step = p->cols < NUMBERS_AT_ONCE ? NUMBERS_AT_ONCE / p->cols : 1;
    const int64_t rows = p->rows / p->experts, end = rows * (index + 1);
    const struct rounding rounding = {
        .config = &s->config, .weights = s->weights, .naming = s->naming, .team = s->team};
    const float *factors =
        p->dtype == KERN_Q4M ? calibration_factors(s->calibration, p->slot, p->layer) : NULL;
    const bool known = p->dtype == KERN_Q4M && !factors &&
                       rounding_inputs(&rounding, p->slot, p->layer, p->expert + index, s->inputs);
    int rc = 0;
    for (int64_t first = rows * index; first < end && !rc; first += step)
        rc = round_rows(s, tensor, p, scales, known ? s->inputs : NULL, factors, first,
                        end - first < step ? end - first : step);
    return rc;
}

static int put_rounded(struct saving *s, const struct tensor *tensor, const struct planned *p) {
    float *scales = NULL;
    int rc = 0;
    if (tensor->dtype == TENSOR_E4M3) {
        scales = mem_try_alloc((size_t)p->rows, sizeof *scales);
        rc = scales
                 ? rounding_read_scales(s->weights, tensor->name, tensor, false, scales, s->fault)
                 : fault_set(s->fault, ERR_NOMEM, tensor->name, "no memory for its scales");
    }
    for (int i = 0; i < p->experts && !rc; i++) rc = round_matrix(s, tensor, p, scales, i);
    mem_free(scales);
    return rc;
}

static int put_padding(struct saving *s, size_t size, size_t alignment) {
    static const char zeros[8] = {0};
    int rc = 0;
    for (; size % alignment && !rc; size++) rc = save_put(s, zeros, 1);
    return rc;
}

static int put_tensors(struct saving *s, size_t alignment) {
    int rc = 0;
    for (size_t i = 0; i < count_of(s) && !rc; i++) {
        const struct tensor *tensor = weights_at(s->weights, i);
        const struct planned *p = &s->plan[i];
        const struct model_options *options = s->options;
        if (!p->used) continue;
        rc = p->rounded ? put_rounded(s, tensor, p) : save_put(s, tensor->data, tensor->bytes);
        if (!rc) rc = put_padding(s, p->bytes, alignment);
        s->done += tensor->bytes;
        s->written += p->bytes;
        if (options->progress && !rc &&
            !options->progress(options->progress_arg, s->done, weights_bytes(s->weights),
                               "weights"))
            rc = fault_set(s->fault, ERR_STOPPED, "model", "rounding was stopped");
    }
    return rc;
}

/* Allocates memory for the rows that are rounded together. */
static int save_open_room(struct saving *s) {
    int64_t most = NUMBERS_AT_ONCE, widest = 0;
    for (size_t i = 0; i < count_of(s); i++)
        if (s->plan[i].rounded && s->plan[i].cols > widest) widest = s->plan[i].cols;
    if (widest > most) most = widest;
    s->inputs = mem_try_alloc((size_t)widest, sizeof *s->inputs);
    s->numbers = mem_try_alloc((size_t)most, sizeof(float));
    s->blocks = mem_try_alloc((size_t)(most / KERN_BLOCK), sizeof *s->blocks);
    s->bytes = mem_try_alloc((size_t)(most / KERN_BLOCK), sizeof *s->blocks);
    if (!s->inputs || !s->numbers || !s->blocks || !s->bytes)
        return fault_set(s->fault, ERR_NOMEM, "model", "no memory for rows to be rounded");
    const int rc = cpu_team_open(s->options->threads, &s->team);
    return rc ? fault_set(s->fault, rc, "threads", "cannot start the threads that round weights")
              : 0;
}

/* ---- A directory ---- */

static void describe_tensor(const struct tensor *tensor, const struct planned *p, size_t at,
                            struct buf *out) {
    const char *form = p->rounded ? gguf_format_name(block_format_of(p->dtype)) : "";
    const int last = tensor->dims - 1;
    char name[512];
    snprintf(name, sizeof name, "%s%s%s", tensor->name, p->rounded ? "." : "", form);
    buf_str(out, out->size > 1 ? "," : "");
    json_write_str(out, name, strlen(name));
    buf_fmt(out, ":{\"dtype\":\"%s\",\"shape\":[", p->rounded ? "U8" : tensor->type);
    for (int i = 0; i < (p->rounded ? last : tensor->dims); i++)
        buf_fmt(out, i ? ",%lld" : "%lld", (long long)tensor->shape[i]);
    if (p->rounded) buf_fmt(out, ",%zu", p->bytes / (size_t)p->rows);
    buf_fmt(out, "],\"data_offsets\":[%zu,%zu]}", at, at + p->bytes);
}

static int put_safetensors(struct saving *s) {
    struct buf head;
    size_t at = 0;
    uint8_t size[8];
    buf_open(&head, HEAD_MAX);
    buf_char(&head, '{');
    for (size_t i = 0; i < count_of(s); i++) {
        if (!s->plan[i].used) continue;
        describe_tensor(weights_at(s->weights, i), &s->plan[i], at, &head);
        at += s->plan[i].bytes;
    }
    buf_char(&head, '}');
    while (head.size % 8 && !head.failed) buf_char(&head, ' ');
    for (int i = 0; i < 8; i++) size[i] = (uint8_t)((uint64_t)head.size >> 8 * i);
    int rc = head.failed ? fault_set(s->fault, ERR_NOMEM, "model", "no memory for the head") : 0;
    if (!rc) rc = save_put(s, size, sizeof size);
    if (!rc) rc = save_put(s, head.data, head.size);
    if (!rc) rc = put_tensors(s, 1);
    buf_close(&head);
    return rc;
}

static const char *dtype_name(enum kern_dtype dtype) {
    return dtype == KERN_F32 ? "F32" : dtype == KERN_F16 ? "F16" : "BF16";
}

/* Writes the source's config.json. At its front it says how its matrices are stored now and which
 * model they come from, because gates that fit the source fit this model, too. */
static int save_config(const struct saving *s, const struct save_files *files) {
    static const struct json_limits limits = {
        .bytes = CONFIG_MAX, .depth = 64, .nodes = 100000, .file = true};
    char path[PATH_MAX], name[TENSOR_NAME_MAX], *text = NULL;
    size_t size;
    cJSON *root = NULL;
    const cJSON *member;
    struct base_digest base;
    struct buf out;
    tensor_name(name, s->naming, ROLE_EMBED, -1, 0);
    const struct tensor *embed = weights_find(s->weights, name);
    const enum kern_dtype dtype = rows_dtype(&(struct rows){.tensor = embed});
    snprintf(path, sizeof path, "%s/config.json", s->options->dir);
    buf_open(&out, CONFIG_MAX);
    int rc = file_read(path, CONFIG_MAX, &text, &size, s->fault);
    if (!rc) rc = json_parse(text, size, &limits, &root, s->fault);
    if (base_digest(&s->config, s->weights, &base)) out.failed = true;
    buf_fmt(&out,
            "{\"quantization_config\": {\"quant_method\": \"keepd\", \"format\": \"blocks\", "
            "\"dtype\": \"%s\", \"base_matrices\": \"%s\"}",
            dtype_name(dtype), base.matrices);
    cJSON_ArrayForEach(member, root) {
        if (strcmp(member->string, "quantization_config") == 0) continue;
        buf_str(&out, ",\n ");
        json_write_str(&out, member->string, strlen(member->string));
        buf_str(&out, ": ");
        json_write_node(&out, member);
    }
    buf_str(&out, "}\n");
    if (!rc) rc = save_files_write(files, "config.json", &out, s->fault);
    buf_close(&out);
    json_free(root);
    mem_free(text);
    return rc;
}

static int save_gates(const struct saving *s, const struct save_files *files) {
    const char *gates = s->options->gates;
    char path[PATH_MAX];
    if (gates && !gates[0]) return 0;
    snprintf(path, sizeof path, "%s%s", gates ? gates : s->options->dir,
             gates ? "" : "/gates.safetensors");
    if (!gates && access(path, F_OK)) return 0;
    return save_files_copy(files, path, "gates.safetensors", s->fault);
}

static int save_directory(struct saving *s, const struct save_files *files) {
    int rc = save_config(s, files);
    if (!rc) rc = save_gates(s, files);
    if (!rc) rc = save_files_copy_others(files, s->options->dir, s->fault);
    if (!rc) rc = save_files_begin(files, "model.safetensors", &s->file, s->fault);
    return rc ? rc : save_files_end(&s->file, put_safetensors(s), s->fault);
}

/* ---- A GGUF file ---- */

static void add_number(struct buf *out, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) buf_char(out, (char)(value >> 8 * i));
}

static void save_add_text(struct buf *out, const char *text) {
    add_number(out, strlen(text), 8);
    buf_str(out, text);
}

/* Returns whether a GGUF value is copied. A model in one file does not need the keys that say how
 * it was split. The key of the matrices before rounding is written anew. */
static bool save_is_kept(const struct gguf_value *value) {
    return strncmp(value->key, "split.", strlen("split.")) != 0 &&
           strcmp(value->key, BASE_MATRICES_KEY) != 0;
}

/* Adds the source's digest of matrices, because gates that fit the source fit the saved file, too.
 */
static int add_base(const struct saving *s, struct buf *out) {
    struct base_digest base;
    int rc = base_digest(&s->config, s->weights, &base);
    save_add_text(out, BASE_MATRICES_KEY);
    add_number(out, GGUF_STRING, 4);
    save_add_text(out, base.matrices);
    return rc;
}

/* Copies a value. general.file_type is the type that most tensors have, by llama.cpp's numbers. */
static void add_value(const struct saving *s, const struct gguf_value *value, struct buf *out) {
    const bool type = s->mostly_rounded && !strcmp(value->key, "general.file_type");
    save_add_text(out, value->key);
    add_number(out, value->array ? GGUF_ARRAY : value->type, 4);
    if (value->array) {
        add_number(out, value->type, 4);
        add_number(out, value->count, 8);
    }
    if (type && !value->array && value->type == GGUF_U32)
        add_number(out, s->options->quantization == QUANTIZE_Q8 ? 7 : 3, 4);
    else
        buf_add(out, value->data, value->bytes);
}

static void add_tensor(const struct tensor *tensor, const struct planned *p, uint64_t at,
                       struct buf *out) {
    uint32_t format = tensor->dtype == TENSOR_F32    ? GGUF_FORMAT_F32
                      : tensor->dtype == TENSOR_F16  ? GGUF_FORMAT_F16
                      : tensor->dtype == TENSOR_BF16 ? GGUF_FORMAT_BF16
                                                     : tensor->format;
    if (p->rounded) format = block_format_of(p->dtype);
    save_add_text(out, tensor->name);
    add_number(out, (uint64_t)tensor->dims, 4);
    for (int i = tensor->dims - 1; i >= 0; i--) add_number(out, (uint64_t)tensor->shape[i], 8);
    add_number(out, format, 4);
    add_number(out, at, 8);
}

static int put_gguf(struct saving *s) {
    const struct gguf *gguf = weights_gguf(s->weights);
    int64_t alignment = ALIGNMENT;
    uint64_t at = 0, values = 1; /* values: 1 for the base */
    struct buf head;
    int rc = gguf_int(gguf, "general.alignment", 1, 1 << 16, &alignment, s->fault);
    buf_open(&head, (size_t)1 << 30);
    for (size_t i = 0; i < gguf->value_count; i++) values += save_is_kept(&gguf->values[i]);
    buf_str(&head, "GGUF");
    add_number(&head, 3, 4);
    add_number(&head, count_of(s), 8);
    add_number(&head, values, 8);
    for (size_t i = 0; i < gguf->value_count; i++)
        if (save_is_kept(&gguf->values[i])) add_value(s, &gguf->values[i], &head);
    if (!rc) rc = add_base(s, &head);
    for (size_t i = 0; i < count_of(s); i++) {
        add_tensor(weights_at(s->weights, i), &s->plan[i], at, &head);
        at += (s->plan[i].bytes + (uint64_t)alignment - 1) / (uint64_t)alignment *
              (uint64_t)alignment;
    }
    if (!rc && head.failed) rc = fault_set(s->fault, ERR_NOMEM, "model", "no memory for the head");
    if (!rc) rc = save_put(s, head.data, head.size);
    if (!rc) rc = put_padding(s, head.size, (size_t)alignment);
    if (!rc) rc = put_tensors(s, (size_t)alignment);
    buf_close(&head);
    return rc;
}

static int save_gguf(struct saving *s, const struct save_files *files) {
    int rc = save_files_begin(files, NULL, &s->file, s->fault);
    return rc ? rc : save_files_end(&s->file, put_gguf(s), s->fault);
}

/* ---- The whole ---- */

static int check(const struct saving *s, const char *to) {
    const enum quantization wanted = s->options->quantization;
    const bool gguf = gguf_is_path(s->options->dir);
    if (wanted != QUANTIZE_Q8 && wanted != QUANTIZE_Q4)
        return fault_set(s->fault, ERR_INVALID, "quantize-to",
                         "needs --quantization q8 or q4, which says what is written");
    if (gguf != gguf_is_path(to))
        return fault_set(s->fault, ERR_INVALID, "quantize-to",
                         gguf ? "a GGUF file becomes a file: the name must end in .gguf"
                              : "a directory becomes a directory: the name must not end in .gguf");
    const enum packing_kind kind = s->config.packing.kind;
    return kind == PACKING_NONE || kind == PACKING_FP8 ? 0 : refuse_few_bits(s->fault);
}

static int save(struct saving *s, const char *to) {
    struct save_files files;
    const int tokens = s->options->quantization == QUANTIZE_Q4 ? s->options->calibrate : 0;
    int rc = make_plan(s);
    if (!rc) rc = save_open_room(s);
    if (!rc && tokens)
        rc = calibration_open(s->options, tokens, s->team, &s->calibration, s->fault);
    if (!rc) rc = save_files_open(&files, "quantize-to", to, !gguf_is_path(to), s->fault);
    if (rc) return rc;
    rc = files.directory ? save_directory(s, &files) : save_gguf(s, &files);
    return save_files_close(&files, rc, s->fault);
}

int model_save(const struct model_options *options, const char *to, size_t *bytes,
               struct fault *fault) {
    struct saving s = {.options = options, .fault = fault};
    int rc = model_read(options->dir, options->context, false, &s.config, &s.weights, fault);
    if (!rc) rc = check(&s, to);
    if (!rc) rc = save(&s, to);
    *bytes = s.written;
    calibration_close(s.calibration);
    cpu_team_close(s.team);
    mem_free(s.inputs);
    mem_free(s.numbers);
    mem_free(s.blocks);
    mem_free(s.bytes);
    mem_free(s.plan);
    weights_close(s.weights);
    model_config_close(&s.config);
    return rc;
}
