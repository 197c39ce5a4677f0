"""Tests the headers about retries: openai-python retries 408, 409, 429, 5xx and connection errors twice."""
import openai
import pytest
from conftest import MODEL, chat_body, events, request_bytes

CHAT = "/v1/chat/completions"


def waits(response):
    """Both headers agree, and are short enough for the SDK to honour (up to 120 s)."""
    seconds, ms = int(response.headers["retry-after"]), int(response.headers["retry-after-ms"])
    assert 1 <= seconds <= 120 and 100 <= ms <= 120000 and seconds == -(-ms // 1000)
    return True


def attempts(daemon, **fields):
    with pytest.raises(openai.APIStatusError) as info:
        daemon.client(max_retries=2).chat.completions.create(model=MODEL, messages=chat_body()["messages"], **fields)
    return info.value, int(info.value.response.request.headers["x-stainless-retry-count"]) + 1


def test_a_request_that_fails_the_engine_is_sent_once(shared, fake):
    r = shared.chat("fail now")
    assert r.status_code == 500 and r.headers["x-should-retry"] == "false" and "retry-after" not in r.headers


def test_bad_requests_are_sent_once(shared):
    for fields in ({"temperature": -1}, {"n": 0}, {"extra_body": {"kv": {"x": 1}}}):
        error, count = attempts(shared, **fields)
        assert (error.status_code, count) == (400, 1)
        assert "retry-after" not in error.response.headers and "x-should-retry" not in error.response.headers


def test_every_503_says_when(slow):
    """A full queue, draining, health: retry later, or on another instance."""
    daemon = slow("--max-num-seqs", "1", "--max-queue", "1")
    socks = [daemon.socket(), daemon.socket()]
    for sock, field in zip(socks, ("running_count", "waiting_count")):
        sock.sendall(request_bytes(CHAT, chat_body("abc" * 20, max_tokens=200, stream=True)))
        daemon.wait(field, lambda field=field: daemon.kv()[field] == 1)
    full = daemon.chat()
    assert full.status_code == 503 and full.json()["error"]["type"] == "service_unavailable_error" and waits(full)
    daemon.process.terminate()
    daemon.wait("the drain", lambda: daemon.get("/health").status_code == 503)
    for r in (daemon.get("/health"), daemon.chat()):
        assert r.status_code == 503 and waits(r) and r.headers["connection"] == "close"
    for sock in socks:
        sock.close()


def test_errors_inside_a_stream(shared, fake):
    """One error event, then [DONE], and the connection lives."""
    r = shared.post(CHAT, chat_body("fail later", stream=True), stream=True)
    data = events(r)
    assert data[-1] == "[DONE]" and data[-2].startswith('{"error":{"message":') and data.count(data[-2]) == 1
    assert "finish_reason\":\"" not in "".join(data), "what failed has not finished"
    assert r.raw.closed or r.raw.read() == b""
    assert shared.chat(max_tokens=1).status_code == 200


def test_never_an_id_or_event_line(shared):
    r = shared.post(CHAT, chat_body(stream=True, stream_options={"include_usage": True}))
    assert not [line for line in r.content.split(b"\n") if line.startswith((b"id:", b"event:", b"retry:"))]


def test_request_ids_are_echoed_and_nothing_more(shared):
    """Two requests with the same id are separate requests."""
    a, b = (shared.post(CHAT, chat_body(request_id="same"), headers={"X-Request-Id": "same"}) for _ in range(2))
    assert a.headers["x-request-id"] == b.headers["x-request-id"] == "same"
    assert a.json()["id"] != b.json()["id"]
