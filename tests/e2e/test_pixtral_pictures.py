"""Pictures of any shape in chats with Pixtral and Mistral Small 3.1, whose lines in the prompt end with tokens of their own: answers
beside a float64 model that sees them, on paths of the CPU, bit by bit in any step and from GGUF files; later turns; evictions."""
import sys

import pytest
import requests

from shapes import FLAGS, check_path, check_steps_and_files, check_turns_and_evictions
from test_pictures import ROOT, Tokens, ask, check_logprobs

sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
from vision_pixtral import ARCHITECTURES, MARKS, PixtralReference, write_pixtral, write_pixtral_mmproj, write_pixtral_text  # noqa: E402

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
        check_path(daemon, path, model, picture)


def test_answers_are_the_same_in_any_step_and_from_gguf_files(daemon, models):
    for model in models.values():
        check_steps_and_files(daemon, model, picture)


def test_later_turns_and_evictions(daemon, models):
    for model in models.values():
        check_turns_and_evictions(daemon, model, picture)


def test_each_line_of_a_picture_is_a_part(daemon, models):
    d = daemon("--model", str(models["mistral3"].directory), *FLAGS)
    shown = requests.post(d.url + "/tokenize", json={"messages": ask(picture(0))}, timeout=60).json()
    parts = shown["pictures"][0]["parts"]
    assert [(p["at"] - parts[0]["at"], p["count"], p["first"], p["rows"], p["columns"]) for p in parts] == [
        (4 * i, 3, 3 * i, 5, 3) for i in range(5)]
