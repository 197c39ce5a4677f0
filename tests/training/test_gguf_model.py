"""Log-probabilities of SmolLM2 from its GGUF file, beside transformers, which dequantises the same file by itself.

Skipped where the file was not fetched (tools/fetch-model smollm2). tests/e2e/test_smollm2.py compares the same texts with a
forward pass of our own, without torch."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import BINARY, ROOT, serve

sys.path.insert(0, str(ROOT / "tests/e2e"))
from smollm2 import TEXTS  # noqa: E402


@pytest.fixture(scope="module")
def file():
    found = subprocess.run([ROOT / "tools/fetch-model", "--find", "smollm2"], capture_output=True, text=True)
    if found.returncode or not BINARY.exists():
        pytest.skip("skip: smollm2 was not fetched (tools/fetch-model smollm2), or keepd is not built")
    return Path(found.stdout.strip())


@pytest.fixture(scope="module")
def reference(file):
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def url(file):
    with serve(file, "--kv-dtype", "f32", "--cpu-activations", "f32") as url:
        yield url


def ask(url, path, **body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))


def test_log_probabilities_of_texts_are_those_of_transformers(url, reference):
    differences = []
    for text in TEXTS:
        ids = ask(url, "/tokenize", prompt=text)["tokens"]
        found = ask(url, "/v1/completions", prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0)
        said = torch.tensor(found["choices"][0]["logprobs"]["token_logprobs"][1:])
        with torch.no_grad():
            rows = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        differences += (said - expected).abs().tolist()
    print(f"smollm2: {len(TEXTS)} texts, {len(differences)} tokens, log-probability off by at most {max(differences):.1e}")
    assert len(differences) > 400 and max(differences) <= 2e-4
