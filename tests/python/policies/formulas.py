"""The formulas of the eviction methods in float64, one small function per stage.

Written from the papers' definitions and the published code's documented behaviour, not from the C
code, and in the plainest form: whole matrices, sums term by term, full sorts.  Shapes: `z` logits
and `p` probabilities [group, queries, entries]; per-entry vectors [entries], oldest entry first.
"""

import numpy as np

# --- retention: TRIM-KV (arXiv 2512.03324), global gates (arXiv 2605.09649) ---------------


def retention(log_beta, age, horizon):
    """log of the mean of beta^(age + h), h = 0 .. n-1; of their sum for an infinite horizon."""
    log_beta = np.minimum(np.asarray(log_beta, np.float64), 0)
    age = np.asarray(age, np.float64)
    if np.isinf(horizon):  # the geometric series
        with np.errstate(divide="ignore"):
            return age * log_beta - np.log(-np.expm1(log_beta))
    steps = np.arange(int(horizon), dtype=np.float64)
    return age * log_beta + np.log(np.exp(log_beta[..., None] * steps).mean(axis=-1))


def log1mexp(x):
    """log(1 - e^x) for x < 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x < -np.log(2), np.log1p(-np.exp(x)), np.log(-np.expm1(x)))


def retention_published(log_beta, age, horizon):
    """The score of the published code, whose clock runs one step ahead (t = T + 1): `t - pos`
    steps for a horizon of one, and the general form's own exponent `t + 1 - pos` beyond."""
    log_beta = np.asarray(log_beta, np.float64)
    age = np.asarray(age, np.float64)
    if horizon == 1:
        return (age + 1) * log_beta
    tail = 0.0 if np.isinf(horizon) else log1mexp(horizon * log_beta)
    whole = np.log(horizon) if np.isfinite(horizon) else np.inf
    with np.errstate(invalid="ignore"):
        ahead = np.where(log_beta > -1e-7, whole, tail - log1mexp(log_beta))
    return (age + 2) * log_beta + ahead


def soft_sizes(beta):
    """s[t] = sum over i <= t of beta_i^(t - i): what a gate holds, softly (TRIM-KV)."""
    beta = np.asarray(beta, np.float64)
    return np.array([(beta[:t + 1] ** (t - np.arange(t + 1))).sum() for t in range(len(beta))])


# --- attention ------------------------------------------------------------------------------


def softmax(z):
    """Over the last axis; rows that see nothing are zero."""
    top = z.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(z - np.where(np.isfinite(top), top, 0))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total > 0, total, 1)


def logits(queries, keys, scale):
    """[group, queries, entries] of queries [queries, group, D] and keys [entries, D]."""
    return np.einsum("tgd,nd->gtn", queries, keys) * scale


def masked(z, visible):
    return np.where(visible, z, -np.inf)


def smooth_mean(x, kernel):
    """Average pooling of odd width over the last axis; the zeros beyond the ends count."""
    return windows(x, kernel, 0).mean(axis=-1)


def smooth_max(x, kernel):
    return windows(x, kernel, -np.inf).max(axis=-1)


