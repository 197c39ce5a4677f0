/* The retention score, in one place for every backend and test.
 *
 *   age   = T - pos              (T = tokens appended, so the newest entry has age 1)
 *   score = age * lb + w_n(lb)   lb = log_beta <= 0, n = horizon
 *   w_n(lb) = log((1 - e^(n lb)) / (n (1 - e^lb))),  w_1 = 0,  w_inf = -log(1 - e^lb)
 *
 * It is the look-ahead sum over the next n steps, sum_{h=1..n} beta^(age + h - 1), divided by n
 * ("Make Each Token Count", arXiv 2605.09649, horizon weights of one; with n = 1 the TRIM-KV score,
 * arXiv 2512.03324). The division keeps float32 distinct near beta = 1, where the published form
 * collapses; it shifts all scores alike, so ranks are the same. Near lb = 0 a series avoids the
 * cancellation: w_n = (n-1) lb/2 + (n^2-1) lb^2/24 while n |lb| < 0.01. */
#ifndef KEEPD_KERNELS_SCORE_H
#define KEEPD_KERNELS_SCORE_H

#include <stdint.h>

#define SCORE_HORIZON_MAX 1e9 /* the largest horizon, apart from INFINITY */

/* The score of the published code, whose clock runs one step ahead and whose sum is not divided:
 *   n = 1:  (age + 1) lb        n > 1:  (age + 2) lb + log(1 - e^(n lb)) - log(1 - e^lb)
 * with the last two terms log n where lb > -1e-7 (there is no limit for n = infinity and lb = 0).
 */
float score_published(float log_beta, int32_t age, float horizon);

float score_horizon(float log_beta, float horizon);                /* w_n */
float score_retention(float log_beta, int32_t age, float horizon); /* the whole score */

#endif
