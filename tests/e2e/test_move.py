"""A conversation leaves one daemon over HTTP and is continued by another, bitwise; what is torn, forged or foreign is refused."""
import shutil
import socket
import struct
import threading

import pytest
import requests
from answers import cached, tokens
from test_shared_state import LONG
from test_state import FLAGS, ask, first_turn, next_turn

URL = "/v1/conversations"
MIB = 1 << 20


def two(daemon, tmp_path, *flags):
    """Two daemons with directories of their own, and the same key in both."""
    a_dir, b_dir = tmp_path / "a", tmp_path / "b"
    a = daemon("--state-dir", str(a_dir), "--state-idle", "86400", *FLAGS, *flags)
    b_dir.mkdir(mode=0o700)
    shutil.copy(a_dir / "key", b_dir / "key")
    return a, daemon("--state-dir", str(b_dir), "--state-idle", "86400", *FLAGS, *flags)


def last(d):
    return next(row for row in requests.get(d.url + URL, timeout=60).json()["data"] if not row["superseded"])


def get(d, row, **options):
    return requests.get(f"{d.url}{URL}/{row['id']}/state", timeout=60, **options)


def put(d, data, **options):
    return requests.put(d.url + URL, data=data, timeout=60, **options)


def refused(d, data, says, status=400, **options):
    r = put(d, data, **options)
    assert r.status_code == status, r.text
    assert says in r.json()["error"]["message"], r.text
    assert requests.get(f"{d.url}/health", timeout=60).status_code == 200


def test_a_long_conversation_moves(daemon, tmp_path):
    """6,000 tokens: answered on A, fetched from it, given to B, and continued there as on A."""
    a, b = two(daemon, tmp_path)
    messages = [{"role": "user", "content": LONG}]
    first = ask(a, messages)
    assert first["usage"]["prompt_tokens"] >= 6000 and first["usage"]["kv_details"]["evicted_entries"] > 0
    row = last(a)
    assert not row.get("disk_bytes"), "it is written when it is asked for"
    data = get(a, row).content
    assert last(a)["disk_bytes"] == len(data)
    taken = put(b, data)
    assert taken.json() == {"id": row["id"], "object": "conversation", "tokens": row["tokens"], "disk_bytes": len(data)}
    second = next_turn(messages, first, "What is the code of the garage?")
    expected, answer = ask(a, second), ask(b, second)
    assert cached(answer) == cached(expected) >= 6000
    assert tokens(answer) == tokens(expected)
    assert put(b, data).status_code == 200, "again, while it is there"


def test_files_that_are_refused(daemon, tmp_path):
    a, b = two(daemon, tmp_path)
    first = ask(a, first_turn())
    data = get(a, last(a)).content
    assert len(data) > 256 * 1024, "more than one piece"
    middle = len(data) // 2
    changed = bytearray(data)
    changed[middle] ^= 1
    refused(b, data[:middle], "torn")
    refused(b, data[:100], "torn")
    refused(b, b"", "torn")
    refused(b, data + b"x", "longer than its head says")
    refused(b, bytes(changed), "torn or changed")
    refused(b, data[:-32] + bytes(32), "forged")
    refused(b, b"x" * 1000, "no state file")
    refused(b, data[:16] + struct.pack("<Q", 1 << 50) + data[24:], "longer than its conversation can be")
    refused(b, data, "API key, cache_salt or model name", params={"cache_salt": "other"})
    assert not [f for f in (tmp_path / "b").iterdir() if f.suffix in (".state", ".tmp", ".bad")]
    assert cached(ask(b, next_turn(first_turn(), first, "What is my cat called?"))) == 0


@pytest.mark.parametrize("size", [16 << 10, 64 << 10, 100_000])
def test_files_in_chunks(daemon, tmp_path, size):
    """Chunks may end where the daemon's buffer does: then libmicrohttpd has the next one at hand while the piece is written."""
    a, b = two(daemon, tmp_path)
    ask(a, first_turn())
    data = get(a, last(a)).content
    chunks = lambda data: (data[i:i + size] for i in range(0, len(data), size))
    refused(b, chunks(data[:16] + b"x" * (2 * MIB)), "state")
    assert put(b, chunks(data)).status_code == 200
    assert get(b, last(b)).content == data


@pytest.mark.parametrize("how", ["key", "gates", "name", "format"])
def test_foreign_files_are_refused(daemon, tmp_path, how):
    """Another key of the directory, other gates, another model name, another format of the cache."""
    a = daemon("--state-dir", str(tmp_path / "a"), *FLAGS)
    ask(a, first_turn())
    data = get(a, last(a)).content
    (tmp_path / "b").mkdir(mode=0o700)
    if how != "key":
        shutil.copy(tmp_path / "a/key", tmp_path / "b/key")
    flags = {"key": (), "gates": ("--gates", "", "--kv-policy", "streaming"), "name": ("--served-model-name", "other"),
             "format": ("--kv-dtype", "f32")}[how]
    b = daemon("--state-dir", str(tmp_path / "b"), *FLAGS, *flags)
    says = {"key": "API key, cache_salt or model name", "gates": "other gates", "name": "model name", "format": "cache format"}
    refused(b, data, says[how])


