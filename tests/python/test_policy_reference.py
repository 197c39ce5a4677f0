"""The C eviction against the reference, on the dumps of tests/sim/dump_evict.c.

KEEPD_BUILD names the build folder (build/dev)."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import policy_reference as reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dumps():
    build = Path(os.environ.get("KEEPD_BUILD", ROOT / "build" / "dev"))
    binary = build / "tests" / "sim" / "dump_evict"
    if not binary.exists():
        pytest.skip(f"{binary} is not built")
    text = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in text.splitlines()]


def compare(dump):
    """Asserts that the kept sets agree outside of the cut; returns how many entries differ."""
    streams = dump["layers"] * dump["heads"]
    entries = reference.Entries(dump["positions"], dump["log_beta"])
    horizon = np.inf if dump["horizon"] is None else dump["horizon"]
    kept, close = reference.select(entries, dump["policy"], streams, dump["tokens"],
                                   dump["budget"], dump["sinks"], dump["recent"], horizon)
    in_c = np.concatenate([np.isin(before, after)
                           for before, after in zip(dump["positions"], dump["kept"])])
    assert in_c.sum() == kept.sum()
    wrong = (in_c != kept) & ~close
    assert not wrong.any(), (dump["policy"], horizon, entries.pos[wrong], entries.stream[wrong])
    return int((in_c != kept).sum())


def test_kept_sets_agree(dumps):
    policies = {dump["policy"] for dump in dumps}
    assert policies == {"streaming", "trimkv", "global"}
    different = sum(compare(dump) for dump in dumps)
    kept = sum(len(stream) for dump in dumps for stream in dump["kept"])
    assert different <= kept / 1000  # "close to the cut" is an exception, not a way out


def test_order_is_kept(dumps):
    for dump in dumps:
        for before, after in zip(dump["positions"], dump["kept"]):
            assert after == sorted(set(after)) and set(after) <= set(before)


def test_streams_differ_in_length(dumps):
    spread = [max(map(len, d["kept"])) - min(map(len, d["kept"]))
              for d in dumps if d["policy"] == "global"]
    assert max(spread) > 10


def test_a_wrong_rule_is_noticed(dumps):
    """The comparison itself must be able to fail."""
    changed = [dict(dump, tokens=dump["tokens"] + 200) for dump in dumps
               if dump["policy"] == "global" and dump["recent"] == 0]
    noticed = 0
    for dump in changed:
        try:
            compare(dump)
        except AssertionError:
            noticed += 1
    assert noticed > 0


@pytest.mark.parametrize("beta, horizon, golden", [
    (0.9, 1, -1.158966), (0.9, 2, -0.517112), (0.9, 16, 0.938682), (0.9, 128, 1.143618),
    (0.99, 1, -0.110554), (0.99, 2, 0.577581), (0.99, 16, 2.587731), (0.99, 128, 4.171305),
    (0.9999, 1, -0.001100), (0.9999, 2, 0.691997), (0.9999, 16, 2.770739),
    (0.9999, 128, 4.844587)])
def test_published_scores(beta, horizon, golden):
    """The published score with exponent 11 is ours at age 11 plus log n."""
    score = reference.scores([np.log(beta)], [11], horizon)[0]
    assert score + np.log(horizon) == pytest.approx(golden, abs=1e-6)
