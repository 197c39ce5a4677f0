"""Server-sent events, byte for byte."""
import json
import re

import pytest
import requests
from conftest import LENGTH, MODEL, chat_body, events, read_all, read_until, request_bytes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def streamed(daemon, body, path=CHAT):
    r = requests.post(daemon.url + path, json={**body, "stream": True}, stream=True, timeout=60)
    assert r.status_code == 200, r.text
    return r


def masked(raw):
    """Ids and times differ from run to run."""
    raw = re.sub(rb'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', rb'"id":"ID"', raw)
    raw = re.sub(rb'"system_fingerprint":"keepd-[0-9.]+"', rb'"system_fingerprint":"keepd-V"', raw)
    return re.sub(rb'"created":\d+', rb'"created":0', raw)


def head(kind):
    return (b'data: {"id":"ID","object":"%s","created":0,"model":"%s","system_fingerprint":"keepd-V","choices":['
            % (kind, MODEL.encode()))


def test_chat_bytes(shared, fake):
    r = streamed(shared, chat_body("h\u00e9!", max_tokens=8))
    assert r.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert r.headers["cache-control"] == "no-cache" and r.headers["x-accel-buffering"] == "no"
    assert r.headers["x-request-id"].startswith("req_")
    begin, rest = head(b"chat.completion.chunk"), b'},"logprobs":null,"finish_reason":null}]}\n\n'
    assert masked(r.content) == (
        begin + b'{"index":0,"delta":{"role":"assistant","content":""' + rest
        + begin + b'{"index":0,"delta":{"content":"h"' + rest
        + begin + '{"index":0,"delta":{"content":"\u00e9"'.encode() + rest
        + begin + b'{"index":0,"delta":{"content":"!"' + rest
        + begin + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
        + b"data: [DONE]\n\n")


def test_chat_bytes_with_usage(shared, fake):
    r = streamed(shared, chat_body("a", stream_options={"include_usage": True}, kv={"retain": False}))
    lines = masked(r.content).split(b"\n\n")
    assert all(line.endswith(b'],"usage":null}') for line in lines[:-3])
    assert lines[-3] == (
        head(b"chat.completion.chunk") + b'],"usage":{"prompt_tokens":20,"completion_tokens":2,"total_tokens":22,'
        b'"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0,'
        b'"accepted_prediction_tokens":0,"rejected_prediction_tokens":0},'
        b'"kv_details":{"policy":"global","budget":1024,"seen_tokens":22,"kept_entries":88,"evicted_entries":0,'
        b'"dropped_tokens":0,"shifts":0,"bytes":65536}}}')
    assert lines[-2:] == [b"data: [DONE]", b""]


def test_usage_in_every_stream(start):
    daemon = start("--force-include-usage")
    for path, body in ((CHAT, chat_body("a")), (TEXT, {"model": MODEL, "prompt": "ab", "max_tokens": 2})):
        for options in ({}, {"stream_options": {"include_usage": False}}):
            chunks = [json.loads(event) for event in events(streamed(daemon, {**body, "stream": True, **options}, path))[:-1]]
            assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert "usage" in daemon.chat("a").json()


def test_completion_bytes(shared, fake):
    r = streamed(shared, {"model": MODEL, "prompt": "ab", "temperature": 0, "max_tokens": 2, "logprobs": 0}, TEXT)
    begin = head(b"text_completion")
    score = (b'"logprobs":{"tokens":["%b"],"token_logprobs":[%b],"top_logprobs":[{"%b":%b}],"text_offset":[%b]},'
             b'"finish_reason":null}]}\n\n')
    assert masked(r.content) == (
        begin + b'{"index":0,"text":"a",' + score % (b"a", b"-0.25", b"a", b"-0.25", b"0")
        + begin + b'{"index":0,"text":"b",' + (score % (b"b", b"-0.375", b"b", b"-0.375", b"1")).replace(
            b'"finish_reason":null', b'"finish_reason":"length","stop_reason":null')
        + b"data: [DONE]\n\n")


