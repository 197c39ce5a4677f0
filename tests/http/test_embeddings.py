"""/v1/embeddings: inputs, encodings, lengths, limits, errors and ends, as the OpenAI SDK and plain HTTP see them."""
import base64
import json
import math
import struct
import threading

import openai
import pytest
import requests
from conftest import LENGTH, MODEL

PATH = "/v1/embeddings"
MANY = 300  # more than are in the engine at a time


def vectors(r):
    assert r.status_code == 200, r.text
    data = r.json()["data"]
    assert [d["index"] for d in data] == list(range(len(data)))
    return [d["embedding"] for d in data]


def embed(daemon, text, **fields):
    return vectors(daemon.post(PATH, {"model": MODEL, "input": text, **fields}))


def ids_of(daemon, text):
    return daemon.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_other_numbers_than_32_bits_are_refused(shared):
    plain = embed(shared, "abc")
    assert embed(shared, "abc", embed_dtype="float32", endianness="native") == plain == embed(shared, "abc", endianness="little")
    for field, value in (("embed_dtype", "float16"), ("embed_dtype", 3), ("endianness", "big")):
        r = shared.post(PATH, {"input": "abc", "encoding_format": "base64", field: value})
        assert r.status_code == 400 and r.json()["error"]["param"] == field, r.text



def as_floats(numbers):
    """Rounded to the 32 bits that they have in the engine."""
    return list(struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers)))


def error(r, status, param):
    assert r.status_code == status, r.text
    assert r.json()["error"]["param"] == param, r.text
    return r.json()["error"]


def test_a_vector_for_each_text(shared):
    both, one, other = embed(shared, ["abc", "déf"]), embed(shared, "abc"), embed(shared, ["déf"])
    assert both == one + other and one != other
    assert all(abs(math.hypot(*v) - 1) < 1e-6 for v in both)
    ids = [ids_of(shared, text) for text in ("abc", "déf")]
    assert embed(shared, ids) == both and embed(shared, ids[0]) == one


def test_prompts_by_name(shared):
    """Prompts of the model's files are put in front of texts, and of nothing else."""
    assert embed(shared, ["abc", "def"], prompt_name="query") == embed(shared, ["search: abc", "search: def"])
    assert embed(shared, "abc", prompt_name="document") == embed(shared, "abc", prompt_name=None) == embed(shared, "abc")
    e = error(shared.post(PATH, {"input": "a", "prompt_name": "other"}), 400, "prompt_name")
    assert "query" in e["message"] and "document" in e["message"]
    error(shared.post(PATH, {"input": [1, 2], "prompt_name": "query"}), 400, "prompt_name")
    error(shared.post(PATH, {"input": "a", "prompt_name": 1}), 400, "prompt_name")


def test_shape(shared):
    r = shared.post(PATH, {"input": ["abc", "de"], "user": "somebody", "unknown": 1})
    answer = r.json()
    assert answer["object"] == "list" and answer["model"] == MODEL
    tokens = sum(len(ids_of(shared, text)) for text in ("abc", "de"))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert {d["object"] for d in answer["data"]} == {"embedding"}


def test_base64_has_the_same_numbers(shared):
    floats, texts = (embed(shared, ["abc", "de"], encoding_format=f) for f in ("float", "base64"))
    for numbers, text in zip(floats, texts):
        raw = base64.b64decode(text, validate=True)
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == as_floats(numbers)


def test_sdk(shared):
    client = shared.client()
    whole = client.embeddings.create(model=MODEL, input=["abc", "de"])  # the SDK asks for base64 itself
    plain = client.embeddings.create(model=MODEL, input=["abc", "de"], encoding_format="float")
    assert [as_floats(d.embedding) for d in whole.data] == [as_floats(d.embedding) for d in plain.data]
    assert whole.usage == plain.usage and whole.model == MODEL and whole.data[1].index == 1
    short = client.embeddings.create(model=MODEL, input="abc", dimensions=3)
    assert len(short.data[0].embedding) == 3 and abs(math.hypot(*short.data[0].embedding) - 1) < 1e-6
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=MODEL, input="abc", dimensions=0)


