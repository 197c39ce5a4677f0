"""The OpenAI SDK as its users use it."""
import concurrent.futures as futures

import openai
import pytest
from conftest import LENGTH, MODEL, run_async

MESSAGES = [{"role": "user", "content": "hello there"}]


def test_chat(shared, fake):
    answer = shared.client().chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content == "hello there" and choice.message.refusal is None and choice.logprobs is None


def test_usage(shared):
    usage = shared.client().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 5
    assert usage.prompt_tokens_details.cached_tokens >= 0
    details = usage.kv_details
    assert details["seen_tokens"] <= usage.total_tokens and details["kept_entries"] > 0
    assert details["evicted_entries"] == details["dropped_tokens"] == 0 and details["bytes"] > 0


def test_stream_equals_answer(shared):
    client = shared.client()
    options = {"model": MODEL, "messages": MESSAGES, "temperature": 1, "seed": 7, "max_tokens": 32}
    whole = client.chat.completions.create(**options, extra_body={"kv": {"reuse": False}})
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True},
                                                 extra_body={"kv": {"reuse": False}}))
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == \
        [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_continuous_usage(shared):
    stream = shared.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, temperature=0, max_tokens=8,
        stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [c.usage.completion_tokens for c in stream]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] > 0


def test_async(shared):
    async def talk(i):
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"message {i}"}], stream=True, max_tokens=24,
                temperature=0)
            return [c async for c in stream]

    async def all_of_them():
        import asyncio
        return await asyncio.gather(*(talk(i) for i in range(8)))

    for chunks in run_async(all_of_them()):
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_logprobs(shared):
    answer = shared.client().chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=4,
                                                     logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.top_logprobs[2].logprob
        assert token.bytes is not None


def test_streamed_logprobs_are_the_same(shared):
    client = shared.client()
    options = {"model": MODEL, "messages": [{"role": "user", "content": "h\u00e9\U0001f600 hi"}], "temperature": 0,
               "max_tokens": 12, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    parts = [t for c in client.chat.completions.create(**options, stream=True)
             if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert parts == whole


def test_completion(shared, fake):
    client = shared.client()
    assert client.completions.create(model=MODEL, prompt="abc", temperature=0, max_tokens=2).choices[0].text == "ab"
    stream = client.completions.create(model=MODEL, prompt="abc", temperature=0, max_tokens=3, stream=True)
    chunks = list(stream)
    assert {c.object for c in chunks} == {"text_completion"}
    assert "".join(c.choices[0].text for c in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models(shared):
    client = shared.client()
    assert [m.id for m in client.models.list()] == [MODEL, "alias"]
    model = client.models.retrieve("alias")
    assert model.object == "model" and model.max_model_len == LENGTH
    with pytest.raises(openai.NotFoundError) as info:
        client.models.retrieve("gpt-4/x")
    assert info.value.code == "model_not_found"


def test_raw_response_and_request_id(shared):
    client = shared.client()
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=1,
                                                           extra_headers={"X-Request-Id": "my-id.1"})
    assert raw.headers["x-request-id"] == "my-id.1" and raw.parse()._request_id == "my-id.1"
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1,
                                            extra_headers={"X-Request-Id": "not/ok <id>"})
    assert answer._request_id.startswith("req_")


def test_seed(shared):
    def say(**fields):
        return shared.client().chat.completions.create(model=MODEL, messages=MESSAGES, temperature=1, max_tokens=32,
                                                       extra_body={"kv": {"reuse": False}}, **fields
                                                       ).choices[0].message.content
    assert say(seed=2**63 - 1) == say(seed=2**63 - 1)
    assert len({say() for _ in range(4)}) > 1, "without a seed answers differ"


def test_seed_keeps_64_bits(shared, fake):
    """2^53 and 2^53 + 1 are the same double."""
    texts = {shared.chat(temperature=1, max_tokens=64, seed=seed).json()["choices"][0]["message"]["content"]
             for seed in (2**53, 2**53 + 1, 2**64 - 1, -1, 2**63)}
    assert len(texts) == 4, "-1 and 2^64 - 1 are the same 64 bits, all others differ"


def test_error_classes(shared):
    client = shared.client()
    with pytest.raises(openai.NotFoundError) as info:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert (info.value.code, info.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert info.value.param == "temperature" and info.value.type == "invalid_request_error"


def test_retries_of_a_full_queue(slow):
    """Two retries, then the error; rejected requests never reach the engine."""
    daemon = slow("--max-num-seqs", "1", "--max-queue", "1")
    client = daemon.client()
    streams = [client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, max_tokens=900,
                                              extra_body={"ignore_eos": True})]
    next(iter(streams[0]))
    waiting = daemon.socket()
    from conftest import chat_body, request_bytes
    waiting.sendall(request_bytes("/v1/chat/completions", chat_body()))
    daemon.wait("one request to wait", lambda: daemon.kv()["waiting_count"] == 1)
    with pytest.raises(openai.InternalServerError) as info:
        daemon.client(max_retries=2).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert info.value.status_code == 503 and info.value.code == "overloaded"
    assert int(info.value.response.headers["retry-after"]) >= 1
    assert int(info.value.response.headers["retry-after-ms"]) >= 100
    assert info.value.response.request.headers["x-stainless-retry-count"] == "2"
    assert daemon.metrics()["keepd_requests_rejected_total", ("reason", "queue_full")] == 3
    streams[0].close()
    waiting.close()
    daemon.wait_idle()


def test_engine_errors_are_not_retried(shared, fake):
    with pytest.raises(openai.InternalServerError) as info:
        shared.client(max_retries=2).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "fail now"}])
    assert info.value.response.request.headers["x-stainless-retry-count"] == "0"
    assert info.value.response.headers["x-should-retry"] == "false"


