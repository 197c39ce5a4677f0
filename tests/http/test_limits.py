"""Sizes, times, keys and malformed HTTP."""
import signal
import socket
import struct
import time

import pytest
import requests
from conftest import LENGTH, MODEL, chat_body, read_all, read_until, request_bytes

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def padded(size):
    body = b'{"model":"%s","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"user":"' % MODEL.encode()
    return body + b"x" * (size - len(body) - 2) + b'"}'


def test_body_at_the_limit(start):
    daemon = start("--max-body-bytes", "4096")
    assert requests.post(daemon.url + CHAT, data=padded(4096), headers=JSON, timeout=60).status_code == 200
    for data in (padded(4097), padded(1 << 20), iter([padded(4096), b"x"])):  # requests sends an iterator in chunks
        r = requests.post(daemon.url + CHAT, data=data, headers=JSON, timeout=60)
        assert r.status_code == 413 and r.json()["error"]["code"] == "request_too_large"
        assert "--max-body-bytes" in r.json()["error"]["message"]
    assert daemon.chat(max_tokens=1).status_code == 200


def test_body_too_large_to_read(start):
    """A body announced with 100-continue is rejected before it is sent."""
    daemon = start()
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, b"", "Expect: 100-continue").replace(b"Content-Length: 0",
                                                                              b"Content-Length: 99999999999"))
        data = read_all(sock)
    assert data.startswith(b"HTTP/1.1 413") and b"onnection: close" in data


def test_key(start):
    daemon = start("--api-key", "s3cret")
    for auth in (None, "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cretx", "Bearer S3cret", "Basic s3cret", "s3cret"):
        headers = {} if auth is None else {"Authorization": auth}
        for path in ("/v1/models", "/metrics", "/version", "/kv", "/nothing"):
            r = daemon.get(path, headers=headers)
            assert r.status_code == 401, (auth, path)
            assert r.headers["www-authenticate"] == "Bearer"
            assert r.json()["error"]["code"] == "invalid_api_key"
            message = r.json()["error"]["message"]
            assert message.startswith("You didn't provide an API key" if auth is None else
                                      "The Authorization header must be 'Bearer' and" if not auth.strip().startswith("Bearer ") else
                                      "Incorrect API key"), message
        assert daemon.post(CHAT, chat_body(), headers=headers).status_code == 401
        assert daemon.get("/health", headers=headers).status_code == 200
    assert daemon.post(CHAT, chat_body(), headers={"Authorization": "bearer s3cret"}).status_code == 200


def test_key_with_the_sdk(start):
    import openai
    daemon = start("--api-key", "s3cret")
    client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="s3cret")
    assert client.models.list().data
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="wrong").models.list()


def test_slow_headers(start):
    """A client that sends single bytes does not keep its connection."""
    daemon = start(header=300, body=300, idle=300)
    socks = [daemon.socket() for _ in range(4)]
    request = request_bytes(CHAT, chat_body("x" * 1000))
    begin = time.monotonic()
    try:
        for i in range(400):
            for k, sock in enumerate(socks):  # nothing, headers, body
                at = i + (0, 0, 200, 400)[k]
                if k:
                    sock.sendall(request[at:at + 1] if i else request[:at + 1])
            time.sleep(0.02)
    except OSError:
        pass
    else:
        pytest.fail("eight seconds of trickle were tolerated")
    daemon.wait("the connections to close", lambda: daemon.metrics()["keepd_connections",] == 1)
    assert time.monotonic() - begin < 30
    assert daemon.metrics()["vllm:prompt_tokens_total",] == 0


