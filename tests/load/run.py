#!/usr/bin/env python3
"""run.py [SECONDS] [tls]: the load test, for SECONDS (15) on an engine without a model, as long over TLS, and as long on the
bundled model; with `tls` only the part over TLS, where one connection in ten is a handshake that never finishes.

Clients of every kind (tests/load/load.c) ask at once; afterwards nothing may be left over: no running request, no
reserved page, no descriptor, no memory that grew; every answer equals the one its prompt got alone; a SIGTERM in the
middle loses no accepted request. Exit 1 when one of these does not hold.

build/results/load.md holds the figures as a table, as bench/results/README.md has them."""
import json
import os
import pathlib
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KEEPD_BUILD", ROOT / "build" / "release"))
HALVES_MAX = 5  # halves of a storm, while resident memory grows
RSS_GROWTH = 1.02
RSS_SLACK = 8 << 20  # a heap's trim threshold and the histograms of the second half
FAILED = []
ROWS = []  # the table of the summary
COLUMNS = ("asked", "answered", "vanished", "hostile", "thrown_out", "refused", "lost", "wrong", "events_per_second")


def check(holds, what):
    if not holds:
        FAILED.append(what)
        print(f"  FAILED: {what}")


def make_certificate(folder):
    """Flags of a daemon with a certificate for 127.0.0.1."""
    cert, key = f"{folder}/cert.pem", f"{folder}/key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
                    "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
                   check=True, capture_output=True)
    return "--tls-cert", cert, "--tls-key", key


