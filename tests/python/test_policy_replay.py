"""The eviction of the CPU backend against the float64 reference, policy by policy.

The policy_replay driver feeds the backend recorded queries, keys and values; policies/agree.py says
what counts as agreement.  KEEPD_POLICY_REPLAY and KEEPD_GOLDEN_LOGITS name the drivers, or KEEPD_BUILD
the build folder.
"""

import json
import os
import subprocess
from dataclasses import replace

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices: more threads only spin

import numpy as np
import pytest

from policies import replay, table
from policies.replay import Run
from policies.streams import (DEGENERATE, degenerate_recording, model_recording, random_recording, recording_for,
                              redundant_recording)
from reference_model import Reference

MODEL = replay.ROOT / "bundled/keepd-nano"
TABLE = {row["name"]: row for row in replay.policies()}
BOUNDED = [name for name, row in TABLE.items() if row["bounded"]]
VARIANTS = [name for name in table.VARIANTS if table.base(name) in TABLE]
PATHS = [path for path in ("reference", "portable", "neon", "avx2", "avx512", "amx") if replay.has_path(path)]


def agree(folder, runs, path="reference", kv_dtype="f32", tolerance=1e-5, sliding_windows=()):
    """All runs as one batch; every one must agree with its reference."""
    result = replay.drive(folder, runs, path=path, kv_dtype=kv_dtype, sliding_windows=list(sliding_windows))
    for i, run in enumerate(runs):
        tally = replay.follow(run, result.evictions[i], result.out[i], kv_dtype, tolerance, sliding_windows,
                               replay.rounding(path))
        print(f"{run.name} {path} {kv_dtype}: {tally}")
        assert tally.evictions == len(result.evictions[i]) > 0
        assert tally.worst["out"] < 1e-4
        # Ties are no way out; the published offsets make them, because they collapse in float32.
        assert tally.at_cut + tally.forgiven <= 1 + tally.entries / (20 if run.rule.published else 1000)
        assert tally.merged_otherwise <= 1 + tally.merged / 1000
    return result


# --- the table ------------------------------------------------------------------------------


def test_every_policy_has_a_reference_row():
    assert set(TABLE) <= set(table.ROWS)


@pytest.mark.parametrize("name", TABLE)
def test_the_rows_say_the_same(name):
    mine, theirs = table.ROWS[name].flat(), TABLE[name]["rule"]
    assert set(mine) == set(theirs)
    assert {k: v for k, v in mine.items() if theirs[k] != pytest.approx(v)} == {}


# --- random streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOUNDED + VARIANTS)
def test_random_streams(name, tmp_path):
    shapes = ((11, 1000, 850, 80, 16, 96, [512]), (12, 710, 650, 120, 0, 75, [7, 1, 40]))
    agree(tmp_path, [Run(name, recording_for(name, seed, 3, 6, 3, 16, tokens), prompt, budget, buffer, chunk, splits)
                     for seed, tokens, prompt, budget, buffer, chunk, splits in shapes])


@pytest.mark.parametrize("path", PATHS)
def test_layers_with_a_sliding_window(path, tmp_path):
    """Observation ends where a layer's sliding window ends. The second layer's excludes some
    candidates of every query, and for some methods all of them."""
    recording = redundant_recording(71, 3, 4, 2, 16, 280)
    runs = [Run(name, recording, 220 + i, 60, 8, 64, [512, 40]) for i, name in enumerate([*BOUNDED, *VARIANTS, "full"])]
    windows = agree(tmp_path, runs, path, tolerance=1e-5 if path == "reference" else 1e-4, sliding_windows=(0, 11, 45))
    without = replay.drive(tmp_path, runs, path=path)
    watch = [i for i, run in enumerate(runs) if run.rule.observe.window and run.rule.score == "attention"]
    assert len(watch) > 8 and not any(same(windows, i, without, i) for i in watch)
    for _, state in windows.evictions[-1]:  # `full` loses what no later query sees, and nothing else
        assert [len(p) for p in state.pos[::2]] == [state.pos[0][-1] + 1, 10, 44]


