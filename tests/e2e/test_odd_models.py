"""Model directories with something odd in them, and requests whose template meets a limit."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = ROOT / "bundled/keepd-nano"


@pytest.fixture
def copy(tmp_path):
    """keepd-nano in files that a test may replace."""
    shutil.copytree(NANO, tmp_path / "model")
    return tmp_path / "model"


def refuse(model):
    """The exit status and the message of a start that is refused."""
    binary = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
    if not pathlib.Path(binary).exists():
        pytest.skip(f"skip: {binary} is not built")
    done = subprocess.run([binary, "--model", str(model), "--port", "0"], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def post(d, content):
    return requests.post(f"{d.url}/v1/chat/completions", timeout=300,
                         json={"messages": [{"role": "user", "content": content}], "max_tokens": 1})


def test_a_template_that_takes_too_much_memory_compiled(copy):
    """Nobody can serve it: not a fault that another try would mend."""
    (copy / "chat_template.jinja").write_text("{{a}}" * 200_000)
    code, text = refuse(copy)
    assert code == 78 and "chat template: takes more than 64 MiB when compiled" in text


def test_a_limit_that_a_request_meets_in_the_template(copy, daemon):
    (copy / "chat_template.jinja").write_text("{{ '%s%s%s'|format(*([messages[0].content] * 3)) }}")
    d = daemon("--model", str(copy))
    r = post(d, "x" * 8_000_000)
    assert r.status_code == 400 and r.json()["error"]["param"] == "messages", r.text
    assert "a text grows past" in r.json()["error"]["message"]
    assert post(d, "hello").status_code == 200


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
                                  "gates.safetensors"])
def test_a_symbolic_link_that_leads_to_itself_counts_as_absent(copy, daemon, name):
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(name)
    d = daemon("--model", str(copy))
    assert post(d, "hello").status_code == 200


def test_of_keys_that_stand_twice_the_last_counts(copy, daemon):
    for name, first in (("config.json", '"num_hidden_layers": 99, "vocab_size": 7'),
                        ("generation_config.json", '"eos_token_id": 99999999'), ("tokenizer_config.json", '"eos_token": "<none>"')):
        text = (copy / name).read_text()
        (copy / name).write_text(f"{{{first}, {text.lstrip()[1:]}")
        assert json.loads((copy / name).read_text()) == json.loads(text)
    plain, twice = daemon(), daemon("--model", str(copy))
    messages = [{"role": "user", "content": "Who are you?"}]
    assert twice.chat(messages, max_tokens=8)["choices"][0] == plain.chat(messages, max_tokens=8)["choices"][0]


def test_a_chat_beyond_the_context_is_refused_before_its_tokens_are_made(daemon):
    """The number of its tokens is therefore not known."""
    r = post(daemon("--max-model-len", "1024"), "a b " * 300_000)
    error = r.json()["error"]
    assert r.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "your messages resulted in more than 1024 tokens" in error["message"]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 98765432\n"


def cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[:int(len(data) * share)])


@pytest.mark.parametrize("name, content, said", [
    ("model.safetensors", POINTER, "a Git LFS pointer to a file of 98.8 MB, not safetensors: run 'git lfs pull'"),
    ("tokenizer.json", POINTER, "a Git LFS pointer"),
    ("config.json", "<!DOCTYPE html><html><body>Sign in</body></html>", "a web page, not JSON"),
    ("model.safetensors", "", "is empty"),
    ("tokenizer_config.json", "", "is empty"),
])
def test_files_that_were_not_downloaded(copy, name, content, said):
    (copy / name).write_text(content)
    code, text = refuse(copy)
    assert code == 78 and name in text and said in text, text


@pytest.mark.parametrize("share", [0.2, 0.95])
def test_a_download_that_is_incomplete(copy, share):
    cut(copy / "model.safetensors", share)
    code, text = refuse(copy)
    assert code == 78 and "the file is incomplete: " in text and " MB; download it again" in text, text


@pytest.mark.parametrize("name, content, said", [
    ("paper.gguf", b"%PDF-1.7\n", "a PDF document, not a GGUF file"),
    ("page.gguf", b"\n<html>", "a web page, not a GGUF file"),
    ("pointer.gguf", POINTER.encode(), "a Git LFS pointer to a file of 98.8 MB"),
    ("pytorch_model.bin", b"PK\3\4" + bytes(100), "a zip archive, as PyTorch's checkpoints"),
    ("empty.gguf", b"", "is empty"),
    ("text", b"Repository not found", 'a text that begins with "Repository not found"'),
    ("short.gguf", b"GGUF\3\0\0\0", "the file is incomplete: it ends here"),
])
def test_files_that_are_no_model(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    code, text = refuse(tmp_path / name)
    assert code == 78 and name in text and said in text, text


def test_folders_that_are_no_model(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    code, text = refuse(copy)
    assert code == 78 and "holds config.json and no weights" in text, text
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.gguf").write_bytes(b"GGUF")
    code, text = refuse(tmp_path / "one")
    assert code == 78 and f"holds a GGUF file: name it, {tmp_path}/one/a.gguf" in text, text


def test_json_with_a_byte_order_mark(copy, daemon):
    for path in copy.glob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert post(daemon("--model", str(copy)), "hello").status_code == 200


def test_a_chat_fine_tune_that_keeps_the_ends_of_its_base(copy, daemon):
    """config.json and generation_config.json name another token than the one that ends a turn."""
    plain = daemon()
    messages = [{"role": "user", "content": "Who are you?"}]
    expected = plain.chat(messages, max_tokens=200)["choices"][0]
    assert expected["finish_reason"] == "stop"
    for name in ("config.json", "generation_config.json"):
        file = copy / name
        if file.exists():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 5}))
    assert daemon("--model", str(copy)).chat(messages, max_tokens=200)["choices"][0] == expected
