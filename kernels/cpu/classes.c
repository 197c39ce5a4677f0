/* Classes: EMS (arXiv 2412.08521), see struct kern_classes: adds evicted entries to the classes of
 * kept entries, and computes attention to members.
 *
 * Members are never stored as keys. A key at position c rotated to position p is R(p - c) k, so
 * members' keys are computed for each block of queries, a few at a time, and discarded. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "kernels/cpu/evict.h"

#define NOBODY (-1)

static const float *angle(const struct cpu_cache *cache, int32_t positions) {
    return cache->angles + (size_t)positions * (size_t)cache->options.head_dim;
}

/* Rotates x by a number of positions, forward or back. */
static void turn(const struct cpu_cache *cache, int32_t positions, bool back, float *x) {
    int half = cache->options.head_dim / 2;
    const float *cosine = angle(cache, positions), *sine = cosine + half;
    for (int j = 0; j < half; j++) {
        float a = x[j], b = x[half + j], s = back ? -sine[j] : sine[j];
        x[j] = a * cosine[j] - b * s;
        x[half + j] = b * cosine[j] + a * s;
    }
}

/* ---- Queries and members ---- */

struct cpu_classes cpu_classes_open(const struct cpu_cache *cache, struct cpu_stream entries,
                                    struct cpu_stream members, bool positions,
                                    struct cpu_work *work) {
    struct cpu_classes classes = {.entries = entries,
                                  .members = members,
                                  .centres = work->centres,
                                  .positions = positions,
                                  .newest = -1};
    for (int32_t m = 0, entry = 0; m < members.length; m++) {
        const struct cpu_member *member = cpu_cache_member(cache, members.pages, m);
        while (cpu_cache_entry_pos(cache, &entries, entry) < member->centre) entry++;
        work->centres[m] = entry;
        if (member->pos > classes.newest) classes.newest = member->pos;
    }
    return classes;
}

/* Computes the key of a member: its gain times its centre's key, rotated to its own position. */
static void member_key(const struct cpu_cache *cache, const struct cpu_member *member,
                       const float *restrict centre, float *restrict to) {
    int half = cache->options.head_dim / 2;
    const float *restrict cosine = angle(cache, abs(member->pos - member->centre));
    const float *restrict sine = cosine + half;
    float gain = member->gain, turned = member->pos > member->centre ? gain : -gain;
    for (int j = 0; j < half; j++) {
        float a = centre[j], b = centre[half + j];
        to[j] = a * (gain * cosine[j]) - b * (turned * sine[j]);
        to[half + j] = b * (gain * cosine[j]) + a * (turned * sine[j]);
    }
}

static void shared_logits(const struct cpu_cache *cache, const struct cpu_classes *classes,
                          int lanes, struct cpu_work *work) {
    int32_t count = classes->members.length;
    for (int32_t m = 0; m < count; m++) {
        float gain = cpu_cache_member(cache, classes->members.pages, m)->gain;
        for (int l = 0; l < lanes; l++) {
            float *z = work->logits + (size_t)l * work->stride;
            z[m] = gain * z[count + classes->centres[m]];
        }
    }
}

void cpu_classes_logits(const struct cpu_cache *cache, const struct cpu_classes *classes,
                        const float *q, int lanes, struct cpu_work *work) {
    const struct cpu_layer *layer = classes->entries.layer;
    int dim = layer->head_dim, slots = layer->page_slots;
    float *key = work->rows + (size_t)lanes * (size_t)dim; /* behind the queries */
    int32_t last = NOBODY, count = classes->members.length;
    if (!classes->positions) {
        shared_logits(cache, classes, lanes, work);
        return;
    }
    for (int32_t first = 0, n; first < count; first += n) {
        n = count - first < CPU_ROWS_BLOCK ? count - first : CPU_ROWS_BLOCK;
        for (int32_t m = first; m < first + n; m++) {
            int32_t centre = classes->centres[m];
            uint32_t page = classes->entries.pages[centre / slots];
            float *turned = work->turned + (size_t)(m - first) * (size_t)dim;
            if (centre != last) {
                cpu_cache_wide_row(cache, layer, page, false, centre % slots, key);
                cpu_cache_rotate(cache, key, dim);
            }
            last = centre;
            member_key(cache, cpu_cache_member(cache, classes->members.pages, m), key, turned);
            cpu_cache_rotate(cache, turned, dim);
        }
        cache->math->dots(work->logits + first, work->stride, q, lanes,
                          (struct cpu_rows){work->turned, NULL, dim, KERN_F32, dim}, n);
    }
}

