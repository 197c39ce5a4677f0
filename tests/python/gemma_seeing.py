"""Gemma 3 that sees pictures (arXiv 2503.19786) in float64 numpy, written from the report and the classes of transformers, not
from the C code. Also tiny random ones, as directories in all layouts of names that are published."""
import json
import math

import numpy as np
from encoder import layer_norm, softmax, write_gguf
from policies.rules import Rule
from policies.sequence import Sequence
from reference_model import Reference, load_tensors, log_softmax, rms_norm, rotate
from safetensors.numpy import save_file
from vision_model import PLAIN, gelu_tanh, gguf_tokenizer, vision_name, write_tokenizer

MARKS = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
VOCAB = PLAIN + len(MARKS)
EDGE, POOL, TILE = 24, 2, 9  # pixels of a tile, patches of a side that a row joins, rows of a tile
TEXT = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 7, "query_pre_attn_scalar": 16, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "eos_token_id": 2, "bos_token_id": 1,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
VISION = {"model_type": "siglip_vision_model", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 80, "image_size": EDGE, "patch_size": 4, "layer_norm_eps": 1e-6, "vision_use_head": False}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
# Beginnings of the names of the text part, the encoder and the projection, in files of different age.
LAYOUTS = {"old": ("language_model.model.", "vision_tower.vision_model.", "multi_modal_projector."),
           "saved": ("language_model.model.", "vision_tower.", "multi_modal_projector."),
           "new": ("model.language_model.", "model.vision_tower.vision_model.", "model.multi_modal_projector.")}


class GemmaVision:
    """SigLIP (arXiv 2303.15343), average pooling, a norm and a projection."""

    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())["vision_config"]
        self.t = {n.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower."): t
                  for n, t in load_tensors(directory / "model.safetensors").items()}

    def linear(self, name, x):
        return x @ self.t[name + ".weight"].T + self.t[name + ".bias"]

    def rows(self, tile):
        """A tile's rows of embeddings; `tile` has bytes, [3, edge, edge]."""
        c, prefix, eps = self.config, "vision_tower.", self.config["layer_norm_eps"]
        side, size = tile.shape[1] // c["patch_size"], c["patch_size"]
        pixels = (tile / 255 - 0.5) / 0.5
        patches = pixels.reshape(3, side, size, side, size).transpose(1, 3, 0, 2, 4).reshape(side * side, -1)
        kernel = self.t[prefix + "embeddings.patch_embedding.weight"]
        x = patches @ kernel.reshape(len(kernel), -1).T + self.t[prefix + "embeddings.patch_embedding.bias"]
        x = x + self.t[prefix + "embeddings.position_embedding.weight"]
        for i in range(c["num_hidden_layers"]):
            x = self.layer(f"{prefix}encoder.layers.{i}.", x, eps)
        x = layer_norm(x, self.t, prefix + "post_layernorm", eps)
        x = x.reshape(side // POOL, POOL, side // POOL, POOL, -1).mean(axis=(1, 3)).reshape(TILE, -1)
        x = rms_norm(x, 1 + self.t["multi_modal_projector.mm_soft_emb_norm.weight"], eps)
        return x @ self.t["multi_modal_projector.mm_input_projection_weight"]

    def layer(self, name, x, eps):
        y = layer_norm(x, self.t, name + "layer_norm1", eps)
        q, k, v = (self.linear(f"{name}self_attn.{p}_proj", y).reshape(len(x), self.config["num_attention_heads"], -1)
                   for p in "qkv")
        weights = softmax(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]))
        x = x + self.linear(name + "self_attn.out_proj", np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))
        y = layer_norm(x, self.t, name + "layer_norm2", eps)
        return x + self.linear(name + "mlp.fc2", gelu_tanh(self.linear(name + "mlp.fc1", y)))


