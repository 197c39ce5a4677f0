"""Fields, headers and routes that clients of other servers use."""
import json

import pytest
import requests
from conftest import LENGTH, MODEL, chat_body, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


def streamed(daemon, path, body):
    r = requests.post(daemon.url + path, json={**body, "stream": True}, stream=True, timeout=60)
    return [json.loads(e) for e in events(r)[:-1]]


def text_body(prompt="abcdef", **fields):
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}


def delta_text(chunks, path):
    return "".join(c["text"] if path == TEXT else c["delta"].get("content", "") for e in chunks for c in e["choices"])


def answer_text(answer, path):
    return answer["choices"][0]["text"] if path == TEXT else answer["choices"][0]["message"]["content"]


def body_of(path, text, **fields):
    return text_body(text, **fields) if path == TEXT else chat_body(text, **fields)


# --- prompts ---

def test_messages_as_a_prompt_are_explained(shared):
    """As lm-eval posts them with --apply_chat_template."""
    r = shared.post(TEXT, text_body([USER]))
    assert r.status_code == 400 and "/v1/chat/completions" in r.json()["error"]["message"]


def test_truncate_prompt_tokens(shared, fake):
    """The end of the prompt stays."""
    whole = shared.post(TEXT, text_body("abcdef", echo=True)).json()
    cut = shared.post(TEXT, text_body("abcdef", echo=True, truncate_prompt_tokens=2)).json()
    assert (whole["usage"]["prompt_tokens"], cut["usage"]["prompt_tokens"]) == (6, 2)
    assert cut["choices"][0]["text"].startswith("ef")
    assert shared.post(TEXT, text_body("ab", truncate_prompt_tokens=9)).json()["usage"]["prompt_tokens"] == 2
    long = shared.post(TEXT, text_body("x" * 3 * LENGTH, truncate_prompt_tokens=-1, max_tokens=4)).json()
    assert long["usage"]["prompt_tokens"] == LENGTH - 4
    assert shared.chat("y" * 3 * LENGTH, truncate_prompt_tokens=-1).status_code == 200
    assert shared.chat("y" * 3 * LENGTH).status_code == 400


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_all_that_the_context_leaves(shared, name):
    body = text_body("a" * 1000, ignore_eos=True)
    del body["max_tokens"]
    r = shared.post(TEXT, {**body, name: -1}).json()
    assert r["usage"]["total_tokens"] == LENGTH and r["choices"][0]["finish_reason"] == "length"
    assert shared.post(TEXT, body).json()["usage"]["completion_tokens"] == 16
    assert shared.post(TEXT, {**body, name: 5}).json()["usage"]["completion_tokens"] == 5


def test_repeat_penalty_is_repetition_penalty(shared):
    for value in (1, 1.3):
        a, b = (shared.chat("hello", **{name: value}).json()["choices"] for name in ("repeat_penalty", "repetition_penalty"))
        assert a == b
    assert shared.chat(repeat_penalty=1.5, repetition_penalty=1.5).status_code == 200


def test_user_objects_are_ignored(shared):
    """As Open WebUI sends them."""
    assert shared.chat(user={"id": "1", "name": "n", "email": "e", "role": "user"}).status_code == 200


# --- answers ---

