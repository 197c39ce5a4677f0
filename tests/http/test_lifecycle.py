"""Start, ready line, drain, exit codes."""
import contextlib
import functools
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import threading

import pytest
import requests
from conftest import BINARY, MODEL, ROOT, chat_body, read_until, request_bytes

CHAT = "/v1/chat/completions"
MODEL_DIR = str(ROOT / "bundled/keepd-nano")


def run(*flags, timeout=60, env=None):
    if BINARY is None or not BINARY.exists():
        pytest.skip("skip: keepd-fake is not built")
    return subprocess.run([BINARY, *flags], capture_output=True, text=True, timeout=timeout, env=env)


def test_ready_line_and_example(start):
    daemon = start()
    line = daemon.ready_line
    assert line.startswith("keepd ready at http://127.0.0.1:")
    assert f"model {MODEL}" in line and "policy " in line and "budget " in line
    example = ""
    while not example.endswith("]}'\n"):
        example += daemon.process.stdout.readline()
    command = example[example.index("curl "):]
    r = subprocess.run(["sh", "-c", command.replace("curl", "curl -s", 1)], capture_output=True, text=True, timeout=60)
    assert '"object":"chat.completion"' in r.stdout, r


def test_example_of_a_model_without_a_template(start, fake):
    """The printed sample request works: such a model completes text."""
    daemon = start(env={"KEEPD_FAKE_NO_TEMPLATE": "1"})
    example = ""
    while not example.endswith("}'\n"):
        example += daemon.process.stdout.readline()
    command = example[example.index("curl "):]
    r = subprocess.run(["sh", "-c", command.replace("curl", "curl -s", 1)], capture_output=True, text=True, timeout=60)
    assert '"object":"text_completion"' in r.stdout, r


