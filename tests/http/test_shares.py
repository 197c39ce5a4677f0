"""Clients that hold what all requests share: the memory of bodies and answers, the workers, the places of a key. What they
hold is theirs alone to miss; small requests of others are always served."""
import json
import socket
import threading

import pytest
import requests
from conftest import FAKE, chat_body, read_until, request_bytes

CHAT = "/v1/chat/completions"
MIB = 1 << 20


def head(path, size, key="none"):
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {size}\r\n\r\n").encode()


def hold_body(daemon, size, key="none"):
    """A request whose body misses its last byte."""
    sock = daemon.socket()
    sock.sendall(head(CHAT, size + 1, key) + b" " * size)
    return sock


def rejected(daemon, reason, key="none"):
    text = requests.get(daemon.url + "/metrics", headers={"Authorization": f"Bearer {key}"}, timeout=60).text
    return int(float(text.split(f'reason="{reason}"}} ')[1].split()[0]))


def with_keys(start, tmp_path, lines, *flags, **options):
    file = tmp_path / "keys"
    file.write_text(lines)
    return start("--api-key-file", str(file), *flags, **options)


def test_one_key_does_not_hold_the_memory_of_all(start, tmp_path):
    """Bodies that never end, until the key's share is used up. Another key still sends small ones and the largest."""
    daemon = with_keys(start, tmp_path, "hog\nguest\n")
    socks = []
    while not rejected(daemon, "client_memory", "guest") and len(socks) < 40:
        socks.append(hold_body(daemon, 8 * MIB - 1, "hog"))
    assert len(socks) < 30 and rejected(daemon, "memory", "guest") == 0
    lines = []
    for sock in socks[-2:]: # the refusal of a body may be counted when the next one has begun
        sock.sendall(b" ")
        lines.append(read_until(sock, b"\r\n\r\n").splitlines()[0])
    assert any(b" 429 " in line for line in lines), lines
    guest = {"Authorization": "Bearer guest"}
    for text in ("small", "x" * 100_000):
        r = daemon.post("/tokenize", {"prompt": text}, headers=guest)
        assert r.status_code == 200, r.text
    largest = json.dumps(chat_body(max_tokens=1)).encode().ljust(8 * MIB)
    r = requests.post(daemon.url + CHAT, largest, headers={**guest, "Content-Type": "application/json"}, timeout=60)
    assert r.status_code == 200, r.text
    for sock in socks:
        sock.close()
    daemon.wait("the memory", lambda: daemon.post("/tokenize", {"prompt": "x" * MIB}, headers={
        "Authorization": "Bearer hog"}).status_code in (200, 400))


def test_small_requests_have_memory_of_their_own(start):
    """Without keys every connection on this machine is a client. Many of them hold all that is shared, to the last byte."""
    daemon = start()
    socks = []
    for size, most in ((8 * MIB - 1, 40), (MIB, 10), (100_000, 12), (10_000, 12), (1000, 12), (100, 12), (10, 12)):
        before = rejected(daemon, "memory")
        for _ in range(most):
            socks.append(hold_body(daemon, size))
            if rejected(daemon, "memory") > before:
                break
    assert rejected(daemon, "memory") > 0
    for _ in range(10):
        assert daemon.chat("small").status_code == 200
    for sock in socks:
        sock.close()
    daemon.wait_idle()


def test_answers_that_nobody_reads_count(start, fake, tmp_path):
    """One key leaves its answers unread until it gets no more; other keys get theirs."""
    daemon = with_keys(start, tmp_path, "hog\nguest\n")
    guest = {"Authorization": "Bearer guest"}
    end = daemon.post("/tokenize", {"prompt": "<|endoftext|>"}, headers=guest).json()["tokens"]
    body, socks = {"tokens": end * 100000}, []
    while len(socks) < 120:
        socks.append(daemon.socket())
        socks[-1].sendall(request_bytes("/detokenize", body, "Authorization: Bearer hog"))
        if b" 429 " in read_until(socks[-1], b"\r\n\r\n").splitlines()[0]:
            break
    assert len(socks) < 100 and rejected(daemon, "client_memory", "guest") == 1
    assert daemon.post("/detokenize", body, headers=guest).status_code == 200
    assert daemon.post(CHAT, chat_body(max_tokens=1), headers=guest).status_code == 200
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("path", ["/tokenize", CHAT])
def test_a_key_has_its_places_from_the_heads_on(start, tmp_path, path):
    """A request counts as soon as its head is complete, whatever it asks for."""
    daemon = with_keys(start, tmp_path, "bound name=bound requests=1\nguest\n")
    bound, guest = ({"Authorization": f"Bearer {key}"} for key in ("bound", "guest"))

    def active():
        text = daemon.get("/metrics", headers=guest).text
        return float(text.split('keepd_tenant_requests_active{')[1].split("} ")[1].split()[0])

    with daemon.socket() as sock:
        sock.sendall(head(path, 100, "bound") + b"{")
        daemon.wait("its place", lambda: active() == 1)
        for other in ("/tokenize", CHAT):
            r = daemon.post(other, chat_body(max_tokens=1), headers=bound)
            assert (r.status_code, r.json()["error"]["code"]) == (429, "too_many_requests")
        assert daemon.get("/v1/models", headers=bound).status_code == 200, "has no body"
    daemon.wait("the place", lambda: active() == 0)
    assert daemon.post(path, chat_body(max_tokens=1), headers=bound).status_code == 200
    assert rejected(daemon, "key_requests", "guest") == 2


