"""Several choices per prompt, several prompts per request."""
import json

import openai
import pytest
import requests
from conftest import MODEL, chat_body, events, request_bytes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_body(prompt, **fields):
    return {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}


def chunks_of(daemon, path, body):
    r = requests.post(daemon.url + path, json={**body, "stream": True}, stream=True, timeout=60)
    assert r.status_code == 200, r.text
    data = events(r)
    assert data[-1] == "[DONE]"
    return [json.loads(e) for e in data[:-1]]


def test_choices_are_their_requests_alone(shared):
    """Choice i is what n = 1 answers with seed + i."""
    fields = {"temperature": 1, "max_tokens": 24, "kv": {"reuse": False, "retain": False}}
    whole = shared.chat("three of them", n=3, seed=5, **fields).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    alone = [shared.chat("three of them", seed=5 + i, **fields).json() for i in range(3)]
    assert [c["message"] for c in whole["choices"]] == [a["choices"][0]["message"] for a in alone]
    assert [c["finish_reason"] for c in whole["choices"]] == [a["choices"][0]["finish_reason"] for a in alone]
    usage = whole["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"], "the prompt is read once"
    assert usage["completion_tokens"] == sum(a["usage"]["completion_tokens"] for a in alone)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_choices_differ_without_a_seed(shared, fake):
    texts = {c["message"]["content"] for c in shared.chat("x", n=4, temperature=1, max_tokens=24).json()["choices"]}
    assert len(texts) == 4


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_streamed_choices(shared, path):
    """Events of several choices interleave; each has its own role, text and finish."""
    body = chat_body("stream me") if path == CHAT else text_body("stream me")
    body |= {"n": 3, "seed": 9, "temperature": 1, "max_tokens": 24, "kv": {"reuse": False, "retain": False}}
    whole = shared.post(path, body).json()
    chunks = chunks_of(shared, path, {**body, "stream_options": {"include_usage": True}})
    assert len({c["id"] for c in chunks}) == 1
    texts, finishes, roles = ["", "", ""], [None] * 3, [0] * 3
    for c in (c for chunk in chunks for c in chunk["choices"]):
        i = c["index"]
        assert finishes[i] is None, "nothing comes after the finish"
        texts[i] += c["delta"].get("content", "") if path == CHAT else c["text"]
        roles[i] += "role" in c.get("delta", {})
        finishes[i] = c["finish_reason"]
    wanted = whole["choices"]
    assert texts == [c["message"]["content"] if path == CHAT else c["text"] for c in wanted]
    assert finishes == [c["finish_reason"] for c in wanted] and roles == [path == CHAT] * 3
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_end_of_many_is_one_write(shared):
    """The last finish, usage, [DONE] and the closing chunk arrive together."""
    body = chat_body(stream=True, n=4, temperature=1, stream_options={"include_usage": True})
    for _ in range(10):
        with shared.socket() as sock:
            sock.sendall(request_bytes(CHAT, body))
            data = b""
            while data.count(b'"finish_reason":"') < 4:
                data += (got := sock.recv(1 << 20))
                assert got
            assert b'"usage":{' in data and data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), data[-500:]


def test_several_prompts(shared):
    """Choices come prompt by prompt, whatever the order in which they are ready."""
    prompts = ["one", "two and more", "three"]
    ids = [shared.post("/tokenize", {"prompt": p}).json()["tokens"] for p in prompts]
    options = {"kv": {"reuse": False, "retain": False}, "seed": 3, "temperature": 1, "n": 2}
    alone = [shared.post(TEXT, text_body(p, **options)).json() for p in prompts]
    for prompt in (prompts, ids):
        r = shared.post(TEXT, text_body(prompt, **options)).json()
        assert [c["index"] for c in r["choices"]] == list(range(6))
        assert [c["text"] for c in r["choices"]] == [c["text"] for a in alone for c in a["choices"]]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert r["usage"][count] == sum(a["usage"][count] for a in alone)
        details = r["usage"]["kv_details"]
        for count in ("seen_tokens", "kept_entries", "bytes"):
            assert details[count] == sum(a["usage"]["kv_details"][count] for a in alone)


def test_likelihoods_of_several_prompts(shared):
    """The exact request of lm-eval's local-completions: token ids, echo, one token, scores."""
    ids = [shared.post("/tokenize", {"prompt": p}).json()["tokens"] for p in ("the sky is blue", "the sky is")]
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, "seed": 1234, "echo": True, "logprobs": 1}
    r = shared.post(TEXT, body).json()
    assert [c["index"] for c in r["choices"]] == [0, 1]
    for choice, prompt in zip(r["choices"], ids):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(prompt) + 1
        assert scores["token_logprobs"][0] is None and all(x <= 0 for x in scores["token_logprobs"][1:])
        alone = shared.post(TEXT, {**body, "prompt": [prompt]}).json()["choices"][0]
        assert alone["logprobs"] == scores and alone["text"] == choice["text"]


