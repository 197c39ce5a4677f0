"""The regression of gates: what it measures against attention computed anew, its cutoff, its learning and its command."""

import json
import types

import pytest
import torch

import fit_gates
from conftest import VOCAB
from fit_gates import FitRun, Moments, log_rates, soft_cutoff
from gates import GateBank, read_header
from importance import Capture, Probe
from models import base_digests

WINDOW = 4


class Watched(Probe):
    """Keeps what `windows` is given."""

    def windows(self, layer, grad, *rest):
        self.seen = getattr(self, "seen", {})
        self.seen[layer] = (*self.kept[layer], grad)
        return super().windows(layer, grad, *rest)


def slow_loss(q, k, v, scaling, out, grad, head, entry, times):
    """Sum over queries of (sum over the group's heads of g . (output without the entry - output))^2."""
    g, total = q.shape[0] // k.shape[0], 0.0
    for t in times:
        moved = 0.0
        for h in range(head * g, head * g + g):
            logits = (k[head, :t + 1] @ q[h, t]) * scaling
            logits[entry] = -torch.inf
            moved += (grad[h, t] @ (logits.softmax(-1) @ v[head, :t + 1] - out[0, h, t])).item()
        total += moved ** 2
    return total


def test_loss_of_an_entry_is_what_attention_without_it_costs(any_base):
    probe = Watched(any_base, dtype=torch.float32)
    ids = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(3))
    c = probe.capture(ids, 12, WINDOW, torch.Generator().manual_seed(4))
    assert c.loss.shape == (2, 2, 12, 5) and c.x.shape == (2, 12, 32) and c.begin.tolist() == [4, 8, 12, 16, 20]
    checked = 0
    for layer in range(2):
        for n, entry in enumerate(c.at.tolist()):
            for w, first in enumerate(c.begin.tolist()):
                if entry >= first:
                    assert c.loss[layer, :, n, w].abs().max() == 0       # not in the cache yet
                    continue
                for head in range(2):
                    slow = slow_loss(*(x.detach() if torch.is_tensor(x) else x for x in probe.seen[layer]), head, entry,
                                     range(first, first + WINDOW))
                    assert c.loss[layer, head, n, w].item() == pytest.approx(slow, rel=1e-3, abs=1e-9)
                    checked += 1
    assert checked > 100 and c.loss.max() > 0


def test_gradient_is_that_of_the_drawn_tokens(base):
    """At the last layer's input of the output matrix: of log p(y) for some y that the model may draw."""
    probe = Probe(base, dtype=torch.float32)
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    found = probe.drawn_gradient(hidden, torch.Generator().manual_seed(2), 2)
    for t in range(5):
        h = hidden[0, t].clone().requires_grad_()
        logp = probe.logits(h).log_softmax(-1)
        grads = torch.stack([torch.autograd.grad(logp[y], h, retain_graph=True)[0] for y in range(VOCAB)])
        assert (grads - found[0, t]).abs().amax(-1).min() < 1e-5


def test_cutoff_counts_and_its_gradient():
    g = torch.Generator().manual_seed(5)
    rank = torch.randn(2, 2, 9, 3, generator=g, dtype=torch.float64, requires_grad=True)
    free = (torch.rand(9, 3, generator=g) < 0.8).double()
    wanted = torch.tensor([4.0, 9.0, 20.0], dtype=torch.float64)
    cut = soft_cutoff(rank, free, wanted)
    soft = (torch.sigmoid((cut - rank) / fit_gates.SOFTNESS) * free).sum((0, 1, 2))
    assert soft.tolist() == pytest.approx(wanted.tolist(), abs=0.01)
    grad, = torch.autograd.grad(soft.sum(), rank)
    assert grad.abs().max() < 1e-3       # the count stays what it is


def test_rank_is_that_of_the_daemon():
    """By age * log_beta, the score of `global` with horizon 1."""
    torch.manual_seed(6)
    bank = GateBank(2, 2, 8, 4, "rg", "untied", 1.0)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        bank.w_last.normal_()
        rate = log_rates(bank, x)
        for layer in range(2):
            assert torch.allclose(-rate[layer].exp(), bank.log_beta(layer, x[layer][None])[0], atol=1e-6)
        bank.c.fill_(30.0)                  # log_beta is too close to 0 for float32 there, its logarithm is not
        assert torch.isfinite(log_rates(bank, x)).all()