def test_one_key_does_not_hold_the_queue(slow, tmp_path):
    """A key's own requests are refused at its share of places, two thirds; another key's wait, and are served."""
    daemon = with_keys(slow, tmp_path, "hog\nguest\n", "--max-num-seqs", "1", "--max-queue", "9", step_us=20000)
    hog, guest = ({"Authorization": f"Bearer {key}"} for key in ("hog", "guest"))
    long = request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True, stream=True), "Authorization: Bearer hog")
    sent = []
    for waiting in range(7): # one runs
        sent.append(daemon.socket())
        sent[-1].sendall(long)
        daemon.wait("its place", lambda: daemon.get("/kv", headers=hog).json()["waiting_count"] == waiting)
        daemon.wait("the first to run", lambda: daemon.get("/kv", headers=hog).json()["running_count"] == 1)
    r = daemon.post(CHAT, chat_body(), headers=hog)
    assert (r.status_code, r.json()["error"]["code"]) == (429, "too_many_requests") and int(r.headers["retry-after"]) >= 1
    with daemon.socket() as waits:
        waits.sendall(request_bytes(CHAT, chat_body(max_tokens=1), "Authorization: Bearer guest"))
        daemon.wait("its place", lambda: daemon.get("/kv", headers=guest).json()["waiting_count"] == 7)
        assert rejected(daemon, "client_queue", "guest") == 1 and rejected(daemon, "queue_full", "guest") == 0
        for sock in sent:
            sock.close()
        assert read_until(waits, b"}").startswith(b"HTTP/1.1 200")


@pytest.mark.skipif(FAKE, reason="the fake engine keeps one list for all")
def test_one_key_does_not_push_out_others_conversations(start, tmp_path):
    """However many conversations a key begins, they push out its own."""
    daemon = with_keys(start, tmp_path, "hog\nguest\n", "--max-conversations", "8")
    hog, guest = ({"Authorization": f"Bearer {key}"} for key in ("hog", "guest"))
    first = chat_body("A long story about rivers and mountains. " * 8, max_tokens=4)
    answer = daemon.post(CHAT, first, headers=guest).json()["choices"][0]["message"]
    for number in range(24):
        assert daemon.post(CHAT, chat_body(f"number {number}", max_tokens=1), headers=hog).status_code == 200
    first["messages"] += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Go on."}]
    usage = daemon.post(CHAT, first, headers=guest).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] // 2


def test_a_sip_now_and_then_is_no_progress(start, fake):
    """A client that reads a little of a large answer, again and again, is cut off."""
    daemon = start(stall=2000)
    end = daemon.post("/tokenize", {"prompt": "<|endoftext|>"}).json()["tokens"]
    before = daemon.metrics()["keepd_connections",]
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", daemon.port))
    sock.settimeout(60)
    sock.sendall(request_bytes("/detokenize", {"tokens": end * 100000}))
    read_until(sock, b"\r\n\r\n")
    pause = threading.Event()
    for _ in range(200):
        if daemon.metrics()["keepd_connections",] == before:
            break
        sock.recv(512)
        pause.wait(0.1)
    else:
        pytest.fail("its sips were taken for progress")
    sock.close()


def test_large_bodies_do_not_keep_small_ones_waiting(start, fake, tmp_path):
    """Two of the largest keep their workers; others wait, and nobody else does."""
    gate = tmp_path / "gate"
    daemon = with_keys(start, tmp_path, "hog\nguest\n", env={"KEEPD_FAKE_GATE": str(gate)})
    done = []

    def ask(key, number):
        body = {**chat_body("at the gate", max_tokens=1), "user": "x" * 500, "unknown": "x" * 70_000}
        r = requests.post(daemon.url + CHAT, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        done.append((key, number, r.status_code))

    threads = [threading.Thread(target=ask, args=("hog", i)) for i in range(8)]
    for thread in threads:
        thread.start()
    guest = {"Authorization": "Bearer guest"}
    for _ in range(5):
        assert daemon.post(CHAT, chat_body(max_tokens=1), headers=guest).status_code == 200
    assert not done
    threads.append(threading.Thread(target=ask, args=("guest", 0)))
    threads[-1].start()
    gate.touch()
    for thread in threads:
        thread.join()
    assert len(done) == 9 and {code for *_, code in done} == {200}
