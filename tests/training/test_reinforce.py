"""Reinforcement under evictions: what an answer's reward does to its probability, and one step with the real daemon."""

import json
from types import SimpleNamespace

import pytest
import torch

import reinforce
from eviction_trace import parse_record
from conftest import BINARY
from test_daemon_trace import MODEL, needs_daemon
from test_distill import H, L, VOCAB, record


def test_the_mean_of_a_questions_answers_is_the_baseline():
    assert reinforce.advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert reinforce.advantages([1.0, 1.0]) == [0.0, 0.0]


def test_questions_are_scored_and_their_answers_are_not_in_the_prompt():
    found = reinforce.questions("heldout", 1, 256)
    for _, (messages, expected) in zip(range(20), found):
        assert messages[-1]["role"] == "user" and expected
        assert all(set(m) == {"role", "content"} for m in messages)
    first, again = reinforce.questions("train", 1, 256), reinforce.questions("train", 1, 256)
    assert [next(first) for _ in range(3)] == [next(again) for _ in range(3)]


@pytest.fixture
def made(base, tmp_path):
    """A run that asks no daemon."""
    a = SimpleNamespace(model=base, seed=1, length=256, questions=1, cases=1, run=tmp_path, lr=1e-3, minutes=60,
                        max_steps=20, warmup=1)
    return reinforce.ReinforceRun(a, reinforce.World())


def log_probability(run, rec):
    with torch.no_grad():
        return run.log_probabilities(parse_record(json.dumps(rec), *run.shape))


def test_a_rewarded_answer_becomes_likelier_and_the_other_less_likely(made):
    assert made.shape == (L, H, VOCAB)
    good, bad = record(seed=2), record(seed=3)
    made.sampled = lambda: [(rec, log_probability(made, rec).tolist(), reward, reward - 0.5)
                            for rec, reward in ((good, 1.0), (bad, 0.0))]
    before = [log_probability(made, rec).mean() for rec in (good, bad)]
    for _ in range(5):
        line = made.train_step()
        made.update(0.0)
    after = [log_probability(made, rec).mean() for rec in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]
    assert line["reward"] == 0.5 and line["used"] == 1 and line["apart"] < 1e-6


def test_each_token_sees_what_was_held(made):
    """An answer's probabilities are those of the masked model, not of the full cache."""
    with_trace, without = record(seed=2), record(seed=2, trace=[])
    assert (log_probability(made, with_trace) - log_probability(made, without)).abs().max() > 1e-3


def test_the_ratio_of_probabilities_is_bounded(made):
    rec = record(seed=2)
    mine = log_probability(made, rec)
    loss, apart = made.answer_loss(rec, (mine - 5).tolist(), 0.5, 4)
    assert loss.item() == pytest.approx(-(0.5 * reinforce.MOST_RATIO * mine).mean().item() / 4, rel=1e-5)
    assert apart == pytest.approx(5, abs=1e-4)


@needs_daemon
def test_a_step_with_the_daemon(script, tmp_path):
    """The weights in training and the daemon agree on every answer's probability, and the curve has its lines."""
    failure, out, err = script(reinforce, MODEL, "--daemon", BINARY, "--length", 256, "--share", 0.125, "--shares", "0.125", "--rows", 3,
                               "--samples", 4, "--cases", 4, "--questions", 8, "--max-steps", 1, "--evaluate", 1, "--threads", 1,
                               "--run", tmp_path / "run", "--out", tmp_path / "out")
    assert failure is None, failure + err
    lines = [json.loads(s) for s in out.splitlines() if s.startswith("{")]
    step = next(n for n in lines if "reward" in n)
    assert step["used"] > 0 and step["apart"] < 1e-3
    curve = [json.loads(s) for s in (tmp_path / "run/curve.jsonl").read_text().splitlines()]
    assert [n["step"] for n in curve] == [0, 1] and set(curve[0]["right"]) == {"1", "0.125"}
    assert (tmp_path / "out/gates.safetensors").exists()


@needs_daemon
def test_a_daemon_that_does_not_start_says_why(tmp_path, capfd):
    with pytest.raises(SystemExit, match="did not become ready"), \
            reinforce.Daemon(SimpleNamespace(daemon=BINARY, threads=1), tmp_path / "no model"):
        pass
    assert f"{tmp_path / 'no model'}" in capfd.readouterr().err