@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_streamed(shared, path):
    body = body_of(path, "h\u00e9llo", return_token_ids=True, n=2, stop_token_ids=[108], max_tokens=12)
    whole = shared.post(path, body).json()
    chunks = streamed(shared, path, body)
    for i in range(2):
        ids, prompts = [], []
        for e in chunks:
            for c in e["choices"]:
                if c["index"] == i:
                    ids += c.get("token_ids", [])
                    prompts += [c["prompt_token_ids"]] if "prompt_token_ids" in c else []
                    prompts += [e["prompt_token_ids"]] if "prompt_token_ids" in e else []
        assert ids == whole["choices"][i]["token_ids"]
        expected = whole["prompt_token_ids"] if path == CHAT else whole["choices"][i]["prompt_token_ids"]
        assert prompts == [expected]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_tokens_as_token_ids(shared, path):
    body = body_of(path, "abc", logprobs=2 if path == TEXT else True, return_tokens_as_token_ids=True, max_tokens=3,
                   return_token_ids=True, **({} if path == TEXT else {"top_logprobs": 2}))
    choice = shared.post(path, body).json()["choices"][0]
    expected = [f"token_id:{i}" for i in choice["token_ids"]]
    if path == TEXT:
        assert choice["logprobs"]["tokens"] == expected
        assert all(t in top for t, top in zip(expected, choice["logprobs"]["top_logprobs"]))
    else:
        assert [c["token"] for c in choice["logprobs"]["content"]] == expected
        assert all(t["token"].startswith("token_id:") for c in choice["logprobs"]["content"] for t in c["top_logprobs"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stop_string_in_the_output(shared, fake, path):
    for include in (False, True):
        body = body_of(path, "abcXYdef", stop=["XY"], include_stop_str_in_output=include, max_tokens=12,
                       logprobs=0 if path == TEXT else True)
        whole = shared.post(path, body).json()
        text = answer_text(whole, path)
        assert (text.endswith("XY"), "XY" in text) == (include, include)
        assert whole["choices"][0]["stop_reason"] == "XY"
        chunks = streamed(shared, path, body)
        assert delta_text(chunks, path) == text
        scores = whole["choices"][0]["logprobs"]["tokens" if path == TEXT else "content"]
        assert len(scores) == len(text)


def test_reasoning_left_out(start, fake):
    daemon = start(env={"KEEPD_FAKE_THINK": "2"})
    for text in ("hidden\x02shown", "cut"):
        body = chat_body(text, max_tokens=32, logprobs=True, include_reasoning=False)
        whole = daemon.post(CHAT, body).json()
        message = whole["choices"][0]["message"]
        assert "reasoning" not in message and "reasoning_content" not in message
        assert (message["content"] or "") == ("shown" if "shown" in text else "")
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        chunks = streamed(daemon, CHAT, body)
        assert delta_text(chunks, CHAT) == (message["content"] or "")
        assert not any("reasoning" in c["delta"] for e in chunks for c in e["choices"])
        scores = sum(len(c["logprobs"]["content"]) for e in chunks for c in e["choices"] if c["logprobs"])
        assert scores == len(whole["choices"][0]["logprobs"]["content"])


def test_chat_echo(shared):
    """In front of the answer when the model goes on in the same role."""
    for messages, flags, echoed in (([USER], {}, ""), ([USER, {"role": "assistant", "content": "so\0 "}], {}, "so\0 "),
                                    ([USER], {"add_generation_prompt": False}, "hi"),
                                    ([USER, {"role": "assistant", "content": "And"}], {"continue_final_message": True}, "And")):
        body = {**chat_body(), "messages": messages, **flags}
        plain, echo = (answer_text(shared.post(CHAT, {**body, "echo": e}).json(), CHAT) for e in (False, True))
        assert echo == echoed + plain
        assert delta_text(streamed(shared, CHAT, {**body, "echo": True}), CHAT) == echo


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_timings(shared, path):
    whole = shared.post(path, body_of(path, "time me", timings=True)).json()
    chunks = streamed(shared, path, body_of(path, "time me", timings=True))
    for timings in (whole["timings"], chunks[-1]["timings"]):
        assert timings["prompt_n"] + timings["cache_n"] == whole["usage"]["prompt_tokens"]
        assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
        assert timings["prompt_ms"] >= 0 and timings["predicted_ms"] >= 0 and timings["queued_ms"] >= 0
    assert not any("timings" in e for e in chunks[:-1]) and "usage" not in chunks[-1]
    assert "timings" not in shared.post(path, body_of(path, "time me")).json()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_chunks_name_the_server(shared, path):
    answer = shared.post(path, body_of(path, "a")).json()
    whole = answer["system_fingerprint"]
    assert answer.get("service_tier") == ("default" if path == CHAT else None), "as OpenAI's"
    chunks = streamed(shared, path, body_of(path, "a", stream_options={"include_usage": True}))
    assert {e["system_fingerprint"] for e in chunks} == {whole}


# --- routes and headers ---

def test_paths_without_v1(shared):
    for path in (CHAT, TEXT):
        assert shared.post(path.removeprefix("/v1"), body_of(path, "a")).status_code == 200
    assert shared.get("/models").json() == shared.get("/v1/models").json()
    assert shared.get(f"/models/{MODEL}").json() == shared.get(f"/v1/models/{MODEL}").json()
    assert shared.get("/conversations").status_code == 200
    assert shared.get(CHAT.removeprefix("/v1")).status_code == 405
    for path in ("/v1/v1/models", "/v1", "/v1/tokenize", "/model", "/modelsx"):
        assert shared.get(path).status_code == 404, path


def test_load(shared, slow):
    assert shared.get("/load").json() == {"server_load": 0}
    daemon = slow(step_us=50000)
    r = requests.post(daemon.url + CHAT, json=chat_body("x" * 200, max_tokens=200, stream=True), stream=True, timeout=60)
    next(r.iter_lines())
    assert daemon.get("/load").json() == {"server_load": 1}
    r.close()


def test_x_api_key(start):
    daemon = start("--api-key", "s3cret")
    for headers, status in (({"x-api-key": "s3cret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401),
                            ({"x-api-key": "s3cret", "Authorization": "Bearer other"}, 401)):
        assert requests.get(daemon.url + "/v1/models", headers=headers, timeout=60).status_code == status


# --- filling a gap ---

def test_suffix(start, fake):
    """The parts of the text come between the model's own tokens; tokens written in them are text."""
    daemon = start(env={"KEEPD_FAKE_FIM": "1"})
    marks = [daemon.post("/tokenize", {"prompt": f"<|fim_{n}|>"}).json()["tokens"] for n in ("prefix", "suffix", "middle")]
    assert all(len(m) == 1 for m in marks)
    for prompt, suffix in (("ab", "cd"), ("", "\0<|fim_middle|>"), ("<|im_end|>x", "y")):
        parts = [daemon.post("/tokenize", {"prompt": t, "parse_special": False}).json()["tokens"] for t in (prompt, suffix)]
        choice = daemon.post(TEXT, text_body(prompt, suffix=suffix, return_token_ids=True)).json()["choices"][0]
        assert choice["prompt_token_ids"] == marks[0] + parts[0] + marks[1] + parts[1] + marks[2]
    two = daemon.post(TEXT, text_body(["a", "b"], suffix="c")).json()
    assert two["usage"]["prompt_tokens"] == 10
    for fields in ({"echo": True}, {"truncate_prompt_tokens": 3}, {"prompt": [1, 2]}):
        r = daemon.post(TEXT, text_body(**{"prompt": "a", **fields}, suffix="c"))
        assert (r.status_code, r.json()["error"]["param"]) == (400, "suffix")


def test_suffix_without_tokens_for_it(shared, fake):
    r = shared.post(TEXT, text_body("a", suffix="b"))
    assert r.status_code == 400 and r.json()["error"]["code"] == "unsupported_parameter"
    assert shared.post(TEXT, text_body("a", suffix="")).status_code == 200
