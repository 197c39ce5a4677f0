"""Likelihoods by echo: completions with token-id prompts must give transformers' log-probabilities."""
import json
import pathlib

import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "models" / "keepd-nano" / "golden.json"


def score(d, ids, **fields):
    body = {"model": "keepd-nano", "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, **fields}
    r = requests.post(f"{d.url}/v1/completions", json=body, timeout=120)
    assert r.status_code == 200, r.text
    return r.json()["choices"][0]["logprobs"]


@pytest.mark.parametrize("path,kv_dtype,tolerance", [("reference", "f32", 1e-3), ("auto", "bf16", 5e-2),
                                                     ("auto", "fp8", 0.5)])
def test_prompt_logprobs_match_transformers(daemon, path, kv_dtype, tolerance):
    if not GOLDEN.exists():
        pytest.skip(f"skip: {GOLDEN} is missing")
    d = daemon("--cpu-path", path, "--kv-dtype", kv_dtype, "--kv-policy", "full")
    for case in json.loads(GOLDEN.read_text())["cases"]:
        prompt, greedy = case["prompt"], case["greedy"]
        scores = score(d, prompt, max_tokens=len(greedy), ignore_eos=True)["token_logprobs"]
        assert scores[0] is None
        want = case["prompt_logprobs"] + case["logprobs"]
        # Without near-ties the answer is the same; after a near-tie the contexts may differ, and so may the rest.
        safe = next((i for i, m in enumerate(case["margin"]) if m < 4 * tolerance), len(greedy))
        count = len(prompt) - 1 + safe
        worst = max((abs(a - b) for a, b in zip(scores[1:1 + count], want[:count])), default=0)
        assert worst <= tolerance, f"prompt of {len(prompt)}: {worst}"


def test_echo_never_reuses_a_conversation(daemon):
    d = daemon("--kv-policy", "streaming")
    ids = list(range(5, 60))
    first = score(d, ids)
    requests.post(f"{d.url}/v1/completions", json={"model": "keepd-nano", "prompt": ids[:-5], "max_tokens": 2}, timeout=60)
    assert score(d, ids)["token_logprobs"] == first["token_logprobs"]