def test_no_task_is_left_for_the_workers(start):
    """Under less and less address space: a daemon that is ready survives a request, and one that cannot be says why. Without memory for a
    connection it is closed."""
    if BINARY is None or b"__asan_init" in BINARY.read_bytes():
        pytest.skip("skip: sanitizers take their own address space")
    status = pathlib.Path(f"/proc/{start().process.pid}/status").read_text()
    size = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) << 10
    flags = ["--model", MODEL_DIR, "--port", "0", "--served-model-name", MODEL]
    while True:
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (size, size))
        process = subprocess.Popen([BINARY, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit)
        line = process.stdout.readline()
        if line.startswith("keepd ready at "):
            with contextlib.suppress(requests.ConnectionError):
                r = requests.post(f"{line.split()[3]}/v1/chat/completions", json=chat_body(max_tokens=1), timeout=60)
                assert r.status_code in (200, 503), r.text
            process.terminate()
        errors = process.communicate(timeout=60)[1]
        if not line:
            break
        assert process.returncode == 0, errors
        size -= 4 << 20
    assert process.returncode == 1 and "worker threads" in errors and "ulimit -v" in errors, errors


def test_progress_is_logged(start):
    """Outside of a terminal the log has two lines about loading: what begins, and what it took."""
    def lines(text):
        return [line for line in daemon.errors if text in line]

    daemon = start()
    daemon.wait("the end of loading", lambda: lines("loaded "))
    assert len(lines("loading nothing: 10 bytes")) == 1 and not any("\r" in line or "\x1b" in line for line in daemon.errors)
    assert [bool(re.search(r"loaded 10 bytes in \d+\.\d s, ", line)) for line in lines("loaded ")] == [True]


def test_too_few_files_are_refused(fake):
    """Without descriptors for connections a daemon would be ready and serve nobody."""
    for files in (16, 63):
        done = subprocess.run(["sh", "-c", f"ulimit -n {files}; exec {BINARY} --model {ROOT}/bundled/keepd-nano --port 0"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 78 and f"may open {files} files at most, and needs 64" in done.stderr and "ulimit -n" in done.stderr, done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_idle_daemon_stops_at_once(start, number):
    """A hangup ends a daemon that has no file to read again as SIGTERM does."""
    before = signal.signal(number, signal.SIG_DFL)  # tests under nohup would start a daemon that ignores hangups
    daemon = start()
    signal.signal(number, before)
    assert daemon.chat(max_tokens=2).status_code == 200
    daemon.process.send_signal(number)
    assert daemon.process.wait(timeout=30) == 0


def test_nohup_is_respected(fake):
    """A daemon that was told to ignore hangups outlives its terminal."""
    command = f"trap '' HUP; exec {BINARY} --model {ROOT}/bundled/keepd-nano --port 0"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        line = next(line for line in process.stdout if line.startswith("keepd ready at "))
        process.send_signal(signal.SIGHUP)
        assert requests.get(f"{line.split()[3]}/health", timeout=60).status_code == 200
        process.terminate()
        process.stdout.read()
        assert process.wait(timeout=30) == 0


def test_hangup_reads_the_file_again(start, tmp_path):
    """A rejected file changes nothing; a valid one applies the reloadable options, and the log names them."""
    def reload(text, answer):
        file.write_text(text)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait(answer, lambda: any(answer in line for line in daemon.errors))
        assert daemon.get("/health").status_code == 200

    file = tmp_path / "keepd.conf"
    file.write_text("log-level = error\n")
    daemon = start("--config", str(file))
    reload("log-level = info\nlog-levle = info\n", "reload rejected, nothing changed: ")
    assert any("line 2: unknown option 'log-levle'" in line for line in daemon.errors)
    reload("log-level = info\nthreads = 7\n", "reload: log-level changed")
    daemon.wait("what did not change", lambda: any("reload: threads changed; restart" in line for line in daemon.errors))
    daemon.process.terminate()
    assert daemon.process.wait(timeout=30) == 0
    daemon.wait("a line of the new level", lambda: any("draining" in line for line in daemon.errors))


def test_drain(slow):
    """Accepted requests finish, streamed or not; new ones are rejected; /health reports draining."""
    daemon = slow(step_us=30000)
    streamed, whole = daemon.socket(), daemon.socket()
    streamed.sendall(request_bytes(CHAT, chat_body("x" * 40, max_tokens=64, stream=True)))
    whole.sendall(request_bytes(CHAT, chat_body("x" * 40, max_tokens=64)))
    daemon.wait("both to run", lambda: daemon.kv()["running_count"] == 2)
    daemon.process.terminate()
    daemon.wait("the drain", lambda: requests.get(daemon.url + "/health", timeout=60).status_code == 503)
    health = requests.get(daemon.url + "/health", timeout=60)
    assert health.headers["connection"] == "close" and health.json()["error"]["code"] == "unhealthy"
    refused = requests.post(daemon.url + CHAT, json=chat_body(), timeout=60)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert daemon.metrics()["keepd_requests_rejected_total", ("reason", "draining")] == 1
    data = read_until(streamed, b"data: [DONE]\n\n")
    assert b'"finish_reason":"stop"' in data and data.count(b'"content":"x"') == 40
    assert read_until(whole, b'"system_fingerprint"').startswith(b"HTTP/1.1 200")
    assert daemon.process.wait(timeout=30) == 0


def test_drain_serves_what_is_still_being_read(start, fake, tmp_path):
    """Accepted requests include those that a worker thread was parsing when the signal came."""
    gate = tmp_path / "gate"
    daemon = start(env={"KEEPD_FAKE_GATE": str(gate)})
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body("at the gate")))
        daemon.wait("it to be accepted", lambda: daemon.metrics()["keepd_queue_tokens",] > 0)
        daemon.process.terminate()
        daemon.wait("the drain", lambda: daemon.get("/health").status_code == 503)
        gate.touch()
        answer = read_until(sock, b'"system_fingerprint"')
        assert answer.startswith(b"HTTP/1.1 200") and b'"content":"at the gate"' in answer
    assert daemon.process.wait(timeout=30) == 0


def test_drain_ends_for_what_is_read_too_long(start, fake, tmp_path):
    gate = tmp_path / "gate"
    daemon = start("--drain-seconds", "0", env={"KEEPD_FAKE_GATE": str(gate)})
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body("at the gate")))
        daemon.wait("it to be accepted", lambda: daemon.metrics()["keepd_queue_tokens",] > 0)
        daemon.process.terminate()
        daemon.wait("the end of the drain", lambda: any("giving up" in line for line in daemon.errors))
        gate.touch()
        assert daemon.process.wait(timeout=30) == 0


