"""keepd-nano's eyes: pictures and questions from seeds, and the exported directory beside the network that was trained."""
import base64
import io
import random
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
from conftest import TRAINING, serve


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
        assert a.shows["kind"] == kind and set(a.shows) <= set(scenes.SEEN_AT) and set(a.shows.values()) <= set(scenes.VALUES)
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


def test_a_daemon_answers_as_the_network(trained):
    model, net = trained
    tokenizer = train_seeing.Tokenizer.from_file(str(model / "tokenizer.json"))
    scene = scenes.scene(corpus.Words(random.Random(9), "heldout"), "grid")
    file = io.BytesIO()
    Image.fromarray(scene.picture).save(file, "png")
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}},
             {"type": "text", "text": scene.questions[0][0]}]
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
