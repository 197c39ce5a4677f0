#include "fit/fit.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "fit/random.h"
#include "fit/rank.h"
#include "kernels/number.h"

#define SPEED       3e-3 /* Adam's, at its most */
#define WARM_UP     20   /* steps */
#define PART_LEAST  (1.0 / 32)
#define PART_MOST   0.4
#define WINDOWS_MAX FIT_EVICTIONS

static const double held_out_parts[] = {1.0 / 4, 1.0 / 8, 1.0 / 16};

/* Some evictions of one text, computed together. */
struct fit_job {
    struct fit_net *net;
    const struct worth_text *texts; /* [text_count] */
    int text_count;
    bool (*load)(void *arg, int i); /* as in struct fit_options; NULL */
    void *load_arg;
    const struct worth_text *text; /* the one that is evicted from */
    struct cpu_team *team;
    double budget;
    int windows[WINDOWS_MAX], count;
    float *scratch; /* [threads][scratch_each] */
    size_t scratch_each;
    float *hidden;   /* [layers][rows][FIT_WIDTH] */
    float *rates;    /* [layers][heads][entries] */
    float *slopes;   /* [WINDOWS_MAX][layers][heads][entries] of the windows' losses */
    float *best;     /* [layers][each] the networks with the lowest held-out loss */
    double *squares; /* [layers] sums over the inputs of all texts */
    double lost[WINDOWS_MAX], all[WINDOWS_MAX];
    float weight; /* by which slopes are multiplied */
    float speed;
    int step;
    struct cpu_tickets tickets;
};

/* Where the rates of a layer begin; of layer `layers` the number of all rates. */
static size_t rates_before(const struct fit_job *job, int64_t layer) {
    return (size_t)worth_text_stream(job->text, (int)layer) * (size_t)job->text->entries;
}

static const uint16_t *inputs_of(const struct fit_job *job, int64_t layer) {
    return job->text->x + (size_t)layer * (size_t)job->text->entries * (size_t)job->text->d_model;
}

static float *hidden_of(const struct fit_job *job, int64_t layer) {
    return job->hidden + (size_t)layer * (size_t)fit_net_rows(job->text->entries) * FIT_WIDTH;
}

/* The job is about texts[i] now. */
static bool use_text(struct fit_job *job, int i) {
    job->text = &job->texts[i];
    return !job->load || job->load(job->load_arg, i);
}

/* ---- The parts of a step, each over layers or windows ---- */

static void run_parts(struct fit_job *job, int count, cpu_work *work) {
    cpu_tickets_set(&job->tickets, count);
    cpu_team_run(job->team, work, job);
}