def test_drain_time_is_bounded(slow):
    """Requests that do not finish in time are ended with an error."""
    daemon = slow("--drain-seconds", "0", step_us=20000)
    streamed, whole = daemon.socket(), daemon.socket()
    for sock, stream in ((streamed, True), (whole, False)):
        sock.sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True, stream=stream)))
    read_until(streamed, b'"content":"h"')
    daemon.wait("both to run", lambda: daemon.kv()["running_count"] == 2)
    daemon.process.terminate()
    data = read_until(streamed, b"data: [DONE]\n\n")
    assert b'"error":{' in data and b'"code":"aborted"' in data
    answer = read_until(whole, b"}}")
    assert answer.startswith(b"HTTP/1.1 503") and b'"code":"aborted"' in answer
    assert daemon.process.wait(timeout=30) == 0


def test_second_signal_cuts_off(slow):
    daemon = slow("--drain-seconds", "600", step_us=20000)
    sock = daemon.socket()
    sock.sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True, stream=True)))
    read_until(sock, b'"content":"h"')
    daemon.process.terminate()
    daemon.wait("the drain", lambda: daemon.get("/health").status_code == 503)
    assert daemon.process.poll() is None
    daemon.process.terminate()
    assert daemon.process.wait(timeout=30) == 0
    daemon.wait("the reason", lambda: any("a second signal: giving up 1 requests" in line for line in daemon.errors))
    sock.close()


def test_engine_death_shows(start, fake):
    daemon = start()
    r = daemon.chat("engine dies", max_tokens=900, ignore_eos=True)
    assert r.status_code == 500 and r.json()["error"]["message"] == "the engine has stopped"
    assert daemon.get("/health").status_code == 503
    assert daemon.chat().status_code == 503


def test_health_sees_a_stuck_engine(slow):
    """An engine that has work but makes no step for too long."""
    daemon = slow(step_us=3000000, health=200)
    assert daemon.get("/health").status_code == 200
    sock = daemon.socket()
    sock.sendall(request_bytes(CHAT, chat_body("abc")))
    daemon.wait("the alarm", lambda: daemon.get("/health").status_code == 503, seconds=10)
    sock.close()


def test_port_in_use(shared):
    r = run("--model", MODEL_DIR, "--port", str(shared.port))
    assert r.returncode == 1 and "port" in r.stderr and r.stdout == ""


def test_refused_options():
    for flags, word in ((["--port", "99999"], "port"), (["--nonsense"], "nonsense"), ([], "model"),
                        (["--model", MODEL_DIR, "--kv-policy", "lru"], "kv-policy"),
                        (["--model", MODEL_DIR, "--port", "0", "--served-model-name", " , "], "served-model-name"),
                        (["--model", MODEL_DIR, "--tls-cert", "/x.pem"], "tls-key"),
                        (["--model", MODEL_DIR, "--api-key-file", "/nowhere"], "api-key-file"),
                        (["--model", MODEL_DIR, "--unix-socket-mode", "rw"], "unix-socket-mode"),
                        (["--model", MODEL_DIR, "--unix-socket", "/tmp/" + "x" * 200], "unix-socket"),
                        (["--model", MODEL_DIR, "--host", "999.1.1.1"], "host"),
                        (["--model", "/nowhere"], "model")):
        for check in ([], ["--check-config"]):  # --check-config reports the same errors as a start, with the same message
            r = run(*flags, *check)
            assert r.returncode == 78, (flags, r)
            assert r.stderr.startswith(f"keepd: {word}: ") or flags in ([], ["--nonsense"]), r.stderr
            assert word in r.stderr and r.stdout == "" and "refused" not in r.stderr


def test_a_policy_that_is_none_gets_the_list():
    r = run("--model", MODEL_DIR, "--kv-policy", "lru")
    assert r.stderr.startswith("keepd: kv-policy: 'lru' is not one of auto, full, streaming, trimkv, global"), r.stderr


def test_a_model_directory_that_is_not_there():
    assert run("--model", "/nowhere").stderr.startswith("keepd: model: /nowhere: No such file or directory; a model is a directory")


def test_texts():
    assert "--kv-budget" in run("--help").stdout
    assert run("--version").stdout.startswith("keepd 0.")
    r = run("--model", MODEL_DIR, "--api-key", "s3cr3t", "--check-config")
    assert r.returncode == 0 and MODEL_DIR in r.stdout and "s3cr3t" not in r.stdout
    assert "/v1/completions uses 16" in " ".join(run("--help").stdout.split())


