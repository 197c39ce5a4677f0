/* The fit of gates: rates, losses and gradients against a reference in double that is written from
 * the formulas (differentiated numerically), and whole fits of texts whose worths are made up. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "fit/fit.h"
#include "fit/random.h"
#include "fit/rank.h"
#include "kernels/number.h"

enum { LAYERS = 2, HEADS = 3, D_MODEL = 21, ENTRIES = 45, STREAMS = LAYERS * HEADS };
enum { WINDOW = 5, POS = WINDOW * WORTH_WINDOW };

/* ---- The reference ---- */

static double parameter(const struct fit_net *net, int layer, size_t at, size_t moved, double by) {
    const size_t i = (size_t)layer * net->each + at;
    return (double)net->values[i] + (i == moved ? by : 0);
}

/* log(-log_beta) with number `moved` of the network changed by `by`. */
static double reference_rate(const struct fit_net *net, int layer, int head, const uint16_t *x,
                             size_t moved, double by) {
    const size_t b1 = (size_t)net->inputs * FIT_WIDTH, last = b1 + FIT_WIDTH;
    const size_t c = last + (size_t)net->heads * FIT_WIDTH;
    double z = parameter(net, layer, c + (size_t)head, moved, by);
    for (size_t m = 0; m < FIT_WIDTH; m++) {
        double a = parameter(net, layer, b1 + m, moved, by);
        for (size_t d = 0; d < (size_t)net->d_model; d++)
            a += parameter(net, layer, d * FIT_WIDTH + m, moved, by) * (double)net->scale[layer] *
                 (double)number_from_bf16(x[d]);
        z += parameter(net, layer, last + (size_t)head * FIT_WIDTH + m, moved, by) * a /
             (1 + exp(-a));
    }
    return log(log1p(exp(-z)));
}

static double reference_stays(const struct fit_eviction *e, const double *rates, int s, int i,
                              double cut) {
    const double rank = log((double)(e->pos - e->at[i])) + rates[s * e->entries + i];
    return 1 / (1 + exp((rank - cut) / (double)FIT_SOFTNESS));
}

static double reference_loss(const struct fit_eviction *e, const double *rates) {
    double free = 0, low = -40, high = 40, lost = 0;
    for (int i = 0; i < e->entries; i++) free += e->at[i] >= 4 && e->pos - e->at[i] > 16;
    const double wanted = free * e->streams * (e->budget - 20) / (e->pos - 20);
    for (int step = 0; step < 200; step++) {
        const double cut = (low + high) / 2;
        double sum = 0;
        for (int s = 0; s < e->streams; s++)
            for (int i = 0; i < e->entries; i++)
                if (e->at[i] >= 4 && e->pos - e->at[i] > 16)
                    sum += reference_stays(e, rates, s, i, cut);
        *(sum > wanted ? &high : &low) = cut;
    }
    for (int s = 0; s < e->streams; s++)
        for (int i = 0; i < e->entries; i++)
            if (e->at[i] >= 4 && e->pos - e->at[i] > 16)
                lost += (double)e->worths[s * e->entries + i] *
                        (1 - reference_stays(e, rates, s, i, low));
    return lost;
}

/* ---- One eviction ---- */

struct sample {
    struct fit_net net;
    int32_t at[ENTRIES];
    uint16_t x[LAYERS][ENTRIES][D_MODEL];
    float worths[STREAMS * ENTRIES], rates[STREAMS * ENTRIES], slopes[STREAMS * ENTRIES];
    float hidden[LAYERS][(ENTRIES + 15) / 16 * 16 * FIT_WIDTH];
    float *scratch;
    struct fit_eviction eviction;
};

static void open_sample(struct sample *s) {
    uint64_t random = 11;
    cr_assert_eq(fit_net_open(&s->net, LAYERS, HEADS, D_MODEL, 2.5f, 3), 0);
    s->net.scale[0] = 0.5f;
    s->scratch = mem_must_alloc(fit_net_scratch(&s->net, ENTRIES), sizeof(float));
    for (int l = 0; l < LAYERS; l++) /* beyond what they begin with */
        for (size_t i = 0; i < s->net.each; i++)
            s->net.values[(size_t)l * s->net.each + i] += 0.05f * fit_random_normal(&random);
    for (int i = 0; i < ENTRIES; i++) s->at[i] = i * 7 + (int32_t)(splitmix_next(&random) % 7);
    for (int i = 0; i < LAYERS * ENTRIES * D_MODEL; i++)
        (&s->x[0][0][0])[i] = number_to_bf16(fit_random_normal(&random));
    for (int i = 0; i < STREAMS * ENTRIES; i++) s->worths[i] = expf(2 * fit_random_normal(&random));
    s->eviction = (struct fit_eviction){.streams = STREAMS,
                                        .entries = ENTRIES,
                                        .at = s->at,
                                        .worths = s->worths,
                                        .rates = s->rates,
                                        .pos = POS,
                                        .budget = 90};
    for (int l = 0; l < LAYERS; l++)
        fit_net_rates(&s->net, l, &s->x[l][0][0], ENTRIES, s->scratch, s->hidden[l],
                      s->rates + l * HEADS * ENTRIES);
}

