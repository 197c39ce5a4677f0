"""One daemon with several models: each is loaded when a request names it, and makes room for others."""
import concurrent.futures
import json
import os
import random
import re
import signal
import subprocess
import threading
import time

import pytest
import requests

from conftest import BINARY, FAKE, ROOT, Daemon, narrow_socket, read_all, read_until, request_bytes, unchunked
from test_resume import split

pytestmark = pytest.mark.skipif(not FAKE, reason="skip: the models are the fake's")

NAMES = ["a", "b", "c"]


class Many(Daemon):
    """A daemon with models that are directories of these names."""

    def __init__(self, folder, *flags, names=NAMES, env=None, timeouts="", **fake):
        self.folders = {}
        models = []
        for name in names:
            self.folders[name] = folder / name
            self.folders[name].mkdir(exist_ok=True)
            models += ["--model", f"{name},{name}-alias={folder / name}"]
        env = {**os.environ, "KEEPD_TEST_TIMEOUTS": timeouts, **(env or {}),
               **{f"KEEPD_FAKE_{k}": str(v) for k, v in fake.items()}}
        self.process = subprocess.Popen([BINARY, *models, "--port", "0", *flags], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, env=env, text=True)
        self.errors = []
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True).start()
        self.ready_line = self.process.stdout.readline()
        assert self.ready_line.startswith("keepd ready at "), self.errors
        self.url = self.ready_line.split()[3]
        self.port = int(self.url.rsplit(":", 1)[1])
        self.http = requests.Session()

    def ask(self, model, text="hello", **fields):
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        return requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def models(self):
        return {m["id"]: m for m in requests.get(f"{self.url}/v1/models", timeout=60).json()["data"]}

    def states(self):
        return {name: m["status"]["value"] for name, m in self.models().items() if "-alias" not in name}

    def model_metric(self, name, model):
        for line in requests.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith(f'{name}{{model_name="{model}"'):
                return float(line.rsplit(" ", 1)[1])
        return None


@pytest.fixture
def many(tmp_path):
    opened = []

    def start(*flags, **options):
        opened.append(Many(tmp_path, *flags, **options))
        return opened[-1]
    yield start
    for daemon in opened:
        assert daemon.stop() == 0, daemon.errors[-5:]


def test_models_are_loaded_when_they_are_asked_for(many):
    daemon = many()
    assert "3 models" in daemon.ready_line
    assert daemon.states() == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
    assert daemon.get("/health").status_code == 200 and daemon.get("/is_sleeping").json()["is_sleeping"] is True
    r = daemon.ask("b")
    assert r.status_code == 200 and r.json()["model"] == "b", r.text
    assert daemon.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    assert daemon.ask("c-alias").json()["model"] == "c"
    assert daemon.models()["c-alias"]["root"] == "c" and daemon.models()["c"]["memory_bytes"] == 100 << 20
    assert daemon.model_metric("keepd_model_loads_total", "b") == 1
    assert daemon.model_metric("keepd_model_loaded", "a") == 0 and daemon.model_metric("keepd_model_loaded", "c") == 1
    assert daemon.get("/server_info?model=c").json()["served_model_name"] == "c"
    assert daemon.get("/server_info").json()["served_model_name"] == "b"
    r = daemon.get("/props?model=a")
    assert r.status_code == 503 and r.json()["error"]["code"] == "model_not_loaded"
    assert daemon.get("/props?model=x").status_code == 404
    # A request that names none gets the first model.
    r = daemon.post("/v1/completions", {"prompt": "hello", "max_tokens": 4})
    assert r.json()["model"] == "a"
    assert daemon.post("/tokenize", {"model": "b", "prompt": "hello"}).json()["count"] == 5


def test_a_model_that_is_not_there_is_refused_with_those_that_are(many):
    daemon = many()
    for name in ("x", "A", "a ", "a-alias-"):
        r = daemon.ask(name)
        assert r.status_code == 404 and r.json()["error"]["code"] == "model_not_found"
        assert "`a`, `b`, `c`" in r.json()["error"]["message"]
    assert daemon.states() == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
    # The name is found as JSON has it, wherever it stands.
    for text in ('{"prompt":"\\"model\\": \\"a\\"","model":"b","max_tokens":2}',
                 '{"stop":["model",":"],"model" : "\\u0062","prompt":"x","max_tokens":2}',
                 '{"metadata":{"model":"c"},"prompt":"x","max_tokens":2,"model":"b"}'):
        r = requests.post(f"{daemon.url}/v1/completions", data=text, headers={"Content-Type": "application/json"},
                          timeout=60)
        assert r.status_code == 200 and r.json()["model"] == "b", (text, r.text)
    for text in ("", "{", '{"model":', '{"model":"b"', '["model","b"]', '{"model":7,"prompt":"x"}', '"model"'):
        r = requests.post(f"{daemon.url}/v1/completions", data=text, headers={"Content-Type": "application/json"},
                          timeout=60)
        assert r.status_code == 400, (text, r.text)


