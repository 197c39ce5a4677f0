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


def test_short_chats_and_pictures_alone(model, tmp_path):
    """A chat that ends just behind a picture whose rows see each other cannot be measured up to a window's end; one whose second half is a
    picture has no score. Neither ends the fit."""
    seeing = write_gemma(tmp_path / "gemma")
    shown = [part(test_qwen_pictures.picture(1)), {"type": "text", "text": "What is it?"}]
    behind = {"messages": [{"role": "user", "content": TEXTS[:220]}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": shown}]}
    chats = write_chats(tmp_path / "chats.jsonl", map(test_qwen_pictures.picture, range(6)))
    chats.write_text(chats.read_text() + json.dumps(behind) + "\n")
    run = fit(seeing, chats, tmp_path / "gemma.safetensors")
    assert run.returncode == 0, run.stderr
    many = [part(picture(seed)) for seed in range(24)]
    alone = tmp_path / "alone.jsonl"
    message = {"role": "user", "content": [{"type": "text", "text": TEXTS[:80]}, *many]}
    alone.write_text((json.dumps({"messages": [message]}) + "\n") * 6)
    run = fit(model, alone, tmp_path / "alone.safetensors")
    assert run.returncode == 0 and "nan" not in run.stdout and "0.000 ± 0.000 | 0.000" not in run.stdout, run.stdout + run.stderr


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


def test_tiles_longer_than_texts_and_templates_without_pictures(tmp_path):
    qwen = test_qwen_pictures.Model(tmp_path, "qwen3_vl").directory
    large = np.zeros((8 * 12, 8 * 12, 3), dtype=np.uint8)   # a token shows 8 x 8 pixels
    run = fit(qwen, write_chats(tmp_path / "large.jsonl", [large]), tmp_path / "gates.safetensors", "--max-model-len", 100)
    assert run.returncode != 0 and "more tokens than a text" in run.stderr, run.stderr
    chats = write_chats(tmp_path / "small.jsonl", [test_qwen_pictures.picture(1)])
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] + ': ' }}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}")
    run = fit(qwen, chats, tmp_path / "gates.safetensors", "--chat-template", template)
    assert run.returncode != 0 and "a chat with pictures: " in run.stderr, run.stderr
