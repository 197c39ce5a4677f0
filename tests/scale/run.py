#!/usr/bin/env python3
"""Multi-turn sessions through a router in front of three daemons, while one is killed, one drained and one added.

    run.py [--router haproxy|vllm-router|smg] [--sessions 200] [--turns 5] [--clients 16] [--json FILE]

The daemons share one state directory and serve the bundled model. A first run against a single daemon gives each turn's
text. Then the same sessions run through the router. When a fifth of the turns is answered, one daemon is killed; at two
fifths one is drained (SIGTERM), at three fifths a new one starts. A client retries a request that failed.

It fails if a request failed that the killed daemon did not have (or that the router sent there before its checks found
that it is gone: vllm-router and SMG), if a turn was never answered, if fewer than 95 % of the
turns continued their conversation (the prompt of the turn before was found in the cache), or if a text differs from the
single daemon's.

HAProxy runs with deploy/haproxy.cfg, its addresses replaced. Without the router's program: says so and succeeds."""
import argparse
import concurrent.futures
import csv
import http.client
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ("Nora", "Otto", "Ada", "Karl", "Mina", "Juri", "Lena", "Paul")
CITIES = ("Lisbon", "Turin", "Oslo", "Ghent", "Riga", "Graz", "Porto", "Lyon")
ATTEMPTS = 20
AFTER_SECONDS = 5
PHASES = ("before the kill", f"{AFTER_SECONDS} s from the kill on", "later")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def is_healthy(port):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


class Daemon:
    def __init__(self, port, log, *flags):
        binary = os.environ.get("KEEPD_BIN", ROOT / "build/keepd")
        self.port = port
        self.process = subprocess.Popen([binary, "--model", ROOT / "bundled/keepd-nano", "--port", str(port), "--threads", "1",
                                         "--served-model-name", "keepd-nano", "--max-num-seqs", "32", *flags],
                                        stdout=subprocess.DEVNULL, stderr=log)

    def ready(self):
        wait_for(f"a daemon on port {self.port}", lambda: is_healthy(self.port))
        return self


class HAProxy:
    """The configuration that is shipped, with other addresses. The last of four servers starts later; health checks see it."""

    notices_seconds = 0.1  # HAProxy tries another daemon as soon as a connection fails

    def __init__(self, folder, port, ports, log):
        text = (ROOT / "deploy/haproxy.cfg").read_text()
        text = re.sub(r"stats socket \S+", f"stats socket {folder}/admin.sock", text)
        text = re.sub(r"bind \S+", f"bind 127.0.0.1:{port}", text)
        text = re.sub(r"    server .*\n", "", text)
        text += "".join(f"    server {name} 127.0.0.1:{p}\n" for name, p in zip("abcd", ports))
        (folder / "haproxy.cfg").write_text(text)
        self.admin = str(folder / "admin.sock")
        self.process = subprocess.Popen(["haproxy", "-db", "-f", folder / "haproxy.cfg"], stdout=log, stderr=log)
        wait_for("HAProxy's checks", lambda: [self.status(name) for name in "abcd"] == ["UP", "UP", "UP", "DOWN"])

    def status(self, server):
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(self.admin)
                s.sendall(b"show stat\n")
                table = b"".join(iter(lambda: s.recv(65536), b"")).decode()
        except OSError:
            return None
        rows = csv.DictReader(io.StringIO(table.removeprefix("# ")))
        return next((row["status"] for row in rows if (row["pxname"], row["svname"]) == ("keepd", server)), None)

    def add(self, port):
        pass

    def remove(self, port):
        pass


def order(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status < 300, (path, answer.status, text)
    return json.loads(text) if method == "GET" else None


CHECKS = ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "2", "--health-failure-threshold", "2",
          "--health-success-threshold", "1", "--retry-max-retries", "5", "--worker-startup-check-interval", "1")


class VllmRouter:
    """vllm-router (PyPI), by consistent hashing of X-Session-ID. It is told who comes and goes."""

    notices_seconds = 4

    def __init__(self, folder, port, ports, log):
        self.port = port
        self.process = subprocess.Popen(
            ["vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hash",
             "--worker-urls", *[f"http://127.0.0.1:{p}" for p in ports[:3]], "--prometheus-port", str(free_port()), *CHECKS],
            stdout=log, stderr=log, cwd=folder)

    def add(self, port):
        order(self.port, "POST", f"/add_worker?url=http://127.0.0.1:{port}")

    def remove(self, port):
        order(self.port, "POST", f"/remove_worker?url=http://127.0.0.1:{port}")


