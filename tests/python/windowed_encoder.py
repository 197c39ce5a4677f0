"""Encoders with windows in float64 numpy, written from the models' papers and the classes of transformers, not from the C code:
ModernBERT and EmbeddingGemma (Gemma 3 that reads both ways). Most layers see the tokens of a window around a token and rotate
by a base of their own. Also tiny random models of both, as directories and as GGUF files, and sentence-transformers' Dense modules."""
import json
import math

import numpy as np
from encoder import WORDS, gelu, rotate, softmax, wordpiece_metadata, write_gguf, write_tokenizer
from reference_model import load_tensors
from safetensors.numpy import save_file

WINDOWED = ["modernbert", "gemma3_text"]


def attend(q, k, v, scale, window):
    """q, k, v: [tokens, heads, numbers], perhaps fewer heads of k and v; `window`: tokens on both sides together, None: all."""
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], 1) for a in (k, v))
    products = np.einsum("qhd,khd->hqk", q, k) * scale
    if window:
        apart = np.abs(np.arange(len(q))[:, None] - np.arange(len(q)))
        products = np.where(apart <= window // 2, products, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(products), v).reshape(len(q), -1)


def gelu_tanh(x):
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def scaled_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + weight)


class WindowedEncoder:
    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        tensors = load_tensors(directory / "model.safetensors")
        self.t = {name.removeprefix("model."): value for name, value in tensors.items()}
        self.modern = self.config["model_type"] == "modernbert"

    def norm(self, x, name):
        weight = self.t[name + ".weight"]
        if not self.modern:
            return scaled_norm(x, weight, self.config["rms_norm_eps"])
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + self.config["norm_eps"]) * weight

    def modern_layer(self, i, x):
        c, t, name = self.config, self.t, f"layers.{i}."
        heads, every = c["num_attention_heads"], i % 3 == 0
        inputs = self.norm(x, name + "attn_norm") if i else x
        q, k, v = (a.reshape(len(x), heads, -1) for a in np.split(inputs @ t[name + "attn.Wqkv.weight"].T, 3, -1))
        q, k = (rotate(a, 160000 if every else 10000) for a in (q, k))
        x = x + attend(q, k, v, q.shape[-1] ** -0.5, None if every else c["local_attention"]) @ t[name + "attn.Wo.weight"].T
        gate, up = np.split(self.norm(x, name + "mlp_norm") @ t[name + "mlp.Wi.weight"].T, 2, -1)
        return x + (gelu(gate) * up) @ t[name + "mlp.Wo.weight"].T

    def gemma_layer(self, i, x):
        c, t, name = self.config, self.t, f"layers.{i}."
        every, inputs = (i + 1) % 6 == 0, self.norm(x, name + "input_layernorm")
        q, k, v = ((inputs @ t[f"{name}self_attn.{p}_proj.weight"].T).reshape(len(x), -1, c["head_dim"]) for p in "qkv")
        q, k = (rotate(self.norm(a, f"{name}self_attn.{p}_norm"), 1e6 if every else 10000) for a, p in ((q, "q"), (k, "k")))
        y = attend(q, k, v, c["query_pre_attn_scalar"] ** -0.5, None if every else c["sliding_window"])
        x = x + self.norm(y @ t[name + "self_attn.o_proj.weight"].T, name + "post_attention_layernorm")
        inputs = self.norm(x, name + "pre_feedforward_layernorm")
        y = gelu_tanh(inputs @ t[name + "mlp.gate_proj.weight"].T) * (inputs @ t[name + "mlp.up_proj.weight"].T)
        return x + self.norm(y @ t[name + "mlp.down_proj.weight"].T, name + "post_feedforward_layernorm")

    def hidden(self, ids):
        """Outputs of the last norm."""
        if self.modern:
            x = self.norm(self.t["embeddings.tok_embeddings.weight"][ids], "embeddings.norm")
        else:
            x = self.t["embed_tokens.weight"][ids] * math.sqrt(self.config["hidden_size"])
        for i in range(self.config["num_hidden_layers"]):
            x = self.modern_layer(i, x) if self.modern else self.gemma_layer(i, x)
        return self.norm(x, "final_norm" if self.modern else "norm")


# --- tiny random models -----------------------------------------------------------------------------------------------

D, FF, KV_HEADS, HEAD = 32, 96, 4, 8
HEADS = {"modernbert": 4, "gemma3_text": 8}
LAYERS = {"modernbert": 4, "gemma3_text": 7}


