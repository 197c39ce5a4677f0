"""Models that see pictures (Idefics3, SmolVLM) in float64 numpy, written from the papers (arXiv 2010.11929, 2303.15343,
2408.12637) and the classes of transformers, not from the C code. Also tiny random ones, as directories and with the encoder
in a GGUF file."""
import json
import math
import shutil
from pathlib import Path

import numpy as np
from encoder import layer_norm, softmax, write_gguf
from reference_model import Reference, load_tensors
from safetensors.numpy import save_file

NANO = Path(__file__).resolve().parents[2] / "bundled/keepd-nano"
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
         *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
PLAIN = 259  # keepd-nano's tokens without what its merges make
VOCAB = PLAIN + len(MARKS)
TEXT = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": VOCAB, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1}
VISION = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80, "image_size": 24,
          "patch_size": 4, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
EDGE, MERGE = VISION["image_size"], 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


class Vision:
    """The encoder and the connector of a directory."""

    def __init__(self, directory):
        config = json.loads((directory / "config.json").read_text())
        self.config, self.merge = config["vision_config"], config["scale_factor"]
        processor = json.loads((directory / "preprocessor_config.json").read_text())
        self.mean, self.deviation = (np.array(processor[f"image_{name}"]) for name in ("mean", "std"))
        self.t = load_tensors(directory / "model.safetensors")

    def linear(self, name, x):
        return x @ self.t[name + ".weight"].T + self.t.get(name + ".bias", 0)

    def rows(self, tile):
        """A tile's rows of embeddings; `tile` has bytes, [3, edge, edge]."""
        c, prefix, eps = self.config, "model.vision_model.", self.config["layer_norm_eps"]
        pixels = (tile / 255 - self.mean[:, None, None]) / self.deviation[:, None, None]
        side, size = tile.shape[1] // c["patch_size"], c["patch_size"]
        patches = pixels.reshape(3, side, size, side, size).transpose(1, 3, 0, 2, 4).reshape(side * side, -1)
        kernel = self.t[prefix + "embeddings.patch_embedding.weight"]
        x = patches @ kernel.reshape(len(kernel), -1).T + self.t[prefix + "embeddings.patch_embedding.bias"]
        x = x + self.t[prefix + "embeddings.position_embedding.weight"][self.places(side)]
        for i in range(c["num_hidden_layers"]):
            x = self.layer(f"{prefix}encoder.layers.{i}.", x, eps)
        return self.connect(layer_norm(x, self.t, prefix + "post_layernorm", eps), side)

    def places(self, side):
        """The rows of the table of positions: it is for another number of patches, perhaps."""
        table = self.config["image_size"] // self.config["patch_size"]
        if side == table:
            return np.arange(side * side)
        at = np.minimum(np.arange(side) * table // side, table - 1)
        return (at[:, None] * table + at).reshape(-1)

    def layer(self, name, x, eps):
        y = layer_norm(x, self.t, name + "layer_norm1", eps)
        q, k, v = (self.linear(f"{name}self_attn.{p}_proj", y).reshape(len(x), self.config["num_attention_heads"], -1)
                   for p in "qkv")
        weights = softmax(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]))
        x = x + self.linear(name + "self_attn.out_proj", np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))
        y = layer_norm(x, self.t, name + "layer_norm2", eps)
        return x + self.linear(name + "mlp.fc2", gelu_tanh(self.linear(name + "mlp.fc1", y)))

    def connect(self, x, side):
        m = self.merge
        squares = x.reshape(side // m, m, side // m, m, -1).transpose(0, 2, 1, 3, 4)
        return self.linear("model.connector.modality_projection.proj", squares.reshape((side // m) ** 2, -1))


class SeeingReference(Reference):
    """The whole model. A tile that is shown gets token ids behind the vocabulary, whose embeddings are its rows."""

    def __init__(self, directory, text):
        """`text`: a folder for the text part as a directory of its own, which is what Reference reads."""
        text.mkdir(parents=True, exist_ok=True)
        config = json.loads((directory / "config.json").read_text())
        (text / "config.json").write_text(json.dumps(config["text_config"]))
        tensors = load_tensors(directory / "model.safetensors")
        save_file({name.replace("model.text_model.", "model."): t.astype(np.float32) for name, t in tensors.items()
                   if "vision_model" not in name and "connector" not in name}, text / "model.safetensors")
        super().__init__(text, gates="")
        self.vision = Vision(directory)

    def show(self, tile):
        table = self.tensors["model.embed_tokens.weight"]
        rows = self.vision.rows(tile)
        self.tensors["model.embed_tokens.weight"] = np.concatenate([table, rows])
        return list(range(len(table), len(table) + len(rows)))


# --- tiny random models -----------------------------------------------------------------------------------------------

def shapes(dim):
    """Names and shapes of a tiny model's tensors; `dim`: numbers of a head of the text model."""
    d, ff = TEXT["hidden_size"], TEXT["intermediate_size"]
    q, kv = dim * TEXT["num_attention_heads"], dim * TEXT["num_key_value_heads"]
    out = {"model.text_model.embed_tokens.weight": (VOCAB, d), "lm_head.weight": (VOCAB, d), "model.text_model.norm.weight": (d,)}
    for i in range(TEXT["num_hidden_layers"]):
        name = f"model.text_model.layers.{i}."
        for part, shape in (("self_attn.q_proj", (q, d)), ("self_attn.k_proj", (kv, d)), ("self_attn.v_proj", (kv, d)),
                            ("self_attn.o_proj", (d, q)), ("mlp.gate_proj", (ff, d)), ("mlp.up_proj", (ff, d)),
                            ("mlp.down_proj", (d, ff)), ("input_layernorm", (d,)), ("post_attention_layernorm", (d,))):
            out[f"{name}{part}.weight"] = shape
    w, vff, size, side = (VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"],
                          EDGE // VISION["patch_size"])
    out["model.vision_model.embeddings.patch_embedding.weight"] = (w, 3, size, size)
    out["model.vision_model.embeddings.patch_embedding.bias"] = (w,)
    out["model.vision_model.embeddings.position_embedding.weight"] = (side * side, w)
    for i in range(VISION["num_hidden_layers"]):
        name = f"model.vision_model.encoder.layers.{i}."
        for part, shape in (("self_attn.q_proj", (w, w)), ("self_attn.k_proj", (w, w)), ("self_attn.v_proj", (w, w)),
                            ("self_attn.out_proj", (w, w)), ("mlp.fc1", (vff, w)), ("mlp.fc2", (w, vff)),
                            ("layer_norm1", (w,)), ("layer_norm2", (w,))):
            out[f"{name}{part}.weight"], out[f"{name}{part}.bias"] = shape, (shape[0],)
    out["model.vision_model.post_layernorm.weight"] = out["model.vision_model.post_layernorm.bias"] = (w,)
    out["model.connector.modality_projection.proj.weight"] = (d, w * MERGE * MERGE)
    return out


def write_tokenizer(directory, marks=tuple(MARKS), template=TEMPLATE):
    tokenizer = json.loads((NANO / "tokenizer.json").read_text())
    vocab = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < PLAIN}
    tokenizer["model"].update(vocab=vocab, merges=[])
    tokenizer["added_tokens"] += [{**tokenizer["added_tokens"][0], "id": PLAIN + i, "content": mark}
                                  for i, mark in enumerate(marks)]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(NANO / "tokenizer_config.json", directory)
    (directory / "chat_template.jinja").write_text(template)


def write_model(directory, architecture="Idefics3", splits=True, longest=4 * EDGE, seed=1, head_dim=16, **fields):
    """A directory with a tiny random model. `longest`: pixels of a picture's longer side, once it is resized."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(head_dim).items():
        numbers = random.standard_normal(shape) * (0.25 if len(shape) > 1 else 0.2)
        if "norm" in name and name.endswith("weight"):
            numbers = numbers + 1
        tensors[name] = numbers.astype(np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    kind = architecture.lower()
    config = {"architectures": [architecture + "ForConditionalGeneration"], "model_type": kind, "scale_factor": MERGE,
              "image_token_id": PLAIN, "tie_word_embeddings": False, "torch_dtype": "float32",
              "text_config": {**TEXT, "head_dim": head_dim},
              "vision_config": {**VISION, "model_type": "idefics3_vision" if kind == "idefics3" else "smolvlm_vision"},
              **fields}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Idefics3ImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
        "do_convert_rgb": True, "do_pad": True, "do_image_splitting": splits, "resample": 1, "rescale_factor": 1 / 255,
        "size": {"longest_edge": longest}, "max_image_size": {"longest_edge": EDGE}, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5]}))
    write_tokenizer(directory)
    return directory


# --- GGUF -------------------------------------------------------------------------------------------------------------

VISION_NAMES = {"embeddings.patch_embedding": "patch_embd", "embeddings.position_embedding": "position_embd",
                "post_layernorm": "post_ln", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
                "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2",
                "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}


def vision_name(name):
    if name.startswith("model.connector."):
        return "mm.model.fc.weight"
    stem, end = name.removeprefix("model.vision_model.").rsplit(".", 1)
    if stem.startswith("encoder.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"v.blk.{layer}.{VISION_NAMES[part]}.{end}"
    return f"v.{VISION_NAMES[stem]}.{end}"


def write_mmproj(directory, path, **metadata):
    """The directory's encoder as a GGUF file, as converters write it."""
    config = json.loads((directory / "config.json").read_text())
    processor = json.loads((directory / "preprocessor_config.json").read_text())
    v = config["vision_config"]
    tensors = {vision_name(n): t.astype(np.float32) for n, t in load_tensors(directory / "model.safetensors").items()
               if "vision_model" in n or "connector" in n}
    values = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
              "clip.projector_type": "idefics3", "clip.use_gelu": True,
              "clip.vision.projection_dim": config["text_config"]["hidden_size"], "clip.vision.image_size": v["image_size"],
              "clip.vision.patch_size": v["patch_size"], "clip.vision.embedding_length": v["hidden_size"],
              "clip.vision.feed_forward_length": v["intermediate_size"], "clip.vision.block_count": v["num_hidden_layers"],
              "clip.vision.attention.head_count": v["num_attention_heads"],
              "clip.vision.attention.layer_norm_epsilon": v["layer_norm_eps"],
              "clip.vision.projector.scale_factor": config["scale_factor"],
              "clip.vision.preproc_image_size": processor["size"]["longest_edge"],
              "clip.vision.image_mean": processor["image_mean"], "clip.vision.image_std": processor["image_std"]}
    return write_gguf(path, {k: v for k, v in {**values, **metadata}.items() if v is not None}, tensors)


def permute(rows, heads):
    """q and k as converters to GGUF store them: rows i and i + D/2 of a head beside each other."""
    d = len(rows) // heads
    return rows.reshape(heads, 2, d // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def gguf_tokenizer(directory, vocab, template):
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    words = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    words |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": [words[i] for i in range(vocab)],
            "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(vocab)],
            "tokenizer.ggml.merges": [], "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": template}


def write_text_gguf(directory, path, front="model.text_model.", outer="", vocab=VOCAB, template=TEMPLATE):
    """The directory's text model as a GGUF file. `front`, `outer`: in front of its names, and of lm_head's."""
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    out = {}
    for name, t in load_tensors(directory / "model.safetensors").items():
        if not name.startswith(front) and name != outer + "lm_head.weight":
            continue
        stem = name.removeprefix(front).removeprefix(outer).removesuffix(".weight")
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            heads = {"attn_q": TEXT["num_attention_heads"], "attn_k": TEXT["num_key_value_heads"]}.get(names[part])
            out[f"blk.{layer}.{names[part]}.weight"] = permute(t, heads) if heads else t
        else:
            out[{"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem] + ".weight"] = t
    values = {"general.architecture": "llama", "llama.block_count": TEXT["num_hidden_layers"],
              "llama.context_length": TEXT["max_position_embeddings"], "llama.embedding_length": TEXT["hidden_size"],
              "llama.feed_forward_length": TEXT["intermediate_size"], "llama.vocab_size": vocab,
              "llama.attention.head_count": TEXT["num_attention_heads"],
              "llama.attention.head_count_kv": TEXT["num_key_value_heads"],
              "llama.attention.layer_norm_rms_epsilon": TEXT["rms_norm_eps"], "llama.rope.freq_base": TEXT["rope_theta"],
              "llama.rope.dimension_count": TEXT["hidden_size"] // TEXT["num_attention_heads"],
              **gguf_tokenizer(directory, vocab, template)}
    return write_gguf(path, values, {name: t.astype(np.float32) for name, t in out.items()})
