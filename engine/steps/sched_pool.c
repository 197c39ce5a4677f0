/* Vectors of texts. A request for one is a job that ends when its prompt has been read: it has rows
 * in the same steps as chats, and the hidden states of its rows become its vector. A mean is summed
 * in double, token by token in their order, so it does not depend on how the prompt was split. */
#include <math.h>

#include "base/check.h"
#include "base/mem.h"
#include "engine/steps/sched_int.h"

static bool pools_rows(const struct sequence *seq) {
    const enum engine_pooling pooling = seq->job->request.pooling;
    return pooling != ENGINE_POOL_NONE && pooling != ENGINE_POOL_NEXT;
}

bool sched_pools(const struct sched *sched, const struct sched_step *step) {
    for (int i = 0; i < step->batch.span_count; i++)
        if (pools_rows(sched->span_sequences[i])) return true;
    return false;
}

/* The rows of a span that its vector is made of. */
struct pool_part {
    int32_t first, count;
};

static struct pool_part part_of(const struct sequence *seq, const struct kern_span *span) {
    const bool begins = span->pos == 0, ends = span->pos + span->count == seq->prompt_count;
    switch (seq->job->request.pooling) {
    case ENGINE_POOL_NONE:
    case ENGINE_POOL_NEXT:
        break;
    case ENGINE_POOL_LAST:
        return (struct pool_part){span->count - 1, ends ? 1 : 0};
    case ENGINE_POOL_CLS:
    case ENGINE_POOL_LABELS:
        return (struct pool_part){0, begins ? 1 : 0};
    case ENGINE_POOL_MEAN:
        return (struct pool_part){0, span->count};
    }
    return (struct pool_part){0, 0};
}

/* The first numbers of a vector depend on no others, unless it is a product of all of them. */
static int summed_count(const struct sched_options *options, const struct engine_job *job) {
    return options->end_vector ? options->width
                               : seq_pooled_count(&job->request, options->vector_width);
}

/* Keeps what is wanted of the vector that the pooled hidden states give. */
static int take_vector(struct sched *sched, struct engine_job *job, const float *pooled) {
    const struct sched_options *options = &sched->options;
    const int kept = seq_pooled_count(&job->request, options->vector_width);
    int rc = 0;
    if (options->end_vector) {
        rc = options->end_vector(options->model, pooled, sched->pool_vector);
        pooled = sched->pool_vector;
    }
    for (int i = 0; i < kept && rc == 0; i++) job->pooled[i] = pooled[i];
    return rc;
}

/* Without sums, `rows` is the one row that the vector is made of. */
static int add_pooled(struct sched *sched, struct engine_job *job, const float *rows,
                      int32_t count) {
    const int summed = summed_count(&sched->options, job);
    if (!job->pooled_sum) return take_vector(sched, job, rows);
    for (int32_t row = 0; row < count; row++, rows += sched->options.width)
        for (int i = 0; i < summed; i++) job->pooled_sum[i] += (double)rows[i];
    return 0;
}

static void check_pooled(struct sequence *seq, int kept) {
    struct engine_job *job = seq->job;
    for (int i = 0; i < kept; i++) {
        if (isfinite(job->pooled[i])) continue;
        fault_set(&job->fault, ERR_INTERNAL, NULL,
                  "the engine failed: the model's hidden states "
                  "are not numbers");
        seq->finish = ENGINE_FINISH_ERROR;
        return;
    }
}

/* The prompt is read. Overflow or broken weights may have left what is not a number. The sums go:
 * the job's vector may wait for those of many other texts. */
static int end_pooled(struct sched *sched, struct sequence *seq) {
    const struct sched_options *options = &sched->options;
    struct engine_job *job = seq->job;
    const int summed = summed_count(options, job);
    int rc = 0;
    for (int i = 0; i < summed && job->pooled_sum; i++)
        sched->pool_rows[i] = (float)(job->pooled_sum[i] / seq->prompt_count);
    if (job->pooled_sum) rc = take_vector(sched, job, sched->pool_rows);
    mem_free(job->pooled_sum);
    job->pooled_sum = NULL;
    if (rc == 0) check_pooled(seq, seq_pooled_count(&job->request, options->vector_width));
    return rc;
}

static int pool_span(struct sched *sched, const struct kern_span *span, struct sequence *seq,
                     const float *hidden) {
    struct kern *kern = sched->options.kern;
    const int width = sched->options.width;
    const struct pool_part part = part_of(seq, span);
    CHECK(sched->pool_rows && seq->job->pooled);
    for (int32_t done = 0, count; done < part.count; done += count) {
        const size_t row = (size_t)span->row + (size_t)part.first + (size_t)done;
        count = part.count - done < SCHED_POOL_ROWS ? part.count - done : SCHED_POOL_ROWS;
        int rc = kern->ops->download(kern, sched->pool_rows, hidden + row * (size_t)width,
                                     (size_t)count * (size_t)width * sizeof *hidden);
        if (rc == 0) rc = add_pooled(sched, seq->job, sched->pool_rows, count);
        if (rc != 0) return rc;
    }
    return span->pos + span->count == seq->prompt_count ? end_pooled(sched, seq) : 0;
}

int sched_pool_rows(struct sched *sched, const struct sched_step *step, const float *hidden) {
    for (int i = 0; i < step->batch.span_count; i++) {
        struct sequence *seq = sched->span_sequences[i];
        if (!pools_rows(seq)) continue;
        int rc = pool_span(sched, &sched->spans[i], seq, hidden);
        if (rc != 0) return rc;
    }
    return 0;
}
