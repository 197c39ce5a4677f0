"""The picture of what rewards did (bench/quality/reward_curve.py)."""
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "quality"))
import reward_curve  # noqa: E402

ROWS = ROOT / "bench" / "results" / "reinforce-nano.jsonl"


def test_the_picture_is_that_of_the_rows(tmp_path):
    script = ROOT / "bench" / "quality" / "reward_curve.py"
    subprocess.run([sys.executable, str(script), str(ROWS), str(tmp_path / "made.svg")], check=True, timeout=300)
    assert (tmp_path / "made.svg").read_text() == (ROOT / "docs" / "quality-rewards.svg").read_text()


def test_means_move_over_neighbours():
    assert reward_curve.moving([(1, 0.0), (2, 0.0), (3, 3.0), (4, 5.0)]) == [(1, 1.0), (2, 2.0), (3, 2.0), (4, pytest.approx(8 / 3))]


def test_answers_afterwards_are_those_of_the_share_and_the_model():
    rows = [{"reward_in_training": {"step": 2, "as_it_is": 0.5, "in_training": 0.5}}, {"share": "1", "model": "a", "step": 3, "rewards": ["11"]},
            {"share": "0.0625", "model": "a", "step": 3, "rewards": ["10", "00"]}]
    assert reward_curve.held_out(rows, "a") == {(3, 0): (1, 2), (3, 1): (0, 2)} and not reward_curve.held_out(rows, "b")
    assert len([json.loads(line) for line in ROWS.read_text().splitlines()]) > 60
