/* Prompts with pictures: which tile is encoded next, and the rows of a step that show tiles.
 *
 * A prompt is read up to the first tile that is not encoded. Between two steps parts of one tile
 * are encoded, for as long as prompt rows may lengthen a step beside answers (--step-stretch), and
 * at least one; where no row can be computed, part follows part. The next tile is the first one
 * that is missing in the prompt of the client that was served least. Tiles are encoded only as
 * prompts come to them: a prompt that continues a conversation needs none of those behind it.
 * Where the tiles that prompts are reading fill the memory, the next one waits until they are read.
 */
#include "base/check.h"
#include "engine/steps/sched_int.h"

static int64_t rows_end(const struct picture_rows *rows) {
    return (int64_t)rows->at + rows->count;
}

/* Returns the index of the first tile of the request that ends behind row `at` of the prompt. */
static int first_behind(const struct engine_request *request, int32_t at) {
    int low = 0, high = request->picture_row_count;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (rows_end(&request->picture_rows[middle]) > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static const float *find_rows(struct sched *sched, const struct engine_request *request,
                              const struct picture_rows *rows) {
    return pictures_find(&sched->pictures, request->pictures[rows->picture], rows->tile);
}

int32_t sched_rows_to_picture(struct sched *sched, const struct sequence *seq, int32_t most) {
    const struct engine_request *request = &seq->job->request;
    const int64_t from = seq->due.tokens, end = from + most;
    if (most <= 0) return most;
    for (int i = first_behind(request, seq->due.tokens); i < request->picture_row_count; i++) {
        const struct picture_rows *rows = &request->picture_rows[i];
        const int64_t at = (int64_t)rows->at;
        if (at >= end) break;
        if (!find_rows(sched, request, rows)) return at > from ? (int32_t)(at - from) : 0;
    }
    return most;
}

struct sched_together sched_parted_at(const struct sequence *seq, int32_t at) {
    const struct engine_request *request = &seq->job->request;
    const int i = first_behind(request, at);
    if (i == request->picture_row_count) return (struct sched_together){0};
    const struct picture_rows *rows = &request->picture_rows[i];
    const int64_t first = (int64_t)rows->at;
    if (first >= at || !request->pictures[rows->picture]->together)
        return (struct sched_together){0};
    return (struct sched_together){(int32_t)first, (int32_t)rows_end(rows)};
}

void sched_give_pictures(struct sched *sched, struct sched_step *step, const struct sequence *seq,
                         const struct kern_span *span) {
    const struct engine_request *request = &seq->job->request;
    const int64_t from = span->pos, end = from + span->count;
    for (int i = first_behind(request, span->pos); i < request->picture_row_count; i++) {
        const struct picture_rows *rows = &request->picture_rows[i];
        const int64_t at = (int64_t)rows->at, first = at > from ? at : from,
                      last = rows_end(rows) < end ? rows_end(rows) : end;
        if (at >= end) break;
        const float *found = find_rows(sched, request, rows);
        CHECK(found); /* sched_rows_to_picture has found it */
        for (int64_t k = first; k < last; k++) sched->rows[span->row + (k - from)] = 0;
        sched->given[step->batch.given_count++] = (struct kern_given){
            .row = (int32_t)(span->row + (first - from)),
            .count = (int32_t)(last - first),
            .deep = sched->options.pictures.deep,
            .together = request->pictures[rows->picture]->together,
            .rows = found + (rows->first + first - at) * sched->options.pictures.width};
    }
}

/* Returns the first tile that the sequence's prompt comes to and that is not encoded; NULL: none.
 * Those that it reads before are needed until then. */
static const struct picture_rows *missing_tile(struct sched *sched, const struct sequence *seq) {
    const struct engine_request *request = &seq->job->request;
    if (!seq_prefilling(seq) || seq->finish != ENGINE_RUNNING) return NULL;
    for (int i = first_behind(request, seq->due.tokens); i < request->picture_row_count; i++) {
        const struct picture_rows *rows = &request->picture_rows[i];
        if (!pictures_need(&sched->pictures, request->pictures[rows->picture], rows->tile))
            return rows;
    }
    return NULL;
}

/* Returns the running sequence whose tile is encoded next; NULL: no tile is missing. */
static struct sequence *find_tile_client(struct sched *sched, const struct picture_rows **rows) {
    struct sequence *next = NULL;
    pictures_release(&sched->pictures);
    for (int i = 0; i < sched->running; i++) {
        struct sequence *seq = &sched->sequences[sched->order[i]];
        const struct picture_rows *missing = missing_tile(sched, seq);
        if (!missing || (next && queue_client_of(&sched->queue, next->job)->served <=
                                     queue_client_of(&sched->queue, seq->job)->served))
            continue;
        next = seq;
        *rows = missing;
    }
    return next;
}

/* Returns how long parts may take before the next step: 0 without a measure of it, which allows one
 * part. */
static int64_t encoding_bound_ns(const struct sched *sched) {
    const int percent = sched->options.step_stretch;
    int streams = 0;
    if (percent <= 0) return 0;
    for (int i = 0; i < sched->running; i++)
        streams += seq_generating(&sched->sequences[sched->order[i]]);
    return streams == 0 ? 0
                        : (int64_t)(pace_streams_ns(&sched->pace, streams) * (percent - 100) / 100);
}

/* Computes parts of the present tile. */
static int advance_tile(struct sched *sched) {
    struct pictures *pictures = &sched->pictures;
    const int64_t bound = encoding_bound_ns(sched), begin = sched_clock(sched);
    int64_t spent, parts = 0;
    int rc;
    do {
        rc = pictures_advance(pictures);
        spent = sched_clock(sched) - begin;
        parts++;
    } while (rc == 0 && pictures->present && bound > 0 && spent + spent / parts <= bound);
    if (rc == 0 && !pictures->present) sched->counters.encoded_tiles++;
    return rc;
}

int sched_encode(struct sched *sched) {
    struct pictures *pictures = &sched->pictures;
    sched->encoded = false;
    if (!pictures->options.encoder) return 0;
    if (!pictures->present) {
        const struct picture_rows *rows = NULL;
        struct sequence *seq = find_tile_client(sched, &rows);
        if (!seq) return 0;
        const struct picture *picture = seq->job->request.pictures[rows->picture];
        if (!pictures_have_room(pictures, picture)) return 0;
        int rc = pictures_begin(pictures, picture, rows->tile);
        if (rc == ERR_NOMEM) {
            sched_fail_job(sched, seq->job, rc, "no memory for the rows of a picture");
            sched->encoded = true; /* the job's end is work */
            return 0;
        }
        if (rc != 0) return rc;
    }
    sched->encoded = true;
    return advance_tile(sched);
}
