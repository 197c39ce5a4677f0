"""Retained conversations: listing, deleting, sharing only within a key and a salt; hints grant no access."""
import concurrent.futures
import re

import pytest
import requests
from conftest import MODEL, chat_body, read_all, request_bytes

CHAT = "/v1/chat/completions"


def listed(daemon, **params):
    return daemon.get("/v1/conversations", params=params).json()["data"]


def test_list_and_delete(start):
    daemon = start()
    assert daemon.get("/v1/conversations").json() == {"object": "list", "data": []}
    daemon.chat("first " * 20, max_tokens=4)
    daemon.chat("second " * 20, max_tokens=4)
    daemon.wait_idle()
    rows = listed(daemon)
    assert len(rows) == 2 and {r["id"] for r in rows} == {r["id"] for r in daemon.kv()["conversations"]}
    r = daemon.http.delete(f"{daemon.url}/v1/conversations/{rows[0]['id']}", timeout=60)
    assert r.json() == {"id": rows[0]["id"], "object": "conversation.deleted", "deleted": True}
    assert [row["id"] for row in listed(daemon)] == [rows[1]["id"]]
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_retained"] == rows[1]["pages"]
    for name in (rows[0]["id"], "0" * 16, "x", "F" * 16, "1" * 17):
        r = daemon.http.delete(f"{daemon.url}/v1/conversations/{name}", timeout=60)
        assert r.status_code == 404 and r.json()["error"]["code"] == "conversation_not_found", name


def test_a_crowd_hides_nobody(start):
    """A conversation is listed and can be deleted, however many conversations others have."""
    daemon = start("--max-conversations", "2000")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: daemon.chat(f"conversation {i}", max_tokens=1, cache_salt="crowd"), range(1100)))
    daemon.chat("mine", max_tokens=1, cache_salt="me")
    daemon.wait_idle()
    (row,) = listed(daemon, cache_salt="me")
    url = f"{daemon.url}/v1/conversations/{row['id']}"
    assert requests.delete(url, params={"cache_salt": "me"}, timeout=60).status_code == 200
    assert listed(daemon, cache_salt="me") == []


def test_a_deleted_conversation_is_not_continued(start):
    daemon = start()
    messages = chat_body("a long enough beginning " * 5)["messages"]
    first = daemon.chat(messages=messages).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and?"}]
    daemon.wait_idle()
    for row in listed(daemon):
        daemon.http.delete(f"{daemon.url}/v1/conversations/{row['id']}", timeout=60)
    assert daemon.chat(messages=messages).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_moving_needs_a_state_directory(start):
    """Both ways are refused by name here; tests/e2e/test_move.py moves conversations."""
    daemon = start()
    daemon.chat("stays", max_tokens=2)
    daemon.wait_idle()
    (row,) = listed(daemon)
    r = daemon.get(f"/v1/conversations/{row['id']}/state")
    assert r.status_code == 409 and r.json()["error"]["code"] == "conversation_not_written"
    assert daemon.get(f"/v1/conversations/{'0' * 16}/state").status_code == 404
    for body in (b"", b"x" * 1000, b"x" * 1000000):
        r = requests.put(f"{daemon.url}/v1/conversations", data=body, timeout=60)
        assert r.status_code == 400 and r.json()["error"]["code"] == "unsupported_state", r.text
    r = requests.post(f"{daemon.url}/v1/conversations", data=b"x", timeout=60)
    assert r.status_code == 405 and r.headers["Allow"] == "GET, HEAD, PUT"
    assert daemon.chat("goes on", max_tokens=2).status_code == 200
    assert daemon.http.delete(f"{daemon.url}/v1/conversations/{row['id']}", timeout=60).status_code == 200
    assert daemon.stop() == 0
    logged = [line for line in daemon.errors if "path=/v1/conversations" in line]  # changes, and no questions
    assert [line.split()[1] for line in logged] == ["info"] * 4, daemon.errors


def test_a_slow_disk_keeps_no_text_waiting(start, fake, tmp_path):
    """Uploads have at most half of the threads that read requests; the others wait for their turn."""
    gate = tmp_path / "gate"
    daemon = start(env={"KEEPD_FAKE_GATE": str(gate)})
    socks = [daemon.socket() for _ in range(6)]
    for sock in socks:
        sock.sendall(b"PUT /v1/conversations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nConnection: close\r\n\r\nno state!")
    assert daemon.chat("not at a closed one", max_tokens=2).status_code == 200
    gate.touch()
    for sock in socks:
        assert read_all(sock).startswith(b"HTTP/1.1 400")
        sock.close()


def test_salts_see_only_their_own(start):
    daemon = start()
    daemon.chat("of alice", max_tokens=2, cache_salt="alice")
    daemon.wait_idle()
    assert listed(daemon) == [] == listed(daemon, cache_salt="bob")
    (row,) = listed(daemon, cache_salt="alice")
    url = f"{daemon.url}/v1/conversations/{row['id']}"
    assert requests.delete(url, timeout=60).status_code == 404
    assert requests.delete(url, params={"cache_salt": "alice"}, timeout=60).status_code == 200
    r = daemon.get("/v1/conversations", params={"cache_salt": "x" * 1025})
    assert r.status_code == 400 and r.json()["error"]["param"] == "cache_salt"


