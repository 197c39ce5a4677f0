"""A long conversation in constant memory: twenty turns, over 6,000 tokens, budget 256."""
import random

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
    assert max(rss[4:]) < 1.02 * rss[4], rss
    assert max(lengths) > 1.5 * min(lengths), "heads keep different amounts"
    assert d.metric("keepd_preemptions_total") == 0


def test_chats_that_begin_alike_are_read_once(daemon):
    """The second chat with a long system prompt reads its own message alone, though evictions came in between, and
    answers what it answers without reuse."""
    d = daemon()
    rules = " ".join(f"Rule {i}: the garage number {i} is near the river." for i in range(140))

    def ask(question, **kv):
        return d.chat([{"role": "system", "content": rules}, {"role": "user", "content": question}], max_tokens=12,
                      kv=kv)

    ask("Where is the garage?")
    second, alone = ask("What is near the river?"), ask("What is near the river?", reuse=False)
    usage = second["usage"]
    assert usage["prompt_tokens"] > 2000 and usage["kv_details"]["evicted_entries"] > 0
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] / 20
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["choices"][0]["message"] == alone["choices"][0]["message"]
    assert d.metric("keepd_conversation_cuts_total") == 1
