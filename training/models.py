"""A local Qwen3, Qwen2 or Llama directory of transformers whose attention is ours.

The model's own code runs unchanged: a registered attention function hands q, k and v of every layer to
the object that owns the model.
"""

import functools
import hashlib
import json

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

NAME = "keepd"
FAMILIES = ("qwen3", "qwen2", "llama")
# A layer's tensors in the order of the digests (layer_slots in model/tensors.c): a family has some of them.
IN_LAYER = ("input_layernorm.weight", *(f"self_attn.{p}_proj.weight" for p in "qkv"),
            *(f"self_attn.{p}_proj.bias" for p in "qkv"), "self_attn.q_norm.weight", "self_attn.k_norm.weight",
            "self_attn.o_proj.weight", "self_attn.o_proj.bias", "post_self_attn_layernorm.weight",
            "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
            "mlp.down_proj.weight", "self_attn.sinks", "mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight",
            "mlp.router.bias", "post_mlp_layernorm.weight", "post_feedforward_layernorm.weight")
# Tensors that hold several of these, one behind the other.
FUSED = {f"self_attn.{p}_proj.weight": "self_attn.qkv_proj.weight" for p in "qkv"}
FUSED |= {f"mlp.{p}_proj.weight": "mlp.gate_up_proj.weight" for p in ("gate", "up")}
# Families that rotate neighbouring dimensions, and the part of a head that they rotate by default.
INTERLEAVED = {"glm": 0.5, "glm4": 0.5, "ernie4_5": 1.0}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_json(path):
    """An object in a file."""
    try:
        found = json.loads(path.read_text())
    except ValueError as e:
        raise SystemExit(f"{path}: not JSON: {e}") from None
    if not isinstance(found, dict):
        raise SystemExit(f"{path}: expected an object")
    return found


def read_config(directory):
    """config.json of a base, refused by name when it is none of ours."""
    path = directory / "config.json"
    if not path.exists():
        raise SystemExit(f"{path}: not found; a model directory holds config.json, tokenizer.json and safetensors")
    c = read_json(path)
    if c.get("model_type") not in FAMILIES:
        raise SystemExit(f"{path}: model_type: {c.get('model_type')!r} is not supported: {', '.join(FAMILIES)}")
    if c.get("use_sliding_window"):
        raise SystemExit(f"{path}: use_sliding_window: sliding attention is not supported")
    return c


def read_tensors(directory):
    """{name: safetensors slice} of all weight files; reads nothing yet."""
    files = sorted(f for f in directory.glob("*.safetensors") if f.name != "gates.safetensors")
    if not files:
        raise SystemExit(f"{directory}: no safetensors")
    opened = [safe_open(f, "pt") for f in files]
    return {name: f.get_slice(name) for f in opened for name in f.keys()}


def rows_of(tensors, name, config):
    """(tensor, first row, rows) of a layer's tensor, which may be a part of a fused one; None: there is none."""
    whole = tensors.get(name)
    if whole is not None:
        return whole, 0, whole.get_shape()[0]
    part = name.partition(".")[2].partition(".")[2].partition(".")[2]           # model.layers.N.PART
    whole = tensors.get(name.replace(part, FUSED[part])) if part in FUSED else None
    if whole is None:
        return None
    if "qkv" in FUSED[part]:
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        q, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
        first, count = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[part.split(".")[1][0]]
        return whole, first, count
    half = whole.get_shape()[0] // 2
    return whole, half * part.startswith("mlp.up"), half


def stored_row(config, name, row):
    """The row of a file at which a row of q or k stands. Where pairs of neighbours are rotated, keepd divides them into two halves."""
    partial = INTERLEAVED.get(config.get("model_type"))
    if partial is None or not any(f"self_attn.{p}_proj" in name for p in "qk"):
        return row
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    half, place = int(size * config.get("partial_rotary_factor", partial)) // 2, row % size
    return row - place + 2 * (place % half) + place // half if place < 2 * half else row


def base_digests(directory):
    """The digests by which gates name their base, however it is stored: see model/base_digest.h."""
    tensors, config = read_tensors(directory), read_json(directory / "config.json")
    sums = {"vectors": hashlib.sha256(), "matrices": hashlib.sha256()}
    offset = 1.0 if config.get("model_type", "").startswith("gemma") else 0.0    # Gemma's norms are stored without it

    def add(name):
        found = rows_of(tensors, name, config)
        if found is None:
            return
        whole, first, n = found
        vector = len(whole.get_shape()) == 1
        rows = [stored_row(config, name, row) for row in (range(n) if vector else (0, n // 2, n - 1))]
        for part in [whole[:][rows]] if vector else [whole[first + row:first + row + 1] for row in rows]:
            numbers = part.float() + (offset if vector and "norm" in name else 0.0)
            sums["vectors" if vector else "matrices"].update(numbers.numpy().astype("<f4").tobytes())

    add("model.embed_tokens.weight")
    add("model.norm.weight")
    for layer in range(config["num_hidden_layers"]):
        for name in IN_LAYER:
            add(f"model.layers.{layer}.{name}")
    return {name: h.hexdigest() for name, h in sums.items()}


def causal(q, k, v, scaling):
    """Ordinary causal attention; q [B, Hq, T, d], k and v [B, H, T, d]."""
    g = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1), is_causal=True,
                                          scale=scaling)


def attention(module, query, key, value, attention_mask, scaling=None, **_):
    scaling = scaling or query.shape[-1] ** -0.5
    out = module.keepd.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def register():
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *a, **k: None)     # causality is in the function


class OwnAttention:
    """A base model. What a call sets for `attend` stands until the next call: with checkpointing the
    layers run again during backward."""

    def __init__(self, directory, device="cpu", dtype=torch.float32):
        register()
        read_config(directory)
        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype,
                                                          attn_implementation=NAME).to(device).eval()
        for layer in self.model.model.layers:
            layer.self_attn.keepd = self

    def checkpoint_layers(self):
        """Keeps only each layer's input for backward, and computes the layer again there."""
        for layer in self.model.model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    def hidden(self, ids, positions):
        """[B, T] -> what feeds the output matrix, [B, T, d_model]."""
        return self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    def logits(self, hidden):
        return self.model.lm_head(hidden)

    def attend(self, layer, q, k, v, scaling):
        return causal(q, k, v, scaling)