class GemmaReference(Reference):
    """The whole model. A tile that is shown gets token ids behind the vocabulary, whose embeddings are its rows; its queries see
    all of its entries, within the window also those behind them."""

    def __init__(self, directory, text):
        text.mkdir(parents=True, exist_ok=True)
        whole = json.loads((directory / "config.json").read_text())
        c = whole["text_config"]
        (text / "config.json").write_text(json.dumps({**c, "rope_scaling": None}))
        tensors = load_tensors(directory / "model.safetensors")
        front = next(f for f, _, _ in LAYOUTS.values() if f + "norm.weight" in tensors)
        save_file({"model." + name.removeprefix(front): t.astype(np.float32) for name, t in tensors.items()
                   if name.startswith(front)}, text / "model.safetensors")
        self.full = [kind == "full_attention" for kind in c["layer_types"]]
        half = np.arange(0, c["head_dim"], 2) / c["head_dim"]
        self.rotations = [c["rope_theta"] ** -half / c["rope_scaling"]["factor"] if full else c["rope_local_base_freq"] ** -half
                          for full in self.full]
        super().__init__(text, gates="")
        self.vision = GemmaVision(directory)

    def reset(self, rule=Rule()):
        windows = tuple(0 if full else self.config["sliding_window"] for full in self.full)
        self.cache = Sequence(rule, self.layers, self.heads_q, self.heads_kv, self.head_dim,
                              self.config["query_pre_attn_scalar"] ** -0.5, self.stored, self.inv, windows)

    def show(self, tile):
        table, name = self.tensors["model.embed_tokens.weight"], "model.embed_tokens.weight"
        rows = self.vision.rows(tile) / math.sqrt(self.config["hidden_size"])
        self.tensors[name] = np.concatenate([table, rows])
        return list(range(len(table), len(table) + len(rows)))

    def project(self, layer, x, positions):
        name, t = f"model.layers.{layer}.self_attn.", self.tensors
        q, k, v = ((x @ t[name + p + ".weight"].T).reshape(len(x), -1, self.head_dim) for p in ("q_proj", "k_proj", "v_proj"))
        q, k = (rms_norm(y, 1 + t[f"{name}{p}_norm.weight"], self.eps) for y, p in ((q, "q"), (k, "k")))
        angle = positions[:, None] * self.rotations[layer]
        return rotate(q, angle, 1.0), rotate(k, angle, 1.0), v, self.log_beta(layer, x)

    def append(self, ids):
        """Log-probabilities after each of the next tokens; all ids of a tile come in one call."""
        ids, t = np.asarray(ids), self.tensors
        positions = np.arange(self.tokens, self.tokens + len(ids))
        tiles = np.where(ids >= VOCAB, (ids - VOCAB) // TILE, -1)
        self.cache.sight = np.array([positions[tiles == tile][-1] if tile >= 0 else p for p, tile in zip(positions, tiles)])
        x = t["model.embed_tokens.weight"][ids] * math.sqrt(self.config["hidden_size"])

        def norm(name, y):
            return rms_norm(y, 1 + t[name + ".weight"], self.eps)

        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            y = self.attention(layer, norm(name + "input_layernorm", x), positions)
            x = x + norm(name + "post_attention_layernorm", y)
            y = norm(name + "pre_feedforward_layernorm", x)
            gate, up = (y @ t[f"{name}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + norm(name + "post_feedforward_layernorm", (gelu_tanh(gate) * up) @ t[name + "mlp.down_proj.weight"].T)
        self.cache.sight = None
        self.cache.tokens += len(ids)
        return log_softmax(norm("model.norm", x) @ t["model.embed_tokens.weight"][:VOCAB].T)


# --- tiny random models -----------------------------------------------------------------------------------------------


def gemma_shapes(layout, dim):
    """Names and shapes of a tiny model's tensors; `dim`: numbers of a head of the text model."""
    text, vision, projector = LAYOUTS[layout]
    d, ff = TEXT["hidden_size"], TEXT["intermediate_size"]
    q, kv = TEXT["num_attention_heads"] * dim, TEXT["num_key_value_heads"] * dim
    out = {text + "embed_tokens.weight": (VOCAB, d), text + "norm.weight": (d,)}
    for i in range(TEXT["num_hidden_layers"]):
        for part, shape in (("self_attn.q_proj", (q, d)), ("self_attn.k_proj", (kv, d)), ("self_attn.v_proj", (kv, d)),
                            ("self_attn.o_proj", (d, q)), ("self_attn.q_norm", (dim,)), ("self_attn.k_norm", (dim,)),
                            ("mlp.gate_proj", (ff, d)), ("mlp.up_proj", (ff, d)), ("mlp.down_proj", (d, ff)),
                            ("input_layernorm", (d,)), ("post_attention_layernorm", (d,)),
                            ("pre_feedforward_layernorm", (d,)), ("post_feedforward_layernorm", (d,))):
            out[f"{text}layers.{i}.{part}.weight"] = shape
    w, vff, size, side = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"], EDGE // VISION["patch_size"]
    out |= {vision + "embeddings.patch_embedding.weight": (w, 3, size, size), vision + "embeddings.patch_embedding.bias": (w,),
            vision + "embeddings.position_embedding.weight": (side * side, w)}
    for i in range(VISION["num_hidden_layers"]):
        for part, shape in (("self_attn.q_proj", (w, w)), ("self_attn.k_proj", (w, w)), ("self_attn.v_proj", (w, w)),
                            ("self_attn.out_proj", (w, w)), ("mlp.fc1", (vff, w)), ("mlp.fc2", (w, vff)),
                            ("layer_norm1", (w,)), ("layer_norm2", (w,))):
            name = f"{vision}encoder.layers.{i}.{part}."
            out[name + "weight"], out[name + "bias"] = shape, (shape[0],)
    out[vision + "post_layernorm.weight"] = out[vision + "post_layernorm.bias"] = (w,)
    return out | {projector + "mm_soft_emb_norm.weight": (w,), projector + "mm_input_projection_weight": (w, d)}


def write_gemma(directory, layout="old", seed=1, head_dim=TEXT["head_dim"], **fields):
    """A directory with a tiny random model."""
    directory.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), {}
    for name, shape in gemma_shapes(layout, head_dim).items():
        numbers = random.standard_normal(shape) * (0.25 if len(shape) > 1 else 0.2)
        siglip = "layer_norm" in name or "post_layernorm" in name  # other norms are by 1 + w
        tensors[name] = (numbers + (siglip and name.endswith("weight"))).astype(np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": PLAIN,
              "eoi_token_index": PLAIN + 1, "image_token_index": PLAIN + 2, "mm_tokens_per_image": TILE, "torch_dtype": "float32",
              "text_config": {**TEXT, "head_dim": head_dim}, "vision_config": VISION, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Gemma3ImageProcessor", "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None,
        "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": TILE,
        "resample": 2, "rescale_factor": 1 / 255, "size": {"height": EDGE, "width": EDGE}}))
    write_tokenizer(directory, MARKS, TEMPLATE)
    return directory