class Smg:
    """SMG (PyPI), by consistent hashing of X-Session-ID. It is told who comes and goes."""

    notices_seconds = 4

    def __init__(self, folder, port, ports, log):
        self.port = port
        self.process = subprocess.Popen(
            ["smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hashing",
             "--routing-key-headers", "x-session-id", "--disable-tokenizer-autoload",
             "--worker-urls", *[f"http://127.0.0.1:{p}" for p in ports[:3]], "--prometheus-port", str(free_port()), *CHECKS],
            stdout=log, stderr=log, cwd=folder)
        wait_for("SMG's workers", lambda: is_healthy(port) and len(order(port, "GET", "/workers")["workers"]) == 3)

    def add(self, port):
        order(self.port, "POST", "/workers", {"url": f"http://127.0.0.1:{port}"})

    def remove(self, port):
        workers = order(self.port, "GET", "/workers")["workers"]
        (gone,) = [worker["id"] for worker in workers if worker["url"] == f"http://127.0.0.1:{port}"]
        order(self.port, "DELETE", f"/workers/{gone}")


ROUTERS = {"haproxy": HAProxy, "vllm-router": VllmRouter, "smg": Smg}


def question(session, turn):
    name, city = NAMES[session % 8], CITIES[session // 8 % 8]
    if turn == 0:
        return f"Hello, this is session {session}. My sister {name} lives in {city}. The code of the garage is {4000 + session}."
    return f"What is the code of the garage? ({turn})" if turn % 2 else f"Where does {name} live? ({turn})"


class Failed(Exception):
    pass


def read_stream(answer, begun):
    """The text of a stream, the seconds to its first token, and its usage."""
    first, text, usage = None, "", None
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return text, (first or time.monotonic()) - begun, usage
        event = json.loads(line[6:])
        if "error" in event:
            raise Failed(str(event))
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if choice["delta"].get("content"):
                first = first or time.monotonic()
                text += choice["delta"]["content"]
    raise Failed("the stream ended early")


def ask(port, session, messages):
    body = json.dumps({"model": "keepd-nano", "messages": messages, "temperature": 0, "max_tokens": 12, "stream": True,
                       "stream_options": {"include_usage": True}})
    connection, begun = http.client.HTTPConnection("127.0.0.1", port, timeout=120), time.monotonic()
    try:
        connection.request("POST", "/v1/chat/completions", body,
                           {"Content-Type": "application/json", "X-Session-ID": f"session-{session}"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failed(f"{answer.status} {answer.read()[:200]}")
        return (*read_stream(answer, begun), answer.headers.get("X-Keepd-Server"), begun)
    except (OSError, http.client.HTTPException) as error:
        raise Failed(repr(error)) from error
    finally:
        connection.close()


class Run:
    """All sessions through one port. `at` maps a number of answered turns to what happens then."""

    def __init__(self, port, options, expected=None, at=None):
        self.port, self.options, self.expected, self.at = port, options, expected, dict(at or {})
        self.lock = threading.Lock()
        self.rows, self.failures, self.texts, self.different, self.events = [], [], {}, [], []

    def turn(self, session, turn, messages):
        for _ in range(ATTEMPTS):
            begun = time.monotonic()
            try:
                return ask(self.port, session, messages)
            except Failed as failure:
                with self.lock:
                    self.failures.append({"session": session, "turn": turn, "begun": begun, "ended": time.monotonic(),
                                          "text": str(failure)})
                time.sleep(0.2)
        raise AssertionError(f"session {session}, turn {turn} was never answered: {self.failures[-1]}")

    def session(self, number):
        messages, before = [], None
        for turn in range(self.options.turns):
            messages = messages + [{"role": "user", "content": question(number, turn)}]
            text, first, usage, server, begun = self.turn(number, turn, messages)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            row = {"turn": turn, "begun": begun, "ttft": first, "server": server, "prompt": usage["prompt_tokens"],
                   "continued": before is not None and cached >= before["prompt"],
                   "stayed": before is not None and server == before["server"], "came_from": before and before["server"]}
            before = row
            self.note((number, turn), row, text)
            messages = messages + [{"role": "assistant", "content": text}]
            time.sleep(self.options.pause)

    def note(self, key, row, text):
        with self.lock:
            self.rows.append(row)
            self.texts[key] = text
            if self.expected is not None and self.expected[key] != text:
                self.different.append((key, self.expected[key], text))
            actions = [self.at.pop(n) for n in sorted(self.at) if n <= len(self.rows)]
        for action in actions:
            self.events.append((action.__name__, time.monotonic()))
            action()

    def all(self):
        self.begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(self.options.clients) as pool:
            for future in [pool.submit(self.session, n) for n in range(self.options.sessions)]:
                future.result()
        self.seconds = time.monotonic() - self.begun
        return self


def percentile(values, part):
    values = sorted(values)
    return round(1000 * values[min(len(values) - 1, int(part * len(values)))]) if values else None


def percent(rows, name):
    return round(100 * sum(row[name] for row in rows) / len(rows), 2)


def summary(run):
    kill = dict(run.events)["kill"]
    noticed = kill + ROUTERS[run.options.router].notices_seconds
    other = [f for f in run.failures if f["begun"] > noticed or f["ended"] < kill]
    later = [row for row in run.rows if row["turn"] > 0]
    missed = [f"{row['begun'] - run.begun:.1f} s: {row['came_from']} to {row['server']}" for row in later if not row["continued"]]
    phases = {name: [] for name in PHASES}
    for row in run.rows:
        since = row["begun"] - kill
        phases[PHASES[0 if since < 0 else 1 if since < AFTER_SECONDS else 2]].append(row["ttft"])
    return {"router": run.options.router, "sessions": run.options.sessions, "turns": len(run.rows),
            "clients": run.options.clients, "seconds": round(run.seconds, 1),
            "events": {name: round(at - run.begun, 1) for name, at in run.events},
            "failed_with_the_kill": len(run.failures) - len(other), "failed_otherwise": [f"{f['begun'] - kill:+.2f} s: {f['text']}" for f in other],
            "continued_percent": percent(later, "continued"), "not_continued": missed,
            "same_daemon_percent": percent(later, "stayed") if later[0]["server"] else None,
            "texts_different": len(run.different),
            "first_token_ms": {name: {"turns": len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
                               for name, values in phases.items()}}


def measure(options, folder, log):
    reference = Daemon(free_port(), log, "--max-conversations", "4096").ready()
    expected = Run(reference.port, options).all()
    reference.process.terminate()
    reference.process.wait()
    ports, router_port, router = [free_port() for _ in range(4)], free_port(), None
    flags = ("--state-dir", str(folder / "state"), "--state-idle", "0", "--max-conversations", "4096")
    daemons = [Daemon(port, log, *flags) for port in ports[:3]]

    def kill():
        daemons[0].process.kill()

    def drain():
        router.remove(ports[1])
        daemons[1].process.send_signal(signal.SIGTERM)

    def add():
        daemons.append(Daemon(ports[3], log, *flags).ready())
        router.add(ports[3])

    try:
        for daemon in daemons:
            daemon.ready()
        router = ROUTERS[options.router](folder, router_port, ports, log)
        wait_for("the router", lambda: is_healthy(router_port))
        total = options.sessions * options.turns
        at = {total // 5: kill, 2 * total // 5: drain, 3 * total // 5: add}
        run = Run(router_port, options, expected.texts, at).all()
        return summary(run), daemons[1].process.wait(timeout=60)
    finally:
        for process in [d.process for d in daemons] + ([router.process] if router else []):
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--router", choices=ROUTERS, default="haproxy")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between the turns of a session")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not shutil.which(options.router):
        print(f"skip: {options.router} is not installed")
        return 0
    with tempfile.TemporaryDirectory(prefix="keepd-scale-") as folder, open(pathlib.Path(folder) / "log", "w+") as log:
        try:
            result, drained = measure(options, pathlib.Path(folder), log)
        except BaseException:
            print((pathlib.Path(folder) / "log").read_text()[-4000:], file=sys.stderr)
            raise
    print(json.dumps(result, indent=2))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    assert drained == 0, "the drained daemon did not end cleanly"
    assert not result["failed_otherwise"], "requests failed that the killed daemon did not have"
    assert result["texts_different"] == 0, "texts differ from a single daemon's"
    assert result["continued_percent"] >= 95, "too few turns continued their conversation"
    return 0


if __name__ == "__main__":
    sys.exit(main())