@pytest.mark.parametrize("kv_dtype", ("f32", "bf16", "fp8", "q8", "q4"))
@pytest.mark.parametrize("path", PATHS)
def test_every_path_and_policies_side_by_side(path, kv_dtype, tmp_path):
    """One batch of all policies: none disturbs another, and each agrees."""
    recording = redundant_recording(21, 2, 6, 2, 64, 280)
    runs = [Run(name, recording, 220 + i, 72, 8, 64, [512]) for i, name in enumerate(BOUNDED)]
    together = agree(tmp_path, runs, path, kv_dtype, 1e-5 if path == "reference" else 1e-4)
    alone = [replay.drive(tmp_path, [replace(run, splits=[7, 1, 40])], path=path, kv_dtype=kv_dtype, threads=2)
             for run in runs[::4]]
    for one, i in zip(alone, range(0, len(runs), 4)):
        assert same(one, 0, together, i)


def same(a, i, b, j):
    """Bitwise the same results and the same entries left by every eviction?"""
    states = [([x[1] for x in r.evictions[k]], r.out[k]) for r, k in ((a, i), (b, j))]
    left = [[x for state in s for part in (state.pos, state.keys, state.values) for x in part] for s, _ in states]
    return np.array_equal(states[0][1], states[1][1]) and len(left[0]) == len(left[1]) and all(
        np.array_equal(x, y) for x, y in zip(*left))


@pytest.mark.parametrize("path", PATHS)
def test_how_a_prompt_is_split_changes_nothing(path, tmp_path):
    recording = redundant_recording(51, 2, 4, 2, 32, 220)
    runs = [Run(name, recording, 200, 80, 8, 60, [512]) for name in BOUNDED + VARIANTS]
    whole = replay.drive(tmp_path, runs, path=path)
    for splits in ([7, 1, 40], [1]):
        parts = replay.drive(tmp_path, [replace(run, splits=splits) for run in runs], path=path)
        wrong = [run.name for i, run in enumerate(runs) if not same(parts, i, whole, i)]
        assert not wrong, splits


@pytest.mark.parametrize("gates", ("equal", "tied"))
def test_entries_that_tie_go_by_age_and_place(gates, tmp_path):
    """Newer entries first, then lower layers, then lower heads."""
    names = [name for name in BOUNDED + VARIANTS if table.rule(name).score == "retention"]
    recording = random_recording(31, 3, 4, 2, 16, 300, gates)
    agree(tmp_path, [Run(name, recording, 250, budget, 5, 50) for name in names for budget in (33, 40)])


@pytest.mark.parametrize("seed", range(3))
def test_budgets_protection_and_horizons(seed, tmp_path):
    """Random values for every parameter that a request may set."""
    rng = np.random.default_rng(seed)
    runs = []
    for name in ("streaming", "trimkv", "global", "global", "global"):
        sinks, recent = rng.integers(0, 6, 2)
        rule = table.rule(name).but(sinks=int(sinks), recent=int(recent))
        if name == "global":
            rule = rule.but(horizon=float(rng.choice((1, 2, 16, 128, np.inf))))
        budget, buffer, chunk = (int(x) for x in rng.integers((12, 0, 5), (70, 40, 120)))
        recording = random_recording(100 + seed, 4, 3, 3, 8, 700)
        runs.append(Run(name, recording, int(rng.integers(200, 700)), budget, buffer, chunk, rule=rule))
    agree(tmp_path, runs)