# --- GGUF -------------------------------------------------------------------------------------------------------------

TEXT_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
              "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
              "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
              "post_feedforward_layernorm": "post_ffw_norm", "embed_tokens": "token_embd", "norm": "output_norm"}


def write_gemma_mmproj(directory, path, exchanged=False, **metadata):
    """The directory's encoder as a GGUF file, as converters write it. `exchanged`: the names of the feed-forward matrices are
    exchanged, as in older files."""
    text, vision, projector = LAYOUTS["old"]
    tensors = {}
    for name, t in load_tensors(directory / "model.safetensors").items():
        if name.startswith(vision):
            name = vision_name("model.vision_model." + name.removeprefix(vision))
            if exchanged:
                name = name.replace("ffn_up", "ffn_x").replace("ffn_down", "ffn_up").replace("ffn_x", "ffn_down")
        elif name.endswith("mm_soft_emb_norm.weight"):
            name, t = "mm.soft_emb_norm.weight", t + 1
        elif name.startswith(projector):
            name = "mm.input_projection.weight"
        else:
            continue
        tensors[name] = t.astype(np.float32)
    values = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
              "clip.projector_type": "gemma3", "clip.use_gelu": True, "clip.vision.projection_dim": TEXT["hidden_size"],
              "clip.vision.image_size": EDGE, "clip.vision.patch_size": VISION["patch_size"],
              "clip.vision.embedding_length": VISION["hidden_size"], "clip.vision.block_count": VISION["num_hidden_layers"],
              "clip.vision.feed_forward_length": VISION["intermediate_size"],
              "clip.vision.attention.head_count": VISION["num_attention_heads"],
              "clip.vision.attention.layer_norm_epsilon": VISION["layer_norm_eps"], "clip.vision.projector.scale_factor": POOL,
              "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    return write_gguf(path, {k: v for k, v in {**values, **metadata}.items() if v is not None}, tensors)


def write_gemma_text_gguf(directory, path):
    """The directory's text model as a GGUF file: norms have their 1."""
    front, out = LAYOUTS["old"][0], {}
    for name, t in load_tensors(directory / "model.safetensors").items():
        if not name.startswith(front):
            continue
        stem = name.removeprefix(front).removesuffix(".weight")
        _, layer, part = stem.split(".", 2) if stem.startswith("layers.") else ("", "", stem)
        out[f"{'blk.' + layer + '.' if layer else ''}{TEXT_NAMES[part]}.weight"] = (t + (t.ndim == 1)).astype(np.float32)
    values = {"general.architecture": "gemma3", "gemma3.block_count": TEXT["num_hidden_layers"],
              "gemma3.context_length": TEXT["max_position_embeddings"], "gemma3.embedding_length": TEXT["hidden_size"],
              "gemma3.feed_forward_length": TEXT["intermediate_size"], "gemma3.vocab_size": VOCAB,
              "gemma3.attention.head_count": TEXT["num_attention_heads"],
              "gemma3.attention.head_count_kv": TEXT["num_key_value_heads"], "gemma3.attention.key_length": TEXT["head_dim"],
              "gemma3.attention.value_length": TEXT["head_dim"], "gemma3.attention.sliding_window": TEXT["sliding_window"],
              "gemma3.attention.sliding_window_pattern": 3, "gemma3.attention.layer_norm_rms_epsilon": TEXT["rms_norm_eps"],
              "gemma3.rope.freq_base": TEXT["rope_theta"], "gemma3.rope.freq_base_swa": TEXT["rope_local_base_freq"],
              "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": TEXT["rope_scaling"]["factor"]}
    return write_gguf(path, {**values, **gguf_tokenizer(directory, VOCAB, TEMPLATE)}, out)
