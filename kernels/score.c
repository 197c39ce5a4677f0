#include "kernels/score.h"

#include <math.h>

float score_horizon(float log_beta, float horizon) {
    float lb = log_beta > 0 ? 0 : log_beta; /* NaN stays NaN */
    if (horizon == 1) return 0;
    if (isinf(horizon)) return -logf(-expm1f(lb));
    float x = horizon * lb;
    /* n^2 lb^2 as x^2, so that no horizon overflows. */
    if (-x < 0.01f) return (x - lb) / 2 + (x * x - lb * lb) / 24;
    return logf(expm1f(x) / (horizon * expm1f(lb)));
}

float score_retention(float log_beta, int32_t age, float horizon) {
    return (float)age * (log_beta > 0 ? 0 : log_beta) + score_horizon(log_beta, horizon);
}

static float log1mexp(float x) { /* x < 0 */
    return x < -0.69314718f ? log1pf(-expf(x)) : logf(-expm1f(x));
}

float score_published(float log_beta, int32_t age, float horizon) {
    float lb = log_beta > 0 ? -1e-9f : log_beta;
    if (horizon == 1) return (float)(age + 1) * lb;
    float ahead = logf(horizon);
    if (!(lb > -1e-7f)) ahead = (isinf(horizon) ? 0 : log1mexp(horizon * lb)) - log1mexp(lb);
    return (float)(age + 2) * lb + ahead;
}