@pytest.mark.parametrize("path,fields", [(TEXT, {"n": 3, "logprobs": 1}), (TEXT, {"n": 2}), (CHAT, {"n": 2, "logprobs": True})])
@pytest.mark.parametrize("most", [1, 4, 30])
def test_the_last_token_and_the_end_are_one_event(shared, fake, path, fields, most):
    """As vLLM sends them: of a completion, and of a chat whose client counts tokens by events."""
    body = {**(chat_body("abcdef") if path == CHAT else {"model": MODEL, "prompt": "abcdef"}), **fields, "temperature": 0,
            "max_tokens": most, "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    whole = shared.post(path, {k: v for k, v in body.items() if k != "stream_options"}).json()["choices"]
    chunks = [json.loads(e) for e in events(streamed(shared, body, path))[:-1]]
    for i, choice in enumerate(whole):
        own = [(c["choices"][0], c["usage"]) for c in chunks if c["choices"] and c["choices"][0]["index"] == i]
        own = [(c, usage) for c, usage in own if c.get("delta", {}).get("role") is None]
        text = "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c, _ in own)
        assert text == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert [id for c, _ in own for id in c["token_ids"]] == choice["token_ids"]
        assert len(own) == len(choice["token_ids"]), "an event for each token and no other"
        assert [c["finish_reason"] for c, _ in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        if "logprobs" in fields:
            assert all(c["logprobs"] for c, _ in own)
    assert chunks[-2]["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole)


def test_a_last_token_that_ends_in_a_character(shared, fake):
    """Half a character at the end is part of the last event, and what a stop string leaves is sent before it."""
    body = {"model": MODEL, "prompt": "a\U0001f600", "temperature": 0}
    for fields, texts, reason in (({"max_tokens": 3}, ["a", "\ufffd"], "length"), ({"stop": "a"}, [""], "stop")):
        chunks = [json.loads(e)["choices"][0] for e in events(streamed(shared, {**body, **fields}, TEXT))[:-1]]
        assert [c["text"] for c in chunks] == texts and chunks[-1]["finish_reason"] == reason


def test_the_end_is_one_write(shared):
    """Finish, usage, [DONE] and the closing chunk arrive together, whatever the reader does."""
    body = chat_body(stream=True, stream_options={"include_usage": True})
    for _ in range(20):
        with shared.socket() as sock:
            sock.sendall(request_bytes(CHAT, body))
            data = b""
            while b'"finish_reason":"' not in data:
                data += (got := sock.recv(65536))
                assert got
            assert b'"usage":{' in data and data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), data


def test_bytes_do_not_depend_on_timing(slow, shared):
    body = chat_body("x\u00e9\U0001f600yz END of it", stop=["END OF", "zzz"], logprobs=True, top_logprobs=1, max_tokens=40)
    daemon = slow(step_us=3000)
    assert masked(streamed(daemon, body).content) == masked(streamed(shared, body).content)
    body = {"temperature": 0, "model": MODEL, "prompt": "x\u00e9\U0001f600yz", "stop": ["zq"], "logprobs": 1, "max_tokens": 8}
    for more in ({}, {"stop": ["z"]}, {"max_tokens": 40}, {"return_token_ids": True}):
        once, again = (masked(streamed(d, {**body, **more}, TEXT).content) for d in (daemon, shared))
        assert once == again


@pytest.mark.parametrize("text", ["\U0001f600\u00e9\u4e2d", "a\u0301", "\u2028\u2029", "\"\\\n\t\r", "</script>"])
def test_text_survives(shared, fake, text):
    whole = shared.chat(text, max_tokens=64).json()["choices"][0]["message"]["content"]
    chunks = [json.loads(e) for e in events(streamed(shared, chat_body(text, max_tokens=64)))[:-1]]
    assert whole == text == "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


def test_cut_inside_a_character(shared, fake):
    """Three bytes of a four-byte character: U+FFFD in both forms, and valid UTF-8 on the wire."""
    body = chat_body("\U0001f600", max_tokens=3)
    whole = shared.post(CHAT, body).json()["choices"][0]["message"]["content"]
    raw = streamed(shared, body).content.decode("utf-8", "strict")
    chunks = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
    assert whole == "\ufffd" == "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


def test_stop_strings(shared, fake):
    for stop, expected, reason in ((["lo w"], "hel", "lo w"), ("o", "hell", "o"), (["zz", "wor"], "hello ", "wor"),
                                   (["h"], "", "h")):
        body = chat_body("hello world", stop=stop, max_tokens=64)
        choice = shared.post(CHAT, body).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop",
                                                                                                 reason)
        chunks = [json.loads(e)["choices"][0] for e in events(streamed(shared, body))[:-1]]
        assert "".join(c["delta"].get("content", "") for c in chunks) == expected
        assert chunks[-1]["stop_reason"] == reason


def test_stop_token_ids(shared, fake):
    choice = shared.chat("hello", stop_token_ids=[ord("l")]).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("he", ord("l"))


def test_min_tokens_and_ignore_eos(shared, fake):
    assert shared.chat("hey", min_tokens=10, max_tokens=16).json()["usage"]["completion_tokens"] > 10
    answer = shared.chat("hey", ignore_eos=True, max_tokens=16).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 16


def test_echo_streamed(shared, fake):
    body = {"model": MODEL, "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    chunks = [json.loads(e)["choices"][0] for e in events(streamed(shared, body, TEXT))[:-1]]
    assert [c["text"] for c in chunks] == ["abc", "a", "b"]
    assert chunks[0]["logprobs"]["tokens"] == ["a", "b", "c"] and chunks[0]["logprobs"]["token_logprobs"][0] is None
    assert [o for c in chunks for o in c["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]


def test_silent_streams_get_comments(slow):
    daemon = slow(step_us=400000, ping=50)
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body("ab", stream=True)))
        data = read_until(sock, b"data: [DONE]")
    parts = data.split(b"\r\n\r\n", 1)[1]
    assert parts.count(b": keepd\n\n") >= 3 and b"\nid:" not in parts and b"event:" not in parts
    first = parts.index(b"data: ")
    assert b'"role":"assistant"' in parts[first:first + 250], "the role comes with the first token"


def test_comment_before_the_first_token(slow):
    """During a long prefill the header and comments are sent; the role chunk waits for the first token."""
    daemon = slow(step_us=50000, prefill=20, ping=50, first=50)
    with daemon.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body("ab", stream=True)))
        data = read_until(sock, b"data: ")
    assert data.startswith(b"HTTP/1.1 200") and data.count(b": keepd\n\n", 0, data.index(b"data: ")) >= 2


