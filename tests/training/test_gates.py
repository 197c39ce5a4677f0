"""Gates, their losses and their trainer, on tiny models of every family."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import losses
import train_gates
from conftest import TRAINING, make_model
from gates import GateBank, GatedModel, decayed, read_header
from models import base_digests, causal


def batch(rows=2, length=24, seed=3):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (rows, length + 1), generator=g)
    return ids[:, :-1], ids[:, 1:], torch.arange(length).expand(rows, -1)


def gated_model(directory, **bank):
    torch.manual_seed(5)
    gated = GatedModel(directory, width=8, bias=1.0, **bank)
    with torch.no_grad():
        gated.bank.w_last.normal_()
    return gated


# --- gates ----------------------------------------------------------------

def slow_log_beta(t, layer, head, x):
    """One number of the formulas in model/gates.h, from a gates file's tensors."""
    i = layer * len(t["row"][0]) + head if len(t["w1"]) > len(t["row"]) else layer
    h = F.silu(t["w1"][i] @ x + t["b1"][i])
    if "w2" in t:
        h = F.silu(t["w2"][i] @ h + t["b2"][i])
    row = t["row"][layer, head]
    return F.logsigmoid(t["w_last"][row] @ h + t["c"][row])


@pytest.mark.parametrize("type, tying", [("rg", "paper"), ("rg", "code"), ("rg", "untied"), ("rg10", "code"), ("rg10", "untied")])
def test_log_beta_is_the_formula_of_the_file(tmp_path, type, tying):
    torch.manual_seed(1)
    bank = GateBank(3, 2, 5, width=4, type=type, tying=tying, bias=0.5)
    for p in bank.parameters():
        p.data.normal_()
    bank.save(tmp_path / "g", "ab" * 32, 7)
    tensors, x = load_file(tmp_path / "g"), torch.randn(1, 6, 5)
    for layer in range(3):
        got = bank.log_beta(layer, x)
        want = torch.tensor([[slow_log_beta(tensors, layer, h, x[0, t]) for t in range(6)] for h in range(2)])
        torch.testing.assert_close(got[0], want)
    assert read_header(tmp_path / "g")["type"] == type
    again = GateBank(3, 2, 5, width=4, type=type, tying=tying)
    again.load(tmp_path / "g")
    assert all(torch.equal(a, b) for a, b in zip(bank.state_dict().values(), again.state_dict().values()))


def test_a_file_of_other_gates_is_refused_by_name(tmp_path):
    GateBank(2, 2, 5, width=4).save(tmp_path / "g", "", 0)
    for other, field in ((dict(width=5), "width"), (dict(width=4, type="rg10"), "type"), (dict(width=4, tying="untied"), "tying")):
        with pytest.raises(SystemExit, match=field):
            GateBank(2, 2, 5, **other).load(tmp_path / "g")
    with pytest.raises(SystemExit, match="paper"):
        GateBank(2, 2, 5, type="rg10", tying="paper")


