"""keepd fit with pictures in the chats: gates that depend on them, the table, and what is refused."""
import json
import pathlib
import subprocess
import sys

import pytest

from test_fit import BINARY

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
import test_qwen_pictures  # noqa: E402
from gemma_seeing import write_gemma  # noqa: E402
from test_pictures import part, picture  # noqa: E402
from vision_model import write_model  # noqa: E402

TEXTS = " ".join(f"The parcel number {n} goes to room {n * 7 % 90}." for n in range(60))


def keepd(*args):
    return subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    write_model(folder)
    return folder


def write_chats(path, pictures, **first):
    """A chat for each picture, which is shown before a long text and behind it."""
    with path.open("w") as out:
        for pixels in pictures:
            shown = [part(pixels), {"type": "text", "text": TEXTS}]
            messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": "Noted."}] * 2
            out.write(json.dumps({"messages": messages, **first}) + "\n")
    return path


def fit(model, chats, out, *args):
    return keepd("fit", model, "--chats", chats, "--out", out, "--minutes", "1", *args)


def test_gates_are_fitted_to_what_the_model_sees(model, tmp_path):
    made = {}
    for name, seeds in ("first", range(6)), ("others", range(6, 12)):
        chats = write_chats(tmp_path / f"{name}.jsonl", [picture(seed) for seed in seeds])
        for threads in (1, 2) if name == "first" else (2,):
            out = tmp_path / f"{name}-{threads}.safetensors"
            run = fit(model, chats, out, "--threads", threads)
            assert run.returncode == 0, run.stderr
            assert "| `global` |" in run.stdout and "nan" not in run.stdout, run.stdout
            made[name, threads] = out.read_bytes()
    assert made["first", 1] == made["first", 2]
    assert made["first", 2] != made["others", 2]        # the texts are equal
    check = keepd("--model", model, "--gates", tmp_path / "first-1.safetensors", "--check-config")
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("kind", ("gemma", "qwen3_vl"))
def test_rows_that_see_each_other_and_places_in_three_dimensions(tmp_path, kind):
    seeing = write_gemma(tmp_path / kind) if kind == "gemma" else test_qwen_pictures.Model(tmp_path, kind).directory
    run = fit(seeing, write_chats(tmp_path / "chats.jsonl", map(test_qwen_pictures.picture, range(6))), tmp_path / "gates.safetensors")
    assert run.returncode == 0, run.stderr
    assert "| `global` |" in run.stdout and "nan" not in run.stdout, run.stdout


def test_what_is_refused(model, tmp_path):
    out = tmp_path / "gates.safetensors"
    chats = write_chats(tmp_path / "text.jsonl", [picture(1)])
    run = fit(ROOT / "bundled/keepd-nano", chats, out)
    assert run.returncode != 0 and "this model sees no pictures" in run.stderr, run.stderr
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    message = {"messages": [{"role": "user", "content": [broken]}]}
    chats.write_text(json.dumps(message) + "\n")
    run = fit(model, chats, out)
    assert run.returncode != 0 and "line 1: 'messages[0].content[0].image_url.url'" in run.stderr, run.stderr
    broken["image_url"]["url"] = "http://localhost/picture.png"
    chats.write_text(json.dumps(message) + "\n")
    run = fit(model, chats, out)
    assert run.returncode != 0 and "send the bytes" in run.stderr, run.stderr
    assert not out.exists()
