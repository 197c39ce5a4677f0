"""The encoders of Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL in float64 numpy, written from the paper and the classes of
transformers, not from the C code. Also tiny random ones, as directories and as GGUF files."""
import json
import math

import numpy as np
from encoder import layer_norm, softmax, write_gguf
from reference_model import load_tensors
from safetensors.numpy import save_file
from vision_model import gelu_tanh

TEXT_WIDTH = 64
VISION = {
    "qwen2_5_vl": {"depth": 4, "hidden_size": 48, "intermediate_size": 76, "num_heads": 4, "in_channels": 3, "patch_size": 4,
                   "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 24, "out_hidden_size": TEXT_WIDTH,
                   "fullatt_block_indexes": [1, 3], "hidden_act": "silu"},
    "qwen3_vl": {"depth": 4, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "in_channels": 3, "patch_size": 4,
                 "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": TEXT_WIDTH,
                 "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2], "hidden_act": "gelu_pytorch_tanh"}}
VISION["qwen3_5"] = {k: v for k, v in VISION["qwen3_vl"].items() if k != "deepstack_visual_indexes"}
ARCHITECTURES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
                 "qwen3_5": "Qwen3_5ForConditionalGeneration"}
FRONTS = {"qwen2_5_vl": "visual.", "qwen3_vl": "model.visual.", "qwen3_5": "model.visual."}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": 8192, "patch_size": 4,
             "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
EPS = 1e-6


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x):
    return x / (1 + np.exp(-x))


