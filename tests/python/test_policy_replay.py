"""The eviction of the CPU backend against the float64 reference, policy by policy.

The policy_replay driver feeds the backend recorded queries, keys and values; policies/agree.py says
what counts as agreement.  KEEPD_POLICY_REPLAY names the driver, or KEEPD_BUILD the build folder.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices: more threads only spin

import pytest

from policies import replay, table
from policies.streams import random_recording

TABLE = {row["name"]: row for row in replay.policies()}
BOUNDED = [name for name, row in TABLE.items() if row["bounded"]]


# --- the table ------------------------------------------------------------------------------


def test_every_policy_has_a_reference_row():
    assert set(TABLE) <= set(table.ROWS)


@pytest.mark.parametrize("name", TABLE)
def test_the_rows_say_the_same(name):
    mine, theirs = table.ROWS[name].flat(), TABLE[name]["rule"]
    assert set(mine) == set(theirs)
    assert {k: v for k, v in mine.items() if theirs[k] != pytest.approx(v)} == {}


# --- random streams ---------------------------------------------------------------------------


def agree(folder, runs, path="reference", kv_dtype="f32", tolerance=1e-5):
    """All runs as one batch; every one must agree with its reference."""
    result = replay.drive(folder, runs, path=path, kv_dtype=kv_dtype)
    for i, run in enumerate(runs):
        tally = replay.follow(run, result.evictions[i], result.out[i], kv_dtype, tolerance)
        print(f"{run.policy} {path} {kv_dtype}: {tally}")
        assert tally.evictions == len(result.evictions[i]) > 0
        assert tally.worst["out"] < 1e-4
        assert tally.at_cut + tally.forgiven <= 1 + tally.entries / 1000  # ties are no way out
        assert tally.merged_otherwise <= 1 + tally.merged / 1000


@pytest.mark.parametrize("name", BOUNDED)
def test_random_streams(name, tmp_path):
    runs = [replay.Run(table.rule(name), random_recording(seed, 3, 4, 2, 16, 900), 700, budget, buffer, chunk,
                       splits, name)
            for seed, budget, buffer, chunk, splits in ((1, 64, 16, 96, [512]), (2, 96, 0, 64, [7, 1, 40]))]
    agree(tmp_path, runs)
