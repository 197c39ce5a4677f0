"""Attention of narrow caches with the two roundings of kernels/cpu/amx_attend.c and, of bf16 caches, vec_attend.c in float64.

Queries, in log2 units and rotated as the cache's rows are, are rounded to bf16. So are the weights of a block of entries,
2^(score - the largest so far), times the factors of the values' rows. Sums of weights are not rounded. Weights are
relative to the largest score up to the end of their block, so blocks are those of the kernel: 128 entries on tiles, 16
where the processor multiplies pairs of bf16.
What the policies observe of attention is computed apart, and not rounded.
"""

import numpy as np

from . import rows

LOG2_E = np.float32(1.44269504)
NUDGE = 1e-5  # relative error of a weight in float32: scores may be some tens
BLOCKS = {"tiles": 128, "pairs": 16}
TILES = {"bf16": (32, 64, 128), "fp8": (32, 64, 128), "q8": (64, 128), "q4": (64, 128)}  # head sizes
LEVELS = {"q8": np.arange(1, 128)[::-1], "q4": rows.LEVELS[8:][::-1]}  # the largest of a row is one of them


def fits(kind, kv_dtype, head_dim):
    return kind == "pairs" and kv_dtype == "bf16" or kind == "tiles" and head_dim in TILES.get(kv_dtype, ())


def queries(q, scale, kv_dtype):
    """The queries whose products with keys are scores in log2 units."""
    q, by = np.asarray(q, np.float32), np.float32(scale) * LOG2_E
    if kv_dtype not in LEVELS:
        return rows.bf16(q * by).astype(np.float64)
    return rows.bf16(rows.rotate(q) * by).astype(np.float64) @ rows.hadamard(q.shape[-1])


def factors(values, kv_dtype):
    """The factors of rows that were stored with one, [entries]; 1 for others and for rows of zeros."""
    found = np.ones(len(values))
    if kv_dtype not in LEVELS:
        return found
    numbers, open_rows = values @ rows.hadamard(values.shape[-1]), np.abs(values).max(axis=-1, initial=0) > 0
    most = np.abs(numbers).max(axis=-1, initial=0)
    for level in LEVELS[kv_dtype]:
        factor = rows.bf16(most / level).astype(np.float64)
        whole = numbers / np.where(open_rows, factor, 1)[:, None]
        allowed = np.rint(whole) if kv_dtype == "q8" else rows.LEVELS[np.abs(whole[..., None] - rows.LEVELS).argmin(axis=-1)]
        right = open_rows & (np.abs(whole - allowed).max(axis=-1, initial=0) < 1e-3)
        found[right] = factor[right]
        open_rows &= ~right
    assert not open_rows.any(), "rows that no factor explains"
    return found


def attend(kind, z, values, kv_dtype):
    """z: scores in log2 units [group, queries, entries], -inf where masked. The results [queries, group, D], and how far each
    may be off because a weight is so near the middle of two bf16 that float32 may have rounded it to the other one."""
    factor = factors(values, kv_dtype)
    most = np.full(z.shape[:2], -np.inf)
    total, out, slack = np.zeros(z.shape[:2]), np.zeros((*z.shape[:2], values.shape[-1])), 0
    block = BLOCKS[kind]
    for at in range(0, z.shape[-1], block):
        part = slice(at, at + block)
        now = np.maximum(most, z[..., part].max(axis=-1))
        base = np.where(np.isfinite(now), now, 0)
        p, keep = np.exp2(z[..., part] - base[..., None]), np.exp2(most - base)
        rounded, low, high = (rows.bf16(p * factor[part] * by).astype(np.float64) / factor[part]
                              for by in (1, 1 - NUDGE, 1 + NUDGE))
        total = total * keep + p.sum(axis=-1)
        out = out * keep[..., None] + rounded @ values[part]
        slack = slack * keep[..., None] + (high - low) @ np.abs(values[part])
        most = now
    return tuple(np.swapaxes(x / total[..., None], 0, 1) for x in (out, slack))
