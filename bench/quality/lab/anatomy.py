"""Measures the cost of a method and the entries it keeps, one request at a time, at a quarter of the tokens.

Times are differences of the daemon's own counters (/metrics) over one request; nothing else may run.
"""
import sys

import numpy as np

from . import plan
from .client import Refused

BINS = 20                     # bins of the normalised position
GENERATED = 96                # generated tokens in the decoding measurement
DIALOGUES = 3
PREFILL, DECODE = "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"
EVICTIONS, EVICTING = "keepd_eviction_seconds_count", "keepd_eviction_seconds_sum"


def between(client, send):
    """(answer, what the counters grew by while it was made)."""
    before = client.metrics()
    answer = send()
    after = client.metrics()
    return answer, {name: after[name] - before.get(name, 0.0) for name in after}


def timing(runner, dialogue, kv):
    """One prompt, read from nothing, and GENERATED tokens after it."""
    answer, grown = between(runner.client, lambda: runner.client.chat(
        dialogue.history[:-1], GENERATED, {**kv, "reuse": False, "retain": False}, ignore_eos=True))
    usage = answer["usage"]
    return {"prompt_tokens_per_s": usage["prompt_tokens"] / max(grown[PREFILL], 1e-9),
            "tokens_per_s": (usage["completion_tokens"] - 1) / max(grown[DECODE], 1e-9),
            "evictions": grown[EVICTIONS], "eviction_seconds": grown[EVICTING],
            "busy_seconds": grown[PREFILL] + grown[DECODE]}


def kept(runner, dialogue, kv):
    """Reports the cache after the history: bytes, lengths, and positions of the kept entries."""
    answer = runner.client.chat(dialogue.history[:-1], 1, {**kv, "reuse": False, "retain": False, "report": "positions"})
    details = answer["usage"]["kv_details"]
    where = np.concatenate([np.asarray(h, float) for layer in details["positions"] for h in layer])
    counts, _ = np.histogram(where / max(1, details["seen_tokens"]), bins=BINS, range=(0, 1))
    return {"bytes": details["bytes"], "lengths": details["lengths"], "counts": counts.tolist(),
            "seen": details["seen_tokens"]}


def measure_one(runner, cell, number, anew):
    key = f"anatomy/{cell.name}/{number}"
    if runner.store.get(key) and not anew:
        return
    dialogue = runner.dialogue(cell.task, cell.length, number)
    kv = plan.kv_fields(cell, dialogue)
    try:
        row = {**timing(runner, dialogue, kv), **kept(runner, dialogue, kv)}
    except Refused as error:
        row = {"refused": str(error)}
    runner.store.add(key, {"method": cell.method, "dialogue": number, **row})


def cell_of(method, length):
    return plan.Cell("memory", length, method, 1.0 if method == "full" else plan.QUARTER)


def measure(runner, methods, length, dialogues=DIALOGUES, anew=False):
    """`anew`: what is stored gives way, as the later line of a key does."""
    for number in range(dialogues):                # methods in turns: a slow minute strikes all
        for method in methods:
            print(f"\rcosts: {method:<12} {number + 1}/{dialogues}", end="", file=sys.stderr, flush=True)
            measure_one(runner, cell_of(method, length), number, anew)
    print(file=sys.stderr)


def summary(store, method, length):
    """Medians of times, means of what is kept; None where the method was refused or not measured."""
    rows = [r for r in store.under(f"anatomy/{cell_of(method, length).name}") if "refused" not in r]
    if not rows:
        return None
    evictions = sum(r["evictions"] for r in rows)
    density = sum(np.asarray(r["counts"], float) / max(1, sum(r["counts"])) for r in rows) / len(rows)
    return {"method": method, "dialogues": len(rows), "seen": float(np.mean([r["seen"] for r in rows])),
            "prompt_tokens_per_s": float(np.median([r["prompt_tokens_per_s"] for r in rows])),
            "tokens_per_s": float(np.median([r["tokens_per_s"] for r in rows])),
            "eviction_ms": 1000 * sum(r["eviction_seconds"] for r in rows) / evictions if evictions else 0.0,
            "eviction_share": sum(r["eviction_seconds"] for r in rows) / max(1e-9, sum(r["busy_seconds"] for r in rows)),
            "bytes": float(np.mean([r["bytes"] for r in rows])),
            "density": (density * BINS).tolist(),           # 1 = as many as if spread evenly
            "lengths": np.mean([r["lengths"] for r in rows], axis=0).tolist()}
