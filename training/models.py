"""A local Qwen3, Qwen2 or Llama directory of transformers whose attention is ours.

The model's own code runs unchanged: a registered attention function hands q, k and v of every layer to
the object that owns the model.
"""

import functools
import hashlib
import json

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

NAME = "keepd"
FAMILIES = ("qwen3", "qwen2", "llama")
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


def weights_sha256(directory):
    """Digest that ties gates to a base: of the one weight file, or of the index of a sharded model."""
    single = directory / "model.safetensors"
    path = single if single.exists() else directory / "model.safetensors.index.json"
    if not path.exists():
        raise SystemExit(f"{directory}: neither model.safetensors nor model.safetensors.index.json")
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


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
