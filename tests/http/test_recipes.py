"""The recipes of docs/OPERATIONS.md, and deploy/'s proxies, as they stand but for addresses: clients reach the daemon through them."""
import re
import shutil
import socket
import subprocess
import time

import pytest
import requests
from conftest import BINARY, ROOT, chat_body, events

PAGE = (ROOT / "docs/OPERATIONS.md").read_text()
RECIPES = PAGE[PAGE.index("<!-- test: recipes -->"):].split("\n## ")[0]
HOST = {"Host": "chat.example"}


def recipe(kind):
    (text,) = re.findall(rf"```{kind}\n(.*?)```", RECIPES, re.S)
    return text


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def replace(text, pairs):
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def proxy(tmp_path):
    """proxy(command) starts a program that ends with the test."""
    processes = []

    def run(*command):
        log = open(tmp_path / "proxy.log", "w")
        processes.append(subprocess.Popen([str(word) for word in command], stdout=log, stderr=log))
    yield run
    for process in processes:
        process.terminate()
        process.wait(timeout=60)


def reach(url, tmp_path):
    end = time.monotonic() + 60
    while True:
        try:
            if (r := requests.get(f"{url}/health", headers=HOST, timeout=5)).status_code == 200:
                return
            seen = r.status_code
        except requests.RequestException as error:
            seen = error
        log = tmp_path / "proxy.log"
        assert time.monotonic() < end, (seen, log.read_text() if log.exists() else "")
        time.sleep(0.05)


def check(url, tmp_path):
    """A client that uses the proxy's name gets answers, whole and streamed."""
    reach(url, tmp_path)
    assert requests.get(f"{url}/v1/models", headers=HOST, timeout=60).status_code == 200
    r = requests.post(f"{url}/v1/chat/completions", json=chat_body(stream=True), headers={**HOST, "X-Session-ID": "s"}, stream=True, timeout=60)
    assert r.status_code == 200, r.text
    assert events(r)[-1] == "[DONE]"


def nginx(tmp_path, proxy, text):
    if not shutil.which("nginx"):
        pytest.skip("skip: nginx is not installed")
    temporary = "".join(f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (tmp_path / "nginx.conf").write_text(f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/proxy.log; worker_processes 1; events {{}}\n"
                                         f"http {{ access_log off; {temporary}\n{text}\n}}\n")
    proxy("nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf")


def haproxy(tmp_path, proxy, text):
    if not shutil.which("haproxy"):
        pytest.skip("skip: haproxy is not installed")
    (tmp_path / "haproxy.cfg").write_text(text)
    proxy("haproxy", "-db", "-f", tmp_path / "haproxy.cfg")


def test_a_daemon_refuses_other_names(shared):
    """So a proxy that passed the client's name on would get 403."""
    assert requests.get(f"{shared.url}/v1/models", headers=HOST, timeout=60).status_code == 403


def test_nginx_in_front(tmp_path, proxy, start):
    port = free_port()
    nginx(tmp_path, proxy, replace(recipe("nginx"), [("listen 8000", f"listen 127.0.0.1:{port}"), ("127.0.0.1:8080", f"127.0.0.1:{start().port}")]))
    check(f"http://127.0.0.1:{port}", tmp_path)


def test_haproxy_in_front(tmp_path, proxy, start):
    port = free_port()
    haproxy(tmp_path, proxy, replace(recipe("haproxy"), [("bind :8000", f"bind 127.0.0.1:{port}"), ("127.0.0.1:8080", f"127.0.0.1:{start().port}")]))
    check(f"http://127.0.0.1:{port}", tmp_path)


def test_nginx_in_front_of_several(tmp_path, proxy, start):
    port = free_port()
    text = (ROOT / "deploy/nginx.conf").read_text()
    servers = "".join(f"    server 127.0.0.1:{start().port} max_fails=1 fail_timeout=5s;\n" for _ in range(2))
    text = re.sub(r"(    server 10\.0\.0\.\d:8080 [^\n]*\n)+", servers, text)
    nginx(tmp_path, proxy, replace(text, [("listen 8000", f"listen 127.0.0.1:{port}")]))
    check(f"http://127.0.0.1:{port}", tmp_path)


def test_haproxy_in_front_of_several(tmp_path, proxy, start):
    port = free_port()
    text = (ROOT / "deploy/haproxy.cfg").read_text()
    servers = "".join(f"    server {name} 127.0.0.1:{start().port}\n" for name in "ab")
    text = re.sub(r"(    server \w 10\.0\.0\.\d:8080\n)+", servers, text)
    haproxy(tmp_path, proxy, replace(text, [("bind :8000", f"bind 127.0.0.1:{port}"), ("/run/haproxy/keepd.sock", f"{tmp_path}/admin.sock")]))
    check(f"http://127.0.0.1:{port}", tmp_path)


def test_tls_on_one_daemon(tmp_path):
    """The lines run in a shell, in this order; the daemon, which does not end by itself, in the background."""
    port = free_port()
    lines = replace(recipe("sh"), [("8443", str(port)), ("keepd MODEL", f"{BINARY} {ROOT}/bundled/keepd-nano --max-model-len 1024"),
                                   ("0.0.0.0", "127.0.0.1")]).splitlines()
    (daemon,) = [line for line in lines if line.startswith(str(BINARY))]
    prepare, ask = "\n".join(lines[:lines.index(daemon)]), lines[lines.index(daemon) + 1]
    subprocess.run(["bash", "-ec", prepare], cwd=tmp_path, check=True, timeout=60)
    process = subprocess.Popen(daemon.split(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout.readline().startswith("keepd ready at https://")
        answer = subprocess.run(["bash", "-ec", ask.replace("curl ", "curl -sS --fail ", 1)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0 and '"keepd-nano"' in answer.stdout, answer.stderr
        refused = subprocess.run(["curl", "-sS", "--cacert", "cert.pem", f"https://localhost:{port}/v1/models"], cwd=tmp_path, capture_output=True,
                                 text=True, timeout=60)
        assert "invalid_api_key" in refused.stdout or "API key" in refused.stdout, refused.stdout
    finally:
        process.terminate()
        process.wait(timeout=60)