class QwenVision:
    """The encoder of a directory."""

    def __init__(self, directory):
        config = json.loads((directory / "config.json").read_text())
        self.kind, self.config = config["model_type"], config["vision_config"]
        self.windows = self.kind == "qwen2_5_vl"
        processor = json.loads((directory / "preprocessor_config.json").read_text())
        self.mean, self.deviation = (np.array(processor[f"image_{name}"]) for name in ("mean", "std"))
        front = FRONTS[self.kind]
        self.t = {name.removeprefix(front): t for name, t in load_tensors(directory / "model.safetensors").items()
                  if name.startswith(front)}

    def linear(self, name, x):
        return x @ self.t[name + ".weight"].T + self.t[name + ".bias"]

    def norm(self, name, x):
        if self.windows:
            return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + EPS) * self.t[name + ".weight"]
        return layer_norm(x, self.t, name, EPS)

    def rows(self, tile):
        """A tile's rows of embeddings, [tokens, 1 + deep, width]; `tile` has bytes, [3, height, width]."""
        c, size = self.config, self.config["patch_size"]
        pixels = (tile / 255 - self.mean[:, None, None]) / self.deviation[:, None, None]
        high, wide = tile.shape[1] // size, tile.shape[2] // size
        patches = pixels.reshape(3, high, size, wide, size).transpose(1, 3, 0, 2, 4)
        video = np.stack([patches, patches], 3).reshape(high * wide, -1)  # each frame is the picture
        kernel = self.t["patch_embed.proj.weight"]
        x = video @ kernel.reshape(len(kernel), -1).T + self.t.get("patch_embed.proj.bias", 0)
        if "pos_embed.weight" in self.t:
            x = x + self.positions(high, wide)
        self.grid = np.stack(np.meshgrid(np.arange(high), np.arange(wide), indexing="ij"), -1).reshape(-1, 2)
        deep = []
        for i in range(c["depth"]):
            x = self.layer(i, x)
            if i in c.get("deepstack_visual_indexes", []):
                deep.append(self.merge(f"deepstack_merger_list.{len(deep)}", x, high, wide, together=True))
        return np.stack([self.merge("merger", x, high, wide), *deep], 1)

    def positions(self, high, wide):
        """The table of positions, stretched over the picture so that corners lie on corners."""
        table = self.t["pos_embed.weight"]
        side = math.isqrt(len(table))
        table = table.reshape(side, side, -1)

        def blend(count):
            at = np.arange(count) * (side - 1) / max(count - 1, 1)
            first = np.floor(at).astype(int)
            weights = np.zeros((count, side))
            weights[np.arange(count), first] += 1 - (at - first)
            weights[np.arange(count), np.minimum(first + 1, side - 1)] += at - first
            return weights

        return np.einsum("yi,xj,ijd->yxd", blend(high), blend(wide), table).reshape(high * wide, -1)

    def rotate(self, x):
        """x: [patches, heads, head_dim]. The first half of the pairs turns by the row, the second by the column."""
        quarter = x.shape[-1] // 4
        inverse = 10000.0 ** -(np.arange(quarter) / quarter)
        angle = (self.grid[:, :, None] * inverse).reshape(len(x), 1, -1)
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def sees(self, layer):
        """Patches that each patch sees."""
        if not self.windows or layer in self.config["fullatt_block_indexes"]:
            return np.ones((len(self.grid),) * 2, bool)
        side = self.config["window_size"] // self.config["spatial_merge_size"] // self.config["patch_size"]
        window = self.grid // (side * self.config["spatial_merge_size"])
        return (window[:, None] == window[None]).all(-1)

    def layer(self, i, x):
        name = f"blocks.{i}."
        y = self.linear(name + "attn.qkv", self.norm(name + "norm1", x))
        q, k, v = y.reshape(len(x), 3, self.config["num_heads"], -1).transpose(1, 0, 2, 3)
        scores = np.einsum("qhd,khd->hqk", self.rotate(q), self.rotate(k)) / math.sqrt(q.shape[-1])
        weights = softmax(np.where(self.sees(i), scores, -np.inf))
        x = x + self.linear(name + "attn.proj", np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))
        y, mlp = self.norm(name + "norm2", x), name + "mlp."
        if self.windows:
            return x + self.linear(mlp + "down_proj", silu(self.linear(mlp + "gate_proj", y)) * self.linear(mlp + "up_proj", y))
        return x + self.linear(mlp + "linear_fc2", gelu_tanh(self.linear(mlp + "linear_fc1", y)))

    def merge(self, name, x, high, wide, together=False):
        m = self.config["spatial_merge_size"]
        norm, first, last = (f"{name}.{part}" for part in (("ln_q", "mlp.0", "mlp.2") if self.windows
                                                           else ("norm", "linear_fc1", "linear_fc2")))
        x = x if together else self.norm(norm, x)
        x = x.reshape(high // m, m, wide // m, m, -1).transpose(0, 2, 1, 3, 4).reshape(high * wide // m ** 2, -1)
        return self.linear(last, gelu(self.linear(first, self.norm(norm, x) if together else x)))


# --- tiny random models -----------------------------------------------------------------------------------------------

def shapes(kind):
    c = VISION[kind]
    w, ff, joined = c["hidden_size"], c["intermediate_size"], c["hidden_size"] * c["spatial_merge_size"] ** 2
    out = {"patch_embed.proj.weight": (w, 3, 2, c["patch_size"], c["patch_size"])}

    def add(name, rows, cols):
        out[name + ".weight"], out[name + ".bias"] = (rows, cols), (rows,)

    def add_norm(name, width):
        out[name + ".weight"] = (width,)
        if kind != "qwen2_5_vl":
            out[name + ".bias"] = (width,)

    if kind != "qwen2_5_vl":
        out["patch_embed.proj.bias"], out["pos_embed.weight"] = (w,), (c["num_position_embeddings"], w)
    for i in range(c["depth"]):
        name = f"blocks.{i}."
        add_norm(name + "norm1", w)
        add_norm(name + "norm2", w)
        add(name + "attn.qkv", 3 * w, w)
        add(name + "attn.proj", w, w)
        if kind == "qwen2_5_vl":
            add(name + "mlp.gate_proj", ff, w)
            add(name + "mlp.up_proj", ff, w)
            add(name + "mlp.down_proj", w, ff)
        else:
            add(name + "mlp.linear_fc1", ff, w)
            add(name + "mlp.linear_fc2", w, ff)
    first, last, norm = ("mlp.0", "mlp.2", "ln_q") if kind == "qwen2_5_vl" else ("linear_fc1", "linear_fc2", "norm")
    mergers = [("merger.", w), *((f"deepstack_merger_list.{i}.", joined) for i in range(len(c.get("deepstack_visual_indexes", []))))]
    for name, width in mergers:
        add_norm(name + norm, width)
        add(name + first, joined, joined)
        add(name + last, TEXT_WIDTH, joined)
    return out


def random_tensors(kind, seed=1):
    """The encoder's tensors under the names of published files."""
    random, out = np.random.default_rng(seed), {}
    for name, shape in shapes(kind).items():
        numbers = random.standard_normal(shape) * (0.3 if len(shape) == 1 else 1.2 / math.sqrt(math.prod(shape[1:])))
        out[FRONTS[kind] + name] = (numbers + ("norm" in name or "ln_q" in name) * name.endswith("weight")).astype(np.float32)
    return out


def write_encoder(directory, kind, config=None, tensors=None, seed=1, **fields):
    """Writes an encoder, with the text model's config and tensors if they are given."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {**(config or {}), "model_type": kind, "architectures": [ARCHITECTURES[kind]], "vision_config": {**VISION[kind], **fields}}
    (directory / "config.json").write_text(json.dumps(whole))
    save_file({**(tensors or {}), **random_tensors(kind, seed)}, directory / "model.safetensors")
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return directory


# --- GGUF -------------------------------------------------------------------------------------------------------------

NAMES = {"pos_embed": "v.position_embd", "merger.ln_q": "v.post_ln", "merger.norm": "v.post_ln", "merger.mlp.0": "mm.0",
         "merger.mlp.2": "mm.2", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "patch_embed.proj": "v.patch_embd"}
LAYER_NAMES = {"norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out", "attn.qkv": "attn_qkv", "mlp.gate_proj": "ffn_gate",
               "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}
DEEP_NAMES = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def gguf_tensors(kind, tensors):
    """As converters name and divide them: two frames of patches, and q, k, v apart in Qwen2.5-VL's files."""
    out = {}
    for name, t in tensors.items():
        stem, end = name.removeprefix(FRONTS[kind]).rsplit(".", 1)
        if stem.startswith("blocks."):
            _, layer, part = stem.split(".", 2)
            if part == "attn.qkv" and kind == "qwen2_5_vl":
                out |= {f"v.blk.{layer}.attn_{p}.{end}": rows for p, rows in zip("qkv", np.split(t, 3))}
            else:
                out[f"v.blk.{layer}.{LAYER_NAMES[part]}.{end}"] = t
        elif stem.startswith("deepstack"):
            _, number, part = stem.split(".", 2)
            layer = VISION[kind]["deepstack_visual_indexes"][int(number)]
            out[f"v.deepstack.{layer}.{DEEP_NAMES[part]}.{end}"] = t
        elif t.ndim == 5:
            out |= {"v.patch_embd.weight": t[:, :, 0], "v.patch_embd.weight.1": t[:, :, 1]}
        else:
            out[f"{NAMES[stem]}.{end}"] = t
    return {name: np.ascontiguousarray(t, np.float32) for name, t in out.items()}


def write_qwen_mmproj(directory, path, **metadata):
    """The directory's encoder as a GGUF file."""
    config = json.loads((directory / "config.json").read_text())
    kind, v = config["model_type"], config["vision_config"]
    front = FRONTS[kind]
    tensors = {n: t for n, t in load_tensors(directory / "model.safetensors").items() if n.startswith(front)}
    values = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
              "clip.vision.projection_dim": TEXT_WIDTH, "clip.vision.patch_size": v["patch_size"],
              "clip.vision.embedding_length": v["hidden_size"], "clip.vision.feed_forward_length": v["intermediate_size"],
              "clip.vision.block_count": v["depth"], "clip.vision.attention.head_count": v["num_heads"],
              "clip.vision.attention.layer_norm_epsilon": EPS, "clip.vision.spatial_merge_size": v["spatial_merge_size"],
              "clip.vision.image_mean": PROCESSOR["image_mean"], "clip.vision.image_std": PROCESSOR["image_std"],
              "clip.vision.image_min_pixels": PROCESSOR["min_pixels"], "clip.vision.image_max_pixels": PROCESSOR["max_pixels"]}
    if kind == "qwen2_5_vl":
        values |= {"clip.projector_type": "qwen2.5vl_merger", "clip.use_silu": True, "clip.vision.image_size": 560,
                   "clip.vision.n_wa_pattern": v["fullatt_block_indexes"][0] + 1, "clip.vision.window_size": v["window_size"]}
    else:
        side = math.isqrt(v["num_position_embeddings"]) * v["patch_size"]
        deep = v.get("deepstack_visual_indexes", [])
        values |= {"clip.projector_type": "qwen3vl_merger", "clip.use_gelu": True, "clip.vision.image_size": side,
                   "clip.vision.is_deepstack_layers": [i in deep for i in range(v["depth"])]}
    return write_gguf(path, {k: v for k, v in {**values, **metadata}.items() if v is not None}, gguf_tensors(kind, tensors))
