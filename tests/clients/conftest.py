"""Popular clients against keepd: a chat with keepd-nano, and a fake engine where the answer must be known or never
come. One file per client. Needs tests/clients/requirements.txt (tools/venv clients)."""
import contextlib
import importlib.util
import ipaddress
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false", OTEL_SDK_DISABLED="true",
                  HF_HUB_OFFLINE="1", HAYSTACK_TELEMETRY_ENABLED="False", NO_PROXY="127.0.0.1")

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEY = "s3cret"
GARAGE = ("My sister Nora lives in Lisbon. The code of the garage is 4815.", "Noted.", "What is the code of the garage?")
WEATHER = {"city": "Lisbon"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon"}}\n</tool_call>'
QUESTION, RAIN, ADVICE = "Shall I take an umbrella to Lisbon?", "It rains in Lisbon.", "Take an umbrella."
SNOW_QUESTION, SNOW = "How is it in Oslo?", "It snows in Oslo."

HERMES = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def load_daemon():
    """Module of the HTTP suite that starts daemons; its name there is conftest, too."""
    spec = importlib.util.spec_from_file_location("http_conftest", ROOT / "tests/http/conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["http_conftest"] = module
    spec.loader.exec_module(module)
    return module


HTTP = load_daemon()
MODEL = HTTP.MODEL


@pytest.fixture(scope="session", autouse=True)
def offline():
    """No client calls home: other names and addresses are refused, and noted."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo
    calls = []

    def check(host):
        name = host.decode() if isinstance(host, bytes) else host
        if name in (None, "localhost"):
            return
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(name).is_loopback:
                return
        calls.append(name)
        raise OSError(f"{name} is not this machine")

    def checked_connect(sock, address):
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            check(address[0])
        return connect(sock, address)

    def checked_lookup(host, *args, **options):
        check(host)
        return lookup(host, *args, **options)

    socket.socket.connect, socket.getaddrinfo = checked_connect, checked_lookup
    yield
    socket.socket.connect, socket.getaddrinfo = connect, lookup
    assert not calls


def find_binary(path):
    """Models are run by the release build, where there is one."""
    release = ROOT / "build/release" / path
    return release if path == "server/keepd" and release.exists() else HTTP.find_built(path)


def run_daemon(*flags, binary, **options):
    daemon = HTTP.Daemon(*flags, binary=find_binary(binary), **options)
    try:
        yield daemon
    finally:
        assert daemon.stop() == 0, "".join(daemon.errors)


@pytest.fixture(scope="session")
def nano():
    """The bundled model; requests need KEY."""
    yield from run_daemon("--api-key", KEY, binary="server/keepd")


@pytest.fixture(scope="session")
def writer():
    """SmolLM2 where it was fetched, else the bundled model: for answers with a schema, which any model can give."""
    found = subprocess.run([ROOT / "tools/fetch-model", "--find", "smollm2"], capture_output=True, text=True)
    flags = [] if found.returncode else ["--model", found.stdout.strip()]
    yield from run_daemon("--api-key", KEY, *flags, binary="server/keepd")


def run_toolbox(tmp_path_factory, *flags):
    model = tmp_path_factory.mktemp("toolbox") / "model"
    shutil.copytree(ROOT / "bundled/keepd-nano", model)
    (model / "chat_template.jinja").write_text(HERMES)
    yield from run_daemon("--api-key", KEY, "--model", str(model), *flags, binary="server/keepd")


@pytest.fixture(scope="session")
def toolbox(tmp_path_factory):
    """The bundled model with a template that knows tools."""
    yield from run_toolbox(tmp_path_factory)


@pytest.fixture(scope="session")
def mistral(tmp_path_factory):
    """The same with calls in Mistral's form."""
    yield from run_toolbox(tmp_path_factory, "--tool-call-parser", "mistral")


@pytest.fixture(scope="session")
def caller():
    """A model that repeats the last user message, so that CALL becomes a call of a tool."""
    yield from run_daemon("--api-key", KEY, binary="server/keepd-fake", env={"KEEPD_FAKE_TOOLS": "hermes"})


def write_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """A model that calls a tool when it is asked one of the questions above, and answers when it has the result."""
    path = tmp_path_factory.mktemp("scripted") / "script.json"
    path.write_text(json.dumps([
        [RAIN, ADVICE], [SNOW, write_call("final_answer", answer=SNOW)],
        [QUESTION, CALL], [SNOW_QUESTION, write_call("get_weather", city="Oslo")],
        ["Answer with code.", "Thought: I ask the tool.\n<code>\nfinal_answer(get_weather(city='Lisbon'))\n</code> and more"],
        ["Ask the forecaster.", write_call("transfer_to_forecaster")]]))
    yield from run_daemon("--api-key", KEY, "--max-model-len", "100000", binary="server/keepd-fake",
                          env={"KEEPD_FAKE_TOOLS": "hermes", "KEEPD_FAKE_SCRIPT": str(path)})


@pytest.fixture
def full():
    """A queue that stays full; `full.rejected()` counts the attempts of clients."""
    for daemon in run_daemon("--max-num-seqs", "1", "--max-queue", "1", "--drain-seconds", "0",
                             binary="server/keepd-fake", env={"KEEPD_FAKE_STEP_US": "20000"}):
        with contextlib.ExitStack() as stack:
            for field in ("running_count", "waiting_count"):
                sock = stack.enter_context(daemon.socket())
                sock.sendall(HTTP.request_bytes("/v1/chat/completions", HTTP.chat_body(max_tokens=900, ignore_eos=True)))
                daemon.wait(field, lambda field=field: daemon.kv()[field] == 1)
            daemon.rejected = lambda: daemon.metrics()["keepd_requests_rejected_total", ("reason", "queue_full")]
            yield daemon


@pytest.fixture
def silent():
    """A server whose answers never come."""
    yield from run_daemon("--drain-seconds", "0", binary="server/keepd-fake",
                          env={"KEEPD_FAKE_STEP_US": "20000", "KEEPD_FAKE_PREFILL_STEPS": "1000000"})


def wait_aborted(daemon):
    """The server noticed that its client gave up."""
    daemon.wait("the abort", lambda: daemon.finished("abort") >= 1)
    daemon.wait_idle()
