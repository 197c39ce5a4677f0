"""Coding agents as they ship, each in a home of its own, against a fake engine with a scripted model; the settings are
those of docs/AGENTS.md. Needs tests/agents/requirements.txt (tools/venv agents)."""
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/AGENTS.md").read_text()
SECONDS = 180  # for one run of an agent; it needs three
MODEL = "coder"


def block(kind):
    """A block of the page that a comment marks."""
    found = re.search(rf"<!-- test: {kind} -->\n```\w+\n(.*?)```", PAGE, re.S)
    assert found, f"docs/AGENTS.md has no block marked 'test: {kind}'"
    return found.group(1)


def load_daemon():
    """Module of the HTTP suite that starts daemons; its name there is conftest, too."""
    spec = importlib.util.spec_from_file_location("http_conftest", ROOT / "tests/http/conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["http_conftest"] = module
    spec.loader.exec_module(module)
    return module


HTTP = load_daemon()


def call(name, **arguments):
    """A call of a tool as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def bare_call(name, **arguments):
    """A call without tags, as Qwen2.5-Coder writes it."""
    return f"\n```json\n{json.dumps({'name': name, 'arguments': arguments})}\n```"


def gemma_call(name, **arguments):
    """A call as Gemma 4 writes it, with texts alone."""
    quote = '<|"|>'
    texts = ",".join(f"{key}:{quote}{text}{quote}" for key, text in sorted(arguments.items()))
    return f"<|tool_call>call:{name}{{{texts}}}<tool_call|>"


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TEMPLATES = ROOT / "tests/data/jinja"
# Chat templates of models, and how these write calls. Qwen2.5-Coder has the template of Qwen2.5.
MODELS = {"hermes": (None, call),
          "SmolLM2": (SMOLLM2, call),
          "Gemma 2": ((TEMPLATES / "no_system.jinja").read_text(), call),
          "Gemma 4": ((TEMPLATES / "templates/google-gemma-4-31B-it.jinja").read_text(), gemma_call),
          "Qwen2.5-Coder": ((TEMPLATES / "templates/Qwen-Qwen2.5-7B-Instruct.jinja").read_text(), bare_call)}


def serve_flags():
    """The options of the page, without its model, port and policy: the fake engine has few policies."""
    words = shlex.split(block("serve").replace("\\\n", " "))
    flags = dict(zip(words[1::2], words[2::2]))
    context = ("--max-model-len", "131072")  # as in the page's blocks for agents
    return [word for name in ("--served-model-name", "--kv-budget") for word in (name, flags[name])] + [*context]


@pytest.fixture
def keepd(request, tmp_path):
    """keepd(script, *names): a daemon whose model answers by the script's first text that the prompt contains. The parameter is one of
    MODELS, whose chat template renders the prompts; keepd.call writes its calls."""
    template, write = MODELS[getattr(request, "param", "hermes")]
    flags = serve_flags()
    if template:
        (tmp_path / "template.jinja").write_text(template)
        flags[-1] = "400000"  # a token is a byte, and published templates show the agents' tools
        flags += ["--chat-template", str(tmp_path / "template.jinja")]
    with contextlib.ExitStack() as stack:
        def run(script, *names):
            path = tmp_path / "script.json"
            path.write_text(json.dumps(script))
            flags[1] = ",".join([MODEL, *names])
            env = {"KEEPD_FAKE_SCRIPT": str(path), **({} if template else {"KEEPD_FAKE_TOOLS": "hermes"})}
            daemon = HTTP.Daemon(*flags, binary=HTTP.BINARY, env=env)
            stack.callback(stop, daemon)
            return daemon
        run.call = write
        yield run


def stop(daemon):
    assert daemon.stop() == 0, "".join(daemon.errors)


# --- the world outside ---

class Outside(threading.Thread):
    """A proxy that notes whom a program wants to reach beside this machine, and refuses."""

    def __init__(self):
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.wanted = []
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    self.wanted.append(connection.recv(4096).split(b"\r\n")[0].decode("latin-1"))
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def variables(self):
        names = ("http_proxy", "https_proxy", "all_proxy")
        return {**{n: self.url for n in names}, **{n.upper(): self.url for n in names},
                "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}


@pytest.fixture
def outside():
    proxy = Outside()
    yield proxy
    proxy.socket.close()
    assert not proxy.wanted


def can_trace():
    strace = shutil.which("strace")
    return bool(strace) and subprocess.run([strace, "-f", "true"], capture_output=True).returncode == 0


def check_trace(path):
    """Every connection was to this machine: no name was looked up elsewhere, either."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if re.search(r"\b(connect|sendto|sendmsg)\(", line)]
    remote = [line for line in lines if (found := re.search(r'inet_(?:addr|pton)\((?:AF_INET6, )?"([^"]+)"', line))
              and not re.match(r"127\.|::1$|::ffff:127\.", found.group(1))]
    assert not remote, remote[:5]


# --- runs ---

@dataclasses.dataclass
class Agent:
    """An isolated home, an empty project, and programs run there."""
    home: pathlib.Path
    project: pathlib.Path
    outside: Outside

    def run(self, script):
        """Runs a shell script and returns its output. Its processes end with it or after SECONDS."""
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TERM": "dumb", "LANG": "C.UTF-8", **self.outside.variables()}
        trace = self.home / "trace"
        command = ["bash", "-euc", script]
        if can_trace():
            command = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(trace), *command]
        process = subprocess.Popen(command, cwd=self.project, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{out[-3000:]}\n{err[-3000:]}"
        if trace.exists():
            check_trace(trace)
        return out


@pytest.fixture
def agent(tmp_path, outside):
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    return Agent(home, project, outside)


def program(package, *path):
    """A program in an installed wheel."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"skip: {package} is not installed")
    program = pathlib.Path(found.origin).parent.joinpath(*path)
    if not program.exists():
        pytest.skip(f"skip: {package} has no {'/'.join(path)} for this machine")
    return program
