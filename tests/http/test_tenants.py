"""Tenants: settings behind the keys of --api-key-file."""
import re
import signal
import threading

from conftest import chat_body

CHAT = "/v1/chat/completions"


def as_key(key):
    return {"Authorization": f"Bearer {key}"}


def tenants(daemon, key):
    """{metric: {name: value}}"""
    text = daemon.get("/metrics", headers=as_key(key)).text
    found = {}
    for metric, name, value in re.findall(r'^keepd_tenant_(\w+)\{[^}]*tenant="([^"]*)"[^}]*\} (\S+)$', text, re.M):
        found.setdefault(metric, {})[name] = float(value)
    return found


def wait_for(daemon, key, name, metric, value):
    daemon.wait(f"{metric} {value}", lambda: tenants(daemon, key)[metric][name] == value)


def test_requests_at_once(slow, tmp_path):
    """A key with requests=2 has a third one refused until one ends; others are not concerned; a reload changes the limit.

    A key that was removed and comes back counts only its own requests."""
    file = tmp_path / "keys"
    file.write_text("bound name=batch requests=2\nfree name=chat\n")
    daemon = slow("--api-key-file", str(file), step_us=80000)
    long = chat_body(max_tokens=900, ignore_eos=True)  # over a minute: it ends only when its client leaves
    sent = [daemon.post(CHAT, {**long, "stream": True}, headers=as_key("bound"), stream=True) for _ in range(2)]
    wait_for(daemon, "free", "batch", "requests_active", 2)
    r = daemon.post(CHAT, long, headers=as_key("bound"))
    assert r.status_code == 429 and r.json()["error"]["code"] == "too_many_requests" and int(r.headers["retry-after"]) >= 1
    assert daemon.post(CHAT, chat_body(max_tokens=1), headers=as_key("free")).status_code == 200
    assert daemon.get("/v1/models", headers=as_key("bound")).status_code == 200
    sent.pop().close()
    wait_for(daemon, "free", "batch", "requests_active", 1)
    assert daemon.post(CHAT, chat_body(max_tokens=1), headers=as_key("bound")).status_code == 200
    file.write_text("bound name=batch requests=1\nfree name=chat\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the reload", lambda: any("read again" in line for line in daemon.errors))
    assert daemon.post(CHAT, chat_body(max_tokens=1), headers=as_key("bound")).status_code == 429
    file.write_text("free name=chat\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the reload", lambda: sum("read again" in line for line in daemon.errors) == 2)
    file.write_text("bound name=batch requests=1\nfree name=chat\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the reload", lambda: sum("read again" in line for line in daemon.errors) == 3)
    sent.append(daemon.post(CHAT, {**long, "stream": True}, headers=as_key("bound"), stream=True))  # the key is a new one
    wait_for(daemon, "free", "batch", "requests_active", 1)
    sent.pop(0).close()
    daemon.wait("the old one's end", lambda: daemon.get("/kv", headers=as_key("free")).json()["running_count"] == 1)
    assert daemon.post(CHAT, chat_body(max_tokens=1), headers=as_key("bound")).status_code == 429
    sent.pop().close()
    wait_for(daemon, "free", "batch", "requests_active", 0)


def test_metrics_have_names_and_no_key(start, tmp_path):
    file = tmp_path / "keys"
    file.write_text("sk-one name=search weight=4\nsk-two name=search pages=100000\nsk-three name=batch\nsk-four\n")
    daemon = start("--api-key-file", str(file), "--api-key", "sk-five")
    for key in ("sk-one", "sk-two", "sk-three", "sk-four", "sk-five"):
        assert daemon.post(CHAT, chat_body(max_tokens=3, ignore_eos=True), headers=as_key(key)).status_code == 200
    wait_for(daemon, "sk-four", "search", "generation_tokens_total", 6)
    found = tenants(daemon, "sk-four")
    assert found["requests_total"] == {"search": 2, "batch": 1}
    assert found["generation_tokens_total"] == {"search": 6, "batch": 3}
    assert found["prompt_tokens_total"]["search"] == 2 * found["prompt_tokens_total"]["batch"] > 0
    assert found["requests_active"] == {"search": 0, "batch": 0} and found["requests_rejected_total"] == {"search": 0, "batch": 0}
    assert "sk-" not in daemon.get("/metrics", headers=as_key("sk-four")).text


def test_a_flood_of_one_key_does_not_refuse_another(slow, tmp_path):
    """Eight requests of one key at once, three of them accepted; the other key's are all answered."""
    file = tmp_path / "keys"
    file.write_text("flood requests=3\nguest weight=2\n")
    daemon = slow("--api-key-file", str(file), step_us=2000)
    codes = []

    def flood():
        codes.append(daemon.post(CHAT, chat_body(max_tokens=200, ignore_eos=True), headers=as_key("flood")).status_code)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert [daemon.post(CHAT, chat_body(max_tokens=2), headers=as_key("guest")).status_code for _ in range(4)] == [200] * 4
    for thread in threads:
        thread.join()
    assert codes.count(200) >= 3 and codes.count(200) + codes.count(429) == 8


def test_faults_name_the_option_and_not_the_key(start, tmp_path):
    file = tmp_path / "keys"
    file.write_text("good\n")
    daemon = start("--api-key-file", str(file))
    file.write_text("secret weight=none\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait("the refusal", lambda: any("reload rejected, nothing changed: api-key-file: weight after a key" in line for line in daemon.errors))
    assert not any("secret" in line for line in daemon.errors)
    assert daemon.get("/v1/models", headers=as_key("good")).status_code == 200


def test_pins_and_times_to_live(start, tmp_path):
    """Both are asked for in `kv.retain`; pins need pages of the key; lists show both."""
    file = tmp_path / "keys"
    file.write_text("free name=free\npins name=pins pins=100\n")
    daemon = start("--api-key-file", str(file))

    def ask(key, retain, text="a"):
        return daemon.post(CHAT, chat_body(text, max_tokens=2, kv={"retain": retain}), headers=as_key(key))

    for retain, field in (({"pin": True}, "kv.retain.pin"), ({"ttl": 0}, "kv.retain.ttl"), ({"ttl": 1.5}, "kv.retain.ttl"),
                          ({"pin": 1}, "kv.retain.pin"), ({"for": 3}, "kv.retain.for"), (3600, "kv.retain"), ([], "kv.retain")):
        r = ask("free", retain)
        assert r.status_code == 400 and r.json()["error"]["param"] == field, r.text
    details = ask("pins", {"pin": True, "ttl": 3600}).json()["usage"]["kv_details"]
    assert details["pinned"] is True
    assert "pinned" not in ask("pins", {"ttl": None}, "b").json()["usage"]["kv_details"]
    rows = daemon.get("/v1/conversations", headers=as_key("pins")).json()["data"]
    assert sorted((row["pinned"], row["ttl"] is None) for row in rows) == [(False, True), (True, False)]
    assert 3500 < next(row["ttl"] for row in rows if row["pinned"]) <= 3600
    assert ask("free", {}).status_code == 200