static void compute_rates(void *arg, int worker) {
    struct fit_job *job = arg;
    float *scratch = job->scratch + (size_t)worker * job->scratch_each;
    int64_t end;
    for (int64_t l; (l = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;)
        fit_net_rates(job->net, (int)l, inputs_of(job, l), job->text->entries, scratch,
                      hidden_of(job, l), job->rates + rates_before(job, l));
}

static void compute_losses(void *arg, int worker) {
    struct fit_job *job = arg;
    const size_t numbers = rates_before(job, job->net->layers);
    int64_t end;
    for (int64_t i; (i = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;) {
        const struct fit_eviction e = {.streams = worth_text_stream(job->text, job->net->layers),
                                       .entries = job->text->entries,
                                       .at = job->text->at,
                                       .worths =
                                           job->text->worths + (size_t)job->windows[i] * numbers,
                                       .rates = job->rates,
                                       .pos = job->windows[i] * WORTH_WINDOW,
                                       .budget = job->budget};
        job->all[i] = fit_rank_worth(&e);
        job->lost[i] = fit_rank_loss(&e, job->scratch + (size_t)worker * job->scratch_each,
                                     job->slopes + (size_t)i * numbers);
    }
}

/* The windows' slopes are added in order, in those of the first window. */
static void learn_layers(void *arg, int worker) {
    struct fit_job *job = arg;
    const size_t numbers = rates_before(job, job->net->layers);
    float *scratch = job->scratch + (size_t)worker * job->scratch_each;
    int64_t end;
    for (int64_t l; (l = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;) {
        const size_t first = rates_before(job, l), each = rates_before(job, l + 1) - first;
        float *sum = job->slopes + first;
        for (size_t i = 0; i < each; i++) {
            for (int c = 1; c < job->count; c++) sum[i] += sum[(size_t)c * numbers + i];
            sum[i] *= job->weight;
        }
        fit_net_learn(job->net, (int)l, inputs_of(job, l), job->text->entries, scratch,
                      hidden_of(job, l), sum);
    }
}

static void step_layers(void *arg, int worker) {
    (void)worker;
    struct fit_job *job = arg;
    int64_t end;
    for (int64_t l; (l = cpu_tickets_take(&job->tickets, 1, &end)) >= 0;)
        fit_net_step(job->net, (int)l, job->speed, job->step);
}

/* ---- Losses ---- */

/* The first window before which an eviction at this budget would remove something. */
static int first_window(const struct worth_text *text, double budget) {
    int c = 1;
    while (c < text->windows && c * WORTH_WINDOW <= budget) c++;
    return c;
}

/* The part of the worth that the job's evictions lose; adds it to *lost and *all. */
static void add_losses(struct fit_job *job, double *lost, double *all) {
    run_parts(job, job->count, compute_losses);
    for (int i = 0; i < job->count; i++) {
        *lost += job->lost[i];
        *all += job->all[i];
    }
}

/* The part of the worth that is lost in one text at one budget, all windows. */
static double held_out_loss(struct fit_job *job, double part) {
    double lost = 0, all = 0;
    job->budget = part * job->text->tokens;
    for (int c = first_window(job->text, job->budget); c < job->text->windows; c += job->count) {
        const int left = job->text->windows - c;
        job->count = left < WINDOWS_MAX ? left : WINDOWS_MAX;
        for (int i = 0; i < job->count; i++) job->windows[i] = c + i;
        add_losses(job, &lost, &all);
    }
    return all > 0 ? lost / all : 0;
}

/* Returns false if a text cannot be loaded, as the functions below do. */
static bool evaluate(struct fit_job *job, bool newest, double *loss) {
    const int parts = sizeof held_out_parts / sizeof held_out_parts[0];
    double sum = 0;
    int n = 0;
    for (int i = 0; i < job->text_count; i += FIT_HELD_OUT, n += parts) {
        if (!use_text(job, i)) return false;
        if (newest)
            memset(job->rates, 0, rates_before(job, job->net->layers) * sizeof(float));
        else
            run_parts(job, job->net->layers, compute_rates);
        for (int p = 0; p < parts; p++) sum += held_out_loss(job, held_out_parts[p]);
    }
    *loss = sum / n;
    return true;
}

/* ---- Steps ---- */

/* A text that is not held out, a budget, and windows, ascending. */
static bool draw_job(struct fit_job *job, uint64_t *random) {
    int i = 0;
    while (i % FIT_HELD_OUT == 0) i = (int)(splitmix_next(random) % (uint64_t)job->text_count);
    if (!use_text(job, i)) return false;
    job->budget =
        job->text->tokens * PART_LEAST * pow(PART_MOST / PART_LEAST, fit_random_even(random));
    const int first = first_window(job->text, job->budget), all = job->text->windows - first;
    job->count = all < FIT_EVICTIONS ? all : FIT_EVICTIONS;
    int drawn = 0;
    for (int c = 0; drawn < job->count; c++)
        if (splitmix_next(random) % (uint64_t)(all - c) < (uint64_t)(job->count - drawn))
            job->windows[drawn++] = first + c;
    return true;
}

/* Linear warm-up, then a cosine to 1 %. */
static float speed_at(int step, int steps) {
    const double warm = fmin(1, (double)step / WARM_UP);
    return (float)(SPEED * warm *
                   (0.01 + 0.99 * 0.5 * (1 + cos(3.141592653589793 * step / (double)steps))));
}

static bool step_weights(struct fit_job *job, int steps, uint64_t *random) {
    for (int i = 0; i < FIT_ROWS; i++) {
        double lost = 0, all = 0;
        if (!draw_job(job, random)) return false;
        if (job->count == 0) continue;
        run_parts(job, job->net->layers, compute_rates);
        add_losses(job, &lost, &all);
        job->weight = all > 0 ? (float)(1 / (all * FIT_ROWS)) : 0;
        run_parts(job, job->net->layers, learn_layers);
    }
    job->speed = speed_at(job->step, steps);
    run_parts(job, job->net->layers, step_layers);
    return true;
}

static bool run_steps(const struct fit_options *options, struct fit_job *job,
                      struct fit_result *result) {
    const size_t bytes = (size_t)job->net->layers * job->net->each * sizeof *job->best;
    const int steps = options->steps > 0 ? options->steps : FIT_STEPS;
    uint64_t random = options->seed ^ 0x666974u;
    bool goes_on = true;
    if (options->progress) (void)options->progress(options->arg, 0, steps, INFINITY);
    if (!evaluate(job, true, &result->before)) return false;
    result->lost = INFINITY;
    for (job->step = 1; job->step <= steps && goes_on; job->step++) {
        if (!step_weights(job, steps, &random)) return false;
        result->steps = job->step;
        goes_on =
            !options->progress || options->progress(options->arg, job->step, steps, result->lost);
        if (job->step % FIT_EVERY && job->step < steps && goes_on) continue;
        double lost;
        if (!evaluate(job, false, &lost)) return false;
        if (!(lost < result->lost)) {
            goes_on &= job->step - result->best < FIT_PATIENCE;
            continue;
        }
        result->lost = lost;
        result->best = job->step;
        memcpy(job->best, job->net->values, bytes);
    }
    if (result->best) memcpy(job->net->values, job->best, bytes);
    return true;
}

/* ---- The whole ---- */

/* Inputs become about 1 in size: the root mean square over all texts. */
static bool set_input_scales(struct fit_job *job) {
    const int layers = job->net->layers;
    double entries = 0;
    for (int i = 0; i < job->text_count; i++) {
        if (!use_text(job, i)) return false;
        const size_t each = (size_t)job->text->entries * (size_t)job->net->d_model;
        for (int l = 0; l < layers; l++) {
            const uint16_t *x = inputs_of(job, l);
            for (size_t k = 0; k < each; k++)
                job->squares[l] += (double)number_from_bf16(x[k]) * (double)number_from_bf16(x[k]);
        }
        entries += job->text->entries;
    }
    for (int l = 0; l < layers; l++)
        job->net->scale[l] =
            job->squares[l] > 0 ? (float)sqrt(entries * job->net->d_model / job->squares[l]) : 1;
    return true;
}

static int open_job(struct fit_job *job) {
    int most = 0;
    for (int i = 0; i < job->text_count; i++)
        most = job->texts[i].entries > most ? job->texts[i].entries : most;
    const size_t layers = (size_t)job->net->layers;
    const size_t rates = (size_t)worth_text_stream(job->texts, job->net->layers) * (size_t)most;
    const size_t hidden = layers * (size_t)fit_net_rows(most) * FIT_WIDTH;
    job->scratch_each = fit_net_scratch(job->net, most);
    job->scratch =
        mem_try_alloc((size_t)cpu_team_threads(job->team) * job->scratch_each, sizeof(float));
    job->hidden = mem_try_alloc(hidden, sizeof(float));
    job->rates = mem_try_alloc(rates, sizeof(float));
    job->slopes = mem_try_alloc(rates, WINDOWS_MAX * sizeof(float));
    job->squares = mem_try_alloc(layers, sizeof *job->squares);
    job->best = mem_try_alloc(layers * job->net->each, sizeof *job->best);
    return job->scratch && job->hidden && job->rates && job->slopes && job->squares && job->best
               ? 0
               : ERR_NOMEM;
}

static void close_job(struct fit_job *job) {
    mem_free(job->scratch);
    mem_free(job->hidden);
    mem_free(job->rates);
    mem_free(job->slopes);
    mem_free(job->squares);
    mem_free(job->best);
}

int fit_gates(const struct fit_options *options, const struct worth_text *texts, int count,
              struct cpu_team *team, struct fit_net *net, struct fit_result *result,
              struct fault *fault) {
    *result = (struct fit_result){0};
    if (count < 2)
        return fault_set(fault, ERR_INVALID, "text",
                         "at least two texts are needed: one of them is only evaluated");
    const float bias = logf((float)texts[0].tokens / 8);
    struct fit_job job = {.net = net,
                          .team = team,
                          .texts = texts,
                          .text_count = count,
                          .load = options->load,
                          .load_arg = options->arg};
    int rc =
        fit_net_open(net, texts[0].layers, texts[0].heads, texts[0].d_model, bias, options->seed);
    if (rc) return fault_set(fault, rc, "", "no memory for the fit");
    net->layer_heads = texts[0].layer_heads;
    rc = open_job(&job);
    if (rc)
        fault_set(fault, rc, "", "no memory for the fit");
    else if (!set_input_scales(&job) || !run_steps(options, &job, result))
        rc = fault_set(fault, ERR_IO, "out",
                       "what was measured cannot be read back. Start the fit again");
    else if (!result->best)
        rc = fault_set(fault, ERR_INVALID, "text",
                       "no gates were found: what the held-out text loses is not a number. Fit to "
                       "other or longer texts");
    close_job(&job);
    net->layer_heads = NULL;
    if (rc) fit_net_close(net);
    return rc;
}