def test_error_in_a_stream(shared, fake):
    """An engine error before the first token is an HTTP error; later it is an event that the SDK raises."""
    client = shared.client()
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, stream=True, messages=[{"role": "user", "content": "fail now"}])
    stream = client.chat.completions.create(model=MODEL, stream=True, temperature=0,
                                            messages=[{"role": "user", "content": "fail later"}])
    text = ""
    with pytest.raises(openai.APIError) as info:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "fai" and "told to fail" in info.value.message


def test_cancel_by_closing(slow):
    daemon = slow()
    stream = daemon.client().chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, max_tokens=900,
                                                     extra_body={"ignore_eos": True})
    next(iter(stream))
    assert daemon.kv()["running_count"] == 1
    stream.close()
    daemon.wait("the abort", lambda: daemon.finished("abort") == 1)
    daemon.wait_idle()
    assert daemon.kv()["pool"]["pages_retained"] == 0, "an aborted request leaves no state"


def test_connections_are_reused(start):
    """A stream read to its end gives the connection back. (The SDK itself stops reading at [DONE].)"""
    daemon = start()
    for i in range(10):
        daemon.chat(stream=True, max_tokens=1 + i % 5)
        daemon.chat(max_tokens=4)
    assert daemon.metrics()["keepd_connections_accepted_total",] == 2, "one of the session, and this one"


def test_conversation_continues(shared):
    client = shared.client()
    messages = [{"role": "user", "content": "A conversation that goes on and on. " * 4}]
    options = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    key = {"prompt_cache_key": "continues", "extra_body": {"cache_salt": "continues"}}
    first = client.chat.completions.create(messages=messages, **options, **key)
    messages += [{"role": "assistant", "content": first.choices[0].message.content},
                 {"role": "user", "content": "And on."}]
    other = client.chat.completions.create(messages=messages, **options, prompt_cache_key="continues",
                                           extra_body={"cache_salt": "another"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0, "a key is a hint, a salt is a wall"
    fresh = client.chat.completions.create(messages=messages, **options, prompt_cache_key="continues", extra_body={
        "cache_salt": "continues", "kv": {"reuse": False, "retain": False}})
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    second = client.chat.completions.create(messages=messages, **options, prompt_cache_key="other",
                                            extra_body={"cache_salt": "continues"})
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_many_at_once_equal_alone(shared):
    client = shared.client()

    def say(i):
        return client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"number {i}"}], temperature=1, seed=i, max_tokens=24,
            extra_body={"kv": {"reuse": False}}).choices[0].message.content
    alone = [say(i) for i in range(16)]
    with futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(say, range(16))) == alone
