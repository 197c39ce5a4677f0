"""The daemon, as a client sees it: start one, ask it, read its metrics.

Requests name no model, so that they work with every daemon whatever it serves. $KEEPD_API_KEY is sent where it is set.
"""
import os
import pathlib
import subprocess
import threading
import time

import requests

MODEL = "keepd-nano"          # the name it is served under
TIMEOUT = 900                 # seconds for one answer


class Refused(Exception):
    """The daemon answered 400: what was asked is not offered, or not with these numbers."""

    def __init__(self, error):
        super().__init__(error.get("message", "refused"))
        self.param = error.get("param")


class Daemon:
    """A keepd of our own on a free port; extra arguments are its flags."""

    def __init__(self, binary, model, *flags):
        command = [binary, "--model", model, "--port", "0", "--served-model-name", MODEL, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = None
        for line in self.process.stdout:
            if "http://" in line:
                self.url = line[line.index("http://"):].split()[0].rstrip("/,")
                break
        if self.url is None:
            raise SystemExit(f"{binary} did not become ready (exit {self.process.wait()})")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Client:
    """Requests to one daemon; any thread may use it."""

    def __init__(self, url):
        self.url, self.local = url, threading.local()

    @property
    def http(self):
        if not hasattr(self.local, "session"):
            self.local.session = requests.Session()
            if key := os.environ.get("KEEPD_API_KEY"):
                self.local.session.headers["Authorization"] = f"Bearer {key}"
        return self.local.session

    def post(self, path, body):
        for attempt in range(30):
            try:
                r = self.http.post(self.url + path, json=body, timeout=TIMEOUT)
            except requests.ConnectionError:        # a connection that was idle is closed while the request is on its way
                if attempt == 3:
                    raise
                time.sleep(1)
                continue
            if r.status_code != 503:
                break
            time.sleep(min(10.0, float(r.headers.get("retry-after", 1)) * (1 + attempt / 4)))
        if r.status_code == 400:
            raise Refused(r.json()["error"])
        r.raise_for_status()
        return r.json()

    def tokens(self, messages, prompt=True):
        """Token ids of messages as the template renders them."""
        return self.post("/tokenize", {"messages": messages, "add_generation_prompt": prompt})["tokens"]

    def chat(self, messages, max_tokens, kv, **fields):
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0,
                                                  "max_tokens": max_tokens, "kv": kv, **fields})

    def score(self, ids, kv):
        """Log-probability of every token after the first; echo never continues a conversation."""
        answer = self.post("/v1/completions", {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0,
                                               "temperature": 0, "kv": kv})
        return answer["choices"][0]["logprobs"]["token_logprobs"][1:]

    def metrics(self):
        """Sums of all samples by name."""
        out = {}
        for line in self.http.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if not line.startswith("#") and " " in line:
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0]
                if not name.endswith("_bucket"):
                    out[name] = out.get(name, 0.0) + float(value)
        return out

    def positions(self):
        """The most tokens of a text."""
        r = self.http.get(f"{self.url}/server_info", timeout=30)
        r.raise_for_status()
        return r.json()["max_model_len"]

    def offered(self, method):
        """None where the daemon takes this policy, else why not."""
        try:
            self.post("/v1/completions", {"prompt": "Hello!", "max_tokens": 1, "kv": {"policy": method, "reuse": False, "retain": False}})
            return None
        except Refused as error:
            return str(error)

    def can_fork(self, policy="full"):
        """Can one conversation be continued more than once?"""
        turn = [{"role": "user", "content": "The code of the garage is 4815."},
                {"role": "assistant", "content": "Noted."}, {"role": "user", "content": "Who are you?"}]
        space = f"fork-{time.time_ns()}"
        self.chat(turn[:1], 1, {"policy": policy, "reuse": False}, prompt_cache_key=space)
        for _ in range(2):
            cached = self.continued(self.chat(turn, 1, {"policy": policy, "retain": False}, prompt_cache_key=space))
        return cached > 0

    @staticmethod
    def continued(answer):
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def file_sha(path, digest):
    with pathlib.Path(path).open("rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
