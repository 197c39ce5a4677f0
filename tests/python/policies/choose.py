"""The choice of the entries that stay: scopes, allotments, floors, ties.

A choice is made in two stages that are always the same: every stream gets a quota, and keeps its best
entries up to it. A stream that competes with others gets as its quota the number of its entries among
the best of all.
"""

from dataclasses import dataclass

import numpy as np

from . import allot


@dataclass
class Scope:
    """Streams that compete, and their allotment."""

    streams: list  # indices, layer * heads + head
    room: int


def ranked(scored, positions):
    """(stream, entry) indices, best first: protected, higher score, newer, lower layer, lower head."""
    stream = np.repeat(np.arange(len(scored)), [len(p) for p in positions])
    entry = np.concatenate([np.arange(len(p)) for p in positions])
    score, protected, pos = (np.concatenate(x) for x in (
        [s.score for s in scored], [s.protected & ~s.expired for s in scored], positions))
    order = np.lexsort((stream, -pos, np.where(protected, 0, -score), ~protected))
    return stream[order], entry[order]


def scopes(sequence, scored, keep):
    """How the total is split before anything competes."""
    layers, heads = sequence.layers, sequence.heads_kv
    total = layers * heads * keep
    everything = range(layers * heads)
    if sequence.rule.scope == "sequence":
        return [Scope(list(everything), total)]
    if sequence.rule.layers == "uniform" and sequence.rule.scope == "layer":
        return [Scope(list(everything[i * heads:(i + 1) * heads]), heads * keep) for i in range(layers)]
    if sequence.rule.layers == "uniform":
        return [Scope([s], keep) for s in everything]
    held = np.array([len(s.score) for s in scored]).reshape(layers, heads)
    fixed = np.array([s.protected.sum() for s in scored]).reshape(layers, heads)
    parts = layer_parts(sequence.layer_weights(), total, held.sum(1), fixed.sum(1))
    if sequence.rule.scope == "layer":
        return [Scope(list(everything[i * heads:(i + 1) * heads]), parts[i]) for i in range(layers)]
    rooms = [allot.split(parts[i], np.ones(heads), held[i], np.minimum(fixed[i], held[i])) for i in range(layers)]
    return [Scope([i * heads + h], rooms[i][h]) for i in range(layers) for h in range(heads)]


def layer_parts(weights, total, held, fixed):
    """Protected entries stay where they are; the rest of the total is split by weight."""
    free = max(0, total - fixed.sum())
    return fixed + allot.split(free, weights, held - fixed)


def counts(scope, room, scored, positions):
    """How many of the best `room` entries of a scope are each stream's."""
    stream, entry = ranked([scored[s] for s in scope.streams], [positions[s] for s in scope.streams])
    stays = [not scored[scope.streams[s]].expired[e] for s, e in zip(stream[:room], entry[:room])]
    return np.bincount(stream[:room][stays], minlength=len(scope.streams))


def floor_allotment(rule, scope):
    """Exact, as a floor of 0.7 of 10 entries is meant to be 7."""
    return round(rule.floor * 10000) * scope.room // (10000 * len(scope.streams))


def quotas(scope, scored, positions, rule):
    """The allotment of each stream of a scope."""
    size = len(scope.streams)
    lengths = np.array([len(positions[s]) for s in scope.streams])
    if rule.scope == "layer" and rule.floor > 0:  # Ada-KV: a part of the room alike, the rest by count
        part = round(rule.floor * 10000)  # whole numbers, so that no rounding decides between equal remainders
        weights = (10000 - part) * counts(scope, scope.room, scored, positions) * size + part * scope.room
        return allot.split(scope.room, weights, lengths)
    least = floor_allotment(rule, scope)  # global gates: the best of the rest, and the floor on top
    return np.minimum(counts(scope, scope.room - size * least, scored, positions) + least, lengths)


def best(scored, pos, quota, retain):
    """The mask of a stream's best entries."""
    _, entry = ranked([scored], [pos])
    mask = np.zeros(len(pos), bool)
    mask[entry[:quota]] = True
    mask &= ~scored.expired
    return mask & (scored.protected | (scored.score >= np.log(retain))) if retain > 0 else mask


def choose(sequence, scored, keep):
    """Masks of what stays, one per stream."""
    positions = [stream.pos for stream in sequence.all_streams()]
    masks = [None] * len(positions)
    for scope in scopes(sequence, scored, keep):
        for s, quota in zip(scope.streams, quotas(scope, scored, positions, sequence.rule)):
            masks[s] = best(scored[s], positions[s], quota, sequence.rule.retain)
    return masks
