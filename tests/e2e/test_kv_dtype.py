"""--kv-dtype fp8, q8, q4: pages hold more entries; answers do not depend on company; a state file of another number
format is nobody's."""
import concurrent.futures
import shutil

import pytest
import requests
from test_state import FLAGS, ask, cached, first_turn, next_turn, tokens, wait_for_files

NARROW = ("fp8", "q8", "q4")
POOL = ("--kv-pool-bytes", "16M", "--max-num-seqs", "8")


def cache_dtype(d):
    lines = requests.get(f"{d.url}/metrics", timeout=10).text.splitlines()
    return next(line for line in lines if line.startswith("vllm:cache_config_info")).split('cache_dtype="')[1].split('"')[0]


@pytest.mark.parametrize("option,said", (("int8", "int8 with 4-bit blocks, int8 with 8-bit"), ("f32", "f32 with 4-bit blocks, f32 with 8-bit")))
def test_the_server_says_how_activations_are_rounded(daemon, option, said):
    info = requests.get(f"{daemon(*FLAGS, '--cpu-activations', option).url}/server_info", timeout=10).json()
    assert info["activations"].startswith(said), info


def test_a_page_holds_twice_the_entries(daemon):
    wide, narrow = (daemon(*POOL, *FLAGS, "--kv-dtype", name) for name in ("bf16", "fp8_e4m3"))
    pools = [d.kv()["pool"] for d in (wide, narrow)]
    assert pools[1]["page_slots"] == 2 * pools[0]["page_slots"]
    # Metadata for twice as many entries: 12 bytes each.
    assert pools[1]["page_bytes"] - pools[0]["page_bytes"] == 12 * pools[0]["page_slots"]
    held = [pool["pages_total"] * pool["page_slots"] for pool in pools]
    assert 1.5 * held[0] < held[1] <= 2 * held[0]
    assert (cache_dtype(wide), cache_dtype(narrow)) == ("bf16", "fp8")
    answers = [ask(d, first_turn()) for d in (wide, narrow)]
    sizes = [answer["usage"]["kv_details"]["bytes"] for answer in answers]
    kept = [answer["usage"]["kv_details"]["kept_entries"] for answer in answers]
    assert kept[0] == kept[1] and sizes[1] < sizes[0]


@pytest.mark.parametrize("name,entries", (("q8", 2), ("q4", 4)))
def test_a_page_with_factors(daemon, name, entries):
    """Two bytes more for each key and value, and metadata of 12 for each entry."""
    pools = [daemon(*POOL, *FLAGS, "--kv-dtype", dtype).kv()["pool"] for dtype in ("bf16", name)]
    slots = pools[1]["page_slots"]
    assert slots == entries * pools[0]["page_slots"]
    assert pools[1]["page_bytes"] == pools[0]["page_bytes"] + 4 * slots + 12 * (slots - pools[0]["page_slots"])


@pytest.mark.parametrize("name", NARROW)
def test_an_answer_is_its_own(daemon, name):
    d = daemon(*FLAGS, "--kv-dtype", name, "--cpu-path", "auto", "--max-num-batched-tokens", "96")
    asked = [[{"role": "user", "content": f"Number {i}. {first_turn()[0]['content']}"}] for i in range(4)]
    kv = {"kv": {"reuse": False}, "max_tokens": 12, "logprobs": True}
    alone = [tokens(d.chat(messages, **kv)) for messages in asked]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda messages: tokens(d.chat(messages, **kv)), asked)) == alone


@pytest.mark.parametrize("name", NARROW)
def test_state_files_of_another_format_are_left_alone(daemon, tmp_path, name):
    narrow = ("--kv-dtype", name)
    state, copy = tmp_path / "state", tmp_path / "copy"
    d = daemon("--state-dir", str(state), "--state-idle", "0", *FLAGS, *narrow)
    first = ask(d, first_turn())
    files = wait_for_files(state, 1)
    shutil.copytree(state, copy)
    second = next_turn(first_turn(), first, "What is the code of the garage?")
    expected = ask(d, second)
    other = daemon("--state-dir", str(copy), "--state-idle", "86400", *FLAGS, "--kv-dtype", "bf16")
    assert cached(ask(other, second)) == 0
    assert (copy / files[0].name).exists()
    assert other.stop() == 0
    again = daemon("--state-dir", str(copy), "--state-idle", "86400", *FLAGS, *narrow)
    answer = ask(again, second)
    assert cached(answer) == cached(expected) > 0 and tokens(answer) == tokens(expected)
