"""The bytes of requests: what is no HTTP is answered in HTTP, and where a request ends is never in doubt."""
import json
import time

import pytest
from conftest import chat_body, read_all, read_until, request_bytes

CHAT = "/v1/chat/completions"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HIDDEN = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def answers(data):
    """Status and body of each; every byte must belong to one."""
    found = []
    while data:
        head, mark, rest = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert mark and lines[0].startswith(b"HTTP/1.1 "), data[:300]
        fields = [line.partition(b": ")[::2] for line in lines[1:]]
        assert all(name for name, _ in fields), head
        names = [name.lower() for name, _ in fields]
        assert len(set(names)) == len(names), f"a field stands twice: {head}"
        size = int(dict(zip(names, (value for _, value in fields)))[b"content-length"])
        assert len(rest) >= size, "Content-Length is the length of what follows"
        found.append((int(lines[0].split()[1]), rest[:size], dict(fields)))
        data = rest[size:]
    return found


def exchange(daemon, *parts):
    with daemon.socket() as sock:
        for part in parts:
            try:
                sock.sendall(part)
            except OSError:
                break
            if part is not parts[-1]:
                time.sleep(0.02)
        return read_all(sock)


REJECTED = {
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    "a Host with a blank": (b"GET /health HTTP/1.1\r\nHost: local host\r\n\r\n", 400),
    "a length that is no number": (POST + b"Content-Length: abc\r\n\r\n{}", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n{}", 400),
    "a signed length": (POST + b"Content-Length: +2\r\n\r\n{}", 400),
    "an empty length": (POST + b"Content-Length:\r\n\r\n{}", 400),
    "a list of lengths": (POST + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    "a length beyond 64 bits": (POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}", 413),
    "a length of 64 bits": (POST + b"Content-Length: 18446744073709551615\r\n\r\n{}", 413),
    "a blank in the path": (b"GET /health now HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "two blanks": (b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a tab": (b"GET\t/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a NUL escape": (b"GET /health%00x HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "half an escape": (b"GET /health%2 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a byte above ASCII": (b"GET /h\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "no path": (b"GET health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "no version": (b"GET /health\r\nHost: localhost\r\n\r\n", 400),
    "no method": (b" /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "an unknown version": (b"GET /health HTTP/1.9\r\nHost: localhost\r\n\r\n", 505),
    "a broken version": (b"GET /health HTTP/11\r\nHost: localhost\r\n\r\n", 400),
    "a continuation line": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n", 400),
    "a blank before the colon": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA : b\r\n\r\n", 400),
    "no colon": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nAb\r\n\r\n", 400),
    "no name": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n: b\r\n\r\n", 400),
    "a NUL": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\0\r\n\r\n", 400),
    "a lone LF": (b"GET /health HTTP/1.1\nHost: localhost\n\n", 400),
    "a lone CR": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\rc\r\n\r\n", 400),
    "a handshake of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "too many fields": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    "too many parameters": (b"GET /health?" + b"a&" * 500 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "too large a head": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 20000, 431),
    "two codings": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks in HTTP/1.0": (POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a chunk without a size": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
    "a negative chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n", 400),
    "a chunk that goes on": (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}x\r\n0\r\n\r\n", 400),
    "a chunk with a lone LF": (POST + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n", 400),
    "a chunk beyond 64 bits": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n{}", 400),
    "an authority with a user": (b"GET http://a@b/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "CONNECT": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
}


@pytest.mark.parametrize("data, status", REJECTED.values(), ids=REJECTED)
def test_rejected(shared, data, status):
    """One answer, whose bytes are right, then the end; nothing behind it is a request."""
    whole = answers(exchange(shared, data + HIDDEN))
    assert [a[0] for a in whole] == [status], whole
    assert whole[0][2][b"Connection"] == b"close" and json.loads(whole[0][1])["error"]["message"]
    before = answers(exchange(shared, HIDDEN + data + HIDDEN))
    assert [a[0] for a in before] == [200, status], "in order behind an earlier answer"


@pytest.mark.parametrize("data, status", list(REJECTED.values())[::5], ids=list(REJECTED)[::5])
def test_rejected_byte_by_byte(shared, data, status):
    with shared.socket() as sock:
        sock.setsockopt(6, 1, 1)
        try:
            for i in range(min(len(data), 300)):
                sock.sendall(data[i:i + 1])
            sock.sendall(data[300:])
        except OSError:
            pass
        assert [a[0] for a in answers(read_all(sock))] == [status]


def test_a_rejected_head_request_has_no_body(shared):
    data = exchange(shared, b"HEAD /health%00 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 400") and data.endswith(b"\r\n\r\n") and data.count(b"\r\n\r\n") == 1


ACCEPTED = {
    "an absolute target": b"GET http://localhost/health HTTP/1.1\r\nHost: elsewhere.example\r\nConnection: close\r\n\r\n",
    "an absolute target of https": b"GET https://LOCALHOST:8080/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "empty lines before": b"\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "an escape": b"GET /he%61lth HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "no Host in HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "blanks around a value": b"GET /health HTTP/1.1\r\nHost: \t localhost \t\r\nConnection:close\r\n\r\n",
    "many cookies": b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nCookie: " + b"a;" * 5000 + b"\r\n\r\n",
    "many fields": b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"a:\r\n" * 126 + b"\r\n",
    "many parameters": b"GET /health?" + b"a&" * 63 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("data", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(shared, data):
    assert [a[0] for a in answers(exchange(shared, data))] == [200]
    half = len(data) // 2
    assert [a[0] for a in answers(exchange(shared, data[:half], data[half:]))] == [200]


def test_an_absolute_target_is_the_host(shared):
    data = b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert [a[0] for a in answers(exchange(shared, data))] == [403], "not the Host field's"


def chunked(body, size=7, extension=b""):
    pieces = [body[i:i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(p), extension, p) for p in pieces)


@pytest.mark.parametrize("tail", [b"0\r\n\r\n", b"000\r\n\r\n", b"0;a=b\r\nTrailer: x\r\nOther: y\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 7, 100000])
def test_chunks(shared, tail, size):
    """Extensions and trailers say nothing to us; what follows is the next request."""
    body = json.dumps(chat_body()).encode()
    data = POST + b"Transfer-Encoding: Chunked\r\n\r\n" + chunked(body, size, b' ; name="value"') + tail
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert [a[0] for a in answers(exchange(shared, data + data + last))] == [200, 200, 200]
    third = len(data) // 3
    assert [a[0] for a in answers(exchange(shared, data[:third], data[third:] + last))] == [200, 200]


@pytest.mark.parametrize("piece", [1000, 1 << 16, 9 << 20])
def test_a_chunked_body_that_is_too_large(shared, piece):
    """The client reads why, although it was still sending."""
    sent = 0
    with shared.socket() as sock:
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 12 << 20:
                sock.sendall(b"%x\r\n%s\r\n" % (piece, b"x" * piece))
                sent += piece
            sock.sendall(b"0\r\n\r\n")
        except OSError:
            pass
        data = read_all(sock)
    assert [a[0] for a in answers(data)] == [413] and b"8388608 bytes" in data


def test_a_chunked_body_without_end(start):
    """The server stops reading it."""
    daemon = start("--max-body-bytes", "4096")
    with daemon.socket() as sock, pytest.raises(OSError):
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(64 << 4):
            sock.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    assert daemon.get("/health").status_code == 200


def test_a_refusal_before_the_body_is_kept(start):
    """Not 413 instead of 401, when the body is too large as well."""
    daemon = start("--api-key", "k", "--max-body-bytes", "4096")
    data = exchange(daemon, POST + b"Transfer-Encoding: chunked\r\n\r\n", chunked(b"x" * 9000, 1000) + b"0\r\n\r\n")
    assert [a[0] for a in answers(data)] == [401]


def test_pipelined_while_an_answer_is_made(slow):
    """A malformed request behind one that is being answered waits for its turn."""
    daemon = slow(step_us=20000)
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body("x" * 20, max_tokens=20)) + b"GET /health%00 HTTP/1.1\r\n\r\n")
        first = read_until(sock, b'"system_fingerprint"')
        assert first.startswith(b"HTTP/1.1 200")
        assert [a[0] for a in answers(first + read_all(sock))] == [200, 400]


def test_answer_of_three_full_reads_ends_its_connection(start):
    """The end of an answer is seen also where it comes exactly with the last bytes of a round."""
    daemon, exact = start(), 3 * 16384
    def request(prompt, id_length):
        body = json.dumps({"prompt": prompt}).encode()
        return (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"X-Request-Id: " + b"i" * id_length + b"\r\nContent-Length: %d\r\n\r\n" % len(body)) + body

    low, high = 1, 40000
    while low < high: # the longest prompt whose answer still fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(exchange(daemon, request("a" * middle, 1))) <= exact else (low, middle - 1)
    missing = exact - len(exchange(daemon, request("a" * low, 1)))
    assert missing < 127
    assert len(exchange(daemon, request("a" * low, 1 + missing))) == exact  # read until the server closes
