"""keepd chat: the terminal client, from a pipe and on a pseudo-terminal, beside the daemon with the bundled model."""
import base64
import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import socket
import subprocess
import termios
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
TELL = "My sister Nora lives in Lisbon. The code of the garage is 4815."
ASK = "What is the code of the garage?"
ENV = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
ENV.pop("KEEPD_API_KEY", None)
ENV.pop("KEEPD_URL", None)


def chat(*args, lines=(), env=None):
    return subprocess.run([BINARY, "chat", *args], input="".join(f"{line}\n" for line in lines), capture_output=True, text=True,
                          timeout=120, env={**ENV, **(env or {})})


def test_a_pipe_gets_answers_alone(daemon):
    run = chat(daemon().url, "--temperature", "0", lines=[TELL, "", "/budget 512", ASK])
    assert run.returncode == 0, run.stderr
    assert run.stdout == "Noted.\nThe code of the garage is 4815.\n"
    details = re.findall(r"^\[(\d+) tokens seen.*; kept (\d+) entries of (\d+) \(\d+\.\d MB\), evicted 0; \d+ tokens/s\]$", run.stderr, re.M)
    assert len(details) == 2 and int(details[1][0]) > int(details[0][0]) > 0 and details[1][1] == details[1][2]
    assert "budget: 512" in run.stderr and "\x1b" not in run.stdout + run.stderr


def test_settings_reach_the_daemon(daemon):
    """With a budget of 24 entries a head the long question does not fit, and the turn says what was evicted."""
    url = daemon().url
    long = " ".join(f"The code of gate {i} is {1000 + 7 * i}." for i in range(20))
    run = chat(url, "--policy", "streaming", "--budget", "24", "--tokens", "5", "--system", "Be short.", lines=[long, "/policy", "/tokens"])
    assert run.returncode == 0, run.stderr
    kept, every, evicted = map(int, re.search(r"kept (\d+) entries of (\d+) .*evicted (\d+)", run.stderr).groups())
    assert evicted > 0 and kept + evicted == every
    assert "policy: streaming" in run.stderr and "tokens: 5" in run.stderr


def test_the_budget_in_force_is_shown(daemon):
    url = daemon().url
    shown = r"^\[\d+ tokens seen.*; policy (\w+), (no budget|budget \d+); kept "
    run = chat(url, "--budget", "512", lines=["Hello!", "/budget default", "Hello!", "/policy full", "Hello!", "Hello!"])
    assert re.findall(shown, run.stderr, re.M) == [("global", "budget 512"), ("global", "budget 1024")] + [("full", "no budget")] * 2
    assert "changes nothing" not in run.stderr
    run = chat(url, "--budget", "512", "--policy", "full", lines=["Hello!", "Hello!"])
    assert run.stderr.count("kv.budget changes nothing: policy 'full' keeps everything") == 1, run.stderr


def test_branches_and_undo(daemon):
    run = chat(daemon().url, "--temperature", "0", lines=[TELL, "/fork", "/new", ASK, "/go 1", ASK, "/undo", "/go 3", "/bogus", "/policy nonsense",
                                                          "/budget x", "/quit", ASK])
    assert run.returncode == 0, run.stderr
    answers = run.stdout.splitlines()
    assert answers[0] == "Noted." and "4815" not in answers[1] and "4815" in answers[2] and len(answers) == 3
    assert "* branch 1: 2 messages" in run.stderr and "  branch 2: 2 messages" in run.stderr
    assert "unknown command '/bogus'" in run.stderr and "unknown policy 'nonsense'; there are full" in run.stderr
    assert "budget takes a whole number" in run.stderr


def test_messages_for_people(daemon, tmp_path):
    keyed = daemon("--api-key", "the-key").url
    file = tmp_path / "key"
    file.write_text("# mine\n\n the-key name=me weight=2\n")
    for args, env, code, message in [
            ((keyed,), {}, 1, "the daemon wants an API key: set KEEPD_API_KEY"),
            ((keyed,), {"KEEPD_API_KEY": "wrong"}, 1, "the daemon does not know this API key"),
            ((keyed,), {"KEEPD_API_KEY": "the-key"}, 0, ""),
            ((keyed + "/", "--api-key-file", str(file)), {}, 0, ""),
            ((keyed, "--api-key-file", "/dev/null"), {}, 78, "holds no key"),
            (("http://127.0.0.1:1",), {}, 1, "no daemon at http://127.0.0.1:1 ("),
            (("unix:" + str(tmp_path / "none"),), {}, 1, "no daemon at unix:"),
            (("ftp://x",), {}, 78, "the URL begins with"),
            ((keyed, "--budget", "many"), {}, 78, "--budget takes a whole number"),
            ((keyed, "--unknown"), {}, 78, "unknown option")]:
        run = chat(*args, lines=["Who are you?"], env=env)
        assert run.returncode == code and message in run.stderr, (args, run.stderr)
        assert "the-key" not in run.stderr


