"""Pictures of any shape in chats with Qwen2.5-VL and Qwen3-VL: answers beside a float64 model that sees them, on paths of the
CPU, bit by bit in any step and from GGUF files; later turns; evictions inside pictures."""
import json
import sys

import pytest

from shapes import FLAGS, check_path, check_steps_and_files, check_turns_and_evictions
from test_pictures import ROOT, Tokens, check_logprobs, refusal

sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
from grid_model import GridReference, write_text, write_text_gguf  # noqa: E402
from reference_model import load_tensors  # noqa: E402
from vision_model import PLAIN, TEMPLATE as IDEFICS3_TEMPLATE, gguf_tokenizer, write_model, write_tokenizer  # noqa: E402
from vision_model import write_text_gguf as write_plain_gguf  # noqa: E402
from vision_qwen import QwenVision, write_encoder, write_qwen_mmproj  # noqa: E402

KINDS = ("qwen2_5_vl", "qwen3_vl")
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
VOCAB, TEMPLATE = PLAIN + len(MARKS), IDEFICS3_TEMPLATE.replace("<image>", "".join(MARKS))
SHAPES = [(40, 24), (16, 64), (8, 8)]  # height, width: tokens show 8 x 8 pixels


class Model:
    def __init__(self, folder, kind):
        self.directory = write_text(folder / "model", kind, vocab_size=VOCAB, eos_token_id=2, bos_token_id=1)
        config = json.loads((self.directory / "config.json").read_text())
        write_encoder(self.directory, kind, config, {name: t.astype(np.float32) for name, t
                                                     in load_tensors(self.directory / "model.safetensors").items()})
        write_tokenizer(self.directory, MARKS, TEMPLATE)
        self.reference = GridReference(self.directory, folder / "alone")
        self.vision, self.words = QwenVision(self.directory), Tokens(self.directory)
        self.text = write_text_gguf(self.directory, folder / "text.gguf", **gguf_tokenizer(self.directory, VOCAB, TEMPLATE))
        self.mmproj = write_qwen_mmproj(self.directory, folder / "mmproj.gguf")

    def show(self, pixels):
        height, width, _ = pixels.shape
        return self.reference.show(height // 8, width // 8, self.vision.rows(pixels.transpose(2, 0, 1)))

    def check(self, pictures, answer, evictions=()):
        ids = self.words("<|im_start|>user\n")
        for pixels in pictures:
            ids += self.words(MARKS[0]) + self.show(pixels) + self.words(MARKS[2])
        ids += self.words("What is it?<|im_end|>\n<|im_start|>assistant\n")
        check_logprobs(self.reference, self.directory, ids, answer, evictions)


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (*SHAPES[seed % len(SHAPES)], 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: Model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


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


def test_encoders_of_other_families_are_refused(models, tmp_path):
    """Widths are equal, and so are the marks of pictures."""
    older, newer = (models[kind] for kind in KINDS)
    llama = write_plain_gguf(write_model(tmp_path / "llama"), tmp_path / "llama.gguf")
    for text, mmproj, family in ((older.text, newer.mmproj, "qwen2_5_vl"), (newer.text, older.mmproj, "qwen3_vl"), (llama, newer.mmproj, "llama")):
        said = refusal("--model", text, "--mmproj", mmproj)
        assert f"mmproj: the encoder is for another family of models than {family}" in said, said
