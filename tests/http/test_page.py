"""The page at / as HTTP sees it. (What it does in a browser is tests/e2e/test_page.py.)"""
import base64
import hashlib
import re

import requests

BYTES_MAX = 100_000


def directives(answer):
    parts = (part.split(None, 1) for part in answer.headers["Content-Security-Policy"].split("; "))
    return {name: value for name, value in parts}


def digest(text):
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def test_one_file(shared):
    answer = shared.get("/")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert len(answer.content) < BYTES_MAX
    # nothing is loaded from elsewhere
    assert all(url.startswith("data:") for url in re.findall(r'(?:src|href)="([^"]*)"', answer.text))
    assert requests.head(shared.url + "/", timeout=60).headers["Content-Length"] == str(len(answer.content))


def test_policy_allows_only_its_own_script_and_style(shared):
    answer = shared.get("/")
    policy = directives(answer)
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        elements = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.S)
        assert [policy[f"{tag}-src"]] == [digest(text) for text in elements]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_only_the_page_needs_no_key(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-key-of-the-test\n")
    keys.chmod(0o600)
    daemon = start("--api-key-file", str(keys))
    assert daemon.get("/").status_code == 200
    assert daemon.get("/kv").status_code == 401


def test_turned_off(start):
    daemon = start("--no-ui")
    answer = daemon.get("/")
    assert answer.status_code == 404 and "--no-ui" in answer.json()["error"]["message"]


def test_other_methods_and_paths(shared):
    answer = requests.post(shared.url + "/", json={}, timeout=60)
    assert answer.status_code == 405 and answer.headers["Allow"] == "GET, HEAD"
    assert shared.get("/index.html").status_code == 404


def test_policies_are_those_that_requests_may_name(shared):
    for name in shared.get("/server_info").json()["kv_policies"]:
        assert shared.chat(kv={"policy": name}).status_code == 200