void cpu_classes_mask(const struct cpu_cache *cache, const struct cpu_classes *classes, int32_t pos,
                      int sliding_window, int32_t sees, float *logits) {
    int32_t count = classes->members.length;
    if (count == 0 ||
        (classes->newest <= pos && classes->centres[count - 1] < sees && !sliding_window))
        return;
    for (int32_t m = 0; m < count; m++) {
        int32_t at = cpu_cache_member(cache, classes->members.pages, m)->pos;
        bool masked = sliding_window > 0 && at <= pos - sliding_window;
        if (masked || at > pos || classes->centres[m] >= sees) logits[m] = -INFINITY;
    }
}

void cpu_classes_fold(const struct cpu_classes *classes, float *p) {
    int32_t count = classes->members.length;
    for (int32_t m = 0; m < count;) {
        int32_t centre = classes->centres[m];
        float sum = p[count + centre];
        for (; m < count && classes->centres[m] == centre; m++) sum += p[m];
        p[count + centre] = sum;
    }
}

/* ---- Joining ---- */

struct join {
    struct cpu_cache *cache;
    const struct evict_job *job;
    struct cpu_evict_stream *plan;
    struct cpu_stream view;
    int stream, dim;
    struct cpu_work work;
    float *length_k, *length_v; /* [view.length] lengths of keys and values */
    float *alike;               /* [view.length] evicted entries: R with their target */
    int32_t *links; /* as in merge.c: target, then the next entry with the same target; for kept
                       entries the first entry that joins */
    int32_t *first; /* [view.length] index of an entry's first member in `old` */
    struct cpu_member *old, *fresh; /* the rows before and after the eviction */
    int32_t old_count, fresh_count;
};

static bool classes_stays(const struct join *m, int32_t index) {
    return evict_keeps(m->job, m->stream, index);
}

static uint32_t classes_page_of(const struct join *m, int32_t index) {
    return m->view.pages[index / m->view.layer->page_slots];
}

static void classes_wide(const struct join *m, bool values, int32_t index, float *to) {
    const struct cpu_layer *layer = m->view.layer;
    cpu_cache_wide_row(m->cache, layer, classes_page_of(m, index), values,
                       index % layer->page_slots, to);
}

static int32_t pos_of(const struct join *m, int32_t index) {
    return cpu_cache_entry_pos(m->cache, &m->view, index);
}

static float *mass_of(const struct join *m, int32_t index) {
    return cpu_cache_score(m->cache, classes_page_of(m, index)) + index % m->view.layer->page_slots;
}

static float length_of(const float *x, int dim) {
    double squares = 0;
    for (int d = 0; d < dim; d++) squares += (double)x[d] * (double)x[d];
    return (float)sqrt(squares);
}

static void classes_measure(const struct join *m) {
    float *row = m->work.rows;
    for (int32_t i = 0; i < m->view.length; i++) {
        classes_wide(m, false, i, row);
        m->length_k[i] = length_of(row, m->dim);
        classes_wide(m, true, i, row);
        m->length_v[i] = length_of(row, m->dim);
    }
}

/* Writes keys at position 0, not rotated as the cache's rows are, or values as they are, of `count`
 * entries, scaled to length 1; zeros stay zeros. */
static void unit_rows(const struct join *m, bool values, const int32_t *entries, int count,
                      float *to) {
    const float *lengths = values ? m->length_v : m->length_k;
    for (int i = 0; i < count; i++, to += m->dim) {
        float length = lengths[entries[i]];
        classes_wide(m, values, entries[i], to);
        if (!values) cpu_cache_rotate(m->cache, to, m->dim);
        if (!values) turn(m->cache, pos_of(m, entries[i]), true, to);
        for (int d = 0; d < m->dim; d++) to[d] = length > 0 ? to[d] / length : 0;
    }
}

/* Compares a block of evicted entries, whose keys are in `rows` and whose values are in `turned`,
 * with a block of candidates that are kept. */