def test_manual_page_is_the_option_table():
    """The manual page comes from the same table as --help, and groff accepts it without warnings."""
    names = re.findall(r"^  --([a-z-]+) ", run("--help").stdout, re.M)
    page = run("--man").stdout
    assert len(names) > 30 and re.findall(r"^\.TP\n\.B \\-\\-([a-z\\-]+)", page, re.M) == [n.replace("-", "\\-") for n in names]
    if not shutil.which("groff"):
        pytest.skip("skip: groff is not installed")
    r = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=page, capture_output=True, text=True, timeout=60)
    assert r.returncode == 0 and r.stderr == ""


def test_environment_options(start):
    daemon = start(env={"KEEPD_API_KEY": "k"})
    assert daemon.get("/v1/models").status_code == 401
    assert "Bearer $KEEPD_API_KEY" in "".join(daemon.process.stdout.readline() for _ in range(3))


def test_no_descriptors_leak(start):
    daemon = start()
    folder = f"/proc/{daemon.process.pid}/fd"
    daemon.chat()
    before = {os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}
    for i in range(50):
        assert requests.post(daemon.url + CHAT, json=chat_body(stream=i % 2 == 0), timeout=60).status_code == 200

    def opened():
        links = {fd: os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.lexists(f"{folder}/{fd}")}
        return {fd: link for fd, link in links.items() if link not in before}
    daemon.wait(f"descriptors to close, open are {opened()}", lambda: not opened())


def test_requests_until_the_very_end(slow):
    """Requests that arrive while the daemon closes find no engine any more; they are turned away, not served."""
    daemon = slow(step_us=20000)
    last = daemon.socket()
    last.sendall(request_bytes(CHAT, chat_body("x" * 40, max_tokens=30, stream=True)))
    read_until(last, b'"content":"x"')
    stop = threading.Event()

    def knock():
        while not stop.is_set():
            try:
                with daemon.socket() as sock:
                    sock.sendall(request_bytes(CHAT, chat_body()) * 20)
            except OSError:
                pass
    threads = [threading.Thread(target=knock) for _ in range(8)]
    for thread in threads:
        thread.start()
    daemon.process.terminate()
    assert daemon.process.wait(timeout=60) == 0
    stop.set()
    for thread in threads:
        thread.join()


def open_body(daemon, _):
    sock = daemon.socket()
    sock.sendall(request_bytes(CHAT, chat_body())[:-10])
    return sock


def running_job(daemon, _):
    sock = daemon.socket()
    sock.sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True)))
    daemon.wait("it to run", lambda: daemon.kv()["running_count"] == 1)
    return sock


def queued_job(daemon, socks):
    socks.append(running_job(daemon, socks))
    sock = daemon.socket()
    sock.sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True)))
    daemon.wait("it to wait", lambda: daemon.kv()["waiting_count"] == 1)
    return sock


def unread_stream(daemon, _):
    sock = daemon.socket()
    sock.sendall(request_bytes(CHAT, chat_body(max_tokens=1000, ignore_eos=True, stream=True, logprobs=True,
                                               top_logprobs=20)))
    daemon.wait("its end", lambda: daemon.finished("length") == 1)
    return sock


@pytest.mark.parametrize("hold, flags, step_us", [
    (open_body, [], 0), (running_job, [], 500000), (queued_job, ["--max-num-seqs", "1"], 20000), (unread_stream, [], 0)])
def test_nothing_outlives_the_engine(slow, hold, flags, step_us):
    """A drain that ends before a request does: no request may then ask an engine that is closed."""
    daemon = slow("--drain-seconds", "0", *flags, step_us=step_us)
    socks = []
    socks.append(hold(daemon, socks))
    daemon.process.terminate()
    assert daemon.process.wait(timeout=60) == 0, "".join(daemon.errors)
    for sock in socks:
        sock.close()


def test_a_slow_reader_has_its_answer_after_a_drain(slow):
    """The end of the process does not cut off what a client has not read yet."""
    daemon = slow(step_us=0)
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body(max_tokens=1000, ignore_eos=True, stream=True, logprobs=True,
                                                   top_logprobs=20)))
        daemon.wait("its end", lambda: daemon.finished("length") == 1)
        daemon.process.terminate()
        daemon.wait("the drain", lambda: any("draining" in line for line in daemon.errors))
        assert read_until(sock, b"data: [DONE]\n\n").count(b"data: {") == 1002
    assert daemon.process.wait(timeout=60) == 0
