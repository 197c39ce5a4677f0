#!/usr/bin/env python3
"""run.py [SECONDS]: the load test in SECONDS (120), first on an engine without a model, then on the bundled model.

Clients of every kind (tests/load/load.c) ask at once; afterwards nothing may be left over: no running request, no
reserved page, no descriptor, no memory that grew; every answer equals the one its prompt got alone; a SIGTERM in the
middle loses no accepted request. Exit 1 when one of these does not hold."""
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KEEPD_BUILD", ROOT / "build" / "release"))
RSS_GROWTH = 1.02
RSS_SLACK = 8 << 20  # a heap's trim threshold and the histograms of the second half
FAILED = []


def check(holds, what):
    if not holds:
        FAILED.append(what)
        print(f"  FAILED: {what}")


class Daemon:
    def __init__(self, binary, *flags, env=None):
        env = {**os.environ, "KEEPD_TEST_TIMEOUTS": "header=2000", **(env or {})}
        self.process = subprocess.Popen(
            [BUILD / "server" / binary, "--model", ROOT / "models" / "keepd-nano", "--port", "0", "--max-connections", "4096",
             "--max-queue", "4096", "--log-level", "warn", *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=env)
        line = self.process.stdout.readline()
        assert line.startswith("keepd ready"), f"no ready line: {line!r}"
        self.url = line.split()[3]

    def kv(self):
        with urllib.request.urlopen(self.url + "/kv", timeout=30) as r:
            return json.load(r)

    def settle(self):
        """What is left when everybody has gone."""
        for _ in range(300):
            kv = self.kv()
            if kv["running_count"] == kv["waiting_count"] == 0 and self.descriptors() <= self.before + 1:
                break
            time.sleep(0.1)
        return kv

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss(self):
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) << 10

    def load(self, wait=True, **settings):
        arguments = [f"{k}={v}" for k, v in settings.items()]
        client = subprocess.Popen([BUILD / "load" / "load", self.url.rsplit(":", 1)[1], f"pid={self.process.pid}",
                                   *arguments], stdout=subprocess.PIPE, text=True)
        return self.result(client, settings) if wait else client

    @staticmethod
    def result(client, settings):
        text = client.communicate(timeout=900)[0]
        check(client.returncode == 0, f"load {settings} exits with {client.returncode}")
        print(f"  {text.strip()}", flush=True)
        return json.loads(text)

    def stop(self):
        self.process.terminate()
        check(self.process.wait(timeout=120) == 0, "the daemon exits with 0")


def storm(name, binary, seconds, clients, tokens, *flags, env=None):
    """Everything at once, twice: what the second half adds to the first would be a leak."""
    print(f"{name}: {clients} connections, 10 % vanish, slow readers and slow senders, {seconds:.0f} s")
    daemon = Daemon(binary, *flags, env=env)
    daemon.before = daemon.descriptors()
    settings = dict(connections=clients, tokens=tokens, vanish=10, slow=max(4, clients // 50),
                    loris=max(4, clients // 100), seconds=int(seconds / 2))
    sizes = []
    for seed in (1, 2):
        r = daemon.load(seed=seed, **settings)
        kv, open_files = daemon.settle(), daemon.descriptors()
        check(r["answered"] > 0 and r["vanished"] > 0 and r["lost"] == r["wrong"] == 0, "no answer is wrong or lost")
        check(r["refused"] == 0, f"{r['refused']} requests were refused")
        check(seconds < 10 or r["thrown_out"] >= settings["loris"], "slow senders are thrown out")
        check(kv["running_count"] == kv["waiting_count"] == kv["pool"]["pages_reserved"] == 0, f"nothing is left: {kv['pool']}")
        check(kv["pool"]["pages_used"] == kv["pool"]["pages_retained"], f"pages are all accounted for: {kv['pool']}")
        check(open_files <= daemon.before + 1, f"descriptors: {daemon.before} before, {open_files} after")
        sizes.append(daemon.rss())
    print(f"  resident: {sizes[0] >> 20} MiB, then {sizes[1] >> 20} MiB")
    check(sizes[1] <= sizes[0] * RSS_GROWTH + RSS_SLACK, "resident memory does not grow")
    daemon.stop()


def drain(name, binary, clients, tokens, *flags, env=None):
    """SIGTERM while all are at it: who was accepted is answered."""
    print(f"{name}: SIGTERM with {clients} connections")
    daemon = Daemon(binary, "--drain-seconds", "120", *flags, env=env)
    settings = dict(connections=clients, tokens=tokens, seconds=60)
    client = daemon.load(wait=False, **settings)
    for _ in range(600):
        if daemon.kv()["running_count"] >= min(clients, 8) // 2:
            break
        time.sleep(0.05)
    time.sleep(0.5)
    daemon.process.terminate()
    r = daemon.result(client, settings)
    check(r["answered"] > 0 and r["lost"] == r["wrong"] == 0, "no accepted request is lost")
    check(daemon.process.wait(timeout=180) == 0, "the daemon exits with 0")


def speed():
    """The HTTP layer alone: as fast as it goes, at a given rate, and how long a token takes to its client."""
    print("The HTTP layer alone, 256 streams")
    fast = Daemon("keepd-fake", "--max-num-seqs", "256")
    fast.load(connections=256, tokens=1000, seconds=4)
    fast.stop()
    paced = Daemon("keepd-fake", "--max-num-seqs", "256", env={"KEEPD_FAKE_STEP_US": "6250"})
    paced.load(connections=256, tokens=640, seconds=4, prompts=2)  # each is first asked alone, at this pace
    paced.stop()
    slow = Daemon("keepd-fake", "--max-num-seqs", "256", env={"KEEPD_FAKE_STEP_US": "100000"})
    slow.load(connections=256, tokens=80, seconds=8, stamp=1)
    slow.stop()


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120
    storm("No model", "keepd-fake", seconds * .3, 1000, 200, "--max-num-seqs", "256", env={"KEEPD_FAKE_STEP_US": "5000"})
    drain("No model", "keepd-fake", 500, 100, "--max-num-seqs", "128", env={"KEEPD_FAKE_STEP_US": "5000"})
    speed()
    storm("keepd-nano", "keepd", seconds * .3, 32, 32, "--kv-budget", "64")
    drain("keepd-nano", "keepd", 32, 32, "--kv-budget", "64")
    print("FAILED: " + "; ".join(FAILED) if FAILED else "All of it holds.")
    sys.exit(1 if FAILED else 0)


main()
