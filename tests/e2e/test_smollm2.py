"""A real model from its GGUF file (tools/fetch-model smollm2; skipped where it was not fetched)."""
import json
import pathlib
import re
import subprocess
import sys

import pytest
import requests
from conftest import ROOT, fetched_model

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from smollm2 import TEXTS, SmolLM2  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file():
    return fetched_model("smollm2")


@pytest.fixture(scope="module")
def reference(file):
    return SmolLM2(file)


def post(d, path, **body):
    r = requests.post(f"{d.url}{path}", json=body, timeout=300)
    assert r.status_code == 200, r.text
    return r.json()


def test_chat(daemon, file):
    d = daemon("--model", str(file))
    r = post(d, "/v1/chat/completions", temperature=0, max_tokens=40,
             messages=[{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in r["choices"][0]["message"]["content"]
    assert r["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("activations, bound", [("int8", 0.7), ("bf16", 0.3), ("int16", 1e-2), ("f32", 1e-3)])
def test_likelihoods_are_those_of_the_numbers_in_the_file(daemon, file, reference, activations, bound):
    if activations == "bf16" and "avx512_bf16" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor lacks AVX512_BF16")
    d = daemon("--model", str(file), "--kv-dtype", "f32", "--cpu-activations", activations)
    worst = total = 0
    for text in TEXTS:
        ids = post(d, "/tokenize", prompt=text)["tokens"]
        assert post(d, "/detokenize", tokens=ids)["prompt"] == text
        found = post(d, "/v1/completions", prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
        expected = reference.logprobs(ids)
        scores = found["choices"][0]["logprobs"]["token_logprobs"][1:len(ids)]
        worst = max(worst, *(abs(score - expected[t, ids[t + 1]]) for t, score in enumerate(scores)))
        total += len(scores)
        first, second = sorted(expected[-1])[:-3:-1]
        after = found["choices"][0]["logprobs"]["token_logprobs"][len(ids)]
        assert first - second < 2 * bound or abs(after - first) <= bound, text  # the most likely token follows
    print(f"smollm2, {activations}: {total} tokens, log-probability off by at most {worst:.1e}")
    assert total > 400 and worst <= bound


def test_greedy_answer_is_the_most_likely_one(daemon, file, reference):
    d = daemon("--model", str(file), "--kv-dtype", "f32", "--cpu-activations", "int16")
    ids = post(d, "/tokenize", messages=[{"role": "user", "content": "Name three colours of the rainbow."}],
               add_generation_prompt=True)["tokens"]
    r = post(d, "/v1/completions", prompt=ids, max_tokens=24, temperature=0, logprobs=1, echo=False, return_token_ids=True)
    answer = r["choices"][0]["token_ids"]
    expected = reference.logprobs(ids + answer)
    for t, token in enumerate(answer):
        row = expected[len(ids) - 1 + t]
        assert row.max() - row[token] < 2e-3, (t, token)
    assert len(answer) >= 8


def second_half(d, ids, **kv):
    """Nats per token of the second half of a text."""
    r = post(d, "/v1/completions", prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0, kv=kv)
    scores = r["choices"][0]["logprobs"]["token_logprobs"]
    return -sum(scores[len(ids) // 2:]) / (len(ids) - len(ids) // 2)


def test_gates_of_the_repository_fit_the_file(daemon, file):
    """`make serve MODEL=smollm2` starts with them: they make `global` the default, and keep what matters."""
    gates = subprocess.run([ROOT / "tools/fetch-model", "--gates", "smollm2"], capture_output=True, text=True, check=True)
    d = daemon("--model", str(file), "--gates", gates.stdout.strip())
    r = post(d, "/v1/chat/completions", temperature=0, max_tokens=8, messages=[{"role": "user", "content": "Hello!"}])
    assert r["usage"]["kv_details"]["policy"] == "global"
    ids = post(d, "/tokenize", prompt=(ROOT / "SECURITY.md").read_text())["tokens"][:1024]
    full = second_half(d, ids, policy="full")
    room = dict(budget=96, buffer=32, chunk=32)         # an eighth of the text at most
    lost, newest = (second_half(d, ids, policy=p, **room) - full for p in ("global", "streaming"))
    print(f"nats per token more than the full cache's {full:.3f}: global {lost:.3f}, streaming {newest:.3f}")
    assert lost < 0.6 * newest and newest > 0.05


def about(option, name):
    return subprocess.run([ROOT / "tools/fetch-model", option, name], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_readmes_question_is_answered_with_the_publishers_sampling(daemon, file):
    """As `make serve MODEL=smollm2` serves it, each time with another seed."""
    d = daemon("--model", str(file), "--gates", about("--gates", "smollm2").strip(), *about("--options", "smollm2").split())
    block = re.search(r"<!-- test: curl -->\n```sh\ncurl \S+ -H '[^']*' -d '(.*?)'\n```", (ROOT / "README.md").read_text(), re.S)
    question = json.loads(block.group(1))
    answers = [post(d, "/v1/chat/completions", **question)["choices"][0]["message"]["content"] for _ in range(8)]
    print(f"{len(set(answers))} different answers of 8: {answers[0]!r}")
    assert all("4815" in answer for answer in answers), answers


def test_no_gates_and_options_for_other_models():
    for name in ("bundled/keepd-nano", "/no/such/model"):
        assert about("--gates", name) == about("--options", name) == ""


def test_a_known_model_is_served_under_the_name_that_was_given():
    for name, names in (("smollm2", "SmolLM2-135M-Instruct.Q4_1,smollm2"), ("/no/such/model", "")):
        assert about("--names", name).strip() == names


def test_models_of_benchmarks_are_in_a_list_of_their_own():
    model = {"gemma3-270m": "gemma-3-270m-q4_k_m", "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m",
             "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m"}
    for name, file in model.items():
        run = [ROOT / "tools/fetch-model", "--list", ROOT / "bench/quality/models", "--names", name]
        assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip() == f"{file},{name}"
        assert about("--names", name).strip() == ""         # make serve MODEL=... takes it for a path