def test_a_queued_stream_shows_that_it_lives(slow):
    """One place, taken for long: the second stream has its header and comments all the same."""
    daemon = slow("--max-num-seqs", "1", step_us=20000, first=50, ping=50)
    with daemon.socket() as first, daemon.socket() as second:
        first.sendall(request_bytes(CHAT, chat_body("x" * 50, max_tokens=900, stream=True, ignore_eos=True)))
        read_until(first, b"data: ")
        second.sendall(request_bytes(CHAT, chat_body("ab", stream=True)))
        data = read_until(second, b": keepd\n\n")
        assert data.startswith(b"HTTP/1.1 200") and b"data: " not in data
        assert daemon.kv()["waiting_count"] == 1
        first.close()
        assert b'"finish_reason":"stop"' in read_until(second, b"data: [DONE]")


def test_failure_behind_the_header_is_an_event(slow):
    daemon = slow("--max-num-seqs", "1", step_us=20000, first=50)
    with daemon.socket() as first, daemon.socket() as second:
        first.sendall(request_bytes(CHAT, chat_body("x" * 50, max_tokens=900, stream=True, ignore_eos=True)))
        read_until(first, b"data: ")
        second.sendall(request_bytes(CHAT, chat_body("ab", stream=True), "X-Request-Timeout: 0.3"))
        data = read_until(second, b"data: [DONE]")
    assert data.startswith(b"HTTP/1.1 200") and b'"code":"request_timeout"' in data


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_progress_of_the_prompt(slow, path):
    """Opted in: the header at once, then how much was found and has been read, up to the whole prompt."""
    daemon = slow(step_us=30000, prefill=8, first=60000)
    body = chat_body("p" * 300) if path == CHAT else {"model": MODEL, "prompt": "p" * 300, "max_tokens": 4}
    chunks = [json.loads(e) for e in events(streamed(daemon, {
        **body, "stream_options": {"include_progress": True, "include_usage": True}}, path))[:-1]]
    seen = [c["prompt_progress"]["processed"] for c in chunks if "prompt_progress" in c]
    total = chunks[-1]["usage"]["prompt_tokens"]
    assert seen == sorted(set(seen)) and len(seen) >= 3 and (seen[0], seen[-1]) == (0, total)
    assert {c["prompt_progress"]["total"] for c in chunks if "prompt_progress" in c} == {total}
    assert all("prompt_progress" in c and not c["choices"] for c in chunks[:len(seen)])
    plain = events(streamed(daemon, body, path))
    assert not any("prompt_progress" in e for e in plain)


