"""Whole entries for real weights: how a total is split over layers and streams."""

import numpy as np


def largest_remainder(total, weights):
    """Integers that add up to `total`, nearest to the weights' parts; ties to the lower index."""
    weights = np.asarray(weights, np.float64)
    if weights.sum() <= 0:
        weights = np.ones(len(weights))
    product, whole = total * weights, sum(weights)
    rest = np.fmod(product, whole)  # exact, so that equal remainders stay equal
    parts = np.rint((product - rest) / whole).astype(np.int64)
    order = np.argsort(-rest, kind="stable")
    parts[order[:total - parts.sum()]] += 1
    return parts


def split(total, weights, most, least=0):
    """Parts of `total` by weight, none above its `most` or below its `least`; what one cannot use
    or must have besides goes to or comes from the others by weight."""
    weights = np.asarray(weights, np.float64)
    most = np.broadcast_to(np.asarray(most, np.int64), weights.shape)
    least = np.minimum(np.broadcast_to(np.asarray(least, np.int64), weights.shape), most)
    total = int(np.clip(total, least.sum(), most.sum()))
    parts = np.zeros(len(weights), np.int64)
    open_ = np.ones(len(weights), bool)
    while open_.any():
        parts[open_] = largest_remainder(total - parts[~open_].sum(), weights[open_])
        over, under = open_ & (parts > most), open_ & (parts < least)
        if not (over | under).any():
            break
        # the side that is further out is settled first: the other may come right by itself
        if (parts - most)[over].sum() >= (least - parts)[under].sum():
            parts[over] = most[over]
            open_ &= ~over
        else:
            parts[under] = least[under]
            open_ &= ~under
    return parts


def pyramid(layers, beta):
    """Linear weights with mean 1, the last layer's 1 / beta (PyramidKV, arXiv 2406.02069)."""
    last = 1 / beta
    return np.linspace(2 - last, last, layers) if layers > 1 else np.ones(1)