def test_only_the_owner_gets_it(daemon, tmp_path):
    a = daemon("--state-dir", str(tmp_path / "a"), "--api-key", "alice", "--api-key", "bob", *FLAGS)
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("alice", "bob"))
    body = {"model": "keepd-nano", "messages": first_turn(), "max_tokens": 4}
    assert requests.post(f"{a.url}/v1/chat/completions", json=body, headers=alice, timeout=60).status_code == 200
    rows = requests.get(a.url + URL, headers=alice, timeout=60).json()["data"]
    (row,) = (row for row in rows if not row["superseded"])
    assert get(a, row, headers=bob).status_code == 404 == get(a, {"id": "0" * 16}, headers=alice).status_code
    data = get(a, row, headers=alice).content
    refused(a, data, "API key", headers=bob)
    assert put(a, data, headers=alice).status_code == 200
    assert get(a, row).status_code == 401 == put(a, data).status_code


def test_what_has_no_file(daemon, tmp_path):
    """Conversations that keep everything are not written; without a directory nothing is."""
    a, b = daemon("--state-dir", str(tmp_path / "a"), "--kv-policy", "full"), daemon(*FLAGS)
    for d in (a, b):
        ask(d, first_turn())
        r = get(d, last(d))
        assert r.status_code in (404, 409) and r.json()["error"]["code"].startswith("conversation_not_"), r.text
    refused(b, b"x" * 1000, "--state-dir")


def test_uploads_are_bounded(daemon, tmp_path):
    """By a quarter of the directory's bytes; a file that is too long is refused by the length of its body or by its head."""
    a = daemon("--state-dir", str(tmp_path / "a"), *FLAGS)
    ask(a, first_turn())
    data = get(a, last(a)).content
    (tmp_path / "b").mkdir(mode=0o700)
    shutil.copy(tmp_path / "a/key", tmp_path / "b/key")
    b = daemon("--state-dir", str(tmp_path / "b"), "--state-bytes", str(2 * len(data)), *FLAGS)
    refused(b, data, "a quarter of state-bytes", status=413)
    refused(b, (data[i:i + 1000] for i in range(0, len(data), 1000)), "a quarter of state-bytes", status=413)
    with socket.create_connection(("127.0.0.1", int(b.url.rsplit(":", 1)[1])), timeout=60) as sock:  # at once, without the body
        sock.sendall(f"PUT {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 60}\r\n\r\n".encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_one_upload_of_a_client(daemon, tmp_path):
    """A slow upload keeps only its own key's next one away, and by a text of its own; when it has gone, the next is taken."""
    a = daemon("--state-dir", str(tmp_path / "a"), "--api-key", "alice", "--api-key", "bob", *FLAGS)
    headers = {key: {"Authorization": f"Bearer {key}"} for key in ("alice", "bob")}
    requests.post(f"{a.url}/v1/chat/completions", json={"model": "keepd-nano", "messages": first_turn(), "max_tokens": 16}, headers=headers["alice"], timeout=60).raise_for_status()
    rows = requests.get(a.url + URL, headers=headers["alice"], timeout=60).json()["data"]
    r = get(a, next(row for row in rows if not row["superseded"]), headers=headers["alice"])
    assert r.status_code == 200, r.text
    data = r.content
    with socket.create_connection(("127.0.0.1", int(a.url.rsplit(":", 1)[1])), timeout=60) as sock:
        sock.sendall(f"PUT {URL} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice\r\n"
                     f"Content-Length: {len(data)}\r\n\r\n".encode() + data[:1000])
        for _ in range(200):
            if put(a, data, headers=headers["alice"]).status_code == 503:
                break
            threading.Event().wait(0.02)
        refused(a, data, "another upload of this client", status=503, headers=headers["alice"])
        assert put(a, data, headers=headers["bob"]).status_code == 400, "another's state, but not too many uploads"
    for _ in range(200):
        r = put(a, data, headers=headers["alice"])
        if r.status_code == 200:
            break
        threading.Event().wait(0.02)
    assert r.status_code == 200, r.text


def test_clients_that_leave(daemon, tmp_path):
    """Half an upload leaves nothing; half a download ends; many at once stay within the daemon's memory."""
    a, b = two(daemon, tmp_path)
    ask(a, [{"role": "user", "content": LONG}])
    row = last(a)
    data = get(a, row).content
    host, port = b.url[7:].split(":")
    before = b.rss()
    socks = []
    for _ in range(40):
        sock = socket.create_connection((host, int(port)))
        sock.sendall(f"PUT {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) // 2])
        socks.append(sock)
    assert b.rss() - before < 40 * MIB
    for sock in socks:
        sock.close()
    with get(a, row, stream=True) as r:
        assert r.raw.read(1000) == data[:1000]
    for _ in range(100):
        left = [f for f in (tmp_path / "b").iterdir() if f.suffix == ".part"]
        if not left:
            break
        threading.Event().wait(0.1)
    assert not left
    assert put(b, data).status_code == 200 and get(a, row).content == data