def test_slow_uploads(start, fake):
    """An upload is long, so that it must come faster than other bodies: this rate would do for a chat."""
    daemon = start(body=300)
    begin, sent, refused = time.monotonic(), 0, False
    with daemon.socket() as sock:
        sock.sendall(b"PUT /v1/conversations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        while not refused and time.monotonic() - begin < 10:
            try:
                sock.sendall(b"x" * max(0, int((time.monotonic() - begin) * 64000) - sent))
                sent = int((time.monotonic() - begin) * 64000)
            except OSError:
                refused = True
            time.sleep(0.02)
    assert refused, f"an upload of {sent} bytes in {time.monotonic() - begin:.1f} s goes on"
    daemon.wait("the connection to close", lambda: daemon.metrics()["keepd_connections",] == 1)


def test_idle_connections_close(start):
    daemon = start(idle=200)
    with daemon.socket() as sock:
        sock.sendall(request_bytes("/version", b"", method="GET"))
        assert read_until(sock, b"}").startswith(b"HTTP/1.1 200")
        assert sock.recv(10) == b""


def test_an_answer_under_way_has_no_deadline(slow):
    daemon = slow(step_us=100000, header=100, body=100, idle=100, stall=100)
    assert daemon.chat("0123456789", max_tokens=12).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_reads_nothing(start, fake, stream):
    """A client that reads no pending data is cancelled; until then the kernel and keepd buffer a bounded amount."""
    daemon = start(stall=400)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", daemon.port))
    sock.sendall(request_bytes(CHAT, chat_body(stream=stream, max_tokens=1000, ignore_eos=True, logprobs=True,
                                               top_logprobs=20)))
    daemon.wait("the connection to be closed", lambda: daemon.metrics()["keepd_connections",] == 1)
    daemon.wait_idle()
    sock.close()


def test_client_that_reads_nothing_while_it_runs(slow):
    """The job of a client that stopped reading is cancelled."""
    daemon = slow(step_us=2000, stall=300)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", daemon.port))
    sock.sendall(request_bytes(CHAT, chat_body(stream=True, max_tokens=1000, ignore_eos=True, logprobs=True,
                                               top_logprobs=20)))
    daemon.wait("the abort", lambda: daemon.finished("abort") + daemon.finished("length") == 1)
    daemon.wait("the connection to be closed", lambda: daemon.metrics()["keepd_connections",] == 1)
    daemon.wait_idle()
    sock.close()


def test_connection_limit(slow):
    """Clients beyond the limit wait to be accepted while every connection works; they are served when others leave."""
    daemon = slow("--max-connections", "4", step_us=80000)
    socks = [daemon.socket() for _ in range(4)]
    for sock in socks:
        sock.sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True, stream=True)))
        read_until(sock, b"data: ")
    late = daemon.socket()
    late.sendall(request_bytes("/version", b"", method="GET"))
    late.settimeout(1.5) # longer than a connection may wait for its client
    with pytest.raises(TimeoutError):
        late.recv(1)
    late.settimeout(60)
    socks[0].close()
    assert read_until(late, b"}").startswith(b"HTTP/1.1 200")
    for sock in (*socks, late):
        sock.close()
    daemon.wait("all to be served", lambda: daemon.get("/health").status_code == 200)


@pytest.mark.parametrize("sent", [b"", b"GET /version HTTP/1.1\r\nHost:", request_bytes("/version", b"", method="GET")],
                         ids=["nothing", "half a head", "a request"])
def test_idle_connections_give_way(start, sent):
    """However many connections wait for their clients, another client gets a place."""
    daemon = start("--max-connections", "4")
    socks = [daemon.socket() for _ in range(6)]
    for sock in socks:
        sock.sendall(sent)
    late = daemon.socket()
    late.sendall(request_bytes("/version", b"", method="GET"))
    assert read_until(late, b"}").startswith(b"HTTP/1.1 200")
    for sock in (*socks, late):
        sock.close()


def test_addresses_share_connections(slow):
    """Where clients have addresses, one address leaves places for others, even if all its connections work. It gives
    up its own idle ones first, and an address that has fewer keeps what it has."""
    daemon = slow("--max-connections", "16", "--host", "0.0.0.0", step_us=80000)

    def connect(source):
        return socket.create_connection(("127.0.0.1", daemon.port), timeout=60, source_address=(source, 0))

    def ask(sock):
        sock.sendall(request_bytes("/version", b"", method="GET"))
        return read_until(sock, b"}")

    guest = connect("127.0.0.2")
    assert ask(guest).startswith(b"HTTP/1.1 200")
    socks = []
    while len(socks) < 40:
        socks.append(connect("127.0.0.1"))
        socks[-1].sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True, stream=True)))
        try:
            read_until(socks[-1], b"data: ")
        except (AssertionError, ConnectionResetError):
            break
    assert len(socks) == 15, "14 of 15 places beside the guest's, and one refusal"
    assert ask(guest).startswith(b"HTTP/1.1 200")
    with connect("127.0.0.3") as other:
        assert ask(other).startswith(b"HTTP/1.1 200")
    for sock in (*socks, guest):
        sock.close()