static void close_sample(struct sample *s) {
    fit_net_close(&s->net);
    mem_free(s->scratch);
}

static void reference_rates(const struct sample *s, double *rates, size_t moved, double by) {
    for (int k = 0; k < STREAMS; k++)
        for (int i = 0; i < ENTRIES; i++)
            rates[k * ENTRIES + i] =
                reference_rate(&s->net, k / HEADS, k % HEADS, s->x[k / HEADS][i], moved, by);
}

Test(fit, rates_and_loss) {
    static struct sample s;
    double rates[STREAMS * ENTRIES];
    float log_ages[ENTRIES];
    open_sample(&s);
    reference_rates(&s, rates, SIZE_MAX, 0);
    for (int i = 0; i < STREAMS * ENTRIES; i++)
        cr_assert(fabs((double)s.rates[i] - rates[i]) < 2e-6 * (1 + fabs(rates[i])), "%d: %g, %g",
                  i, (double)s.rates[i], rates[i]);
    const double want = reference_loss(&s.eviction, rates);
    const double found = fit_rank_loss(&s.eviction, log_ages, NULL);
    cr_assert(fabs(found - want) < 2e-4 * want, "%g, %g", found, want);
    double all = 0;
    for (int k = 0; k < STREAMS; k++)
        for (int i = 0; i < ENTRIES; i++)
            if (s.at[i] >= FIT_SINKS && POS - s.at[i] > FIT_RECENT)
                all += (double)s.worths[k * ENTRIES + i];
    cr_assert(fabs(fit_rank_worth(&s.eviction) - all) < 1e-9 * all);
    close_sample(&s);
}

/* Numbers of all kinds in both networks. */
Test(fit, gradients) {
    static struct sample s;
    double up[STREAMS * ENTRIES], down[STREAMS * ENTRIES], worst = 0, most = 0;
    float log_ages[ENTRIES];
    const double by = 1e-5;
    open_sample(&s);
    fit_rank_loss(&s.eviction, log_ages, s.slopes);
    for (int l = 0; l < LAYERS; l++)
        fit_net_learn(&s.net, l, &s.x[l][0][0], ENTRIES, s.scratch, s.hidden[l],
                      s.slopes + l * HEADS * ENTRIES);
    for (size_t i = 0; i < LAYERS * s.net.each; i += 1 + i % 11) {
        reference_rates(&s, up, i, by);
        reference_rates(&s, down, i, -by);
        const double want =
            (reference_loss(&s.eviction, up) - reference_loss(&s.eviction, down)) / (2 * by);
        worst = fmax(worst, fabs(want - (double)s.net.slopes[i]));
        most = fmax(most, fabs(want));
    }
    cr_assert(worst < 1e-3 * most, "off by %g of %g", worst, most);
    close_sample(&s);
}

/* Rates far from 0 stay finite, and so do their slopes. */
Test(fit, extreme_rates) {
    static struct sample s;
    open_sample(&s);
    for (int sign = -1; sign <= 1; sign += 2) {
        const size_t c = s.net.each - HEADS;
        for (int h = 0; h < HEADS; h++) s.net.values[c + (size_t)h] = (float)sign * 80;
        fit_net_rates(&s.net, 0, &s.x[0][0][0], ENTRIES, s.scratch, s.hidden[0], s.rates);
        for (int i = 0; i < HEADS * ENTRIES; i++) {
            const double want = sign > 0 ? -80 : log(80.0);
            cr_assert(fabs((double)s.rates[i] - want) < (sign > 0 ? 10 : 0.2), "%g",
                      (double)s.rates[i]);
            s.slopes[i] = 1;
        }
        fit_net_learn(&s.net, 0, &s.x[0][0][0], ENTRIES, s.scratch, s.hidden[0], s.slopes);
        for (size_t i = 0; i < s.net.each; i++) cr_assert(isfinite(s.net.slopes[i]));
    }
    close_sample(&s);
}

