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

/* Copies up to SCHED_POOL_ROWS rows of a span's part, from number `done` on. Returns how many. */
static int32_t read_part(struct sched *sched, const struct kern_span *span, struct pool_part part,
                         int32_t done, const float *hidden, int *rc) {
    struct kern *kern = sched->options.kern;
    const size_t width = (size_t)sched->options.width;
    const size_t row = (size_t)span->row + (size_t)part.first + (size_t)done;
    const int32_t left = part.count - done, count = left < SCHED_POOL_ROWS ? left : SCHED_POOL_ROWS;
    *rc = kern->ops->download(kern, sched->pool_rows, hidden + row * width,
                              (size_t)count * width * sizeof *hidden);
    return count;
}

/* The text is read in one step, and its vector is made of what is pooled there. */
static int finish_span(struct sched *sched, const struct kern_span *span, struct sequence *seq,
                       const float *hidden) {
    const int width = sched->options.width;
    const struct pool_part part = part_of(seq, span);
    const int kept = seq_pooled_count(&seq->job->request, sched->options.vector_width);
    int rc = 0;
    CHECK(span->count == seq->prompt_count && part.count > 0);
    for (int i = 0; i < width; i++) sched->pool_sum[i] = 0;
    for (int32_t done = 0; done < part.count && rc == 0;) {
        const int32_t count = read_part(sched, span, part, done, hidden, &rc);
        for (int32_t row = 0; row < count && rc == 0; row++)
            for (int i = 0; i < width; i++)
                sched->pool_sum[i] += (double)sched->pool_rows[(ptrdiff_t)row * width + i];
        done += count;
    }
    for (int i = 0; i < width; i++) sched->finish_in[i] = (float)(sched->pool_sum[i] / part.count);
    if (rc == 0)
        rc = sched->options.model_finish(sched->options.model, sched->finish_in, sched->finish_out);
    for (int i = 0; i < kept && rc == 0; i++) seq->job->pooled[i] = sched->finish_out[i];
    if (rc == 0) check_pooled(seq, kept);
    return rc;
}

static int pool_span(struct sched *sched, const struct kern_span *span, struct sequence *seq,
                     const float *hidden) {
    const int width = sched->options.width;
    const struct pool_part part = part_of(seq, span);
    int rc = 0;
    CHECK(sched->pool_rows && seq->job->pooled);
    if (sched->options.model_finish) return finish_span(sched, span, seq, hidden);
    for (int32_t done = 0, count; done < part.count; done += count) {
        count = read_part(sched, span, part, done, hidden, &rc);
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
