#include "engine/pace.h"

static int size_of(int streams) {
    int size = 0;
    while (size < PACE_SIZES - 1 && (1 << size) < streams) size++;
    return size;
}

/* Returns the time of the same number of streams, or else of the nearest smaller number, or else of
 * the nearest larger one; 0: none is known. */
static double idle_of(const struct pace *pace, int streams) {
    int size = size_of(streams);
    for (int i = size; i >= 0; i--)
        if (pace->idle_ns[i] > 0) return pace->idle_ns[i];
    for (int i = size + 1; i < PACE_SIZES; i++)
        if (pace->idle_ns[i] > 0) return pace->idle_ns[i];
    return 0;
}

int32_t pace_rows(const struct pace *pace, int streams, int percent, int32_t rows_max) {
    double idle = idle_of(pace, streams), rows = PACE_FIRST;
    if (streams == 0 || percent <= 0) return rows_max;
    if (idle > 0 && pace->row_ns > 0) rows = idle * (percent - 100) / 100 / pace->row_ns;
    if (rows < PACE_LEAST) rows = PACE_LEAST;
    return rows < rows_max ? (int32_t)rows : rows_max;
}

/* A mean in which the newest value has the given weight. */
static void mean_in(double *mean, double value, double weight) {
    *mean = *mean > 0 ? *mean + weight * (value - *mean) : value;
}

/* Steps beside answers are smaller and cost more for each row, so steps of prompts alone only say
 * something while nothing else is known. */
void pace_note(struct pace *pace, int streams, int32_t prompt_rows, int64_t ns) {
    int size = size_of(streams);
    double spent = (double)ns, *idle = &pace->idle_ns[size];
    if (spent <= 0) return;
    if (streams == 0) {
        if (prompt_rows > 0 && pace->row_ns <= 0) pace->row_ns = spent / prompt_rows;
        return;
    }
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