/* Adam against its formula in double. */
Test(fit, steps) {
    struct fit_net net;
    double mean = 0, square = 0, value;
    cr_assert_eq(fit_net_open(&net, 1, 1, 16, 2, 1), 0);
    value = (double)net.values[5];
    for (int step = 1; step <= 5; step++) {
        const double slope = step - 2.5;
        net.slopes[5] = (float)slope;
        fit_net_step(&net, 0, 0.01f, step);
        mean = 0.9 * mean + 0.1 * slope;
        square = 0.98 * square + 0.02 * slope * slope;
        value -=
            0.01 * (mean / (1 - pow(0.9, step))) / (sqrt(square / (1 - pow(0.98, step))) + 1e-8);
        cr_assert(fabs((double)net.values[5] - value) < 1e-6);
        cr_assert_eq(net.slopes[5], 0);
    }
    fit_net_close(&net);
}

/* ---- Whole fits ---- */

enum { TEXTS = 4, TOKENS = 8 * WORTH_WINDOW };

/* Entries whose input 0 is positive are worth something to the end, in head 1 only; all others are
 * forgotten after a window. */
static void make_text(struct worth_text *text, uint64_t seed) {
    *text = (struct worth_text){.layers = LAYERS,
                                .heads = HEADS,
                                .d_model = D_MODEL,
                                .tokens = TOKENS,
                                .windows = TOKENS / WORTH_WINDOW,
                                .entries = 128};
    const size_t each = LAYERS * HEADS * 128;
    text->at = mem_must_alloc(128, sizeof *text->at);
    text->x = mem_must_alloc((size_t)LAYERS * 128 * D_MODEL, sizeof *text->x);
    text->worths = mem_must_alloc(each * (size_t)text->windows, sizeof *text->worths);
    for (int i = 0; i < 128; i++) text->at[i] = i * TOKENS / 128;
    for (int i = 0; i < LAYERS * 128 * D_MODEL; i++)
        text->x[i] = number_to_bf16(20 * fit_random_normal(&seed));
    for (int c = 0; c < text->windows; c++)
        for (int k = 0; k < LAYERS * HEADS * 128; k++) {
            const int i = k % 128, head = k / 128 % HEADS, layer = k / 128 / HEADS;
            const int age = c * WORTH_WINDOW - text->at[i];
            const bool lasts = number_from_bf16(text->x[(layer * 128 + i) * D_MODEL]) > 0;
            text->worths[(size_t)c * each + (size_t)k] = age <= 0              ? 0
                                                         : age <= WORTH_WINDOW ? 0.2f
                                                         : head == 1 && lasts  ? 1.0f
                                                                               : 0.001f;
        }
}

static void fit_texts(struct worth_text *texts, int threads, int steps, struct fit_net *net,
                      struct fit_result *result) {
    struct cpu_team *team;
    struct fault fault = {0};
    const struct fit_options options = {.steps = steps, .seed = 9};
    cr_assert_eq(cpu_team_open(threads, &team), 0);
    cr_assert_eq(fit_gates(&options, texts, TEXTS, team, net, result, &fault), 0, "%s", fault.text);
    cpu_team_close(team);
}

/* The mean rate of a text's entries in head 1 that last, or of all other entries. */
static double mean_rate(const struct fit_net *net, const struct worth_text *text, bool lasting) {
    float *scratch = mem_must_alloc(fit_net_scratch(net, 128), sizeof *scratch);
    float *hidden = mem_must_alloc((size_t)128 * FIT_WIDTH, sizeof *hidden), rates[HEADS * 128];
    double sum = 0;
    int count = 0;
    for (int l = 0; l < LAYERS; l++) {
        const uint16_t *x = text->x + (size_t)l * 128 * D_MODEL;
        fit_net_rates(net, l, x, 128, scratch, hidden, rates);
        for (int k = 0; k < HEADS * 128; k++) {
            if ((k / 128 == 1 && number_from_bf16(x[k % 128 * D_MODEL]) > 0) != lasting) continue;
            sum += (double)rates[k];
            count++;
        }
    }
    mem_free(scratch);
    mem_free(hidden);
    return sum / count;
}

