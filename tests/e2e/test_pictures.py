"""Pictures in chats: answers beside a float64 model that sees them, on every path of the CPU, bit by bit in any step, batch, on
ranks and from GGUF files; later turns; evictions of pictures' entries; files of conversations; what is refused."""
import base64
import concurrent.futures as futures
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import zlib

import pytest
import requests

from answers import cached, tokens
from conftest import start_on

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.path.abspath(os.environ.get("KEEPD_BIN", ROOT / "build" / "keepd"))
sys.path.insert(0, str(ROOT / "tests/python"))
np = pytest.importorskip("numpy")
from reference_model import load_tensors  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from vision_model import EDGE, SeeingReference, write_mmproj, write_model, write_text_gguf  # noqa: E402

FLAGS = ("--kv-dtype", "f32", "--cpu-activations", "f32")


def png(pixels):
    """A PNG file of bytes [height, width, 3]."""
    height, width, _ = pixels.shape

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b""))


def picture(seed, width=2 * EDGE):
    """Pixels whose rows have one colour each: resizing the width alone changes none of them."""
    rows = np.random.default_rng(seed).integers(0, 256, (EDGE, 1, 3), dtype=np.uint8)
    return np.repeat(rows, width, axis=1)


def part(pixels):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(pixels)).decode()}}


def ask(*pictures, text="What is it?"):
    return [{"role": "user", "content": [*map(part, pictures), {"type": "text", "text": text}]}]


def tile_of(pixels):
    return pixels[:, :EDGE].transpose(2, 0, 1).copy()


class Tokens:
    """keepd-nano's tokens without merges: bytes and marks."""

    def __init__(self, directory):
        data = json.loads((directory / "tokenizer.json").read_text())
        self.vocab = data["model"]["vocab"]
        self.marks = {token["content"]: token["id"] for token in data["added_tokens"]}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        self.chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

    def __call__(self, text):
        ids = []
        while text:
            mark = next((m for m in self.marks if text.startswith(m)), None)
            if mark:
                ids.append(self.marks[mark])
                text = text[len(mark):]
            else:
                ids += [self.vocab[self.chars[b]] for b in text[0].encode()]
                text = text[1:]
        return ids


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("seeing"), longest=2 * EDGE)


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    return SeeingReference(model, tmp_path_factory.mktemp("text"))


def shown(reference, words, pixels):
    """The prompt's part of a picture: the tiles of its grid, then the whole as one more."""
    columns = pixels.shape[1] // EDGE
    tile = reference.show(tile_of(pixels))
    ids = []
    if columns > 1:
        for column in range(1, columns + 1):
            ids += words(f"<fake_token_around_image><row_1_col_{column}>") + tile
        ids += words("\n\n")
    return ids + words("<fake_token_around_image><global-img>") + tile + words("<fake_token_around_image>")


def prompt_of(reference, model, pictures, text="What is it?"):
    words = Tokens(model)
    ids = words("<|im_start|>user\n")
    for pixels in pictures:
        ids += shown(reference, words, pixels)
    return ids + words(text + "<|im_end|>\n<|im_start|>assistant\n")


def check_answer(reference, model, pictures, answer, evictions=(), most=2e-5, text="What is it?"):
    check_logprobs(reference, model, prompt_of(reference, model, pictures, text), answer, evictions, most)


def check_logprobs(reference, model, prompt, answer, evictions=(), most=2e-5):
    """Compares the log-probabilities of an answer, and of its alternatives, with the model's."""
    words = Tokens(model)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    content = answer["choices"][0]["logprobs"]["content"]
    names = {name: i for name, i in words.marks.items()} | {bytes([b]): words.vocab[c] for b, c in words.chars.items()}

    def id_of(token):
        return names[token["token"]] if token["token"] in names else names[bytes(token["bytes"])]

    drawn = [id_of(token) for token in content]
    reference.reset()
    rows = []
    for i, token in enumerate(prompt + drawn):
        rows.append(reference.append([token])[0])
        for gone in [e for e in evictions if e["tokens"] == i + 1]:
            for layer, heads in enumerate(gone["evicted"]):
                for head, positions in enumerate(heads):
                    stream = reference.cache.streams[layer][head]
                    stream.keep(~np.isin(stream.pos, positions))
    worst = 0
    for i, token in enumerate(content):
        row = rows[len(prompt) - 1 + i]
        for other in [token, *token["top_logprobs"]]:
            worst = max(worst, abs(other["logprob"] - row[id_of(other)]))
    print(f"largest difference {worst:.1e}")
    assert worst < most


def answer_of(d, messages, **fields):
    return d.chat(messages, max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=3, **fields)


@pytest.mark.parametrize("path", ["reference", "portable", "avx2", "avx512", "amx"])
def test_answers_are_those_of_an_independent_model(daemon, model, reference, path):
    d = start_on(daemon, path, "--model", str(model), *FLAGS)
    for pictures in ([picture(1)], [picture(1), picture(3), picture(2)]):
        check_answer(reference, model, pictures, answer_of(d, ask(*pictures)))


