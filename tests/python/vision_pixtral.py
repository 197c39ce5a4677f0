"""Pixtral (arXiv 2410.07073) and Mistral Small 3.1 in float64 numpy, written from the paper and the classes of transformers, not
from the C code. Also tiny random ones, as directories and with the encoder in a GGUF file."""
import json
import math

import numpy as np
from encoder import softmax, write_gguf
from reference_model import Reference, load_tensors
from safetensors.numpy import save_file
from vision_model import PLAIN, TEXT as LLAMA, permute, write_text_gguf, write_tokenizer
from vision_qwen import gelu, silu

MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
VOCAB = PLAIN + len(MARKS)
TEXT = {**LLAMA, "model_type": "mistral", "vocab_size": VOCAB, "head_dim": 16, "sliding_window": None}
VISION = {"model_type": "pixtral", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80,
          "image_size": 48, "patch_size": 4, "num_channels": 3, "hidden_act": "silu", "rope_theta": 10000.0}
ARCHITECTURES = {"llava": "LlavaForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration"}
MERGE = {"llava": 1, "mistral3": 2}
FRONTS = {"llava": ("", "language_model.model.", "language_model."), "mistral3": ("model.", "model.language_model.", "")}
PROCESSOR = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4},
             "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '[IMG]' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}")
EPS = 1e-5


def rms_norm(x, weight, eps=EPS):
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * weight


