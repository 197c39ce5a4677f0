"""Pictures for models whose tokens have places in three dimensions: answers beside a float64 model, bit by bit in any step, on
ranks and replicas; later turns, forks, evictions inside pictures, files of conversations; what is refused. The encoder is a tiny
Idefics3's, whose tiles have three rows of three."""
import concurrent.futures as futures
import sys

import pytest
import requests

from answers import cached, tokens
from conftest import start_on
from test_pictures import ROOT, ask, answer_of, check_answer, picture, tiles

sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
from grid_model import GridReference, write_text  # noqa: E402
from vision_model import EDGE, VOCAB, Vision, write_mmproj, write_model, write_tokenizer  # noqa: E402

FLAGS = ("--kv-dtype", "f32", "--cpu-activations", "f32")
KINDS = ("qwen2_5_vl", "qwen3_vl")


class Model:
    def __init__(self, folder, kind):
        seeing = write_model(folder / "seeing", longest=2 * EDGE)
        self.directory = write_text(folder / "text", kind, vocab_size=VOCAB, eos_token_id=2, bos_token_id=1)
        write_tokenizer(self.directory)
        self.flags = ("--model", str(self.directory), "--mmproj", str(write_mmproj(seeing, folder / "mmproj.gguf")), *FLAGS)
        self.reference = SeeingGrid(self.directory, folder / "alone", Vision(seeing))


class SeeingGrid(GridReference):
    def __init__(self, directory, text, vision):
        super().__init__(directory, text)
        self.vision = vision

    def show(self, tile):
        return super().show(3, 3, self.vision.rows(tile)[:, None])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: Model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def later_turn(messages, first, text="And what else?"):
    return messages + [{"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                       {"role": "user", "content": text}]


@pytest.mark.parametrize("path", ["reference", "portable", "avx2", "avx512", "amx"])
def test_answers_are_those_of_an_independent_model(daemon, models, path):
    for model in models.values():
        d = start_on(daemon, path, *model.flags)
        for pictures in ([picture(1)], [picture(1), picture(3), picture(2)]):
            check_answer(model.reference, model.directory, pictures, answer_of(d, ask(*pictures)))


def test_answers_are_the_same_in_any_step(daemon, models):
    model = models["qwen3_vl"]
    asked = [ask(picture(i), picture(9), text=f"What is {i}?") for i in range(3)] + [[{"role": "user", "content": "Hello " * 9}]]
    d = daemon(*model.flags)
    alone = [tokens(answer_of(d, messages)) for messages in asked]
    fresh = {"kv": {"reuse": False}}
    for flags in (("--max-num-batched-tokens", "7", "--max-num-seqs", "4"), ("--tensor-parallel-size", "2", "--threads", "2"),
                  ("--data-parallel-size", "2", "--threads", "2")):
        d = daemon(*model.flags, *flags)
        with futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda m: tokens(answer_of(d, m, **fresh)), asked)) == alone, flags


def test_later_turns_and_forks(daemon, models):
    """Turns and forks behind a conversation's pictures have the places of a prompt that is read as a whole."""
    for model in models.values():
        d, fresh = daemon(*model.flags), {"kv": {"reuse": False}}
        messages = ask(picture(1), picture(2))
        first = answer_of(d, messages)
        second = answer_of(d, later_turn(messages, first))
        assert cached(second) >= first["usage"]["prompt_tokens"] and tiles(d) == 6
        fork = answer_of(d, ask(picture(1), picture(2), text="Where is it?"))
        assert cached(fork) > 60 and tiles(d) == 6
        both = answer_of(d, later_turn(ask(picture(1), picture(2)), first, "Where?"), n=2)
        assert tokens(answer_of(d, later_turn(messages, first), **fresh)) == tokens(second)
        check_answer(model.reference, model.directory, [picture(1), picture(2)],
                     answer_of(d, ask(picture(1), picture(2), text="Where is it?"), **fresh), text="Where is it?")
        assert tokens(answer_of(d, ask(picture(1), picture(2), text="Where is it?"), **fresh)) == tokens(fork)
        again = answer_of(d, later_turn(ask(picture(1), picture(2)), first, "Where?"), n=2, **fresh)
        assert [tokens({"choices": [c]}) for c in again["choices"]] == [tokens({"choices": [c]}) for c in both["choices"]]
        other = answer_of(d, ask(picture(1), picture(4), picture(2)))  # the prefix ends inside a picture's marks
        check_answer(model.reference, model.directory, [picture(1), picture(4), picture(2)], other)


def test_evictions_inside_pictures(daemon, models):
    pictures = [picture(1), picture(2), picture(3)]
    for model in models.values():
        d = daemon(*model.flags)
        for policy in ("streaming", "snapkv", "h2o"):
            kv = {"policy": policy, "budget": 40, "buffer": 8, "chunk": 16, "report": "trace"}
            answer = answer_of(d, ask(*pictures), kv=kv)
            details = answer["usage"]["kv_details"]
            assert details["trace"] and details["evicted_entries"] > 0
            check_answer(model.reference, model.directory, pictures, answer, details["trace"])


def test_files_of_conversations(daemon, models, tmp_path):
    """A daemon that has read a conversation from disk goes on at its places."""
    model = models["qwen2_5_vl"]
    flags = (*model.flags, "--max-conversations", "1")
    files = ("--state-dir", str(tmp_path / "state"), "--state-idle", "0")
    kv = {"policy": "snapkv", "budget": 64, "buffer": 8, "chunk": 16}
    messages = ask(picture(1), picture(2))
    d = daemon(*flags, *files)
    first = answer_of(d, messages, kv=kv)
    assert d.stop() == 0
    again = daemon(*flags, *files)
    second = answer_of(again, later_turn(messages, first), kv=kv)
    assert tiles(again) == 0 and cached(second) >= first["usage"]["prompt_tokens"]
    fresh = daemon(*flags)
    answer_of(fresh, messages, kv=kv)
    assert tokens(answer_of(fresh, later_turn(messages, first), kv=kv)) == tokens(second)


def test_what_takes_places_for_positions_is_refused(daemon, models):
    d = daemon(*models["qwen3_vl"].flags, "--kv-overflow", "shift", "--kv-policy", "streaming", "--kv-budget", "64")
    assert answer_of(d, ask(picture(1)))  # the default gives way
    for kv, field in (({"policy": "ems", "budget": 40}, "kv.policy"), ({"policy": "expected_attention", "budget": 40}, "kv.policy"),
                      ({"overflow": "shift"}, "kv.overflow")):
        r = requests.post(d.url + "/v1/chat/completions", json={"messages": ask(picture(1)), "kv": kv}, timeout=60)
        assert r.status_code == 400 and r.json()["error"]["param"] == field, r.text
        assert "three dimensions" in r.json()["error"]["message"]
        assert answer_of(d, [{"role": "user", "content": "hello"}], kv=kv)
