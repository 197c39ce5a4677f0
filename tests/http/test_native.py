"""The routes and forms of llama.cpp's server."""
import json

import pytest
import requests
from conftest import LENGTH, MODEL, chat_body, events

NATIVE, INFILL = "/completion", "/infill"
FIM = {"KEEPD_FAKE_FIM": "1"}


def body(prompt="abcdef", **fields):
    return {"prompt": prompt, "temperature": 0, "n_predict": 8, **fields}


def streamed(daemon, path, fields):
    r = requests.post(daemon.url + path, json={**fields, "stream": True}, stream=True, timeout=60)
    assert r.status_code == 200, r.text
    return [json.loads(e) for e in events(r)]


def tokens_of(daemon, text, special=False):
    return daemon.post("/tokenize", {"prompt": text, "parse_special": special}).json()["tokens"]


# --- /completion ---

def test_the_answer(shared, fake):
    r = shared.post(NATIVE, body(n_predict=3)).json()
    text = shared.post("/v1/completions", {"prompt": "abcdef", "temperature": 0, "max_tokens": 3}).json()
    assert r["content"] == text["choices"][0]["text"] == "abc" and r["usage"]["prompt_tokens"] == 6
    assert (r["index"], r["stop"], r["model"], r["prompt"], r["tokens"]) == (0, True, MODEL, "abcdef", [])
    assert (r["tokens_predicted"], r["tokens_evaluated"], r["stop_type"], r["stopping_word"]) == (3, 6, "limit", "")
    assert not r["truncated"] and not r["has_new_line"]
    assert r["timings"]["predicted_n"] == 3 and r["timings"]["prompt_n"] + r["timings"]["cache_n"] == 6
    settings = r["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["stop"]) == (3, 0, [])


def test_how_it_ended(shared, fake):
    word = shared.post(NATIVE, body("abcXYdef", stop=["XY"], n_predict=12)).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("abc", "word", "XY")
    full = shared.post(NATIVE, body("a\n" * 500, n_predict=-1, ignore_eos=True)).json()
    assert full["truncated"] and full["stop_type"] == "limit" and full["has_new_line"]
    assert full["tokens_evaluated"] + full["tokens_predicted"] == LENGTH
    assert shared.post(NATIVE, body("abc", n_predict=100)).json()["stop_type"] == "eos"


def test_streamed_is_the_whole(shared):
    fields = body("h\u00e9llo", n_predict=12, n_probs=2, n=2, seed=1, temperature=1, kv={"reuse": False})
    whole = shared.post(NATIVE, fields).json()
    chunks = streamed(shared, NATIVE, fields)
    assert [e["stop"] for e in chunks] == [False] * (len(chunks) - 2) + [True] * 2
    for i, last in enumerate(chunks[-2:]):
        own = [e for e in chunks if e["index"] == i and not e["stop"]]
        assert "".join(e["content"] for e in own) == whole[i]["content"]
        assert [p for e in own for p in e["completion_probabilities"]] == whole[i]["completion_probabilities"]
        for name in ("stop_type", "tokens_predicted", "tokens_evaluated", "prompt", "has_new_line"):
            assert last[name] == whole[i][name]
        assert last["content"] == "" and last["usage"]["completion_tokens"] == last["timings"]["predicted_n"]


def test_several_prompts(shared):
    """An object for one choice, an array for several, each with the numbers of its own prompt."""
    a, b = shared.post(NATIVE, body(["abc", [100, 101]], n_predict=2)).json()
    assert (a["index"], b["index"], a["prompt"], b["prompt"]) == (0, 1, "abc", "de")
    assert (a["timings"]["prompt_n"] + a["timings"]["cache_n"], b["usage"]["prompt_tokens"]) == (3, 2)
    assert isinstance(shared.post(NATIVE, body(["abc"])).json(), dict)
    same = shared.post(NATIVE, body([{"prompt_string": "abc"}, "abc"], n_predict=2)).json()
    assert same[0]["content"] == same[1]["content"]
    for media, status in ([], 200), (None, 200), (["AA"], 400), ("AA", 400):
        r = shared.post(NATIVE, body({"prompt_string": "abc", "multimodal_data": media}))
        assert r.status_code == status


def test_tokens_and_scores(shared):
    r = shared.post(NATIVE, body(return_tokens=True, n_probs=3, n_predict=4)).json()
    assert len(r["tokens"]) == r["tokens_predicted"] > 0
    for token, scored in zip(r["tokens"], r["completion_probabilities"]):
        assert scored["id"] == token and scored["logprob"] <= 0 and len(scored["top_logprobs"]) == 3
        assert {"id", "token", "logprob", "bytes"} == set(scored["top_logprobs"][0])
    assert all(e["tokens"] for e in streamed(shared, NATIVE, body(n_predict=3)) if not e["stop"])
    assert shared.post(NATIVE, body(n_probs=21)).json()["error"]["param"] == "n_probs"


def test_tokens_of_a_chat(shared):
    """llama.cpp's count: those of the prompt, whatever else the chat asks for."""
    fields = chat_body("abc", max_tokens=3)
    used = shared.post("/v1/chat/completions", fields).json()["usage"]["prompt_tokens"]
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert shared.post(path, fields).json() == {"input_tokens": used}
    assert shared.post(path, {}).json()["error"]["param"] == "messages"


def test_response_fields(shared):
    names = ["content", "generation_settings/n_predict", "no/such", "content", "timings/predicted_n"]
    r = shared.post(NATIVE, body(n_predict=2, response_fields=names)).json()
    assert set(r) == {"content", "generation_settings/n_predict", "timings/predicted_n"}
    assert r["generation_settings/n_predict"] == 2
    assert streamed(shared, NATIVE, body(n_predict=2, response_fields=["stop_type"]))[-1] == {"stop_type": "limit"}
    assert "generation_settings" in shared.post(NATIVE, body(response_fields=[])).json()
    nul = shared.post(NATIVE, body("a\0b", n_predict=3, response_fields=["prompt"])).json()
    assert nul == {"prompt": "a\0b"}
    for wrong in ("content", [1], ["a"] * 65):
        assert shared.post(NATIVE, body(response_fields=wrong)).json()["error"]["param"].startswith("response_fields")


def test_no_tokens_read_the_prompt(start):
    """llama.vim sends the text before it is asked for, so that the answer need not read it."""
    daemon = start()
    r = daemon.post(NATIVE, body("abcdef" * 10, n_predict=0)).json()
    assert (r["content"], r["tokens_predicted"], r["tokens_evaluated"]) == ("", 0, 60)
    assert streamed(daemon, NATIVE, body("x", n_predict=0))[-1]["tokens_predicted"] == 0
    assert daemon.post("/v1/completions", {"prompt": "a", "max_tokens": 0}).status_code == 400


def test_cache_prompt(start):
    daemon = start()
    text = "abcdef" * 10
    first = daemon.post(NATIVE, body(text, n_predict=4)).json()
    more = text + first["content"] + "g"
    assert daemon.post(NATIVE, body(more, n_predict=4, cache_prompt=False)).json()["tokens_cached"] == 0
    assert daemon.post(NATIVE, body(more, n_predict=4)).json()["tokens_cached"] >= len(text)


def test_samplers(shared):
    """Samplers that are left out are off."""
    def settings(**fields):
        return shared.post(NATIVE, body(top_k=5, top_p=0.5, min_p=0.1, **fields)).json()["generation_settings"]
    only = settings(samplers=["top_k", "infill"], temperature=0.5, presence_penalty=1)
    assert (only["top_k"], only["top_p"], only["min_p"], only["temperature"], only["presence_penalty"]) == (5, 1, 0, 1, 0)
    assert settings(samplers=["temperature", "top_p"])["temperature"] == 0
    for full in ([], None):
        assert settings(samplers=full)["top_p"] == 0.5
    for wrong, param in (("top_k", "samplers"), (["top_k", "magic"], "samplers[1]"), ([3], "samplers[0]")):
        assert shared.post(NATIVE, body(samplers=wrong)).json()["error"]["param"] == param


def test_biases_as_a_list(shared, fake):
    """[id or text, bias]: a text stands for each of its tokens."""
    for bias in ([[97, -100], ["bc", False]], [["abc", -100]]):
        r = shared.post(NATIVE, body("abc", n_predict=3, logit_bias=bias)).json()
        assert [b["token"] for b in r["generation_settings"]["logit_bias"]] == [97, 98, 99]
    for wrong, param in (([[97]], "[0]"), ([[97, 1], 3], "[1]"), ([[97, 101]], "[0]"), ([[99999, 1]], "[0]"), ("x", "")):
        assert shared.post(NATIVE, body(logit_bias=wrong)).json()["error"]["param"] == f"logit_bias{param}"
    assert shared.post(NATIVE, body(logit_bias=[["x" * 1025, 1]])).status_code == 400


def test_texts_as_keys_of_biases(shared, fake):
    """In an object, too; OpenAI's routes know ids only."""
    r = shared.post(NATIVE, body("abc", n_predict=3, logit_bias={"97": -100, "bc": False, " ": 1})).json()
    assert [b["token"] for b in r["generation_settings"]["logit_bias"]] == [97, 98, 99, 32]
    for key in ("99999", "99999999999999999999"):
        assert shared.post(NATIVE, body(logit_bias={key: 1})).json()["error"]["param"] == f"logit_bias.{key}"


def test_ends_that_are_ignored_are_biases(shared, fake):
    end = tokens_of(shared, "<|im_end|>", special=True)
    for ignored in (True, False):
        biases = shared.post(NATIVE, body(n_predict=2, ignore_eos=ignored)).json()["generation_settings"]["logit_bias"]
        assert biases == ([{"token": end[0], "bias": None}] if ignored else [])


def test_prompts_of_texts_and_ids(shared, fake):
    """One prompt in pieces, alone or in a list of prompts; with ids that must be tokens."""
    one = shared.post(NATIVE, body([97, "bc", 100, 101, "f"], n_predict=2)).json()
    assert one["prompt"] == "abcdef" and one["content"] == shared.post(NATIVE, body(n_predict=2)).json()["content"]
    assert shared.post(NATIVE, body(["abc", 100], n_predict=2)).json()["prompt"] == "abcd"
    two = shared.post(NATIVE, body([["a", 98], "xy", [99]], n_predict=1)).json()
    assert [a["prompt"] for a in two] == ["ab", "xy", "c"]
    assert shared.post("/v1/completions", {"prompt": [97, "b"], "max_tokens": 1}).json()["usage"]["prompt_tokens"] == 2
    special = shared.post(NATIVE, body([97, "<|im_end|>b"], parse_special=False)).json()
    assert special["tokens_evaluated"] == 2 + len("<|im_end|>")
    for wrong, param in (([97, "b", -1], "prompt[2]"), (["x", 99999], "prompt[1]"), (["x", 1.5], "prompt[1]"),
                         ([["x", 1.5], "y"], "prompt[0][1]"), ([97, "b", None], "prompt[1]"), (["x", [1], 2], "prompt[2]")):
        r = shared.post(NATIVE, body(wrong))
        assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_verbose(shared, fake, path):
    """The answer once more in the form of /completion, with the prompt as the model reads it."""
    fields = chat_body("abc", seed=1) if "chat" in path else {"prompt": "abc", "seed": 1}
    r = shared.post(path, {**fields, "verbose": True}).json()
    text = r["choices"][0]["message"]["content"] if "chat" in path else r["choices"][0]["text"]
    assert r["__verbose"]["content"] == text and r["__verbose"]["generation_settings"]["seed"] == 1
    prompt = shared.post("/apply-template", {"messages": fields["messages"]}).json()["prompt"] if "chat" in path else "abc"
    assert r["__verbose"]["prompt"] == prompt
    assert "__verbose" not in shared.post(path, fields).json()
    r = requests.post(shared.url + path, json={**fields, "verbose": True, "stream": True}, stream=True, timeout=60)
    last = json.loads(events(r)[-2])
    assert last["__verbose"]["prompt"] == prompt and not last["choices"]


def test_a_seed_for_all(start):
    """--seed is the seed of requests that give none."""
    daemon = start("--seed", "42")
    assert daemon.get("/props").json()["default_generation_settings"]["params"]["seed"] == 42
    for given, used in ((None, 42), (7, 7), (-1, 2 ** 64 - 1)):
        assert daemon.post(NATIVE, body(seed=given)).json()["generation_settings"]["seed"] == used
    assert streamed(daemon, NATIVE, body())[-1]["generation_settings"]["seed"] == 42
    other = start()
    assert other.get("/props").json()["default_generation_settings"]["params"]["seed"] == -1
    seeds = {other.post(NATIVE, body()).json()["generation_settings"]["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_prompt_that_is_too_long(shared):
    """The error's type and numbers, which llama.cpp's clients read."""
    for path, fields in ((NATIVE, body("a" * (LENGTH + 5))), ("/v1/chat/completions", chat_body("a" * (LENGTH + 5))),
                         ("/v1/completions", {"prompt": [97] * (LENGTH + 5)})):
        for stream in (False, True):
            r = shared.post(path, {**fields, "stream": stream})
            error = r.json()["error"]
            assert (r.status_code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", LENGTH)
            assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > LENGTH
            assert "exceeds the available context size" in error["message"]


def test_progress(shared):
    parts = [e["prompt_progress"] for e in streamed(shared, NATIVE, body("a" * 700, return_progress=True))
             if "prompt_progress" in e]
    assert all(p["total"] == 700 for p in parts)
    r = requests.post(shared.url + "/v1/chat/completions", json=chat_body(stream=True, timings_per_token=True),
                      stream=True, timeout=60)
    assert "timings" in json.loads(events(r)[-2])


def test_an_error_in_the_stream(shared, fake):
    last = streamed(shared, NATIVE, body("fail later"))[-1]
    assert set(last) == {"error"}


@pytest.mark.parametrize("fields,param", [
    ({"post_sampling_probs": True}, "post_sampling_probs"), ({"dynatemp_range": 0.5}, "dynatemp_range"),
    ({"lora": [{"id": 0, "scale": 1}]}, "lora"), ({"n_indent": 4}, "n_indent"), ({"prompt": None}, "prompt"),
    ({"n_predict": -2}, "n_predict"), ({"mirostat": 1}, "mirostat")])
def test_refusals(shared, fields, param):
    r = shared.post(NATIVE, body(**fields))
    assert (r.status_code, r.json()["error"]["param"]) == (400, param)


# --- /infill ---

def test_infill(start, fake):
    """The text before the gap ends with what is typed in its line; special tokens in the parts are text."""
    daemon = start(env=FIM)
    assert daemon.get("/props").json()["endpoint_infill"]
    marks = [tokens_of(daemon, f"<|fim_{n}|>", True) for n in ("prefix", "suffix", "middle")]
    for prefix, typed, suffix in (("ab", "cd", "ef"), ("", "", "x"), ("<|fim_middle|>\0", "x", "<|im_end|>")):
        fields = {"input_prefix": prefix, "input_suffix": suffix, "prompt": typed, "n_predict": 2, "temperature": 0}
        expected = marks[0] + tokens_of(daemon, prefix + typed) + marks[1] + tokens_of(daemon, suffix) + marks[2]
        r = daemon.post(INFILL, fields).json()
        assert r["tokens_evaluated"] == len(expected)
        assert tokens_of(daemon, r["prompt"], "\0" not in prefix) == expected or "fim" in prefix
        assert streamed(daemon, INFILL, fields)[-1]["prompt"] == r["prompt"]
    assert daemon.post(INFILL, {"input_prefix": "a", "input_suffix": "b", "n_predict": 0}).json()["content"] == ""


def test_infill_with_files(start, fake):
    daemon = start(env=FIM)
    fields = {"input_prefix": "p", "input_suffix": "s", "n_predict": 1}
    files = [{"filename": "a.h", "text": "int a;"}, {"text": "b", "time": 3}]
    r = daemon.post(INFILL, {**fields, "input_extra": files}).json()
    assert r["prompt"].startswith("a.h\nint a;\n\nb\n<|fim_prefix|>p")
    for extra, param in (({}, "input_extra"), ([3], "input_extra[0]"), ([{"text": "a"}, {}], "input_extra[1].text"),
                         ([{"filename": 3, "text": "a"}], "input_extra[0].filename"),
                         ([{"text": "a"}] * 257, "input_extra")):
        r = daemon.post(INFILL, {**fields, "input_extra": extra})
        assert (r.status_code, r.json()["error"]["param"]) == (400, param)


def test_infill_refusals(start, fake):
    daemon = start(env=FIM)
    for fields, param in (({"input_prefix": "a"}, "input_suffix"), ({"input_suffix": "a"}, "input_prefix"),
                          ({"input_prefix": "a", "input_suffix": "b", "prompt": [1]}, "prompt"),
                          ({"input_prefix": "a" * 2000, "input_suffix": ""}, "input_prefix"),
                          ({"input_prefix": "a", "input_suffix": "b", "truncate_prompt_tokens": 3},
                           "truncate_prompt_tokens")):
        r = daemon.post(INFILL, fields)
        assert (r.status_code, r.json()["error"]["param"]) == (400, param)


def test_infill_without_tokens_for_it(shared):
    r = shared.post(INFILL, {"input_prefix": "a", "input_suffix": "b"})
    assert r.status_code == 400
    assert r.json()["error"]["code"] == "unsupported_model" and "fim_prefix" in r.json()["error"]["message"]
    assert not shared.get("/props").json()["endpoint_infill"]


# --- texts, and what runs ---

def test_tokenize_content(shared):
    plain = shared.post("/tokenize", {"prompt": "h\u00e9llo", "add_special_tokens": False}).json()["tokens"]
    assert shared.post("/tokenize", {"content": "h\u00e9llo"}).json()["tokens"] == plain
    pieces = shared.post("/tokenize", {"content": "h\u00e9llo", "with_pieces": True}).json()["tokens"]
    assert [p["id"] for p in pieces] == plain
    text = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert text.decode() == "h\u00e9llo"
    assert shared.post("/tokenize", {"content": 3}).json()["error"]["param"] == "content"
    back = shared.post("/detokenize", {"tokens": plain}).json()
    assert back["content"] == back["prompt"] == "h\u00e9llo"


def test_slots(slow):
    daemon = slow("--max-num-seqs", "2")
    assert [s["is_processing"] for s in daemon.get("/slots").json()] == [False, False]
    r = requests.post(daemon.url + NATIVE, json=body(stream=True, n_predict=900, ignore_eos=True), stream=True, timeout=60)
    next(r.iter_lines())
    slots = daemon.get("/slots").json()
    assert [s["is_processing"] for s in slots] == [True, False] and slots[0]["n_prompt_tokens"] == 6
    r.close()


def test_props(shared):
    props = shared.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == LENGTH and props["model_path"] == "keepd-nano"
    assert props["total_slots"] == shared.get("/server_info").json()["max_num_seqs"] == len(shared.get("/slots").json())
    assert props["model_alias"] == MODEL
