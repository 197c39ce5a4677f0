"""Drives the policy_replay program and follows it with the reference."""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from . import table
from .agree import Follower, State
from .classes import Members
from .rules import Rule
from .schedule import schedule
from .sequence import STORED, Sequence
from .streams import Recording

ROOT = Path(__file__).resolve().parents[3]


def find_driver(name="policy_replay"):
    build = Path(os.environ.get("KEEPD_BUILD", ROOT / "build/dev"))
    driver = Path(os.environ.get(f"KEEPD_{name.upper()}") or build / "tests/golden" / name)
    assert driver.exists(), f"{driver} is not built"
    return driver


def run_driver(*arguments):
    return subprocess.run([find_driver(), *arguments], capture_output=True, text=True)


def policies():
    """The daemon's table: [{name, bounded, rule}]."""
    done = run_driver("--list")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def has_path(path):
    return run_driver("--has-path", path).returncode == 0


def rounding(path):
    """The key of tiles.BLOCKS for a path whose attention rounds queries and weights; None: it does not."""
    said = run_driver("--has-path", path).stdout
    return "tiles" if "narrow caches" in said else "pairs" if "bf16 caches" in said else None


@dataclass
class Run:
    """One sequence of a batch, by a row or a variant of the table."""

    name: str
    recording: Recording
    prompt: int
    budget: int
    buffer: int
    chunk: int
    splits: list = field(default_factory=lambda: [512])
    rule: Rule | None = None  # another than the name's

    def __post_init__(self):
        self.rule = self.rule or table.rule(self.name, self.budget)


@dataclass
class Result:
    evictions: list  # per sequence, (tokens, State)
    out: list  # per sequence, [L, T, Hq * D]


def write_input(path, runs, options):
    first = runs[0].recording
    tensors = {}
    for i, run in enumerate(runs):
        tensors[f"{i}.qkv"] = np.ascontiguousarray(run.recording.qkv())
        tensors[f"{i}.log_beta"] = np.ascontiguousarray(run.recording.log_beta)
    rules = [{k: v if v != float("inf") else 0 for k, v in run.rule.flat().items()} for run in runs]
    config = {"layers": first.q.shape[0], "heads_q": first.q.shape[2], "heads_kv": first.k.shape[2],
              "head_dim": first.q.shape[3], **options, "inv_freq": [] if first.inv_freq is None else [float(x) for x in first.inv_freq],
              "sequences": [
                  {"prompt": run.prompt, "splits": run.splits, "kv": {
                      "policy": table.base(run.name), "budget": run.budget, "buffer": run.buffer, "chunk": run.chunk,
                      "rule": rule}} for run, rule in zip(runs, rules)]}
    save_file(tensors, path, metadata={"keepd": json.dumps(config)})


def read_output(path, runs):
    first, evictions = runs[0].recording, [[] for _ in runs]
    with safe_open(path, "numpy") as data:
        for i, event in enumerate(json.loads(data.metadata()["keepd"])["evictions"]):
            ends = np.cumsum(data.get_tensor(f"{i}.lengths"))[:-1]
            parts = [np.split(data.get_tensor(f"{i}.{name}"), ends) for name in ("pos", "keys", "values")]
            ends = np.cumsum(data.get_tensor(f"{i}.member_lengths"))[:-1]
            members = [np.split(data.get_tensor(f"{i}.member_{name}"), ends) for name in ("centre", "pos", "gain")]
            state = State(*parts, [Members(c.astype(np.int64), p.astype(np.int64), g.astype(np.float64))
                                   for c, p, g in zip(*members)])
            evictions[event["sequence"]].append((event["tokens"], state))
        out = [data.get_tensor(f"{i}.out").reshape(first.q.shape[0], run.recording.tokens, -1)
               for i, run in enumerate(runs)]
    return Result(evictions, out)


def drive(folder, runs, **options):
    """Runs the driver on all sequences as one batch."""
    write_input(folder / "input.safetensors", runs, options)
    done = run_driver(folder / "input.safetensors", folder / "output.safetensors")
    assert done.returncode == 0, done.stderr
    return read_output(folder / "output.safetensors", runs)


def follow(run, evictions, out, kv_dtype="f32", tolerance=1e-5, sliding_windows=(), rounds=None):
    """Replays one sequence beside what the driver did; returns the tally of the comparison."""
    r = run.recording
    sequence = Sequence(run.rule.as_float32(), r.q.shape[0], r.q.shape[2], r.k.shape[2], r.q.shape[3], r.q.shape[3] ** -0.5,
                        STORED[kv_dtype],
                        None if r.inv_freq is None else np.asarray(r.inv_freq, np.float64), sliding_windows,
                        rounds=rounds, kv_dtype=kv_dtype)
    follower = Follower(sequence, tolerance, adopt_merged=kv_dtype != "f32")
    # A policy without a budget keeps what the next query sees of the longest window.
    kept = run.budget if run.name != "full" else max(sliding_windows) - 1
    peak = run.buffer + run.chunk + (run.budget if run.name != "full" else r.tokens)
    parts = [x.astype(np.float64) for x in (r.q, r.k, r.v, r.log_beta)]
    events, at = iter(evictions), 0
    for count, full in schedule(r.tokens, run.prompt, kept, run.buffer, run.chunk):
        if count:
            mine = sequence.append(*(x[:, at:at + count] for x in parts))
            theirs = out[:, at:at + count]
            most = np.abs(mine).max() or 1
            follower.tally.note("out", (np.abs(mine - theirs) - np.reshape(sequence.slacks, mine.shape)).max() / most)
            at += count
        assert sum(map(len, sequence.all_streams())) <= sequence.layers * sequence.heads_kv * peak
        if full:
            tokens, state = next(events)
            assert tokens == at
            follower.evict(run.budget if run.name != "full" else tokens, state)
    assert next(events, None) is None, "the driver evicted once more"
    return follower.tally