def test_what_lm_eval_asks_besides(shared):
    """Requests by which lm-eval 0.4.13 checks the server's tokenizer, and its requests for generating tasks."""
    eos = shared.get("/tokenizer_info").json()["eos_token"]
    ids = shared.post("/tokenize", {"prompt": "test", "add_special_tokens": False}).json()["tokens"]
    assert isinstance(eos, str) and ids and shared.post("/detokenize", {"tokens": ids}).json()["prompt"] == "test"
    body = {"prompt": [ids, ids + ids], "model": MODEL, "max_tokens": 256, "temperature": 0, "stop": ["\n\n", eos],
            "seed": 1234}
    r = shared.post(TEXT, body)
    assert r.status_code == 200 and [c["index"] for c in r.json()["choices"]] == [0, 1]
    assert all(isinstance(c["text"], str) and "\n\n" not in c["text"] for c in r.json()["choices"])


def test_streamed_prompts(shared, fake):
    chunks = chunks_of(shared, TEXT, text_body(["ab", "cde"], echo=True, logprobs=0))
    texts, offsets = ["", ""], [[], []]
    for c in (c for chunk in chunks for c in chunk["choices"]):
        texts[c["index"]] += c["text"]
        offsets[c["index"]] += c["logprobs"]["text_offset"] if c["logprobs"] else []
    assert texts == ["abab", "cdecde"]
    assert [o[:len(t)] for o, t in zip(offsets, texts)] == [list(range(4)), list(range(6))]


def test_all_prompts_or_none(slow):
    """A request gets all its places in the queue or is rejected, and then the queue is unchanged."""
    daemon = slow("--max-num-seqs", "1", "--max-queue", "3")
    running = daemon.socket()
    running.sendall(request_bytes(CHAT, chat_body(max_tokens=900, ignore_eos=True, stream=True)))
    daemon.wait("the first to run", lambda: daemon.kv()["running_count"] == 1)
    waiting = daemon.socket()
    waiting.sendall(request_bytes(TEXT, text_body(["a", "b"])))
    daemon.wait("two to wait", lambda: daemon.kv()["waiting_count"] == 2)
    r = daemon.post(TEXT, text_body(["c", "d"]))
    assert r.status_code == 503 and r.json()["error"]["code"] == "overloaded" and int(r.headers["retry-after"]) >= 1
    assert daemon.kv()["waiting_count"] == 2, "nothing of the refused request waits"
    r = daemon.post(TEXT, text_body(["c", "d", "e", "f"]))
    assert r.status_code == 400 and r.json()["error"]["param"] == "prompt", "it can never fit"
    running.close()
    daemon.wait_idle()
    assert daemon.post(TEXT, text_body(["a", "b", "c"])).status_code == 200, "all places are free again"
    waiting.close()


def test_a_job_that_cannot_be_taken_takes_none(start, fake):
    daemon = start(env={"KEEPD_FAKE_SUBMITS": "3", "KEEPD_FAKE_STEP_US": "20000"})
    r = daemon.post(TEXT, text_body(["a", "b", "c", "d"], max_tokens=900, ignore_eos=True))
    assert r.status_code == 503 and r.json()["error"]["code"] == "overloaded"
    daemon.wait_idle()
    assert daemon.finished("stop") == daemon.finished("length") == 0


def test_a_stream_of_which_a_job_cannot_be_taken(start, fake):
    """If the last job is rejected after the first ones produced tokens, the answer is an error, not a partial stream."""
    daemon = start(env={"KEEPD_FAKE_SUBMITS": "3"})
    r = daemon.post(TEXT, text_body(["a", "b", "c", "d"], max_tokens=900, ignore_eos=True, stream=True))
    assert r.status_code == 503 and r.json()["error"]["code"] == "overloaded"
    daemon.wait_idle()
    assert daemon.get("/health").status_code == 200


def test_one_failure_ends_the_request(shared, fake):
    r = shared.post(TEXT, text_body(["fine", "fail later", "fine too"]))
    assert r.status_code == 500 and r.headers["x-should-retry"] == "false"
    assert "told to fail" in r.json()["error"]["message"]
    client = shared.client()
    with pytest.raises(openai.APIError):
        list(client.completions.create(model=MODEL, prompt=["fine", "fail later"], stream=True, max_tokens=900,
                                       extra_body={"ignore_eos": True}))
    shared.wait_idle()


def test_a_client_of_many_that_leaves(slow):
    daemon = slow(step_us=5000)
    sock = daemon.socket()
    sock.sendall(request_bytes(TEXT, text_body(["a", "b", "c"], n=2, max_tokens=900, ignore_eos=True, stream=True)))
    daemon.wait("all to run", lambda: daemon.kv()["running_count"] >= 3)
    sock.close()
    daemon.wait("the aborts", lambda: daemon.finished("abort") == 3)
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_used"] == 0


def test_the_sdk_with_choices(shared):
    client = shared.client()
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2, max_tokens=4)
    assert [c.index for c in answer.choices] == [0, 1]
    texts = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, best_of=2, max_tokens=2)
    assert [c.index for c in texts.choices] == [0, 1, 2, 3]