def made_capture(seed, n=64):
    """Entries whose first feature is 1 are worth something at every age; of the others only the newest are."""
    g = torch.Generator().manual_seed(seed)
    at, begin = torch.arange(n), torch.arange(8, n - 7, 8)
    valued = torch.rand(2, n, generator=g) < 0.1
    x = torch.randn(2, n, 4, generator=g)
    x[..., 0] = valued.float()
    age = begin[None] - at[:, None]
    worth = torch.where(valued[:, None, :, None], 1.0, 0.01 * (age < 8)) * (age > 0)
    return Capture(x.to(torch.bfloat16), worth.expand(2, 2, n, len(begin)).contiguous(), at, begin, n)


def options(base, tmp_path, **changes):
    return types.SimpleNamespace(**{**dict(model=base, seed=1, length=64, width=4, lr=0.1, warmup=2, minutes=60, max_steps=80,
                                           every=1000, rows=2, per_head=False, run=tmp_path / "run", gates=tmp_path / "g.safetensors",
                                           sinks=1, recent=2), **changes})


def test_learns_to_keep_what_is_worth_it(base, tmp_path):
    world = types.SimpleNamespace(first=True, size=1, device="cpu", agree=lambda x: x, sum_gradients=lambda p: None)
    run = FitRun(options(base, tmp_path), world, [made_capture(s) for s in range(17)])
    run.resume()
    before = run.evaluate()["lost"]["0.25"]
    run.train()
    after = run.evaluate()["lost"]["0.25"]
    assert after["newest"] == before["newest"] > 0.3
    assert after["gates"] < 0.1 < before["gates"]


def test_per_head_gates_ignore_their_input(base, tmp_path):
    """One head is worth more than the others: it gets the room, and all of its tokens have one lifetime."""
    world = types.SimpleNamespace(first=True, size=1, device="cpu", agree=lambda x: x, sum_gradients=lambda p: None)
    worth = torch.tensor([[1.0, 0.01], [0.01, 0.01]])[..., None, None]
    captures = [c._replace(loss=c.loss * worth) for c in map(made_capture, range(9))]
    run = FitRun(options(base, tmp_path, per_head=True), world, captures)
    run.resume()
    run.train()
    rates = log_rates(run.module, captures[0].x)
    assert (rates - rates[..., :1]).abs().max() == 0
    assert rates[0, 0, 0] < rates.flatten(0, 1)[1:, 0].min() - 0.5


def test_hard_loss_is_the_part_below_the_cutoff(base, tmp_path):
    at = Moments(options(base, tmp_path), made_capture(3), 0.25, [4])
    worth, free = at.worth[..., 0], at.free[:, 0].bool()
    rank = torch.randn(at.worth.shape, generator=torch.Generator().manual_seed(8))
    order = sorted((r, w) for r, w in zip(rank[..., 0][:, :, free].flatten().tolist(), worth[:, :, free].flatten().tolist()))
    lost = sum(w for _, w in order[int(at.wanted[0]):])
    assert at.hard_loss(rank) == pytest.approx(lost / worth.sum().item(), rel=1e-4)


def test_command(script, base, chats, tmp_path):
    """Measures, fits, and goes on where it was stopped, with the same measurements."""
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat. " * 40)
    out, captures = tmp_path / "gates.safetensors", tmp_path / "run" / "captures"
    line = (base, "--text", text, "--chats", chats, "--run", tmp_path / "run", "--gates", out, "--texts", 4, "--length", 64,
            "--window", 8, "--entries", 24, "--recent", 3, "--width", 8, "--every", 2, "--threads", 1)
    failure, said, _ = script(fit_gates, *line, "--max-steps", 2)
    lines = [json.loads(s) for s in said.splitlines()]
    assert failure is None and [x["measured"] for x in lines if "measured" in x] == [1, 2, 3, 4]
    assert lines[3]["minutes_left"] == 0 and set(lines[-1]["lost"]) == {"0.25", "0.125", "0.0625"}
    header = read_header(out)
    assert (header["horizon"], header["sinks"], header["recent"], header["tying"]) == (1, 4, 3, "untied")
    assert header["base"] == base_digests(base)
    first = {f.name: f.read_bytes() for f in captures.iterdir()}
    (captures / "00001.safetensors").unlink()
    failure, said, _ = script(fit_gates, *line, "--max-steps", 4)
    lines = [json.loads(s) for s in said.splitlines() if s.startswith("{")]
    assert failure is None and [x["measured"] for x in lines if "measured" in x] == [2]
    assert [x["step"] for x in lines if "step" in x] == [4]
    assert first == {f.name: f.read_bytes() for f in captures.iterdir()}
