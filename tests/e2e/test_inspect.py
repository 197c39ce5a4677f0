"""keepd --inspect: a model in words, and what a start would reject."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = ROOT / "bundled/keepd-nano"


def inspect(model, *flags):
    binary = os.environ.get("KEEPD_BIN", ROOT / "build/keepd")
    if not pathlib.Path(binary).exists():
        pytest.skip(f"skip: {binary} is not built")
    r = subprocess.run([binary, "--inspect", model, *flags], capture_output=True, text=True, timeout=60)
    lines = dict(line.split(None, 1) for line in r.stdout.replace("stop tokens", "stop").splitlines())
    return r.returncode, lines, r.stdout + r.stderr


def test_a_model_that_is_served():
    code, lines, text = inspect(NANO)
    assert code == 0, text
    assert lines["family"] == "qwen3, a directory"
    assert lines["shape"].startswith("6 layers of width 256, feed-forward 640, 8 query and 4 key/value heads of 64")
    assert lines["attention"] == "norms on q and k"
    assert lines["types"] == "BF16: 68" and "16.00 bits per number" in lines["weights"]
    assert lines["stop"] == '2 "<|im_end|>", 0 "<|endoftext|>"'
    assert lines["gates"] == "trained with a budget of 256" and lines["tools"] == "generic"
    assert lines["cache"] == "policy global, bf16; one conversation takes 6.8 MB at the budget of 1024 entries per head"


def test_the_cache_follows_the_options():
    _, lines, _ = inspect(NANO, "--kv-budget", "512", "--kv-dtype", "f32", "--kv-policy", "streaming")
    assert lines["cache"] == "policy streaming, f32; one conversation takes 6.6 MB at the budget of 512 entries per head"
    _, lines, _ = inspect(NANO, "--gates", "", "--max-model-len", "4096")
    assert lines["gates"] == "none" and "policy full" in lines["cache"] and "with 4096 tokens" in lines["cache"]


@pytest.fixture
def copy(tmp_path):
    return pathlib.Path(shutil.copytree(NANO, tmp_path / "model"))


def test_a_family_that_is_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    config.update(architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox")
    (copy / "config.json").write_text(json.dumps(config))
    code, lines, text = inspect(copy)
    assert code == 78 and "family" not in lines
    assert lines["model"].startswith("refused: architectures: GPTNeoXForCausalLM is not supported")
    assert lines["tokenizer"] == "2048 tokens"  # the rest is described all the same
    assert text.count("GPTNeoX") == 1


def test_files_that_are_refused(copy):
    (copy / "tokenizer.json").write_text("{")
    code, lines, text = inspect(copy)
    assert code == 78 and lines["tokenizer"].startswith("refused: tokenizer.json: ") and "family" in lines
    assert inspect(copy / "absent")[0] == 78


def test_a_model_of_which_only_the_configuration_is_there(tmp_path):
    (tmp_path / "config.json").write_text((NANO / "config.json").read_text())
    code, lines, text = inspect(tmp_path, "--random-weights")
    assert code == 78 and "model" not in lines, text  # a start needs a tokenizer
    assert lines["tokenizer"].startswith("refused: tokenizer.json: ")
    of_files = inspect(NANO)[1]["weights"]  # in bf16, too
    assert lines["weights"].removesuffix(" in bf16") in of_files and " MB in bf16" in lines["weights"]
    # 6 layers, a key and a value, 4 heads of 64 numbers, 2 bytes each
    assert lines["positions"].endswith(f" {6 * 2 * 4 * 64 * 2 / 1000:.1f} KB for each in a cache in bf16")


def test_options_that_are_refused():
    code, lines, text = inspect(NANO, "--kv-policy", "global", "--gates", "")
    assert code == 78 and lines["refused"].startswith("kv-policy: 'global' needs retention gates")