MALFORMED = [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
             b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
             b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20000 + b"\r\n",
             b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
             b"Content-Length: -5\r\n\r\n{}",
             b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
             b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
             b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
             b"Content-Length: 99999999999999999999999\r\n\r\n{}",
             b"GET /v1/models%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
             b"GET /%ff%fe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
             b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"]


TWO_LENGTHS = [b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\ncontent-length: 2",
               b"Content-Length: 2\r\nContent-Length: 40", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"]


@pytest.mark.parametrize("lengths", TWO_LENGTHS, ids=range(len(TWO_LENGTHS)))
def test_two_lengths_of_one_body(shared, lengths):
    """A proxy may use the other length: the request is rejected, and nothing after it is read."""
    hidden = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with shared.socket() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     + lengths + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + hidden)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400") and b"Connection: close" in answer
    assert answer.count(b"HTTP/1.1") == 1 and b'"version"' not in answer


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity"])
def test_a_transfer_coding_that_is_not_known(shared, coding):
    """The end of such a body is unknown: the answer comes at once, and nothing after it is a request."""
    hidden = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with shared.socket() as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     f"Transfer-Encoding: {coding}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode() + hidden)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 501") and b"Connection: close" in answer
    assert b'"unsupported_transfer_encoding"' in answer and b"x-should-retry: false" in answer
    assert answer.count(b"HTTP/1.1") == 1 and b'"version"' not in answer


def test_a_body_that_is_compressed(shared):
    for coding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
        answer = shared.post(CHAT, chat_body(), headers={"Content-Encoding": coding})
        assert answer.status_code == status, answer.text
        if status == 415:
            assert answer.json()["error"]["code"] == "unsupported_content_encoding" and coding in answer.text


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_http(shared, data):
    """The daemon survives malformed HTTP, and nothing reaches the engine."""
    before = shared.metrics()["vllm:prompt_tokens_total",]
    with shared.socket() as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = read_all(sock)
    assert not answer or answer.startswith(b"HTTP/1.")
    assert not answer.startswith(b"HTTP/1.1 500"), answer[:200]
    assert shared.get("/health").status_code == 200
    assert shared.metrics()["vllm:prompt_tokens_total",] == before


def test_half_closed_get(shared):
    """`printf ... | nc` closes its sending side at once; requests that need no work are still answered."""
    with shared.socket() as sock:
        sock.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert b'{"version":' in read_all(sock)


def test_reset(shared):
    for part in (20, 150, None):
        sock = shared.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(request_bytes(CHAT, chat_body())[:part])
        sock.close()
    shared.wait_idle()
    assert shared.get("/health").status_code == 200


def test_head(shared):
    r = requests.head(shared.url + "/v1/models", timeout=60)
    assert r.status_code == 200 and r.text == "" and int(r.headers["content-length"]) > 10


@pytest.mark.parametrize("words", [2000, 20000, 200000])
def test_a_long_prompt(shared, words):
    """A worker thread, not the loop, parses a long but legal body."""
    r = shared.chat("word " * words)
    assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"
    assert r.json()["error"]["param"] == "messages"
    assert f"maximum context length is {LENGTH} tokens" in r.json()["error"]["message"]
    r = shared.post("/v1/completions", {"prompt": "word " * words})
    assert r.json()["error"]["code"] == "context_length_exceeded" and r.json()["error"]["param"] == "prompt"


def head(size, path="/version"):
    start = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Fill: ".encode()
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("limit", [1024, 16384, 65536])
def test_headers_at_the_limit(start, limit):
    daemon = start("--max-header-bytes", str(limit))
    for size, code in ((limit, b"200"), (limit + 1, b"431")):
        with daemon.socket() as sock:
            sock.sendall(head(size))
            assert read_all(sock).startswith(b"HTTP/1.1 " + code), size


def test_connections_per_client(start):
    """One address cannot take all connections; another address can still connect."""
    daemon = start("--max-connections-per-client", "2", "--host", "127.0.0.1")
    socks = [daemon.socket() for _ in range(2)]
    for sock in socks:
        sock.sendall(request_bytes("/version", b"", method="GET"))
        read_until(sock, b"}")
    with daemon.socket() as third:
        assert read_all(third) == b""
    with socket.create_connection(("127.0.0.1", daemon.port), source_address=("127.0.0.2", 0)) as other:
        other.sendall(request_bytes("/version", b"", "Connection: close", method="GET"))
        assert read_all(other).startswith(b"HTTP/1.1 200")
    for sock in socks:
        sock.close()

    def again():
        try:
            return daemon.get("/health").status_code == 200
        except requests.ConnectionError:
            return False
    daemon.wait("a place", again)


