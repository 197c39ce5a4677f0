"""Streams of responses in the background: they go on without their client, and GET ?stream=true reads them from any
event on, byte for byte. (The fake answers with the last user message, a token for each byte.)"""
import json
import threading

import pytest
import requests
from conftest import narrow_socket, read_all, read_until, request_bytes, unchunked
from test_background import LONG, ended, status
from test_responses import CALL, PATH, TOOLS, body

COMMENT = b": keepd\n\n"
SCORES = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
LAST = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed",
        "cancelled": "response.failed"}


def split(content):
    """The whole events of a stream, as bytes, without comments."""
    return [part + b"\n\n" for part in content.split(b"\n\n")[:-1] if not part.startswith(b":")]


def parse(event):
    name, data = event.decode().rstrip("\n").split("\n")
    value = json.loads(data.removeprefix("data: "))
    assert name == f"event: {value['type']}"
    return value


class Reading:
    """A stream that is being read; it is left at the end of `with`."""

    def __init__(self, answer):
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        self.answer, self.pieces, self.data = answer, answer.iter_content(None), b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.answer.close()

    def first(self, count):
        """The first events, or all if there are not so many."""
        while len(split(self.data)) < count and (piece := next(self.pieces, b"")):
            self.data += piece
        return split(self.data)[:count]

    def all(self):
        self.data += b"".join(self.pieces)
        assert not self.data or self.data.endswith(b"\n\n"), "the stream ends with an event"
        return split(self.data)

    @property
    def path(self):
        return path_of(self.first(1))


def path_of(found):
    return f"{PATH}/{parse(found[0])['response']['id']}"


def begin(daemon, text="hello", headers=None, **fields):
    wish = {**body(text, **fields), "background": True, "stream": True}
    return Reading(requests.post(daemon.url + PATH, json=wish, headers=headers, stream=True, timeout=60))


def follow(daemon, path, after=None):
    asked = {"stream": "true", **({} if after is None else {"starting_after": after})}
    return Reading(requests.get(daemon.url + path, params=asked, stream=True, timeout=60))


def read(daemon, path, after=None):
    with follow(daemon, path, after) as reading:
        return reading.all()


def leave(daemon, count=2, text="hello", **fields):
    """Begins a stream, reads some events and leaves."""
    with begin(daemon, text, **fields) as reading:
        return reading.first(count), reading.path


def in_thread(into, function):
    thread = threading.Thread(target=lambda: into.extend(function()))
    thread.start()
    return thread


def check_whole(found, state):
    events = [parse(e) for e in found]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"] for e in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [e["response"]["status"] for e in (*events[:3], events[-1])] == ["queued", "queued", "in_progress", state]
    assert kinds[-1] == LAST[state] and kinds.count(LAST[state]) == 1 and events[0]["response"]["background"] is True
    return events


# --- from any event on ---

@pytest.mark.parametrize("text,fields,state", [
    ("hello", {}, "completed"), ("", {}, "completed"), ("x\u00e9\U0001f600yz END of it", {"stop": ["END OF", "zzz"], **SCORES}, "completed"),
    ("x\u00e9\U0001f600yz", {"stop": ["z"], **SCORES}, "completed"), ("hello", {"max_output_tokens": 3}, "incomplete"),
    (f"Look: {CALL}\n{CALL}", {"tools": TOOLS}, "completed"), (CALL, {"tools": TOOLS, "max_output_tokens": 60}, "incomplete"),
    ("\x01one two\x02three", {}, "completed"), ("\x01one two", {"max_output_tokens": 4}, "incomplete"),
    ("fail now", {}, "failed"), ("fail later", {}, "failed")], ids=lambda v: repr(v)[:9] if isinstance(v, str) else "")
def test_from_every_event_on(caller, text, fields, state):
    with begin(caller, text, **fields) as reading:
        whole = reading.all()
    events, path = check_whole(whole, state), path_of(whole)
    assert caller.get(path).json() == events[-1]["response"]
    assert read(caller, path) == whole
    for n in range(len(whole)):
        assert read(caller, path, n) == whole[n + 1:]
    for beyond in (len(whole), 10 ** 17):
        assert read(caller, path, beyond) == []


