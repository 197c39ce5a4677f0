"""A small random model with latent attention and dense networks, whose attention prefers some entries to others."""

import json

import numpy as np
from safetensors.numpy import save_file

CONFIG = dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
              n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=8, first_k_dense_replace=3, max_position_embeddings=1024, rms_norm_eps=1e-6,
              tie_word_embeddings=True, eos_token_id=511, torch_dtype="float32")


def write(directory, **fields):
    c, rng = {**CONFIG, **fields}, np.random.default_rng(8)
    d, heads = c["hidden_size"], c["num_attention_heads"]
    shapes = {"self_attn.q_a_proj": (c["q_lora_rank"], d), "self_attn.q_b_proj": (heads * 20, c["q_lora_rank"]), "self_attn.kv_a_proj_with_mqa": (32, d),
              "self_attn.kv_b_proj": (heads * 22, c["kv_lora_rank"]), "self_attn.o_proj": (d, heads * 10), "mlp.gate_proj": (48, d), "mlp.up_proj": (48, d),
              "mlp.down_proj": (d, 48)}
    norms = {"input_layernorm": d, "post_attention_layernorm": d, "self_attn.q_a_layernorm": c["q_lora_rank"], "self_attn.kv_a_layernorm": c["kv_lora_rank"]}
    tensors = {"model.embed_tokens.weight": 0.3 * rng.standard_normal((c["vocab_size"], d)), "model.norm.weight": 1 + 0.2 * rng.standard_normal(d)}
    for layer in range(c["num_hidden_layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = 1.2 * rng.standard_normal(shape) / shape[1] ** 0.5
        for name, width in norms.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + 0.2 * rng.standard_normal(width)
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(c))
    return directory
