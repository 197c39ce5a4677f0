"""A model with recurrent states, or with layers of two kinds, that evicts, beside transformers: the layers with attention see the entries that are kept,
those without see every token. `streaming` keeps the same positions in every head of a kind, so that a mask says which."""

import importlib
import sys

import pytest
import torch
import transformers

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/python"))
from test_golden import MODELS, PATHS, has_path, run  # noqa: E402

EVICTING = ("--prompt", "100", "--policy", "streaming", "--budget", "24", "--buffer", "8", "--chunk", "32", "--sinks", "2", "--recent", "0")


def visible(evictions, count, first=0, streams=None, window=None):
    """[token, position]: the entries that a token's query sees in layers whose streams are `streams` from `first` on, all where it is None."""
    mask, held, after = torch.zeros(count, count, dtype=torch.bool), set(), {e["tokens"]: e["after"] for e in evictions}
    for t in range(count):
        if t in after:
            lengths, positions = after[t]["lengths"], after[t]["positions"]
            last = len(lengths) if streams is None else first + streams
            begin, end, each = sum(lengths[:first]), sum(lengths[:last]), lengths[first]
            held = set(positions[begin:begin + each])
            assert positions[begin:end] == positions[begin:begin + each] * (last - first)
        held.add(t)
        mask[t, [p for p in sorted(held) if window is None or p > t - window]] = True
    return mask


# The model's class and its module's name.
MODELS_OF = {"lfm2": ("Lfm2ForCausalLM", "lfm2"), "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
             "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"), "qwen35": ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
             "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"), "granitehybriddense": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
             "nemotronh": ("NemotronHForCausalLM", "nemotron_h"), "nemotronhmoe": ("NemotronHForCausalLM", "nemotron_h"),
             "nemotronhlatent": ("NemotronHForCausalLM", "nemotron_h"),
             "falconh1": ("FalconH1ForCausalLM", "falcon_h1"), "falconh1norm": ("FalconH1ForCausalLM", "falcon_h1"),
             "gemma4": ("Gemma4ForConditionalGeneration", "gemma4"), "gemma4dense": ("Gemma4ForCausalLM", "gemma4"), "gemma4moe": ("Gemma4ForCausalLM", "gemma4"),
             "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")}


# The first stream of a layer with a window and of one without, and how many streams such a layer has.
KINDS = {"gemma4": ((0, 1), (1, 1)), "gemma4dense": ((0, 8), (8, 4)), "gemma4moe": ((0, 8), (8, 4))}
WINDOW = 40


@pytest.mark.parametrize("family", MODELS_OF)
def test_evictions_as_transformers(family, monkeypatch):
    """Gated delta rules amplify roundings: of tokens that few others resemble, transformers itself is 1e-4 from its results in float64. So the
    bar is its own distance from these, token by token for the rule, beside 2e-5; and for Gemma 4, whose small norms amplify them, too, twice that."""
    kind, name = MODELS_OF[family]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    tokens = [(37 * i + 11) % 500 for i in range(150)]
    models = [getattr(transformers, kind).from_pretrained(MODELS / family, dtype=t, attn_implementation="eager", experts_implementation="eager").eval()
              for t in (torch.float64, torch.float32)]
    chunks = getattr(module, "torch_chunk_gated_delta_rule", None)
    for path in filter(has_path, PATHS):
        found = run(MODELS / family, tokens, "--path", path, "--exact", "yes", "--rows", "all", "--kv-dtype", "f32", *EVICTING)
        assert len(found["evictions"]) > 5
        sliding, full = KINDS.get(family, ((0, None), (0, None)))
        seen = visible(found["evictions"], len(tokens), *full), visible(found["evictions"], len(tokens), *sliding, WINDOW)
        assert family not in KINDS or not torch.equal(*seen)
        mask, near = (torch.where(s, 0.0, -1e30)[None, None] for s in seen)
        results = []
        for model, one_by_one in zip(models, (True, False)):
            monkeypatch.setattr(module, "create_causal_mask", lambda *_, **__: mask.to(model.dtype))
            if family in KINDS:
                monkeypatch.setattr(module, "create_sliding_window_causal_mask", lambda *_, **__: near.to(model.dtype))
                monkeypatch.setattr(module, "create_masks_for_generate",
                                    lambda *_, **__: {"full_attention": mask.to(model.dtype), "sliding_attention": near.to(model.dtype)})
            if chunks:
                monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule if one_by_one else chunks)
            with torch.no_grad():
                results.append(model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1).double())
        exact, theirs = results
        off, bar = (float((x - exact).abs().max()) for x in (torch.tensor(found["logprobs"]), theirs))
        print(family, path, off, "transformers in float32:", bar)
        assert off < 2e-5 + bar * (2 if family in KINDS else 1 if chunks else 0)
