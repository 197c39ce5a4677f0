/* Runs a model on given tokens without an engine: for golden tests and the golden_logits driver. */
#ifndef KEEPD_TESTS_GOLDEN_REPLAY_H
#define KEEPD_TESTS_GOLDEN_REPLAY_H

#include "base/err.h"
#include "kernels/kern.h"
#include "model/model.h"

struct replay_options {
    const char *dir;
    const char *gates; /* as in model_options */
    const char *path;  /* as in cpu_options */
    bool exact;        /* as in cpu_options */
    int threads;
    int ranks; /* tensor parallelism; 0 = 1 */
    enum kern_dtype kv_dtype;
    int rows_max;
    int positions_max; /* longest sequence; the pool holds `slots` of them */
    int slots;
    int64_t pages; /* 0 = enough for all */
    bool random_weights;
    enum quantization quantization; /* as in model_options */
    const struct replay *owner;     /* shares its weights; NULL: load them */
};

struct replay {
    struct kern *kern;
    struct model *model;
    int layers, heads_kv, vocab; /* layers: those with entries */
    int streams;
    int states;
};

/* The dtype of a cache by its name, "f32", "bf16" or "fp8"; ERR_INVALID. */
int replay_kv_dtype(const char *name, enum kern_dtype *dtype, struct fault *fault);
const char *replay_kv_name(enum kern_dtype dtype);

/* Can this processor run the path of instructions? The message of an absent one is printed, so that
 * a log shows what was covered. */
bool replay_path_available(const char *path);

int replay_open(const struct replay_options *options, struct replay *out, struct fault *fault);
void replay_close(struct replay *replay);

/* One sequence's new tokens in a step. */
struct replay_part {
    int slot, pos, count;
    const int32_t *tokens;
    const struct kern_rule *rule; /* by which the sequence evicts; NULL: never */
};

/* One step of several sequences; `logits` (host, [sum of counts, vocab]) may be NULL. */
int replay_step(struct replay *replay, const struct replay_part *parts, int part_count,
                float *logits);

/* A step of one sequence that shows pictures: as in struct kern_span and struct kern_batch. */
struct replay_pictures {
    int behind;
    const struct kern_given *given;
    int given_count;
    const struct kern_place *places;
};
int replay_step_pictures(struct replay *replay, const struct replay_part *part,
                         const struct replay_pictures *pictures, float *logits);

/* The whole sequence in slot `slot`, in steps of the given sizes, the last one repeated. */
int replay_run(struct replay *replay, int slot, const int32_t *tokens, int count, const int *splits,
               int split_count, float *logits);

/* Keys or values of all entries of a slot, stream after stream -> [entries][head_dim]. CPU only. */
void replay_entries(struct kern *kern, int slot, bool values, float *to);

/* The members of all classes of a slot (kern_rule.h, struct kern_classes), stream after stream. CPU
 * only. */
struct replay_members {
    int32_t *lengths;      /* [streams] */
    int32_t *centre, *pos; /* [count] */
    float *gain;
    size_t streams, count;
};
void replay_members_open(struct kern *kern, int slot, struct replay_members *out);
void replay_members_close(struct replay_members *members);

/* log softmax of one row at `token`, in double. */
double replay_logprob(const float *logits, int vocab, int32_t token);
int32_t replay_argmax(const float *logits, int vocab);

#endif
