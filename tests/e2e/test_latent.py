"""A model with latent attention behind the daemon: its one stream for each layer in reports, conversations and files."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from answers import cached, tokens
from test_state import next_turn, wait_for_files

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = ROOT / "bundled/keepd-nano"
sys.path.insert(0, str(ROOT / "tests/python"))
latent_model = pytest.importorskip("latent_model")
QUESTION = [{"role": "user", "content": "Where is the red box, and who put it there? " * 4}]
BUDGET = {"budget": 48, "buffer": 8, "chunk": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    latent_model.write(folder, vocab_size=json.loads((NANO / "config.json").read_text())["vocab_size"], eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(NANO / name, folder)
    return folder


def test_reports(model, daemon):
    d = daemon("--model", str(model))
    for policy in ("full", "streaming", "snapkv", "h2o", "rkv"):
        kv = {"policy": policy, "report": "trace", **({} if policy == "full" else BUDGET)}
        details = d.chat(QUESTION, max_tokens=40, ignore_eos=True, kv=kv)["usage"]["kv_details"]
        assert [len(layer) for layer in details["lengths"]] == [1, 1, 1]
        assert [[len(held) for held in layer] for layer in details["positions"]] == details["lengths"]
        assert sum(map(sum, details["lengths"])) == details["kept_entries"]
        assert bool(details["trace"]) == (details["evicted_entries"] > 0) == (policy != "full")


def test_a_conversation_goes_on_and_its_file_too(model, daemon, tmp_path):
    flags = ("--model", str(model), "--max-conversations", "1")  # no room for a checkpoint, which no file has
    kv = {"max_tokens": 16, "logprobs": True, "kv": {"policy": "snapkv", **BUDGET}, "ignore_eos": True}
    d = daemon(*flags, "--state-dir", str(tmp_path / "state"), "--state-idle", "0")
    first = d.chat(QUESTION, **kv)
    wait_for_files(tmp_path / "state", 1)
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    second = next_turn(QUESTION, first, "What is in it?")
    expected = d.chat(second, **kv)
    assert cached(expected) > 0
    again = daemon(*flags, "--state-dir", str(tmp_path / "copy"), "--state-idle", "86400")
    answer = again.chat(second, **kv)
    assert cached(answer) == cached(expected) and tokens(answer) == tokens(expected)


def test_ranks_evict_alike(model, daemon):
    """One, two and four ranks: the same answers and kept positions."""
    answers = []
    for ranks in ("1", "2", "4"):
        d = daemon("--model", str(model), "--tensor-parallel-size", ranks)
        found = []
        for policy in ("full", "streaming", "snapkv", "h2o", "rkv", "expected_attention"):
            kv = {"policy": policy, "report": "trace", **({} if policy == "full" else BUDGET)}
            answer = d.chat(QUESTION, max_tokens=40, logprobs=True, ignore_eos=True, kv=kv)
            details = answer["usage"]["kv_details"]
            choice = answer["choices"][0]
            found.append((choice["message"], choice["logprobs"], details["positions"], details["trace"]))
        answers.append(found)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("flags, why", [
    (("--kv-dtype", "q8"), "q8 and q4 do not hold latent vectors"),
    (("--kv-policy", "d2o", "--kv-budget", "64"), "the model's keys hold its values"),
])
def test_what_is_refused(model, flags, why):
    binary = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
    if not pathlib.Path(binary).exists():
        pytest.skip(f"skip: {binary} is not built")
    done = subprocess.run([binary, str(model), "--port", "0", *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 78 and why in done.stderr, (done.returncode, done.stderr)


def test_a_page_holds_twice_the_entries(model, daemon):
    """Keys of 32 numbers, bf16, which hold the values."""
    pool = daemon("--model", str(model), "--kv-dtype", "bf16").kv()["pool"]
    assert pool["page_slots"] == 8192 // (32 * 2) and pool["page_bytes"] == 8192 + 12 * pool["page_slots"]