def test_the_events_are_those_of_a_stream_with_its_client(caller):
    """Only the state at the beginning differs, and `background`."""
    texts = []
    for background in (False, True):
        fields = {"background": background, "stream": True, "tools": TOOLS}
        events = [parse(e) for e in split(caller.post(PATH, body(f"Look: {CALL}", **fields)).content)]
        texts.append([(e["type"], e.get("delta"), e.get("item", {}).get("status")) for e in events])
    assert texts[1][1][0] == "response.queued"
    assert texts[1][:1] + texts[1][2:] == texts[0]


@pytest.mark.parametrize("count", [2, 3, 4, 9, 30])
def test_a_lost_connection(patient, count):
    """The answer goes on; its client reads on where it was, while the rest comes, and has every byte once."""
    got, path = leave(patient, count, LONG, **SCORES)
    assert status(patient, path) in ("queued", "in_progress")
    rest = read(patient, path, count - 1)
    check_whole(got + rest, "completed")
    assert read(patient, path) == got + rest, "what is rendered at the end is what was sent before"
    assert patient.get(path).json()["output"][0]["content"][0]["text"] == LONG


def test_a_connection_cut_in_the_middle_of_an_event(patient):
    with patient.socket() as sock:
        sock.sendall(request_bytes(PATH, body(LONG, background=True, stream=True)))
        data = read_until(sock, b'"sequence_number":20,')
    got = split(b"".join(data.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2]))
    path, last = path_of(got), parse(got[-1])["sequence_number"]
    assert last == len(got) - 1 >= 19
    check_whole(got + read(patient, path, last), "completed")


def test_again_and_again(patient):
    """A client that loses every connection comes to the end."""
    got, path = leave(patient, 3, LONG)
    while parse(got[-1])["type"] != "response.completed":
        with follow(patient, path, len(got) - 1) as reading:
            got += reading.first(40)
    check_whole(got, "completed")
    assert read(patient, path) == got


def test_beyond_what_exists(patient):
    """A reader that is ahead waits for its event; one beyond the last has none, and its stream ends with the answer."""
    _, path = leave(patient, 3, "a story")
    late, beyond = [], []
    threads = [in_thread(late, lambda: read(patient, path, 12)), in_thread(beyond, lambda: read(patient, path, 10 ** 6))]
    whole = read(patient, path)
    for thread in threads:
        thread.join(60)
    assert late == whole[13:] and beyond == []


def test_many_events_are_left_out_in_turns(start, fake):
    """More tokens than one turn of the loop renders."""
    daemon = start("--max-model-len", "8192", env={"KEEPD_FAKE_STEP_US": "500"})
    got, path = leave(daemon, 3, "0123456789" * 250, max_output_tokens=2600)
    daemon.wait("some of it", lambda: (daemon.kv()["running"] or [{}])[0].get("completion_tokens", 0) > 1500)
    rest = read(daemon, path, 1400)
    whole = read(daemon, path)
    assert len(check_whole(whole, "completed")) > 2500 and rest == whole[1401:] and got == whole[:3]


# --- several readers ---

def test_readers_at_once(patient):
    """Readers that come at different times, and the client itself, all get the same bytes."""
    streams, threads = {n: [] for n in (0, 1, 50, 100, 150, 200)}, []
    with begin(patient, LONG, **SCORES) as reading:
        for n, into in streams.items():
            reading.first(n + 2)
            threads.append(in_thread(into, lambda n=n: read(patient, reading.path, n)))
        whole = reading.all()
        for thread in threads:
            thread.join(60)
    check_whole(whole, "completed")
    assert read(patient, path_of(whole)) == whole
    for n, found in streams.items():
        assert found == whole[n + 1:]


