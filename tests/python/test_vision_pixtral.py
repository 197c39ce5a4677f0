"""The encoders of Pixtral and Mistral Small 3.1 against float64 numpy, through the vision_rows driver: on every path of the CPU,
tiles of many shapes, from directories and from GGUF files; and what is refused."""
import json

import numpy as np
import pytest
from test_golden import PATHS, has_path
from test_vision import refusal, run
from vision_pixtral import ARCHITECTURES, MERGE, PROCESSOR, TEXT, VISION, PixtralVision, write_pixtral, write_pixtral_mmproj

KINDS = list(ARCHITECTURES)
SHAPES = [(48, 40), (8, 8), (8, 48), (32, 16)]  # height, width


def tiles_of(height, width, count=2):
    return np.random.default_rng(height * width).integers(0, 256, (count, 3, height, width), dtype=np.uint8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: write_pixtral(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def rows_of(directory, tmp_path, tiles, **options):
    done = run(directory, tmp_path, tiles=tiles, **options)
    assert done.returncode == 0, done.stderr
    return np.frombuffer(done.stdout, np.float32).reshape(len(tiles), -1, TEXT["hidden_size"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_an_independent_model(models, tmp_path, kind, path):
    if not has_path(path):
        pytest.skip(f"this machine has not {path}")
    reference = PixtralVision(models[kind])
    for shape in SHAPES:
        tiles = tiles_of(*shape)
        found, wanted = rows_of(models[kind], tmp_path, tiles, path=path), np.stack([reference.rows(tile) for tile in tiles])
        assert found.shape == wanted.shape == (2, shape[0] * shape[1] // (4 * MERGE[kind]) ** 2, TEXT["hidden_size"])
        print(f"{kind} {path} {shape}: {np.abs(found - wanted).max():.1e}")
        assert np.abs(found - wanted).max() < 1e-4
    for options in ({"threads": 3}, {"part_cost": 1}, {"part_cost": 200000}):
        assert rows_of(models[kind], tmp_path, tiles, path=path, **options).tobytes() == found.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_what_files_choose(tmp_path, kind):
    """The activation, the layer whose rows are used, the epsilon of the projector's norm, the base of the rotations."""
    for root, fields in (({"vision_feature_layer": -2}, {"hidden_act": "gelu"}), ({"text_config": {**TEXT, "rms_norm_eps": 0.1}}, {"rope_theta": 100.0})):
        model = write_pixtral(tmp_path / "model", kind, root=root, **fields)
        tiles = tiles_of(24, 40)
        found, wanted = rows_of(model, tmp_path, tiles), np.stack([PixtralVision(model).rows(tile) for tile in tiles])
        assert np.abs(found - wanted).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_is_the_same(models, tmp_path, kind):
    gelu = write_pixtral(tmp_path / "model", kind, hidden_act="gelu")
    for model, paths in ((models[kind], ["reference", "avx2", "avx512"]), (gelu, ["reference"])):
        file = write_pixtral_mmproj(model, tmp_path / "mmproj.gguf")
        for path in filter(has_path, paths):
            tiles = tiles_of(40, 24)
            assert rows_of(model, tmp_path, tiles, mmproj=file, path=path).tobytes() == rows_of(model, tmp_path, tiles, path=path).tobytes()


def test_what_a_directory_is_refused_for(tmp_path):
    for kind, root, fields, says in [
            ("llava", {}, {"hidden_act": "relu"}, "hidden_act: only gelu or silu"), ("llava", {}, {"num_channels": 1}, "num_channels"),
            ("llava", {}, {"hidden_size": 40}, "hidden_size"), ("llava", {"projector_hidden_act": "silu"}, {}, "projector_hidden_act"),
            ("llava", {"vision_feature_select_strategy": "default"}, {}, "select_strategy"),
            ("llava", {"vision_feature_layer": [-1, -2]}, {}, "vision_feature_layer"),
            ("mistral3", {"vision_feature_layer": -4}, {}, "vision_feature_layer: expected -3 to -1"),
            ("mistral3", {"spatial_merge_size": 0}, {}, "spatial_merge_size"),
            ("mistral3", {"spatial_merge_size": 3}, {}, "merging_layer.weight: shape is"),
            ("mistral3", {}, {"num_hidden_layers": 4}, "layers.3.attention_norm.weight: tensor is missing"),
            ("mistral3", {}, {"rope_theta": 0}, "rope_theta")]:
        said = refusal(write_pixtral(tmp_path / "model", kind, root=root, **fields), tmp_path)
        assert says in said, (root, fields, said)
    for name, value, says in [("size", {"longest_edge": 0}, "size.longest_edge"), ("resample", 4, "resample"), ("do_resize", False, "do_resize")]:
        model = write_pixtral(tmp_path / "model", "mistral3")
        (model / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, name: value}))
        assert says in refusal(model, tmp_path)


def test_what_a_file_is_refused_for(models, tmp_path):
    for key, value, says in [("clip.use_silu", None, "clip.use_gelu: only true"), ("clip.vision.image_size", None, "image_size: missing"),
                             ("clip.vision.spatial_merge_size", 99, "spatial_merge_size"), ("clip.projector_type", "ldp", "pixtral")]:
        file = write_pixtral_mmproj(models["mistral3"], tmp_path / "mmproj.gguf", **{key: value})
        said = refusal(models["mistral3"], tmp_path, mmproj=file)
        assert says in said, said


@pytest.mark.parametrize("kind", KINDS)
def test_against_transformers(models, tmp_path, kind):
    """The published classes themselves, where they are installed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, ARCHITECTURES[kind]).from_pretrained(models[kind], dtype=torch.float32, attn_implementation="eager").eval()
    for height, width in [shape for shape in SHAPES if shape != (8, 8)]:  # transformers' Mistral3Model fails for a single row
        tile = tiles_of(height, width, 1)[0]
        mean, deviation = (torch.tensor(PROCESSOR[f"image_{n}"])[:, None, None] for n in ("mean", "std"))
        pixels = ((torch.tensor(tile) / 255 - mean) / deviation).float()[None]
        with torch.no_grad():
            made = model.model.get_image_features(pixels, image_sizes=torch.tensor([[height, width]]), vision_feature_layer=-1,
                                                  **({"vision_feature_select_strategy": "full"} if kind == "llava" else {}))
        wanted, found = made.pooler_output[0].numpy(), rows_of(models[kind], tmp_path, tile[None])[0]
        print(f"{kind} {height} x {width}: {np.abs(found - wanted).max():.1e}")
        assert np.abs(found - wanted).max() < 1e-4
