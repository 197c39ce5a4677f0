"""The first messages that a new user sees: names that other servers use, models that are not there, ports in use, an open address,
and where the defaults of requests come from."""
import os
import shutil
import socket
import subprocess

import pytest
from conftest import BINARY, FAKE, LENGTH, ROOT, chat_body

NANO = str(ROOT / "bundled/keepd-nano")


def run(*words, env=None, cwd=None):
    if BINARY is None or not BINARY.exists():
        pytest.skip(f"skip: {BINARY or 'keepd-fake'} is not built")
    return subprocess.run([BINARY, *words], capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}, cwd=cwd)


def refused(*words, status=78, **options):
    r = run(*words, **options)
    assert r.returncode == status and not r.stdout, r
    assert len(r.stderr.splitlines()) == 1, r.stderr
    return r.stderr


# --- the model ---

@pytest.mark.parametrize("words", [["NANO"], ["serve", "NANO"], ["-m", "NANO"], ["--model-path", "NANO"], ["--port", "0", "NANO"]])
def test_a_model_by_any_habit(words):
    r = run(*(NANO if w == "NANO" else w for w in words), "--check-config")
    assert r.returncode == 0 and f"model = {NANO}\n" in r.stdout, r.stderr


@pytest.mark.parametrize("name, id", [
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("hf.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ("https://huggingface.co/Qwen/Qwen3-0.6B-GGUF/resolve/main/a.gguf", "Qwen/Qwen3-0.6B-GGUF:a.gguf"),
    ("http://hf.co/Qwen/Qwen3-0.6B?not-for-all-audiences=true", "Qwen/Qwen3-0.6B"),
    ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B-GGUF:Q8_0")])
def test_the_id_of_a_hub_gets_the_command_that_fetches_it(tmp_path, name, id):
    for words in ([name], ["--model", name]):
        assert f"for the model of the Hugging Face Hub: keepd hf:{id}, or fetch it first with keepd pull {id}\n" in refused(*words, cwd=tmp_path)


def test_other_models_that_are_not_there(tmp_path):
    (tmp_path / "models").mkdir()
    for path in ("models/nano", "/no/such/model", "nano", "../x/y"):
        text = refused(path, cwd=tmp_path)
        assert f"model: {path}: No such file or directory; a model is a directory or a GGUF file" in text and "Hub" not in text
    assert "the shell replaces ~ only" in refused("~/models/nano", cwd=tmp_path)
    assert "https://example.org/x.gguf is a URL" in (text := refused("https://example.org/x.gguf", cwd=tmp_path)) and "curl -fLO" in text


@pytest.mark.skipif(FAKE, reason="needs a model")
def test_gates_of_another_model():
    r = run(NANO, "--gates", str(ROOT / "bundled/smollm2/gates.safetensors"), "--port", "0")
    text = r.stderr.splitlines()[-1]
    assert r.returncode == 78 and "the gates were made for another model, or are damaged" in text and "6 layers with 4 KV heads and width 256" in text


@pytest.mark.skipif(FAKE, reason="needs a model")
def test_gates_that_cannot_be_used_say_what_to_do(tmp_path):
    model = tmp_path / "m"
    shutil.copytree(NANO, model)
    gates = model / "gates.safetensors"
    whole = gates.read_bytes()
    last = lambda *words: run(str(model), *words, "--check-config").stderr.splitlines()[-1]
    for data in ((ROOT / "bundled/smollm2/gates.safetensors").read_bytes(), whole[:-100], whole[:100]):
        gates.write_bytes(data)
        assert last().startswith(f"keepd: gates: {gates}: ") and last().endswith("; --gates FILE names others, --gates '' uses none")
        assert last("--gates", str(gates)).endswith("; name this model's gates, or leave --gates out")
    none = run(str(model), "--gates", "", "--check-config")
    assert none.returncode == 0 and "Without it, --kv-budget N bounds the cache" in none.stderr
    bounded = run(str(model), "--gates", "", "--kv-budget", "64", "--check-config")
    assert "--gates '' uses no retention gates for policy global" in bounded.stderr
    assert f"gates-cache: {gates} is no folder; name one" in last("--gates", "", "--gates-cache", str(gates))


@pytest.mark.skipif(FAKE, reason="needs a model")
def test_one_file_of_a_model():
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"model: {NANO}/{name} is one file of a model: name its directory, {NANO}\n" in refused(f"{NANO}/{name}")


# --- options of others ---

def test_what_changes_nothing_is_logged(start):
    d = start("-ngl", "99", "--jinja", env={"KEEPD_KV_BUGDET": "64"})
    for text in ("command line: -ngl changes nothing here: the whole model is always on one device", "--jinja changes nothing here",
                 "environment: KEEPD_KV_BUGDET is no option of keepd and is ignored; did you mean KEEPD_KV_BUDGET?"):
        d.wait(text, lambda: text.lower() in "".join(d.errors).lower())


def test_what_keepd_lacks_is_explained():
    assert "--gpu-memory-utilization is not an option of keepd; use --kv-pool-bytes" in refused(NANO, "--gpu-memory-utilization", "0.9")
    assert "'download' is not a command of keepd; use keepd pull" in refused("download", "smollm2")


# --- addresses ---

def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = refused("--port", str(port), NANO, status=1)
    assert f"another program listens on port {port} of 127.0.0.1" in text and "choose another port with --port" in text


def test_an_address_of_another_machine():
    text = refused("--host", "192.0.2.1", NANO, status=1)
    assert "host: 192.0.2.1 is no address of this machine" in text


def test_an_open_address_without_a_key_warns(start, tmp_path):
    def warns(*flags):
        d = start(*flags)
        assert d.stop() == 0
        return "everybody who reaches" in "".join(d.errors)
    assert warns("--host", "0.0.0.0")
    assert not warns("--host", "0.0.0.0", "--api-key", "k")
    assert not warns()
    assert not warns("--host", "::1") if socket.has_ipv6 and has_loopback6() else True


def has_loopback6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


# --- defaults of requests ---

def defaults(d):
    params = d.get("/props").json()["default_generation_settings"]["params"]
    return tuple(round(params[name], 4) for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty"))


def test_sampling_is_the_requests_then_the_options_then_the_models(start, fake):
    """The fake model's files say nothing, so OpenAI's defaults are the last."""
    plain = start()
    assert defaults(plain) == (1, 1, 0, 0, 1)
    plain.wait("the line", lambda: "name no temperature" in "".join(plain.errors))
    d = start("--temperature", "0.2", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.05", "--repeat-penalty", "1.1")
    assert defaults(d) == (0.2, 0.9, 40, 0.05, 1.1)
    body = {"prompt": "x", "n_predict": 1}
    used = d.post("/completion", body).json()["generation_settings"]
    assert round(used["temperature"], 4) == 0.2 and round(used["top_p"], 4) == 0.9 and used["top_k"] == 40
    used = d.post("/completion", {**body, "temperature": 0.7, "top_k": 5}).json()["generation_settings"]
    assert round(used["temperature"], 4) == 0.7 and round(used["top_p"], 4) == 0.9 and used["top_k"] == 5
    response = d.post("/v1/responses", {"input": "x", "max_output_tokens": 1}).json()
    assert round(response["temperature"], 4) == 0.2 and round(response["top_p"], 4) == 0.9
    assert d.stop() == 0 and "name no temperature" not in "".join(d.errors)


def test_a_text_beyond_the_context_is_told_how_it_may_go_on(shared):
    for text, path in (("x" * 2 * LENGTH, "/v1/chat/completions"), ("hi", "/v1/chat/completions")):
        r = shared.post(path, {**chat_body(text), "max_tokens": LENGTH})
        assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"
        message = r.json()["error"]["message"]
        assert "kv.overflow 'shift'" in message and "--kv-overflow" in message, message
    full = shared.post("/v1/chat/completions", {**chat_body("hi"), "max_tokens": LENGTH, "kv": {"policy": "full"}}).json()["error"]["message"]
    assert "kv.policy" in full and "--kv-policy" in full