def test_progress_begins_with_what_was_found(start):
    daemon = start()
    body = {"model": MODEL, "prompt": "p" * 300, "max_tokens": 4, "stream_options": {"include_progress": True}}
    for cached in (0, 300):
        chunks = [json.loads(e) for e in events(streamed(daemon, body, TEXT))[:-1]]
        progress = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
        assert {p["cache"] for p in progress} == {progress[0]["processed"]} and progress[-1]["processed"] == progress[0]["total"]
        assert (progress[0]["cache"] > 0) == (cached > 0)
        text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
        body["prompt"] += text + "q"


def test_http_1_0_stream(shared):
    with shared.socket() as sock:
        sock.sendall(request_bytes(CHAT, chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        data = read_all(sock)
    assert data.startswith(b"HTTP/1.") and data.endswith(b"data: [DONE]\n\n")


def test_long_answer_with_every_position(shared):
    r = shared.chat("x" * 400, max_tokens=200, ignore_eos=True, kv={"report": "positions"}).json()
    details = r["usage"]["kv_details"]
    lengths, positions = details["lengths"], details["positions"]
    assert sum(map(sum, lengths)) == details["kept_entries"]
    assert [[len(head) for head in layer] for layer in positions] == lengths
    assert all(0 <= p < details["seen_tokens"] <= LENGTH for layer in positions for h in layer for p in h)
    streams = events(streamed(shared, chat_body("y" * 400, max_tokens=200, ignore_eos=True, kv={"report": "positions"},
                                                stream_options={"include_usage": True})))
    assert "positions" in json.loads(streams[-2])["usage"]["kv_details"] and streams[-1] == "[DONE]"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_entries_of_each_head_while_an_answer_runs(start, path):
    """Opted in: an event without choices before the first token, once, because the fake engine does not evict."""
    daemon = start()
    body = chat_body("p" * 300) if path == CHAT else {"model": MODEL, "prompt": "p" * 300, "max_tokens": 4}
    options = {"include_kv": True, "include_usage": True}
    chunks = [json.loads(e) for e in events(streamed(daemon, {**body, "stream_options": options}, path))[:-1]]
    total = chunks[-1]["usage"]["prompt_tokens"]
    assert [c["kv_progress"] for c in chunks if "kv_progress" in c] == [{"seen_tokens": total, "lengths": [[total] * 2] * 2}]
    assert "kv_progress" in chunks[0] and chunks[0]["choices"] == []
    assert not any("kv_progress" in e for e in events(streamed(daemon, body, path)))
    wrong = daemon.post(path, {**body, "stream": True, "stream_options": {"include_kv": 1}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "stream_options.include_kv"