def test_queue_tokens_at_the_limit(slow):
    """Reserved by the body's size before anything is tokenised, then by the tokens; freed by admission."""
    body = chat_body("y" * 100, max_tokens=900, ignore_eos=True, stream=True)
    tokens = None
    size = len(request_bytes(CHAT, body).partition(b"\r\n\r\n")[2])
    probe = slow(step_us=1000)
    tokens = probe.post("/tokenize", {"messages": body["messages"]}).json()["count"]
    for room, code in ((tokens + size, 200), (tokens + size - 1, 503)):
        daemon = slow("--max-num-seqs", "1", "--max-queue-tokens", str(room), step_us=40000)
        socks = []
        for waiting in range(2):
            socks.append(daemon.socket())
            socks[-1].sendall(request_bytes(CHAT, body))
            daemon.wait("its place", lambda: daemon.kv()["running_count"] == 1
                        and daemon.kv()["waiting_count"] == waiting)
        third = daemon.socket()
        third.sendall(request_bytes(CHAT, body))
        if code == 503:
            answer = read_until(third, b"}}")
            assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: " in answer and b"tokens are waiting" in answer
            assert daemon.metrics()["keepd_requests_rejected_total", ("reason", "queue_tokens")] == 1
        else:
            daemon.wait("its place", lambda: daemon.kv()["waiting_count"] == 2)
        for sock in (*socks, third):
            sock.close()
        daemon.wait_idle()
        assert daemon.chat(max_tokens=1).status_code == 200


def test_queue_tokens_of_a_waiter_that_expires(slow):
    """A request whose time ends while it waits gives its tokens back: the next one of its size has room."""
    body = chat_body("y" * 100, max_tokens=900, ignore_eos=True, stream=True)
    size = len(request_bytes(CHAT, body).partition(b"\r\n\r\n")[2])
    tokens = slow(step_us=1000).post("/tokenize", {"messages": body["messages"]}).json()["count"]
    daemon = slow("--max-num-seqs", "1", "--max-queue-tokens", str(tokens + size), step_us=40000)
    socks = []
    for waiting in range(2):
        socks.append(daemon.socket())
        socks[-1].sendall(request_bytes(CHAT, body))
        daemon.wait("its place", lambda: daemon.kv()["running_count"] == 1
                    and daemon.kv()["waiting_count"] == waiting)
    for i in range(3):
        r = daemon.post(CHAT, body, headers={"X-Request-Timeout": "0.2"})
        assert r.status_code == 408, f"{i} waiters have expired: {r.text}"
    socks.append(daemon.socket())
    socks[-1].sendall(request_bytes(CHAT, body))
    daemon.wait("its place", lambda: daemon.kv()["waiting_count"] == 2)
    for sock in socks:
        sock.close()
    daemon.wait_idle()


def test_queue_tokens_of_many_prompts(slow):
    """A body may contain more prompts than the reservation for one context covers; all their tokens count."""
    daemon = slow("--max-num-seqs", "1", "--max-queue-tokens", "2500")
    path = "/v1/completions"
    socks = []
    for waiting in range(2):
        socks.append(daemon.socket())
        socks[-1].sendall(request_bytes(path, {"model": MODEL, "prompt": "y" * 100, "max_tokens": 900, "ignore_eos": True,
                                               "stream": True}))
        daemon.wait("its place", lambda: daemon.kv()["running_count"] == 1 and daemon.kv()["waiting_count"] == waiting)
    many = {"model": MODEL, "prompt": ["z" * 200] * 20, "max_tokens": 1}
    socks.append(daemon.socket())
    socks[-1].sendall(request_bytes(path, many))
    daemon.wait("a refusal or its places", lambda: daemon.kv()["waiting_count"] > 1 or daemon.metrics()[
        "keepd_requests_rejected_total", ("reason", "queue_tokens")] == 1)
    assert daemon.kv()["waiting_count"] == 1
    answer = read_until(socks[-1], b"}}")
    assert answer.startswith(b"HTTP/1.1 503") and b"tokens are waiting" in answer
    socks.append(daemon.socket())
    socks[-1].sendall(request_bytes(path, {**many, "prompt": many["prompt"][:5]}))
    daemon.wait("places of fewer", lambda: daemon.kv()["waiting_count"] == 6)
    for sock in socks:
        sock.close()
    daemon.wait_idle()
    assert daemon.post(path, many).status_code == 200, "with an empty queue there is always room"


