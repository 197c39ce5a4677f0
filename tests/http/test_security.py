"""Tests access: keys, hosts, origins, Unix sockets. SECURITY.md names a test, here or elsewhere, for each class of
attack."""
import os
import signal
import socket
import stat

import pytest
import requests
from conftest import chat_body, read_all, read_until, request_bytes

CHAT = "/v1/chat/completions"


def status(daemon, key, path="/v1/models"):
    return requests.get(daemon.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60).status_code


def test_every_key_of_the_list_is_accepted(start):
    daemon = start("--api-key", "first", "--api-key", "second")
    assert [status(daemon, k) for k in ("first", "second", "third", "firs", "firstt", "", "first second")] == \
        [200, 200, 401, 401, 401, 401, 401]


def test_key_file_is_read_again(start, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\n  alice-key  \n\nbob-key\n")
    daemon = start("--api-key-file", str(file), "--api-key", "fixed")

    def reload(text, line):
        file.write_text(text)
        count = len(daemon.errors)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait(line, lambda: any(line in e for e in daemon.errors[count:]))

    assert [status(daemon, k) for k in ("alice-key", "bob-key", "fixed", "# of the team")] == [200, 200, 200, 401]
    reload("bob-key\ncarol-key\n", "read again")
    assert [status(daemon, k) for k in ("alice-key", "bob-key", "carol-key", "fixed")] == [401, 200, 200, 200]
    for bad in ("# nobody\n", "two words\n", "x" * 2000 + "\n"):
        reload(bad, "reload rejected, nothing changed: api-key-file: ")
    assert status(daemon, "carol-key") == 200, "a refused file changes nothing"
    assert not any("carol" in line for line in daemon.errors), "keys stay out of the log"


def test_a_reload_never_opens_the_server(start, tmp_path):
    """A configuration without its keys would open the daemon to everybody."""
    file = tmp_path / "keepd.conf"
    file.write_text("api-key = only\n")
    daemon = start("--config", str(file))
    file.write_text("log-level = info\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the refusal", lambda: any("nothing changed: api-key: no key is left" in e for e in daemon.errors))
    assert [status(daemon, k) for k in ("only", "")] == [200, 401]


def test_keys_are_worlds_apart(start):
    """A conversation of one key is never found with another key."""
    daemon = start("--api-key", "a", "--api-key", "b")
    messages = [{"role": "user", "content": "a secret prefix that is long enough " * 3}]

    def ask(key):
        return daemon.post(CHAT, chat_body(messages=messages), headers={"Authorization": f"Bearer {key}"}).json()

    first = ask("a")["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
    assert ask("b")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask("a")["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("host, allowed", [
    ("localhost", True), ("LOCALHOST:1", True), ("127.0.0.1", True), ("127.9.9.9:80", True), ("[::1]:8080", True),
    ("host.docker.internal:8080", True), ("Host.Containers.Internal", True), ("x.host.docker.internal", False),
    ("docker.internal", False), ("[::1]", True), ("localhost.", True), ("mine.example", True), ("mine.example:99", True),
    ("evil.example", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("8.8.8.8", False),
    ("mine.example.evil", False), ("mine.exampl", False),
    ("[::2]", False), ("localhost:80@evil", False), ("[::1", False), ("evil.example:80", False)])
def test_host_names(guarded, host, allowed):
    """DNS rebinding: a page whose host name is changed to point to this machine gets no answer."""
    for path in ("/health", "/v1/models"):
        r = requests.get(guarded.url + path, headers={"Host": host}, timeout=60)
        assert r.status_code == (200 if allowed else 403), r.text
        assert allowed or r.json()["error"]["code"] == "forbidden_host"


@pytest.mark.parametrize("name", ["host.docker.internal", "host.containers.internal"])
def test_a_container_is_no_page(guarded, name):
    """Programs in containers have the host's name; a page under that name, from a network that answers for it, has an origin."""
    for origin in (f"http://{name}:8080", "null", "https://evil.example"):
        for method in (requests.get, guarded.http.post):
            r = method(guarded.url + "/v1/models", headers={"Host": name, "Origin": origin}, timeout=60)
            assert r.status_code == 403 and r.json()["error"]["code"] == "forbidden_host"


@pytest.fixture(scope="module")
def guarded():
    from conftest import Daemon
    daemon = Daemon("--allowed-host", "mine.example", "--cors-origin", "https://chat.example", "--api-key", "k",
                    env={"KEEPD_FAKE_STEP_US": "0"})
    daemon.http.headers["Authorization"] = "Bearer k"
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture(autouse=True)
def bearer(monkeypatch):
    """requests.get of this module carries the guarded daemon's key unless told otherwise."""
    plain = requests.get
    monkeypatch.setattr(requests, "get", lambda url, headers=None, **o: plain(
        url, headers={"Authorization": "Bearer k", **(headers or {})}, **o))


@pytest.fixture(scope="module")
def local_pages():
    from conftest import Daemon
    daemon = Daemon("--cors-origin", "localhost", "--api-key", "k", env={"KEEPD_FAKE_STEP_US": "0"})
    yield daemon
    daemon.http.headers["Authorization"] = "Bearer k"
    assert daemon.stop() == 0


def test_cross_origin(guarded):
    ask = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization,x-stainless-lang"}
    r = requests.options(guarded.url + CHAT, headers=ask, timeout=60)
    assert r.status_code == 200 and r.headers["access-control-allow-origin"] == "https://chat.example"
    assert r.headers["access-control-allow-headers"] == ask["Access-Control-Request-Headers"] and r.text == ""
    for stream in (False, True):
        r = guarded.post(CHAT, chat_body(stream=stream), headers={"Origin": "https://chat.example"})
        assert r.status_code == 200 and r.headers["access-control-allow-origin"] == "https://chat.example"
        assert r.headers["vary"] == "Origin"
    r = guarded.post(CHAT, chat_body(), headers={"Origin": "https://chat.example", "X-Session-ID": "s"})
    exposed = [name.strip().lower() for name in r.headers["access-control-expose-headers"].split(",")]
    assert r.headers["x-session-id"] == "s" and {"x-session-id", "x-request-id", "retry-after"} <= set(exposed)
    refused = requests.post(guarded.url + CHAT, json=chat_body(), headers={"Origin": "https://chat.example"}, timeout=60)
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
    for origin in ("https://evil.example", "null", "https://chat.example.evil"):
        r = requests.options(guarded.url + CHAT, headers={**ask, "Origin": origin}, timeout=60)
        assert r.status_code == 200 and not [h for h in r.headers if h.lower().startswith("access-control-")]


@pytest.mark.parametrize("origin, allowed", [
    ("http://localhost", True), ("http://localhost:3000", True), ("https://127.0.0.1:8", True), ("http://[::1]:3000", True),
    ("http://localhost.evil.example", False), ("http://notlocalhost", False), ("http://127.0.0.1.evil.example", False),
    ("http://evil.example", False), ("localhost", False), ("file://localhost", False), ("http://", False),
    ("http://localhost:80/x", False), ("null", False)])
def test_pages_of_this_machine(local_pages, origin, allowed):
    """--cors-origin localhost: any port. Preflight requests carry no key."""
    ask = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for r in (requests.options(local_pages.url + CHAT, headers=ask, timeout=60),
              requests.post(local_pages.url + CHAT, headers={"Origin": origin}, json=chat_body(), timeout=60)):
        assert r.headers.get("access-control-allow-origin") == (origin if allowed else None)
    assert r.status_code == 401


def test_no_cross_origin_by_default(shared):
    r = requests.options(shared.url + CHAT, headers={"Origin": "https://chat.example"}, timeout=60)
    assert r.status_code == 405 and "access-control-allow-origin" not in r.headers
    assert "access-control-allow-origin" not in shared.get("/health", headers={"Origin": "https://x"}).headers


# --- Unix sockets ---

def ask(path, data=request_bytes("/version", b"", "Connection: close", method="GET")):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(data)
        return read_all(sock)


def test_unix_socket(start, tmp_path):
    from test_lifecycle import MODEL_DIR, run
    path = tmp_path / "keepd.sock"
    daemon = start("--unix-socket", str(path), "--unix-socket-mode", "0640")
    assert daemon.url == f"unix:{path}" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert ask(path).startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]" in ask(path, request_bytes(CHAT, chat_body(stream=True), "Connection: close"))
    for i in range(3):
        second = run("--model", MODEL_DIR, "--unix-socket", str(path))
        assert second.returncode == 1 and "is served by another process" in second.stderr
    assert daemon.stop() == 0 and not path.exists()


def test_unix_socket_paths(start, tmp_path):
    from test_lifecycle import MODEL_DIR, run
    path = tmp_path / "file"
    path.write_text("precious")
    r = run("--model", MODEL_DIR, "--unix-socket", str(path))
    assert r.returncode == 78 and "is not a socket" in r.stderr and path.read_text() == "precious"
    r = run("--model", MODEL_DIR, "--unix-socket", "/tmp/" + "x" * 200)
    assert r.returncode == 78 and "107 at most" in r.stderr
    dead = socket.socket(socket.AF_UNIX)
    left = tmp_path / "left.sock"
    dead.bind(str(left))
    dead.close()
    daemon = start("--unix-socket", str(left))
    assert ask(left).startswith(b"HTTP/1.1 200") and daemon.stop() == 0


def test_unix_client_that_reads_nothing(start, fake, tmp_path):
    path = tmp_path / "keepd.sock"
    start("--unix-socket", str(path), stall=400)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(request_bytes(CHAT, chat_body(stream=True, max_tokens=1000, ignore_eos=True, logprobs=True,
                                                   top_logprobs=20)))
        import time
        end = time.monotonic() + 30
        while b"keepd_connections{" not in (m := ask(path, request_bytes("/metrics", b"", "Connection: close",
                                                                            method="GET"))) \
                or b'engine="0"} 2' in m[m.index(b"\nkeepd_connections{"):][:80]:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_environment_is_not_read_as_a_key(start):
    """A key in the environment is one key, whatever it holds."""
    daemon = start(env={"KEEPD_API_KEY": "a,b"})
    assert [status(daemon, k) for k in ("a,b", "a", "b")] == [200, 401, 401]
    assert os.environ.get("KEEPD_API_KEY") is None


def test_half_header_flood_is_bounded(start):
    """Endless headers are answered with an error, not collected."""
    daemon = start("--max-header-bytes", "2048")
    with daemon.socket() as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for _ in range(200):
                sock.sendall(b"X-Filler: " + b"y" * 1000 + b"\r\n")
        except OSError:
            pass
        answer = read_all(sock)
    assert not answer or answer.startswith(b"HTTP/1.1 431") or answer.startswith(b"HTTP/1.1 4")
    assert read_until(daemon.socket(), b"") == b"" and daemon.get("/health").status_code == 200


def test_a_key_without_its_word(start):
    daemon = start("--api-key", "secret")
    for value, text in (("secret", "must be 'Bearer' and the API key"), ("Basic secret", "must be 'Bearer' and the API key"), ("Bearer other", "Incorrect API key")):
        r = requests.get(daemon.url + "/v1/models", headers={"Authorization": value}, timeout=60)
        assert r.status_code == 401 and text in r.json()["error"]["message"] and "secret" not in r.text
