"""Reinforcement under evictions: what an answer's reward does to its probability, and one step with the real daemon."""

import json
from types import SimpleNamespace

import pytest
import torch

import adapt_nano
import reinforce
from eviction_trace import parse_record
from conftest import BINARY
from distill import SparseModel
from test_daemon_trace import MODEL, needs_daemon
from test_distill import H, L, VOCAB, random_trace, record


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
    a = SimpleNamespace(model=base, seed=1, length=256, run=tmp_path, lr=1e-3, minutes=60, max_steps=20, warmup=1, bf16=False)
    return reinforce.ReinforceRun(a, reinforce.World())


def branch(seed, count=40, prompt=20, **fields):
    """An answer to the question that all of them have; evictions of the prompt are the same, those of the answer are its own."""
    common, own = record(count=prompt, prompt=prompt, seed=1), record(count=count, prompt=prompt, seed=seed)
    trace = {"trace": random_trace(count, 8, 6, seed=7), **fields}
    return {**own, "prompt_ids": common["prompt_ids"], **trace}


def parsed(run, rec):
    return parse_record(json.dumps(rec), *run.shape)


def log_probability(run, *recs):
    with torch.no_grad():
        return list(run.log_probabilities([parsed(run, rec) for rec in recs]))


def test_branches_are_the_answers_one_by_one(made):
    """Several answers read at once have the probabilities that the model of distill.py gives each of them alone."""
    assert made.shape == (L, H, VOCAB)
    recs = [branch(2), branch(3, count=31), branch(4, count=21)]
    alone = SparseModel(made.a.model)
    for rec, got in zip(map(lambda r: parsed(made, r), recs), log_probability(made, *recs)):
        with torch.no_grad():
            hidden = alone.hidden(torch.tensor([rec.ids[:-1]]), rec.until[..., :-1])[0, rec.prompt - 1:]
            wanted = alone.logits(hidden).log_softmax(-1).gather(1, torch.tensor(rec.ids[rec.prompt:])[:, None])[:, 0]
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_rewarded_answer_becomes_likelier_and_the_other_less_likely(made):
    good, bad = branch(2), branch(3)
    made.sampled = lambda: [[(rec, daemons.tolist(), reward)
                             for rec, daemons, reward in zip((good, bad), log_probability(made, good, bad), (1.0, 0.0))],
                            [(bad, [], 1.0)] * 2]       # all right: nothing to learn
    before = [x.mean() for x in log_probability(made, good, bad)]
    for _ in range(5):
        line = made.train_step()
        made.update(0.0)
    after = [x.mean() for x in log_probability(made, good, bad)]
    assert after[0] > before[0] and after[1] < before[1]
    assert line["reward"] == 0.75 and line["used"] == 0.5 and line["apart"] < 1e-6


def test_each_token_sees_what_was_held(made):
    """An answer's probabilities are those of the masked model, not of the full cache."""
    with_trace, without = branch(2), branch(2, trace=[])
    assert (log_probability(made, with_trace)[0] - log_probability(made, without)[0]).abs().max() > 1e-3


def test_the_ratio_of_probabilities_is_bounded(made):
    good, bad = branch(2), branch(3)
    mine = log_probability(made, good, bad)
    loss, apart = made.question_loss([(good, (mine[0] - 5).tolist(), 1.0), (bad, mine[1].tolist(), 0.0)], 4)
    wanted = -(0.5 * reinforce.MOST_RATIO * mine[0]).mean() / 4 + (0.5 * mine[1]).mean() / 4
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert apart == pytest.approx(2.5, abs=1e-4)


def test_questions_are_made_once():
    some = reinforce.Questions("train", 1, 256)
    assert some.some(2, 4) == some.some(0, 5)[2:4] == reinforce.Questions("train", 1, 256).some(2, 4)


def test_the_table_pairs_questions(tmp_path):
    lines = [{"model": name, "right": {"0.0625": digits}} for name, digits in (("as-it-is", "1010"), ("adapted", "1110"))]
    (tmp_path / "curve").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = reinforce.table(tmp_path / "curve").splitlines()
    assert lines[2].startswith("| as-it-is | 50.0 [") and "| 0.0 [0.0, 0.0] |" in lines[2]
    assert lines[3].startswith("| adapted | 75.0 [") and "| 25.0 [-24.0, 74.0] |" in lines[3]


def test_records_need_a_number_of_steps(script, tmp_path):
    """Without one they would never end."""
    failure, _, err = script(reinforce, MODEL, "--record", tmp_path / "records", "--run", tmp_path / "run")
    assert failure == "2" and "--record needs --max-steps" in err
    assert not (tmp_path / "run").exists()


@needs_daemon
def test_a_step_with_the_daemon(script, tmp_path):
    """The weights in training and the daemon agree on every answer's probability; the adapted model can be asked."""
    common = ("--daemon", BINARY, "--length", 256, "--threads", 1)
    failure, out, err = script(reinforce, MODEL, *common, "--train-shares", "0.125", "--rows", 3, "--samples", 4, "--max-steps", 1,
                               "--keep", 1, "--run", tmp_path / "run", "--out", tmp_path / "out")
    assert failure is None, failure + err
    step = next(n for n in map(json.loads, filter(lambda s: s.startswith("{"), out.splitlines())) if "reward" in n)
    assert step["used"] > 0 and step["apart"] < 1e-3
    assert (tmp_path / "out/gates.safetensors").exists() and (tmp_path / "run/step-0001/config.json").exists()
    failure, _, err = script(reinforce, tmp_path / "out", *common, "--shares", "1,0.125", "--cases", 4, "--evaluate", tmp_path / "curve")
    assert failure is None, failure + err
    line = json.loads((tmp_path / "curve").read_text())
    assert line["model"] == "out" and {share: len(digits) for share, digits in line["right"].items()} == {"1": 4, "0.125": 4}


@needs_daemon
def test_the_comparison_is_one_command(script, tmp_path):
    """Records, distillation, rewards, and a table of the three models."""
    failure, out, err = script(adapt_nano, "--run", tmp_path, "--minutes", 1e-6, "--threads", 1, "--daemon", BINARY, "--length", 200,
                               "--records", 1, "--cases", 2)
    assert failure is None, failure + err
    rows = [line.split(" | ")[0] for line in out.splitlines() if line.startswith("| ")]
    assert rows == ["| model", "| keepd-nano", "| distilled", "| rewarded"]


@needs_daemon
def test_a_daemon_that_does_not_start_says_why(tmp_path, capfd):
    with pytest.raises(SystemExit, match="did not become ready"), \
            reinforce.Daemon(SimpleNamespace(daemon=BINARY, threads=1), tmp_path / "no model"):
        pass
    assert f"{tmp_path / 'no model'}" in capfd.readouterr().err
