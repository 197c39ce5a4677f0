"""The HTTP surface, on a daemon whose engine is a fake. KEEPD_BIN names another daemon: the tests that
lean on the fake's made-up answers then skip themselves, all others hold for any engine and device. Options reach
every daemon by the environment: KEEPD_DEVICE=cuda with a KEEPD_BIN that has it is the suite on a GPU."""
import asyncio
import collections
import json
import os
import pathlib
import socket
import subprocess
import threading
import time

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "tiny"
LENGTH = 1024


def find_built(path):
    """A program of this path in one of the build directories."""
    for preset in ("dev", "asan", "release"):
        if (found := ROOT / "build" / preset / path).exists():
            return found
    return max((ROOT / "build").glob(f"*/{path}"), default=None)


def named_binary():
    named = os.environ.get("KEEPD_BIN")
    return pathlib.Path(named).resolve() if named else None  # systemd and others need an absolute path


BINARY = named_binary() or find_built("server/keepd-fake")
FAKE = BINARY is not None and BINARY.name == "keepd-fake"


class Daemon:
    """One running keepd. Extra arguments are its flags; `timeouts` are milliseconds by name."""

    def __init__(self, *flags, env=None, binary=BINARY, **timeouts):
        if binary is None or not binary.exists():
            pytest.skip(f"skip: {binary or 'keepd-fake'} is not built")
        env = {**os.environ, **(env or {})}
        env["KEEPD_TEST_TIMEOUTS"] = ",".join(f"{k}={v}" for k, v in timeouts.items())
        model = ROOT / "bundled/keepd-nano"
        self.process = subprocess.Popen(
            [binary, *([] if "--model" in flags else ["--model", model]), "--port", "0",
             "--served-model-name", f"{MODEL},alias", "--max-model-len",
             str(LENGTH), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)
        self.errors = []
        reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        reader.start()
        self.ready_line = self.process.stdout.readline()
        if not self.ready_line.startswith("keepd ready at "):
            code = self.process.wait(timeout=60)
            reader.join(timeout=60)
            pytest.fail(f"no ready line, exit {code}: {''.join(self.errors)}")
        self.url = self.ready_line.split()[3]
        self.port = int(self.url.rsplit(":", 1)[1]) if "://" in self.url else None
        self.http = requests.Session()

    # --- requests ---

    def client(self, **options):
        import openai  # imported here: the GPU machine may lack it, and most tests do not need it

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, **options})

    def get(self, path, **options):
        return self.http.get(self.url + path, timeout=60, **options)

    def post(self, path, body, timeout=60, **options):
        return self.http.post(self.url + path, json=body, timeout=timeout, **options)

    def chat(self, text="hello", **fields):
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def socket(self):
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return sock

    # --- metrics and state ---

    def engines(self):
        """The labels of its replicas."""
        return [str(i) for i in range(self.get("/server_info").json()["data_parallel_size"])]

    def kv(self):
        return requests.get(self.url + "/kv", timeout=60).json()

    def metrics(self):
        """Values by name and labels, added up over replicas."""
        sums = collections.Counter()
        for family in text_string_to_metric_families(requests.get(self.url + "/metrics", timeout=60).text):
            for s in family.samples:
                labels = ((k, v) for k, v in s.labels.items() if k not in ("model_name", "engine"))
                sums[s.name, *sorted(labels)] += s.value
        return dict(sums)

    def finished(self, reason):
        return self.metrics()["vllm:request_success_total", ("finished_reason", reason)]

    def wait(self, what, condition, seconds=30):
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"waited {seconds} s for: {what}"
            time.sleep(0.01)
        return value

    def wait_idle(self):
        """Checks that nothing runs or waits, nothing is reserved, and all used pages are retained."""
        def idle():
            kv = self.kv()
            pool = kv["pool"]
            return (kv["running_count"] == kv["waiting_count"] == pool["pages_reserved"] == 0
                    and pool["pages_used"] == pool["pages_retained"])
        self.wait("the engine to be idle", idle)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=60)


def named_events(answer):
    """The events of a stream whose names are their types."""
    names, data = [], []
    for line in answer.iter_lines():
        if line.startswith(b"event: "):
            names.append(line[7:].decode())
        if line.startswith(b"data: "):
            data.append(json.loads(line[6:]))
    assert names == [e["type"] for e in data]
    return data


def unchunked(answer):
    """The body of an answer in chunks, which is complete."""
    rest, out = answer.split(b"\r\n\r\n", 1)[1], b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        if not int(size, 16):
            return out
        out, rest = out + rest[:int(size, 16)], rest[int(size, 16) + 2:]
    raise AssertionError("the stream broke off")


def chat_body(text="hello", **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16,
            **fields}


def request_bytes(path, body, *headers, method="POST"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
            f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def narrow_socket(daemon):
    """A connection that takes little before it is read."""
    sock = socket.socket()
    sock.settimeout(60)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", daemon.port))
    return sock


def read_until(sock, mark):
    data = b""
    while mark not in data:
        got = sock.recv(65536)
        assert got, f"the connection ended before {mark!r}: {data!r}"
        data += got
    return data


def read_all(sock):
    data = b""
    try:
        while got := sock.recv(65536):
            data += got
    except ConnectionResetError:
        pass
    return data


def events(response):
    """The data of each event of a `requests` response."""
    return [line[6:].decode() for line in response.iter_lines() if line.startswith(b"data: ")]


def run_async(coroutine):
    return asyncio.run(coroutine)


@pytest.fixture(scope="session")
def shared():
    """One daemon for tests that leave it as it was."""
    daemon = Daemon()
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.errors)


@pytest.fixture
def start():
    """start(*flags, env={}, header=500) runs a daemon of its own; all must exit cleanly."""
    daemons = []

    def run(*flags, **options):
        daemons.append(Daemon(*flags, **options))
        return daemons[-1]

    yield run
    for daemon in daemons:
        assert daemon.stop() == 0, "".join(daemon.errors)


def faked(**settings):
    """For fixtures: gives a daemon whose fake engine has these settings (KEEPD_FAKE_TOOLS is TOOLS), and ends it."""
    if not FAKE:
        pytest.skip("needs the fake engine's answers")
    daemon = Daemon(env={f"KEEPD_FAKE_{name}": value for name, value in settings.items()})
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture(scope="module")
def caller():
    """A daemon for calls of tools and for thoughts: the fake turns the bytes 1 and 2 of its answer into the tags."""
    yield from faked(TOOLS="hermes", THINK="1")


@pytest.fixture
def fake():
    if not FAKE:
        pytest.skip("leans on the fake engine's answers")


@pytest.fixture
def slow(start):
    """A daemon with slow answers; only the fake engine can be slowed."""
    if not FAKE:
        pytest.skip("needs the fake engine's slow steps")
    return lambda *flags, step_us=20000, prefill=1, **options: start(
        *flags, env={"KEEPD_FAKE_STEP_US": str(step_us), "KEEPD_FAKE_PREFILL_STEPS": str(prefill)}, **options)


@pytest.fixture
def patient(slow):
    """A daemon that takes 5 ms for a token."""
    return slow(step_us=5000)