def test_a_small_picture_is_one_tile(daemon, tmp_path):
    model = write_model(tmp_path / "model", "SmolVLM", longest=EDGE)
    seeing = SeeingReference(model, tmp_path / "text")
    d = daemon("--model", str(model), *FLAGS)
    for pictures in ([picture(1, EDGE)], [picture(2, EDGE), picture(3, EDGE)]):
        check_answer(seeing, model, pictures, answer_of(d, ask(*pictures)))
    assert tiles(d) == 3


def test_a_picture_is_the_same_in_any_step(daemon, model):
    """Bit by bit: in short steps, in batches, on ranks, replicas and threads."""
    asked = [ask(picture(i), picture(9), text=f"What is {i}?") for i in range(4)]
    d = daemon("--model", str(model), *FLAGS)
    alone = [tokens(answer_of(d, messages)) for messages in asked]
    assert len({str(answer) for answer in alone}) == 4
    fresh = {"kv": {"reuse": False}}
    for flags in ((), ("--max-num-batched-tokens", "7", "--max-num-seqs", "4"), ("--tensor-parallel-size", "2", "--threads", "2"),
                  ("--data-parallel-size", "2", "--threads", "2"), ("--threads", "1")):
        d = daemon("--model", str(model), *FLAGS, *flags)
        with futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda m: tokens(answer_of(d, m, **fresh)), asked)) == alone, flags
            assert list(pool.map(lambda m: tokens(answer_of(d, m, **fresh)), asked[::-1])) == alone[::-1], flags


def test_gguf_files_are_the_same(daemon, model, tmp_path):
    whole = daemon("--model", str(model), *FLAGS)
    file = daemon("--model", str(write_text_gguf(model, tmp_path / "text.gguf")), "--mmproj",
                  str(write_mmproj(model, tmp_path / "mmproj.gguf")), *FLAGS)
    for pictures in ([picture(1)], [picture(2), picture(3)]):
        assert tokens(answer_of(file, ask(*pictures))) == tokens(answer_of(whole, ask(*pictures)))


def test_a_rounded_directory_has_its_encoder(daemon, model, tmp_path):
    saved = tmp_path / "saved"
    subprocess.run([BINARY, "--model", str(model), "--quantization", "q8", "--quantize-to", str(saved)], check=True, timeout=120)
    answers = [answer_of(daemon("--model", str(directory), *flags), ask(picture(5)))
               for directory, flags in ((model, ("--quantization", "q8")), (saved, ()))]
    assert answers[0]["choices"] == answers[1]["choices"]


def tiles(d):
    return d.metric("keepd_picture_tiles_total")


