"""The framework of bench/gpu/check: timed steps with time limits, result rows, goals, results on disk.

A step that fails, hangs or raises is recorded and does not stop the others. Processes that a step started end
with it. The results are written after every step, so losing the machine loses only the remaining steps.
"""
import collections
import contextlib
import dataclasses
import datetime
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT_OUTPUT = 3000  # characters of a failed step's output that the results keep
LOG_BYTES = 1 << 20  # and bytes of any step's output that the archive of logs keeps, its end
KILLED_SECONDS = 10  # how long a killed process is waited for; one that hangs in the driver never ends

Gpu = collections.namedtuple("Gpu", "name mib driver")
# Known rates of devices: bytes read per second, FLOP/s in bf16. For other devices the measured rates count.
Rates = collections.namedtuple("Rates", "bytes flops")
KNOWN_RATES = {"h200": Rates(4.3e12, 790e12), "h100": Rates(3.0e12, 790e12)}


class LeftOut(Exception):
    """Raised by a part that cannot run here; the text says why."""


def parse_gpus(text):
    """`nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader`, a GPU a line. Fields that it
    does not know ("[N/A]") are None; what is no line of three fields (a warning) is passed over."""
    gpus = []
    for line in text.splitlines():
        fields = [f.strip() for f in line.split(",")]
        if len(fields) != 3 or not fields[0] or fields[0].startswith("["):
            continue
        memory = re.fullmatch(r"(\d+)(?: MiB)?", fields[1])
        gpus.append(Gpu(fields[0], int(memory[1]) if memory else None, None if fields[2].startswith("[") else fields[2]))
    return gpus


def find_gpus():
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    try:
        done = subprocess.run([tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], text=True,
                              capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_capability(text):
    """The compute capability in `nvidia-smi --query-gpu=compute_cap --format=csv,noheader`, 90 = 9.0, which also stands for a
    driver that does not say."""
    found = re.match(r"\s*(\d+)\.(\d)\s*$", text.partition("\n")[0])
    return 10 * int(found[1]) + int(found[2]) if found else 90


def find_capability():
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], text=True, capture_output=True, timeout=30,
                              check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 90
    return parse_capability(done.stdout)


def short_name(gpu):
    """For file names: h200 of "NVIDIA H200", h100 of "NVIDIA H100 80GB HBM3", a100 of "NVIDIA A100-SXM4-80GB"."""
    model = re.search(r"\b[A-Z]{1,2}\d+[A-Z]?\b", gpu)
    text = model[0] if model else re.sub(r"^NVIDIA ", "", gpu)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "gpu"


@dataclasses.dataclass
class Llama:
    """Llama-3.1-8B by default, for the roofline: a step reads every weight once and each sequence's entries."""
    layers: int = 32
    d: int = 4096
    ff: int = 14336
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    vocab: int = 128256

    def parameters(self):
        rows = self.heads + 2 * self.heads_kv
        layer = self.d * self.head_dim * (rows + self.heads) + 3 * self.d * self.ff
        return self.layers * layer + self.vocab * self.d

    def token_bytes(self):
        return 2 * 2 * self.layers * self.heads_kv * self.head_dim

    def step_seconds(self, rates, batch, entries):
        """Weights in bf16 are read or multiplied, whichever takes longer, then the entries of all sequences are read."""
        products = max(2 * self.parameters() / rates.bytes, 2 * self.parameters() * batch / rates.flops)
        return products + batch * entries * self.token_bytes() / rates.bytes

    def tokens_per_second(self, rates, batch, entries):
        return batch / self.step_seconds(rates, batch, entries)


