"""Pictures in models on the CUDA backend, run by the emulator: the CPU encodes, and the device gets the rows, in tiles and in
lines, with places in three dimensions and rows behind the first layers, and rows that see each other."""
import json
import sys

import pytest

from test_pictures import ROOT, Tokens, answer_of, ask, check_answer, check_logprobs, picture as rows_of_colours

sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
from gemma_seeing import EDGE, GemmaReference, write_gemma  # noqa: E402
from grid_model import GridReference, text_config, write_text  # noqa: E402
from reference_model import load_tensors  # noqa: E402
from test_pictures_gemma import EVICTIONS, check as check_gemma  # noqa: E402
from test_qwen_pictures import MARKS as QWEN_MARKS, TEMPLATE, VOCAB  # noqa: E402
from vision_model import SeeingReference, write_model, write_tokenizer  # noqa: E402
from vision_pixtral import MARKS, TEXT, PixtralReference, write_pixtral  # noqa: E402
from vision_qwen import QwenVision, write_encoder  # noqa: E402

EMULATED = ROOT / "build/dev/tests/emu/keepd-emu"
FLAGS = ("--device", "cuda", "--kv-dtype", "bf16", "--kv-pool-bytes", "16M", "--max-num-seqs", "4", "--max-conversations", "8")
MOST = 0.03  # the device multiplies in bf16


def picture(seed, height=24, width=40):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_lines_of_a_picture(daemon, tmp_path):
    directory = write_pixtral(tmp_path / "model", "mistral3", root={"text_config": {**TEXT, "head_dim": 64}})
    reference, words = PixtralReference(directory, tmp_path / "alone"), Tokens(directory)
    d = daemon("--model", str(directory), *FLAGS, binary=EMULATED)
    for seeds in ((1,), (2, 3)):
        ids = words("<|im_start|>")
        for seed in seeds:
            ids += reference.show(picture(seed), [words(mark)[0] for mark in MARKS])
        check_logprobs(reference, directory, ids + words("What is it?<|im_end|>"), answer_of(d, ask(*map(picture, seeds))), most=MOST)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_places_in_three_dimensions(daemon, tmp_path, kind):
    """Also with evictions inside pictures, and in a later turn."""
    rope = {**text_config(kind)["rope_parameters"], "mrope_section": [12, 10, 10]}
    directory = write_text(tmp_path / "model", kind, vocab_size=VOCAB, eos_token_id=2, bos_token_id=1, head_dim=64, rope_parameters=rope)
    config = json.loads((directory / "config.json").read_text())
    write_encoder(directory, kind, config, {n: t.astype(np.float32) for n, t in load_tensors(directory / "model.safetensors").items()})
    write_tokenizer(directory, QWEN_MARKS, TEMPLATE)
    reference, vision, words = GridReference(directory, tmp_path / "alone"), QwenVision(directory), Tokens(directory)
    d = daemon("--model", str(directory), *FLAGS, binary=EMULATED)

    def ids_of(seeds):
        ids = words("<|im_start|>user\n")
        for seed in seeds:
            shown = reference.show(3, 5, vision.rows(picture(seed).transpose(2, 0, 1)))
            ids += words(QWEN_MARKS[0]) + shown + words(QWEN_MARKS[2])
        return ids + words("What is it?<|im_end|>\n<|im_start|>assistant\n")

    kv = {"policy": "snapkv", "budget": 24, "buffer": 8, "chunk": 16, "report": "trace"}
    for seeds, fields in (((1,), {}), ((2, 3), {}), ((4, 5), {"kv": kv})):
        answer = answer_of(d, ask(*map(picture, seeds)), **fields)
        check_logprobs(reference, directory, ids_of(seeds), answer, answer["usage"].get("kv_details", {}).get("trace", ()), MOST)


def test_tiles_of_a_picture(daemon, tmp_path):
    """The model's attention is sharp: bf16 moves its answers to texts without pictures by up to 0.09, too."""
    directory = write_model(tmp_path / "model", longest=2 * EDGE, head_dim=64)
    reference = SeeingReference(directory, tmp_path / "text")
    d = daemon("--model", str(directory), *FLAGS, binary=EMULATED)
    for pictures in ([rows_of_colours(1)], [rows_of_colours(1), rows_of_colours(3), rows_of_colours(2)]):
        check_answer(reference, directory, pictures, answer_of(d, ask(*pictures)), most=5 * MOST)


def test_rows_that_see_each_other(daemon, tmp_path):
    """Also with evictions around the pictures, by attention to them, too."""
    directory = write_gemma(tmp_path / "model", head_dim=64)
    reference = GemmaReference(directory, tmp_path / "text")
    d = daemon("--model", str(directory), *FLAGS, binary=EMULATED)
    pictures = [rows_of_colours(1), rows_of_colours(3, EDGE), rows_of_colours(2)]
    check_gemma(directory, reference, pictures[:1], answer_of(d, ask(*pictures[:1])), most=MOST)
    for kv in (None, *EVICTIONS[:3]):
        answer = answer_of(d, ask(*pictures), **({"kv": kv} if kv else {}))
        trace = answer["usage"]["kv_details"]["trace"] if kv else ()
        assert bool(trace) == bool(kv)
        check_gemma(directory, reference, pictures, answer, trace, MOST)
