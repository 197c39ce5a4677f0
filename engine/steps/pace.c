#include "engine/steps/pace.h"

#include <math.h>
#include <string.h>

static int size_class(int streams) {
    int size = 0;
    while (size < PACE_SIZES - 1 && (1 << size) < streams) size++;
    return size;
}

/* Returns the time of the same number of streams, or else of the nearest smaller number, or else of
 * the nearest larger one; 0: none is known. */
static double idle_of(const struct pace *pace, int streams) {
    int size = size_class(streams);
    for (int i = size; i >= 0; i--)
        if (pace->idle_ns[i] > 0) return pace->idle_ns[i];
    for (int i = size + 1; i < PACE_SIZES; i++)
        if (pace->idle_ns[i] > 0) return pace->idle_ns[i];
    return 0;
}

int32_t pace_rows(const struct pace *pace, int streams, int percent, int32_t rows_max) {
    double idle = idle_of(pace, streams), rows = PACE_FIRST;
    if (percent <= 0) return rows_max;
    if (streams == 0) { /* whole multiples of the least, as products process rows */
        const double all_ns = pace_prompt_ns(pace, rows_max), least = PACE_ALONE_LEAST;
        rows = all_ns > 0 ? floor(PACE_ALONE_NS / all_ns * rows_max / least) * least : least;
        if (rows < least) rows = least;
        return rows < rows_max ? (int32_t)rows : rows_max;
    }
    if (idle > 0 && pace->row_ns > 0) rows = idle * (percent - 100) / 100 / pace->row_ns;
    if (rows < PACE_LEAST) rows = PACE_LEAST;
    return rows < rows_max ? (int32_t)rows : rows_max;
}

/* Returns the size class of steps with prompt rows alone that says most about one with `rows`: its
 * own, or else the next smaller one that is known, or else the next larger one; -1: none is. */
static int prompt_size(const struct pace *pace, int32_t rows) {
    int size = size_class(rows);
    for (int i = size; i >= 0; i--)
        if (pace->prompt_ns[i] > 0) return i;
    for (int i = size + 1; i < PACE_SIZES; i++)
        if (pace->prompt_ns[i] > 0) return i;
    return -1;
}

double pace_prompt_ns(const struct pace *pace, int32_t rows) {
    int size = prompt_size(pace, rows);
    return size < 0 ? 0 : pace->prompt_ns[size] / pace->prompt_rows[size] * rows;
}

double pace_streams_ns(const struct pace *pace, int streams) {
    int below = -1, above = -1;
    bool any = false; /* inferred times count only where there are no others */
    for (int i = 0; i < PACE_SIZES; i++) any = any || pace->measured[i];
    for (int i = 0; i < PACE_SIZES && above < 0; i++) {
        if (pace->idle_ns[i] <= 0 || (any && !pace->measured[i])) continue;
        if (pace->idle_streams[i] > streams)
            above = i;
        else
            below = i;
    }
    if (below < 0 && above < 0) return 0;
    int i = below >= 0 ? below : above;
    double x = pace->idle_streams[i], y = pace->idle_ns[i];
    if (below < 0 || above < 0) return y * streams / x;
    double rise = (pace->idle_ns[above] - y) / (pace->idle_streams[above] - x);
    return y + rise * (streams - x);
}

int32_t pace_rows_apart(const struct pace *pace, int streams, int percent, int32_t rows_max) {
    int32_t rows = pace_rows(pace, streams, percent, rows_max);
    double bound = pace_streams_ns(pace, streams) * (percent - 100) / 100;
    /* The rows of one size lead to the size that has so many rows. */
    for (int i = 0; i < 2 && bound > 0 && prompt_size(pace, rows) >= 0; i++) {
        double most = bound / (pace_prompt_ns(pace, rows) / rows);
        if (most > rows) rows = most < rows_max ? (int32_t)most : rows_max;
    }
    return rows;
}

bool pace_apart(const struct pace *pace, int streams, int32_t rows) {
    double least = pace_streams_ns(pace, 1);
    return pace_streams_ns(pace, streams) - least >= pace_prompt_ns(pace, rows) / 4;
}

int pace_turns(const struct pace *pace, int few, int many, double bound_ns) {
    double spent = pace_streams_ns(pace, few + many);
    int turns = 1;
    while (turns < PACE_TURNS && turns < many && spent > bound_ns) {
        double part = pace_streams_ns(pace, few + many / (2 * turns));
        if (part > spent * 3 / 4) break;
        spent = part;
        turns *= 2;
    }
    return turns;
}