def test_decayed_attention_is_the_formula():
    g = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(1, 4, 9, 8, generator=g), *torch.randn(2, 1, 2, 9, 8, generator=g)
    lb, pos = -torch.rand(1, 2, 9, generator=g), torch.tensor([[0, 1, 2, 3, 20, 21, 22, 23, 24]])
    got = decayed(q, k, v, lb, pos, 0.3)
    for h in range(4):
        for t in range(9):
            logit = (k[0, h // 2, :t + 1] @ q[0, h, t]) * 0.3 + (pos[0, t] - pos[0, :t + 1]) * lb[0, h // 2, :t + 1]
            torch.testing.assert_close(got[0, h, t], logit.softmax(0) @ v[0, h // 2, :t + 1], atol=1e-5, rtol=1e-4)


def test_open_gates_leave_the_model_as_it_is(any_base):
    gated = GatedModel(any_base, width=8, bias=60.0)
    x, _, pos = batch()
    torch.testing.assert_close(gated(x, pos, "gated"), gated(x, pos), atol=1e-4, rtol=1e-4)


def test_our_attention_is_transformers_own(any_base):
    from transformers import AutoModelForCausalLM
    own = AutoModelForCausalLM.from_pretrained(any_base, dtype=torch.float32).eval()
    x, _, pos = batch()
    with torch.no_grad():
        torch.testing.assert_close(GatedModel(any_base)(x, pos), own(x).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes, field", [({"model_type": "phi3"}, "model_type"), ({"use_sliding_window": True}, "use_sliding_window")])
def test_other_bases_are_refused_by_name(tmp_path, changes, field):
    make_model(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(SystemExit, match=field):
        GatedModel(tmp_path)


# --- losses ---------------------------------------------------------------

def step_gradients(gated, block=0):
    """Loss and gradients of one step with uneven weights."""
    x, y, pos = batch()
    weight = torch.linspace(0.1, 1, x.numel()).view(x.shape)
    weight = weight / weight.sum()

    def quality(s, t, targets, w):
        return losses.divergence(gated.logits(s), gated.logits(t), w) + losses.next_token(gated.logits(s), targets, w)

    with torch.no_grad():
        teacher = gated.hidden(x, pos)
    loss = losses.by_blocks(quality, block, gated.hidden(x, pos, "gated"), teacher, y, weight)
    times = torch.tensor([[5, 11, 23], [2, 7, 20]])
    loss = loss + losses.capacity(gated.layer_log_beta(), pos, times, torch.tensor([2.0, 3.0]))[0]
    loss.backward()
    return loss.item(), [p.grad.clone() for p in gated.bank.parameters()]


def assert_same(a, b):
    assert a[0] == pytest.approx(b[0], rel=1e-5)
    for x, y in zip(a[1], b[1]):
        torch.testing.assert_close(x, y, atol=1e-7, rtol=1e-4)
        assert x.abs().max() > 0


@pytest.mark.parametrize("type", ["rg", "rg10"])
def test_checkpointing_gives_the_same_gradients(any_base, type):
    plain = step_gradients(gated_model(any_base, type=type))
    gated = gated_model(any_base, type=type)
    gated.checkpoint_layers()
    assert_same(plain, step_gradients(gated))


def test_logits_in_blocks_give_the_same_loss(any_base):
    whole = step_gradients(gated_model(any_base))
    for block in (1, 7, 24):
        assert_same(whole, step_gradients(gated_model(any_base), block))


def test_logits_in_blocks_never_exist_whole(base, monkeypatch):
    gated, seen = gated_model(base), []
    logits = gated.logits
    monkeypatch.setattr(gated, "logits", lambda h: seen.append(h.shape[1]) or logits(h))
    step_gradients(gated, 7)
    assert max(seen) == 7


def test_divergence_and_next_token_are_the_formulas():
    g = torch.Generator().manual_seed(4)
    s, t = torch.randn(2, 2, 3, 11, generator=g)
    y, w = torch.randint(0, 11, (2, 3), generator=g), torch.rand(2, 3, generator=g)
    kl = nll = 0.0
    for b in range(2):
        for i in range(3):
            p, q = (t[b, i] / 2).softmax(0), (s[b, i] / 2).softmax(0)
            kl += 4 * w[b, i] * (p * (p / q).log()).sum()
            nll -= w[b, i] * s[b, i].softmax(0)[y[b, i]].log()
    torch.testing.assert_close(losses.divergence(s, t, w, 2.0), kl)
    torch.testing.assert_close(losses.next_token(s, y, w), nll)
    assert losses.divergence(s, s, w).abs() < 1e-6


def test_capacity_is_the_formula():
    """beta [1, .9, .5, .99] in one head: soft sizes 1, 2, 2.9, 3.31."""
    lb = torch.tensor([[[1.0, 0.9, 0.5, 0.99]]]).log()
    times, pos = torch.arange(4)[None], torch.arange(4)[None]
    loss, size, share = losses.capacity([lb], pos, times, torch.tensor([2.0]))
    assert loss.item() == pytest.approx((0.9 / 3 + 1.31 / 4) / 4, abs=1e-5)
    assert size.item() == pytest.approx((1 + 2 + 2.9 + 3.31) / 4, abs=1e-5)
    assert share.item() == pytest.approx((1 + 1 + 2.9 / 3 + 3.31 / 4) / 4, abs=1e-5)
    loss, _, _ = losses.capacity([lb, torch.zeros(1, 1, 4)], pos, times[:, 3:], torch.tensor([2.0]))
    assert loss.item() == pytest.approx(((3.31 + 4) / 2 - 2) / 4, abs=1e-5), "one sum over the layers"


# --- the trainer ----------------------------------------------------------

def options(model, run, *more):
    return [str(x) for x in (model, "--run", run, "--gates", run / "gates.safetensors", "--threads", 1, "--every", 1,
                             "--width", 8, "--minutes", 30, *more)]


def values(out):
    """The lines of a run: JSON values, and texts."""
    return [json.loads(s) if s.startswith("{") else s for s in out.splitlines()]


@pytest.fixture
def train(script):
    def run(model, folder, *more):
        failure, out, err = script(train_gates, *options(model, folder, *more))
        assert failure is None, failure + err
        return values(out)
    return run


def numbers(line):
    return [line[k] for k in ("step", "loss", "kl", "next_token", "capacity", "soft_size", "soft_share")]


def test_chats_train_the_gates_of_every_family(train, any_base, chats, tmp_path):
    lines = train(any_base, tmp_path, "--chats", chats, "--length", 96, "--max-steps", 6, "--bias", 4, "--lr", 0.1,
                      "--warmup", 1, "--capacity", 20, "--checkpointing", "--logit-block", 16, "--type", "rg10")
    assert [n["step"] for n in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["soft_share"] < 0.7 * lines[0]["soft_share"] and lines[0]["tokens_per_s"] > 0
    header = read_header(tmp_path / "gates.safetensors")
    assert header["type"] == "rg10" and header["base"] == base_digests(any_base)
    assert (tmp_path / "gates.safetensors").stat().st_mode & 0o444 == 0o444, "a daemon of another user serves them"


def test_a_budget_of_ones_own(train, script, base, chats, tmp_path):
    """The papers' training M: what exceeds it costs, whatever the batch, and the file says what it was."""
    more = ("--chats", chats, "--length", 96, "--max-steps", 1, "--bias", 4, "--no-bf16", "--samples", 96)
    small, large, none = (train(base, tmp_path / str(m), *more, "--budget", m)[0] for m in (2, 20, 96))
    assert small["soft_size"] == large["soft_size"] == none["soft_size"] > 20, "the budget alone differs"
    assert small["capacity"] > large["capacity"] > none["capacity"] == 0
    assert read_header(tmp_path / "20" / "gates.safetensors")["trained_budget"] == 20
    failure, _, err = script(train_gates, *options(base, tmp_path, *more, "--budget", 0))
    assert failure is not None and "--budget: 0: not a whole number above 0" in err


def test_two_processes_take_the_step_of_one_with_twice_the_rows(train, base, chats, tmp_path):
    more = ("--chats", chats, "--length", 96, "--max-steps", 3, "--bias", 2, "--no-bf16", "--gap-share", 0.5)
    one = train(base, tmp_path / "one", *more, "--rows", 4)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--",
               str(TRAINING / "train_gates.py"), *options(base, tmp_path / "two", *more, "--rows", 2)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = values(done.stdout)
    assert len(one) == len(two) == 3
    for a, b in zip(one, two):
        assert numbers(a) == pytest.approx(numbers(b), rel=1e-3, abs=2e-4)
    a, b = (load_file(tmp_path / n / "gates.safetensors") for n in ("one", "two"))
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-4, rtol=1e-3)


def test_a_run_that_stopped_goes_on_exactly(train, script, monkeypatch, base, chats, tmp_path):
    """The schedule follows the steps here, so a run cut at step 2 must equal one that was not."""
    more = ("--chats", chats, "--length", 96, "--bias", 2, "--no-bf16", "--max-steps", 4)
    whole = train(base, tmp_path / "whole", *more)
    step = train_gates.GateRun.train_step

    def stop(self):
        if self.step == 2:
            raise SystemExit("stopped")
        return step(self)

    with monkeypatch.context() as m:
        m.setattr(train_gates.GateRun, "train_step", stop)
        failure, out, _ = script(train_gates, *options(base, tmp_path / "cut", *more))
    assert failure == "stopped" and len(values(out)) == 2
    rest = train(base, tmp_path / "cut", *more)
    assert rest[0] == "resumed at step 2"
    assert [numbers(n) for n in rest[1:]] == [numbers(n) for n in whole[2:]]


def test_a_checkpoint_of_other_gates_is_refused(train, script, base, chats, tmp_path):
    more = ("--chats", chats, "--length", 96, "--max-steps", 1)
    train(base, tmp_path, *more)
    failure, _, _ = script(train_gates, *options(base, tmp_path, *more, "--type", "rg10"))
    assert "checkpoint.pt: of a run with other options" in failure


def test_evaluate_on_chats(train, base, chats, tmp_path):
    train(base, tmp_path, "--chats", chats, "--length", 96, "--max-steps", 1)
    result = train(base, tmp_path, "--chats", chats, "--length", 96, "--evaluate", "--share", 0.5, "--chunk", 8)[0]
    assert set(result) >= {"global", "trimkv", "streaming"} and result["rows"] == 6
    assert all(0 <= result[p] <= 1 for p in ("global", "trimkv", "streaming"))


def test_the_generated_dialogues_need_our_tokenizer(script, base, tmp_path):
    other = make_model(tmp_path / "other", "qwen3")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_", "<|turn_"))
    failure, _, _ = script(train_gates, *options(other, tmp_path / "run"))
    assert "give --chats or --text" in failure


# --- the report -----------------------------------------------------------

def test_the_bar_is_for_terminals_only(monkeypatch):
    import io

    from report import Report

    monkeypatch.setenv("COLUMNS", "100")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    values = {"step": 7, "loss": 0.25, "soft_share": 0.5, "tokens_per_s": 1234}
    plain, bar = Report(io.StringIO()), Report(Terminal())
    for r in (plain, bar):
        r.bar(0.5, values)
        r.line(values)
    assert plain.stream.getvalue() == json.dumps(values) + "\n"
    assert "[##########..........]  50 % step 7  loss 0.25  soft_share 0.5  tokens_per_s 1,234" in bar.stream.getvalue()
    assert bar.stream.getvalue().endswith("\r\033[K" + json.dumps(values) + "\n")
