"""The real daemon with the bundled model. KEEPD_BIN names another binary."""
import os
import pathlib
import subprocess
import threading

import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ.update(KEEPD_FIT="never", KEEPD_GATES_CACHE="")  # no test depends on gates that others have left; test_fit_start.py
os.environ["KEEPD_TEST_FIT_STEPS"] = "60"  # most tests need gates, not good ones


class Daemon:
    """One running keepd; extra arguments are its flags."""

    def __init__(self, *flags, binary=None):
        binary = os.path.abspath(binary or os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
        if not pathlib.Path(binary).exists():
            pytest.skip(f"skip: {binary} is not built")
        self.sanitized = b"__asan_init" in pathlib.Path(binary).read_bytes()
        model = () if "--model" in flags else ("--model", str(ROOT / "bundled/keepd-nano"))
        # Threads of one daemon wait for each other after every kernel, for long while other tests have the processors.
        counts = ("--threads", "--data-parallel-size", "--tensor-parallel-size")
        threads = () if set(counts) & set(flags) else ("--threads", "1")
        self.process = subprocess.Popen([binary, *model, "--port", "0", "--served-model-name", "keepd-nano", *threads, *flags],
                                        stdout=subprocess.PIPE, text=True)
        self.url = None
        for line in self.process.stdout:
            if "http://" in line:
                self.url = line[line.index("http://"):].split()[0].rstrip("/,")
                break
        assert self.url, f"keepd did not become ready, exit {self.process.wait()}"
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def chat(self, messages, **fields):
        body = {"model": "keepd-nano", "messages": messages, "temperature": 0, **fields}
        r = requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=300)
        assert r.status_code == 200, r.text
        return r.json()

    def kv(self):
        return requests.get(f"{self.url}/kv", timeout=10).json()

    def metric(self, name):
        for line in requests.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line.startswith(name) and line[len(name)] in "{ ":
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def rss(self):
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        raise KeyError("VmRSS")

    def stop(self):
        self.process.terminate()
        return self.process.wait(timeout=60)


def start_on(daemon, path, *flags):
    """Starts a daemon on an instruction path of the CPU; skips the test where the machine lacks it."""
    try:
        return daemon("--cpu-path", path, *flags)
    except AssertionError:
        if path in ("reference", "portable", "auto"):
            raise
        pytest.skip(f"this machine has not {path}")


def fetched_model(name):
    """The path of a real model; skips the test where it was not fetched."""
    found = subprocess.run([ROOT / "tools/fetch-model", "--find", name], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"skip: {name} was not fetched (tools/fetch-model {name})")
    return pathlib.Path(found.stdout.strip())


def starter(started):
    def start(*flags, **options):
        started.append(Daemon(*flags, **options))
        return started[-1]

    return start


@pytest.fixture
def daemon():
    """daemon("--kv-budget", "256") starts one; all are stopped, and must exit cleanly."""
    started = []
    yield starter(started)
    for d in started:
        assert d.stop() == 0


@pytest.fixture
def killed():
    """Like `daemon`, for daemons that a test kills."""
    started = []
    yield starter(started)
    for d in started:
        d.process.kill()
        d.process.wait()
