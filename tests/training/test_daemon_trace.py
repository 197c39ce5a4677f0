"""A trace of the real daemon, as a mask, gives the log-probabilities the daemon computed."""

import json
import urllib.request

import pytest
import torch

import distill
from conftest import BINARY, ROOT, serve
from eviction_trace import parse_record
from gates import GatedModel, read_header, simulate

MODEL = ROOT / "bundled/keepd-nano"
needs_daemon = pytest.mark.skipif(not BINARY.exists() or not (MODEL / "model.safetensors").exists(),
                                  reason=f"{BINARY} is not built")


@pytest.fixture(scope="module")
def url():
    with serve(MODEL, "--threads", "1", "--kv-dtype", "f32") as url:
        yield url


def ask(url, body):
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))


@needs_daemon
@pytest.mark.parametrize("policy", ["global", "streaming"])
def test_the_mask_gives_the_daemons_log_probabilities(url, policy):
    messages = [{"role": "user", "content": "The code of the garage is 4815."}, {"role": "assistant", "content": "Noted."},
                {"role": "user", "content": "The old river crosses the forest. " * 12 + "What is the code of the garage?"}]
    body = {"model": "keepd-nano", "messages": messages, "max_tokens": 40, "ignore_eos": True, "temperature": 0,
            "logprobs": True, "return_token_ids": True,
            "kv": {"policy": policy, "budget": 24, "buffer": 8, "chunk": 32, "reuse": False, "report": "trace"}}
    answer = ask(url, body)
    choice, trace = answer["choices"][0], answer["usage"]["kv_details"]["trace"]
    model = distill.SparseModel(MODEL)
    c = model.model.config
    record = parse_record(json.dumps({"prompt_ids": answer["prompt_token_ids"], "completion_ids": choice["token_ids"],
                                      "trace": trace}), c.num_hidden_layers, c.num_key_value_heads, c.vocab_size)
    ids = torch.tensor([record.ids[:-1]])
    at = torch.arange(record.prompt - 1, len(record.ids) - 1), torch.tensor(record.ids[record.prompt:])
    with torch.no_grad():
        held = model.logits(model.hidden(ids, record.until[..., :-1]))[0].log_softmax(-1)[at]
        full = model.logits(model.hidden(ids))[0].log_softmax(-1)[at]
    said = torch.tensor([t["logprob"] for t in choice["logprobs"]["content"]])
    assert len(trace) > 3 and len(said) == 40
    assert (held - said).abs().max() < 1e-3
    assert (full - said).abs().max() > 0.1, "the evictions mattered"


@needs_daemon
@pytest.mark.parametrize("policy, budget", [("global", 40), ("global", 18), ("trimkv", 40), ("streaming", 40)])
def test_the_simulated_cache_keeps_what_the_daemon_keeps(url, policy, budget):
    """`--evaluate` judges gates by the policies as they are served."""
    text = "The code of the garage is 4815. My cat is called Otto. " + "The old river crosses the forest. " * 12
    answer = ask(url, {"model": "keepd-nano", "messages": [{"role": "user", "content": text}], "max_tokens": 1,
                       "return_token_ids": True, "kv": {"policy": policy, "budget": budget, "buffer": 0, "chunk": 32,
                                                        "reuse": False, "report": "positions"}})
    ids = torch.tensor([answer["prompt_token_ids"]])
    header = read_header(MODEL / "gates.safetensors")
    gated = GatedModel(MODEL, **{k: header[k] for k in ("type", "width", "tying")})
    gated.bank.load(MODEL / "gates.safetensors")
    _, alive = simulate(gated, ids, policy, budget, 32)
    kept = torch.zeros_like(alive[0])
    for layer, heads in enumerate(answer["usage"]["kv_details"]["positions"]):
        for head, positions in enumerate(heads):
            kept[layer, head, [p for p in positions if p < ids.shape[1]]] = True
    assert kept.sum() == alive.sum() == alive[0, ..., 0].numel() * budget
    assert (kept != alive[0]).sum() <= 4, "float32 may see another order at the cut"
