"""A long conversation in constant memory: twenty turns, over 6,000 tokens, budget 256. Chats that begin alike."""
import concurrent.futures
import random

import pytest
import requests

BUDGET, BUFFER, CHUNK = 256, 128, 512
WORDS = "river mountain forest road bridge window garden table market street village train tower".split()


def chatter(rng):
    return " ".join(f"The {rng.choice(WORDS)} is near the {rng.choice(WORDS)}." for _ in range(40))


def test_twenty_turns(daemon):
    d = daemon("--kv-budget", str(BUDGET), "--kv-policy", "global")
    rng, messages, rss, seen, prompts, cached = random.Random(7), [], [], 0, 0, 0
    for turn in range(20):
        messages.append({"role": "user", "content": chatter(rng)})
        answer = d.chat(messages, max_tokens=24, kv={"report": "lengths"})
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usage, details = answer["usage"], answer["usage"]["kv_details"]
        lengths = [n for layer in details["lengths"] for n in layer]
        assert details["kept_entries"] == sum(lengths)
        assert details["kept_entries"] <= len(lengths) * (BUDGET + BUFFER)
        # Each turn pays only for its new tokens: this message, the template, and what the last
        # answer's end (never appended) leaves over.
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        if turn > 0:
            assert computed <= usage["prompt_tokens"] - seen + 24
        seen = usage["prompt_tokens"]
        prompts, cached = prompts + seen, cached + usage["prompt_tokens_details"]["cached_tokens"]
        assert d.metric("vllm:prompt_tokens_total") == prompts
        assert d.metric("vllm:prompt_tokens_cached_total") == cached
        rss.append(d.rss())
        kv = d.kv()
        assert kv["pool"]["pages_reserved"] == 0
        # The dialogue's state, apart from the one before it, which is kept for a retry while there is room.
        assert d.metric("keepd_entries_kept") == details["kept_entries"]
        assert d.metric("keepd_entries_superseded") <= len(lengths) * (3 * BUDGET + BUFFER + 2 * CHUNK)
        assert kv["pool"]["pages_used"] == kv["pool"]["pages_retained"]  # shared pages count once
        # The dialogue keeps its last state, the one before it for a retry, and two checkpoints.
        assert sum(not c["superseded"] for c in kv["conversations"]) == 1
        assert len(kv["conversations"]) <= 4
    assert seen > 6000
    if not d.sanitized: # the sanitizer's allocator keeps what was freed
        assert max(rss[4:]) < 1.02 * rss[4], rss
    assert max(lengths) > 1.5 * min(lengths), "heads keep different amounts"
    assert d.metric("keepd_preemptions_total") == 0


RULES = " ".join(f"Rule {i}: the garage number {i} is near the river." for i in range(140))


def asker(d, **headers):
    def ask(question, max_tokens=12, salt="", **kv):
        body = {"messages": [{"role": "system", "content": RULES}, {"role": "user", "content": question}],
                "temperature": 0, "max_tokens": max_tokens, "cache_salt": salt, "kv": kv}
        r = requests.post(f"{d.url}/v1/chat/completions", json=body, headers=headers, timeout=300)
        assert r.status_code == 200, r.text
        usage = r.json()["usage"]
        return r.json()["choices"][0]["message"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    return ask


@pytest.mark.parametrize("policy", ["global", "full", "snapkv", "h2o"])
def test_chats_that_begin_alike_are_read_once(daemon, policy):
    """The second chat with a long system prompt reads its own message alone, though evictions came in between, and
    answers what it answers without reuse."""
    d = daemon()
    ask = asker(d)
    ask("Where is the garage?", policy=policy)
    second, tokens, cached = ask("What is near the river?", policy=policy)
    alone, _, none = ask("What is near the river?", policy=policy, reuse=False)
    assert tokens > 2000 and tokens - cached < tokens / 20
    assert none == 0 and second == alone
    assert d.metric("keepd_conversation_cuts_total") == 1


def test_chats_that_come_at_once_are_read_once(daemon):
    """Six chats with one new system prompt: the first reads it and the others wait for that."""
    d = daemon()
    ask = asker(d)
    questions = [f"What is rule {i}?" for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, questions))
    assert sorted(cached > 1900 for _, _, cached in answers) == [False] + [True] * 5
    assert sum(cached for _, _, cached in answers if cached < 1900) == 0
    assert d.metric("vllm:prompt_tokens_total") - d.metric("vllm:prompt_tokens_cached_total") < 2 * answers[0][1]
    for question, (message, _, _) in zip(questions[:2], answers):
        assert message == ask(question, reuse=False)[0]


def test_walls_between_prompts(daemon):
    """Another key, another salt and other settings share nothing."""
    d = daemon("--api-key", "one", "--api-key", "two")
    one, two = asker(d, Authorization="Bearer one"), asker(d, Authorization="Bearer two")
    assert one("Where is the garage?", max_tokens=1)[2] == 0
    assert two("What is near the river?", max_tokens=1)[2] == 0
    assert one("What is near the river?", max_tokens=1, salt="s")[2] == 0
    assert one("What is near the river?", max_tokens=1, budget=900)[2] == 0
    assert one("What is near the river?", max_tokens=1)[2] > 1900
