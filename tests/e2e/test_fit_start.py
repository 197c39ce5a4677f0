"""A budget for a model without gates: the first start fits them, later ones find them. Interrupted, skipped, refused, at once."""
import json
import os
import pathlib
import pty
import select
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
import requests
from test_fit_families import with_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
NANO = ROOT / "bundled/keepd-nano"
STEPS = os.environ["KEEPD_TEST_FIT_STEPS"]
SHORT = ("--max-model-len", "256", "--threads", "1")  # short texts are measured sooner
BOUNDED = ("--kv-budget", "64", "--kv-buffer", "16", "--kv-chunk", "32", *SHORT)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """keepd-nano without its gates."""
    if not pathlib.Path(BINARY).exists():
        pytest.skip(f"skip: {BINARY} is not built")
    folder = tmp_path_factory.mktemp("model")
    for path in NANO.iterdir():
        if path.name != "gates.safetensors":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Four texts of 256 tokens."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text((ROOT / "docs/SCALING.md").read_text()[:2200])
    return folder


@pytest.fixture
def env(texts, tmp_path):
    return environment(texts, tmp_path / "cache")


def environment(texts, cache, **more):
    return {**os.environ, "KEEPD_FIT": "auto", "KEEPD_GATES_CACHE": str(cache), "KEEPD_TEST_CALIBRATION": str(texts), **more}


class Start:
    """A daemon that may take its time; `log` and `out` are its lines so far."""

    def __init__(self, model, *flags, env, **options):
        own = () if "--model" in flags else ("--model", str(model))
        self.process = subprocess.Popen([BINARY, *own, "--port", "0", *flags], env=env, text=True,
                                        stdout=subprocess.PIPE, **{"stderr": subprocess.PIPE, **options})
        self.log, self.out = [], []
        self.threads = [threading.Thread(target=self.collect, args=parts, daemon=True)
                        for parts in ((self.process.stdout, self.out), (self.process.stderr, self.log)) if parts[0]]
        for thread in self.threads:
            thread.start()

    @staticmethod
    def collect(pipe, lines):
        for line in pipe:
            lines.append(line)

    def wait_for(self, text, lines=None):
        lines = self.log if lines is None else lines
        end = time.monotonic() + 240
        while not any(text in line for line in lines):
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < end, "".join(self.log)
            time.sleep(0.02)

    def ready(self):
        self.wait_for("keepd ready at", self.out)
        self.url = self.out[0].split()[3]
        return requests.get(f"{self.url}/server_info", timeout=60).json()

    def end(self):
        """Returns the exit status, when all lines are there."""
        status = self.process.wait(timeout=240)
        for thread in self.threads:
            thread.join()
        return status

    def stop(self):
        self.process.terminate()
        assert self.end() == 0, "".join(self.log)
        return "".join(self.log)


@pytest.fixture
def start(model):
    started = []

    def begin(*flags, env, **options):
        started.append(Start(model, *flags, env=env, **options))
        return started[-1]

    yield begin
    for d in started:
        d.process.kill()
        d.process.wait()


