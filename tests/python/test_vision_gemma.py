"""Gemma 3's encoder against float64 numpy, through the vision_rows driver: on every path of the CPU, from directories with all
names that are published and from GGUF files; and what it refuses."""
import json

import numpy as np
import pytest
from gemma_seeing import EDGE, LAYOUTS, MARKS, TILE, GemmaReference, GemmaVision, write_gemma, write_gemma_mmproj
from test_golden import PATHS, has_path
from test_vision import refusal, rows_of
from vision_model import PLAIN

TILES = np.random.default_rng(4).integers(0, 256, (3, 3, EDGE, EDGE), dtype=np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.mark.parametrize("path", PATHS)
def test_rows_are_those_of_an_independent_model(model, tmp_path, path):
    if not has_path(path):
        pytest.skip(f"this machine has not {path}")
    found, wanted = rows_of(model, tmp_path, path=path, tiles=TILES), np.stack([GemmaVision(model).rows(t) for t in TILES])
    assert found.shape == wanted.shape == (3, TILE, 64)
    print(f"{path}: {np.abs(found - wanted).max():.1e}")
    assert np.abs(found - wanted).max() < 1e-4
    assert rows_of(model, tmp_path, path=path, tiles=TILES, threads=3).tobytes() == found.tobytes()


def test_names_of_all_ages(model, tmp_path):
    found = rows_of(model, tmp_path, tiles=TILES)
    for layout in LAYOUTS:
        assert rows_of(write_gemma(tmp_path / layout, layout), tmp_path, tiles=TILES).tobytes() == found.tobytes()


def test_gguf_files_are_the_same(model, tmp_path):
    found = rows_of(model, tmp_path, tiles=TILES)
    for exchanged in (False, True):
        file = write_gemma_mmproj(model, tmp_path / "mmproj.gguf", exchanged)
        assert np.abs(rows_of(model, tmp_path, mmproj=file, tiles=TILES) - found).max() < 1e-6


@pytest.mark.parametrize("section, name, value, says", [
    ("config", "mm_tokens_per_image", 8, "mm_tokens_per_image"), ("config", "mm_tokens_per_image", 16, "mm_tokens_per_image"),
    ("vision", "image_size", 28, "mm_tokens_per_image"), ("vision", "hidden_act", "gelu", "hidden_act"),
    ("vision", "num_hidden_layers", 3, "vision_tower.vision_model.encoder.layers.2.layer_norm1.weight: tensor is missing"),
    ("processor", "do_pan_and_scan", True, "do_pan_and_scan: only false"), ("processor", "size", {"height": 24, "width": 28}, "squares"),
    ("processor", "size", {"height": 16, "width": 16}, "patch_size"), ("processor", "do_resize", False, "do_resize")])
def test_what_a_directory_is_refused_for(tmp_path, section, name, value, says):
    model = write_gemma(tmp_path / "model")
    file = model / ("preprocessor_config.json" if section == "processor" else "config.json")
    config = json.loads(file.read_text())
    (config["vision_config"] if section == "vision" else config)[name] = value
    file.write_text(json.dumps(config))
    assert says in refusal(model, tmp_path)


def test_what_a_file_is_refused_for(model, tmp_path):
    for key, value, says in (("clip.vision.image_size", 26, "patch_size"), ("clip.vision.projector.scale_factor", None, "joined by 4"),
                             ("clip.vision.block_count", 3, "v.blk.2.ln1.weight: tensor is missing")):
        assert says in refusal(model, tmp_path, mmproj=write_gemma_mmproj(model, tmp_path / "mmproj.gguf", **{key: value}))


def test_against_transformers(model, tmp_path):
    """The published classes themselves, where they are installed: rows, and the text model that sees them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    seen = transformers.Gemma3ForConditionalGeneration.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    random = np.random.default_rng(5)
    pixels, text = (torch.tensor(TILES[:2], dtype=torch.float32) / 255 - 0.5) / 0.5, [random.integers(3, PLAIN, n).tolist() for n in (11, 5, 8)]
    start, end, row = (PLAIN + i for i in range(len(MARKS)))
    ids = [*text[0], start, *[row] * TILE, end, *text[1], start, *[row] * TILE, end, *text[2]]
    with torch.no_grad():
        rows = seen.model.get_image_features(pixels).pooler_output.numpy()
        logits = seen(input_ids=torch.tensor([ids]), pixel_values=pixels, token_type_ids=torch.tensor([[int(i == row) for i in ids]])).logits
    found = rows_of(model, tmp_path, tiles=TILES[:2])
    print(f"{np.abs(found - rows).max():.1e}")
    assert np.abs(found - rows).max() < 1e-4
    reference = GemmaReference(model, tmp_path / "text")
    tiles = [reference.show(tile) for tile in TILES[:2]]
    mine = reference.append([*text[0], start, *tiles[0], end, *text[1], start, *tiles[1], end, *text[2]])
    assert np.abs(mine - torch.log_softmax(logits[0], -1).numpy()).max() < 2e-5
