"""Recorded evictions as masks, and distillation to them."""

import json

import pytest
import torch

import distill
import losses
from eviction_trace import BadRecord, Records, parse_record, seen, visible_until
from gates import GateBank, read_header
from models import base_digests

L, H, VOCAB = 2, 2, 260


def random_trace(count, every, keep, seed=1):
    """Evicts every `every` tokens down to `keep` per head, at random."""
    g = torch.Generator().manual_seed(seed)
    alive = [[set() for _ in range(H)] for _ in range(L)]
    trace = []
    for tokens in range(every, count + 1, every):
        evicted = [[[] for _ in range(H)] for _ in range(L)]
        for i in range(L):
            for h in range(H):
                alive[i][h] |= set(range(tokens - every, tokens))
                order = [sorted(alive[i][h])[j] for j in torch.randperm(len(alive[i][h]), generator=g).tolist()]
                evicted[i][h] = sorted(order[keep:])
                alive[i][h] -= set(evicted[i][h])
        trace.append({"tokens": tokens, "evicted": evicted})
    return trace


def slow_mask(trace, count, layer, head):
    """The daemon replayed: what each query finds in the cache."""
    mask, held = torch.zeros(count, count, dtype=torch.bool), set()
    for t in range(count):
        for eviction in trace:
            if eviction["tokens"] == t:
                held -= set(eviction["evicted"][layer][head])
        held.add(t)
        mask[t, sorted(held)] = True
    return mask


def record(count=40, prompt=20, trace=None, seed=2):
    ids = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:], "trace": random_trace(count, 8, 6) if trace is None else trace}


def dense(until, begin, end):
    """`seen` of a head over all keys."""
    keys, mask = seen(until, begin, end)
    out = torch.zeros(end - begin, end, dtype=torch.bool)
    out[:, keys] = mask
    assert mask.any(0).all()            # no key that nothing sees
    return out


def test_masks_are_what_a_replay_finds():
    trace = random_trace(41, 8, 6)
    until = visible_until(trace, 41, L, H)
    for layer in range(L):
        for begin, end in ((0, 41), (5, 23), (40, 41)):
            for head in range(H):
                got = dense(until[layer, head], begin, end)
                assert torch.equal(got, slow_mask(trace, 41, layer, head)[begin:end, :end])