class Check:
    """Steps and what they found. Steps may run on several threads."""

    def __init__(self, out, seconds, device, results=None, echo=print, patient=False, commit=None):
        """`patient`: steps have no limits of their own, for a machine that is slow or busy."""
        self.out, self.device, self.results, self.echo, self.patient = pathlib.Path(out), device, results, echo, patient
        self.commit = commit or first_line("git", "rev-parse", "HEAD")
        self.out.mkdir(parents=True, exist_ok=True)
        self.begun, self.begun_at = time.monotonic(), time.time() - 1
        self.deadline = self.begun + seconds
        self.steps, self.rows, self.goals, self.left_out = [], [], [], []
        self.environment = dict(os.environ)
        self.ours = {}  # more of it, for the programs under test
        self.lock = threading.RLock()

    def remaining(self):
        return self.deadline - time.monotonic()

    def seconds_for(self, limit):
        return self.remaining() if self.patient else min(limit, self.remaining())

    def left(self, what):
        with self.lock:
            self.left_out.append(what)
        self.echo(f"-- left out: {what}")

    def record(self, name, ok, seconds, output=""):
        with self.lock:
            self.steps.append({"name": name, "ok": bool(ok), "seconds": round(seconds, 2), "output": output})
        self.echo(f"== {time.monotonic() - self.begun:5.0f} s  {name}: {'ok' if ok else 'FAILED'} in {seconds:.1f} s")
        if not ok:
            print(output, file=sys.stderr, flush=True)
        self.write()

    def row(self, name, value, unit, prediction="", key=""):
        """`key`: what goals know it by."""
        with self.lock:
            self.rows.append({"key": key, "name": name, "value": value, "unit": unit, "prediction": prediction})
        self.echo(f"   {name:<86} {value:>10.4g} {unit:<8} {prediction}")

    def keyed(self, key, of=max):
        """The largest value (or the least) of the rows with this key; None: not measured."""
        with self.lock:
            return of((r["value"] for r in self.rows if r["key"] == key), default=None)

    def goal(self, what, value, wanted, unit, most=False):
        """A goal: a minimum, or with `most` a maximum. A value of None was not measured."""
        met = None if value is None else bool(value <= wanted if most else value >= wanted)
        with self.lock:
            self.goals.append({"what": what, "value": value, "goal": wanted, "most": most, "unit": unit, "met": met})

    def step(self, name, command, limit=240, environment=None, partly=False, judge=None):
        """Runs a command until it ends, its limit passes or no time is left. Its standard output; of one that failed None,
        or with `partly` what it had written by then. `judge`: of status and both outputs, what failed, or an empty text."""
        seconds = self.seconds_for(limit)
        if seconds < 1:
            self.left(f"{name}: no time was left")
            return None
        start = time.monotonic()
        code, text, both = run_group([str(c) for c in command], seconds, {**self.environment, **(environment or {})})
        self.log(name, both)
        failure = judge(code, both) if judge else both or f"status {code}" if code else ""
        if failure:
            self.record(name, False, time.monotonic() - start, failure[-KEPT_OUTPUT:])
            return text if partly else None
        self.record(name, True, time.monotonic() - start, "\n".join(both.strip().splitlines()[-1:]))
        return text

    def run(self, name, part, *arguments, least=5):
        """A step in Python: what it raises fails it alone. What it returns, or None. `least`: seconds it takes at least."""
        if self.remaining() < least:
            self.left(f"{name}: no time was left")
            return None
        start = time.monotonic()
        try:
            result = part(*arguments)
        except LeftOut as why:
            self.left(f"{name}: {why}")
            return None
        except (Exception, SystemExit) as error:  # the other steps continue in any case
            self.record(name, False, time.monotonic() - start, "".join(traceback.format_exception(error))[-KEPT_OUTPUT:])
            return None
        self.record(name, True, time.monotonic() - start)
        return result

    def guard(self, name, part, *arguments):
        """Calls what has steps of its own: only what it raises is a failed step."""
        start = time.monotonic()
        try:
            return part(*arguments)
        except LeftOut as why:
            self.left(f"{name}: {why}")
            return None
        except Exception:  # noqa: BLE001: the other parts go on
            self.record(name, False, time.monotonic() - start, traceback.format_exc()[-KEPT_OUTPUT:])
            return None

    @property
    def failed(self):
        return [s["name"] for s in self.steps if not s["ok"]]

    # -- results -------------------------------------------------------------------------------------

    def log(self, name, text):
        """Keeps what a step wrote."""
        folder = self.out / "logs"
        folder.mkdir(exist_ok=True)
        (folder / (re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") + ".log")).write_text(text)

    def pack_logs(self):
        """All logs of the run as one file beside the results, of each its end."""
        path = (self.results or self.out / "result").with_suffix(".logs.tar.xz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:xz") as packed:
            for file in sorted([*self.out.glob("logs/*.log"), *self.out.glob("*.log")]):
                if file.stat().st_mtime < self.begun_at:
                    continue  # an earlier run's
                data = file.read_bytes()[-LOG_BYTES:]
                entry = tarfile.TarInfo(file.name)
                entry.size = len(data)
                packed.addfile(entry, io.BytesIO(data))
        return path

    def result(self):
        with self.lock:
            return {"device": self.device, "date": datetime.date.today().isoformat(), "commit": self.commit,
                    "changed": bool(first_line("git", "status", "--porcelain", "--untracked-files=no")),
                    "nvcc": last_line("nvcc", "--version"), "seconds": round(time.monotonic() - self.begun, 1),
                    "goals": list(self.goals), "timing": list(self.rows), "steps": list(self.steps), "left_out": list(self.left_out)}

    def write(self):
        """All so far, as JSON and Markdown, each file whole at any moment."""
        result = self.result()
        path = self.results or self.out / "result"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
        replace(path.with_suffix(".md"), markdown(result))
        return path


def replace(path, text):
    fresh = path.with_name(path.name + f".{os.getpid()}.{threading.get_ident()}")
    fresh.write_text(text)
    os.replace(fresh, path)


def first_line(*command):
    return (output_lines(command) or [None])[0]


def last_line(*command):
    return (output_lines(command) or [None])[-1]


def output_lines(command):
    if not shutil.which(command[0]):
        return []
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def run_group(command, seconds, environment):
    """(status, standard output, both outputs) of a command in a process group of its own; all of it is killed when the
    time is up, which is status -1."""
    try:
        process = subprocess.Popen(command, cwd=ROOT, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env=environment, start_new_session=True)
    except OSError as error:
        return -1, "", str(error)
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, out + err
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = last_output(process)
        return -1, out, f"{out}{err}\nno end after {seconds:.0f} s"
    finally:
        kill_group(process)  # ends processes that the step left running


def last_output(process):
    try:
        return process.communicate(timeout=KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"it is killed and has not ended after {KILLED_SECONDS} s"


def kill_group(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def cell(text):
    return str(text if text is not None else "").replace("|", "\\|").replace("\n", " ")


def table(head, aligned, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(aligned) + "|"]
    return lines + ["| " + " | ".join(cell(c) for c in row) + " |" for row in rows] + [""]


def markdown(result):
    changed = ", with changes" if result["changed"] else ""
    lines = [f"# {result['device']}, {result['date']}", "", f"Commit {result['commit']}{changed}; {result['nvcc']}; "
             f"{result['seconds']:.0f} s in all.", ""]
    words = {True: "met", False: "**missed**", None: "not measured"}
    if result["goals"]:
        lines += table(["goal", "wanted", "measured", "unit", ""], ["---", "--:", "--:", "---", "---"],
                       [(g["what"], f"{'at most ' if g['most'] else ''}{g['goal']:.4g}", "" if g["value"] is None else f"{g['value']:.4g}", g["unit"], words[g["met"]])
                        for g in result["goals"]])
    if result["timing"]:
        lines += table(["what", "measured", "unit", "predicted"], ["---", "--:", "---", "---"],
                       [(r["name"], f"{r['value']:.4g}", r["unit"], r["prediction"]) for r in result["timing"]])
    lines += table(["step", "", "seconds"], ["---", "---", "--:"],
                   [(s["name"], "ok" if s["ok"] else "**FAILED**", s["seconds"]) for s in result["steps"]])
    return "\n".join(lines + [f"- Left out: {what}" for what in result["left_out"]]).rstrip() + "\n"
