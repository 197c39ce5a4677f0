/* Mixtures of experts (kern_weights.h): each row chooses its experts, rows are sorted by expert,
 * and every expert computes its rows together, by the ordinary products.
 *
 * Experts are visited in ascending order, so a row's sum has one order whatever other rows chose;
 * with the products' promise this makes a row independent of its batch. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/mem.h"
#include "kernels/cpu/alloc.h"
#include "kernels/cpu/internal.h"

#define SUM_LEAST 1e-20f /* added to a sum that scores are divided by: all may be 0 */

struct kern_experts {
    struct kern_experts_spec spec; /* without its arrays of weights */
    int d_ff;                      /* this rank's */
    struct kern_weight **gate_up, **down;
};

/* One use of an expert by a row. */
struct route {
    int32_t row, expert;
    float weight;
};

/* Arrays in cpu->routes. */
struct routes {
    struct route *chosen; /* [rows, used] */
    struct route *sorted; /* [rows, used] by expert, then by row */
    int32_t *first;       /* [count + 1] where an expert begins in `sorted` */
};

/* Arrays in cpu->routed, [MATMUL_ROWS, ...]. */
struct routed {
    float *x;       /* d_model */
    float *gate_up; /* 2 d_ff */
    float *ff;      /* d_ff */
    float *y;       /* d_model */
};

/* ---- Loading ---- */

static size_t routed_floats(const struct kern_experts *experts) {
    return MATMUL_ROWS * (2 * (size_t)experts->spec.d_model + 3 * (size_t)experts->d_ff);
}

int cpu_experts_reserve(struct cpu *cpu, int rows) {
    size_t uses = (size_t)rows * (size_t)cpu->experts_used;
    if (!cpu->experts_used) return 0;
    return cpu_room_grow(&cpu->routes, 2 * uses * sizeof(struct route) +
                                           ((size_t)cpu->experts + 1) * sizeof(int32_t));
}

int cpu_experts_load(struct kern *kern, const struct kern_experts_spec *spec,
                     struct kern_experts **out, struct fault *fault) {
    struct cpu *cpu = cpu_of(kern);
    CHECK(spec->used >= 1 && spec->used <= spec->count && spec->count <= KERN_EXPERTS_MAX);
    size_t count = (size_t)spec->count;
    struct kern_experts *experts = mem_try_alloc(1, sizeof *experts);
    if (experts) experts->gate_up = mem_try_alloc(2 * count, sizeof *experts->gate_up);
    int rc = experts && experts->gate_up ? 0 : ERR_NOMEM;
    if (!rc) {
        experts->spec = *spec;
        experts->spec.gate_up = experts->spec.down = NULL;
        experts->d_ff = (int)(spec->gate_up[0]->width / (spec->ungated ? 1 : 2));
        experts->down = experts->gate_up + count;
        memcpy(experts->gate_up, spec->gate_up, count * sizeof *experts->gate_up);
        memcpy(experts->down, spec->down, count * sizeof *experts->down);
        rc = cpu_room_grow(&cpu->routed, routed_floats(experts) * sizeof(float));
    }
    if (rc) {
        cpu_experts_free(kern, experts);
        return fault_set(fault, rc, "", "no memory for a layer's experts");
    }
    if (cpu->experts < spec->count) cpu->experts = spec->count;
    if (cpu->experts_used < spec->used) cpu->experts_used = spec->used;
    *out = experts;
    return 0;
}

void cpu_experts_free(struct kern *kern, struct kern_experts *experts) {
    (void)kern;
    if (!experts) return;
    mem_free(experts->gate_up);
    mem_free(experts);
}

/* ---- Choosing ---- */

struct choosing {
    const struct kern_experts_spec *spec;
    const float *logits;
    struct routes routes;
    struct cpu_tickets rows;
};

static bool is_chosen(const struct route *chosen, int count, int expert) {
    for (int k = 0; k < count; k++)
        if (chosen[k].expert == expert) return true;
    return false;
}

/* Chooses experts, the largest of `by` first. NaN chooses arbitrary ones; such a step fails when it
 * is sampled. */
static void choose_best(const struct kern_experts_spec *spec, const float *by, int32_t row,
                        struct route *chosen) {
    for (int k = 0; k < spec->used; k++) {
        int best = -1;
        for (int e = 0; e < spec->count; e++)
            if (!is_chosen(chosen, k, e) && (best < 0 || by[e] > by[best])) best = e;
        chosen[k] = (struct route){.row = row, .expert = best};
    }
}

