"""The reasoning between a model's tags is returned separately from its answer. (The fake turns the bytes 1 and 2 of
its answer into the tags.)"""
import json

import pytest
import requests
from conftest import chat_body, events, faked

CHAT = "/v1/chat/completions"
THINK, END = "\x01", "\x02"


@pytest.fixture(scope="module", params=[1, 2], ids=["the model opens the tag", "the template opens it"])
def thinker(request):
    for daemon in faked(THINK=str(request.param)):
        daemon.opened = request.param == 2
        yield daemon


def said(daemon, text):
    """A prompt that makes the fake reason `text`; the template may already have opened the tag."""
    return text if daemon.opened else THINK + text


def streamed(daemon, body):
    r = requests.post(daemon.url + CHAT, json={**body, "stream": True}, stream=True, timeout=60)
    reasoning = content = ""
    scores = 0
    for e in events(r)[:-1]:
        for c in json.loads(e)["choices"]:
            assert c["delta"].get("reasoning_content") == c["delta"].get("reasoning")
            assert not (content and "reasoning" in c["delta"]), "first it thinks, then it answers"
            reasoning += c["delta"].get("reasoning_content", "")
            content += c["delta"].get("content", "")
            scores += len(c["logprobs"]["content"]) if c["logprobs"] else 0
    return reasoning, content, scores


CASES = [("\nhm, \u00e9\n" + END + "\n\nyes", "hm, \u00e9\n", "yes"), (END + "at once", "", "at once"), ("", "", None),
         ("cut of", "cut of", None), ("a <think> b" + END + "c </think> d", "a <think> b", "c </think> d"),
         ("one" + END + "two" + END + "three", "one", "two</think>three")]


@pytest.mark.parametrize("text,reasoning,content", CASES, ids=range(len(CASES)))
def test_split(thinker, text, reasoning, content):
    body = chat_body(said(thinker, text), max_tokens=64, logprobs=True)
    answer = thinker.post(CHAT, body).json()
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert message.get("reasoning") == reasoning
    details = answer["usage"]["completion_tokens_details"]
    thought = text.split(END)[0]
    ended = 0 if END in text else 1  # the fake generates its end token while it reasons
    assert details["reasoning_tokens"] == len(thought.encode()) + ended
    assert streamed(thinker, body) == (reasoning or "", content or "", answer["usage"]["completion_tokens"])


def test_an_effort_is_a_share_of_the_answer(start, fake):
    """The template does not read the effort; a field that names tokens goes first."""
    daemon = start(env={"KEEPD_FAKE_THINK": "1"})

    def thought(**fields):
        message = daemon.chat("\1" + "x" * 80 + "\2said", temperature=0, max_tokens=40, **fields).json()["choices"][0]["message"]
        return len(message["reasoning"])
    assert [thought(reasoning_effort=e) for e in ("minimal", "low", "medium", "high")] == [4, 8, 20, 32]
    assert thought(reasoning={"effort": "low"}) == 8 and thought(reasoning_effort="low", max_thinking_tokens=3) == 3
    assert thought() == thought(reasoning_effort="max") > 32


@pytest.mark.parametrize("budget", [{"thinking_token_budget": 3}, {"max_thinking_tokens": 3}, {"reasoning": {"max_tokens": 3}},
                                    {"thinking": {"type": "enabled", "budget_tokens": 3}}], ids=lambda b: next(iter(b)))
def test_a_budget_ends_it(thinker, budget):
    """After so many tokens the closing tag follows; what the model would have thought is not part of the answer."""
    text = said(thinker, "abcdef" + END + "yes")
    chat = chat_body(text, max_tokens=64, **budget)
    message = thinker.post(CHAT, chat).json()["choices"][0]["message"]
    assert message["reasoning"] == "abc" and message["content"].startswith("ef"), message
    assert streamed(thinker, chat)[0] == "abc"
    response = thinker.post("/v1/responses", {"model": chat["model"], "input": text, "max_output_tokens": 64, **budget}).json()
    assert [item["content"][0]["text"] for item in response["output"]][0] == "abc", response["output"]
    answer = thinker.post("/v1/messages", {"model": chat["model"], "messages": chat["messages"], "max_tokens": 64, **budget}).json()
    assert answer["content"][0]["thinking"] == "abc", answer
    longer = thinker.post(CHAT, {**chat, **json.loads(json.dumps(budget).replace("3", "7"))}).json()["choices"][0]["message"]
    assert (longer["reasoning"], longer["content"]) == ("abcdef", "yes"), "there is more room than it needs"


def test_a_tag_that_the_template_has_opened(thinker):
    """Models that repeat the tag think once; a later tag is text."""
    if not thinker.opened:
        pytest.skip("the template opens no tag")
    body = chat_body("\n" + THINK + "\none " + THINK + " two" + END + "yes", max_tokens=64)
    answer = thinker.post(CHAT, body).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("one <think> two", "yes")
    assert streamed(thinker, body)[:2] == ("one <think> two", "yes")


def test_one_that_does_not_think(thinker):
    if thinker.opened:
        pytest.skip("the template made it think")
    answer = thinker.chat("plain " + THINK + " late").json()
    assert answer["choices"][0]["message"]["content"] == "plain <think> late", "a tag inside an answer is text"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert "reasoning" not in answer["choices"][0]["message"]


def test_request_turns_it_off(thinker):
    answer = thinker.chat(said(thinker, "hm" + END + "yes"), separate_reasoning=False).json()
    message = answer["choices"][0]["message"]
    assert message["content"].endswith("hm</think>yes") and "reasoning" not in message


def test_server_turns_it_off(start, fake):
    daemon = start("--reasoning-parser", "none", env={"KEEPD_FAKE_THINK": "1"})
    message = daemon.chat(THINK + "hm" + END + "yes").json()["choices"][0]["message"]
    assert message["content"] == "<think>hm</think>yes" and "reasoning" not in message
    assert daemon.get("/server_info").json()["splits_reasoning"] is False


def test_stop_strings_while_thinking(thinker):
    answer = thinker.chat(said(thinker, "one two" + END + "three"), stop=["two"]).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"], answer["choices"][0]["stop_reason"]) == ("one ", None, "two")


def test_tags_typed_by_a_user_are_text(shared, fake):
    """Answers of a model without the tags are not split."""
    assert shared.chat("<think>x</think>y", max_tokens=64).json()["choices"][0]["message"]["content"] == "<think>x</think>y"
    assert shared.get("/server_info").json()["splits_reasoning"] is False
