"""What the policies keep, computed independently in float64 with numpy.

Written from the definitions, not from the C code: the score of an entry is the mean of its
retention beta^age over the next n steps, summed term by term instead of by the closed form, and the
ranking is a plain sort.
"""

import numpy as np


def scores(log_beta, age, horizon):
    """log((1/n) sum_{h=0..n-1} beta^(age + h)); without the 1/n for an infinite horizon."""
    log_beta = np.minimum(np.asarray(log_beta, dtype=np.float64), 0)
    age = np.asarray(age, dtype=np.float64)
    if np.isinf(horizon):  # the geometric series
        with np.errstate(divide="ignore"):
            return age * log_beta - np.log(-np.expm1(log_beta))
    steps = np.arange(int(horizon), dtype=np.float64)
    ahead = np.exp(log_beta[..., None] * steps).mean(axis=-1)
    return age * log_beta + np.log(ahead)


class Entries:
    """All entries of one sequence, one row each."""

    def __init__(self, streams_positions, streams_log_beta):
        self.stream = np.concatenate(
            [np.full(len(p), s, dtype=np.int64) for s, p in enumerate(streams_positions)])
        self.pos = np.concatenate([np.asarray(p, dtype=np.int64) for p in streams_positions])
        self.log_beta = np.concatenate(
            [np.asarray(b, dtype=np.float64) for b in streams_log_beta])


def rank(entries, policy, tokens, sinks, recent, horizon):
    """(protected, score) per entry; protected ones come before all others."""
    protected = (entries.pos < sinks) | (entries.pos >= tokens - recent)
    if policy == "streaming":
        score = entries.pos.astype(np.float64)
    else:
        score = scores(entries.log_beta, tokens - entries.pos, horizon)
    return protected, np.where(protected, 0.0, score)


def best(rows, keep, entries, protected, score):
    """The `keep` best of these rows: protected, score, newer position, lower stream."""
    order = np.lexsort((entries.stream[rows], -entries.pos[rows], -score[rows], ~protected[rows]))
    return rows[order[:keep]], rows[order[keep:]]


def select(entries, policy, stream_count, tokens, budget, sinks=0, recent=0, horizon=1.0):
    """(kept, close): which entries stay, and which lie within 1e-5 of the cut of their pool, where
    float32 may decide otherwise."""
    protected, score = rank(entries, policy, tokens, sinks, recent, horizon)
    everything = np.arange(len(entries.pos))
    if policy == "global":
        pools = [(everything, budget * stream_count)]
    else:
        pools = [(everything[entries.stream == s], budget) for s in range(stream_count)]
    kept = np.zeros(len(everything), dtype=bool)
    close = np.zeros(len(everything), dtype=bool)
    for rows, keep in pools:
        inside, outside = best(rows, keep, entries, protected, score)
        kept[inside] = True
        if len(outside) and len(inside) and not protected[inside[-1]]:
            with np.errstate(invalid="ignore"):
                near = np.abs(score[rows] - score[inside[-1]]) <= 1e-5
            close[rows] = near & ~protected[rows]
    return kept, close