@pytest.mark.parametrize("seed", range(24))
def test_any_rule_that_the_pipeline_allows(seed, tmp_path):
    """A new method is a new row: whatever its parameters, both sides mean the same by them."""
    rng = np.random.default_rng(seed)
    heads, group, layers, dim = (int(rng.choice(x)) for x in ((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4), (4, 8, 16, 32)))
    tokens, chunk, buffer = (int(rng.integers(*x)) for x in ((20, 260), (1, 90), (0, 20)))
    rule = table.random_rule(rng)
    budget = max(1, rule.sinks + rule.recent + int(rng.integers(0, 60)))
    make = redundant_recording if rule.merge == "classes" else random_recording
    recording = make(seed, layers, group * heads, heads, dim, tokens)
    run = Run("streaming", recording, int(rng.integers(1, tokens + 1)), budget, buffer, chunk,
              [int(rng.integers(1, 40))], rule)
    result = replay.drive(tmp_path, [run])
    tally = replay.follow(run, result.evictions[0], result.out[0])
    print(rule, tally)
    assert tally.worst["out"] < 1e-4


EDGES = {  # layers, query heads, KV heads, head_dim; entries above the protected ones, buffer, chunk
    "one head of 256": ((1, 2, 1, 256), (1, 1, 1)),
    "a group of eight": ((2, 8, 1, 32), (0, 0, 7)),
    "no group": ((2, 2, 2, 80), (3, 33, 2)),
    "a chunk beyond the budget": ((2, 4, 2, 16), (2, 1, 129)),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("edge", EDGES)
def test_degenerate_streams_with_hardly_any_room(kind, edge, tmp_path):
    """Every policy, with a budget barely above what is protected, on streams in which nearly everything ties."""
    shape, (room, buffer, chunk) = EDGES[edge]
    recording, runs = degenerate_recording(kind, 61, *shape, 96), []
    for i, name in enumerate(BOUNDED):
        rule = table.rule(name).but(sinks=i % 2)
        window = min(rule.observe.window, 5)
        rule = rule.but(observe=dict(window=window), recent=0 if rule.observe.expect else window or 3)
        runs.append(Run(name, recording, 60 + i, max(1, rule.sinks + rule.recent + room), buffer, chunk, [512], rule))
    result = replay.drive(tmp_path, runs)
    for i, run in enumerate(runs):
        tally = replay.follow(run, result.evictions[i], result.out[i])
        print(run.name, tally)
        assert tally.evictions == len(result.evictions[i]) > 0
        assert tally.worst["out"] < 1e-4 and np.isfinite(result.out[i]).all()


# --- real streams -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dialogue():
    """Records the input of the bundled model's cache while it reads and continues a dialogue."""
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("no bundled model")
    cases = json.loads((replay.ROOT / "tests/data/models/keepd-nano/golden.json").read_text())["cases"]
    prompt = max((case["prompt"] for case in cases), key=len)
    command = [replay.find_driver("golden_logits"), "--model", MODEL, "--tokens", ",".join(map(str, prompt)),
               "--greedy", "600", "--path", "auto"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return model_recording(Reference(MODEL), prompt + found["greedy"])


# The model normalises keys: their lengths tie.
@pytest.mark.parametrize("name", [name for name in BOUNDED if name != "knorm"])
def test_a_dialogue_of_the_bundled_model(name, dialogue, tmp_path):
    # Equal tokens have equal keys and values in layer 0: whom of several equals they join is a tie.
    layers = [1, 2, 5] if name == "ems" else [0, 2, 5]
    agree(tmp_path, [Run(name, dialogue.layers(layers), 640, 96, 32, 128, [128])])
    agree(tmp_path, [Run(name, dialogue.layers([3]), 500, 80, 16, 100, [64])], "auto", "bf16", 1e-4)


# --- the comparison can fail ------------------------------------------------------------------------


@pytest.mark.parametrize("name, changes", [(name, changes) for name in BOUNDED for changes in table.mistakes(name)],
                         ids=str)
def test_a_wrong_rule_is_noticed(name, changes, tmp_path):
    run = Run(name, recording_for(name, 41, 3, 6, 3, 16, 400), 360, 80, 16, 96)
    result = replay.drive(tmp_path, [run])
    replay.follow(run, result.evictions[0], result.out[0])
    run.rule = run.rule.but(**changes)
    with pytest.raises(AssertionError):
        replay.follow(run, result.evictions[0], result.out[0])
