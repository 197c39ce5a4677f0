"""A model with recurrent states that evicts, beside transformers: the layers with attention see the entries that are kept, those
without see every token. `streaming` keeps the same positions in every head, so that a mask says which."""

import sys

import pytest
import torch
import transformers

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/python"))
from test_golden import MODELS, PATHS, has_path, run  # noqa: E402

EVICTING = ("--prompt", "100", "--policy", "streaming", "--budget", "24", "--buffer", "8", "--chunk", "32", "--sinks", "2", "--recent", "0")


def visible(evictions, count):
    """[token, position]: the entries that a token's query sees."""
    mask, held, after = torch.zeros(count, count, dtype=torch.bool), set(), {e["tokens"]: e["after"] for e in evictions}
    for t in range(count):
        if t in after:
            each = after[t]["lengths"][0]
            held = set(after[t]["positions"][:each])
            assert after[t]["positions"] == after[t]["positions"][:each] * len(after[t]["lengths"])
        held.add(t)
        mask[t, sorted(held)] = True
    return mask


@pytest.mark.parametrize("path", PATHS)
def test_lfm2_with_evictions_as_transformers(path, monkeypatch):
    if not has_path(path):
        pytest.skip(f"no path {path}")
    tokens = [(37 * i + 11) % 500 for i in range(150)]
    found = run(MODELS / "lfm2", tokens, "--path", path, "--exact", "yes", "--rows", "all", "--kv-dtype", "f32", *EVICTING)
    assert len(found["evictions"]) > 5
    model = transformers.Lfm2ForCausalLM.from_pretrained(MODELS / "lfm2", dtype=torch.float32, attn_implementation="eager").eval()
    mask = torch.where(visible(found["evictions"], len(tokens)), 0.0, torch.finfo(torch.float32).min)[None, None]
    monkeypatch.setattr("transformers.models.lfm2.modeling_lfm2.create_causal_mask", lambda *_, **__: mask)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (torch.tensor(found["logprobs"]) - logits.log_softmax(-1)).abs().max() < 2e-5
