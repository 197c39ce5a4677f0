"""Responses in the background: `background: true`, and what becomes of them. (The fake answers with the last user
message, a token for each byte.)"""
import pytest
import requests
from test_responses import PATH, ask, body, refused, without_ids

LONG = "a long story " * 30  # 390 tokens


def begin(daemon, text="hello", **fields):
    answer = ask(daemon, text, background=True, **fields)
    assert (answer["status"], answer["background"], answer["output"], answer["usage"]) == ("queued", True, [], None)
    return f"{PATH}/{answer['id']}"


def status(daemon, path):
    return daemon.get(path).json()["status"]


def ended(daemon, path):
    daemon.wait("its end", lambda: status(daemon, path) not in ("queued", "in_progress"))
    return daemon.get(path).json()


def test_an_answer_that_is_asked_for_later(shared, fake):
    plain = ask(shared, "hello", metadata={"a": "b"})
    path = begin(shared, metadata={"a": "b"})
    answer = ended(shared, path)
    assert answer["background"] is True and f"{PATH}/{answer['id']}" == path and answer["usage"]
    assert without_ids({**answer, "background": False}) == without_ids(plain)
    assert shared.post(path + "/cancel", None).json() == answer, "it has ended and stays as it is"
    assert shared.get(path + "/input_items").json()["data"][0]["content"][0]["text"] == "hello"
    assert ask(shared, "more", previous_response_id=answer["id"])["status"] == "completed"
    assert shared.http.delete(shared.url + path, timeout=60).json()["deleted"] is True
    assert shared.get(path).status_code == 404


def test_one_that_is_cut(shared, fake):
    answer = ended(shared, begin(shared, max_output_tokens=2))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_its_client_may_leave(patient):
    r = requests.post(patient.url + PATH, json=body("a story", background=True), headers={"Connection": "close"}, timeout=60)
    answer = ended(patient, f"{PATH}/{r.json()['id']}")
    assert answer["status"] == "completed" and answer["output"][0]["content"][0]["text"] == "a story"


def test_cancel(patient):
    path = begin(patient, LONG)
    patient.wait("its first token", lambda: status(patient, path) == "in_progress")
    assert patient.get(path + "/input_items").json()["data"][0]["content"][0]["text"] == LONG
    cancelled = patient.post(path + "/cancel", None).json()
    assert (cancelled["status"], cancelled["output"], cancelled["error"]) == ("cancelled", [], None)
    patient.wait("its end", lambda: patient.kv()["running_count"] == 0)
    assert patient.get(path).json() == cancelled == patient.post(path + "/cancel", None).json()
    assert patient.metrics()["vllm:generation_tokens_total",] < 390


def test_one_that_waits(slow):
    daemon = slow("--max-num-seqs", "1", step_us=5000)
    first, second = begin(daemon, LONG), begin(daemon, "next")
    assert status(daemon, second) == "queued"
    assert daemon.post(second + "/cancel", None).json()["status"] == "cancelled"
    assert daemon.post(first + "/cancel", None).json()["status"] == "cancelled"
    assert ended(daemon, second)["status"] == ended(daemon, first)["status"] == "cancelled"


def test_delete_ends_it(patient):
    path = begin(patient, LONG)
    assert patient.http.delete(patient.url + path, timeout=60).json()["deleted"] is True
    assert patient.get(path).status_code == patient.post(path + "/cancel", None).status_code == 404
    patient.wait("its end", lambda: patient.kv()["running_count"] == 0)
    assert patient.get(path).status_code == 404


def test_one_that_takes_too_long(patient):
    r = patient.post(PATH, body(LONG, background=True), headers={"X-Request-Timeout": "0.3"})
    answer = ended(patient, f"{PATH}/{r.json()['id']}")
    assert (answer["status"], answer["error"]["code"], answer["output"]) == ("failed", "server_error", [])
    assert "longer than" in answer["error"]["message"]


