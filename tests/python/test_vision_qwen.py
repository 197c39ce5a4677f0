"""The encoders of Qwen2.5-VL, Qwen3-VL and Qwen3.5 against float64 numpy, through the vision_rows driver: on every path of the
CPU, tiles of many shapes, from directories and from GGUF files; and what is refused."""
import json

import numpy as np
import pytest
from test_golden import PATHS, has_path
from test_vision import refusal, run
from vision_qwen import (ARCHITECTURES, FRONTS, PROCESSOR, QwenVision, TEXT_WIDTH, VISION, write_encoder,
                         write_qwen_mmproj)

KINDS = list(VISION)
SHAPES = [(64, 80), (8, 8), (8, 200), (72, 24), (40, 56)]  # height, width; windows of 24 pixels


def tiles_of(height, width, count=2):
    return np.random.default_rng(height * width).integers(0, 256, (count, 3, height, width), dtype=np.uint8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: write_encoder(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def rows_of(directory, tmp_path, tiles, **options):
    done = run(directory, tmp_path, tiles=tiles, width=TEXT_WIDTH, **options)
    assert done.returncode == 0, done.stderr
    tokens = tiles.shape[2] * tiles.shape[3] // 64
    return np.frombuffer(done.stdout, np.float32).reshape(len(tiles), tokens, -1, TEXT_WIDTH)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_an_independent_model(models, tmp_path, kind, path):
    if not has_path(path):
        pytest.skip(f"this machine has not {path}")
    reference = QwenVision(models[kind])
    for shape in SHAPES:
        tiles = tiles_of(*shape)
        found, wanted = rows_of(models[kind], tmp_path, tiles, path=path), np.stack([reference.rows(tile) for tile in tiles])
        assert found.shape == wanted.shape == (2, shape[0] * shape[1] // 64, 3 if kind == "qwen3_vl" else 1, TEXT_WIDTH)
        print(f"{kind} {path} {shape}: {np.abs(found - wanted).max():.1e}")
        assert np.abs(found - wanted).max() < 1e-4
    for options in ({"threads": 2}, {"threads": 3}, {"part_cost": 1}, {"part_cost": 200000}):
        assert rows_of(models[kind], tmp_path, tiles, path=path, **options).tobytes() == found.tobytes()
    assert rows_of(models[kind], tmp_path, tiles[1:], path=path).tobytes() == found[1].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_is_the_same(models, tmp_path, kind):
    file = write_qwen_mmproj(models[kind], tmp_path / "mmproj.gguf")
    for path in filter(has_path, ["reference", "avx2", "avx512"]):
        tiles = tiles_of(40, 56)
        assert (rows_of(models[kind], tmp_path, tiles, mmproj=file, path=path).tobytes()
                == rows_of(models[kind], tmp_path, tiles, path=path).tobytes())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_directory_is_refused_for(tmp_path, kind):
    rows = [("hidden_act", "relu", "hidden_act: only"), ("in_channels", 1, "in_channels"), ("hidden_size", 72, "hidden_size"),
            ("depth", 5, "blocks.4.norm1.weight: tensor is missing"), ("intermediate_size", 44, "shape is"),
            ("patch_size", 8, "preprocessor_config.json: patch_size"), ("spatial_merge_size", 4, "merge_size"),
            ("temporal_patch_size", 3, "temporal_patch_size")]
    if kind == "qwen2_5_vl":
        rows += [("window_size", 7, "window_size"), ("window_size", 800, "window_size"), ("fullatt_block_indexes", [3, 1], "ascending"),
                 ("fullatt_block_indexes", 4, "fullatt_block_indexes"), ("fullatt_block_indexes", [4], "below 4")]
    else:
        rows += [("num_position_embeddings", 50, "no square"), ("num_position_embeddings", 64, "pos_embed.weight: shape is")]
    if kind == "qwen3_vl":
        rows += [("deepstack_visual_indexes", [1, 1], "ascending"), ("deepstack_visual_indexes", [0, 1, 2], "list.2.norm.weight")]
    for name, value, says in rows:
        model = write_encoder(tmp_path / "model", kind, **{name: value})
        said = refusal(model, tmp_path, width=TEXT_WIDTH)
        assert says in said, (name, value, said)


def test_a_size_that_no_tensor_has_takes_no_memory(tmp_path):
    model = write_encoder(tmp_path / "model", "qwen3_vl", patch_size=256, hidden_size=65536, num_heads=1024)
    (model / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "patch_size": 256}))
    assert "patch_embed.proj.weight: shape is" in refusal(model, tmp_path, width=TEXT_WIDTH)


def test_what_a_processor_is_refused_for(tmp_path):
    for name, value, says in [("do_resize", False, "do_resize"), ("min_pixels", 0, "min_pixels"), ("min_pixels", 9000, "size.shortest_edge"),
                              ("size", {"longest_edge": "x"}, "size.longest_edge"), ("resample", 4, "resample"), ("merge_size", 1, "merge_size")]:
        model = write_encoder(tmp_path / "model", "qwen3_vl")
        (model / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, name: value}))
        said = refusal(model, tmp_path, width=TEXT_WIDTH)
        assert says in said, (name, said)