class Daemon:
    def __init__(self, binary, *flags, env=None):
        env = {**os.environ, "KEEPD_TEST_TIMEOUTS": "header=2000", **(env or {})}
        self.tls = "--tls-cert" in flags
        self.context = ssl.create_default_context(cafile=flags[flags.index("--tls-cert") + 1]) if self.tls else None
        self.process = subprocess.Popen(
            [BUILD / "server" / binary, "--model", ROOT / "bundled/keepd-nano", "--port", "0", "--max-connections", "4096",
             "--max-queue", "4096", "--log-level", "warn", *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=env)
        line = self.process.stdout.readline()
        assert line.startswith("keepd ready"), f"no ready line: {line!r}"
        self.url = line.split()[3]

    def kv(self):
        with urllib.request.urlopen(self.url + "/kv", timeout=30, context=self.context) as r:
            return json.load(r)

    def settle(self):
        """Reports the resources that remain after all clients have disconnected."""
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
        arguments = [f"{k}={v}" for k, v in settings.items()] + [f"tls={int(self.tls)}"]
        client = subprocess.Popen([BUILD / "load" / "load", self.url.rsplit(":", 1)[1], f"pid={self.process.pid}",
                                   *arguments], stdout=subprocess.PIPE, text=True)
        return self.result(client, settings) if wait else client

    @staticmethod
    def result(client, settings):
        text = client.communicate(timeout=settings["seconds"] + 900)[0]
        check(client.returncode == 0, f"load {settings} exits with {client.returncode}")
        return json.loads(text)

    @staticmethod
    def show(r):
        print("  " + ", ".join(f"{r[k]} {k.replace('_', ' ')}" for k in COLUMNS), flush=True)

    def stop(self):
        self.process.terminate()
        check(self.process.wait(timeout=120) == 0, "the daemon exits with 0")


def note(what, figures, resident="", descriptors=""):
    ROWS.append([what, *(figures[k] for k in COLUMNS), resident, descriptors])


def write_summary(seconds, mode):
    """Figures, machine, failures."""
    with open("/proc/cpuinfo") as info:
        processor = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown")
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    head = ["", *(k.replace("_", " ") for k in COLUMNS), "resident", "descriptors"]
    lines = [f"`make load SECONDS={seconds:g}{' MODE=tls' if mode == ['tls'] else ''}`, {time.strftime('%Y-%m-%d', time.gmtime())}, "
             f"{os.cpu_count()} x {processor}, load {os.getloadavg()[2]:.1f}, commit {commit}", "",
             *(f"| {' | '.join(map(str, row))} |" for row in (head, ["---", *["--:"] * (len(head) - 1)], *ROWS)), "",
             *(f"FAILED: {what}" for what in FAILED), "" if FAILED else "All of it holds."]
    path = ROOT / "build/results/load.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"The figures are in {path}.")


def grows(sizes):
    return sizes[-1] > max(sizes[:-1], default=0) * RSS_GROWTH + RSS_SLACK


def storm(name, binary, seconds, clients, tokens, prompts, *flags, env=None):
    """Everything at once, in two halves. How much the first needs depends on how fast it went; what every further one
    adds is a leak."""
    daemon = Daemon(binary, *flags, env=env)
    print(f"{name}: {clients} connections, 10 % vanish, {'10 % hostile handshakes, ' if daemon.tls else ''}slow readers and slow "
          f"senders, {seconds:.0f} s", flush=True)
    daemon.before = daemon.descriptors()
    settings = dict(connections=clients, tokens=tokens, vanish=10, slow=max(4, clients // 50),
                    loris=max(4, clients // 100), seconds=int(seconds / 2), prompts=prompts, hostile=10 if daemon.tls else 0)
    sizes = []
    while len(sizes) < 2 or (grows(sizes) and len(sizes) < HALVES_MAX):
        r = daemon.load(seed=len(sizes) + 1, **settings)
        daemon.show(r)
        kv, open_files = daemon.settle(), daemon.descriptors()
        check(r["answered"] > 0 and r["vanished"] > 0 and r["lost"] == r["wrong"] == 0, "no answer is wrong or lost")
        check(r["refused"] == 0, f"{r['refused']} requests were refused")
        check(seconds < 60 or r["thrown_out"] >= settings["loris"], "slow senders are thrown out")
        check(kv["running_count"] == kv["waiting_count"] == kv["pool"]["pages_reserved"] == 0, f"nothing is left: {kv['pool']}")
        check(kv["pool"]["pages_used"] == kv["pool"]["pages_retained"], f"pages are all accounted for: {kv['pool']}")
        check(open_files <= daemon.before + 1, f"descriptors: {daemon.before} before, {open_files} after")
        sizes.append(daemon.rss())
        note(f"{name}, half {len(sizes)}", r, f"{sizes[-1] >> 20} MiB", f"{daemon.before}, {open_files}")
    print(f"  resident after each half: {', '.join(str(size >> 20) for size in sizes)} MiB; "
          f"descriptors: {daemon.before} before, {open_files} after; pages reserved: {kv['pool']['pages_reserved']}")
    check(not grows(sizes), "resident memory does not grow")
    daemon.stop()


def drain(name, binary, clients, tokens, prompts, *flags, env=None):
    """SIGTERM while all are at it: who was accepted is answered."""
    print(f"{name}: SIGTERM with {clients} connections")
    daemon = Daemon(binary, "--drain-seconds", "600", *flags, env=env)
    settings = dict(connections=clients, tokens=tokens, prompts=prompts, seconds=60, drain=1)
    client = daemon.load(wait=False, **settings)
    for _ in range(2400):  # each prompt is asked alone first
        if daemon.kv()["running_count"] >= 8:
            break
        time.sleep(0.05)
    time.sleep(0.5)
    daemon.process.terminate()
    r = daemon.result(client, settings)
    daemon.show(r)
    note(f"{name}, SIGTERM", r)
    check(r["answered"] > 0 and r["lost"] == r["wrong"] == 0, "no accepted request is lost")
    check(daemon.process.wait(timeout=600) == 0, "the daemon exits with 0")


def speed(seconds):
    """The HTTP layer alone: what arrives at given rates, and how long a token takes to its client. 256 streams that began at
    different moments; every step of the engine gives each a token, so their events come in bursts of 256."""
    print("The HTTP layer alone, 256 streams\n   wanted/s  events/s  p50 ms  p99 ms  99.9 %  daemon CPU  client CPU")
    flags = ("--max-num-seqs", "256", "--kv-budget", "256")  # the longest answers of all fit the pool at once
    for rate in (10, 200, 400):
        daemon = Daemon("keepd-fake", *flags, env={"KEEPD_FAKE_STEP_US": str(1000000 // rate)})
        r = daemon.load(connections=256, tokens=rate * seconds, ramp=seconds, seconds=seconds, stamp=1)
        times = r["token_to_client_ms"]
        print(f"  {256 * rate:9d} {r['events_per_second']:9d} {times['p50']:7.2f} {times['p99']:7.2f} {times['p999']:7.2f} "
              f"{r['daemon_cpu']:11.2f} {r['client_cpu']:11.2f}", flush=True)
        daemon.stop()
    fast = Daemon("keepd-fake", *flags)
    r = fast.load(connections=256, tokens=1000, seconds=seconds)
    print(f"  unlimited {r['events_per_second']:9d} {r['daemon_cpu']:35.2f} {r['client_cpu']:11.2f}", flush=True)
    fast.stop()


def plain(seconds, steps):
    budget = ("--kv-budget", "64", "--max-num-seqs", "128")
    # Fewer run at once than ask, so that some leave the queue.
    storm("No model", "keepd-fake", seconds, 1000, 100, 4, "--max-num-seqs", "900", env=steps)
    drain("No model", "keepd-fake", 500, 100, 4, "--max-num-seqs", "128", env=steps)
    speed(max(1, min(4, int(seconds) // 4)))
    storm("keepd-nano", "keepd", seconds, 128, 32, 32, *budget)
    drain("keepd-nano", "keepd", 64, 32, 32, *budget)


def over_tls(seconds, steps):
    with tempfile.TemporaryDirectory() as folder:
        flags = make_certificate(folder)
        storm("No model, TLS", "keepd-fake", seconds, 1000, 100, 4, "--max-num-seqs", "900", *flags, env=steps)
        drain("No model, TLS", "keepd-fake", 500, 100, 4, "--max-num-seqs", "128", *flags, env=steps)


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15
    steps = {"KEEPD_FAKE_STEP_US": "20000", "KEEPD_FAKE_PREFILL_STEPS": "10"}
    if sys.argv[2:] != ["tls"]:
        plain(seconds, steps)
    over_tls(seconds, steps)
    write_summary(seconds, sys.argv[2:])
    print("FAILED: " + "; ".join(FAILED) if FAILED else "All of it holds.")
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