static void classes_meet(const struct join *m, const int32_t *gone, int lanes,
                         const int32_t *centres, int count) {
    float cosines[2][CPU_ROWS_BLOCK * CPU_ROWS_BLOCK];
    float *rows = m->work.turned + CPU_ROWS_BLOCK * (size_t)m->dim;
    for (int values = 0; values < 2; values++) {
        unit_rows(m, values, centres, count, rows);
        m->cache->math->dots(cosines[values], CPU_ROWS_BLOCK,
                             values ? m->work.turned : m->work.rows, lanes,
                             (struct cpu_rows){rows, NULL, m->dim, KERN_F32, m->dim}, count);
    }
    for (int j = 0; j < count; j++)
        for (int l = 0; l < lanes; l++) {
            int at = l * CPU_ROWS_BLOCK + j;
            float alike = cosines[0][at] * cosines[1][at];
            if (!(alike >= m->alike[gone[l]])) continue;
            m->alike[gone[l]] = alike;
            m->links[gone[l]] = centres[j];
        }
}

static void classes_find_targets(const struct join *m, const int32_t *gone, int lanes) {
    int32_t centres[CPU_ROWS_BLOCK];
    int count = 0;
    unit_rows(m, false, gone, lanes, m->work.rows);
    unit_rows(m, true, gone, lanes, m->work.turned);
    for (int32_t i = 0; i < m->plan->candidates; i++) {
        if (classes_stays(m, i)) centres[count++] = i;
        if (count == CPU_ROWS_BLOCK || (count > 0 && i + 1 == m->plan->candidates)) {
            classes_meet(m, gone, lanes, centres, count);
            count = 0;
        }
    }
}

/* Finds the class that each evicted entry joins; NOBODY: none. */
static void classes_find_all(const struct join *m) {
    int32_t gone[CPU_ROWS_BLOCK], length = m->view.length;
    int lanes = 0;
    for (int32_t i = 0; i <= length; i++) {
        if (i < length && !classes_stays(m, i)) {
            m->links[i] = NOBODY;
            m->alike[i] = -INFINITY;
            if (evict_reaches(m->job, m->stream, &m->plan->merged, i)) gone[lanes++] = i;
        }
        if (lanes == 0 || (lanes < CPU_ROWS_BLOCK && i < length)) continue;
        classes_find_targets(m, gone, lanes);
        lanes = 0;
    }
    for (int32_t i = 0; i < length; i++)
        if (!classes_stays(m, i) && !(m->alike[i] > m->job->due->rule->classes.tau))
            m->links[i] = NOBODY;
}

/* Turns targets into lists with the oldest entry first. */
static void link_joining(const struct join *m) {
    for (int32_t i = 0; i < m->view.length; i++)
        if (classes_stays(m, i)) m->links[i] = NOBODY;
    for (int32_t i = m->view.length - 1; i >= 0; i--) {
        int32_t target = m->links[i];
        if (classes_stays(m, i) || target == NOBODY) continue;
        m->links[i] = m->links[target];
        m->links[target] = i;
    }
}

/* ---- The new classes ---- */

static void store(const struct join *m, bool values, int32_t index, const float *row) {
    cpu_cache_store_row(m->cache, m->view.layer, classes_page_of(m, index), values,
                        index % m->view.layer->page_slots, row);
}

/* Sums, over the centre and the entries that join it, mass times the key, at position 0 and of
 * length 1, or mass times the value. */
static void sum_class(const struct join *m, bool values, int32_t centre, float *sum) {
    float *row = m->work.turned;
    memset(sum, 0, (size_t)m->dim * sizeof *sum);
    for (int32_t i = centre, next = m->links[centre];; i = next, next = m->links[i]) {
        float mass = *mass_of(m, i);
        if (values)
            classes_wide(m, true, i, row);
        else
            unit_rows(m, false, &i, 1, row);
        for (int d = 0; d < m->dim; d++) sum[d] += mass * row[d];
        if (next == NOBODY) return;
    }
}

static void merge_class(const struct join *m, int32_t centre) {
    float *sum = m->work.rows, total = *mass_of(m, centre);
    for (int32_t i = m->links[centre]; i != NOBODY; i = m->links[i]) total += *mass_of(m, i);
    sum_class(m, false, centre, sum);
    float length = length_of(sum, m->dim);
    for (int d = 0; d < m->dim && length > 0; d++) sum[d] *= m->length_k[centre] / length;
    turn(m->cache, pos_of(m, centre), false, sum);
    cpu_cache_rotate(m->cache, sum, m->dim);
    if (length > 0) store(m, false, centre, sum);
    if (!(total > 0)) return;
    sum_class(m, true, centre, sum);
    for (int d = 0; d < m->dim; d++) sum[d] /= total;
    store(m, true, centre, sum);
    *mass_of(m, centre) = total;
}

/* ---- Members ---- */