def test_dimensions_are_the_first_numbers_normalised_again(shared):
    [whole] = embed(shared, "abc")
    for count in (1, len(whole) - 1, len(whole)):
        [short] = embed(shared, "abc", dimensions=count)
        norm = math.hypot(*whole[:count])
        assert short == pytest.approx([x / norm for x in whole[:count]], abs=1e-6)
    error(shared.post(PATH, {"input": "abc", "dimensions": len(whole) + 1}), 400, "dimensions")


def test_raw_vectors(shared):
    [raw], [unit] = embed(shared, "abc", normalize=False), embed(shared, "abc")
    norm = math.hypot(*raw)
    assert abs(norm - 1) > 1e-3 and unit == pytest.approx([x / norm for x in raw], abs=1e-6)


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
def test_pooling(start, fake, how):
    d = start("--pooling", how)
    a, b, ab, ba = embed(d, ["a", "b", "ab", "ba"], normalize=False)
    mean = [(x + y) / 2 for x, y in zip(a, b)]
    assert ab == pytest.approx({"last": b, "cls": a, "mean": mean}[how], abs=1e-6)
    assert ba == pytest.approx({"last": a, "cls": b, "mean": mean}[how], abs=1e-6)


def test_texts_are_shortened_at_their_end(shared):
    text = "one two three four six"
    ids = ids_of(shared, text)
    assert embed(shared, text, truncate_prompt_tokens=3) == embed(shared, ids[:3]) != embed(shared, text)
    assert embed(shared, text, truncate_prompt_tokens=99) == embed(shared, text)
    long = text * LENGTH
    error(shared.post(PATH, {"input": long}), 400, "input")
    assert embed(shared, long, truncate_prompt_tokens=-1) == embed(shared, ids_of(shared, long)[:LENGTH])
    error(shared.post(PATH, {"input": "abc", "truncate_prompt_tokens": 0}), 400, "truncate_prompt_tokens")


@pytest.mark.parametrize("body,param", [
    ({}, "input"), ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": {}}, "input"),
    ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 5.5]}, "input[1]"), ({"input": [[1, 2], []]}, "input[1]"), ({"input": [-1]}, "input[0]"),
    ({"input": [[1], [2, 1 << 40]]}, "input[1][1]"), ({"input": [[1], ["a", []]]}, "input[1][0]"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "encoding_format": 1}, "encoding_format"), ({"input": "a", "dimensions": "x"}, "dimensions"),
    ({"input": "a", "normalize": 1}, "normalize"), ({"input": "a", "user": 7}, "user"),
    ({"input": "a", "embedding_types": ["int8"]}, "embedding_types"),
])
def test_errors_name_the_field(shared, body, param):
    error(shared.post(PATH, body), 400, param)


def test_errors_of_a_text_name_its_index(shared):
    texts = ["a"] * 70 + ["x" * (LENGTH + 1)] + ["a"]
    e = error(shared.post(PATH, {"input": texts}), 400, "input[70]")
    assert e["code"] == "context_length_exceeded" and f"{LENGTH + 1} tokens" in e["message"]
    error(shared.post(PATH, {"input": [[1], [2], [1 << 20]]}), 400, "input[2][0]")


def test_other_models_are_not_found(shared):
    error(shared.post(PATH, {"input": "a", "model": "text-embedding-3-small"}), 404, "model")
    assert shared.get(PATH).status_code == 405


def test_number_of_inputs(shared):
    assert len(embed(shared, ["a"] * 2048)) == 2048
    assert "2048" in error(shared.post(PATH, {"input": ["a"] * 2049}), 400, "input")["message"]


def test_many_texts_take_few_places_of_the_queue(start, fake):
    """A request of many texts has a part of them in the engine at a time, so a short queue takes it, in order."""
    d = start("--max-queue", "8", "--max-num-seqs", "4")
    texts = [f"text {i}" for i in range(MANY)]
    assert embed(d, texts) == [embed(d, text)[0] for text in texts]
    d.wait_idle()