def test_keys_see_only_their_own(start):
    daemon = start("--api-key", "a", "--api-key", "b")

    def call(method, key, path, **options):
        return requests.request(method, daemon.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60, **options)

    assert call("post", "a", CHAT, json=chat_body("of a", max_tokens=2)).status_code == 200
    daemon.wait("the conversation", lambda: call("get", "a", "/v1/conversations").json()["data"])
    assert call("get", "b", "/v1/conversations").json()["data"] == []
    path = "/v1/conversations/" + call("get", "a", "/v1/conversations").json()["data"][0]["id"]
    assert call("delete", "b", path).status_code == 404
    assert call("delete", "a", path).status_code == 200


@pytest.mark.parametrize("where", ["X-Session-ID", "session_id", "prompt_cache_key", "user"])
def test_hints_choose_among_equals_and_open_nothing(start, where):
    """With two equal dialogues the hint selects which one continues. A hint never opens another salt."""
    daemon = start()

    def turn(messages, name, **fields):
        if where == "X-Session-ID":
            return daemon.post(CHAT, chat_body(messages=messages, **fields), headers={where: name}).json()
        return daemon.chat(messages=messages, **{where: name}, **fields).json()

    messages = chat_body("the same long beginning " * 5)["messages"]
    a, b = turn(messages, "a", kv={"reuse": False}), turn(messages, "b", kv={"reuse": False})
    assert a["choices"][0]["message"] == b["choices"][0]["message"]
    messages += [a["choices"][0]["message"], {"role": "user", "content": "next"}]
    assert turn(messages, "a", cache_salt="closed")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert turn(messages, "c")["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "no hint is needed"


def test_a_client_that_does_not_wait(start):
    daemon = start()
    daemon.chat("to be deleted", max_tokens=2)
    daemon.wait_idle()
    (row,) = listed(daemon)
    sock = daemon.socket()
    sock.sendall(request_bytes(f"/v1/conversations/{row['id']}", b"", method="DELETE"))
    sock.close()
    daemon.wait("the connection to close", lambda: daemon.metrics()["keepd_connections",] <= 2)
    assert daemon.get("/health").status_code == 200


def test_routers(shared):
    """Small routes that routers and tools use."""
    info = shared.get("/server_info").json()
    assert info["served_model_name"] == MODEL
    assert shared.get("/is_sleeping").json() == {"is_sleeping": False}
    load = shared.get("/v1/loads", params={"include": "core"}).json()["loads"][0]
    assert load["num_total_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"]
    assert 0 <= load["token_usage"] <= 1 and load["max_total_num_tokens"] > 0
    tokenizer = shared.get("/tokenizer_info").json()
    assert tokenizer["eos_token"] and tokenizer["chat_template"]


def test_load_header(shared):
    """ORCA: the load header is sent only on request, in the requested form, with streams too."""
    for form in ("TEXT", "text", "JSON"):
        for stream in (False, True):
            r = shared.post(CHAT, chat_body(stream=stream), headers={"endpoint-load-metrics-format": form})
            value = r.headers["endpoint-load-metrics"]
            assert value.startswith(form.upper()) and "kv_cache_usage_perc" in value and "num_requests_waiting" in value
            assert 0 <= float(re.search(r'application_utilization"?[=:] ?([0-9.e-]+)', value).group(1)) <= 1
    assert "endpoint-load-metrics" not in shared.chat().headers
    assert "endpoint-load-metrics" not in shared.post(CHAT, chat_body(),
                                                      headers={"endpoint-load-metrics-format": "XML"}).headers


def test_the_session_is_returned(shared):
    """For routers and logs. A longer one than keepd reads is not returned. The description names the header."""
    document = shared.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion", "/infill", "/invocations"):
        operation = document["paths"][path]["post"]
        assert operation["parameters"] == [{"$ref": "#/components/parameters/Session"}]
        assert operation["responses"]["200"]["headers"] == {"X-Session-ID": {"$ref": "#/components/headers/Session"}}
    assert document["components"]["parameters"]["Session"]["name"] == "X-Session-ID"
    for stream in (False, True):
        r = shared.post(CHAT, chat_body(stream=stream), headers={"X-Session-ID": "dialogue-7"})
        assert r.headers["X-Session-ID"] == "dialogue-7"
    assert shared.post(CHAT, {}, headers={"X-Session-ID": "a b"}).headers["X-Session-ID"] == "a b"
    assert "X-Session-ID" not in shared.chat().headers
    assert "X-Session-ID" not in shared.post(CHAT, chat_body(), headers={"X-Session-ID": "x" * 1025}).headers


def test_load_header_wants_a_key(start):
    daemon = start("--api-key", "secret")
    for key, status, told in (("secret", 200, True), ("guessed", 401, False)):
        r = daemon.post(CHAT, chat_body(), headers={"endpoint-load-metrics-format": "TEXT", "Authorization": f"Bearer {key}"})
        assert r.status_code == status and ("endpoint-load-metrics" in r.headers) == told


def test_too_many_deletes(slow):
    """Deletions beyond the engine's limit between two steps are told to retry."""
    daemon = slow(step_us=2000000)
    daemon.chat("first " * 20, max_tokens=1)
    path = f"/v1/conversations/{listed(daemon)[0]['id']}"
    order = request_bytes(path, b"", "Connection: close", method="DELETE")
    socks = [daemon.socket() for _ in range(80)]
    try:
        for sock in socks:
            sock.sendall(order)
        answers = [read_all(sock) for sock in socks]
    finally:
        for sock in socks:
            sock.close()
    refused = [a for a in answers if a.startswith(b"HTTP/1.1 503")]
    assert refused and all(b"Too many conversations are being deleted" in a and b"etry-After" in a for a in refused)
    assert len([a for a in answers if a.startswith(b"HTTP/1.1 200")]) == 1, "the first deletes, the others find nothing"
