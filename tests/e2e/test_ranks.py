"""One model split over several ranks: the same answers to the last digit, and conversations that one number
of ranks has written go on with another."""
import os
import pathlib
import re
import subprocess

import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = ("--kv-budget", "48", "--kv-buffer", "16", "--kv-chunk", "64")
POLICIES = ("global", "snapkv", "d2o")


def ranks(count):
    return ("--tensor-parallel-size", str(count), "--threads", "2")


def first_turn(name):
    return [{"role": "user", "content": f"My sister {name} lives in Lisbon. The code of the garage is 4815. " * 6}]


def ask(d, messages, policy):
    answer = d.chat(messages, max_tokens=24, temperature=1, seed=3, logprobs=True, n=2,
                    kv={"policy": policy, "report": "positions"})
    choices = [[(t["token"], t["logprob"]) for t in c["logprobs"]["content"]] for c in answer["choices"]]
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):  # depend on measured times
        answer["usage"]["completion_tokens_details"].pop(name)
    return answer["choices"][0]["message"]["content"], choices, answer["usage"]


def dialogue(d, policy):
    messages = first_turn("Nora")
    content, *first = ask(d, messages, policy)
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "What is the code?"}]
    return first, ask(d, messages, policy)


def test_answers_and_reports_are_those_of_one_rank(daemon):
    one = daemon(*FLAGS)
    expected = [dialogue(one, policy) for policy in POLICIES]
    assert all(usage["kv_details"]["evicted_entries"] > 0 for (_, usage), _ in expected)
    assert all(usage["prompt_tokens_details"]["cached_tokens"] > 0 for _, (_, _, usage) in expected)
    for count in (2, 8):  # more KV heads than ranks, and fewer
        d = daemon(*ranks(count), *FLAGS)
        assert [dialogue(d, policy) for policy in POLICIES] == expected
        for pages in ("keepd_pages_used", "keepd_pages_retained"):  # pages of the rank that has most
            assert one.metric(pages) / min(count, 4) <= d.metric(pages) <= one.metric(pages)


@pytest.mark.parametrize("quantization", ["q8", "q4"])
def test_blocks_beside_bf16_are_those_of_one_rank(daemon, quantization):
    if "avx512_bf16" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor lacks AVX512_BF16")
    options = ("--quantization", quantization, "--cpu-activations", "bf16", *FLAGS)
    expected = dialogue(daemon(*options), "global")
    assert dialogue(daemon(*ranks(2), *options), "global") == expected


def test_conversations_go_on_with_another_number_of_ranks(daemon, tmp_path):
    state = ("--state-dir", str(tmp_path / "state"), *FLAGS)
    d = daemon(*FLAGS)
    expected = [dialogue(d, policy) for policy in POLICIES]
    d = daemon(*ranks(4), *state)
    contents = [ask(d, first_turn("Nora"), policy)[0] for policy in POLICIES]
    assert d.stop() == 0
    d = daemon(*ranks(2), *state)
    for policy, content, (_, second) in zip(POLICIES, contents, expected):
        messages = first_turn("Nora") + [{"role": "assistant", "content": content},
                                         {"role": "user", "content": "What is the code?"}]
        assert ask(d, messages, policy) == second
    assert d.metric("keepd_state_restored_total") == len(POLICIES)


def test_a_cap_holds_ranks_back(daemon):
    d = daemon(*ranks(4), *FLAGS, "--kv-rank-cap", "100")
    _, _, usage = ask(d, first_turn("Nora"), "global")
    kept = usage["kv_details"]["positions"]  # one head on every rank
    assert len({sum(len(layer[head]) for layer in kept) for head in range(4)}) == 1
    assert d.metric("keepd_rank_cap_hits_total") > 0


def need(d, policy):
    """Pages that one rank reserves for a request, read from the error message of a tiny pool."""
    body = {"model": "keepd-nano", "messages": first_turn("Nora"), "max_tokens": 60, "kv": {"policy": policy}}
    r = requests.post(f"{d.url}/v1/chat/completions", json=body, timeout=60)
    assert r.status_code == 400, r.text
    return int(re.search(r"may need (\d+) pages", r.json()["error"]["message"])[1])


def test_a_rank_reserves_what_it_may_need(daemon):
    """An even share where heads do not compete, all that is kept where they do, a capped share with a cap: that is enough."""
    tiny = ("--kv-pool-bytes", "256K", *FLAGS)
    one, two = daemon(*tiny), daemon(*ranks(2), *tiny)
    capped = daemon(*ranks(2), *tiny, "--kv-rank-cap", "100")
    assert need(one, "full") == 2 * need(two, "full") == 2 * need(capped, "full")
    assert need(two, "trimkv") == need(one, "trimkv") // 2
    assert need(capped, "global") == need(one, "global") // 2 < need(two, "global") - 10
    assert need(two, "global") <= need(one, "global")
    pages, page_bytes = need(capped, "global"), capped.kv()["pool"]["page_bytes"]
    d = daemon(*ranks(2), *FLAGS, "--kv-rank-cap", "100", "--kv-pool-bytes", str(pages * page_bytes))
    assert d.kv()["pool"]["pages_total"] == pages
    for name in ("Nora", "Otto"):  # the second request evicts the first one's conversation
        answer = d.chat(first_turn(name), max_tokens=60, ignore_eos=True, kv={"policy": "global"})
        assert answer["usage"]["kv_details"]["evicted_entries"] > 0
    assert d.metric("keepd_preemptions_total") == 0


@pytest.mark.parametrize("option, value, why", [
    ("tensor-parallel-size", "3", "must be 1, 2, 4 or 8"), ("tensor-parallel-size", "16", "8"),
    ("kv-rank-cap", "50", "must be 0 or at least 100")])
def test_wrong_numbers_are_refused_at_start(option, value, why):
    binary = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
    if not pathlib.Path(binary).exists():
        pytest.skip(f"skip: {binary} is not built")
    done = subprocess.run([binary, "--model", str(ROOT / "bundled/keepd-nano"), "--port", "0", f"--{option}", value],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert option in done.stderr and why in done.stderr
