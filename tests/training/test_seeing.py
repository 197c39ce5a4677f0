"""keepd-nano's eyes: pictures and questions from seeds, and the exported directory beside the network that was trained."""
import base64
import io
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import requests
import torch
from PIL import Image

import corpus
import scenes
import train_seeing
from conftest import BINARY, ROOT, TRAINING, serve


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory after two steps, and its network with the rounded weights of the directory."""
    folder = tmp_path_factory.mktemp("seeing")
    subprocess.run([sys.executable, TRAINING / "train_seeing.py", "--max-steps", "2", "--no-compile", "--batch-tokens", "512", "--threads", "2",
                    "--run", folder / "run", "--out", folder / "model"], check=True)
    net = train_seeing.Seeing()
    net.load_state_dict(torch.load(folder / "run/checkpoint.pt", weights_only=True)["net"])
    for p in net.parameters():
        p.data = p.data.bfloat16().float()
    return folder / "model", net.eval()


def test_scenes_are_made_from_their_seeds():
    for kind in scenes.KINDS:
        a, b, c = (scenes.scene(corpus.Words(random.Random(seed), "train"), kind) for seed in (1, 1, 2))
        assert a.picture.shape == (scenes.SIDE, scenes.SIDE, 3) and a.picture.dtype == np.uint8
        assert (a.picture == b.picture).all() and a.questions == b.questions
        assert (a.picture != c.picture).any()
        assert a.kind == kind and a.shows
        assert all(0 <= at < scenes.CELLS for cell in a.shows for at in cell)
        assert all(mark in scenes.MARKS_SEEN and colour in scenes.COLOURS_SEEN for mark, colour in a.shows.values())
        assert len({question for question, _ in a.questions}) == len(a.questions)


def test_codes_of_tests_are_not_learned():
    for split in ("train", "heldout"):
        w = corpus.Words(random.Random(3), split)
        codes = [scenes.sign(w).questions[0][1] for _ in range(20)]
        assert all(corpus.held_out(code) == (split == "heldout") for code in codes)


def test_dialogues_fit_and_have_their_pictures():
    source = scenes.dialogues("train", 5, 512)
    for d in (next(source) for _ in range(20)):
        assert d.pictures and sum(m["content"].count(scenes.SHOWN) for m in d.messages) == len(d.pictures)


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_a_square_shows_what_is_drawn_in_it(kind, monkeypatch):
    """Marks are drawn in the middle of their squares, and nowhere else."""
    drawn = []

    def note(text, x, y):
        drawn.extend(((x + scenes.CELL * i) // scenes.CELL, y // scenes.CELL, mark) for i, mark in enumerate(text))

    monkeypatch.setattr(scenes, "draw_text", lambda draw, text, x, y, size, colour: note(text, x, y))
    monkeypatch.setattr(scenes, "draw_shape", lambda draw, shape, x, y, r, colour: note([shape], x, y))
    for seed in range(8):
        drawn.clear()
        scene = scenes.scene(corpus.Words(random.Random(seed), "train"), kind)
        assert sorted(drawn) == sorted((column, line, mark) for (column, line), (mark, _) in scene.shows.items())


def test_shapes_leave_numbers_free():
    """No shape lies beside the second digit of a number."""
    for seed in range(40):
        scene = scenes.scene(corpus.Words(random.Random(seed), "train"), "grid")
        shapes = {at for at, (mark, _) in scene.shows.items() if mark in scenes.SHAPES}
        second = {(column, line) for (column, line), (mark, _) in scene.shows.items()
                  if mark not in scenes.SHAPES and (column - 1, line) in scene.shows}
        assert not any((column + 1, line) in shapes for column, line in second), seed


def test_rows_that_are_sums_of_embeddings_are_understood():
    table = torch.randn(2048, 256)
    tokenizer = train_seeing.Tokenizer.from_file(str(train_seeing.NANO / "tokenizer.json"))
    marks, colours = (train_seeing.Words(tokenizer, table, words) for words in (scenes.MARKS_SEEN, scenes.COLOURS_SEEN))
    for mark in range(1, len(scenes.MARKS_SEEN)):
        for colour in range(1, len(scenes.COLOURS_SEEN)):
            row = marks.embeddings[mark] + colours.embeddings[colour]
            assert marks.logits(row).argmax() == mark and colours.logits(row).argmax() == colour
    assert marks.logits(torch.zeros(256)).argmax() == colours.logits(torch.zeros(256)).argmax() == 0


def test_chats_have_their_pictures(tmp_path):
    file = tmp_path / "chats.jsonl"
    subprocess.run([sys.executable, TRAINING / "scenes.py", "--count", "3", "--out", file], check=True)
    for line in file.read_text().splitlines():
        messages = json.loads(line)["messages"]
        parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        assert urls and all(isinstance(m["content"], list) or scenes.IMAGE not in m["content"] for m in messages)
        for url in urls:
            picture = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
            assert picture.size == (scenes.SIDE, scenes.SIDE)


def test_a_daemon_answers_as_the_network(trained):
    model, net = trained
    tokenizer = train_seeing.Tokenizer.from_file(str(model / "tokenizer.json"))
    scene = scenes.scene(corpus.Words(random.Random(9), "heldout"), "grid")
    parts = [scenes.part(scene.picture), {"type": "text", "text": scene.questions[0][0]}]
    ids = tokenizer.encode(corpus.render([{"role": "user", "content": scenes.SHOWN + scene.questions[0][0]}]) + "<|im_start|>assistant\n",
                           add_special_tokens=False).ids
    with torch.no_grad():
        logits = net(torch.tensor([ids]), torch.arange(len(ids))[None], torch.tensor(scene.picture)[None],
                     tokenizer.token_to_id(scenes.IMAGE))
    wanted = logits[0, -1].log_softmax(-1)
    with serve(model, "--kv-dtype", "f32", "--cpu-activations", "f32", "--fit", "never") as url:
        answer = requests.post(f"{url}/v1/chat/completions", timeout=60, json={
            "messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 5}).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)
    found = [top["logprob"] for top in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    assert np.abs(np.array(found) - wanted.topk(5).values.numpy()).max() < 1e-3


def test_questions_about_pictures_with_parts_of_the_cache(trained, tmp_path):
    program = [sys.executable, ROOT / "bench/quality/pictures.py", "--model", trained[0], "--binary", BINARY, "--methods", "full,streaming",
               "--shares", "0.5"]
    done = subprocess.run([*program, "--contexts", "2", "--out", tmp_path], check=True, text=True, capture_output=True).stdout
    assert len(re.findall(r"^\| full \| +[0-9]", done, re.M)) == len(re.findall(r"^\| `streaming` \| +[0-9]", done, re.M)) == 2, done
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 and all(2 <= row["of"] <= 4 for row in rows)
    subprocess.run([*program, "--map", tmp_path / "map.svg"], check=True)
    drawn = (tmp_path / "map.svg").read_text()
    assert drawn.count("<image") == 8 and drawn.count("<rect") == 4 * scenes.ROWS