class Manager:
    """Listens as systemd does."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.said = []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while data := self.socket.recv(4096):
            self.said.append(data.decode())


@pytest.fixture(scope="module")
def first(model, texts, tmp_path_factory):
    """The first start of all: the folder of gates, what the daemon said of itself, its log, and what systemd was told."""
    folder = tmp_path_factory.mktemp("first")
    manager = Manager(folder / "notify")
    d = Start(model, *BOUNDED, env=environment(texts, folder / "cache", NOTIFY_SOCKET=str(folder / "notify")))
    try:
        info = d.ready()
        r = requests.post(f"{d.url}/v1/completions", json={"prompt": "Nora has a cat. " * 24, "max_tokens": 4}, timeout=120)
        return folder / "cache", info, d.stop(), manager.said, r.json()
    finally:
        d.process.kill()


def gates_in(cache):
    return sorted(cache.glob("*.safetensors"))


def test_the_first_start_fits_gates_and_serves_bounded(first):
    cache, info, log, _, answer = first
    assert info["gates_from"] == "fitted" and info["has_gates"] and info["kv_policy"] == "global" and info["kv_budget"] == 64
    details = answer["usage"]["kv_details"]
    assert details["policy"] == "global" and details["evicted_entries"] > 0, details
    assert "the model has no retention gates" in log and "--fit never" in log and "s left" in log
    assert f"gates were fitted in" in log and str(gates_in(cache)[0]) in log
    assert [p.name for p in cache.iterdir()] == [gates_in(cache)[0].name]  # no work file, nothing partial


def test_the_service_manager_waits_for_the_fit(first):
    _, _, _, said, _ = first
    fitting = [text for text in said if "STATUS=Fitting retention gates: " in text]
    assert all("EXTEND_TIMEOUT_USEC=900000000" in text for text in fitting)
    assert any("measuring 2 of 4, " in text for text in fitting) and any(f"fitting {STEPS} of {STEPS}" in text for text in fitting)
    assert said.index(fitting[-1]) < said.index(next(text for text in said if "READY=1" in text))


def test_the_second_start_finds_them(first, start, texts):
    cache = first[0]
    before = gates_in(cache)[0].stat()
    d = start(*BOUNDED, env=environment(texts, cache))
    info = d.ready()
    assert info["gates_from"] == "cache" and info["kv_policy"] == "global"
    log = d.stop()
    assert "fit" not in log and str(gates_in(cache)[0]) in log, log
    assert gates_in(cache)[0].stat().st_mtime_ns == before.st_mtime_ns


def test_without_a_budget_the_cache_folder_changes_nothing(first, start, texts):
    d = start(env=environment(texts, first[0]))
    info = d.ready()
    assert info["gates_from"] == "cache" and info["kv_policy"] == "full"
    assert "--kv-budget N bounds it with them" in d.stop()


def test_an_interrupted_fit_goes_on_and_ends_as_one_that_was_not(first, start, env, tmp_path):
    d = start(*BOUNDED, env=env)
    d.wait_for("measuring 2 of 4")
    d.process.send_signal(signal.SIGTERM)
    assert d.end() == 0 and "kept for the next start" in "".join(d.log)
    cache = tmp_path / "cache"
    assert len(list(cache.glob("*.work"))) == 1 and not gates_in(cache)
    d = start(*BOUNDED, "--device", "cpu", env=env)
    assert d.ready()["gates_from"] == "fitted"
    assert " of the texts were measured by a fit that was interrupted" in d.stop()
    assert gates_in(cache)[0].read_bytes() == gates_in(first[0])[0].read_bytes()
    assert len(list(cache.iterdir())) == 1


def test_two_daemons_at_once_fit_once(start, env, tmp_path):
    two = [start(*BOUNDED, env=env) for _ in range(2)]
    infos = [d.ready() for d in two]
    assert sorted(info["gates_from"] for info in infos) == ["cache", "fitted"]
    logs = [d.stop() for d in two]
    assert sorted("waiting for another process" in log for log in logs) == [False, True], logs
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_folder_that_cannot_be_written(start, env, tmp_path):
    for folder in ("tmp", "small"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("")
    small = with_tokenizer("qwen3", tmp_path / "small")  # fitted sooner than keepd-nano
    d = start("--model", str(small), *BOUNDED, "--gates-cache", str(tmp_path / "file/gates"), env={**env, "TMPDIR": str(tmp_path / "tmp")})
    info = d.ready()
    assert info["gates_from"] == "fitted" and info["kv_policy"] == "global"
    assert not list((tmp_path / "tmp").iterdir())
    assert "gates cannot be kept in " in d.stop()


# --- without gates ---

def expect_full(d, *said):
    info = d.ready()
    assert info["gates_from"] == "none" and not info["has_gates"] and info["kv_policy"] == "full"
    log = d.stop()
    for text in (*said, "kv-budget 64 changes nothing"):
        assert text in log, log


def test_never(start, env, tmp_path):
    expect_full(start(*BOUNDED, "--fit", "never", env=env))
    assert not (tmp_path / "cache").exists()


def test_without_a_budget_nothing_is_fitted(start, env, tmp_path):
    d = start(*SHORT, env=env)
    assert d.ready()["kv_policy"] == "full"
    log = d.stop()
    assert "keeps everything (policy full). --kv-budget N bounds it" in log and "keepd fit" in log, log
    assert not (tmp_path / "cache").exists()


def test_a_fit_that_fails(start, env, tmp_path):
    """A budget alone is no reason not to serve; a policy that needs gates is."""
    env["KEEPD_TEST_CALIBRATION"] = str(tmp_path / "nothing")
    expect_full(start(*BOUNDED, env=env), "no gates were fitted: --text: the text that comes with keepd is not installed")
    d = start(*BOUNDED, "--kv-policy", "global", env=env)
    assert d.end() == 78 and "'global' needs retention gates" in "".join(d.log)


def test_a_fit_that_is_killed(start, env, tmp_path):
    """As by a system that is out of memory."""
    d = start(*BOUNDED, env=env)
    d.wait_for("measuring 1 of 4")
    os.kill(int(pathlib.Path(f"/proc/{d.process.pid}/task/{d.process.pid}/children").read_text()), signal.SIGKILL)
    expect_full(d, "signal 9 (Killed) ended the fit; was there enough memory?")


def test_the_fit_ends_with_a_daemon_that_is_killed(start, env):
    d = start(*BOUNDED, env=env)
    d.wait_for("measuring 1 of 4")
    child = int(pathlib.Path(f"/proc/{d.process.pid}/task/{d.process.pid}/children").read_text())
    d.process.kill()
    end = time.monotonic() + 60
    while (state := pathlib.Path(f"/proc/{child}/stat")).exists() and ") Z" not in state.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def read_until(fd, text, said):
    end = time.monotonic() + 120
    while text not in said:
        assert time.monotonic() < end, said
        if select.select([fd], [], [], 1)[0]:
            said += os.read(fd, 4096).decode()
    return said


def test_on_a_terminal_the_fit_can_be_skipped(start, env):
    parent, child = pty.openpty()
    d = start(*BOUNDED, env=env, stderr=child)
    os.close(child)
    said = read_until(parent, "measuring 1 of 4", "")
    assert "Ctrl-C skips this, a second Ctrl-C ends keepd" in said
    d.process.send_signal(signal.SIGINT)
    said = read_until(parent, "the fit was skipped", said)
    threading.Thread(target=lambda: read_until(parent, "stopped", said), daemon=True).start()
    assert d.ready()["kv_policy"] == "full"
    d.process.terminate()
    assert d.end() == 0


def test_damaged_gates_of_the_cache_folder_are_fitted_again(first, model, texts, tmp_path):
    file = gates_in(first[0])[0]
    damaged = bytearray(file.read_bytes())
    damaged[-4000:] = b"\xff" * 4000  # numbers that are not finite
    (tmp_path / file.name).write_bytes(damaged)
    done = subprocess.run([BINARY, "--model", model, *BOUNDED, "--check-config"], env=environment(texts, tmp_path),
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "not finite" in done.stderr and "a start fits" in done.stderr, done.stderr


def test_a_check_fits_nothing(model, env, tmp_path):
    for policy in ("auto", "global"):
        done = subprocess.run([BINARY, "--model", model, *BOUNDED, "--kv-policy", policy, "--check-config"], env=env,
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "a start fits retention gates to the model first" in done.stderr, done.stderr
    done = subprocess.run([BINARY, "--model", model, *BOUNDED, "--kv-policy", "global", "--fit", "never", "--check-config"], env=env,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and "needs retention gates" in done.stderr
    done = subprocess.run([BINARY, "--inspect", model, *BOUNDED], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "policy global" in done.stdout and "changes nothing" not in done.stderr, done
    assert not (tmp_path / "cache").exists()


# --- files ---

def rewrite(source, to, **changes):
    """A gates file with another header; None removes a field."""
    data = source.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    about = {**json.loads(header["__metadata__"]["keepd"]), **changes}
    header["__metadata__"]["keepd"] = json.dumps({k: v for k, v in about.items() if v is not None})
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    to.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size:])


def test_which_files_are_used(start, env, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(NANO, folder)
    beside, own = folder / "gates.safetensors", NANO / "gates.safetensors"

    def refused(*flags):
        d = start("--model", str(folder), *SHORT, *flags, env=env)
        assert d.end() == 78
        return "".join(d.log)

    rewrite(own, beside, base=None)
    assert f"gates: {beside}: keepd.base: names no base model" in refused(*BOUNDED)
    d = start("--model", str(folder), "--gates", str(beside), *BOUNDED, env=env)
    assert d.ready()["gates_from"] == "given"
    d.stop()
    rewrite(own, beside, base={"vectors": "0" * 64, "matrices": "0" * 64})
    assert "the gates were trained for another base model" in refused(*BOUNDED)
    shutil.copy(own, beside)
    d = start("--model", str(folder), *BOUNDED, env=env)
    assert d.ready()["gates_from"] == "beside"
    d.stop()


# --- keepd fit ---

def test_fit_writes_what_a_start_finds(first, model, texts):
    """In place of what was there."""
    cache = first[0]
    file = gates_in(cache)[0]
    before = file.stat().st_ino, file.read_bytes()
    done = subprocess.run([BINARY, "fit", model, *SHORT], env=environment(texts, cache), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(file) and "| `global` |" in done.stdout
    assert file.stat().st_ino != before[0] and file.read_bytes() == before[1]
    assert len(list(cache.iterdir())) == 1


def test_fit_needs_a_place_for_its_gates(model, env):
    done = subprocess.run([BINARY, "fit", model, *SHORT, "--gates-cache", ""], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and "--out: is required: no folder of gates can be written" in done.stderr