class PixtralVision:
    """The encoder and the projector of a directory."""

    def __init__(self, directory):
        config = json.loads((directory / "config.json").read_text())
        self.kind, self.config = config["model_type"], config["vision_config"]
        self.merge = config.get("spatial_merge_size", 1)
        self.layers = self.config["num_hidden_layers"] + 1 + config["vision_feature_layer"]
        self.text_eps = config["text_config"]["rms_norm_eps"]
        self.act = {"silu": silu, "gelu": gelu}[self.config["hidden_act"]]
        processor = json.loads((directory / "preprocessor_config.json").read_text())
        self.mean, self.deviation = (np.array(processor[f"image_{name}"]) for name in ("mean", "std"))
        self.t = {name.removeprefix("model."): t for name, t in load_tensors(directory / "model.safetensors").items()}

    def linear(self, name, x):
        return x @ self.t[name + ".weight"].T + self.t.get(name + ".bias", 0)

    def rows(self, tile):
        """A tile's rows of embeddings, [tokens, width]; `tile` has bytes, [3, height, width]."""
        size = self.config["patch_size"]
        pixels = (tile / 255 - self.mean[:, None, None]) / self.deviation[:, None, None]
        high, wide = tile.shape[1] // size, tile.shape[2] // size
        patches = pixels.reshape(3, high, size, wide, size).transpose(1, 3, 0, 2, 4).reshape(high * wide, -1)
        kernel = self.t["vision_tower.patch_conv.weight"]
        x = rms_norm(patches @ kernel.reshape(len(kernel), -1).T, self.t["vision_tower.ln_pre.weight"])
        grid = np.stack(np.meshgrid(np.arange(high), np.arange(wide), indexing="ij"), -1).reshape(-1, 2)
        for i in range(self.layers):
            x = self.layer(f"vision_tower.transformer.layers.{i}.", x, grid)
        return self.project(x, high, wide)

    def rotate(self, x, grid):
        """x: [patches, heads, head_dim]. Even frequencies turn by the row, odd ones by the column."""
        half = x.shape[-1] // 2
        inverse = self.config["rope_theta"] ** -(np.arange(half) / half)
        angle = np.concatenate([grid[:, :1] * inverse[0::2], grid[:, 1:] * inverse[1::2]], -1)[:, None]
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def layer(self, name, x, grid):
        y = rms_norm(x, self.t[name + "attention_norm.weight"])
        q, k, v = (self.linear(f"{name}attention.{p}_proj", y).reshape(len(x), self.config["num_attention_heads"], -1) for p in "qkv")
        weights = softmax(np.einsum("qhd,khd->hqk", self.rotate(q, grid), self.rotate(k, grid)) / math.sqrt(q.shape[-1]))
        x = x + self.linear(name + "attention.o_proj", np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))
        y, mlp = rms_norm(x, self.t[name + "ffn_norm.weight"]), name + "feed_forward."
        return x + self.linear(mlp + "down_proj", self.act(self.linear(mlp + "gate_proj", y)) * self.linear(mlp + "up_proj", y))

    def project(self, x, high, wide):
        name, m = "multi_modal_projector.", self.merge
        if self.kind == "mistral3":
            x = rms_norm(x, self.t[name + "norm.weight"], self.text_eps)
            # unfold: the numbers of a square's patches, number after number of a patch
            squares = x.reshape(high // m, m, wide // m, m, -1).transpose(0, 2, 4, 1, 3).reshape(high * wide // m ** 2, -1)
            x = self.linear(name + "patch_merger.merging_layer", squares)
        return self.linear(name + "linear_2", gelu(self.linear(name + "linear_1", x)))


class PixtralReference(Reference):
    """The whole model. A picture that is shown gets token ids behind the vocabulary, whose embeddings are its rows."""

    def __init__(self, directory, text):
        """`text`: a folder for the text part as a directory of its own."""
        text.mkdir(parents=True, exist_ok=True)
        config = json.loads((directory / "config.json").read_text())
        _, inner, outer = FRONTS[config["model_type"]]
        (text / "config.json").write_text(json.dumps(config["text_config"]))
        save_file({"model." + name.removeprefix(inner) if name.startswith(inner) else name.removeprefix(outer): t.astype(np.float32)
                   for name, t in load_tensors(directory / "model.safetensors").items()
                   if "vision_tower" not in name and "projector" not in name}, text / "model.safetensors")
        super().__init__(text, gates="")
        self.vision, self.merge = PixtralVision(directory), MERGE[config["model_type"]]

    def show(self, pixels, marks):
        """The prompt's part of a picture of bytes [height, width, 3]; `marks`: the ids of MARKS."""
        table = self.tensors["model.embed_tokens.weight"]
        rows = self.vision.rows(pixels.transpose(2, 0, 1))
        self.tensors["model.embed_tokens.weight"] = np.concatenate([table, rows])
        wide = pixels.shape[1] // (VISION["patch_size"] * self.merge)
        ids = []
        for first in range(0, len(rows), wide):
            ids += [*range(len(table) + first, len(table) + first + wide), marks[1]]
        return [*ids[:-1], marks[2]]


# --- tiny random models -----------------------------------------------------------------------------------------------

def shapes(kind, text):
    """Names and shapes of a tiny model's tensors."""
    front, inner, outer = FRONTS[kind]
    d, ff = TEXT["hidden_size"], TEXT["intermediate_size"]
    q, kv = (text["head_dim"] * text[f"num_{name}_heads"] for name in ("attention", "key_value"))
    out = {inner + "embed_tokens.weight": (VOCAB, d), outer + "lm_head.weight": (VOCAB, d), inner + "norm.weight": (d,)}
    for i in range(TEXT["num_hidden_layers"]):
        for part, shape in (("self_attn.q_proj", (q, d)), ("self_attn.k_proj", (kv, d)), ("self_attn.v_proj", (kv, d)),
                            ("self_attn.o_proj", (d, q)), ("mlp.gate_proj", (ff, d)), ("mlp.up_proj", (ff, d)),
                            ("mlp.down_proj", (d, ff)), ("input_layernorm", (d,)), ("post_attention_layernorm", (d,))):
            out[f"{inner}layers.{i}.{part}.weight"] = shape
    w, vff, size = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    tower, projector = front + "vision_tower.", front + "multi_modal_projector."
    out[tower + "patch_conv.weight"], out[tower + "ln_pre.weight"] = (w, 3, size, size), (w,)
    for i in range(VISION["num_hidden_layers"]):
        for part, shape in (("attention.q_proj", (w, w)), ("attention.k_proj", (w, w)), ("attention.v_proj", (w, w)),
                            ("attention.o_proj", (w, w)), ("feed_forward.gate_proj", (vff, w)), ("feed_forward.up_proj", (vff, w)),
                            ("feed_forward.down_proj", (w, vff)), ("attention_norm", (w,)), ("ffn_norm", (w,))):
            out[f"{tower}transformer.layers.{i}.{part}.weight"] = shape
    if kind == "mistral3":
        out[projector + "norm.weight"], out[projector + "patch_merger.merging_layer.weight"] = (w,), (w, w * MERGE[kind] ** 2)
    for part, shape in (("linear_1", (d, w)), ("linear_2", (d, d))):
        out[f"{projector}{part}.weight"] = shape
        if kind == "llava":
            out[f"{projector}{part}.bias"] = (d,)
    return out


def write_pixtral(directory, kind, seed=1, root=None, **fields):
    """A directory with a tiny random model; `root`: fields of config.json, `fields`: those of its vision_config."""
    directory.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes(kind, (root or {}).get("text_config", TEXT)).items():
        numbers = random.standard_normal(shape) * (0.2 if len(shape) == 1 else 1.2 / math.sqrt(math.prod(shape[1:])))
        if "norm" in name or "ln_pre" in name:
            numbers = numbers + 1
        tensors[name] = numbers.astype(np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "image_token_index": PLAIN, "tie_word_embeddings": False,
              "torch_dtype": "float32", "vision_feature_layer": -1, "projector_hidden_act": "gelu",
              "multimodal_projector_bias": kind == "llava", "text_config": TEXT, "vision_config": {**VISION, **fields},
              **({"spatial_merge_size": 2} if kind == "mistral3" else {"vision_feature_select_strategy": "full"}), **(root or {})}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_tokenizer(directory, MARKS, TEMPLATE)
    return directory


# --- GGUF -------------------------------------------------------------------------------------------------------------

NAMES = {"vision_tower.patch_conv": "v.patch_embd", "vision_tower.ln_pre": "v.pre_ln", "multi_modal_projector.norm": "mm.input_norm",
         "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger", "multi_modal_projector.linear_1": "mm.1",
         "multi_modal_projector.linear_2": "mm.2"}
LAYER_NAMES = {"attention.q_proj": "attn_q", "attention.k_proj": "attn_k", "attention.v_proj": "attn_v", "attention.o_proj": "attn_out",
               "attention_norm": "ln1", "ffn_norm": "ln2", "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up",
               "feed_forward.down_proj": "ffn_down"}


def write_pixtral_mmproj(directory, path, **metadata):
    """The directory's encoder as a GGUF file, as converters write it: rows of queries and keys in pairs, and the embedding of
    [IMG_BREAK], which is the text model's."""
    config = json.loads((directory / "config.json").read_text())
    v, out = config["vision_config"], {}
    for name, t in load_tensors(directory / "model.safetensors").items():
        stem, end = name.removeprefix("model.").rsplit(".", 1)
        if stem.endswith("embed_tokens"):
            out["v.token_embd.img_break"] = t[PLAIN + 1]
        elif stem.startswith("vision_tower.transformer."):
            _, _, _, layer, part = stem.split(".", 4)
            out[f"v.blk.{layer}.{LAYER_NAMES[part]}.{end}"] = permute(t, v["num_attention_heads"]) if part[-6:] in ("q_proj", "k_proj") else t
        elif stem in NAMES:
            out[f"{NAMES[stem]}.{end}"] = t
    values = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True, "clip.projector_type": "pixtral",
              f"clip.use_{v['hidden_act']}": True, "clip.vision.projection_dim": TEXT["hidden_size"],
              "clip.vision.image_size": PROCESSOR["size"]["longest_edge"], "clip.vision.patch_size": v["patch_size"],
              "clip.vision.embedding_length": v["hidden_size"], "clip.vision.feed_forward_length": v["intermediate_size"],
              "clip.vision.block_count": v["num_hidden_layers"], "clip.vision.attention.head_count": v["num_attention_heads"],
              "clip.vision.attention.layer_norm_epsilon": EPS, "clip.vision.spatial_merge_size": config.get("spatial_merge_size"),
              "clip.vision.image_mean": PROCESSOR["image_mean"], "clip.vision.image_std": PROCESSOR["image_std"]}
    return write_gguf(path, {k: v for k, v in {**values, **metadata}.items() if v is not None},
                      {name: np.ascontiguousarray(t, np.float32) for name, t in out.items()})


def write_pixtral_text(directory, path):
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    return write_text_gguf(directory, path, front=FRONTS[kind][1], outer=FRONTS[kind][2], vocab=VOCAB, template=TEMPLATE)