def test_the_least_recently_used_model_makes_room(many):
    daemon = many("--models-memory", "250M", "--model-residence", "0")
    for model in ("a", "b"):
        assert daemon.ask(model).status_code == 200
    assert daemon.ask("a").status_code == 200
    assert daemon.ask("c").status_code == 200
    assert daemon.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert daemon.model_metric("keepd_model_unloads_total", "b") == 1
    # The counts of b stay.
    assert daemon.model_metric("vllm:generation_tokens_total", "b") > 0
    assert daemon.ask("b").status_code == 200
    assert daemon.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}


def test_models_share_what_is_free_where_they_are_held(many):
    """Without --models-memory they get three quarters of it; the engine knows where they are held."""
    daemon = many("--model-residence", "0", UNUSED=200)
    for model in ("a", "b", "a"):
        assert daemon.ask(model).status_code == 200
        assert list(daemon.states().values()).count("loaded") == 1


def test_pinned_models_stay(many):
    daemon = many("--models-memory", "250M", "--model-residence", "0", "--pin", "b", "--model-idle", "1")
    daemon.wait("the pinned model", lambda: daemon.states()["b"] == "loaded")
    for model in ("a", "c", "a", "c"):
        assert daemon.ask(model).status_code == 200
        assert daemon.states()["b"] == "loaded" and daemon.models()["b"]["pinned"] is True
    daemon.wait("the idle model to leave", lambda: daemon.states()["c"] == "unloaded")
    assert daemon.states()["b"] == "loaded" and daemon.model_metric("keepd_model_loads_total", "b") == 1


def test_a_model_too_large_for_the_memory_is_refused(many):
    daemon = many("--models-memory", "150M", "--pin", "a")
    daemon.wait("the pinned model", lambda: daemon.states()["a"] == "loaded")
    r = daemon.ask("b")
    assert r.status_code == 503 and r.json()["error"]["code"] == "model_too_large", r.text
    assert "pinned ones have 104.9 MB" in r.json()["error"]["message"]
    assert daemon.ask("a").status_code == 200


def test_a_model_that_fails_fails_alone(many, tmp_path):
    daemon = many(names=["a", "b", "broken"])
    assert daemon.states()["broken"] == "failed"
    assert daemon.models()["broken"]["status"]["error"]
    r = daemon.ask("broken")
    assert r.status_code == 500 and "config.json" in r.json()["error"]["message"]
    (daemon.folders["b"] / "fails").touch()
    failed = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(daemon.ask, ["b", "a", "b", "a", "b"]))
    assert [r.status_code for r in answers] == [503, 200, 503, 200, 503]
    assert "no memory" in answers[0].json()["error"]["message"] and 1 <= int(answers[0].headers["Retry-After"]) <= 10
    assert daemon.states() == {"a": "loaded", "b": "failed", "broken": "failed"}
    (daemon.folders["b"] / "fails").unlink()
    failures = daemon.model_metric("keepd_model_load_failures_total", "b")
    # The model is tried again, but not at once.
    daemon.wait("another try", lambda: daemon.ask("b").status_code == 200)
    assert daemon.model_metric("keepd_model_load_failures_total", "b") == failures
    assert time.monotonic() - failed > 9