int32_t pace_rows_within(const struct pace *pace, int streams, double bound_ns, int32_t rows_max) {
    double base = pace_streams_ns(pace, streams > 0 ? streams : 1), rows = PACE_FIRST;
    if (pace->row_ns > 0) rows = (bound_ns - base) / pace->row_ns;
    if (rows < PACE_LEAST) rows = PACE_LEAST;
    return rows < rows_max ? (int32_t)rows : rows_max;
}

/* Updates a mean in which the newest value has the given weight. */
static void mean_in(double *mean, double value, double weight) {
    *mean = *mean > 0 ? *mean + weight * (value - *mean) : value;
}

/* Steps beside answers are smaller and cost more for each row, so steps of prompts alone only say
 * something while nothing else is known. */
void pace_note(struct pace *pace, int streams, int32_t prompt_rows, int64_t ns) {
    int size = size_class(streams);
    double spent = (double)ns, *idle = &pace->idle_ns[size];
    if (spent <= 0) return;
    if (streams == 0) {
        if (prompt_rows <= 0) return;
        size = size_class(prompt_rows);
        if (pace->row_ns <= 0) pace->row_ns = spent / prompt_rows;
        mean_in(&pace->prompt_ns[size], spent, 0.25);
        mean_in(&pace->prompt_rows[size], prompt_rows, 0.25);
        return;
    }
    mean_in(&pace->idle_streams[size], streams, 0.125);
    if (prompt_rows == 0) {
        mean_in(idle, spent, pace->measured[size] ? 0.125 : 1);
        pace->measured[size] = true;
        return;
    }
    if (*idle <= 0) {
        double rest = pace->row_ns > 0 ? spent - prompt_rows * pace->row_ns : spent / 2;
        *idle = rest > spent / 4 ? rest : spent / 4;
    }
    /* Without prompt rows the step would not have lasted longer. */
    if (*idle > spent) mean_in(idle, spent, 0.5);
    double each = (spent - *idle) / prompt_rows, least = spent / prompt_rows / 8;
    mean_in(&pace->row_ns, each > least ? each : least, 0.25);
}

/* Returns the expected time of `rows` rows, where a single one takes 1 and each further one
 * PACE_ROW_PART. */
static double supposed(double rows) {
    return 1 + PACE_ROW_PART * (rows - 1);
}

/* Returns the time of so many rows: between two numbers of rows that were measured on the line
 * through them, beyond them in proportion to what is supposed. */
static double rows_ns(const struct pace *pace, int rows) {
    const double *x = pace->drafts_rows, *y = pace->drafts_ns;
    int below = -1, above = -1;
    for (int i = 0; i < PACE_SIZES && above < 0; i++) {
        if (y[i] <= 0) continue;
        if (x[i] > rows)
            above = i;
        else
            below = i;
    }
    int i = below >= 0 ? below : above;
    if (i < 0) return supposed(rows);
    if (below < 0 || above < 0) return y[i] / supposed(x[i]) * supposed(rows);
    return y[i] + (y[above] - y[i]) / (x[above] - x[i]) * (rows - x[i]);
}

double pace_growth(const struct pace *pace, int rows, int more) {
    return rows_ns(pace, more) / rows_ns(pace, rows);
}

static bool knows_rows(const struct pace *pace) {
    bool any = false;
    for (int i = 0; i < PACE_SIZES; i++) any = any || pace->drafts_ns[i] > 0;
    return any;
}

double pace_part(const struct pace *of, int more, const struct pace *pace, int rows, double part) {
    if (!knows_rows(of) || !knows_rows(pace)) return part * supposed(more) / supposed(rows);
    return rows_ns(of, more) / rows_ns(pace, rows);
}

/* Steps of one size say what the others are supposed to take. */
static void doubt_others(struct pace *pace, int size) {
    const double *x = pace->drafts_rows, one = pace->drafts_ns[size] / supposed(x[size]);
    for (int i = 0; i < PACE_SIZES; i++) {
        double above = pace->drafts_ns[i] - one * supposed(x[i]);
        if (i != size && pace->drafts_ns[i] > 0 && above > 0)
            pace->drafts_ns[i] -= PACE_DOUBT * above;
    }
}

void pace_note_drafts(struct pace *pace, int rows, int64_t ns) {
    int size = size_class(rows);
    if (ns <= 0) return;
    if (++pace->drafts_noted == PACE_DRAFT_STEPS) {
        memset(pace->drafts_ns, 0, sizeof pace->drafts_ns);
        pace->drafts_noted = 0;
    }
    double *mean = &pace->drafts_ns[size];
    if (*mean <= 0) pace->drafts_rows[size] = 0;
    mean_in(&pace->drafts_rows[size], rows, 0.25);
    mean_in(mean, (double)ns, 0.25);
    doubt_others(pace, size);
}