Test(fit, finds_what_lasts) {
    struct worth_text texts[TEXTS];
    struct fit_net net, other;
    struct fit_result result, again;
    for (int i = 0; i < TEXTS; i++) make_text(&texts[i], (uint64_t)i + 1);
    fit_texts(texts, 1, 120, &net, &result);
    cr_assert(result.lost < 0.7 * result.before, "%g, before %g", result.lost, result.before);
    const double lasting = mean_rate(&net, &texts[0], true);
    cr_assert(lasting < mean_rate(&net, &texts[0], false) - 2, "%g, others %g", lasting,
              mean_rate(&net, &texts[0], false));
    cr_assert(result.steps == 120 && result.best > 0);
    /* The same bits for any number of threads. */
    for (int threads = 2; threads <= 4; threads++) {
        fit_texts(texts, threads, 120, &other, &again);
        cr_assert_eq(memcmp(net.values, other.values, LAYERS * net.each * sizeof(float)), 0);
        cr_assert_eq(memcmp(&result, &again, sizeof result), 0);
        fit_net_close(&other);
    }
    fit_net_close(&net);
    for (int i = 0; i < TEXTS; i++) worth_text_close(&texts[i]);
}

/* Takes the last head from the last layer. */
static void take_head(struct worth_text *text) {
    const size_t had = LAYERS * HEADS * 128, left = had - 128;
    text->layer_heads = mem_must_alloc(LAYERS, sizeof *text->layer_heads);
    for (int l = 0; l < LAYERS; l++) text->layer_heads[l] = l < LAYERS - 1 ? HEADS : HEADS - 1;
    for (size_t c = 0; c < (size_t)text->windows; c++)
        memmove(text->worths + c * left, text->worths + c * had, left * sizeof *text->worths);
}

/* The part that evictions of a text lose if the newest entries stay. */
static double lost_with_newest(const struct worth_text *text) {
    static const double parts[] = {1.0 / 4, 1.0 / 8, 1.0 / 16};
    const int streams = worth_text_stream(text, LAYERS);
    float *rates = mem_must_alloc((size_t)streams * 128, sizeof *rates), ages[128];
    double sum = 0;
    for (int p = 0; p < 3; p++) {
        double lost = 0, all = 0;
        for (int c = 1; c < text->windows; c++) {
            const struct fit_eviction e = {streams,
                                           128,
                                           text->at,
                                           text->worths + (size_t)(c * streams * 128),
                                           rates,
                                           c * WORTH_WINDOW,
                                           parts[p] * TOKENS};
            if (c * WORTH_WINDOW <= e.budget) continue;
            all += fit_rank_worth(&e);
            lost += fit_rank_loss(&e, ages, NULL);
        }
        sum += lost / all;
    }
    mem_free(rates);
    return sum / 3;
}

/* Only heads that are there compete. */
Test(fit, layers_with_fewer_heads) {
    struct worth_text texts[TEXTS];
    struct fit_net net, other;
    struct fit_result result;
    for (int i = 0; i < TEXTS; i++) {
        make_text(&texts[i], (uint64_t)i + 1);
        take_head(&texts[i]);
    }
    cr_assert_eq(worth_text_stream(&texts[0], LAYERS), LAYERS * HEADS - 1);
    fit_texts(texts, 1, 120, &net, &result);
    cr_assert_float_eq(result.before, lost_with_newest(&texts[0]), 1e-9);
    cr_assert(result.lost < 0.7 * result.before, "%g, before %g", result.lost, result.before);
    fit_texts(texts, 3, 120, &other, &result);
    cr_assert_eq(memcmp(net.values, other.values, LAYERS * net.each * sizeof(float)), 0);
    fit_net_close(&net);
    fit_net_close(&other);
    for (int i = 0; i < TEXTS; i++) worth_text_close(&texts[i]);
}

Test(fit, ends_where_nothing_gets_better) {
    struct worth_text texts[TEXTS];
    struct fit_net net;
    struct fit_result result;
    for (int i = 0; i < TEXTS; i++) make_text(&texts[i], (uint64_t)i + 1);
    /* In the text that is held out, entries are worth much where those of the others are not. */
    const size_t count = (size_t)texts[0].windows * LAYERS * HEADS * 128;
    float most = 0;
    for (size_t k = 0; k < count; k++) most = fmaxf(most, texts[0].worths[k]);
    for (size_t k = 0; k < count; k++) texts[0].worths[k] = most - texts[0].worths[k];
    fit_texts(texts, 1, 0, &net, &result);
    cr_assert(result.steps < FIT_STEPS && result.steps == result.best + FIT_PATIENCE,
              "best after %d of %d", result.best, result.steps);
    fit_net_close(&net);
    for (int i = 0; i < TEXTS; i++) worth_text_close(&texts[i]);
}

static bool stop_at_30(void *arg, int step, int steps, double lost) {
    *(int *)arg = step;
    cr_assert(steps == FIT_STEPS && (step < FIT_EVERY + 1 || isfinite(lost)));
    return step < 30;
}

