"""Clients that disconnect in every phase: nothing keeps running, nothing stays reserved, no state remains."""
import pytest
from conftest import chat_body, read_until, request_bytes

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 900, "ignore_eos": True}


def send(daemon, **fields):
    sock = daemon.socket()
    sock.sendall(request_bytes(CHAT, chat_body(**{**LONG, **fields})))
    return sock


def check_gone(daemon, aborts):
    daemon.wait("the aborts", lambda: daemon.finished("abort") == aborts)
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_used"] == 0
    steps = daemon.metrics()["keepd_steps_total",]
    assert daemon.metrics()["keepd_steps_total",] == steps, "the engine does not step for the dead"
    assert daemon.chat(max_tokens=3).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half_closed", [False, True])
def test_while_it_generates(slow, stream, half_closed):
    daemon = slow(step_us=10000)
    sock = send(daemon, stream=stream)
    daemon.wait("tokens", lambda: (daemon.kv()["running"] or [{}])[0].get("completion_tokens", 0) > 2)
    if half_closed:
        sock.shutdown(1)
    else:
        sock.close()
    check_gone(daemon, 1)
    sock.close()


@pytest.mark.parametrize("stream", [False, True])
def test_while_the_prompt_is_read(slow, stream):
    daemon = slow(step_us=10000, prefill=1000)
    sock = send(daemon, stream=stream)
    daemon.wait("the prefill", lambda: daemon.kv()["running_count"] == 1)
    assert daemon.kv()["running"][0]["state"] == "prefill"
    sock.close()
    daemon.wait("the abort", lambda: daemon.finished("abort") == 1)
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_used"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_waits(slow, stream):
    daemon = slow("--max-num-seqs", "1")
    first = send(daemon, stream=True)
    daemon.wait("the first to run", lambda: daemon.kv()["running_count"] == 1)
    second = send(daemon, stream=stream)
    daemon.wait("the second to wait", lambda: daemon.kv()["waiting_count"] == 1)
    second.close()
    daemon.wait("the second to go", lambda: daemon.kv()["waiting_count"] == 0)
    assert daemon.kv()["running_count"] == 1, "the first runs on"
    first.close()
    check_gone(daemon, 2)


def test_while_the_body_comes(start):
    daemon = start()
    for cut in (1, 40, 150, 250):
        sock = daemon.socket()
        sock.sendall(request_bytes(CHAT, chat_body("x" * 200))[:cut])
        sock.close()
    daemon.wait("the connections to close", lambda: daemon.metrics()["keepd_connections",] == 1)
    assert daemon.metrics()["vllm:prompt_tokens_total",] == 0


def test_right_after_the_request(slow):
    """A client that disconnects between parsing and the first token: the request must end."""
    daemon = slow(step_us=1000)
    for i in range(64):
        send(daemon, stream=i % 2 == 0).close()
    daemon.wait("the connections to close", lambda: daemon.metrics()["keepd_connections",] == 1)
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_used"] == 0
    assert daemon.finished("length") == daemon.finished("stop") == 0


def test_while_the_answer_is_written(start, fake):
    """Megabytes of scores for a client that has disconnected."""
    daemon = start()
    for stream in (False, True):
        sock = send(daemon, stream=stream, logprobs=True, top_logprobs=20)
        read_until(sock, b"HTTP/1.1 200")
        sock.close()
    daemon.wait("the connections to close", lambda: daemon.metrics()["keepd_connections",] == 1)
    daemon.wait_idle()


def test_one_of_many(slow):
    """Cancelling affects only its own job."""
    daemon = slow(step_us=5000)
    socks = [send(daemon, stream=True, max_tokens=60) for _ in range(8)]
    daemon.wait("all to run", lambda: daemon.kv()["running_count"] == 8)
    for sock in socks[::2]:
        sock.close()
    for sock in socks[1::2]:
        assert b'"finish_reason":"length"' in read_until(sock, b"[DONE]")
        sock.close()
    daemon.wait_idle()
    assert (daemon.finished("abort"), daemon.finished("length")) == (4, 4)