/* Experts of groups that are not used get the least number. */
static void close_groups(const struct kern_experts_spec *spec, float *by) {
    const int size = spec->count / spec->groups;
    float sums[KERN_EXPERT_GROUPS_MAX];
    bool used[KERN_EXPERT_GROUPS_MAX] = {false};
    for (int g = 0; g < spec->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            second = by[e] > first ? first : by[e] > second ? by[e] : second;
            first = by[e] > first ? by[e] : first;
        }
        sums[g] = spec->group_best ? first : first + second;
    }
    for (int k = 0; k < spec->groups_used; k++) {
        int best = -1;
        for (int g = 0; g < spec->groups; g++)
            if (!used[g] && (best < 0 || sums[g] > sums[best])) best = g;
        used[best] = true;
    }
    for (int e = 0; e < spec->count; e++)
        if (!used[e / size]) by[e] = -INFINITY;
}

/* The softmax of all logits, or the sigmoid of each. */
static void score_row(const struct kern_experts_spec *spec, const float *logits, float *scores) {
    float most = logits[0], sum = 0;
    for (int e = 1; e < spec->count; e++) most = logits[e] > most ? logits[e] : most;
    for (int e = 0; e < spec->count; e++) {
        scores[e] = spec->sigmoid ? 1 / (1 + expf(-logits[e])) : expf(logits[e] - most);
        sum += scores[e];
    }
    for (int e = 0; e < spec->count && !spec->sigmoid; e++) scores[e] /= sum;
}

/* Chooses by scores, not by logits. */
static void choose_by_scores(const struct kern_experts_spec *spec, const float *logits, int32_t row,
                             struct route *chosen) {
    float scores[KERN_EXPERTS_MAX], by[KERN_EXPERTS_MAX], sum = 0;
    score_row(spec, logits, scores);
    for (int e = 0; e < spec->count; e++)
        by[e] = scores[e] + (spec->select_bias ? spec->select_bias[e] : 0);
    if (spec->groups > 1) close_groups(spec, by);
    choose_best(spec, by, row, chosen);
    for (int k = 0; k < spec->used; k++) sum += scores[chosen[k].expert];
    for (int k = 0; k < spec->used; k++)
        chosen[k].weight = scores[chosen[k].expert] / (spec->normalise ? sum + SUM_LEAST : 1);
}

static void choose_by_logits(const struct kern_experts_spec *spec, const float *logits, int32_t row,
                             struct route *chosen) {
    choose_best(spec, logits, row, chosen);
    const float most = logits[chosen[0].expert];
    float sum = 0;
    for (int k = 0; k < spec->used; k++) {
        chosen[k].weight = expf(logits[chosen[k].expert] - most);
        sum += chosen[k].weight;
    }
    for (int e = 0; e < spec->count && !spec->normalise; e++)
        if (!is_chosen(chosen, spec->used, e)) sum += expf(logits[e] - most);
    for (int k = 0; k < spec->used; k++) chosen[k].weight /= sum;
}

static void choose_row(const struct kern_experts_spec *spec, const float *logits, int32_t row,
                       struct route *chosen) {
    if (spec->sigmoid || spec->select_bias || spec->groups > 1)
        choose_by_scores(spec, logits, row, chosen);
    else
        choose_by_logits(spec, logits, row, chosen);
    for (int k = 0; k < spec->used && spec->scale > 0; k++) chosen[k].weight *= spec->scale;
    for (int k = 0; k < spec->used && spec->factors; k++)
        chosen[k].weight *= spec->factors[chosen[k].expert];
}

static void choose_rows(void *arg, int worker) {
    (void)worker;
    struct choosing *job = arg;
    const struct kern_experts_spec *spec = job->spec;
    int64_t end;
    for (int64_t row; (row = cpu_tickets_take(&job->rows, 16, &end)) >= 0;)
        for (; row < end; row++)
            choose_row(spec, job->logits + row * spec->count, (int32_t)row,
                       job->routes.chosen + row * spec->used);
}