def test_a_later_turn_reads_no_picture_again(daemon, model, reference):
    d = daemon("--model", str(model), *FLAGS)
    messages = ask(picture(1), picture(2))
    first = answer_of(d, messages)
    assert tiles(d) == 6
    later = messages + [{"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                        {"role": "user", "content": "And what else?"}]
    second = answer_of(d, later)
    assert tiles(d) == 6
    assert cached(second) >= first["usage"]["prompt_tokens"]
    other = answer_of(d, ask(picture(1), picture(2), text="Where is it?"))
    assert tiles(d) == 6 and cached(other) > first["usage"]["prompt_tokens"] - 40
    again = answer_of(d, ask(picture(4), picture(1)))  # the second was encoded for another chat
    assert tiles(d) == 9 and cached(again) < 9
    check_answer(reference, model, [picture(4), picture(1)], again)


def test_the_terminal_client_shows_a_picture(daemon, model, tmp_path):
    d = daemon("--model", str(model), *FLAGS)
    file = tmp_path / "picture.png"
    file.write_bytes(png(picture(1)))
    run = subprocess.run([BINARY, "chat", d.url, "--tokens", "3"], input=f"/image {file}\nWhat is it?\nAnd now?\n", capture_output=True, text=True,
                         timeout=120)
    assert run.returncode == 0 and "pictures of the next message: 1" in run.stderr, run.stderr
    assert tiles(d) == 3
    run = subprocess.run([BINARY, "chat", d.url], input=f"/image {__file__}\nWhat is it?\n", capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "this is no picture" in run.stderr, run.stderr


def test_tokens_have_places_in_pictures(daemon, model):
    d = daemon("--model", str(model), *FLAGS)
    r = requests.post(d.url + "/tokenize", json={"messages": ask(picture(1), picture(2)), "with_pieces": True}, timeout=60).json()
    side = EDGE // 8
    for shown in r["pictures"]:
        assert (shown["width"], shown["height"]) == (2 * EDGE, EDGE)
        assert [part["area"] for part in shown["parts"]] == [[0, 0, 0.5, 1], [0.5, 0, 1, 1], [0, 0, 1, 1]]
        for part in shown["parts"]:
            assert (part["rows"], part["columns"], part["first"], part["count"]) == (side, side, 0, side * side)
    marks = [i for i, token in enumerate(r["tokens"]) if token["id"] >= 1 << 30]
    assert marks == [part["at"] + i for shown in r["pictures"] for part in shown["parts"] for i in range(part["count"])]
    r = requests.post(d.url + "/tokenize", json={"messages": [{"role": "user", "content": "a"}]}, timeout=60).json()
    assert "pictures" not in r


def test_an_adapter_beside_a_picture(daemon, model, tmp_path):
    """As the model into which it is merged, by the names of the whole model's tensors; the encoder's work is shared."""
    from lora import make
    tensors = load_tensors(model / "model.safetensors")
    text = {name.replace("text_model.", ""): t for name, t in tensors.items() if "text_model.layers." in name}
    changes = make(tmp_path / "a", 1, size=0.3, model=text)
    file = tmp_path / "a/adapter_model.safetensors"
    save_file({name.replace("model.model.layers.", "model.model.text_model.layers."): t.astype(np.float32) for name, t in load_tensors(file).items()}, file)
    merged = shutil.copytree(model, tmp_path / "merged")
    changed = {name.replace("model.layers.", "model.text_model.layers."): change for name, change in changes.items()}
    save_file({name: (t + changed.get(name, 0)).astype(np.float32) for name, t in tensors.items()}, merged / "model.safetensors")
    d, whole = daemon("--model", str(model), "--lora", f"a={tmp_path / 'a'}", *FLAGS), daemon("--model", str(merged), *FLAGS)
    messages = ask(picture(1), picture(3))
    plain, adapted, expected = answer_of(d, messages), answer_of(d, messages, model="a"), answer_of(whole, messages)
    assert tiles(d) == 6

    def scores(answer):
        return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]

    assert np.abs(np.subtract(scores(adapted), scores(expected))).max() < 1e-4
    assert np.abs(np.subtract(scores(plain), scores(adapted))).max() > 1e-3


def test_evictions_of_pictures(daemon, model, reference):
    """The report says what is left of a picture, and the answer is that of these entries."""
    d = daemon("--model", str(model), *FLAGS)
    pictures = [picture(1), picture(2), picture(3)]
    for policy in ("streaming", "snapkv"):
        kv = {"policy": policy, "budget": 40, "buffer": 8, "chunk": 16, "report": "trace"}
        answer = answer_of(d, ask(*pictures), kv=kv)
        details = answer["usage"]["kv_details"]
        assert details["trace"] and details["evicted_entries"] > 0
        check_answer(reference, model, pictures, answer, details["trace"])


def test_files_of_conversations(daemon, model, tmp_path):
    """A daemon that has read a conversation from disk needs no picture of it."""
    flags = ("--model", str(model), *FLAGS, "--max-conversations", "1")  # no room for a checkpoint, which no file has
    files = ("--state-dir", str(tmp_path / "state"), "--state-idle", "0")
    kv = {"policy": "snapkv", "budget": 64, "buffer": 8, "chunk": 16}
    messages = ask(picture(1), picture(2))
    d = daemon(*flags, *files)
    first = answer_of(d, messages, kv=kv)
    later = messages + [{"role": "assistant", "content": first["choices"][0]["message"]["content"]},
                        {"role": "user", "content": "And what else?"}]
    assert d.stop() == 0
    again = daemon(*flags, *files)
    second = answer_of(again, later, kv=kv)
    assert tiles(again) == 0 and cached(second) >= first["usage"]["prompt_tokens"]
    fresh = daemon(*flags)
    answer_of(fresh, messages, kv=kv)
    assert tokens(answer_of(fresh, later, kv=kv)) == tokens(second)


def test_ids_of_pictures_cannot_be_forged(daemon, model):
    d = daemon("--model", str(model), *FLAGS)
    for token in (1 << 30, 2**31 - 1):
        r = requests.post(d.url + "/v1/completions", json={"prompt": [5, token, 6], "max_tokens": 1}, timeout=60)
        assert r.status_code == 400 and r.json()["error"]["param"] == "prompt[1]", r.text


def refusal(*flags, binary=BINARY):
    r = subprocess.run([binary, "--port", "0", *map(str, flags)], capture_output=True, text=True, timeout=60)
    assert r.returncode == 78, r
    return r.stderr


def test_what_a_start_refuses(model, tmp_path):
    file = write_mmproj(model, tmp_path / "mmproj.gguf")
    assert "mm.model.fc.weight: shape is [64, 192]" in refusal("--model", ROOT / "bundled/keepd-nano", "--mmproj", file)
    assert "mmproj" in refusal("--model", model, "--mmproj", tmp_path / "absent.gguf")
    text = write_text_gguf(model, tmp_path / "text.gguf")
    assert "expected a file with an encoder" in refusal("--model", model, "--mmproj", text)


def test_a_directory_whose_encoder_cannot_be_used_answers_texts(daemon, tmp_path):
    model = write_model(tmp_path / "model")
    (model / "preprocessor_config.json").unlink()
    d = daemon("--model", str(model), *FLAGS)
    assert answer_of(d, [{"role": "user", "content": "hello"}])
    r = requests.post(d.url + "/v1/chat/completions", json={"messages": ask(picture(1))}, timeout=60)
    assert r.status_code == 400, r.text