def shapes(kind):
    if kind == "modernbert":
        out = {"embeddings.tok_embeddings.weight": (len(WORDS), D), "embeddings.norm.weight": (D,), "final_norm.weight": (D,)}
        for i in range(LAYERS[kind]):
            name = f"layers.{i}."
            out |= {name + "attn.Wqkv.weight": (3 * D, D), name + "attn.Wo.weight": (D, D), name + "mlp_norm.weight": (D,),
                    name + "mlp.Wi.weight": (2 * FF, D), name + "mlp.Wo.weight": (D, FF)}
            if i:
                out[name + "attn_norm.weight"] = (D,)
        return out
    out = {"embed_tokens.weight": (len(WORDS), D), "norm.weight": (D,)}
    for i in range(LAYERS[kind]):
        name = f"layers.{i}."
        out |= {name + "self_attn.q_proj.weight": (HEADS[kind] * HEAD, D), name + "self_attn.k_proj.weight": (KV_HEADS * HEAD, D),
                name + "self_attn.v_proj.weight": (KV_HEADS * HEAD, D), name + "self_attn.o_proj.weight": (D, HEADS[kind] * HEAD),
                name + "mlp.gate_proj.weight": (FF, D), name + "mlp.up_proj.weight": (FF, D), name + "mlp.down_proj.weight": (D, FF),
                name + "self_attn.q_norm.weight": (HEAD,), name + "self_attn.k_norm.weight": (HEAD,)}
        out |= {f"{name}{norm}_layernorm.weight": (D,) for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")}
    return out


CONFIGS = {
    "modernbert": {"architectures": ["ModernBertModel"], "hidden_activation": "gelu", "norm_eps": 1e-5, "norm_bias": False,
                   "attention_bias": False, "mlp_bias": False, "local_attention": 16, "global_attn_every_n_layers": 3,
                   "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "pad_token_id": 0, "max_position_embeddings": 160},
    "gemma3_text": {"architectures": ["Gemma3TextModel"], "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
                    "use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": HEAD, "head_dim": HEAD,
                    "num_key_value_heads": KV_HEADS, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                    "attention_bias": False, "max_position_embeddings": 160, "bos_token_id": 2, "eos_token_id": 3}}


def write_windowed(directory, kind, prefix="", seed=1, **fields):
    """A directory with a tiny random model; `prefix`: in front of the tensors' names, as files with a head have it."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(kind).items():
        numbers = random.standard_normal(shape) * (0.5 if len(shape) > 1 else 0.2)
        tensors[prefix + name] = (numbers + (kind == "modernbert" and len(shape) == 1)).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({
        "model_type": kind, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS[kind], "num_attention_heads": HEADS[kind],
        "vocab_size": len(WORDS), "dtype": "float32", **CONFIGS[kind], **fields}))
    write_tokenizer(directory)
    return directory


# --- sentence-transformers --------------------------------------------------------------------------------------------


def add_modules(directory, *dense, pooling="mean", seed=2):
    """The modules of sentence-transformers; `dense`: (numbers, bias, activation) of each Dense module behind the pooling."""
    random, width = np.random.default_rng(seed), D
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (directory / "1_Pooling").mkdir()
    flag = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}[pooling]
    (directory / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": D, flag: True}))
    for i, (numbers, bias, activation) in enumerate(dense):
        folder = directory / f"{i + 2}_Dense"
        folder.mkdir()
        tensors = {"linear.weight": random.standard_normal((numbers, width)) * 0.2}
        if bias:
            tensors["linear.bias"] = random.standard_normal(numbers) * 0.1
        save_file({name: t.astype(np.float32) for name, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"in_features": width, "out_features": numbers, "bias": bias,
                                                        "activation_function": f"torch.nn.modules.{activation}"}))
        modules.append((folder.name, "Dense"))
        width = numbers
    modules.append((f"{len(dense) + 2}_Normalize", "Normalize"))
    (directory / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"} for i, (path, name) in enumerate(modules)]))
    return directory


def end_vector(directory, vector):
    """Applies the Dense modules."""
    for folder in sorted(directory.glob("*_Dense")):
        settings, t = json.loads((folder / "config.json").read_text()), load_tensors(folder / "model.safetensors")
        vector = t["linear.weight"] @ vector + t.get("linear.bias", 0)
        vector = np.tanh(vector) if settings["activation_function"].endswith("Tanh") else vector
    return vector


# --- GGUF -------------------------------------------------------------------------------------------------------------

NAMES = {"embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm", "final_norm": "output_norm",
         "attn_norm": "attn_norm", "attn.Wqkv": "attn_qkv", "attn.Wo": "attn_output", "mlp_norm": "ffn_norm", "mlp.Wi": "ffn_up",
         "mlp.Wo": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
         "post_feedforward_layernorm": "post_ffw_norm", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", **{f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"},
         **{f"self_attn.{p}_norm": f"attn_{p}_norm" for p in "qk"}}
ARCHES = {"modernbert": "modern-bert", "gemma3_text": "gemma-embedding"}


def gguf_name(name):
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    inside = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    return f"{inside}{NAMES['.'.join(parts[2:] if inside else parts)]}.weight"


def windowed_to_gguf(directory, path, **metadata):
    """Converts a tiny model, as converters do: Gemma's norms have their 1, and keys that are defaults are absent."""
    c = json.loads((directory / "config.json").read_text())
    kind = c["model_type"]
    arch, gemma = ARCHES[kind], kind == "gemma3_text"
    tensors = {gguf_name(n): (t + (gemma and t.ndim == 1)).astype(np.float32)
               for n, t in load_tensors(directory / "model.safetensors").items()}
    for i, folder in enumerate(sorted(directory.glob("*_Dense"))):
        tensors[f"dense_{i + 2}.weight"] = load_tensors(folder / "model.safetensors")["linear.weight"].astype(np.float32)
        metadata[f"{arch}.dense_{i + 2}_feat_out"] = len(tensors[f"dense_{i + 2}.weight"])
    values = {"general.architecture": arch, f"{arch}.block_count": c["num_hidden_layers"], f"{arch}.context_length": 160,
              f"{arch}.embedding_length": D, f"{arch}.feed_forward_length": FF, f"{arch}.attention.head_count": HEADS[kind],
              f"{arch}.pooling_type": 1, f"{arch}.attention.sliding_window": 16, **wordpiece_metadata()}
    if gemma:
        values |= {f"{arch}.attention.head_count_kv": KV_HEADS, f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
                   f"{arch}.attention.key_length": HEAD, f"{arch}.attention.value_length": HEAD, f"{arch}.rope.freq_base": 1000000.0}
    else:
        values |= {f"{arch}.attention.layer_norm_epsilon": 1e-5, f"{arch}.attention.causal": False,
                   f"{arch}.attention.sliding_window_pattern": 3, f"{arch}.rope.freq_base": 160000.0, f"{arch}.rope.scaling.type": "none"}
    return write_gguf(path, {**values, **metadata}, tensors)