def test_full_daemon(daemon):
    """A refused message is no part of the dialogue; the exit status tells."""
    url = daemon("--rate-limit", "1", "--api-key", "k").url
    run = chat(url, "--temperature", "0", lines=[TELL, ASK, "/go"], env={"KEEPD_API_KEY": "k"})
    assert run.returncode == 1 and run.stdout == "Noted.\n"
    assert re.search(r"the daemon is full: Rate limit reached: .* Try again in \d+ s\.", run.stderr)
    assert "* branch 1: 2 messages" in run.stderr


def test_another_server():
    from http.server import BaseHTTPRequestHandler, HTTPServer
    import threading

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = chat(f"http://127.0.0.1:{server.server_port}", lines=["hi"])
    server.shutdown()
    assert run.returncode == 1 and "is not keepd" in run.stderr


class Terminal:
    def __init__(self, *args):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen([BINARY, "chat", *args], stdin=slave, stdout=slave, stderr=slave, env=ENV, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.text = ""

    def wait(self, pattern):
        """Reads until the pattern has come; what was read up to its end is gone."""
        end = time.monotonic() + 60
        while not (found := re.search(pattern, self.text, re.S)):
            assert time.monotonic() < end, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode()
        before, self.text = self.text[:found.end()], self.text[found.end():]
        return before

    def wait_for_editing(self):
        """libedit shows its prompt a moment before it takes Ctrl-C and Ctrl-D for keys."""
        end = time.monotonic() + 60
        while termios.tcgetattr(self.master)[3] & termios.ICANON:
            assert time.monotonic() < end, "no line is edited"
            time.sleep(0.001)

    def type(self, text):
        os.write(self.master, text.encode())


@pytest.fixture
def terminal():
    opened = []
    yield lambda *args: opened.append(Terminal(*args)) or opened[-1]
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.master)


def test_a_terminal(daemon, terminal):
    """Lines are edited, Ctrl-C throws a line away, the history comes back, Ctrl-D ends."""
    t = terminal(daemon().url, "--temperature", "0")
    t.wait(r"keepd-nano at http://\S+, policy global, budget 1024\. /help lists the commands\.")
    t.wait("> ")
    t.wait_for_editing()
    t.type("nonsense that is thrown away\x03")
    t.wait(r"\^C.*> ")
    t.type("Who are yow\x7fu?\r")
    shown = t.wait(r"tokens/s\].*> ")
    assert "I am keepd-nano" in shown and re.search(r"reading the prompt: \d+ of \d+ tokens", shown)
    t.type("/go\r")
    assert "branch 1: 2 messages" in t.wait("messages.*> ")
    t.type("\x1b[A\x1b[A\r")  # twice up: the question again
    assert "I am keepd-nano" in t.wait(r"tokens/s\].*> ")
    t.wait_for_editing()
    t.type("\x04")
    assert t.process.wait(timeout=60) == 0


def test_control_c_stops_the_answer_and_not_the_program(daemon, terminal):
    """The answer has no end of its own here: the temperature is high and the limit far away."""
    running = daemon()
    t = terminal(running.url, "--temperature", "2", "--tokens", "8000")
    t.wait("> ")
    for _ in range(20):  # an answer may end by itself before the key arrives
        t.type("Tell me a story about my sister Nora in Lisbon.\r")
        t.wait(r"reading the prompt[^\r]*\x1b\[0m\r\x1b\[K.")
        t.type("\x03")
        if "[stopped]" in t.wait(r"\[stopped\].*> |tokens/s.*> "):
            break
    else:
        pytest.fail("no answer was stopped")
    end = time.monotonic() + 30
    while running.kv()["running_count"]:
        assert time.monotonic() < end, "the daemon goes on"
        time.sleep(0.05)
    t.type("/temperature 0\r")
    t.wait("temperature: 0.*> ")
    t.type("Who are you?\r")
    t.wait(r"tokens/s\].*> ")
    assert t.process.poll() is None


RED = "\x1b[31m\x9b31m\x07"
SHOWN = "\ufffd[31m\ufffd31m\ufffd"
INFO = {"served_model_name": "m", "kv_policy": "full", "kv_policies": ["full"], "has_chat_template": True}