def test_a_part_of_the_queue(slow):
    """No connections bound the responses in the background, so they hold at most a quarter of the queue's places:
    others are still served. One that ends, or is deleted, makes room. (Each connection is a client here.)"""
    daemon = slow("--max-num-seqs", "1", "--max-queue", "8", step_us=20000)
    first = begin(daemon, LONG)
    daemon.http.close()
    second = begin(daemon, "next")
    daemon.http.close()
    third = daemon.post(PATH, body(background=True))
    assert (third.status_code, third.json()["error"]["param"]) == (503, "background")
    assert daemon.metrics()["keepd_requests_rejected_total", ("reason", "background")] == 1
    with requests.post(f"{daemon.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}], "stream": True},
                       stream=True, timeout=60) as waiting:
        assert waiting.status_code == 200
        assert [daemon.post(p + "/cancel", None).status_code for p in (first, second)] == [200, 200]
        assert b"[DONE]" in waiting.content
    assert ended(daemon, begin(daemon, "again"))["status"] == "completed"


def test_one_key_does_not_hold_the_background(slow):
    """A key's own responses are refused at its share of the background, two thirds; another key's are computed."""
    daemon = slow("--api-key", "hog", "--api-key", "guest", "--max-num-seqs", "1", "--max-queue", "24", step_us=20000)
    with_key = lambda key: {"Authorization": f"Bearer {key}"}
    ask_as = lambda key: daemon.post(PATH, body(LONG, background=True), headers=with_key(key))
    accepted = [("hog", ask_as("hog")) for _ in range(4)]
    assert [r.status_code for _, r in accepted] == [200] * 4
    r = ask_as("hog")
    assert (r.status_code, r.json()["error"]["code"], r.json()["error"]["param"]) == (429, "too_many_requests", "background")
    assert int(r.headers["retry-after"]) >= 1
    accepted.append(("guest", ask_as("guest")))
    assert accepted[-1][1].json()["status"] == "queued"
    for name, r in accepted:  # a daemon that stops waits for them
        daemon.post(f"{PATH}/{r.json()['id']}/cancel", None, headers=with_key(name))


def test_owners(slow):
    daemon = slow("--api-key", "a", "--api-key", "b", step_us=5000)
    key = lambda name: {"Authorization": f"Bearer {name}"}
    id = daemon.post(PATH, body(LONG, background=True, cache_salt="s"), headers=key("a")).json()["id"]
    for name, salt in (("b", "s"), ("a", ""), ("a", "t")):
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            r = daemon.http.request(method, f"{daemon.url}{PATH}/{id}{tail}", headers=key(name), params={"cache_salt": salt},
                                    timeout=60)
            assert (r.status_code, r.json()["error"]["code"]) == (404, "response_not_found")
    own = dict(headers=key("a"), params={"cache_salt": "s"})
    assert daemon.get(f"{PATH}/{id}", **own).json()["status"] in ("queued", "in_progress")
    assert daemon.http.post(f"{daemon.url}{PATH}/{id}/cancel", timeout=60, **own).json()["status"] == "cancelled"


def test_shutting_down_waits_for_it(slow):
    daemon = slow(step_us=5000)
    begin(daemon, "a story")
    assert daemon.stop() == 0 and any('"outcome":"stored"' in line or "outcome=stored" in line for line in daemon.errors), \
        "".join(daemon.errors)


def test_one_that_cannot_be_stored_is_lost(slow):
    """A response beyond its part of the table: the line of its end says so, because nobody will find it."""
    daemon = slow("--tool-call-parser", "none", step_us=1000)
    tools = [{"type": "function", "name": f"f{i}", "description": "x" * 60000, "parameters": {"type": "object"}} for i in range(80)]
    path = begin(daemon, "hi", tools=tools, tool_choice="none", max_output_tokens=2)
    daemon.wait("its end", lambda: any("outcome=lost" in line for line in daemon.errors))
    assert daemon.get(path).status_code == 404


def test_shutting_down_gives_it_up(slow):
    daemon = slow("--drain-seconds", "0", step_us=5000)
    begin(daemon, LONG)
    assert daemon.stop() == 0


def test_refusals(shared):
    assert "background can only be used when `store` is true" in refused(
        shared, 400, "background", "invalid_value", {"background": True, "store": False})
    refused(shared, 400, "background", "invalid_value", {"background": 1})
    answer = ask(shared)
    r = shared.post(f"{PATH}/{answer['id']}/cancel", None)
    assert (r.status_code, r.json()["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
    assert shared.post(PATH + "/unknown/cancel", None).status_code == 404
    r = shared.get(f"{PATH}/{answer['id']}/cancel")
    assert (r.status_code, r.headers["Allow"]) == (405, "POST")