def test_running_requests_are_not_cut(many):
    daemon = many("--models-memory", "150M", "--model-residence", "0", STEP_US=20000)
    stream = requests.post(f"{daemon.url}/v1/chat/completions", stream=True, timeout=60, json={
        "model": "a", "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 200, "stream": True})
    lines = stream.iter_lines()
    assert next(lines)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        other = pool.submit(daemon.ask, "b")
        daemon.wait("b to wait", lambda: daemon.models()["b"]["requests_waiting"] == 1)
        # New requests for a wait behind the one for b, so that b gets its turn.
        late = pool.submit(daemon.ask, "a")
        daemon.wait("a to wait", lambda: daemon.models()["a"]["requests_waiting"] == 1)
        assert daemon.states()["a"] == "loaded" and not other.done()
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        assert other.result().json()["model"] == "b" and late.result().json()["model"] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_slowly_holds_no_model(many, stream):
    """The model leaves once its work for the answer has ended; the client still gets the answer."""
    daemon = many("--models-memory", "150M", "--model-residence", "0", timeouts="stall=600000")
    count = 2000 if stream else 8000  # more bytes than lie in sockets
    body = {"model": "a", "prompt": "x", "max_tokens": count, "ignore_eos": True, "logprobs": 20, "stream": stream}
    with narrow_socket(daemon) as slow:
        slow.sendall(request_bytes("/v1/completions", body, "Connection: close"))
        daemon.wait("the tokens", lambda: daemon.model_metric("vllm:generation_tokens_total", "a") == count)
        assert daemon.ask("b").json()["model"] == "b"
        assert daemon.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        answer = read_all(slow)
    assert len(answer) > 1_000_000
    answer = re.sub(rb"\r\n[0-9a-fA-F]+\r\n(?!\r\n)", b"", answer)  # a chunk may begin in the middle of a word
    assert answer.count(b'"text_offset"') == (2000 if stream else 1)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


@pytest.mark.parametrize("stays", [True, False], ids=["its client stays", "its client leaves"])
def test_slow_readers_of_a_response_in_the_background_hold_no_model(many, stays):
    daemon = many("--models-memory", "150M", "--model-residence", "0", timeouts="stall=600000", STEP_US=1000)
    body = {"model": "a", "input": "x" * 250, "max_output_tokens": 300, "background": True, "stream": True,
            "include": ["message.output_text.logprobs"], "top_logprobs": 20}
    with narrow_socket(daemon) as client, narrow_socket(daemon) as reader, narrow_socket(daemon) as late:
        client.sendall(request_bytes("/v1/responses", body, "Connection: close"))
        begun = {client: read_until(client, b"\n\n")}
        path = "/v1/responses/resp_" + begun[client].split(b'"id":"resp_')[1].split(b'"')[0].decode()
        for sock, after in ((reader, ""), (late, "&starting_after=99")):
            sock.sendall(f"GET {path}?stream=true{after} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            begun[sock] = read_until(sock, b"\r\n\r\n")
        if not stays:
            client.close()
        daemon.wait("its end", lambda: any("outcome=stored" in line for line in daemon.errors))
        assert daemon.ask("b").json()["model"] == "b"
        assert daemon.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        whole = split(daemon.get(path, params={"stream": "true"}).content)
        assert len(b"".join(whole)) > 1_000_000, "more than lies in sockets"
        read = {sock: split(unchunked(begun[sock] + read_all(sock))) for sock in begun if stays or sock is not client}
    assert read.pop(late) == whole[100:] and all(found == whole for found in read.values())


def test_each_model_gets_its_turn(many):
    daemon = many("--models-memory", "150M", "--model-residence", "0", "--model-loads", "0", STEP_US=2000)
    end = time.monotonic() + 60
    answers = {name: 0 for name in NAMES}

    def client(name):
        while min(answers.values()) <= 5 and time.monotonic() < end:
            r = daemon.ask(name, "some words")
            assert r.status_code == 200 and r.json()["model"] == name, r.text
            answers[name] += 1
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        for job in [pool.submit(client, NAMES[i % 3]) for i in range(9)]:
            job.result()
    assert min(answers.values()) > 5, answers


def test_two_busy_models_keep_no_third_one_waiting(many):
    daemon = many("--models-memory", "250M", "--model-residence", "0", STEP_US=20000)
    asked = threading.Event()
    answers = {"a": 0, "b": 0}

    def client(name, delay):
        time.sleep(delay)
        while not asked.is_set():
            assert daemon.ask(name, "x" * 50, max_tokens=50).status_code == 200
            answers[name] += 1
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        jobs = [pool.submit(client, "ab"[i % 2], i * 0.3) for i in range(6)]
        try:
            daemon.wait("two busy models", lambda: min(answers.values()) > 2)
            assert daemon.ask("c", max_tokens=2).json()["model"] == "c"  # while the others ask again and again
        finally:
            asked.set()
        for job in jobs:
            job.result()


def test_a_model_that_is_replaced_is_checked_again(many):
    daemon = many("--models-memory", "250M", "--model-residence", "0")
    for name in ("a", "b", "c"):
        assert daemon.ask(name).status_code == 200
    (daemon.folders["a"] / "large").touch()
    r = daemon.ask("a")
    assert r.status_code == 503 and r.json()["error"]["code"] == "model_too_large", r.text
    (daemon.folders["a"] / "large").unlink()
    assert daemon.ask("a").status_code == 200


def test_a_start_with_several_models_says_that_it_is_open(many):
    daemon = many("--host", "0.0.0.0")
    daemon.wait("the warning", lambda: any("everybody who reaches" in line for line in daemon.errors))


def test_loads_in_a_minute_are_bounded(many):
    daemon = many("--models-memory", "150M", "--model-residence", "0", "--model-loads", "2")
    began = time.monotonic()
    assert [daemon.ask(name).status_code for name in ("a", "b", "b", "b")] == [200] * 4
    r = daemon.ask("c")
    assert r.status_code == 503 and r.json()["error"]["code"] == "model_loads_exceeded", r.text
    assert 30 - (time.monotonic() - began) <= int(r.headers["Retry-After"]) <= 31
    assert daemon.ask("b").status_code == 200
    assert daemon.metrics()["keepd_requests_rejected_total", ("reason", "model")] == 1


def test_a_model_stays_for_a_while(many):
    daemon = many("--models-memory", "150M", "--model-residence", "2")
    began = time.monotonic()
    assert daemon.ask("a").status_code == 200 and daemon.ask("b").status_code == 200
    assert time.monotonic() - began > 1.9


def test_requests_that_wait_have_bounds(many):
    daemon = many("--max-queue", "2", "--request-timeout", "1", LOAD_MS=3000)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(daemon.ask, ["a"] * 4))
    codes = sorted(r.status_code for r in answers)
    assert codes[0] == 408 and codes[-1] in (429, 503) and set(codes) <= {408, 429, 503}, codes
    assert daemon.states()["a"] in ("loading", "loaded")
    daemon.wait("the load", lambda: daemon.states()["a"] == "loaded")
    assert daemon.ask("a").status_code == 200


def test_clients_that_leave_wait_no_longer(many):
    daemon = many(LOAD_MS=3000)
    for _ in range(3):
        with pytest.raises(requests.Timeout):
            requests.post(f"{daemon.url}/v1/completions", json={"model": "a", "prompt": "x"}, timeout=0.2)
    daemon.wait("nobody to wait", lambda: daemon.models()["a"]["requests_waiting"] == 0)
    assert daemon.ask("a").status_code == 200


def test_a_stop_while_a_model_is_loaded_answers_those_who_wait(many):
    daemon = many(LOAD_MS=1500)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = pool.submit(daemon.ask, "a")
        daemon.wait("the load", lambda: daemon.states()["a"] == "loading")
        daemon.process.send_signal(signal.SIGTERM)
        assert asked.result().status_code == 200
    assert daemon.process.wait(timeout=30) == 0


def test_a_second_signal_gives_them_up(many):
    daemon = many(LOAD_MS=20000)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = pool.submit(daemon.ask, "a")
        daemon.wait("the load", lambda: daemon.states()["a"] == "loading")
        for _ in range(2):
            daemon.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert asked.result().status_code == 503
    assert daemon.process.wait(timeout=30) == 0


@pytest.mark.parametrize("asked", [False, True], ids=["pinned", "given up"])
def test_a_load_for_nobody_does_not_delay_a_stop(many, asked):
    """A load of a minute ends at the next part of it."""
    flags = ["--drain-seconds", "1"] if asked else ["--pin", "a"]
    daemon = many(*flags, LOAD_MS=60000)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(daemon.ask, "a") if asked else None
        daemon.wait("the load", lambda: daemon.states()["a"] == "loading")
        daemon.process.send_signal(signal.SIGTERM)
        assert not asked or answer.result().status_code == 503
    assert daemon.process.wait(timeout=30) == 0
    assert any("not loaded any further" in line for line in daemon.errors)


def test_the_example_of_the_docs_is_served(tmp_path):
    page = (ROOT / "docs/OPERATIONS.md").read_text()
    text = page[page.index("<!-- test: models -->"):].split("```ini\n")[1].split("```")[0]
    (tmp_path / "keepd.conf").write_text(text)
    flags = [BINARY, "--config", tmp_path / "keepd.conf", "--port", "0"]
    checked = subprocess.run([*flags, "--check-config"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen(flags, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[3]
        for name, policy, temperature in (("chat", "global", 1), ("code", "full", 0.2)):
            r = requests.post(f"{url}/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1}, timeout=60)
            assert r.status_code == 200 and r.json()["model"] == name
            info = requests.get(f"{url}/server_info?model={name}", timeout=60).json()
            assert info["kv_policy"] == policy and info["kv_budget"] == (512 if name == "chat" else 1024)
            props = requests.get(f"{url}/props?model={name}", timeout=60).json()
            sampling = props["default_generation_settings"]["params"]
            assert sampling["temperature"] == pytest.approx(temperature)
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("command", [["bench"], ["fit"], ["--quantize-to", "x"]], ids=lambda c: c[0])
def test_commands_for_one_model_refuse_several(tmp_path, command):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    run = subprocess.run([BINARY, *command, "--model", f"a,c={tmp_path / 'a'}", "--model", tmp_path / "b"], cwd=tmp_path,
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 78 and run.stdout == ""
    assert f"{command[0]} takes one model, and 2 are given: a, b;" in run.stderr, run.stderr


def test_bench_has_the_options_of_the_only_section(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "keepd.conf").write_text(f"[a]\nmodel = {tmp_path / 'a'}\nkv-policy = none-such\n")
    run = subprocess.run([BINARY, "bench", "--config", tmp_path / "keepd.conf"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 78 and "kv-policy: 'none-such' is not one of" in run.stderr, run.stderr


def test_a_reload_reports_what_changed_in_sections(tmp_path):
    file, text = tmp_path / "keepd.conf", "log-level = error\n[a]\nmodel = {0}/a\nkv-budget = {1}\n[b]\nmodel = {0}/b\n"
    file.write_text(text.format(tmp_path, 512))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    daemon = Many(tmp_path, "--config", str(file), names=[])
    file.write_text(text.format(tmp_path, 256))
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the report", lambda: any("reload: [a] kv-budget changed; restart to apply" in line for line in daemon.errors))
    assert daemon.stop() == 0


def test_a_folder_of_models_is_served(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for name in ("three.gguf", "four-00001-of-00002.gguf", "four-00002-of-00002.gguf", "mmproj-x.gguf", "notes.txt",
                 "state-of-art.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    daemon = Many(tmp_path, "--models-dir", tmp_path, names=[])
    assert set(daemon.states()) == {"four-00001-of-00002", "one", "state-of-art", "three", "two"}
    assert daemon.stop() == 0


def test_an_idle_model_sleeps(many):
    daemon = many("--model-idle", "1", names=["a"])
    assert "(model a," in daemon.ready_line and daemon.model_metric("keepd_model_loads_total", "a") == 1
    awake, slots = daemon.get("/props").json(), daemon.get("/slots").json()
    assert awake["is_sleeping"] is False
    daemon.wait("sleep", lambda: daemon.states()["a"] == "unloaded")
    assert daemon.get("/is_sleeping").json()["is_sleeping"] is True
    # Routes that only describe the model answer as before, and do not wake it.
    assert daemon.get("/props").json() == daemon.get("/props?model=a").json() == {**awake, "is_sleeping": True}
    assert daemon.get("/slots").json() == slots and daemon.states()["a"] == "unloaded"
    assert daemon.ask("a").status_code == 200
    assert daemon.get("/props").json() == awake
    assert daemon.model_metric("keepd_model_loads_total", "a") == 2


def test_questions_keep_no_model_awake(many):
    daemon = many("--model-idle", "1", names=["a"])

    def sleeps():
        daemon.get("/kv")  # as the page asks
        return daemon.states()["a"] == "unloaded"
    daemon.wait("sleep", sleeps)


def test_a_storm_loses_nothing(many):
    daemon = many("--models-memory", "250M", "--model-residence", "0", "--model-loads", "600", STEP_US=500, LOAD_MS=20,
                  names=["a", "b", "c", "d", "e"])
    names, end = list("abcde"), time.monotonic() + 8
    counts = {"200": 0, "503": 0, "gone": 0}

    def client(seed):
        dice = random.Random(seed)
        while time.monotonic() < end:
            name = dice.choice(names)
            try:
                r = requests.post(f"{daemon.url}/v1/completions", timeout=0.01 if dice.random() < 0.1 else 60,
                                  json={"model": name, "prompt": "words " * dice.randrange(1, 9), "max_tokens": 6})
            except requests.RequestException:
                counts["gone"] += 1
                continue
            assert r.status_code in (200, 503), r.text
            counts[str(r.status_code)] += 1
            if r.status_code == 200:
                assert r.json()["model"] == name
            else:
                assert r.json()["error"]["code"] == "model_loads_exceeded", r.text
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for job in [pool.submit(client, i) for i in range(12)]:
            job.result()
    assert counts["200"] > 50, counts
    held = [m["memory_bytes"] for n, m in daemon.models().items()
            if "-alias" not in n and m["status"]["value"] != "unloaded"]
    assert sum(held) <= 250 << 20
