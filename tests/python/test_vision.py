"""The encoder of pictures against float64 numpy, through the vision_rows driver: on every path of the CPU, from directories
and from GGUF files, on any number of threads; and what it refuses."""
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_golden import PATHS, find_driver, has_path
from vision_model import EDGE, TEXT, VISION, Vision, write_mmproj, write_model

TILES = np.random.default_rng(3).integers(0, 256, (4, 3, EDGE, EDGE), dtype=np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def run(directory, tmp_path, mmproj="", path="reference", threads=1, tiles=TILES, width=TEXT["hidden_size"], part_cost=0):
    driver = find_driver().with_name("vision_rows")
    pixels = tmp_path / "pixels"
    pixels.write_bytes(tiles.tobytes())
    return subprocess.run([driver, directory, mmproj, str(width), pixels, path, str(threads), str(part_cost),
                           str(tiles.shape[3]), str(tiles.shape[2])], capture_output=True)


def rows_of(*args, tiles=TILES, **options):
    done = run(*args, tiles=tiles, **options)
    assert done.returncode == 0, done.stderr
    return np.frombuffer(done.stdout, np.float32).reshape(len(tiles), -1, TEXT["hidden_size"])


def refusal(*args, **options):
    done = run(*args, **options)
    assert done.returncode == 1, done
    return done.stderr.decode()


@pytest.mark.parametrize("path", PATHS)
def test_rows_are_those_of_an_independent_model(model, tmp_path, path):
    if not has_path(path):
        pytest.skip(f"this machine has not {path}")
    found, wanted = rows_of(model, tmp_path, path=path), np.stack([Vision(model).rows(tile) for tile in TILES])
    assert found.shape == wanted.shape == (4, 9, TEXT["hidden_size"])
    assert np.abs(found - wanted).max() < 1e-4, np.abs(found - wanted).max()
    print(f"{path}: {np.abs(found - wanted).max():.1e}")
    for threads in (2, 3):
        assert rows_of(model, tmp_path, path=path, threads=threads).tobytes() == found.tobytes()
    assert rows_of(model, tmp_path, path=path, part_cost=1).tobytes() == found.tobytes()  # parts of few rows
    for i in range(len(TILES)):  # a tile's rows depend on it alone
        assert rows_of(model, tmp_path, path=path, tiles=TILES[i:i + 1]).tobytes() == found[i].tobytes()


@pytest.mark.parametrize("path", ["reference", "avx2", "avx512"])
def test_a_gguf_file_is_the_same(model, tmp_path, path):
    if not has_path(path):
        pytest.skip(f"this machine has not {path}")
    file = write_mmproj(model, tmp_path / "mmproj.gguf")
    assert rows_of(model, tmp_path, mmproj=file, path=path).tobytes() == rows_of(model, tmp_path, path=path).tobytes()


def test_the_driver_of_tiles():
    driver = find_driver().with_name("picture_tiles")
    files = [Path(__file__).parents[1] / "fuzz/corpus/picture" / name for name in ("png_rgb", "png_of_500_megapixels")]
    out = subprocess.run([driver, "4", "3", "4", "0", "16", "0", "0", *files], capture_output=True, check=True).stdout
    head, rest = out.split(b"\n", 1)
    assert head == b"1 12 16" and rest[3 * 12 * 16:].startswith(b"refused: "), out[-80:]


def test_positions_of_a_larger_table(tmp_path):
    """Tiles may have fewer patches than the table of positions has: it is looked up by the part of the side."""
    model = write_model(tmp_path / "model")
    processor = json.loads((model / "preprocessor_config.json").read_text())
    processor["max_image_size"]["longest_edge"] = 16
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    tiles = TILES[:, :, :16, :16].copy()
    wanted = np.stack([Vision(model).rows(tile) for tile in tiles])
    assert np.abs(rows_of(model, tmp_path, tiles=tiles) - wanted).max() < 1e-4


def test_what_a_directory_is_refused_for(tmp_path):
    for section, name, value, says in [
            ("vision_config", "hidden_act", "gelu", "hidden_act"), ("vision_config", "num_channels", 1, "num_channels"),
            ("vision_config", "patch_size", 5, "patch_size"), ("vision_config", "num_attention_heads", 5, "hidden_size"),
            ("vision_config", "hidden_size", "x", "hidden_size"), (None, "scale_factor", 4, "scale_factor"),
            ("vision_config", "num_hidden_layers", 4, "layers.3.layer_norm1.weight: tensor is missing"),
            ("vision_config", "intermediate_size", 96, "mlp.fc1.weight: shape is [80, 48]")]:
        model = write_model(tmp_path / "model")
        config = json.loads((model / "config.json").read_text())
        (config[section] if section else config)[name] = value
        (model / "config.json").write_text(json.dumps(config))
        assert says in refusal(model, tmp_path), (name, value)
    for name, value in [("do_resize", False), ("do_normalize", False), ("image_mean", [1, 2]), ("resample", "x"),
                        ("size", {"longest_edge": 0})]:
        model = write_model(tmp_path / "model")
        processor = json.loads((model / "preprocessor_config.json").read_text())
        (model / "preprocessor_config.json").write_text(json.dumps({**processor, name: value}))
        said = refusal(model, tmp_path)
        assert "preprocessor_config.json" in said and (name in said or "longest_edge" in said), said
    (model / "preprocessor_config.json").unlink()
    assert "preprocessor_config.json: missing" in refusal(model, tmp_path)
    assert "connector" in refusal(write_model(tmp_path / "model"), tmp_path, width=32)


def test_numbers_in_a_member_of_processor_config(tmp_path):
    model = write_model(tmp_path / "model")
    wanted = rows_of(model, tmp_path)
    processor = json.loads((model / "preprocessor_config.json").read_text())
    (model / "processor_config.json").write_text(json.dumps({"image_processor": processor, "image_seq_len": 9}))
    (model / "preprocessor_config.json").unlink()
    assert rows_of(model, tmp_path).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("key, value, says", [
    ("clip.projector_type", "qwen2vl_merger", "'qwen2vl_merger' is not supported"), ("clip.projector_type", None, "projector_type"),
    ("general.architecture", "llama", "'llama': expected a file with an encoder"), ("clip.use_gelu", None, "clip.use_gelu"),
    ("clip.vision.block_count", None, "clip.vision.block_count: missing"), ("clip.vision.patch_size", 1000, "patch_size"),
    ("clip.vision.image_mean", [0.5, 0.5], "three numbers"), ("clip.vision.attention.layer_norm_epsilon", None, "missing"),
    ("clip.vision.block_count", 4, "v.blk.3.ln1.weight: tensor is missing")])
def test_what_a_file_is_refused_for(model, tmp_path, key, value, says):
    said = refusal(model, tmp_path, mmproj=write_mmproj(model, tmp_path / "mmproj.gguf", **{key: value}))
    assert says in said, said


def test_a_file_of_another_kind(model, tmp_path):
    assert refusal(model, tmp_path, mmproj=model / "model.safetensors").startswith("mmproj: ")
    assert refusal(model, tmp_path, mmproj=tmp_path / "absent").startswith("mmproj: ")


def test_against_transformers(model, tmp_path):
    """The published classes themselves, where they are installed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    seen = transformers.Idefics3ForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    pixels = (torch.tensor(TILES, dtype=torch.float32) / 255 - 0.5) / 0.5
    with torch.no_grad():
        wanted = seen.model.get_image_features(pixels[None])
    wanted = getattr(wanted, "pooler_output", wanted)
    wanted = torch.cat(list(wanted)) if isinstance(wanted, (list, tuple)) else wanted  # newer versions: one of each picture
    found = rows_of(model, tmp_path)
    difference = np.abs(found - wanted.numpy().reshape(found.shape)).max()
    print(f"{difference:.1e}")
    assert difference < 1e-4
    assert VISION["image_size"] == EDGE
