"""Models of tests/data/models as GGUF files that the package `gguf` writes, beside their directories: the same bits.

Names, keys and the order of rows are those of llama.cpp's converter. The families are those of multimodal checkpoints
and of today's mixtures; tests/unit/model/test_gguf.c has the others, in every format of numbers."""

import json
import math
import re
import shutil
import sys

import gguf
import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/python"))
from test_golden import PATHS, has_path, run  # noqa: E402

MODELS = ROOT / "tests/data/models"

# Names in a directory, without the layer, and in a file.
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight", "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight", "self_attn.gate_proj.weight": "attn_gate.weight", "mlp.gate.weight": "ffn_gate_inp.weight", "eh_proj.weight": "nextn.eh_proj.weight",
    **{f"self_attn.{p}_proj.{kind}": f"attn_{p}.{kind}" for p in "qkv" for kind in ("weight", "bias")},
    **{f"mlp.{p}_proj.weight": f"ffn_{p}.weight" for p in ("gate", "up", "down")},
    **{f"mlp.experts.{p}_proj": f"ffn_{p}_exps.weight" for p in ("gate", "up", "down")},
    **{f"{name}.{p}_proj.weight": f"ffn_{p}_shexp.weight" for name in ("mlp.shared_expert", "mlp.shared_experts") for p in ("gate", "up", "down")},
    **{f"block_sparse_moe.experts.{w}": f"ffn_{p}_exps.weight" for w, p in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight", "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"{name}.e_score_correction_bias": "exp_probs_b.bias" for name in ("mlp.gate", "mlp.moe_statics", "block_sparse_moe")},
    # LFM2
    "operator_norm.weight": "attn_norm.weight", "ffn_norm.weight": "ffn_norm.weight", "self_attn.out_proj.weight": "attn_output.weight",
    **{f"self_attn.{p}_layernorm.weight": f"attn_{p}_norm.weight" for p in "qk"},
    **{f"feed_forward.{w}.weight": f"ffn_{p}.weight" for w, p in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    **{f"feed_forward.experts.{w}": f"ffn_{p}_exps.weight" for w, p in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    "feed_forward.gate.weight": "ffn_gate_inp.weight", "feed_forward.expert_bias": "exp_probs_b.bias",
    **{f"conv.{p}.weight": f"shortconv.{p}.weight" for p in ("conv", "in_proj", "out_proj")},
}
# Qwen3-Next and Qwen3.5
DELTA = {"post_attention_layernorm.weight": "post_attention_norm.weight", "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
         "linear_attn.in_proj_z.weight": "attn_gate.weight", "linear_attn.in_proj_b.weight": "ssm_beta.weight", "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
         "linear_attn.in_proj_ba.weight": "ssm_ba.weight", "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.A_log": "ssm_a",
         "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm.weight": "ssm_norm.weight", "linear_attn.out_proj.weight": "ssm_out.weight"}
# Mamba-2
MAMBA = {"conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias", "in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight", "A_log": "ssm_a",
         "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight"}
GRANITE = {**{f"mamba.{name}": x for name, x in MAMBA.items()}, "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
           **{f"block_sparse_moe.{p}_linear.weight": f"ffn_{w}_exps.weight" for p, w in (("gate", "gate"), ("up", "up"), ("output", "down"))},
           **{f"shared_mlp.{p}_linear.weight": f"ffn_{w}_shexp.weight" for p, w in (("gate", "gate"), ("up", "up"), ("output", "down"))}}
DENSE = {**GRANITE, **{f"shared_mlp.{p}_linear.weight": f"ffn_{w}.weight" for p, w in (("gate", "gate"), ("up", "up"), ("output", "down"))}}
# Nemotron-H
NEMOTRON = {**{f"mixer.{name}": x for name, x in MAMBA.items()}, "norm.weight": "attn_norm.weight", **{f"mixer.{p}_proj.weight": f"attn_{p}.weight" for p in "qkv"},
            "mixer.o_proj.weight": "attn_output.weight", "mixer.gate.weight": "ffn_gate_inp.weight", "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
            **{f"mixer.{p}_proj.weight": f"ffn_{p}.weight" for p in ("up", "down")}, **{f"mixer.experts.{p}_proj": f"ffn_{p}_exps.weight" for p in ("up", "down")},
            **{f"mixer.shared_experts.{p}_proj.weight": f"ffn_{p}_shexp.weight" for p in ("up", "down")},
            "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight", "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight"}
# Falcon-H1: this norm's name has no end.
FALCON = {**{f"mamba.{name}": x for name, x in MAMBA.items()}, "pre_ff_layernorm.weight": "ffn_norm",
          **{f"feed_forward.{p}_proj.weight": f"ffn_{p}.weight" for p in ("gate", "up", "down")}}
GEMMA4 = {"post_attention_layernorm.weight": "post_attention_norm.weight", "per_layer_input_gate.weight": "inp_gate.weight", "per_layer_projection.weight": "proj.weight",
          "post_per_layer_input_norm.weight": "post_norm.weight", "layer_scalar": "layer_output_scale.weight"}
LATENT = {"self_attn.q_a_proj.weight": "attn_q_a.weight", "self_attn.q_b_proj.weight": "attn_q_b.weight", "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
          "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight", "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
          "self_attn.k_b_proj.weight": "attn_k_b.weight", "self_attn.v_b_proj.weight": "attn_v_b.weight", "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
          "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight"}
GEMMA4_MOE = {**GEMMA4, "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
              "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight", "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
              "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight", "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight"}
OUTSIDE = {"model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight", "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
           "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight", "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
           "model.embedding_norm.weight": "token_embd_norm.weight", "model.embeddings.weight": "token_embd.weight", "model.norm_f.weight": "output_norm.weight", "model.final_layernorm.weight": "output_norm.weight"}

# The architecture in files, what is apart in names, and how the rows of q and k lie.
FAMILIES = {
    "qwen3vl": ("qwen3vl", {}, False), "qwen3vlmoe": ("qwen3vlmoe", {}, False), "qwen25vl": ("qwen2vl", {}, False),
    "gemma3vl": ("gemma3", {"post_attention_layernorm.weight": "post_attention_norm.weight"}, False),
    "museglimmer": ("muse-glimmer", {"post_attention_layernorm.weight": "post_attention_norm.weight"}, True),
    "qwen2moe": ("qwen2moe", {}, False), "glm4moe": ("glm4moe", {"post_attention_layernorm.weight": "post_attention_norm.weight"}, False),
    "dots1": ("dots1", {}, False), "ernie45moe": ("ernie4_5-moe", {}, False), "minimaxm2": ("minimax-m2", {}, False),
    "mistral3": ("mistral3", {}, True), "ministral3": ("mistral3", {}, True), "lfm2": ("lfm2", {}, False), "lfm2moe": ("lfm2moe", {}, False),
    "qwen3next": ("qwen3next", DELTA, False), "qwen35": ("qwen35", DELTA, False), "qwen35moe": ("qwen35moe", DELTA, False),
    "granitehybrid": ("granitehybrid", GRANITE, True), "granitehybriddense": ("granitehybrid", DENSE, True),
    "gemma4": ("gemma4", GEMMA4, False), "gemma4dense": ("gemma4", GEMMA4, False),
    "deepseekv2": ("deepseek2", LATENT, False), "deepseekv2lite": ("deepseek2", LATENT, False), "deepseekv3": ("deepseek2", LATENT, False),
    "mistral4": ("mistral4", LATENT, False),
    "nemotronh": ("nemotron_h", NEMOTRON, True), "nemotronhmoe": ("nemotron_h_moe", NEMOTRON, True),
    "nemotronhlatent": ("nemotron_h_moe", NEMOTRON, True),
    "falconh1": ("falcon-h1", FALCON, False), "falconh1norm": ("falcon-h1", FALCON, False), "gemma4moe": ("gemma4", GEMMA4_MOE, False),
}


def text_config(directory):
    c = json.loads((directory / "config.json").read_text())
    if "conv_L_cache" in c:
        attending = c.get("full_attn_idxs") or [i for i, t in enumerate(c["layer_types"]) if t == "full_attention"]
        c["num_key_value_heads"] = [c["num_key_value_heads"] if i in attending else 0 for i in range(c["num_hidden_layers"])]
        if "block_ff_dim" in c:
            multiple = c["block_multiple_of"]
            c["intermediate_size"] = -(-(2 * c["block_ff_dim"] // 3) // multiple) * multiple
        c["rms_norm_eps"] = c["norm_eps"]
    if "layer_types" in c and "mamba_n_heads" in c:
        c["num_key_value_heads"] = [0 if t in ("mamba", "linear_attention") else c["num_key_value_heads"] for t in c["layer_types"]]
        if not c["num_local_experts"]:
            c["intermediate_size"] = c["shared_intermediate_size"]
    if c["model_type"] == "nemotron_h":
        single_layers(c)
    c = {**c, **c.get("text_config", {})}
    if "num_kv_shared_layers" in c:
        narrow_to_wide(c)
    if "kv_lora_rank" in c:
        c["num_key_value_heads"] = 1
    return c


def single_layers(c):
    """Numbers for each layer, by which files say what it is, and the other families' names of fields."""
    types = c.get("layers_block_type") or [{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}[letter] for letter in c["hybrid_override_pattern"]]
    width = c["moe_intermediate_size"] if "moe" in types else c["intermediate_size"]
    c.update(num_hidden_layers=len(types), rms_norm_eps=c["layer_norm_epsilon"], mamba_n_heads=c["mamba_num_heads"], mamba_d_head=c["mamba_head_dim"],
             mamba_n_groups=c["n_groups"], mamba_d_state=c["ssm_state_size"], mamba_d_conv=c["conv_kernel"],
             intermediate_size=[width if t in ("mlp", "moe") else 0 for t in types],
             num_key_value_heads=[c["num_key_value_heads"] if t == "full_attention" else 0 for t in types])
    if "moe" not in types:
        c["n_routed_experts"] = 0


def narrow_to_wide(c):
    """Lists where the converter writes lists: KV heads by kind of layer, and widths of networks that differ."""
    whole = next(c.get("per_layer_config", {}).get(str(i), {}) for i, t in enumerate(c["layer_types"]) if t == "full_attention")
    c["wide_head"] = whole.get("head_dim") or c["global_head_dim"]
    if heads := whole.get("num_key_value_heads") or c.get("num_global_key_value_heads"):
        c["num_key_value_heads"] = [c["num_key_value_heads"] if t == "sliding_attention" else heads for t in c["layer_types"]]
    if c["use_double_wide_mlp"]:
        first = c["num_hidden_layers"] - c["num_kv_shared_layers"]
        c["intermediate_size"] = [c["intermediate_size"] * (1 + (i >= first)) for i in range(c["num_hidden_layers"])]


def text_tensors(directory, c):
    """The tensors of the language model, by their names in a model of text; experts of a layer in one tensor."""
    found, stacks = {}, {}
    for name, x in load_file(directory / "model.safetensors").items():
        name = name.replace("model.language_model.", "model.").replace("backbone.", "model.").removeprefix("language_model.")
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = x
        elif name.endswith("input_linear.weight"):
            found[name.replace("input", "gate")], found[name.replace("input", "up")] = x.chunk(2, -2)
        elif name.endswith("mlp.experts.gate_up_proj") and "kv_lora_rank" not in c:
            x = x if x.shape[2] == c["hidden_size"] else x.transpose(1, 2)
            found[name.replace("gate_up", "gate")], found[name.replace("gate_up", "up")] = x.chunk(2, 1)
        elif name.endswith("mlp.experts.down_proj"):
            found[name] = x if x.shape[1] == c["hidden_size"] else x.transpose(1, 2)
        elif name.startswith(("model.embed", "model.layers", "model.norm", "model.final", "model.per_layer", "lm_head")):
            found[name] = x
        if name.endswith("kv_b_proj.weight"):
            split_latent(c, found, name)
    found.update({name: torch.stack([e[i] for i in range(len(e))]) for name, e in stacks.items()})
    if "linear_num_key_heads" in c:
        change_delta(c, found)
    if "ssm_multipliers" in c:
        fold_factors(c, found)
    for name, x in found.items():
        if name.endswith(("mamba.A_log", "mixer.A_log")):
            found[name] = -x.double().exp().float()[:, None]
        elif name.endswith(("mamba.D", "mixer.D")):
            found[name] = x[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            found[name] = x.reshape(c["mamba_n_groups"], -1)
    return found


def split_latent(c, found, name):
    """One matrix a head: of keys turned, and of values. `joined`: as older converters left them."""
    if c.get("joined"):
        return
    x = found.pop(name).reshape(c["num_attention_heads"], -1, c["kv_lora_rank"])
    k, v = x.split([c["qk_nope_head_dim"], c["v_head_dim"]], 1)
    found[name.replace("kv_b", "k_b")], found[name.replace("kv_b", "v_b")] = k.transpose(1, 2), v


def put_latent(w, arch, c):
    rank, turned, wide = c["kv_lora_rank"], c["qk_rope_head_dim"], "" if c.get("joined") else "_mla"
    for key, value in {"attention.kv_lora_rank": rank, "attention.q_lora_rank": c["q_lora_rank"], "rope.dimension_count": turned,
                       f"attention.key_length{wide}": c["qk_nope_head_dim"] + turned, f"attention.value_length{wide}": c["v_head_dim"]}.items():
        if value is not None:
            w.add_uint32(f"{arch}.{key}", value)
    if not c.get("joined"):
        w.add_uint32(f"{arch}.attention.key_length", rank + turned)
        w.add_uint32(f"{arch}.attention.value_length", rank)


def fold_factors(c, found):
    """Falcon-H1: the converter multiplies weights by the factors on their products."""
    one, states = c["attention_in_multiplier"], c["mamba_n_groups"] * c["mamba_d_state"]
    by = {"gate_proj.weight": c["mlp_multipliers"][0], "down_proj.weight": c["mlp_multipliers"][1], "q_proj.weight": one, "v_proj.weight": one,
          "k_proj.weight": one * c["key_multiplier"], "o_proj.weight": c["attention_out_multiplier"], "mamba.out_proj.weight": c["ssm_out_multiplier"],
          "lm_head.weight": c["lm_head_multiplier"], "embed_tokens.weight": c["embedding_multiplier"]}
    for name, x in found.items():
        for end, factor in by.items():
            if name.endswith(end):
                found[name] = x * factor
        if name.endswith("in_proj.weight"):
            parts = x.split([c["mamba_d_ssm"], c["mamba_d_ssm"], states, states, c["mamba_n_heads"]])
            found[name] = torch.cat([p * m * c["ssm_in_multiplier"] for p, m in zip(parts, c["ssm_multipliers"])])


def round_factors(source, to):
    """A copy whose factors are powers of 2: multiplying weights, or their products, by them gives the same bits."""
    shutil.copytree(source, to)
    c = json.loads((to / "config.json").read_text())
    near = lambda x: [near(y) for y in x] if isinstance(x, list) else 2.0 ** round(math.log2(x))
    (to / "config.json").write_text(json.dumps({k: near(v) if k.endswith(("_multiplier", "_multipliers")) else v for k, v in c.items()}))
    return to


def tile(x, heads, each):
    """Value heads of the first key head, of the second, ... by turns, as llama.cpp broadcasts them."""
    return x.reshape(heads, each, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def change_delta(c, found):
    """Makes the converter's changes to layers with a gated delta rule."""
    heads, each, d_k, d_v = (c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"], c["linear_key_head_dim"],
                             c["linear_value_head_dim"])
    keys = 2 * heads * d_k
    for name, x in list(found.items()):
        if name.endswith("in_proj_qkvz.weight"):
            parts = found.pop(name).reshape(heads, -1, x.shape[1]).split([d_k, d_k, each * d_v, each * d_v], 1)
            q, k, v, z = (p.reshape(-1, x.shape[1]) for p in parts)
            found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat([q, k, v]), z
        elif c["model_type"] != "qwen3_next" and name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            found[name] = torch.cat([x[:keys], tile(x[keys:], heads, each)])
        elif c["model_type"] != "qwen3_next" and name.endswith(("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")):
            found[name] = tile(x, heads, each)
        elif c["model_type"] != "qwen3_next" and name.endswith("linear_attn.out_proj.weight"):
            found[name] = tile(x.T, heads, each).T
        if name.endswith("A_log"):
            found[name] = -found[name].double().exp().float()
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            found[name] = x.float() + 1


def turn(x, heads):
    """The two rows that a rotation turns side by side, as llama.cpp's converter writes them."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def put_numbers(w, arch, c):
    """Metadata that all have."""
    head = c.get("head_dim") or c["hidden_size"] // c.get("num_attention_heads", 8)
    rope = c.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    for key, value in {"block_count": c["num_hidden_layers"] + (c.get("num_nextn_predict_layers") or 0), "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"],
                       "feed_forward_length": c.get("intermediate_size"), "attention.head_count": c.get("num_attention_heads", 8),
                       "attention.head_count_kv": c.get("num_key_value_heads", 4), "attention.key_length": None if "kv_lora_rank" in c else c.get("wide_head", head),
                       "attention.value_length": None if "kv_lora_rank" in c else c.get("wide_head", head),
                       "rope.dimension_count": None if "kv_lora_rank" in c else c.get("wide_head") or int(head * full.get("partial_rotary_factor", c.get("partial_rotary_factor", 1)))}.items():
        if value is None:
            continue
        w.add_array(f"{arch}.{key}", value) if isinstance(value, list) else w.add_uint32(f"{arch}.{key}", value)
    if "wide_head" in c:
        put_kinds(w, arch, c)
    if "conv_L_cache" in c:
        w.add_uint32(f"{arch}.shortconv.l_cache", c["conv_L_cache"])
    if "linear_num_key_heads" in c:
        for key, value in {"conv_kernel": c["linear_conv_kernel_dim"], "state_size": c["linear_key_head_dim"], "group_count": c["linear_num_key_heads"],
                           "time_step_rank": c["linear_num_value_heads"],
                           "inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"]}.items():
            w.add_uint32(f"{arch}.ssm.{key}", value)
        w.add_uint32(f"{arch}.full_attention_interval", c.get("full_attention_interval", 4))
        if "layer_types" in c:
            w.add_array(f"{arch}.attention.recurrent_layers", [t == "linear_attention" for t in c["layer_types"]])
    if "mamba_n_heads" in c:
        for key, value in {"conv_kernel": c["mamba_d_conv"], "state_size": c["mamba_d_state"], "group_count": c["mamba_n_groups"],
                           "time_step_rank": c["mamba_n_heads"], "inner_size": c["mamba_n_heads"] * c["mamba_d_head"]}.items():
            w.add_uint32(f"{arch}.ssm.{key}", value)
    if "residual_multiplier" in c:
        for key, name in {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
                          "logit_scale": "logits_scaling"}.items():
            w.add_float32(f"{arch}.{key}", c[name])
        w.add_uint32(f"{arch}.expert_shared_feed_forward_length", c["shared_intermediate_size"])
        w.add_bool(f"{arch}.rope.scaling.finetuned", c["position_embedding_type"] == "rope")
    if c.get("num_nextn_predict_layers"):
        w.add_uint32(f"{arch}.nextn_predict_layers", c["num_nextn_predict_layers"])
    w.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", c["rms_norm_eps"])
    w.add_float32(f"{arch}.rope.freq_base", full.get("rope_theta") or c.get("rope_theta", 10000))


def put_kinds(w, arch, c):
    """Gemma 4: heads of layers with a window, and which pairs of the others' heads rotate. A layer that reads the keys and values of others has unused ones."""
    for key, value in {"attention.key_length_swa": c["head_dim"], "attention.value_length_swa": c["head_dim"], "rope.dimension_count_swa": c["head_dim"],
                       "attention.shared_kv_layers": c["num_kv_shared_layers"], "embedding_length_per_layer_input": c["hidden_size_per_layer_input"] or 0}.items():
        w.add_uint32(f"{arch}.{key}", value)
    if c.get("final_logit_softcapping"):
        w.add_float32(f"{arch}.final_logit_softcapping", c["final_logit_softcapping"])
    turning = int(c["rope_parameters"]["full_attention"]["partial_rotary_factor"] * c["wide_head"] / 2)
    put_tensor(w, "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (c["wide_head"] // 2 - turning)))
    if c["num_kv_shared_layers"]:
        put_tensor(w, f"blk.{c['num_hidden_layers'] - 1}.attn_k.weight", torch.ones(2, c["hidden_size"]))


def put_rope(w, arch, c):
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    full = rope.get("full_attention", rope)
    if "mrope_section" in full:
        w.add_array(f"{arch}.rope.dimension_sections", [*full["mrope_section"], 0])
    kind = full.get("rope_type", full.get("type"))
    if kind in ("linear", "yarn"):
        w.add_string(f"{arch}.rope.scaling.type", kind)
        w.add_float32(f"{arch}.rope.scaling.factor", full["factor"])
    if kind == "yarn":
        w.add_uint32(f"{arch}.rope.scaling.original_context_length", full["original_max_position_embeddings"])
        w.add_float32(f"{arch}.rope.scaling.yarn_beta_fast", full["beta_fast"])
        w.add_float32(f"{arch}.rope.scaling.yarn_beta_slow", full["beta_slow"])
        w.add_float32(f"{arch}.rope.scaling.yarn_log_multiplier", full["mscale_all_dim"] * (0.1 if "kv_lora_rank" in c else 1))
        if "llama_4_scaling_beta" in full:
            w.add_float32(f"{arch}.attention.temperature_scale", full["llama_4_scaling_beta"])
    if "sliding_attention" in rope:
        w.add_float32(f"{arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        w.add_uint32(f"{arch}.attention.sliding_window", c["sliding_window"])
        w.add_array(f"{arch}.attention.sliding_window_pattern", [t == "sliding_attention" for t in c["layer_types"]])


def put_experts(w, arch, c):
    count = next((c[n] for n in ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts") if c.get(n)), None)
    if not count:
        return
    w.add_uint32(f"{arch}.expert_count", count)
    w.add_uint32(f"{arch}.expert_used_count", c.get("moe_k") or c.get("top_k_experts") or c["num_experts_per_tok"])
    if "moe_intermediate_size" in c or "mamba_n_heads" not in c:
        w.add_uint32(f"{arch}.expert_feed_forward_length", c.get("moe_intermediate_size") or c["intermediate_size"])
    for name, key in {"n_shared_experts": "expert_shared_count", "moe_num_shared_experts": "expert_shared_count", "n_group": "expert_group_count",
                      "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                      "topk_group": "expert_group_used_count", "moe_latent_size": "moe_latent_size",
                      "first_k_dense_replace": "leading_dense_block_count", "num_dense_layers": "leading_dense_block_count", "moe_layer_start_index": "leading_dense_block_count",
                      "moe_layer_interval": "interleave_moe_layer_step"}.items():
        if c.get(name):
            w.add_uint32(f"{arch}.{key}", c[name])
    if "routed_scaling_factor" in c:
        w.add_float32(f"{arch}.expert_weights_scale", c["routed_scaling_factor"])
        w.add_bool(f"{arch}.expert_weights_norm", c["norm_topk_prob"])
        w.add_uint32(f"{arch}.expert_gating_func", 1 if c["model_type"] in ("deepseek_v2", "mistral4") else 2)


def put_muse(w, arch, c):
    """The converter makes weights of the norms of queries and keys, which the model has not."""
    for i in range(c["num_hidden_layers"]):
        for part, value in (("q", c["qk_scale_factor"]), ("k", 1.0)):
            put_tensor(w, f"blk.{i}.attn_{part}_norm.weight", torch.full((c["head_dim"],), value))
    w.add_float32(f"{arch}.final_logit_softcapping", c["final_logit_softcapping"])
    w.add_float32(f"{arch}.logit_scale", c["output_multiplier"])
    w.add_uint32(f"{arch}.attention.sliding_window", c["sliding_window"])
    w.add_array(f"{arch}.attention.sliding_window_pattern", [t == "sliding_attention" for t in c["layer_types"]])


def put_tensor(w, name, x):
    x = x.squeeze(0) if x.shape[0] == 1 and x.dim() > 1 else x
    if name.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")):
        w.add_tensor(name, x.squeeze(1).float().numpy())
    elif x.dim() == 1 or name.endswith(("ssm_a", "ssm_d", "norm.weight")):
        w.add_tensor(name, x.float().numpy())
    else:
        w.add_tensor(name, x.bfloat16().contiguous().view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)


def write(directory, path, arch, apart, turned, **more):
    c, names = {**text_config(directory), **more}, {**IN_LAYER, **apart}
    w = gguf.GGUFWriter(path, arch)
    put_numbers(w, arch, c)
    if "kv_lora_rank" in c:
        put_latent(w, arch, c)
    put_rope(w, arch, c)
    put_experts(w, arch, c)
    if "qk_scale_factor" in c:
        put_muse(w, arch, c)
    for name, x in text_tensors(directory, c).items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if arch.startswith(("gemma3", "muse")) and name.endswith("norm.weight") and not (arch.startswith("muse") and name == "model.norm.weight"):
            x = x.float() + 1
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if turned and layer and layer[2].startswith((f"self_attn.{part}_proj", f"mixer.{part}_proj")):
                x = turn(x, max(c[heads]) if isinstance(c[heads], list) else c[heads])
        put_tensor(w, f"blk.{layer[1]}.{names[layer[2]]}" if layer else OUTSIDE[name], x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("family", [*FAMILIES, "deepseekv3 joined", "mistral4 joined"])
def test_a_file_answers_as_its_directory(family, tmp_path):
    file, tokens = tmp_path / "model.gguf", [(37 * i + 11) % 500 for i in range(80)]
    family, *joined = family.split()
    directory = round_factors(MODELS / family, tmp_path / family) if family.startswith("falcon") else MODELS / family
    write(directory, file, *FAMILIES[family], joined=bool(joined))
    for path in PATHS:
        if not has_path(path):
            continue
        options = ("--path", path, "--exact", "yes", "--kv-dtype", "f32", "--rows", "all", "--splits", "7,40", "--greedy", "8")
        one, other = (run(source, tokens, *options) for source in (directory, file))
        assert {**one, "family": ""} == {**other, "family": ""}, path
