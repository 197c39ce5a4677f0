"""TLS: what it serves, and that no state of a handshake or a record holds anybody else up."""
import os
import select
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import time

import pytest
import requests
from conftest import chat_body, read_all, read_until, request_bytes

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 900, "ignore_eos": True, "stream": True}


def make_certificate(folder, *kind):
    """An elliptic curve's, or of `kind`."""
    if not shutil.which("openssl"):
        pytest.skip("skip: openssl is not installed")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(["openssl", "req", "-x509", *(kind or ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")),
                    "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                    "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def serve(start, slow, certificate):
    """serve(*flags, step_us=...) runs a daemon that speaks TLS."""
    def run(*flags, **options):
        cert, key = certificate
        daemon = (slow if "step_us" in options else start)("--tls-cert", cert, "--tls-key", key, *flags, **options)
        daemon.http.verify, daemon.http.trust_env = cert, False
        return daemon
    return run


@pytest.fixture
def connect(certificate):
    """connect(daemon) is a client's socket after its handshake."""
    socks = []

    def run(daemon, **limits):
        context = ssl.create_default_context(cafile=certificate[0])
        for name, value in limits.items():
            setattr(context, name, value)
        socks.append(context.wrap_socket(daemon.socket(), server_hostname="localhost", suppress_ragged_eofs=False))
        return socks[-1]
    yield run
    for sock in socks:
        sock.close()


def hello():
    """A client's first flight."""
    context = ssl.create_default_context()
    sent = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def cpu_seconds(daemon):
    with open(f"/proc/{daemon.process.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- served content ---

def test_tls(serve):
    daemon = serve()
    assert daemon.url.startswith("https://127.0.0.1:")
    assert daemon.get("/health").status_code == 200
    whole = daemon.chat("over a safe line", max_tokens=64).json()["choices"][0]["message"]["content"]
    r = daemon.chat("over a safe line", max_tokens=64, stream=True, kv={"reuse": False})
    assert r.status_code == 200 and r.text.endswith("data: [DONE]\n\n") and (not whole or whole[0] in r.text)
    with daemon.socket() as sock:  # plain HTTP gets nothing
        sock.sendall(request_bytes("/health", b"", method="GET"))
        assert not read_all(sock).startswith(b"HTTP/1.1 200")
    assert daemon.get("/health").status_code == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_large_bodies_and_answers(serve, connect, version):
    """Many records each way, on one connection, and the end is told (close_notify)."""
    daemon = serve()
    sock = connect(daemon, minimum_version=version, maximum_version=version)
    assert sock.version() == version.name.replace("v1_", "v1.")
    for _ in range(2):
        sock.sendall(request_bytes(CHAT, chat_body("word " * 100000)))
        assert b'"context_length_exceeded"' in read_until(sock, b"}}")
    sock.sendall(request_bytes("/openapi.json", b"", "Connection: close", method="GET"))
    head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head and len(body) > 20000



def test_a_certificate_is_read_again(slow, tmp_path):
    """After SIGHUP new connections get the new certificate; a running answer continues under the old one. Files that do not
    fit together change nothing, and neither does the loss of both."""
    cert, key = make_certificate(tmp_path)
    daemon = slow("--tls-cert", cert, "--tls-key", key, step_us=20000)
    port, trust = daemon.port, ssl.create_default_context(cafile=cert)
    running = trust.wrap_socket(daemon.socket(), server_hostname="localhost")
    running.sendall(request_bytes(CHAT, chat_body("on and on", **{**LONG, "max_tokens": 200}), "Connection: close"))
    read_until(running, b"data: ")

    def served():
        return ssl.get_server_certificate(("127.0.0.1", port)).strip()

    def reload(line):
        count = len(daemon.errors)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait(line, lambda: any(line in text for text in daemon.errors[count:]))

    def content(path):
        with open(path) as file:
            return file.read()

    first = content(cert).strip()
    assert served() == first
    reload("read again")
    assert served() == first
    old_key = content(key)
    make_certificate(tmp_path)
    second, new_key = content(cert).strip(), content(key)
    assert first != second
    with open(key, "w") as file:
        file.write(old_key)
    reload("reload rejected, nothing changed: tls-cert: ")
    assert served() == first
    with open(key, "w") as file:
        file.write(new_key)
    reload("read again")
    assert served() == second
    os.rename(cert, f"{cert}.away")
    reload("reload rejected, nothing changed: tls-cert: ")
    assert served() == second
    assert b"data: [DONE]" in read_all(running), "the answer under the first certificate"
    running.close()


def test_old_versions_are_refused(serve, connect):
    daemon = serve()
    with pytest.warns(DeprecationWarning), pytest.raises((ssl.SSLError, ConnectionError)):
        connect(daemon, minimum_version=ssl.TLSVersion.TLSv1, maximum_version=ssl.TLSVersion.TLSv1_1)
    assert daemon.get("/health").status_code == 200


def test_key_exchange_has_forward_secrecy(start, tmp_path):
    """An RSA certificate signs; it never decrypts a client's secret."""
    cert, key = make_certificate(tmp_path, "-newkey", "rsa:2048")
    daemon = start("--tls-cert", cert, "--tls-key", key)
    context = ssl.create_default_context(cafile=cert)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
    with context.wrap_socket(daemon.socket(), server_hostname="localhost") as sock:
        assert sock.cipher()[0].startswith("ECDHE")
    for cipher in ("AES128-GCM-SHA256", "DHE-RSA-AES128-GCM-SHA256"):
        context.set_ciphers(cipher)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(daemon.socket(), server_hostname="localhost")


def test_files_are_checked(certificate, tmp_path):
    from test_lifecycle import MODEL_DIR, run
    cert, key = certificate
    other = tmp_path / "other.pem"
    other.write_text("-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n")
    bad_key = tmp_path / "bad.pem"
    bad_key.write_text("-----BEGIN PRIVATE KEY-----\nbm90aGluZw==\n-----END PRIVATE KEY-----\n")
    not_its = tmp_path / "not_its.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(not_its)], check=True)
    for flags, option in (([str(tmp_path / "none"), key], "tls-cert"), ([cert, cert], "tls-key"),
                          ([key, key], "tls-cert"), ([str(other), key], "tls-cert"), ([cert, str(bad_key)], "tls-key"),
                          ([cert, str(not_its)], "tls-cert")):
        for check in ([], ["--check-config"]):
            r = run("--model", MODEL_DIR, "--port", "0", "--tls-cert", flags[0], "--tls-key", flags[1], *check)
            assert r.returncode == 78 and r.stderr.startswith(f"keepd: {option}: "), r


# --- clients that leave ---

@pytest.mark.parametrize("end", ["close", "close_notify", "reset"])
def test_client_that_leaves(serve, connect, end):
    daemon = serve(step_us=5000)
    sock = connect(daemon)
    sock.sendall(request_bytes(CHAT, chat_body(**LONG)))
    assert b"200" in sock.recv(100)
    if end == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if end == "close_notify":
        sock.settimeout(0)
        with pytest.raises(ssl.SSLError):
            sock.unwrap()  # does not wait for the answer to it
    else:
        sock.close()
    daemon.wait("the abort", lambda: daemon.get("/kv").json()["running_count"] == 0)


def test_client_that_stops_reading_amid_a_record(serve, connect):
    daemon = serve(stall=400)
    sock = connect(daemon)
    sock.sendall(request_bytes(CHAT, chat_body(max_tokens=1000, ignore_eos=True, stream=True, logprobs=True,
                                               top_logprobs=20)))
    socket.socket.recv(sock, 3)
    daemon.wait("its connection to close", lambda: b"keepd_connections{" in (m := daemon.get("/metrics").content)
                and b'engine="0"} 1' in m[m.index(b"\nkeepd_connections{"):][:80])
    assert daemon.get("/kv").json()["running_count"] == 0


# --- clients that do not finish ---

def answer_hello(sock):
    """Reads the server's first flight and keeps it to itself."""
    sock.sendall(hello())
    assert sock.recv(5)[0] == 22


STATES = {
    "nothing": lambda s: None,
    "one byte": lambda s: s.sendall(b"\x16"),
    "another byte": lambda s: s.sendall(b"G"),
    "half a record's head": lambda s: s.sendall(hello()[:3]),
    "half a hello": lambda s: s.sendall(hello()[:100]),
    "a hello and no more": answer_hello,
    "a hello whose answer is not read": lambda s: s.sendall(hello()),
    "a hello and half a record": lambda s: (answer_hello(s), s.sendall(b"\x17\x03\x03\x00\x50abc")),
    "a record that does not end": lambda s: s.sendall(b"\x16\x03\x01\x3f\xff\x01"),
}
REFUSED = {
    "garbage": b"\xff" * 4000,
    "plain HTTP": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a record that is too long": b"\x16\x03\x01\xff\xff" + b"x" * 70000,
    "a message that is too long": b"\x16\x03\x01\x00\x04\x01\x7f\xff\xff" + b"x" * 100,
    "an empty record": b"\x16\x03\x01\x00\x00" * 100,
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "warnings": b"\x15\x03\x01\x00\x02\x01\x5a" * 1000,
    "application data": b"\x17\x03\x03\x00\x10" + b"x" * 16,
}


@pytest.mark.parametrize("state", STATES)
def test_a_handshake_that_stops_holds_nobody_up(serve, connect, state):
    """A stream goes on beside it, new clients are served, and nothing spins."""
    daemon = serve(step_us=1000)
    stream = connect(daemon)
    stream.sendall(request_bytes(CHAT, chat_body(**LONG)))
    read_until(stream, b'"content":"h"')
    with daemon.socket() as sock:
        STATES[state](sock)
        stream.settimeout(20)
        data = b""
        while data.count(b"data: ") < 300:
            data += stream.recv(65536)
        assert daemon.get("/health").status_code == 200
        stream.close()
        daemon.wait("the stream's end", lambda: daemon.get("/kv").json()["running_count"] == 0)
        before = cpu_seconds(daemon)
        time.sleep(1)
        assert cpu_seconds(daemon) - before < 0.5, "it waits, it does not spin"


@pytest.mark.parametrize("state", STATES)
def test_a_handshake_has_a_deadline(serve, state):
    daemon = serve(handshake=300)
    with daemon.socket() as sock:
        STATES[state](sock)
        read_all(sock)
    assert daemon.get("/health").status_code == 200


def test_a_handshake_byte_by_byte(serve):
    """The deadline covers the whole handshake; single bytes do not extend it."""
    daemon = serve(handshake=500)
    with daemon.socket() as sock, pytest.raises(OSError):
        for byte in hello() * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.01)


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_no_handshake_is_closed(serve, data):
    daemon = serve()
    with daemon.socket() as sock:
        try:
            sock.sendall(data)
        except OSError:
            pass
        assert not read_all(sock).startswith(b"HTTP/1.1 200")
    assert daemon.get("/health").status_code == 200


def test_a_close_at_every_byte(serve):
    daemon = serve()
    data = hello()
    for cut in range(0, len(data), 7):
        with daemon.socket() as sock:
            sock.sendall(data[:cut])
    assert daemon.get("/health").status_code == 200


def test_plain_http_is_told_so(serve):
    """Also a proxy that was given http:// in the place of https://."""
    daemon = serve()
    r = requests.post(daemon.url.replace("https", "http") + "/v1/models", json={"x": "y" * 100}, timeout=60)
    assert r.status_code == 400 and r.json()["error"]["code"] == "https_required"
    daemon.wait("the line", lambda: any("plain HTTP" in line for line in daemon.errors))


def test_places_of_handshakes(serve):
    """More of them than there are places: the oldest give way to those who get on, long before their deadline."""
    daemon = serve(handshake=600000)
    held = [daemon.socket() for _ in range(700)]

    def closed():
        readable, _, _ = select.select(held, [], [], 0)
        return len(readable)
    assert daemon.get("/health").status_code == 200
    daemon.wait("those beyond the 512 places to be closed", lambda: closed() >= 700 - 512)
    assert daemon.get("/health").status_code == 200
    for sock in held:
        sock.close()


@pytest.mark.parametrize("data", [b"\x17\x03\x03\x00\x40abc", b"\x17\x03\x03\x00\x20" + b"x" * 32, b"\xff" * 100])
def test_records_that_are_none(serve, connect, data):
    """Half a record only waits; a record that fails authentication ends its own connection."""
    daemon = serve(header=500)
    with connect(daemon) as sock:
        socket.socket.sendall(sock, data)
        assert daemon.get("/health").status_code == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            assert sock.recv(10) == b""
            raise ConnectionResetError
    assert daemon.get("/health").status_code == 200


def test_renegotiation_is_refused(serve, certificate):
    daemon = serve()
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{daemon.port}", "-tls1_2", "-CAfile", certificate[0]]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    client.stdin.write(b"R\n")
    client.stdin.flush()
    output = client.communicate(timeout=60)
    assert b"RENEGOTIATING" in output[0] + output[1] and client.returncode != 0, output
    assert daemon.get("/health").status_code == 200