def test_slow_readers(slow):
    """Clients that read nothing hold neither the answer nor other readers; what they missed is there when they read.
    The only place in the background is free, whoever reads still."""
    daemon = slow("--max-queue", "4", step_us=1000)
    owner, reader = narrow_socket(daemon), narrow_socket(daemon)
    owner.sendall(request_bytes(PATH, body(LONG, background=True, stream=True, **SCORES)))
    path = path_of(split(read_until(owner, b"\n\n").split(b"\r\n\r\n", 1)[1].split(b"\r\n", 1)[1]))
    reader.sendall(f"GET {path}?stream=true HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    whole = read(daemon, path)
    check_whole(whole, "completed")
    assert len(b"".join(whole)) > 400000, "more than the sockets hold"
    assert read(daemon, path) == whole
    with begin(daemon, "next") as reading:
        check_whole(reading.all(), "completed")
    assert split(unchunked(read_all(reader))) == whole
    reader.close()
    owner.close()
    daemon.wait_idle()


def test_a_client_that_reads_nothing_is_closed_and_its_answer_goes_on(slow):
    daemon = slow(step_us=5000, stall=300)
    sock = narrow_socket(daemon)
    sock.sendall(request_bytes(PATH, body(LONG, background=True, stream=True, **SCORES)))
    daemon.wait("the connection to be closed", lambda: daemon.metrics()["keepd_connections",] == 1)
    daemon.wait("its end", lambda: any("outcome=stored" in line for line in daemon.errors))
    sock.close()
    daemon.wait_idle()


def follows(daemon, path):
    with requests.get(daemon.url + path, params={"stream": "true"}, stream=True, timeout=60) as answer:
        return answer.status_code == 200


def test_readers_are_counted(patient):
    """A response has 16 readers at once beside its own client; a place is free when one leaves."""
    with begin(patient, LONG) as reading:
        readers = [follow(patient, reading.path) for _ in range(16)]
        r = patient.get(reading.path, params={"stream": "true"})
        assert r.status_code == 429 and int(r.headers["Retry-After"]) >= 1, r.text
        assert (r.json()["error"]["code"], r.json()["error"]["param"]) == ("too_many_requests", "stream")
        readers.pop().answer.close()
        patient.wait("the place", lambda: follows(patient, reading.path))
        whole = reading.all()
        check_whole(whole, "completed")
        assert all(reader.all() == whole for reader in readers)


def test_readers_share_the_memory(slow):
    """The first events repeat the request's tools, 7.5 MB here, for every reader. Readers that read nothing hold no
    more than the memory of bodies and answers, and a later one is refused."""
    daemon = slow("--tool-call-parser", "none", step_us=1000000)
    tools = [{"type": "function", "name": f"f{i}", "description": "x" * 60000, "parameters": {"type": "object"}} for i in range(125)]
    with daemon.socket() as sock:
        sock.sendall(request_bytes(PATH, body(LONG, background=True, stream=True, tools=tools, tool_choice="none")))
        path = f"{PATH}/resp_" + read_until(sock, b'"object":').split(b'"id":"resp_')[1].split(b'"')[0].decode()
    socks, statuses = [], []
    for _ in range(14):
        socks.append(narrow_socket(daemon))
        socks[-1].sendall(f"GET {path}?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        statuses.append(int(read_until(socks[-1], b"\r\n").split()[1]))
    assert statuses[:4] == [200] * 4 and set(statuses) == {200, 503}, statuses
    for sock in socks:
        sock.close()
    daemon.wait("the readers to be gone", lambda: daemon.metrics()["keepd_connections",] == 1)
    with follow(daemon, path) as reading:
        assert reading.path == path
    assert daemon.post(path + "/cancel", None).json()["status"] == "cancelled"
    daemon.wait_idle()


def test_a_reader_holds_no_place_of_its_key(slow, tmp_path):
    """A request whose answer has ended is over for its key, whoever still reads it."""
    file = tmp_path / "keys"
    file.write_text("bound name=batch requests=1\n")
    daemon = slow("--api-key-file", str(file), step_us=1000)
    key = {"Authorization": "Bearer bound"}
    post = lambda: daemon.post(PATH, body("next"), headers=key).status_code
    with begin(daemon, LONG, headers=key, **SCORES) as owner, narrow_socket(daemon) as reader:
        reader.sendall(f"GET {owner.path}?stream=true HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer bound\r\n\r\n".encode())
        read_until(reader, b"\n\n")
        assert post() == 429
        daemon.wait("its end", lambda: any("outcome=stored" in line for line in daemon.errors))
        assert post() == 429, "its own client still reads"
        owner.all()
        daemon.wait("the place", lambda: post() == 200)
    with begin(daemon, LONG, headers=key, **SCORES) as owner, narrow_socket(daemon) as reader:
        path = owner.path
        reader.sendall(f"GET {path}?stream=true HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer bound\r\n\r\n".encode())
        read_until(reader, b"\n\n")
        owner.answer.close()
        daemon.wait("its end", lambda: sum("outcome=stored" in line for line in daemon.errors) == 2)
        assert post() == 200


# --- the beginning ---

def test_the_id_comes_at_once(slow):
    """A stream that waits for a place has its first events, and can be read again and cancelled."""
    daemon = slow("--max-num-seqs", "1", step_us=20000, first=60000)
    _, running = leave(daemon, 2, LONG)
    got, waiting = leave(daemon, 2, "next")
    assert [parse(e)["response"]["status"] for e in got] == ["queued", "queued"] and status(daemon, waiting) == "queued"
    with follow(daemon, waiting) as reading:
        assert reading.first(2) == got
        assert daemon.post(waiting + "/cancel", None).json()["status"] == "cancelled"
        assert parse(reading.all()[-1])["response"]["status"] == "cancelled"
    assert daemon.post(running + "/cancel", None).json()["status"] == "cancelled"


def test_a_silent_stream_has_comments(slow):
    daemon = slow(step_us=400000, ping=50)
    _, path = leave(daemon, 2, "ab")
    with follow(daemon, path, 1) as reading:
        reading.all()
        assert reading.data.count(COMMENT) >= 3


# --- the end ---

def test_cancel_ends_the_streams(patient):
    found = []
    with begin(patient, LONG) as reading:
        reading.first(12)
        path = reading.path
        with follow(patient, path, 5) as other:
            other.first(4)
            thread = in_thread(found, other.all)
            cancelled = patient.post(path + "/cancel", None).json()
            whole = reading.all()
            thread.join(60)
    ended(patient, path)
    events = check_whole(whole, "cancelled")
    assert events[-1]["response"] == cancelled == patient.get(path).json() and len(events) < 380
    assert found == whole[6:] and read(patient, path) == whole
    assert not any(e["type"].endswith(".done") for e in events), "what was cut is not done"


def test_one_that_takes_too_long(patient):
    with begin(patient, LONG, headers={"X-Request-Timeout": "0.3"}) as reading:
        whole = reading.all()
    error, path = check_whole(whole, "failed")[-1]["response"]["error"], path_of(whole)
    assert error["code"] == "server_error" and "longer than" in error["message"]
    assert read(patient, path) == whole and read(patient, path, 7) == whole[8:]


def test_delete_ends_it(patient):
    _, path = leave(patient, 3, LONG)
    with follow(patient, path) as reading:
        reading.first(3)
        assert patient.http.delete(patient.url + path, timeout=60).json()["deleted"] is True
        assert parse(reading.all()[-1])["response"]["status"] == "cancelled"
    assert patient.get(path, params={"stream": "true"}).status_code == 404


@pytest.mark.parametrize("seconds,text,state", [("30", "a story", "completed"), ("0", LONG, "failed")], ids=["waits for it", "gives it up"])
def test_shutting_down(slow, seconds, text, state):
    daemon = slow("--drain-seconds", seconds, step_us=5000)
    _, path = leave(daemon, 3, text)
    with follow(daemon, path) as reading:
        reading.first(3)
        daemon.process.terminate()
        check_whole(reading.all(), state)
    assert daemon.process.wait(timeout=60) == 0


def test_events_too_long_to_be_kept(slow):
    """Such events are there while it runs. Afterwards the response is stored without them. (Each event of a state
    repeats the tools.)"""
    daemon = slow("--tool-call-parser", "none", step_us=1000)
    tools = [{"type": "function", "name": f"f{i}", "description": "x" * 60000, "parameters": {"type": "object"}} for i in range(18)]
    with begin(daemon, "hi", tools=tools, tool_choice="none") as reading:
        whole = reading.all()
    check_whole(whole, "completed")
    assert len(b"".join(whole)) > 4 << 20
    assert "too long to be kept" in refused(daemon, path_of(whole), ("stream", "invalid_request_error"), stream="true")
    assert daemon.get(path_of(whole)).json()["output"][0]["content"][0]["text"] == "hi"


# --- refusals ---

def refused(daemon, path, wanted, **asked):
    r = daemon.get(path, params=asked)
    assert r.status_code == 400 and r.headers["Content-Type"] == "application/json", r.text
    error = r.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (*wanted, "invalid_request_error"), r.text
    return error["message"]


@pytest.fixture(scope="module")
def kept(shared):
    """The path of a stream that has ended."""
    with begin(shared) as reading:
        return path_of(reading.all())


@pytest.mark.parametrize("after", ["-1", "x", "", "1.5", "1e3", " 1", "+1", "9" * 19])
def test_numbers_of_events(shared, kept, after):
    assert "sequence_number" in refused(shared, kept, ("starting_after", "invalid_value"), stream="true", starting_after=after)


@pytest.mark.parametrize("query,name", [("stream", "stream"), ("stream=", "stream"), ("stream=true&starting_after", "starting_after")])
def test_arguments_without_a_value(shared, kept, query, name):
    refused(shared, f"{kept}?{query}", (name, "invalid_value"))


def test_arguments(shared, kept):
    assert "stream=true" in refused(shared, kept, ("starting_after", "invalid_value"), starting_after="1")
    assert "stream=true" in refused(shared, kept, ("starting_after", "invalid_value"), starting_after="1", stream="false")
    refused(shared, kept, ("stream", "invalid_value"), stream="maybe")
    assert shared.get(kept, params={"stream": "false"}).json()["status"] == "completed"
    assert shared.http.head(shared.url + kept, params={"stream": "true"}, timeout=60).status_code == 200
    assert shared.get(PATH + "/resp_unknown", params={"stream": "true"}).status_code == 404


def test_head_of_a_stream_that_runs(patient):
    """The next answer of the connection follows the headers at once."""
    _, path = leave(patient, 2, LONG)
    with patient.socket() as sock:
        sock.sendall(f"HEAD {path}?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
                     "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head, rest = read_all(sock).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200 ") and b"\r\nContent-Type: text/event-stream; charset=utf-8\r\n" in head
    assert rest.startswith(b"HTTP/1.1 200 ")
    check_whole(read(patient, path), "completed")


@pytest.mark.parametrize("fields,reason", [({}, "background=true"), ({"stream": True}, "background=true"),
                                           ({"background": True}, "stream=true")], ids=str)
def test_responses_without_events(patient, fields, reason):
    """In OpenAI's words."""
    r = patient.post(PATH, body("a story", **fields))
    path = path_of(split(r.content)) if "stream" in fields else f"{PATH}/{r.json()['id']}"
    message = f"This response cannot be streamed because it was not created with {reason}."
    assert refused(patient, path, ("stream", "invalid_request_error"), stream="true") == message, "the last one still runs"
    assert ended(patient, path)["status"] == "completed"
    assert refused(patient, path, ("stream", "invalid_request_error"), stream="true") == message


@pytest.mark.parametrize("wish", [{"return_progress": True}, {"stream_options": {"include_progress": True}},
                                  {"stream_options": {"include_kv": True}}], ids=str)
def test_no_progress(shared, wish):
    r = shared.post(PATH, body(background=True, stream=True, **wish))
    assert (r.status_code, r.json()["error"]["param"], r.json()["error"]["code"]) == (400, "background", "unsupported_parameter")


def test_owners(slow):
    """Another key, or another salt, finds nothing: neither while it runs nor afterwards."""
    daemon = slow("--api-key", "a", "--api-key", "b", step_us=5000)
    key = lambda name: {"Authorization": f"Bearer {name}"}

    def check():
        for name, salt in (("b", "s"), ("a", ""), ("a", "t")):
            r = daemon.get(path, headers=key(name), params={"cache_salt": salt, "stream": "true"})
            assert (r.status_code, r.json()["error"]["code"]) == (404, "response_not_found")

    got, path = leave(daemon, 3, "a story", headers=key("a"), cache_salt="s")
    check()
    whole = split(daemon.get(path, headers=key("a"), params={"cache_salt": "s", "stream": "true"}).content)
    check_whole(whole, "completed")
    assert whole[:3] == got
    check()


def test_without_background_a_lost_connection_cancels(patient):
    with Reading(requests.post(patient.url + PATH, json=body(LONG, stream=True), stream=True, timeout=60)) as reading:
        reading.first(3)
    patient.wait("its end", lambda: patient.finished("abort") == 1)
    assert patient.get(reading.path, params={"stream": "true"}).status_code == 404
