"""Log-probabilities: cut with the text, for prompts, and with the offsets of tokens."""
import json

import pytest
import requests
from conftest import MODEL, chat_body, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_body(prompt, **fields):
    return {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}


@pytest.mark.parametrize("stop,text,tokens", [("lo w", "hel", 3), ("h", "", 0), ("o wor", "hell", 4),
                                              ("never", "hello world", 12)])
def test_scores_end_with_the_text(shared, fake, stop, text, tokens):
    """At a stop string text and scores are cut at the same place; usage counts all generated tokens."""
    chat = shared.chat("hello world", stop=[stop], logprobs=True).json()
    scores = chat["choices"][0]["logprobs"]["content"]
    assert chat["choices"][0]["message"]["content"] == text and len(scores) == tokens
    assert "".join(t["token"] for t in scores if not t["token"].startswith("<|")) == text
    assert chat["usage"]["completion_tokens"] >= tokens
    r = requests.post(shared.url + CHAT, json=chat_body("hello world", stop=[stop], logprobs=True, stream=True),
                      stream=True, timeout=60)
    parts = [t for e in events(r)[:-1] for c in json.loads(e)["choices"] if c["logprobs"]
             for t in c["logprobs"]["content"]]
    assert parts == scores
    plain = shared.post(TEXT, text_body("hello world", stop=[stop], logprobs=0)).json()["choices"][0]
    assert plain["text"] == text and len(plain["logprobs"]["tokens"]) == tokens
    assert all(offset <= len(text) for offset in plain["logprobs"]["text_offset"])


def test_offsets_count_characters(shared, fake):
    """A token inside a character begins where the character does; text[offset:] starts with the token."""
    prompt = "a\u00e9\U0001f600b"
    choice = shared.post(TEXT, text_body(prompt, echo=True, logprobs=0)).json()["choices"][0]
    assert choice["text"] == prompt * 2
    assert choice["logprobs"]["text_offset"][:16] == [0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7]
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)


def test_an_echo_has_the_prompts_special_tokens(shared, fake):
    """Whether they were given as text or as ids: the echo is the prompt, and offsets fit it."""
    prompt = "<|im_start|>\u00e9<|im_end|>b"
    ids = shared.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    assert len(ids) == 5
    for given in (prompt, ids):
        choice = shared.post(TEXT, text_body(given, echo=True, logprobs=0, max_tokens=2)).json()["choices"][0]
        assert choice["text"].startswith(prompt)
        assert choice["logprobs"]["text_offset"][:6] == [0, 12, 12, 13, 23, 24]
    cut = shared.post(TEXT, text_body(prompt, echo=True, truncate_prompt_tokens=2, max_tokens=1)).json()
    assert cut["choices"][0]["text"].startswith("<|im_end|>b")


def test_prompt_logprobs(shared):
    """vLLM's field: per token a map of ids, the prompt's own among them, with rank and text."""
    ids = shared.post("/tokenize", {"prompt": "some words"}).json()["tokens"]
    r = shared.post(TEXT, text_body(ids, prompt_logprobs=3, max_tokens=2)).json()
    scores = r["choices"][0]["prompt_logprobs"]
    assert len(scores) == len(ids) and scores[0] is None and r["choices"][0]["logprobs"] is None
    echo = shared.post(TEXT, text_body(ids, echo=True, logprobs=3, max_tokens=0)).json()["choices"][0]["logprobs"]
    for i, entry in enumerate(scores[1:], 1):
        own = entry[str(ids[i])]
        assert own["logprob"] == echo["token_logprobs"][i] and own["rank"] >= 1
        assert isinstance(own["decoded_token"], str) and 3 <= len(entry) <= 4
        ranks = sorted(e["rank"] for e in entry.values())
        assert ranks[:3] == [1, 2, 3]
        best = min(entry.values(), key=lambda e: e["rank"])
        assert best["logprob"] == max(e["logprob"] for e in entry.values())
    chat = shared.chat(prompt_logprobs=0, logprobs=True, top_logprobs=2, max_tokens=2).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(e) == 1 for e in chat["prompt_logprobs"][1:])
    assert all(len(t["top_logprobs"]) == 2 for t in chat["choices"][0]["logprobs"]["content"])
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "scoring never continues a conversation"
    plain = shared.chat(max_tokens=1).json()
    assert plain["prompt_logprobs"] is None and plain["prompt_token_ids"] is None and plain["choices"][0]["token_ids"] is None
    plain = shared.post(TEXT, text_body("abc", max_tokens=1)).json()["choices"][0]
    assert plain["prompt_logprobs"] is None and plain["prompt_token_ids"] is None and plain["token_ids"] is None


def test_prompt_logprobs_without_an_answer(shared):
    r = shared.post(TEXT, text_body("abc", prompt_logprobs=1, max_tokens=0)).json()
    assert r["usage"]["completion_tokens"] == 0 and r["choices"][0]["text"] == ""
    assert len(r["choices"][0]["prompt_logprobs"]) == r["usage"]["prompt_tokens"]


def test_fewer_alternatives_than_the_prompt_has(shared):
    """Prompt and answer each have the number of alternatives that was asked for."""
    r = shared.post(TEXT, text_body("abc", prompt_logprobs=5, logprobs=1, max_tokens=2)).json()["choices"][0]
    assert all(len(top) <= 2 for top in r["logprobs"]["top_logprobs"])
    assert all(len(e) >= 5 for e in r["prompt_logprobs"][1:])


def test_as_many_alternatives_as_the_server_allows(fake):
    """--max-logprobs bounds every count; -1 asks for the whole vocabulary, where it is no larger than the bound."""
    from conftest import Daemon
    few, all_of_it = Daemon("--max-logprobs", "30"), Daemon("--max-logprobs", "100000")
    counts = [(CHAT, "top_logprobs", {"logprobs": True}), (CHAT, "prompt_logprobs", {}), (TEXT, "logprobs", {}),
              (TEXT, "prompt_logprobs", {}), ("/completion", "n_probs", {})]
    for path, name, also in counts:
        body = {"max_tokens": 1, **also, **({"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "xyz"})}
        assert few.post(path, {**body, name: 30}).status_code == 200, (path, name)
        for n in (31, -1, -2):
            r = few.post(path, {**body, name: n})
            assert r.status_code == 400 and r.json()["error"]["param"] == name, r.text
        assert all_of_it.post(path, {**body, name: -1}).status_code == 200, (path, name)
    whole = all_of_it.get("/tokenizer_info").json()["vocab_size"]
    assert few.get("/server_info").json()["max_logprobs"] == 30 and all_of_it.get("/server_info").json()["max_logprobs"] == whole
    chat = all_of_it.chat("abc", logprobs="true", top_logprobs=-1, prompt_logprobs=-1, max_tokens=2).json()
    tokens = chat["choices"][0]["logprobs"]["content"]
    assert tokens and all(len(t["top_logprobs"]) == whole for t in tokens)
    assert all(set(e) == {str(i) for i in range(whole)} for e in chat["prompt_logprobs"][1:])
    choice = all_of_it.post(TEXT, text_body("abc", logprobs=-1, max_tokens=1)).json()["choices"][0]
    ids = all_of_it.post(TEXT, text_body("abc", logprobs=-1, max_tokens=1, return_tokens_as_token_ids=True)).json()["choices"][0]
    assert len(ids["logprobs"]["top_logprobs"][0]) == whole >= len(choice["logprobs"]["top_logprobs"][0]) > whole // 2
    assert few.stop() == 0 and all_of_it.stop() == 0