@pytest.fixture
def hostile():
    """A server that is not keepd's. hostile(get, post): each a status and a body; returns its URL. hostile.asked: bodies of its requests."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    import threading
    servers = []

    def serve(get, post):
        class Hostile(BaseHTTPRequestHandler):
            def answer(self, status, body):
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream" if self.command == "POST" else "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.answer(*get)

            def do_POST(self):
                serve.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.answer(*post)

            def log_message(self, *args):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Hostile))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    serve.asked = []
    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def info(**fields):
    return 200, json.dumps({**INFO, **fields}).encode()


def event(**fields):
    return 200, b"data: %s\r\n\r\ndata: [DONE]\n\n" % json.dumps(fields).encode()


def says(text):
    return event(choices=[{"delta": {"content": text}}])


@pytest.mark.parametrize("number", [2**63 - 1, 2**62, 2**64, -2**63, 1e300, "x", None])
def test_numbers_of_a_hostile_server(hostile, number):
    """The client shows the sum of such numbers, so it bounds each of them."""
    names = ("seen_tokens", "kept_entries", "evicted_entries", "shifts", "bytes", "budget")
    usage = {"completion_tokens": number, "prompt_tokens_details": {"cached_tokens": number}, "kv_details": dict.fromkeys(names, number)}
    run = chat(hostile(info(kv_budget=number), event(choices=[{"delta": {"content": "x"}, "finish_reason": "stop"}], usage=usage)), lines=["hi"])
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("[")]
    assert "kept" in line and not re.search(r"-\d", line), line


@pytest.mark.parametrize("get,post,typed", [
    (info(), says(f"red {RED} end"), "hi"),
    (info(), event(error={"message": f"red {RED} end"}), "hi"),
    (info(), (500, json.dumps({"error": {"message": f"red {RED} end"}}).encode()), "hi"),
    (info(), (500, f"red {RED} end".encode()), "hi"),
    (info(), (500, b"red \x1b[31m\x9b31m\x07 end"), "hi"),  # no UTF-8: one byte is a control character of C1
    (info(), (503, f"red {RED} end".encode()), "hi"),
    (info(served_model_name=f"red {RED} end"), says("x"), None),
    (info(kv_policy=f"red {RED} end"), says("x"), None),
    (info(kv_policies=["full", f"red {RED} end"]), says("x"), "/policy none"),
    ((500, f"red {RED} end".encode()), says("x"), None)])
def test_text_cannot_control_the_terminal(terminal, hostile, get, post, typed):
    """Control characters of an answer, a name or an error are shown as U+FFFD on a terminal."""
    t = terminal(hostile(get, post))
    if typed:
        t.wait("> ")
        t.type(typed + "\r")
    assert f"red {SHOWN} end" in t.wait("red .* end")


def test_a_text_with_zero_bytes(hostile):
    """Models with tokens for single bytes may write U+0000. The next turn sends it back."""
    url = hostile(info(), event(choices=[{"delta": {"content": "a\0b"}, "finish_reason": "stop"}]))
    run = chat(url, lines=["hi", "more"])
    assert run.returncode == 0 and run.stdout == "a\0b\n" * 2, run
    assert hostile.asked[1]["messages"][1]["content"] == "a\0b"


def test_an_answer_that_is_no_stream_of_keepd(hostile):
    run = chat(hostile(info(), (200, b"data: {no JSON\n\n")), lines=["hi"])
    assert run.returncode == 1 and "no stream that this client can read" in run.stderr, run.stderr


@pytest.mark.parametrize("out", [True, False])
def test_each_stream_is_looked_at_by_itself(hostile, out):
    """A terminal gets no control characters, and a file the text as it is, without colours, whatever stdin is."""
    url = hostile(info(), event(choices=[{"delta": {"content": f"red {RED} end"}}], error={"message": f"bad {RED} end"}))
    master, slave = pty.openpty()
    streams = {"stdout": slave, "stderr": subprocess.PIPE} if out else {"stdout": subprocess.PIPE, "stderr": slave}
    run = subprocess.run([BINARY, "chat", url], input=b"hi\n", env=ENV, timeout=60, **streams)
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    written = (run.stderr if out else run.stdout).decode()
    word, other = ("red", "bad") if out else ("bad", "red")
    assert run.returncode == 1 and f"{word} {SHOWN} end" in shown and f"{other} {RED} end" in written
    assert written == (f"keepd chat: bad {RED} end\n" if out else f"red {RED} end\n")


def test_what_is_refused_before_it_is_sent(hostile):
    """A key that would begin another header, and a dialogue whose body is longer than the client writes."""
    url = hostile(info(), event(choices=[{"delta": {"content": "sent"}, "finish_reason": "stop"}]))
    for key in ("k\r\nX-Other: 1", "k\n", "a b", "\u00e9"):
        run = chat(url, lines=["hi"], env={"KEEPD_API_KEY": key})
        assert run.returncode == 78 and "cannot stand in a header" in run.stderr and not run.stdout
    run = chat(url, lines=["x" * (65 << 20), "hi"])
    assert run.returncode == 1 and "too long to be sent" in run.stderr and run.stdout == "sent\n"


def test_pictures(hostile, tmp_path):
    """Pictures stand in front of the next message, and stay there in later turns and in branches."""
    files = [bytes(range(256)) * 3, b"ab", b"x"]
    paths = [tmp_path / f"picture {i}" for i in range(3)]
    for path, data in zip(paths, files):
        path.write_bytes(data)
    lines = [f"/image {paths[0]}", f"/image  '{paths[1]}' ", "see", "/fork", "again", "/undo", "/image ~/picture 2", "/image", "/image ~/picture 2", "other"]
    run = chat(hostile(info(sees_pictures=True), event(choices=[{"delta": {"content": "x"}, "finish_reason": "stop"}])), lines=lines,
               env={"HOME": str(tmp_path)})
    assert run.returncode == 0 and run.stderr.count("pictures of the next message: 1") == 3, run.stderr
    assert "pictures of the next message: 2" in run.stderr and "the next message has no pictures" in run.stderr

    def shown(message):
        content = message["content"]
        if isinstance(content, str):
            return content
        return [base64.b64decode(part["image_url"]["url"].split(",")[1], validate=True) for part in content[:-1]], content[-1]["text"]

    first, answer = (files[:2], "see"), "x"
    assert [[shown(m) for m in body["messages"]] for body in hostile.asked] == [
        [first], [first, answer, "again"], [first, answer, (files[2:], "other")]]


def test_pictures_that_are_none(hostile, tmp_path):
    (tmp_path / "empty").touch()
    with open(tmp_path / "large", "w") as file:
        file.truncate((20 << 20) + 1)
    with open(tmp_path / "most", "w") as file:
        file.truncate(20 << 20)
    url = hostile(info(), event(choices=[{"delta": {"content": "x"}, "finish_reason": "stop"}]))
    run = chat(url, lines=[f"/image {tmp_path / name}" for name in ("none", "", "empty", "large", "most", "most", "most")] + ["/image", "hi"])
    said = run.stderr.splitlines()
    assert [why in line for why, line in zip(("none: No such file", "not a regular file", "is empty", "larger than 20971520 bytes", ": 1", ": 2", "has no room"), said)] == [True] * 7, said
    assert hostile.asked[0]["messages"] == [{"role": "user", "content": "hi"}]
    run = chat(hostile(info(sees_pictures=False), says("x")), lines=[f"/image {tmp_path / 'most'}", "/image"])
    assert run.stderr.splitlines() == ["/image: m sees no pictures"] * 2


def test_blanks_around_an_argument(hostile):
    run = chat(hostile(info(), says("x")), lines=["/policy  full \t", "/budget 12 ", "/policy\t", "/quit ", "not read"])
    assert run.returncode == 0 and run.stdout == ""
    assert run.stderr.splitlines() == ["policy: full", "budget: 12", "policy: full"]


def test_the_url_may_stand_in_the_environment(hostile):
    """As the health check of the image needs it; an argument comes first."""
    url = hostile(info(), says("x"))
    assert chat(env={"KEEPD_URL": url}).returncode == 0
    assert chat(url, env={"KEEPD_URL": "http://127.0.0.1:1"}).returncode == 0
    run = chat(env={"KEEPD_URL": "http://127.0.0.1:1"})
    assert run.returncode == 1 and "no daemon at http://127.0.0.1:1" in run.stderr


def test_ctrl_c_with_the_end_of_an_answer():
    """The whole answer is there when the signal comes: it is shown, with its numbers, and the client goes on."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = subprocess.Popen([BINARY, "chat", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    client.stdin.write(b"one\ntwo\n")
    client.stdin.close()
    status, answer = info()
    _, stream = event(choices=[{"delta": {"content": "whole"}, "finish_reason": "stop"}])
    connection, _ = listener.accept()
    read = connection.makefile("rb")
    for body, stop in ((answer, False), (stream, True), (stream, False)):
        head = {}
        read.readline()
        while (line := read.readline().strip()):
            name, value = line.lower().split(b":", 1)
            head[name] = value
        read.read(int(head.get(b"content-length", 0)))
        if stop:
            os.kill(client.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, client.pid, os.WSTOPPED | os.WNOWAIT)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if stop:
            os.kill(client.pid, signal.SIGINT)
            os.kill(client.pid, signal.SIGCONT)
    out, errors = client.stdout.read(), client.stderr.read()
    assert client.wait(60) == 0 and out == b"whole\nwhole\n" and b"stopped" not in errors, (out, errors)


@pytest.mark.parametrize("reason,code", [(None, 1), ("stop", 0)])
def test_an_answer_that_is_cut_off_is_no_answer(hostile, reason, code):
    """A stream that closes before its finish_reason: the exit status tells, and the text so far is shown."""
    run = chat(hostile(info(), event(choices=[{"delta": {"content": "half"}, "finish_reason": reason}])), lines=["hi"])
    assert run.returncode == code and run.stdout == "half\n"
    assert ("the answer was cut off" in run.stderr) == bool(code)