/* Sorts by counting, so that the uses of an expert stay in the order of their rows. */
static void sort_routes(const struct routes *routes, int count, size_t uses) {
    int32_t *first = routes->first;
    memset(first, 0, ((size_t)count + 1) * sizeof *first);
    for (size_t i = 0; i < uses; i++) first[routes->chosen[i].expert + 1]++;
    for (int e = 0; e < count; e++) first[e + 1] += first[e];
    for (size_t i = 0; i < uses; i++) {
        int expert = routes->chosen[i].expert;
        routes->sorted[first[expert]++] = routes->chosen[i];
    }
    for (int e = count; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

/* ---- Computing ---- */

struct moving {
    const struct route *routes;
    float *rows;      /* [count, dim], packed */
    const float *all; /* gathering: [all rows, dim] */
    float *sum;       /* adding: [all rows, dim] */
    int dim;
    struct cpu_tickets tickets;
};

static void gather_some(void *arg, int worker) {
    (void)worker;
    struct moving *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;)
        for (; i < end; i++)
            memcpy(job->rows + i * job->dim, job->all + (int64_t)job->routes[i].row * job->dim,
                   (size_t)job->dim * sizeof(float));
}

static void experts_add_some(void *arg, int worker) {
    (void)worker;
    struct moving *job = arg;
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 4, &end)) >= 0;) {
        for (; i < end; i++) {
            const float *from = job->rows + i * job->dim, weight = job->routes[i].weight;
            float *to = job->sum + (int64_t)job->routes[i].row * job->dim;
            for (int j = 0; j < job->dim; j++) to[j] += weight * from[j];
        }
    }
}

/* Computes one expert for at most MATMUL_ROWS rows. */
static void experts_compute(struct cpu *cpu, const struct kern_experts *experts, int expert,
                            float *y, const float *x, const struct route *routes, int count) {
    struct kern *kern = &cpu->base;
    const struct kern_experts_spec *spec = &experts->spec;
    const ptrdiff_t e = expert, d_model = spec->d_model, d_ff = experts->d_ff;
    const float *gate_up_bias = spec->gate_up_bias, *down_bias = spec->down_bias;
    struct routed own = {.x = cpu->routed.mem};
    own.y = own.x + MATMUL_ROWS * d_model;
    own.gate_up = own.y + MATMUL_ROWS * d_model;
    own.ff = own.gate_up + (ptrdiff_t)MATMUL_ROWS * 2 * d_ff;
    struct moving job = {.routes = routes, .rows = own.x, .all = x, .dim = spec->d_model};
    cpu_tickets_set(&job.tickets, count);
    cpu_run(cpu, count * d_model, gather_some, &job);
    cpu_matmul(kern, own.gate_up, own.x, experts->gate_up[e],
               gate_up_bias ? gate_up_bias + e * 2 * spec->d_ff : NULL, count, KERN_SET);
    if (spec->ungated)
        cpu_glu_apart(kern, own.ff, own.gate_up, own.gate_up, d_ff, count, (int)d_ff,
                      spec->activation);
    else
        cpu_glu(kern, own.ff, own.gate_up, count, (int)d_ff, spec->activation);
    cpu_matmul(kern, own.y, own.ff, experts->down[e], down_bias ? down_bias + e * d_model : NULL,
               count, KERN_SET);
    job.rows = own.y;
    job.sum = y;
    cpu_tickets_set(&job.tickets, count);
    cpu_run(cpu, count * d_model, experts_add_some, &job);
}

void cpu_experts(struct kern *kern, float *y, const float *x, const float *logits,
                 const struct kern_experts *experts, int rows) {
    struct cpu *cpu = cpu_of(kern);
    const struct kern_experts_spec *spec = &experts->spec;
    const size_t uses = (size_t)rows * (size_t)spec->used;
    CHECK_MSG(cpu_experts_reserve(cpu, rows) == 0, "no memory for the experts of %d rows", rows);
    struct choosing choosing = {
        .spec = spec, .logits = logits, .routes = {.chosen = cpu->routes.mem}};
    struct routes *routes = &choosing.routes;
    if (spec->sets) memset(y, 0, (size_t)rows * (size_t)spec->d_model * sizeof *y);
    routes->sorted = routes->chosen + uses;
    routes->first = (int32_t *)(void *)(routes->sorted + uses);
    cpu_tickets_set(&choosing.rows, rows);
    cpu_run(cpu, (int64_t)uses * spec->count, choose_rows, &choosing);
    sort_routes(routes, spec->count, uses);
    for (int e = 0; e < spec->count; e++) {
        const int32_t end = routes->first[e + 1];
        for (int32_t at = routes->first[e]; at < end; at += MATMUL_ROWS)
            experts_compute(cpu, experts, e, y, x, routes->sorted + at,
                            end - at < MATMUL_ROWS ? end - at : MATMUL_ROWS);
    }
}
