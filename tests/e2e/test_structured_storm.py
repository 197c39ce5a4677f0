"""A hundred constrained streams at once on all routes, with clients that disconnect; and hostile languages, which cost their
own request and no other one."""
import concurrent.futures as futures
import json

import jsonschema
import pytest
import requests
from test_storm import settle

CLIENTS = 100
SCHEMA = {"type": "object", "properties": {
    "name": {"type": "string", "minLength": 1, "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["name", "age", "tags"], "additionalProperties": False}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def request(i, stream=True):
    """(path, body) of client i; one in four is free."""
    user = [{"role": "user", "content": f"Client {i}: the code of the garage is {1000 + 37 * i}. Who are you?"}]
    common = {"model": "keepd-nano", "temperature": i % 2, "seed": i, "stream": stream, "kv": {"retain": False}}
    schema = {"type": "json_schema", "schema": SCHEMA}
    path, own = [(CHAT, {"messages": user, "max_tokens": 120, "guided_json": SCHEMA}),
                 (RESPONSES, {"input": user, "max_output_tokens": 120, "text": {"format": {**schema, "name": "x"}}, "store": False}),
                 (MESSAGES, {"messages": user, "max_tokens": 120, "output_config": {"format": schema}}),
                 (CHAT, {"messages": user, "max_tokens": 40})][i % 4]
    return path, {**own, **common}


def piece(event):
    """The text that an event of any route adds."""
    if "choices" in event:
        return "".join(c["delta"].get("content") or "" for c in event["choices"])
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


def reason(event):
    """Why the answer ended, in an event that says so."""
    if event.get("choices"):
        return event["choices"][0]["finish_reason"]
    if event.get("type") in ("response.completed", "response.incomplete"):
        return "stop" if event["response"]["status"] == "completed" else "length"
    if event.get("type") == "message_delta":
        return "stop" if event["delta"]["stop_reason"] == "end_turn" else "length"
    return None


def streamed(url, i, leave_after=None):
    path, body = request(i)
    text, end, seen = "", None, 0
    with requests.post(url + path, json=body, stream=True, timeout=300) as r:
        assert r.status_code == 200, r.text
        for line in r.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert not event.get("error"), event
            text += piece(event)
            end = reason(event) or end
            seen += 1
            if seen == leave_after:
                return None
    if i % 4 != 3 and end == "stop":
        jsonschema.validate(json.loads(text), SCHEMA)
    return text, end


def test_a_hundred_streams(daemon):
    d = daemon("--max-num-seqs", "32", "--max-queue", "128")
    alone = [streamed(d.url, i) for i in range(8)]
    with futures.ThreadPoolExecutor(CLIENTS) as pool:
        got = list(pool.map(lambda i: streamed(d.url, i, leave_after=1 + i % 7 if i % 3 == 2 else None), range(CLIENTS)))
    assert sum(g is None for g in got) == CLIENTS // 3, "these left"
    assert all(g is None or g == a for g, a in zip(got, alone)), "the answers are those of requests alone"
    ends = [g[1] for g in got if g]
    assert set(ends) <= {"stop", "length"} and ends.count("stop") > len(ends) // 2
    settle(d)


def nested(depth):
    schema = {"type": "string", "maxLength": 3}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 50, "maxItems": 1000}
    return schema


HOSTILE = {
    "nested repeats": {"guided_regex": "((((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"},
    "nested arrays": {"guided_json": nested(12)},
    "many enums": {"guided_json": {"enum": [f"value-{i:05d}-{'x' * (i % 50)}" for i in range(10000)]}},
    "endless references": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "wide recursion": {"guided_json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        f"p{i}": {"$ref": "#/$defs/n"} for i in range(500)}}}}},
    "catastrophic pattern": {"guided_json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$(a|aa)+b*c{3,900}"}},
    "catastrophic regex": {"guided_regex": "(a|aa|aaa|b?)*(a|ab|abc){200,800}[^b]{300}x?"},
    "intersections": {"guided_json": {"allOf": [{"type": "string", "pattern": f"[a-{chr(98 + i)}]{{{i},900}}.*{i}"} for i in range(20)]}},
}


@pytest.fixture(scope="module")
def shared():
    from conftest import Daemon
    d = Daemon("--max-num-seqs", "8")
    yield d
    assert d.stop() == 0


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_languages(shared, name):
    """A 400 that names the field, also where the answer ran into a limit, or an answer; free answers beside it are the
    same."""
    alone = streamed(shared.url, 3)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "temperature": 0, **HOSTILE[name]}
    with futures.ThreadPoolExecutor(5) as pool:
        free = [pool.submit(streamed, shared.url, 3) for _ in range(4)]
        r = pool.submit(requests.post, shared.url + CHAT, json=body, timeout=300).result()
        assert all(f.result() == alone for f in free)
    answer = r.json()
    if r.status_code == 400:
        param = answer["error"]["param"]
        assert param and param.split(".")[0] in HOSTILE[name], answer
    else:
        assert r.status_code == 200 and answer["choices"][0]["finish_reason"] in ("stop", "length"), answer
    settle(shared)
