"""keepd fit with a small model of every family, and a budget with the gates of those whose attention is of another kind."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
MODELS = ROOT / "tests/data/models"
NANO = ROOT / "bundled/keepd-nano"
FAMILIES = sorted(path.name for path in MODELS.iterdir() if path.name != "keepd-nano")  # the folder keepd-nano has answers alone
# Latent attention, layers that differ or read others' entries, gates on the output, a state beside attention or between layers of it.
KINDS = ["deepseekv2", "mistral4", "gemma4", "gemma4dense", "museglimmer", "qwen35", "falconh1", "nemotronh"]
RANKS = {"gemma4dense", "museglimmer", "qwen35", "falconh1", "nemotronh"}
SHORT = ("--max-model-len", "256")  # short texts are measured sooner
QUESTION = [{"role": "user", "content": "Where is the red box, and who put it there? " * 4}]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Six pieces of 256 tokens, which are bytes."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes((ROOT / "docs/SCALING.md").read_bytes()[:1500].decode(errors="ignore").encode())
    return path


def with_tokenizer(family, folder):
    """The model with a tokenizer of single bytes: keepd-nano's, without what its merges make."""
    for path in (MODELS / family).iterdir():
        shutil.copy(path, folder)
    tokenizer = json.loads((NANO / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"].update(vocab={token: i for token, i in vocab.items() if i < 259}, merges=[])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, folder)
    return folder


def fit(model, text, out, *flags):
    run = subprocess.run([BINARY, "fit", model, "--text", text, "--out", out, *SHORT, *flags], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in KINDS])
def test_every_other_family_is_fitted(family, text, tmp_path):
    model = with_tokenizer(family, tmp_path)
    fit(model, text, tmp_path / "gates.safetensors", "--threads", "1")
    check = subprocess.run([BINARY, "--model", model, "--kv-budget", "64", "--check-config", *SHORT], capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("family", KINDS)
def test_a_budget_with_the_gates(family, text, tmp_path, daemon):
    """The same bits for any number of threads and ranks; `global` is chosen, because the gates lie beside the model, and evicts."""
    model = with_tokenizer(family, tmp_path)
    flags = [("--threads", "1"), ("--threads", "4")] + [("--tensor-parallel-size", "2")] * (family in RANKS)
    for i, more in enumerate(flags):
        fit(model, text, tmp_path / f"{i}.safetensors", *more)
    files = [(tmp_path / f"{i}.safetensors").read_bytes() for i in range(len(flags))]
    assert all(file == files[0] for file in files)
    (tmp_path / "0.safetensors").rename(tmp_path / "gates.safetensors")
    d = daemon("--model", str(model), "--kv-budget", "64", "--kv-buffer", "16", "--kv-chunk", "32", "--max-model-len", "512")
    answer = d.chat(QUESTION, max_tokens=24, ignore_eos=True, kv={"report": "trace"})
    details = answer["usage"]["kv_details"]
    assert details["policy"] == "global" and details["evicted_entries"] > 0 and answer["usage"]["completion_tokens"] == 24
    streams = [held for layer in details["lengths"] for held in layer]
    assert sum(streams) == details["kept_entries"] and details["kept_entries"] <= len(streams) * (64 + 16 + 32)
    again = d.chat(QUESTION, max_tokens=24, ignore_eos=True, kv={"policy": "streaming", "budget": 64, "buffer": 16, "chunk": 32, "report": "trace"})
    assert again["usage"]["kv_details"]["positions"] != details["positions"]  # the gates have chosen
