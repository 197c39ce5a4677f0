#!/usr/bin/env python3
"""A GGUF file with random weights in bf16 of a model with recurrent layers, which keepd and llama.cpp can both load.

    make_hybrid.py SHAPE FILE.gguf

SHAPE is qwen35-0.8b or lfm2-350m, for speed (formats.py reads PREFIX-bf16.gguf; prompts are given as token ids; llama-quantize makes
other formats), or qwen35-tiny, for what is read again: 8 layers of width 64 with a vocabulary of words and ChatML. lfm2-tiny is for trials.

Needs the package `gguf`.
"""
import argparse
import itertools
import string

import gguf
import numpy as np
from make_model import bf16_of, byte_letters

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SHAPES = {
    "qwen35-0.8b": {"arch": "qwen35", "layers": 24, "width": 1024, "ff": 3584, "heads": 8, "kv": 2, "dim": 256, "vocab": 248320,
                    "keys": 16, "values": 16, "state": 128},
    "qwen35-tiny": {"arch": "qwen35", "layers": 8, "width": 64, "ff": 128, "heads": 4, "kv": 2, "dim": 32, "vocab": 4096,
                    "keys": 2, "values": 4, "state": 16},
    "lfm2-350m": {"arch": "lfm2", "layers": 16, "width": 1024, "ff": 4608, "heads": 16, "kv": 8, "dim": 64, "vocab": 65536,
                  "attending": [2, 5, 8, 10, 12, 14]},
    "lfm2-tiny": {"arch": "lfm2", "layers": 4, "width": 64, "ff": 128, "heads": 4, "kv": 2, "dim": 16, "vocab": 20480, "attending": [2]},
}


def attends(c, layer):
    return layer in c["attending"] if "attending" in c else layer % 4 == 3


def put(w, rng, name, *shape, kind="bf16", around=0.0):
    """Matrices are 1 / sqrt(inputs) times normal numbers; vectors a number and a tenth of a normal one. Embeddings of tokens that are
    no words are small, so that a model, whose head is the same matrix, writes words alone."""
    x = rng.standard_normal(shape, np.float32)
    x = around + x * np.float32(0.1 if len(shape) == 1 or kind == "f32" else shape[-1] ** -0.5)
    if name == "token_embd.weight":
        x[: len(SPECIAL) + 256] *= np.float32(0.01)
    if kind == "f32" or len(shape) == 1:
        w.add_tensor(name, x.astype(np.float32))
    else:
        w.add_tensor(name, bf16_of(x).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def put_attention(w, rng, c, at):
    q, kv, d = c["heads"] * c["dim"], c["kv"] * c["dim"], c["width"]
    put(w, rng, f"{at}.attn_q.weight", q * (2 if c["arch"] == "qwen35" else 1), d)  # Qwen3.5: with gates
    put(w, rng, f"{at}.attn_k.weight", kv, d)
    put(w, rng, f"{at}.attn_v.weight", kv, d)
    put(w, rng, f"{at}.attn_output.weight", d, q)
    for part in "qk":
        put(w, rng, f"{at}.attn_{part}_norm.weight", c["dim"], around=1)


def put_delta(w, rng, c, at):
    keys, values, d = c["keys"] * c["state"], c["values"] * c["state"], c["width"]
    put(w, rng, f"{at}.attn_qkv.weight", 2 * keys + values, d)
    put(w, rng, f"{at}.attn_gate.weight", values, d)
    put(w, rng, f"{at}.ssm_beta.weight", c["values"], d)
    put(w, rng, f"{at}.ssm_alpha.weight", c["values"], d)
    put(w, rng, f"{at}.ssm_conv1d.weight", 2 * keys + values, 4, kind="f32")
    put(w, rng, f"{at}.ssm_dt.bias", c["values"])
    put(w, rng, f"{at}.ssm_a", c["values"], around=-1)
    put(w, rng, f"{at}.ssm_norm.weight", c["state"], around=1)
    put(w, rng, f"{at}.ssm_out.weight", d, values)


def put_conv(w, rng, c, at):
    d = c["width"]
    put(w, rng, f"{at}.shortconv.in_proj.weight", 3 * d, d)
    put(w, rng, f"{at}.shortconv.conv.weight", d, 3, kind="f32")
    put(w, rng, f"{at}.shortconv.out_proj.weight", d, d)


def put_tensors(w, rng, c):
    d, lfm2 = c["width"], c["arch"] == "lfm2"
    put(w, rng, "token_embd.weight", c["vocab"], d)
    put(w, rng, "token_embd_norm.weight" if lfm2 else "output_norm.weight", d, around=1)
    for layer in range(c["layers"]):
        at = f"blk.{layer}"
        put(w, rng, f"{at}.attn_norm.weight", d, around=1)
        put(w, rng, f"{at}.{'ffn_norm' if lfm2 else 'post_attention_norm'}.weight", d, around=1)
        (put_attention if attends(c, layer) else put_conv if lfm2 else put_delta)(w, rng, c, at)
        put(w, rng, f"{at}.ffn_gate.weight", c["ff"], d)
        put(w, rng, f"{at}.ffn_up.weight", c["ff"], d)
        put(w, rng, f"{at}.ffn_down.weight", d, c["ff"])


def describe(w, c):
    w.add_context_length(131072)
    w.add_embedding_length(c["width"])
    w.add_block_count(c["layers"])
    w.add_feed_forward_length(c["ff"])
    w.add_head_count(c["heads"])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_vocab_size(c["vocab"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if c["arch"] == "lfm2":
        w.add_head_count_kv([c["kv"] if attends(c, i) else 0 for i in range(c["layers"])])
        w.add_uint32("lfm2.shortconv.l_cache", 3)
        w.add_rope_freq_base(1e6)
        return
    w.add_head_count_kv(c["kv"])
    w.add_key_length(c["dim"])
    w.add_value_length(c["dim"])
    w.add_rope_freq_base(1e7)
    w.add_rope_dimension_count(c["dim"] // 4)
    pairs = c["dim"] // 8
    w.add_array("qwen35.rope.dimension_sections", [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    for key, value in {"conv_kernel": 4, "state_size": c["state"], "group_count": c["keys"], "time_step_rank": c["values"],
                       "inner_size": c["values"] * c["state"]}.items():
        w.add_uint32(f"qwen35.ssm.{key}", value)
    w.add_uint32("qwen35.full_attention_interval", 4)


def vocabulary(count):
    """A blank with letters behind it, and the merges that make it: a text of such words becomes the tokens that it was written of."""
    found = []
    for size in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=size):
            if len(found) == count:
                return found
            found.append(("\u0120" + "".join(letters[:-1]), letters[-1]))


def put_tokenizer(w, vocab):
    letters = byte_letters()
    merges = vocabulary(vocab - len(SPECIAL) - len(letters))
    names = [*SPECIAL, *letters, *map("".join, merges)]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(names)
    w.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (vocab - len(SPECIAL)))
    w.add_token_merges(list(map(" ".join, merges)))
    w.add_eos_token_id(2)
    w.add_add_bos_token(False)
    w.add_chat_template(CHATML)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("shape", choices=SHAPES)
    ap.add_argument("file")
    a = ap.parse_args()
    c = SHAPES[a.shape]
    w = gguf.GGUFWriter(a.file, c["arch"])
    describe(w, c)
    put_tokenizer(w, c["vocab"])
    put_tensors(w, np.random.default_rng(1), c)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
