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
