"""A daemon that is timed over HTTP, and requests that run side by side in it."""
import collections
import http.client
import json
import pathlib
import queue
import re
import subprocess
import threading
import time

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
POLL = 0.05  # seconds between looks at the daemon
LLAMA_8B = {  # the shape of Llama-3.1-8B, for random weights that nothing ends
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "bos_token_id": None, "eos_token_id": None}

QWEN_06B = {  # and that of Qwen3-0.6B
    **LLAMA_8B, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": True}


class Trouble(Exception):
    """The daemon did not do what was asked; the text ends with the end of its log."""


class Daemon:
    """One running keepd, from its ready line to the end of the with block. `environment` is all of its own. After
    `seconds` it is killed, so that nobody who waits for it waits longer. It stays in the process group of who starts it,
    and so ends with a step that is killed: left behind, it would keep the GPU's memory."""

    def __init__(self, keepd, model, log, flags=(), environment=None, seconds=300):
        self.log = pathlib.Path(log)
        command = [str(keepd), "--model", str(model), "--port", "0", "--served-model-name", "m", *map(str, flags)]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True,
                                            env=environment)
        self.late = threading.Timer(seconds, self.process.kill)
        self.late.daemon = True
        self.late.start()
        lines = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        try:
            self.ready_line = self._wait_ready(lines)
            self.port = int(re.search(r"http://127\.0\.0\.1:(\d+)", self.ready_line)[1])
        except BaseException:
            self.close()
            raise

    def _read(self, lines):
        for line in self.process.stdout:
            lines.put(line)
        lines.put(None)

    def _wait_ready(self, lines):
        while (line := lines.get()) is not None:
            if line.startswith("keepd ready at "):
                return line
        raise self.trouble(f"it ended before it was ready, status {self.process.wait()}")

    def trouble(self, what):
        return Trouble(f"{what}\n{self.log.read_text(errors='replace')[-1500:]}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.late.cancel()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                pass  # the process hangs in the driver; who started us kills the group

    # -- asking ------------------------------------------------------------------------------------

    def connection(self, timeout=300):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def send(self, connection, path, body):
        """One request over a connection; its answer. Other than 200 is trouble."""
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise self.trouble(f"{path}: {answer.status} {text[:500].decode(errors='replace')}")
        return text

    def ask(self, path, body=None):
        connection = self.connection()
        try:
            return json.loads(self.send(connection, path, body))
        finally:
            connection.close()

    def kv(self):
        return self.ask("/kv")

    def metrics(self):
        """By name, those of all labels added up."""
        connection, sums = self.connection(), collections.Counter()
        try:
            text = self.send(connection, "/metrics", None).decode()
        finally:
            connection.close()
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                sums[name.split("{")[0]] += float(value)
        return sums

    def generated(self):
        return self.metrics()["vllm:generation_tokens_total"]

    def pages_for(self, tokens):
        """Pages that a sequence of `tokens` tokens needs if nothing is evicted."""
        kv = self.kv()
        return -(-tokens // kv["pool"]["page_slots"]) * kv["layers"] * kv["heads_kv"]


class Together:
    """Requests that run at the same time, each over a connection of its own; whatever still runs at the end of the
    with block is given up, and the daemon is waited for."""

    def __init__(self, daemon, path, bodies):
        self.daemon, self.path = daemon, path
        self.connections = [daemon.connection() for _ in bodies]
        self.answers, self.errors, self.closing = {}, [], False
        self.threads = [threading.Thread(target=self._one, args=(i, body), daemon=True) for i, body in enumerate(bodies)]

    def _one(self, i, body):
        try:
            self.answers[i] = json.loads(self.daemon.send(self.connections[i], self.path, body))
        except Exception as error:  # noqa: BLE001: kept for who waits
            if not self.closing:
                self.errors.append(error)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def check(self):
        if self.errors:
            raise self.errors[0]
        if self.daemon.process.poll() is not None:
            raise self.daemon.trouble(f"it ended, status {self.daemon.process.returncode}")

    def results(self):
        for thread in self.threads:
            thread.join()
        self.check()
        return [self.answers[i] for i in range(len(self.threads))]

    def __exit__(self, *_):
        self.closing = True
        for connection in self.connections:
            if connection.sock:
                try:
                    connection.sock.shutdown(2)
                except OSError:
                    pass
        for thread in self.threads:
            thread.join(10)
        end = time.monotonic() + 30
        while time.monotonic() < end and self.daemon.process.poll() is None and self.daemon.kv()["running_count"]:
            time.sleep(POLL)


def wait(together, seconds, condition):
    """Waits until `condition` returns a true value, and returns it."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        together.check()
        if time.monotonic() > end:
            raise together.daemon.trouble(f"not reached after {seconds:.0f} s")
        time.sleep(POLL)
    return value


def steady_rate(daemon, bodies, skip, window, patience):
    """Tokens per second that `bodies` (of /v1/completions, with ignore_eos) generate together, from the moment when each has
    made `skip` tokens, over `window` more of each; pages in use then. They must be long enough that none ends before, which
    is checked. Prompts are no part of it: `skip` is past the last of them."""
    count = len(bodies)

    def all_run():
        rows = daemon.kv()["running"]
        return len(rows) == count and all(r["completion_tokens"] >= skip for r in rows)

    with Together(daemon, TEXT, bodies) as together:
        wait(together, patience, all_run)
        begun, first = time.monotonic(), daemon.generated()
        wait(together, patience, lambda: daemon.generated() >= first + window * count)
        last, ended = daemon.generated(), time.monotonic()
        kv = daemon.kv()
        if kv["running_count"] != count:
            raise daemon.trouble(f"only {kv['running_count']} of {count} still ran at the end of the window")
    return (last - first) / (ended - begun), kv["pool"]["pages_used"]


def prompt(tokens, which, vocabulary=1900):
    """Tokens that agree with no other `which` after the first few."""
    state, ids = which * 2654435761 + 1, []
    for _ in range(tokens):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        ids.append(5 + (state >> 8) % vocabulary)
    return ids


def body(ids, max_tokens, policy, reuse=False, retain=False, **kv):
    return {"model": "m", "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "speculate": 0, "temperature": 0,
            "kv": {"policy": policy, "reuse": reuse, "retain": retain, **kv}}
