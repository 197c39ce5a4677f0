"""Every limit of server/limits.h: at the limit the request is served, one above it is refused by name. (Bodies,
headers, connections and the queue: test_limits.py.)"""
import json
import re

import pytest
from conftest import MODEL, ROOT, chat_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
LIMITS = {k: float(v) if "." in v else int(v) for k, v in re.findall(
    r"^#define OAI_(\w+)\s+([0-9.]+)", (ROOT / "server" / "limits.h").read_text(), re.M)}
SHIFTED = 1 << int(re.search(r"^#define ENGINE_SHIFTED_TOKENS \(1 << (\d+)\)", (ROOT / "engine" / "engine_request.h").read_text(), re.M)[1])


def chat(**fields):
    return CHAT, chat_body(**{"max_tokens": 2, "kv": {"retain": False}, **fields})


def text(**fields):
    return TEXT, {"model": MODEL, "prompt": "abc", "max_tokens": 2, "kv": {"retain": False}, **fields}


def respond(**fields):
    return "/v1/responses", {"model": MODEL, "input": "abc", "max_output_tokens": 2, "kv": {"retain": False}, **fields}


def count(value):
    """The JSON values of a body; names of members are none."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(count, inner))


def values(n):
    """A body of n values, besides as many as a text that is shifted may have tokens."""
    path, body = chat(metadata=[])
    return path, {**body, "metadata": [0] * (n + SHIFTED - count(body))}


# name of the limit -> (the field that is named, a request of size n)
CASES = {
    "MESSAGES_MAX": ("messages", lambda n: ("/tokenize", {"messages": [USER] * n})),
    "TOOLS_MAX": ("tools", lambda n: ("/tokenize", {"messages": [USER], "tools": [TOOL] * n})),
    "TOOL_NAME_BYTES": ("tools[0].function.name", lambda n: ("/tokenize", {"messages": [USER], "tools": [
        {"type": "function", "function": {"name": "f" * n}}]})),
    "PROMPTS_MAX": ("prompt", lambda n: text(prompt=["a"] * n)),
    "INPUTS_MAX": ("input", lambda n: ("/v1/embeddings", {"model": MODEL, "input": ["a"] * n, "encoding_format": "base64"})),
    "BREAKERS_MAX": ("dry_sequence_breakers", lambda n: chat(dry_multiplier=1, dry_sequence_breakers=["x"] * n)),
    "N_MAX": ("n", lambda n: chat(n=n, max_tokens=1)),
    "CHOICES_MAX": ("n", lambda n: text(prompt=["a", "b"], n=(n + 1) // 2, max_tokens=1)),
    "STOPS_MAX": ("stop", lambda n: chat(stop=["x"] * n)),
    "STOP_BYTES": ("stop", lambda n: chat(stop="x" * n)),
    "STOP_IDS_MAX": ("stop_token_ids", lambda n: chat(stop_token_ids=[1] * n)),
    "SCORES_MAX": ("max_tokens", None),  # a product of other limits: below
    "SCORES_AT_ONCE": ("max_tokens", None),  # likewise
    "BIAS_MAX": ("logit_bias", None),  # ids must be in the vocabulary: below
    "SAMPLERS_MAX": ("samplers", lambda n: chat(samplers=["top_k"] * n)),
    "MEMBERS_MAX": ("response_fields", lambda n: ("/completion", {"prompt": "a", "response_fields": ["content"] * n})),
    "ID_BYTES": ("user", lambda n: respond(user="u" * n)),
    "ROLE_MAX": ("messages[0].role", lambda n: chat(messages=[{"role": "r" * n, "content": "x"}])),
    "METADATA_MAX": ("metadata", lambda n: respond(metadata={str(i): "x" for i in range(n)})),
    "METADATA_KEY": ("metadata", lambda n: respond(metadata={"\u00e9" * n: "x"})),
    "METADATA_VALUE": ("metadata.k", lambda n: respond(metadata={"k": "\u00e9" * n})),
    "CHOICES_LISTED_MAX": ("guided_choice", lambda n: chat(guided_choice=[str(i) for i in range(n)])),
    "KEY_BYTES": ("cache_salt", lambda n: chat(cache_salt="x" * n)),
    "TEMPERATURE_MAX": ("temperature", lambda n: chat(temperature=n)),
    "LOOP_MAX": ("repetition_detection.max_pattern_size",
                 lambda n: chat(repetition_detection={"max_pattern_size": n, "min_count": 2})),
    "REPETITION_MAX": ("repetition_penalty", lambda n: chat(repetition_penalty=n)),
    "JSON_DEPTH": (None, lambda n: chat(user=None, metadata=json.loads("[" * (n - 1) + "]" * (n - 1)))),
    "JSON_VALUES": (None, values),
    "PAGE_MAX": ("limit", None),  # an argument of a GET: below
}
# test_native.py, an option, a default, test_errors.py, tests/unit/server/oai/test_records.c, test_embeddings.py (three), test_pictures.py
ELSEWHERE = {"FILES_MAX", "NAMES_MAX", "COMPLETION_TOKENS", "REPETITION_MIN", "RECORDS_MAX", "INPUTS_AT_ONCE", "NUMBERS_FLOAT",
             "NUMBERS_BASE64", "PICTURES_MAX"}
ALSO = [("STOP_BYTES", "stop", lambda n: chat(stop=["x" * 100] * (n // 100) + ["x" * (n % 100)])),
        ("KEY_BYTES", "prompt_cache_key", lambda n: chat(prompt_cache_key="x" * n)),
        ("KEY_BYTES", "session_id", lambda n: chat(session_id="x" * n)),
        ("N_MAX", "n", lambda n: text(n=n, max_tokens=1)),
        *[("ID_BYTES", name, lambda n, name=name: respond(**{name: "u" * n})) for name in ("safety_identifier", "prompt_cache_key")]]


def test_every_limit_is_here():
    assert set(LIMITS) == set(CASES) | ELSEWHERE


@pytest.fixture(scope="module")
def roomy():
    """A daemon whose queue and batch do not limit these requests."""
    from conftest import Daemon
    daemon = Daemon("--max-queue", "512", "--max-num-seqs", "256", "--kv-pool-bytes", "1G", "--max-model-len", "2048")
    yield daemon
    assert daemon.stop() == 0


@pytest.mark.parametrize("limit,field,make", [(k, f, m) for k, (f, m) in CASES.items() if m] + ALSO)
def test_at_the_limit_and_above(roomy, limit, field, make):
    n = LIMITS[limit]
    path, body = make(n)
    r = roomy.post(path, body)
    assert r.status_code == 200, r.text
    path, body = make(n + 1)
    r = roomy.post(path, body)
    assert r.status_code == 400 and r.json()["error"]["param"] == field, r.text
    roomy.wait_idle()


def test_prompts_times_choices(roomy):
    most = LIMITS["CHOICES_MAX"]
    prompts = ["a"] * LIMITS["PROMPTS_MAX"]
    n = most // len(prompts)
    r = roomy.post(*text(prompt=prompts, n=n, max_tokens=1))
    assert r.status_code == 200 and len(r.json()["choices"]) == most
    r = roomy.post(*text(prompt=prompts, n=n + 1))
    assert r.status_code == 400 and r.json()["error"]["param"] == "n" and str(most) in r.json()["error"]["message"]


@pytest.mark.parametrize("echo", [False, True])
def test_choices_times_tokens_times_alternatives(roomy, echo):
    """Each count may be at its limit, but all at once would take gigabytes, and seconds of the loop."""
    n, top = LIMITS["CHOICES_MAX"], 20
    fields = dict(prompt="a" if not echo else "abcdefghij", n=n // 2, logprobs=top, echo=echo)

    def most(limit):
        return LIMITS[limit] // (1 + top) // fields["n"] - (len(fields["prompt"]) if echo else 0)

    for limit, also in (("SCORES_AT_ONCE", {}), ("SCORES_MAX", {"stream": True})):
        r = roomy.post(*text(**fields, **also, max_tokens=most(limit) + 1))
        assert r.status_code == 400 and r.json()["error"]["param"] == "max_tokens", r.text
        assert str(LIMITS[limit]) in r.json()["error"]["message"]
    with roomy.post(*text(**fields, stream=True, max_tokens=most("SCORES_AT_ONCE") + 1), stream=True) as r:
        assert r.status_code == 200, "a stream's scores are sent one by one"
    r = roomy.post(*text(**fields, max_tokens=most("SCORES_AT_ONCE")))
    assert r.status_code == 200, r.text
    r = roomy.post(*text(**{**fields, "prompt": [fields["prompt"]] * 2}, max_tokens=most("SCORES_AT_ONCE")))
    assert r.status_code == 400, "prompts add up"


@pytest.mark.parametrize("path", [TEXT, CHAT, "/completion"])
def test_prompts_scores_are_part_of_every_choice(roomy, path):
    """Except in chats, whose answer has them once."""
    top, n = 20, LIMITS["N_MAX"]
    most = LIMITS["SCORES_AT_ONCE"] // (1 + top) // n
    body = dict(max_tokens=1, n=n, prompt_logprobs=top, kv={"retain": False})
    if path == CHAT:
        r = roomy.post(path, {**body, "messages": [{"role": "user", "content": "a" * most}]})
        assert r.status_code == 200 and len(r.json()["prompt_logprobs"]) > most
        return
    r = roomy.post(path, {**body, "prompt": "a" * (most + 1)})
    assert r.status_code == 400 and r.json()["error"]["param"] == "prompt_logprobs", r.text
    assert str(LIMITS["SCORES_AT_ONCE"]) in r.json()["error"]["message"]
    r = roomy.post(path, {**body, "prompt": "a" * most, "n": n - 1})
    assert r.status_code == 200, r.text


def test_pages(roomy):
    most = LIMITS["PAGE_MAX"]
    path, body = respond(input=[USER] * (most + 1))
    r = roomy.post(path, body)
    assert r.status_code == 200, r.text
    items = f"{path}/{r.json()['id']}/input_items?limit="
    page = roomy.get(items + str(most)).json()
    assert len(page["data"]) == most and page["has_more"]
    r = roomy.get(items + str(most + 1))
    assert r.status_code == 400 and r.json()["error"]["param"] == "limit" and str(most) in r.json()["error"]["message"], r.text


def test_biases(shared):
    """The maximum number of entries needs as many token ids."""
    most = LIMITS["BIAS_MAX"]
    r = shared.chat(logit_bias={str(i): 1 for i in range(most + 1)})
    assert r.status_code == 400 and r.json()["error"]["param"] == "logit_bias"
    r = shared.chat(logit_bias={str(i): 1 for i in range(most)})
    assert r.status_code == 200 or r.json()["error"]["param"].startswith("logit_bias."), "a smaller vocabulary"


def test_user_is_of_any_length(shared):
    assert shared.chat(user="x" * 100000, max_tokens=1).status_code == 200


def test_an_answer_without_a_length_gets_what_its_scores_may_take(roomy):
    """In equal parts for the prompts of a request. A length that the client names is refused instead."""
    top, n = 20, LIMITS["N_MAX"]
    body = dict(prompt=["abc", "def"], n=n, n_probs=top, ignore_eos=True, kv={"retain": False})
    most = LIMITS["SCORES_AT_ONCE"] // (1 + top) // n // 2
    r = roomy.post("/completion", body)
    assert r.status_code == 200, r.text
    assert max(answer["tokens_predicted"] for answer in r.json()) == most
    for also in ({"n_predict": most + 1}, {"min_tokens": most + 1}):
        r = roomy.post("/completion", {**body, **also})
        assert r.status_code == 400 and r.json()["error"]["param"] == "max_tokens", r.text
    roomy.wait_idle()


@pytest.mark.parametrize("also,param", [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True}, "prompt")])
def test_a_prompt_with_too_many_scores_is_named(roomy, also, param):
    """Although the answer would have more of them."""
    n = LIMITS["N_MAX"]
    prompt = "a" * (LIMITS["SCORES_AT_ONCE"] // 21 // n + 1)
    r = roomy.post(TEXT, dict(prompt=prompt, n=n, logprobs=20, max_tokens=len(prompt) + 1, **also))
    assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text


def test_an_answer_that_is_too_long_becomes_an_error(start):
    """The next answer on the same connection has its whole room again."""
    daemon = start(env={"KEEPD_TEST_ANSWER_BYTES": "4000"})
    short, long = (dict(prompt="a", n=4, max_tokens=n, ignore_eos=True, logprobs=5) for n in (1, 64))
    for _ in range(2):
        assert daemon.post(TEXT, short).status_code == 200
        r = daemon.post(TEXT, long)
        assert r.status_code == 400 and "longer than 4000 bytes" in r.json()["error"]["message"], r.text
    daemon.wait_idle()


@pytest.mark.slow
def test_an_event_that_is_too_long_becomes_an_error(start):
    """The last event of a response repeats all of its scores; the events before it have come."""
    daemon = start("--max-logprobs", "100000", "--max-model-len", "32768", "--kv-pool-bytes", "1G")
    whole = daemon.get("/tokenizer_info").json()["vocab_size"]
    path, body = respond(stream=True, store=False, ignore_eos=True, include=["message.output_text.logprobs"], top_logprobs=-1,
                         max_output_tokens=LIMITS["SCORES_MAX"] // (1 + whole) - 1)
    last = b""
    with daemon.post(path, body, stream=True, timeout=600) as r:  # a busy machine takes minutes to write the last event
        assert r.status_code == 200, r.text
        for part in r.iter_content(1 << 20):
            last = (last + part)[-4096:]
    event = json.loads(last.rsplit(b"data: ", 1)[1])
    assert event["type"] == "response.failed" and "would be longer than" in event["response"]["error"]["message"]
    daemon.wait_idle()