def test_sparse_attention_is_softmax_over_the_mask():
    g = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(1, 4, 41, 8, generator=g), *torch.randn(2, 1, H, 41, 8, generator=g)
    trace = random_trace(41, 8, 6)
    got = distill.sparse(q, k, v, visible_until(trace, 41, L, H)[1], 0.3, block=16)
    for h in range(4):
        logits = (q[0, h] @ k[0, h // 2].T * 0.3).masked_fill(~slow_mask(trace, 41, 1, h // 2), -torch.inf)
        torch.testing.assert_close(got[0, h], logits.softmax(-1) @ v[0, h // 2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("change, field", [
    ({"prompt_ids": []}, "must not be empty"), ({"completion_ids": [260]}, "completion_ids"), ({"prompt_ids": "a"}, "prompt_ids"),
    ({"trace": None}, "trace"), ({"trace": [1]}, r"trace\[0\].tokens"),
    ({"trace": [{"tokens": 41, "evicted": [[[], []]] * 2}]}, r"trace\[0\].tokens"),
    ({"trace": [{"tokens": 9, "evicted": [[[], []]]}]}, r"trace\[0\].evicted: expected 2 layers"),
    ({"trace": [{"tokens": 9, "evicted": [[[], []], [[]]]}]}, r"trace\[0\].evicted\[1\]: expected 2 KV heads"),
    ({"trace": [{"tokens": 9, "evicted": [[[], [9]], [[], []]]}]}, r"trace\[0\].evicted\[0\]\[1\]: expected positions below 9"),
    ({"trace": [{"tokens": 9, "evicted": [[[], [3, 3]], [[], []]]}]}, "already evicted"),
    ({"trace": [{"tokens": t, "evicted": [[[], [3]], [[], []]]} for t in (9, 12)]}, r"trace\[1\].evicted\[0\]\[1\]: .*already"),
    ({"trace": [{"tokens": t, "evicted": [[[], []], [[], []]]} for t in (9, 8)]}, r"trace\[1\].tokens"),
])
def test_bad_records_name_the_field(change, field):
    with pytest.raises(BadRecord, match=field):
        parse_record(json.dumps({**record(), **change}), L, H, VOCAB)


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_records_are_cut_and_long_prompts_left_out(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", [record(), record(prompt=35), record(count=24, prompt=10)])
    records = Records(path, L, H, VOCAB, 30)
    assert len(records) == 2 and "1 records left out" in capsys.readouterr().err
    assert [len(records[i].ids) for i in range(2)] == [31, 24] and records[0].until.shape == (L, H, 31)
    assert torch.equal(dense(records[0].until[0, 0], 0, 31), slow_mask(random_trace(40, 8, 6), 40, 0, 0)[:31, :31])
    with pytest.raises(SystemExit, match="no records"):
        Records(path, L, H, VOCAB, 5)
    write(path, [record(), {}])
    with pytest.raises(SystemExit, match="r.jsonl:2: prompt_ids"):
        Records(path, L, H, VOCAB, 30)


def test_answers_to_one_prompt_are_a_group(tmp_path):
    """The same prompt under the same evictions; what is evicted behind it may differ."""
    other = {**record(), "completion_ids": [1, 2, 3], "trace": random_trace(40, 8, 6)[:2]}
    path = write(tmp_path / "r.jsonl", [record(), other, record(seed=3), {**record(seed=3), "trace": []}])
    assert Records(path, L, H, VOCAB, 60).groups == [[0, 1], [2], [3]]


def test_a_group_has_the_loss_of_its_records(run, base, tmp_path):
    """Answers that are read at once cost less, and the loss is the same."""
    records = [{**record(), "completion_ids": list(range(n)), "trace": random_trace(20 + n, 8, 6)} for n in (20, 9, 1)]
    losses = []
    for name, between in (("together", []), ("apart", [record(seed=5)])):
        rows = [r for one in records for r in (one, *between)]
        write(tmp_path / "records.jsonl", rows if between else rows + [record(seed=5)] * 3)
        assert len(Records(tmp_path / "records.jsonl", L, H, VOCAB, 99).groups) == (6 if between else 2)
        losses.append(run(base, "--rows", 6 if between else 2, "--max-steps", 1, "--no-bf16", folder=name)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_student_that_lost_nothing_is_the_teacher(any_base):
    model = distill.SparseModel(any_base)
    ids = torch.tensor([record()["prompt_ids"]])
    n = ids.shape[1]
    weight = torch.full((1, n), 1 / n)
    with torch.no_grad():
        teacher = model.logits(model.hidden(ids))
        student = model.logits(model.hidden(ids, visible_until([], n, L, H)))
        lost = model.logits(model.hidden(ids, visible_until(random_trace(n, 5, 2), n, L, H)))
    assert losses.divergence(student, teacher, weight) < 1e-6
    assert losses.divergence(lost, teacher, weight) > 1e-3


# --- the trainer ----------------------------------------------------------

@pytest.fixture
def run(script, tmp_path):
    def run(model, *more, folder="run", fail=False):
        failure, out, err = script(distill, model, "--records", tmp_path / "records.jsonl", "--run", tmp_path / folder,
                                   "--out", tmp_path / folder / "out", "--threads", 1, "--every", 1, "--minutes", 30, *more)
        assert fail or failure is None, failure + err
        return failure if fail else [json.loads(s) if s.startswith("{") else s for s in out.splitlines()]
    write(tmp_path / "records.jsonl", [record(seed=i) for i in range(4)])
    return run


def test_distillation_lowers_the_divergence(run, any_base, tmp_path):
    """Four records, all of them in every step: the loss before each step is of the same data."""
    lines = run(any_base, "--rows", 4, "--max-steps", 5, "--lr", 1e-3, "--warmup", 1, "--checkpointing", "--logit-block", 16)
    found = [n["loss"] for n in lines]
    assert found[1] < found[0] and found[-1] < 0.8 * found[0]
    distilled = distill.SparseModel(tmp_path / "run/out")
    source = distill.SparseModel(any_base)
    assert distilled.model.config.model_type == source.model.config.model_type
    assert any(not torch.equal(a, b) for a, b in zip(distilled.model.parameters(), source.model.parameters()))
    assert (tmp_path / "run/out/tokenizer.json").exists() and (tmp_path / "run/out/chat_template.jinja").exists()


def test_the_first_loss_is_the_definition(run, base):
    """Mean over completion tokens of temperature^2 KL, over several records."""
    line = run(base, "--rows", 4, "--max-steps", 1, "--temperature", 2, "--no-bf16")[0]
    model, total, count = distill.SparseModel(base), 0.0, 0
    for i in range(4):
        r = parse_record(json.dumps(record(seed=i)), L, H, VOCAB)
        ids = torch.tensor([r.ids])
        with torch.no_grad():
            p = (model.logits(model.hidden(ids))[0] / 2).softmax(-1)
            q = (model.logits(model.hidden(ids, r.until))[0] / 2).softmax(-1)
        total += 4 * (p * (p / q).log()).sum(-1)[r.prompt - 1:-1].sum().item()
        count += len(r.ids) - r.prompt
    assert line["loss"] == pytest.approx(total / count, abs=2e-4)


def test_a_run_that_stopped_goes_on_exactly(run, monkeypatch, base):
    more = ("--rows", 2, "--max-steps", 4, "--lr", 1e-3, "--no-bf16")
    whole = run(base, *more, folder="whole")
    step = distill.DistillRun.train_step

    def stop(self):
        if self.step == 2:
            raise SystemExit("stopped")
        return step(self)

    with monkeypatch.context() as m:
        m.setattr(distill.DistillRun, "train_step", stop)
        assert run(base, *more, folder="cut", fail=True) == "stopped"
    rest = run(base, *more, folder="cut")
    assert rest[0] == "resumed at step 2"
    assert [n["loss"] for n in rest[1:]] == [n["loss"] for n in whole[2:]]


def test_gates_go_with_the_weights(run, base, tmp_path):
    gates = base / "gates.safetensors"
    GateBank(L, H, 32, width=8).save(gates, base_digests(base), 9)
    try:
        run(base, "--max-steps", 1)
    finally:
        gates.unlink()
    header = read_header(tmp_path / "run/out/gates.safetensors")
    assert header["base"] == base_digests(tmp_path / "run/out") and header["trained_budget"] == 9
    for file in (tmp_path / "run/out").iterdir():
        assert file.stat().st_mode & 0o444 == 0o444, "a daemon of another user serves it"


def test_the_model_itself_is_never_overwritten(script, base, tmp_path):
    (tmp_path / "r").write_text("")
    failure, _, err = script(distill, base, "--records", tmp_path / "r", "--run", tmp_path, "--out", base)
    assert failure == "2" and "--out is the model itself" in err
