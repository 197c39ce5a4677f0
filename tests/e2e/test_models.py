"""One daemon, three models, memory for two: clients at random lose nothing, answers are those of each model alone, and
the memory that the operator gave is held. MODELS_SECONDS: how long (20). KEEPD_MODELS="NAME=PATH ...", MODELS_MEMORY:
other models than the bundled one under three names, and their memory; MODELS_POOL: the cache of each; MODELS_FLAGS: more
options."""
import collections
import concurrent.futures
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
NANO = ROOT / "bundled/keepd-nano"
SECONDS = float(os.environ.get("MODELS_SECONDS", 20))
MODELS = dict(m.split("=", 1) for m in os.environ.get("KEEPD_MODELS", "").split()) or {n: NANO for n in ("x", "y", "z")}
MEMORY = int(os.environ.get("MODELS_MEMORY", 200 << 20))
FLAGS = os.environ.get("MODELS_FLAGS", "").split()
POOL = os.environ.get("MODELS_POOL", "48M")
BASE = 128 << 20  # the process without models
TOPICS = ("the garage", "Lisbon", "a list of fruits", "the weather", "two ships", "a proof", "the moon", "a recipe")


class Set:
    def __init__(self, folder):
        flags = [word for name, path in MODELS.items() for word in ("--model", f"{name}={path}")]
        self.process = subprocess.Popen(
            [BINARY, *flags, "--port", "0", "--models-memory", str(MEMORY), "--kv-pool-bytes", POOL, "--kv-policy", "streaming", "--kv-budget", "512",
             "--model-residence", "1", "--model-loads", "120", "--state-dir", str(folder / "state"), "--state-idle", "1",
             "--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--threads", "2", *FLAGS],
            stdout=subprocess.PIPE, stderr=open(folder / "log", "w"), text=True)
        line = self.process.stdout.readline()
        assert "3 models" in line, (folder / "log").read_text()
        self.url = line.split()[3]

    def ask(self, model, messages, **fields):
        while True:
            r = requests.post(f"{self.url}/v1/chat/completions", timeout=300, json={
                "model": model, "messages": messages, "temperature": 0, "max_tokens": 12, **fields})
            if r.status_code != 503:
                break
            assert r.json()["error"]["code"] == "model_loads_exceeded", r.text
            time.sleep(int(r.headers["Retry-After"]))
        assert r.status_code == 200 and r.json()["model"] == model, r.text
        return r.json()

    def resident(self):
        fields = dict(line.split(":", 1) for line in open(f"/proc/{self.process.pid}/status"))
        return int(fields["RssAnon"].split()[0]) << 10


def test_questions_to_own_texts():
    """The example of docs/API.md, with the bundled model for both."""
    page = (ROOT / "docs/API.md").read_text()
    program = page[page.index("<!-- test: rag -->"):].split("```python\n")[1].split("```")[0]
    flags = [word for name in ("embed", "chat") for word in ("--model", f"{name}={NANO}")]
    with subprocess.Popen([BINARY, *flags, "--port", "0", "--kv-pool-bytes", "64M", "--threads", "2"],
                          stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[3]
        run = subprocess.run([sys.executable, "-c", program.replace("http://127.0.0.1:8080", url)], capture_output=True,
                             text=True, timeout=300)
        process.terminate()
    assert run.returncode == 0 and " -> " in run.stdout, run.stderr
    assert process.returncode == 0


def test_three_models_share_the_memory_of_two(tmp_path):
    daemon = Set(tmp_path)
    names, end = list(MODELS), time.monotonic() + SECONDS
    counts, lock, most = collections.Counter(), threading.Lock(), [0]
    answers = {}

    def watch():
        while time.monotonic() < end:
            most[0] = max(most[0], daemon.resident())
            states = requests.get(f"{daemon.url}/v1/models", timeout=60).json()["data"]
            held = sum(m["memory_bytes"] for m in states if m["status"]["value"] in ("loaded", "loading", "unloading"))
            assert held <= MEMORY, states
            time.sleep(0.1)

    def alone(dice):
        """A question that is asked again and again has one answer."""
        name, topic = dice.choice(names), dice.choice(TOPICS)
        r = daemon.ask(name, [{"role": "user", "content": f"Tell me about {topic}."}], kv={"reuse": False, "retain": False})
        text = r["choices"][0]["message"]["content"]
        with lock:
            assert answers.setdefault((name, topic), text) == text, (name, topic)

    def dialogue(dice):
        name, messages = dice.choice(names), []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{dice.random()} {dice.choice(TOPICS)}, please."})
            r = daemon.ask(name, messages)
            messages.append(r["choices"][0]["message"])
            with lock:
                counts["continued"] += turn > 0 and r["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
                counts["turns"] += turn > 0
            time.sleep(dice.random())

    def client(seed):
        dice = random.Random(seed)
        while time.monotonic() < end:
            dice.choice((alone, dialogue))(dice)
            with lock:
                counts["rounds"] += 1

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        for job in [pool.submit(client, i) for i in range(6)] + [pool.submit(watch)]:
            job.result()
    metrics = [line.rsplit(" ", 1) for line in requests.get(f"{daemon.url}/metrics", timeout=60).text.splitlines()]
    loads = sum(float(value) for name, value in metrics if name.startswith("keepd_model_loads_total{"))
    failures = sum(float(value) for name, value in metrics if name.startswith("keepd_model_load_failures_total{"))
    daemon.process.terminate()
    assert daemon.process.wait(timeout=120) == 0
    print(f"{dict(counts)}, {loads:.0f} loads, at most {most[0] / 1e6:.0f} MB of {MEMORY / 1e6:.0f} MB resident")
    assert failures == 0 and loads >= 3 and counts["rounds"] >= 6
    assert counts["continued"] > counts["turns"] // 2, counts  # also after the model was away
    assert most[0] <= MEMORY + BASE