def test_large_patches_do_not_make_pictures_larger(tmp_path):
    """The bound of tokens alone would allow patches of 256 pixels pictures of a gigapixel."""
    model = write_encoder(tmp_path / "model", "qwen3_vl", patch_size=256)
    processor = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps({**processor, "patch_size": 256, "min_pixels": 40_000_000, "max_pixels": 50_000_000}))
    assert "expected 1 to 33554432 pixels" in refusal(model, tmp_path, width=TEXT_WIDTH)


@pytest.mark.parametrize("kind, key, value, says", [
    ("qwen2_5_vl", "clip.use_silu", None, "clip.use_silu"), ("qwen3_vl", "clip.use_gelu", None, "clip.use_gelu"),
    ("qwen2_5_vl", "clip.vision.n_wa_pattern", None, "n_wa_pattern: missing"), ("qwen2_5_vl", "clip.vision.window_size", 7, "window_size"),
    ("qwen3_vl", "clip.vision.image_size", 2, "image_size"), ("qwen3_vl", "clip.vision.is_deepstack_layers", [True] * 9, "is_deepstack_layers"),
    ("qwen3_vl", "clip.vision.is_deepstack_layers", [1, 0], "is_deepstack_layers"),
    ("qwen3_vl", "clip.vision.image_min_pixels", 9000, "size.shortest_edge"),
    ("qwen3_vl", "clip.vision.is_deepstack_layers", [False, True], "v.deepstack.1.norm.weight: tensor is missing")])
def test_what_a_file_is_refused_for(models, tmp_path, kind, key, value, says):
    file = write_qwen_mmproj(models[kind], tmp_path / "mmproj.gguf", **{key: value})
    said = refusal(models[kind], tmp_path, mmproj=file, width=TEXT_WIDTH)
    assert says in said, said


@pytest.mark.parametrize("kind", KINDS)
def test_against_transformers(models, tmp_path, kind):
    """The published classes themselves, where they are installed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name = ARCHITECTURES[kind].removesuffix("ForConditionalGeneration")
    config = getattr(transformers, f"{name}Config")(vision_config=VISION[kind]).vision_config
    config._attn_implementation = "eager"
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["x"])
    classes = {"qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel", "qwen3_vl": "Qwen3VLVisionModel", "qwen3_5": "Qwen3_5VisionModel"}
    encoder = getattr(module, classes[kind])(config).float().eval()
    from safetensors.torch import load_file
    tensors = load_file(models[kind] / "model.safetensors")
    encoder.load_state_dict({n.removeprefix(FRONTS[kind]): t for n, t in tensors.items()})
    for height, width in SHAPES:
        tile = tiles_of(height, width, 1)[0]
        mean, deviation = (torch.tensor(PROCESSOR[f"image_{n}"])[:, None, None] for n in ("mean", "std"))
        pixels = ((torch.tensor(tile) / 255 - mean) / deviation).float()
        patches = pixels.reshape(3, height // 8, 2, 4, width // 8, 2, 4).permute(1, 4, 2, 5, 0, 3, 6)
        video = patches.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(height * width // 16, -1)
        with torch.no_grad():
            made = encoder(video, grid_thw=torch.tensor([[1, height // 4, width // 4]]))
        wanted = np.stack([made.pooler_output, *(getattr(made, "deepstack_features", None) or [])], 1)
        found = rows_of(models[kind], tmp_path, tile[None])[0]
        print(f"{kind} {height} x {width}: {np.abs(found - wanted).max():.1e}")
        assert np.abs(found - wanted).max() < 1e-4
