#!/usr/bin/env python3
"""A model of real size that two servers can both load: random bf16 weights of the Qwen3-0.6B or Llama-3.2-1B shape
with gates, as a Hugging Face directory, and the same numbers as GGUF.

    make_model.py DIR                the whole shape: DIR and DIR.gguf, 1.2 GB each
    make_model.py DIR --thinner 7    a seventh of the layers and of the vocabulary, for long texts
    make_model.py DIR --shape llama  that of Llama-3.2-1B: 2.5 GB each
    make_model.py DIR --convert      only DIR.gguf of the Qwen3 or Llama model that is there

Needs the package `gguf`. The tokenizer is made up: every token is a word of its own, so a client sees each token
arrive, and prompts are given as token ids.
"""
import argparse
import json
import pathlib
import string
import struct
import sys

import gguf
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "speed"))
from speed import QWEN3_0_6B  # noqa: E402

GATE_WIDTH = 64
LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
         "lm_head.weight": "output.weight"}
NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I32": np.int32}


# Without the published scaling of rope, which costs no time.
LLAMA_3_2_1B = {
    **QWEN3_0_6B, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000,
}
SHAPES = {"qwen3": QWEN3_0_6B, "llama": LLAMA_3_2_1B}


def shape(name, thinner):
    """Vocabularies are whole multiples of 64, as real ones are."""
    c = SHAPES[name]
    return {**c, "num_hidden_layers": c["num_hidden_layers"] // thinner, "vocab_size": c["vocab_size"] // thinner // 64 * 64}


# --- safetensors ----------------------------------------------------------------------------------


def bf16_of(x):
    """Nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path, tensors, metadata=None):
    """tensors: {name: (type, array)}."""
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, (kind, a) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, a in tensors.values():
            a.tofile(f)


def read_safetensors(path):
    size = struct.unpack("<Q", path.open("rb").read(8))[0]
    with path.open("rb") as f:
        f.seek(8)
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    return {name: (t["dtype"], data[slice(*t["data_offsets"])].view(NUMPY[t["dtype"]]).reshape(t["shape"]))
            for name, t in header.items()}


# --- the random model -----------------------------------------------------------------------------


def matrices(c):
    """{name: shape} as Qwen3 and Llama publish them."""
    d, inner, size = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    layer = {"input_layernorm": (d,), "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d),
             "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q), "self_attn.q_norm": (size,),
             "self_attn.k_norm": (size,), "post_attention_layernorm": (d,), "mlp.gate_proj": (inner, d),
             "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner)}
    if c["model_type"] == "llama":
        layer = {name: s for name, s in layer.items() if not name.endswith(("q_norm", "k_norm"))}
    all_of = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    for i in range(c["num_hidden_layers"]):
        all_of |= {f"model.layers.{i}.{name}.weight": s for name, s in layer.items()}
    return all_of


def random_weights(c, rng):
    """Norms are 1, the rest 0.02 times a normal number."""
    tensors = {}
    for name, s in matrices(c).items():
        a = np.ones(s, np.float32) if len(s) == 1 else rng.standard_normal(s, np.float32) * np.float32(0.02)
        tensors[name] = ("BF16", bf16_of(a))
    return tensors


def random_gates(c, rng):
    layers, heads, d, m = c["num_hidden_layers"], c["num_key_value_heads"], c["hidden_size"], GATE_WIDTH
    about = {"version": 1, "type": "rg", "width": m, "act": "silu", "layers": layers, "heads": heads, "d_model": d,
             "trained_budget": 1024, "horizon": 128}
    normal = {"w1": (layers, m, d), "b1": (layers, m), "w_last": (heads, m), "c": (heads,)}
    tensors = {name: ("F32", rng.standard_normal(s, np.float32) * np.float32(0.02)) for name, s in normal.items()}
    tensors["row"] = ("I32", np.tile(np.arange(heads, dtype=np.int32), (layers, 1)))
    return tensors, {"keepd": json.dumps(about)}


def byte_letters():
    """How byte-level BPE writes the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]


def words(count):
    """Words of five letters behind a blank, all different."""
    letters = string.ascii_lowercase
    return ["\u0120" + "".join(letters[i // 26 ** k % 26] for k in range(5)) for i in range(count)]


def tokenizer(vocab_size):
    special, letters = "<|endoftext|>", byte_letters()
    known = [special, *letters, "th", *words(vocab_size - len(letters) - 2)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level,
            "post_processor": None, "decoder": level,
            "added_tokens": [{"id": 0, "content": special, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True}],
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "vocab": {word: i for i, word in enumerate(known)}, "merges": [["t", "h"]]}}


def make(to, c):
    rng = np.random.default_rng(1)
    to.mkdir(parents=True, exist_ok=True)
    (to / "config.json").write_text(json.dumps(c, indent=1) + "\n")
    (to / "tokenizer.json").write_text(json.dumps(tokenizer(c["vocab_size"])))
    write_safetensors(to / "model.safetensors", random_weights(c, rng))
    write_safetensors(to / "gates.safetensors", *random_gates(c, rng))


# --- GGUF -----------------------------------------------------------------------------------------


def gguf_name(name):
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"


def describe(w, c):
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_rope_dimension_count(c["head_dim"])
    w.add_vocab_size(c["vocab_size"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(w, t, vocab_size):
    names = {i: word for word, i in t["model"]["vocab"].items()}
    special = {a["id"]: a["content"] for a in t["added_tokens"]}
    names |= special
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL if i in names else gguf.TokenType.UNUSED
             for i in range(vocab_size)]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([names.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    w.add_token_types(kinds)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in t["model"]["merges"]])


def end_token(c):
    end = c["eos_token_id"]
    return end[0] if isinstance(end, list) else end


def in_pairs(name, a, c):
    """Rows of queries and keys as llama files have them: a head's two halves by turns."""
    if c["model_type"] != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return a
    return a.reshape(-1, 2, c["head_dim"] // 2, a.shape[1]).swapaxes(1, 2).reshape(a.shape)


def convert(directory, path):
    c = json.loads((directory / "config.json").read_text())
    if c["model_type"] not in SHAPES:
        sys.exit(f"{directory}: {c['model_type']} is not converted here, only {' and '.join(SHAPES)}")
    w = gguf.GGUFWriter(path, c["model_type"])
    describe(w, c)
    add_tokenizer(w, json.loads((directory / "tokenizer.json").read_text()), c["vocab_size"])
    w.add_eos_token_id(end_token(c))
    w.add_add_bos_token(False)
    for name, (kind, a) in read_safetensors(directory / "model.safetensors").items():
        if kind != "BF16":
            sys.exit(f"{directory}: {name} is {kind}: only bf16 is converted here")
        if a.ndim == 1:
            w.add_tensor(gguf_name(name), float_of(a))
        else:
            w.add_tensor(gguf_name(name), np.ascontiguousarray(in_pairs(name, a, c)).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("dir", type=pathlib.Path)
    ap.add_argument("--shape", choices=list(SHAPES), default="qwen3")
    ap.add_argument("--thinner", type=int, default=1, metavar="N")
    ap.add_argument("--convert", action="store_true", help="the model is there")
    ap.add_argument("--gguf", type=pathlib.Path, help="default: DIR.gguf")
    a = ap.parse_args()
    if not a.convert:
        make(a.dir, shape(a.shape, a.thinner))
    convert(a.dir, a.gguf or a.dir.parent / (a.dir.name + ".gguf"))


if __name__ == "__main__":
    main()
