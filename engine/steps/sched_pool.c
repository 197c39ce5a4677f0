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
    case ENGINE_POOL_LABELS:
        break;
    case ENGINE_POOL_LAST:
        return (struct pool_part){span->count - 1, ends ? 1 : 0};
    case ENGINE_POOL_CLS:
        return (struct pool_part){0, begins ? 1 : 0};
    case ENGINE_POOL_MEAN:
        return (struct pool_part){0, span->count};
    }
    return (struct pool_part){0, 0};
}

static void add_pooled(struct engine_job *job, const float *rows, int32_t count, int width) {
    const int kept = seq_pooled_count(&job->request, width);
    for (int32_t row = 0; row < count; row++, rows += width)
        for (int i = 0; i < kept; i++) {
            if (job->pooled_sum)
                job->pooled_sum[i] += (double)rows[i];
            else
                job->pooled[i] = rows[i];
        }
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
static void end_pooled(struct sequence *seq, int width) {
    struct engine_job *job = seq->job;
    const int kept = seq_pooled_count(&job->request, width);
    for (int i = 0; i < kept && job->pooled_sum; i++)
        job->pooled[i] = (float)(job->pooled_sum[i] / seq->prompt_count);
    mem_free(job->pooled_sum);
    job->pooled_sum = NULL;
    check_pooled(seq, kept);
}

/* A classifier reads the first row alone, of a text that is read in one step. */
static int classify_span(struct sched *sched, const struct kern_span *span, struct sequence *seq,
                         const float *hidden) {
    const struct sched_options *options = &sched->options;
    struct engine_job *job = seq->job;
    CHECK(job->request.pooling == ENGINE_POOL_LABELS && job->request.dimensions == 0);
    CHECK(span->count == seq->prompt_count);
    int rc = options->kern->ops->download(options->kern, sched->pool_rows,
                                          hidden + (ptrdiff_t)span->row * options->width,
                                          (size_t)options->width * sizeof *hidden);
    if (rc == 0) rc = options->model_classify(options->model, sched->pool_rows, job->pooled);
    if (rc == 0) check_pooled(seq, options->labels);
    return rc;
}

static int pool_span(struct sched *sched, const struct kern_span *span, struct sequence *seq,
                     const float *hidden) {
    struct kern *kern = sched->options.kern;
    const int width = sched->options.width;
    const struct pool_part part = part_of(seq, span);
    CHECK(sched->pool_rows && seq->job->pooled);
    if (sched->options.model_classify) return classify_span(sched, span, seq, hidden);
    for (int32_t done = 0, count; done < part.count; done += count) {
        const size_t row = (size_t)span->row + (size_t)part.first + (size_t)done;
        count = part.count - done < SCHED_POOL_ROWS ? part.count - done : SCHED_POOL_ROWS;
        int rc = kern->ops->download(kern, sched->pool_rows, hidden + row * (size_t)width,
                                     (size_t)count * (size_t)width * sizeof *hidden);
        if (rc != 0) return rc;
        add_pooled(seq->job, sched->pool_rows, count, width);
    }
    if (span->pos + span->count == seq->prompt_count) end_pooled(seq, width);
    return 0;
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
