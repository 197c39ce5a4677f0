"""Intervals: cluster bootstrap over dialogues, because the questions of one are not independent.

A sample is an array [dialogues, 2] of (got, of): right answers and questions, or summed loss and
tokens. Its mean is sum(got) / sum(of). Differences are paired by dialogue.
"""
import functools

import numpy as np

RESAMPLES = 10_000
SEED = 2026


@functools.lru_cache(maxsize=16)
def weights(count, stream, resamples):
    """[resamples, count]: how often each of `count` dialogues is drawn. The same draws serve all cells
    of a size, so that the same comparison has the same interval wherever it is shown."""
    rng = np.random.default_rng([SEED, count, stream])
    picks = rng.integers(0, count, (resamples, count)) + count * np.arange(resamples)[:, None]
    return np.bincount(picks.ravel(), minlength=resamples * count).reshape(resamples, count).astype(float)


def sample(rows):
    """{dialogue number: (got, of)} of stored rows."""
    return {r["dialogue"]: (r["got"], r["of"]) for r in rows if "got" in r}


def aligned(*samples):
    """The same samples on the dialogues all of them have, as arrays [dialogues, 2]."""
    common = sorted(set.intersection(*(set(s) for s in samples)))
    return [np.array([s[d] for d in common], float).reshape(-1, 2) for s in samples]


def resampled(values, stream=0):
    """RESAMPLES means of dialogues drawn with replacement; other streams draw apart."""
    sums = np.einsum("rd,dk->rk", weights(len(values), stream, RESAMPLES), values)   # no BLAS: threads do not pay
    return sums[:, 0] / sums[:, 1]


def interval(mean, draws):
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(mean), float(low), float(high)


def mean(values):
    """(mean, low, high); None without data."""
    if len(values) == 0:
        return None
    return interval(values[:, 0].sum() / values[:, 1].sum(), resampled(values))


def differences(a, b):
    """a - b on the dialogues both have, as a sample. Both were asked the same, so `of` agrees."""
    x, y = aligned(a, b)
    return np.stack([x[:, 0] - y[:, 0], x[:, 1]], 1)


def paired(a, b):
    """Mean of a - b with its interval; None where they share no dialogue."""
    return mean(differences(a, b))


def over_tasks(samples):
    """Mean over tasks of their means, each task counting the same; tasks are resampled apart.
    `samples`: one array [dialogues, 2] per task; None when one has no data."""
    if not samples or any(len(s) == 0 for s in samples):
        return None
    point = np.mean([s[:, 0].sum() / s[:, 1].sum() for s in samples])
    return interval(point, np.mean([resampled(s, i) for i, s in enumerate(samples)], axis=0))