/* Copies the row and notes where each entry's members begin. */
static void classes_read_members(struct join *m) {
    int32_t length = m->view.length, at = 0;
    const uint32_t *table =
        cpu_cache_row(m->cache, m->job->due->slot, m->cache->streams + m->stream);
    m->old_count = m->plan->members;
    for (int32_t i = 0; i < m->old_count; i++) m->old[i] = *cpu_cache_member(m->cache, table, i);
    for (int32_t i = 0; i < length; i++) {
        m->first[i] = at;
        while (at < m->old_count && m->old[at].centre == pos_of(m, i)) at++;
    }
    CHECK(at == m->old_count); /* every member's centre is an entry */
}

static void add_members(struct join *m, int32_t entry, int32_t centre) {
    int32_t end = entry + 1 < m->view.length ? m->first[entry + 1] : m->old_count;
    float scale = m->length_k[entry] / m->length_k[centre];
    int32_t pos = pos_of(m, centre);
    CHECK((size_t)(m->fresh_count + 1 + end - m->first[entry]) <= m->work.stride);
    if (entry != centre)
        m->fresh[m->fresh_count++] = (struct cpu_member){pos, pos_of(m, entry), scale};
    for (int32_t i = m->first[entry]; i < end; i++) {
        float gain = entry == centre ? m->old[i].gain : m->old[i].gain * scale;
        m->fresh[m->fresh_count++] = (struct cpu_member){pos, m->old[i].pos, gain};
    }
}

static int ascending(const void *a, const void *b) {
    const int32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static int by_position(const void *a, const void *b) {
    const struct cpu_member *x = a, *y = b;
    return (x->pos > y->pos) - (x->pos < y->pos);
}

/* Keeps only the newest members if there are too many. Every position occurs once, so one
 * position separates the two groups. */
static void drop_oldest(struct join *m, int32_t most) {
    int32_t *positions = (int32_t *)m->old; /* no longer needed */
    int32_t count = 0, gone = m->fresh_count - most;
    if (gone <= 0) return;
    for (int32_t i = 0; i < m->fresh_count; i++) positions[i] = m->fresh[i].pos;
    qsort(positions, (size_t)m->fresh_count, sizeof *positions, ascending);
    for (int32_t i = 0; i < m->fresh_count; i++)
        if (m->fresh[i].pos > positions[gone - 1]) m->fresh[count++] = m->fresh[i];
    m->fresh_count = count;
}

static void classes_write_members(struct join *m) {
    const uint32_t *table =
        cpu_cache_row(m->cache, m->job->due->slot, m->cache->streams + m->stream);
    for (int32_t i = 0; i < m->view.length; i++) {
        int32_t from = m->fresh_count;
        if (!classes_stays(m, i)) continue;
        add_members(m, i, i);
        for (int32_t joining = m->links[i]; joining != NOBODY; joining = m->links[joining])
            add_members(m, joining, i);
        if (m->links[i] != NOBODY)
            qsort(m->fresh + from, (size_t)(m->fresh_count - from), sizeof *m->fresh, by_position);
    }
    drop_oldest(m, kern_members_max(m->job->due->rule, m->job->due->budget));
    CHECK(m->fresh_count <= kern_members_max(m->job->due->rule, m->job->due->budget));
    for (int32_t i = 0; i < m->fresh_count; i++)
        *cpu_cache_member(m->cache, table, i) = m->fresh[i];
    m->plan->members = m->fresh_count;
}

void evict_join_stream(void *arg, int stream, int worker) {
    const struct evict_job *job = arg;
    struct cpu_cache *cache = job->cache;
    struct cpu_evict_stream *plan = &cache->evict[stream];
    struct join m = {.cache = cache,
                     .job = job,
                     .plan = plan,
                     .view = evict_stream(job, stream),
                     .stream = stream,
                     .dim = cpu_cache_layer(cache, stream)->head_dim,
                     .work = cpu_cache_work(cache, worker),
                     .alike = cache->alike + plan->first,
                     .links = cache->links + plan->first};
    if (plan->kept == m.view.length) return;
    /* A stream has fewer members than positions, and there are 16 rows of logits. */
    m.length_k = m.work.sum;
    m.length_v = m.work.squares;
    m.first = m.work.centres;
    m.old = (struct cpu_member *)m.work.logits;
    m.fresh = m.old + m.work.stride;
    classes_measure(&m);
    classes_find_all(&m);
    link_joining(&m);
    classes_read_members(&m);
    classes_write_members(&m);
    for (int32_t i = 0; i < m.view.length; i++)
        if (classes_stays(&m, i) && m.links[i] != NOBODY) merge_class(&m, i);
}