def test_rate_at_the_limit(start):
    """The rate is per key: 429 with the time to retry; GETs are not counted."""
    daemon = start("--rate-limit", "3", "--api-key", "a", "--api-key", "b")

    def ask(key):
        return daemon.post(CHAT, chat_body(max_tokens=1), headers={"Authorization": f"Bearer {key}"})

    assert [ask("a").status_code for _ in range(4)] == [200, 200, 200, 429]
    r = ask("a")
    assert r.json()["error"]["code"] == "rate_limit_exceeded" and r.json()["error"]["type"]
    assert 1 <= int(r.headers["retry-after"]) <= 20 and int(r.headers["retry-after-ms"]) <= 20001
    assert ask("b").status_code == 200, "another key has its own"
    assert daemon.get("/v1/models", headers={"Authorization": "Bearer a"}).status_code == 200
    assert daemon.post(CHAT, chat_body(), headers={"Authorization": "Bearer c"}).status_code == 401


def test_a_reload_leaves_the_rate_alone(start, tmp_path):
    """Adding a key does not reset the used-up rate of another key."""
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    daemon = start("--rate-limit", "2", "--api-key-file", str(file))

    def ask(key):
        return daemon.post(CHAT, chat_body(max_tokens=1), headers={"Authorization": f"Bearer {key}"}).status_code

    assert [ask("b") for _ in range(3)] == [200, 200, 429]
    file.write_text("c\na\nb\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the reload", lambda: any("read again" in line for line in daemon.errors))
    assert [ask(key) for key in ("b", "a", "c", "c", "c")] == [429, 200, 200, 200, 429]


def test_request_timeout(slow):
    """Option and header; streamed or not; not retried by the SDK, because it would take as long again."""
    daemon = slow("--request-timeout", "600", step_us=10000)
    long = chat_body(max_tokens=900, ignore_eos=True)
    r = daemon.post(CHAT, long, headers={"X-Request-Timeout": "0.2"})
    assert r.status_code == 408 and r.json()["error"]["code"] == "request_timeout"
    assert r.headers["x-should-retry"] == "false"
    r = daemon.post(CHAT, {**long, "stream": True}, headers={"X-Request-Timeout": "0.4"})
    assert r.status_code == 200 and '"code":"request_timeout"' in r.text and r.text.endswith("data: [DONE]\n\n")
    for bad in ("0", "-1", "soon", "1s", "nan", "inf", "86401", ""):
        r = daemon.post(CHAT, long, headers={"X-Request-Timeout": bad})
        assert r.status_code == 400 and r.json()["error"]["param"] == "X-Request-Timeout", bad
    daemon.wait_idle()
    assert daemon.post(CHAT, chat_body(max_tokens=2), headers={"X-Request-Timeout": "86400"}).status_code == 200
    capped = slow("--request-timeout", "1", step_us=10000)
    assert capped.post(CHAT, long, headers={"X-Request-Timeout": "500"}).status_code == 408
    capped.wait_idle()


def test_text_answers_share_a_bound(start, fake):
    """Answers of /detokenize that nobody reads hold memory. With too many of them the next ones are refused; once
    their clients have left there is room again."""
    daemon = start()
    end = daemon.post("/tokenize", {"prompt": "<|endoftext|>"}).json()["tokens"]
    body = request_bytes("/detokenize", {"tokens": end * 100000})
    most = 256 << 20
    socks = []
    while not (rejected := daemon.metrics()["keepd_requests_rejected_total", ("reason", "memory")]):
        socks.append(daemon.socket())
        socks[-1].sendall(body)
        read_until(socks[-1], b"\r\n\r\n")
        assert len(socks) * 2600000 < 2 * most, "no answer was refused"
    assert rejected == 1 and len(socks) * 4 * 2600000 > most
    for sock in socks:
        sock.close()
    daemon.wait("room", lambda: daemon.post("/detokenize", {"tokens": end * 100000}).status_code == 200)
