"""Pictures of any shape in chats with Pixtral and Mistral Small 3.1, whose lines in the prompt end with tokens of their own: answers
beside a float64 model that sees them, on paths of the CPU, bit by bit in any step and from GGUF files; later turns; evictions."""
import concurrent.futures as futures
import sys

import pytest
import requests

from answers import cached, tokens
from conftest import start_on
from test_pictures import ROOT, Tokens, answer_of, ask, check_logprobs, tiles

sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
from vision_pixtral import ARCHITECTURES, MARKS, PixtralReference, write_pixtral, write_pixtral_mmproj, write_pixtral_text  # noqa: E402

FLAGS = ("--kv-dtype", "f32", "--cpu-activations", "f32")
SHAPES = [(40, 24), (16, 48), (8, 8)]  # height, width


class Model:
    def __init__(self, folder, kind):
        self.directory = write_pixtral(folder / "model", kind)
        self.reference, self.words = PixtralReference(self.directory, folder / "alone"), Tokens(self.directory)
        self.text = write_pixtral_text(self.directory, folder / "text.gguf")
        self.mmproj = write_pixtral_mmproj(self.directory, folder / "mmproj.gguf")

    def check(self, pictures, answer, evictions=()):
        ids, marks = self.words("<|im_start|>"), [self.words(mark)[0] for mark in MARKS]
        for pixels in pictures:
            ids += self.reference.show(pixels, marks)
        check_logprobs(self.reference, self.directory, ids + self.words("What is it?<|im_end|>"), answer, evictions)


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (*SHAPES[seed % len(SHAPES)], 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: Model(tmp_path_factory.mktemp(kind), kind) for kind in ARCHITECTURES}


@pytest.mark.parametrize("path", ["reference", "portable", "avx2", "avx512", "amx"])
def test_answers_are_those_of_an_independent_model(daemon, models, path):
    for model in models.values():
        d = start_on(daemon, path, "--model", str(model.directory), *FLAGS)
        for pictures in ([picture(0)], [picture(1), picture(3), picture(2)]):
            model.check(pictures, answer_of(d, ask(*pictures)))


def test_answers_are_the_same_in_any_step_and_from_gguf_files(daemon, models):
    for model in models.values():
        asked = [ask(picture(i), picture(9), text=f"What is {i}?") for i in range(3)]
        d = daemon("--model", str(model.directory), *FLAGS)
        alone = [tokens(answer_of(d, messages)) for messages in asked]
        small = ("--model", str(model.directory), "--max-num-batched-tokens", "7", "--max-num-seqs", "4")
        for flags in (small, ("--model", str(model.text), "--mmproj", str(model.mmproj))):
            d = daemon(*FLAGS, *flags)
            with futures.ThreadPoolExecutor(3) as pool:
                assert list(pool.map(lambda m: tokens(answer_of(d, m)), asked)) == alone, flags


def test_later_turns_and_evictions(daemon, models):
    pictures = [picture(0), picture(1), picture(2)]
    for model in models.values():
        d = daemon("--model", str(model.directory), *FLAGS)
        first = answer_of(d, ask(*pictures))
        later = ask(*pictures) + [{"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                                  {"role": "user", "content": "And what else?"}]
        assert cached(answer_of(d, later)) >= first["usage"]["prompt_tokens"] and tiles(d) == 3
        kv = {"policy": "snapkv", "budget": 24, "buffer": 8, "chunk": 16, "report": "trace"}
        answer = answer_of(d, ask(*pictures), kv=kv)
        assert answer["usage"]["kv_details"]["evicted_entries"] > 0
        model.check(pictures, answer, answer["usage"]["kv_details"]["trace"])


def test_each_line_of_a_picture_is_a_part(daemon, models):
    d = daemon("--model", str(models["mistral3"].directory), *FLAGS)
    shown = requests.post(d.url + "/tokenize", json={"messages": ask(picture(0))}, timeout=60).json()
    parts = shown["pictures"][0]["parts"]
    assert [(p["at"] - parts[0]["at"], p["count"], p["first"], p["rows"], p["columns"]) for p in parts] == [
        (4 * i, 3, 3 * i, 5, 3) for i in range(5)]
