"""The service manager's side: a datagram socket that hears what the daemon says, descriptors that are passed."""
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
import requests
from conftest import BINARY, FAKE, MODEL, ROOT, chat_body, read_all, read_until, request_bytes

CHAT = "/v1/chat/completions"
MODEL_DIR = str(ROOT / "bundled/keepd-nano")


class Manager:
    """A socket that listens as systemd does; `name` is a path or "@abstract"."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(name.replace("@", "\0", 1))
        self.said, self.env = [], {"NOTIFY_SOCKET": name}
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while data := self.socket.recv(4096):
            self.said.append(data.decode())

    def heard(self, word):
        return [text for text in self.said if word in text]

    def wait_for(self, word):
        """Waits for a message, which may not have been read yet."""
        end = time.monotonic() + 30
        while not self.heard(word):
            assert time.monotonic() < end, self.said
            time.sleep(0.01)


@pytest.mark.parametrize("abstract", [False, True])
def test_what_is_said(start, tmp_path, abstract):
    file = tmp_path / "keepd.conf"
    file.write_text("log-level = info\n")
    manager = Manager(f"@keepd-test-{os.getpid()}" if abstract else str(tmp_path / "notify"))
    daemon = start("--config", str(file), env=manager.env)
    daemon.wait("READY", lambda: manager.heard("READY=1"))
    loading = manager.heard("Loading")
    assert loading and all("EXTEND_TIMEOUT_USEC=" in text for text in loading)
    assert manager.said.index(loading[0]) < manager.said.index(manager.heard("READY=1")[0])
    assert f"STATUS=Serving {MODEL} at {daemon.url}" in manager.heard("READY=1")[0]
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the reload", lambda: len(manager.heard("READY=1")) == 2)
    at = manager.said.index(manager.heard("RELOADING=1")[0])
    assert "MONOTONIC_USEC=" in manager.said[at] and manager.said[at + 1] == "READY=1"
    daemon.process.terminate()
    daemon.wait("STOPPING", lambda: manager.heard("STOPPING=1"))
    assert "EXTEND_TIMEOUT_USEC=40000000" in manager.heard("STOPPING=1")[0]
    assert daemon.process.wait(timeout=30) == 0 and not manager.heard("WATCHDOG")


def test_ready_is_not_lost_to_a_busy_manager(start, tmp_path):
    """A full queue swallows progress, never READY: that is said once, and the manager waits for it."""
    name = str(tmp_path / "notify")
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(name)
    full = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    full.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            full.sendto(b"noise", name)
    daemons = []
    starting = threading.Thread(target=lambda: daemons.append(start(env={"NOTIFY_SOCKET": name})))
    starting.start()
    starting.join(timeout=1.5)  # loading: messages sent without waiting are lost by now
    manager.settimeout(30)
    while b"READY=1" not in manager.recv(4096):
        pass
    starting.join()
    manager.close()


def test_a_busy_manager_holds_nobody_up(start, tmp_path):
    """Nobody reads what the manager is told: requests are answered, and what was said waits, in its order."""
    name, file = str(tmp_path / "notify"), tmp_path / "keepd.conf"
    file.write_text("log-level = info\n")
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(name)
    daemon = start("--config", str(file), env={"NOTIFY_SOCKET": name})
    full = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    full.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            full.sendto(b"noise", name)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the reload", lambda: any("read again" in line for line in daemon.errors))
    begin = time.monotonic()
    assert daemon.chat().status_code == 200
    assert time.monotonic() - begin < 4, "the loop waits for the manager"
    manager.settimeout(30)
    said = []
    while said.count(b"READY=1") < 1:
        said += [text for text in [manager.recv(4096)] if b"RELOADING" in text or text == b"READY=1"]
    assert len(said) == 2 and b"RELOADING=1" in said[0]


def test_refusals_reach_the_status(tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    subprocess.run([BINARY, "--model", MODEL_DIR, "--kv-policy", "lru"], env={**os.environ, **manager.env},
                   capture_output=True, timeout=60)
    manager.wait_for("STATUS=kv-policy: 'lru' is not one of")
    assert not manager.heard("READY")


def test_watchdog_is_fed_by_progress(start, fake, tmp_path):
    """An idle engine and one that works are fed; one that has work and makes no step is not."""
    manager = Manager(str(tmp_path / "notify"))
    daemon = start(env={**manager.env, "WATCHDOG_USEC": "300000", "KEEPD_FAKE_STEP_US": "1500000"})
    daemon.wait("food while idle", lambda: len(manager.heard("WATCHDOG=1")) >= 3)
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body("ab", stream=True)))
        daemon.wait("its first step", lambda: daemon.kv()["running_count"] == 1)
        read_until(sock, b"data: ")
        before = len(manager.heard("WATCHDOG=1"))
        read_until(sock, b"[DONE]")  # two more steps take 3 s, ten times the interval
        assert len(manager.heard("WATCHDOG=1")) - before <= 4
    daemon.wait("food again", lambda: len(manager.heard("WATCHDOG=1")) > before + 4)


def test_watchdog_of_another_process(start, tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    daemon = start(env={**manager.env, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"})
    daemon.wait("READY", lambda: manager.heard("READY=1"))
    assert daemon.chat().status_code == 200 and not manager.heard("WATCHDOG")


# --- socket activation ---

LAUNCH = 'exec 3<&%d; LISTEN_FDS=%s LISTEN_PID=$$ exec "$@"'


def launch(listener, *flags, count=1, **options):
    return subprocess.Popen(["bash", "-c", LAUNCH % (listener.fileno(), count), "bash", str(BINARY), "--model", MODEL_DIR,
                             "--served-model-name", MODEL, *flags], pass_fds=[listener.fileno()],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_a_passed_socket_is_used(family, tmp_path):
    path = str(tmp_path / "activated.sock")
    listener = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET)
    listener.bind(path if family == "unix" else ("127.0.0.1", 0))
    listener.listen(5)
    client = socket.socket(listener.family)
    client.connect(listener.getsockname())
    client.sendall(request_bytes("/version", b"", "Connection: close", method="GET"))  # waits until somebody starts
    # The configured address is ignored: it could not be bound.
    process = launch(listener, "--port", "1", "--unix-socket", "x" * 200)
    try:
        line = process.stdout.readline()
        assert line.split()[3] == (f"unix:{path}" if family == "unix" else
                                   f"http://127.0.0.1:{listener.getsockname()[1]}"), line
        assert read_all(client).startswith(b"HTTP/1.1 200")
    finally:
        process.terminate()
    assert process.wait(timeout=30) == 0
    assert family == "tcp" or os.path.exists(path), "the path is the manager's"


def test_wrong_sockets_are_refused():
    udp, unbound = socket.socket(type=socket.SOCK_DGRAM), socket.socket()
    for listener, count in ((udp, 1), (unbound, 1), (unbound, 2)):
        process = launch(listener, count=count)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 78 and "LISTEN_FDS" in errors, errors


def test_sockets_of_another_process(start):
    daemon = start(env={"LISTEN_FDS": "1", "LISTEN_PID": "1"})
    assert requests.get(daemon.url + "/health", timeout=60).status_code == 200
    assert FAKE or daemon.url