def windows(x, kernel, beyond):
    padding = [(0, 0)] * (x.ndim - 1) + [(kernel // 2, kernel // 2)]
    padded = np.pad(x, padding, constant_values=beyond)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)


# --- history: G-KV (arXiv 2512.00504) -------------------------------------------------------


def with_history(now, past, form, decay):
    """The score remembered from now on.  `past` is NaN where an entry has no history."""
    new = np.isnan(past)
    old = np.where(new, 0.0 if form == "sum" else now, past)
    if form == "max":
        return np.maximum(decay * old, now)
    if form == "mean":
        return decay * old + (1 - decay) * now
    return decay * old + now


# --- Expected Attention (arXiv 2510.00636) ----------------------------------------------------


def rotation(angles):
    """The matrix that rotates a key or query by these angles; the mean matrix of several, [positions, D / 2]."""
    c, s = (np.diag(np.atleast_2d(f(angles)).mean(axis=0)) for f in (np.cos, np.sin))
    return np.block([[c, -s], [s, c]])


def rotated_back(queries, angles):
    """Queries, [queries, D], before they were rotated by the angles, [queries, D / 2]."""
    first, second = np.split(queries, 2, axis=1)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([c * first + s * second, c * second - s * first], axis=1)


def expected_attention(queries, positions, keys, values, inv_freq, ahead, scale):
    """Scores of entries by the queries [queries, group, D] at `positions`: their distribution before the rotation is
    taken for that of the queries at the positions `ahead`, whose rotations are averaged."""
    before, after = (np.outer(x, np.asarray(inv_freq, np.float64)) for x in (positions, ahead))
    turn, score = rotation(after), 0
    for head in range(queries.shape[1]):
        plain = rotated_back(queries[:, head], before)
        mean, covariance = turn @ plain.mean(axis=0), turn @ np.cov(plain.T, bias=True) @ turn.T
        z = scale * keys @ mean + scale ** 2 / 2 * np.einsum("nd,nd->n", keys @ covariance, keys)
        score = score + softmax(z) / queries.shape[1]
    return score * np.linalg.norm(values, axis=1)


# --- redundancy: R-KV (arXiv 2505.24133) ----------------------------------------------------


def cosines(a, b, eps=0.0):
    """Cosines of all pairs of rows; 0 with a row of zeros."""
    lengths = np.outer(*(np.linalg.norm(x, axis=-1) + eps for x in (a, b)))
    return np.divide(a @ b.T, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def forgiven(similarity, threshold):
    """For each row the newest column above the threshold, -1 where there is none. No cosine is above 1,
    although rounding may make it so."""
    above = (similarity > threshold) & (threshold < 1)
    last = similarity.shape[1] - 1 - np.argmax(above[:, ::-1], axis=1)
    return np.where(above.any(axis=1), last, -1)


def mean_similarity(similarity, forgive, index_zero=False, own=False):
    """rho: how much the others look like an entry, each of them without the likeness it forgives
    (-1: none). index_zero: such a row forgives entry 0, as the published tensor code does. own: how
    much an entry looks like the others, without the likeness it forgives (the paper)."""
    c = similarity.copy()
    if index_zero:
        forgive = np.where(forgive < 0, 0, forgive)
    rows = np.flatnonzero(forgive >= 0)
    c[rows, forgive[rows]] = 0
    return c.sum(axis=1 if own else 0) / len(c)


# --- lag: LagKV (arXiv 2504.04704) ------------------------------------------------------------


def lag_deviation(part, reference):
    """How much each row spreads once the reference's ranges are taken out, as a softmax over the part."""
    low, range_ = reference.min(axis=0), np.ptp(reference, axis=0)
    x = np.divide(part - low, range_, out=np.zeros_like(part), where=range_ > 0)
    return softmax(x.std(axis=1, ddof=1))


def lag_scores(keys, values, sinks, lag):
    """1 for all but whole parts that another whole part follows; in these the rank divided by lag."""
    out = np.ones(len(keys))
    for first in range(sinks, len(keys) - 2 * lag + 1, lag):
        here, next_ = slice(first, first + lag), slice(first + lag, first + 2 * lag)
        score = sum(lag_deviation(x[here], x[next_]) for x in (keys, values))
        out[here] = np.argsort(np.argsort(score, kind="stable")) / lag
    return out


# --- layer statistics: CAKE (arXiv 2503.12491), D2O (arXiv 2406.13035) ------------------------


def entropy(p):
    return -(p * np.log(p + 1e-10)).sum()


def spread(p):
    """Sum over entries of the variance over the queries (unbiased)."""
    return p.var(axis=-2, ddof=1).sum() if p.shape[-2] > 1 else 0.0


def cake_preference(entropy_sum, spread_sum, tau1=1.0, tau2=1.0):
    return entropy_sum ** (1 / tau1) * spread_sum ** (1 / tau2)


def d2o_scalar_code(head_variances):
    v = np.asarray(head_variances, np.float64)
    return ((v - v.min()) / (v.max() - v.min() + 1e-6)).mean()


def d2o_weights(scalars):
    """softmax(-v) over the layers."""
    return softmax(-np.asarray(scalars, np.float64))


def d2o_ratios_code(scalars, keep_ratio):
    weights = d2o_weights(scalars)
    return np.clip(weights * len(weights) * keep_ratio, 0.01, 1.0)


# --- allotments ------------------------------------------------------------------------------------


def pyramid_code(layers, capacity, window, prompt, beta=20):
    """PyramidKV (arXiv 2406.02069) as published: entries per layer, the window included."""
    base = capacity - window
    low = base // beta
    high = 2 * base - low
    if high >= prompt - window:
        high = prompt - window
        low = 2 * base - high
    step = (high - low) // (layers - 1)
    return [high - layer * step + window for layer in range(layers)]


def adaptive_counts(scores, base):
    """Ada-KV (arXiv 2407.11550): how many of the best `base` per head fall into each head."""
    flat = np.concatenate(scores)
    head = np.repeat(np.arange(len(scores)), [len(s) for s in scores])
    best = np.argsort(-flat, kind="stable")[:base * len(scores)]
    return np.bincount(head[best], minlength=len(scores))


def adaptive_capacities_code(counts, base, floor_alpha):
    floor = int(base * floor_alpha)
    return [round(c * (1 - floor_alpha) + floor) for c in counts]


# --- merging -------------------------------------------------------------------------------------


def merge_exponential(center, members, likeness):
    """D2O, paper: weights e for the entry itself, exp(u) for what it takes in."""
    w = np.exp(np.asarray(likeness, np.float64))
    return (np.e * center + w @ members) / (np.e + w.sum())


def merge_mean(center, members, likeness):
    """D2O, code: the mean of the entry and its members times their likeness."""
    u = np.asarray(likeness, np.float64)
    return (center + u @ members) / (1 + len(u))
