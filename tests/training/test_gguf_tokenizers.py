"""Tokenizers of GGUF files with scores, beside SentencePiece with the same pieces: random Unicode strings there and back.

The vocabularies are those of llama.cpp's tests ($KEEPD_TEST_DATA/tokenizers/ggml-vocab-*.gguf); skipped where they are
absent. keepd serves them under a tiny random model."""

import json
import os
import random
import subprocess
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT

gguf = pytest.importorskip("gguf")
sentencepiece = pytest.importorskip("sentencepiece")
from sentencepiece import sentencepiece_model_pb2  # noqa: E402

BINARY = Path(os.environ.get("KEEPD_BIN", ROOT / "build/keepd"))
FOLDER = Path(os.environ.get("KEEPD_TEST_DATA", "/nonexistent")) / "tokenizers"
STRINGS = 2000
WIDTH = 32
RANGES = [(0x20, 0x7F)] * 6 + [(0x20, 0x21), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0x980),
                               (0x2000, 0x2070), (0x2580, 0x2600), (0x3000, 0x3100), (0x4E00, 0x9FA6), (0xAC00, 0xD7A4),
                               (0xE000, 0xE010), (0x1F300, 0x1F700), (0x10000, 0x10100), (0x1, 0x20)]


def vocabularies():
    """Files with scores; their metadata is not read here, because that takes seconds."""
    key = b"tokenizer.ggml.model" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little") + b"llama"
    return [path for path in sorted(FOLDER.glob("ggml-vocab-*.gguf")) if key in path.read_bytes()[:65536]]


def random_string(rng):
    """Runs of characters of one range, as words of a language are."""
    parts = []
    for _ in range(rng.randrange(1, 8)):
        low, high = rng.choice(RANGES)
        parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 10))))
    return "".join(parts)


def write_model(path, fields):
    """A Llama of one layer with the vocabulary of the file."""
    rng, count = np.random.default_rng(1), len(fields["tokenizer.ggml.tokens"].data)
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(1)
    w.add_context_length(4096)
    w.add_embedding_length(WIDTH)
    w.add_feed_forward_length(WIDTH)
    w.add_head_count(1)
    w.add_head_count_kv(1)
    w.add_layer_norm_rms_eps(1e-5)
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            w.add_key_value(name, field.contents(), field.types[0], inner)
    square = (WIDTH, WIDTH)
    shapes = {"token_embd": (count, WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,)}
    shapes |= {f"blk.0.{name}": square for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in shapes.items():
        w.add_tensor(name + ".weight", rng.standard_normal(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def reference(fields):
    """SentencePiece's own BPE over the pieces of the file, without normalisation, as Llama 2 has it."""
    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    kinds = fields["tokenizer.ggml.token_type"].contents()
    model.trainer_spec.byte_fallback = gguf.TokenType.BYTE in kinds
    prefix = fields.get("tokenizer.ggml.add_space_prefix")
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix.contents() if prefix else True
    model.normalizer_spec.remove_extra_whitespaces = False
    tokens, scores = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.scores"].contents()
    model.trainer_spec.vocab_size = len(tokens)
    unknown = kinds.index(gguf.TokenType.UNKNOWN)
    for i, (token, score, kind) in enumerate(zip(tokens, scores, kinds)):
        if kind == gguf.TokenType.UNKNOWN and i != unknown:
            kind = gguf.TokenType.CONTROL  # SentencePiece has one; no random string contains the others
        model.pieces.add(piece=token or f"<empty {i}>", score=score, type=int(kind))
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def ask(url, path, **body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))


@pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")
@pytest.mark.parametrize("path", vocabularies(), ids=lambda path: path.stem)
def test_random_strings_as_sentencepiece(path, tmp_path):
    fields = gguf.GGUFReader(path).fields
    write_model(tmp_path / "model.gguf", fields)
    spm = reference(fields)
    process = subprocess.Popen([BINARY, "--model", tmp_path / "model.gguf", "--port", "0", "--threads", "1", "--log-level", "error"],
                               stdout=subprocess.PIPE, text=True)
    ready = process.stdout.readline()
    assert ready.startswith("keepd ready at "), ready
    url, rng = ready.split()[3], random.Random(12)
    encoded = decoded = 0
    try:
        for _ in range(STRINGS):
            text = random_string(rng)
            ids = ask(url, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
            assert ids == spm.encode(text), repr(text)
            encoded += 1
            back = ask(url, "/detokenize", tokens=ids)["prompt"]
            assert back == spm.decode(ids), repr(text)
            decoded += 1
    finally:
        process.terminate()
        process.communicate(timeout=60)
    print(f"{path.stem}: {encoded} encodings and {decoded} decodings equal SentencePiece's")