def test_many_at_once(start, fake):
    """Batches and chats share a queue that is too short for all of them: nobody waits for ever."""
    d = start("--max-queue", "16", "--max-num-seqs", "4")
    wanted = embed(d, [f"text {i}" for i in range(MANY)])
    answers = [None] * 4

    def ask(i):
        while True:
            r = requests.post(d.url + PATH, json={"input": [f"text {k}" for k in range(MANY)]}, timeout=60)
            if r.status_code not in (429, 503):
                answers[i] = vectors(r)
                return

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(a == wanted for a in answers)
    d.wait_idle()


def test_a_long_list_leaves_room_for_others(start, fake):
    """Tokens and places of texts that are not in the engine yet are nobody's: a chat beside a list is served."""
    d = start("--max-queue", "8", "--max-queue-tokens", "4096", "--max-num-seqs", "1", env={"KEEPD_FAKE_STEP_US": "1000"})
    lists = [threading.Thread(target=lambda: requests.post(d.url + PATH, json={"input": ["a" * 500] * 64}, timeout=120))
             for _ in range(2)]
    for t in lists:
        t.start()
    d.wait("the texts to be read", lambda: d.kv()["waiting_count"])
    for _ in range(10):
        r = d.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        assert r.status_code == 200, r.text
        assert any(t.is_alive() for t in lists)
    for t in lists:
        t.join()
    d.wait_idle()


def test_a_text_that_fails_fails_the_request(start, fake):
    d = start("--max-queue", "8")
    e = d.post(PATH, {"input": ["a"] * 100 + ["fail now"] + ["b"] * 100}).json()["error"]
    assert "told to fail" in e["message"]
    d.wait_idle()
    assert len(embed(d, ["a"] * 20)) == 20


def test_a_client_that_leaves_ends_its_texts(start, fake):
    d = start("--max-num-seqs", "2", env={"KEEPD_FAKE_STEP_US": "2000"})
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(d.url + PATH, json={"input": ["a"] * 2048}, timeout=0.2)
    d.wait_idle()


def test_a_request_that_takes_too_long(start, fake):
    d = start("--max-num-seqs", "2", env={"KEEPD_FAKE_STEP_US": "5000"})
    r = d.post(PATH, {"input": ["a"] * 2048}, headers={"X-Request-Timeout": "0.2"})
    assert r.status_code == 408, r.text
    d.wait_idle()


def test_a_drain_finishes_all_texts(start, fake):
    d = start("--max-num-seqs", "2", env={"KEEPD_FAKE_STEP_US": "10000"})
    got = []
    thread = threading.Thread(target=lambda: got.append(
        requests.post(d.url + PATH, json={"input": [f"t{i}" for i in range(MANY)]}, timeout=60)))
    thread.start()
    d.wait("the texts to be read", lambda: d.kv()["waiting_count"])
    d.process.terminate()
    thread.join()
    assert len(vectors(got[0])) == MANY and d.process.wait(timeout=60) == 0


def test_a_model_without_vectors(start, fake):
    d = start(env={"KEEPD_FAKE_NO_VECTORS": "1"})
    e = d.post(PATH, {"input": "a"}).json()["error"]
    assert e["code"] == "unsupported_model" and "--pooling" in e["message"]


def test_metrics_and_usage(start, fake):
    d = start()
    embed(d, ["abc", "de"])
    metrics = d.metrics()
    assert metrics["vllm:prompt_tokens_total",] == 5 and metrics["vllm:generation_tokens_total",] == 0
    assert d.finished("stop") == 2


def test_nothing_is_kept(shared):
    before = shared.kv()["pool"]["pages_retained"]
    embed(shared, ["some words", "others"])
    shared.wait_idle()
    assert shared.kv()["pool"]["pages_retained"] == before


def test_large_answers(shared):
    """The longest answer as numbers; json.loads of it is what the SDK does."""
    r = shared.post(PATH, {"input": ["a"] * 2048, "encoding_format": "float"})
    assert len(json.loads(r.text)["data"]) == 2048