Test(fit, can_be_ended) {
    struct worth_text texts[TEXTS];
    struct fit_net net;
    struct fit_result result;
    struct cpu_team *team;
    struct fault fault = {0};
    int seen = 0;
    const struct fit_options options = {.progress = stop_at_30, .arg = &seen};
    for (int i = 0; i < TEXTS; i++) make_text(&texts[i], (uint64_t)i + 1);
    cr_assert_eq(cpu_team_open(1, &team), 0);
    cr_assert_eq(fit_gates(&options, texts, TEXTS, team, &net, &result, &fault), 0);
    cr_assert(seen == 30 && result.steps == 30 && result.best > 0);
    fit_net_close(&net);
    cpu_team_close(team);
    for (int i = 0; i < TEXTS; i++) worth_text_close(&texts[i]);
}

/* Texts whose arrays are elsewhere until they are wanted. */
struct shelf {
    const struct worth_text *texts;
    struct worth_text *loaded; /* share the arrays of the first */
    int loads, fail_after;
};

static bool load_from_shelf(void *arg, int i) {
    struct shelf *shelf = arg;
    const struct worth_text *from = &shelf->texts[i];
    struct worth_text *to = &shelf->loaded[i];
    const size_t entries = (size_t)from->entries, inputs = LAYERS * entries * D_MODEL;
    if (shelf->loads++ == shelf->fail_after) return false;
    memcpy(to->at, from->at, entries * sizeof *to->at);
    memcpy(to->x, from->x, inputs * sizeof *to->x);
    memcpy(to->worths, from->worths,
           (size_t)from->windows * LAYERS * HEADS * entries * sizeof *to->worths);
    return true;
}

Test(fit, loads_one_text_at_a_time) {
    struct worth_text texts[TEXTS], loaded[TEXTS];
    struct shelf shelf = {.texts = texts, .loaded = loaded, .fail_after = -1};
    struct fit_net net, wanted;
    struct fit_result result;
    struct cpu_team *team;
    struct fault fault = {0};
    const struct fit_options options = {
        .steps = 40, .seed = 9, .load = load_from_shelf, .arg = &shelf};
    for (int i = 0; i < TEXTS; i++) {
        make_text(&texts[i], (uint64_t)i + 1);
        loaded[i] = texts[i];
        if (i == 0) cr_assert_eq(worth_text_alloc(&loaded[0]), 0);
        loaded[i].at = loaded[0].at;
        loaded[i].x = loaded[0].x;
        loaded[i].worths = loaded[0].worths;
    }
    fit_texts(texts, 1, options.steps, &wanted, &result);
    cr_assert_eq(cpu_team_open(1, &team), 0);
    cr_assert_eq(fit_gates(&options, loaded, TEXTS, team, &net, &result, &fault), 0);
    cr_expect_eq(memcmp(net.values, wanted.values, LAYERS * net.each * sizeof *net.values), 0);
    fit_net_close(&net);
    const int loads = shelf.loads;
    for (shelf.fail_after = 0; shelf.fail_after < loads; shelf.fail_after += loads / 9) {
        shelf.loads = 0;
        cr_assert_eq(fit_gates(&options, loaded, TEXTS, team, &net, &result, &fault), ERR_IO);
        cr_expect_not_null(strstr(fault.text, "cannot be read back"));
    }
    fit_net_close(&wanted);
    cpu_team_close(team);
    worth_text_free(&loaded[0]);
    for (int i = 0; i < TEXTS; i++) worth_text_close(&texts[i]);
}

Test(fit, too_few_texts_and_lack_of_memory) {
    struct worth_text texts[TEXTS];
    struct fit_net net;
    struct fit_result result;
    struct cpu_team *team;
    struct fault fault = {0};
    const struct fit_options options = {.steps = 1};
    for (int i = 0; i < TEXTS; i++) make_text(&texts[i], (uint64_t)i + 1);
    cr_assert_eq(cpu_team_open(1, &team), 0);
    cr_assert_eq(fit_gates(&options, texts, 1, team, &net, &result, &fault), ERR_INVALID);
    for (int n = 0; n < 11; n++) {
        mem_fail_after(n);
        cr_assert_eq(fit_gates(&options, texts, TEXTS, team, &net, &result, &fault), ERR_NOMEM,
                     "%d", n);
    }
    mem_fail_after(-1);
    cr_assert_eq(fit_gates(&options, texts, TEXTS, team, &net, &result, &fault), 0);
    fit_net_close(&net);
    cpu_team_close(team);
    for (int i = 0; i < TEXTS; i++) worth_text_close(&texts[i]);
}
