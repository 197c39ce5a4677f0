"""Writes golden log-probabilities for the C tests: the bundled model and a tiny random one per family.

    python make_golden.py --model ../bundled/keepd-nano --out ../tests/data/models

Every directory gets `golden.json`: for each case the prompt ids, the log-probability
of every prompt token after the first, the greedy continuation with the
log-probability of each token and `margin`, the gap to the runner-up (a test skips
tokens whose margin is within its tolerance).  `last_logits.f32` holds, per case, the
raw logits after the last prompt token, little-endian.  All are a float32 forward of
the stored weights by transformers.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (AutoTokenizer, DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM,
                          Mistral4Config, Mistral4ForCausalLM, Dots1Config, Dots1ForCausalLM, Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM,
                          MiniMaxM2Config, MiniMaxM2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM, Ernie4_5Config, Ernie4_5ForCausalLM, Exaone4Config,
                          Exaone4ForCausalLM, Gemma2Config, Gemma2ForCausalLM,
                          Gemma3ForCausalLM, Gemma3TextConfig, Glm4Config, Glm4ForCausalLM, GlmConfig, GlmForCausalLM, GptOssConfig, GptOssForCausalLM, GraniteConfig, GraniteForCausalLM, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM,
                          Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig, Gemma3Config, Gemma3ForConditionalGeneration, Mistral3Config, Mistral3ForConditionalGeneration, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration, NemotronHConfig, NemotronHForCausalLM,
                          Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig,
                          Qwen3VLMoeForConditionalGeneration,
                          Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM, LlamaConfig, LlamaForCausalLM, MinistralConfig, MinistralForCausalLM, MistralConfig, MistralForCausalLM, FalconH1Config, FalconH1ForCausalLM, MixtralConfig, MixtralForCausalLM,
                          Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM, OlmoeConfig, OlmoeForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM,
                          Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, SeedOssConfig, SeedOssForCausalLM, SmolLM3Config,
                          SmolLM3ForCausalLM)

SHAPE = dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=1024, bos_token_id=None, eos_token_id=511,
             pad_token_id=None)


def spread(model, seed):
    """Random weights large enough that the distributions are far from uniform."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        n = torch.randn(p.shape, generator=g)
        if "embed" in name or "lm_head" in name:
            p.data = 0.3 * n
        elif p.dim() >= 2:
            p.data = n / p.shape[-1] ** 0.5
        else:
            p.data = 1 + 0.2 * n if "norm" in name else 0.3 * n
    return model


def old_spelling(directory, theta, scaling):
    """Rewrites the config as published before transformers 5: rope_theta, rope_scaling, torch_dtype."""
    path = directory / "config.json"
    c = json.loads(path.read_text())
    c.pop("rope_parameters", None)
    c["torch_dtype"] = c.pop("dtype")
    c.update(rope_theta=theta, rope_scaling=scaling)
    path.write_text(json.dumps(c, indent=2) + "\n")


def qwen3(out):
    """bf16, one file, head size apart from hidden/heads, the new config spelling."""
    c = Qwen3Config(**{**SHAPE, "num_hidden_layers": 3}, head_dim=32, tie_word_embeddings=True,
                    rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    spread(Qwen3ForCausalLM(c), 3).bfloat16().save_pretrained(out / "qwen3")


def qwen2(out):
    """f16, sharded with an index, biases on q, k, v."""
    c = Qwen2Config(**SHAPE, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    spread(Qwen2ForCausalLM(c), 2).half().save_pretrained(out / "qwen2", max_shard_size="80KB")
    old_spelling(out / "qwen2", 1e6, None)


def llama(out):
    """f32, one file, llama3 rope scaling with a short original context so that it bites."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    c = LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters={"rope_theta": 10000.0, **scaling})
    spread(LlamaForCausalLM(c), 1).save_pretrained(out / "llama")
    old_spelling(out / "llama", 10000.0, scaling)


def mistral(out):
    """bf16, a head size of its own, every layer with a window shorter than the longest prompt."""
    c = MistralConfig(**SHAPE, head_dim=32, sliding_window=40, tie_word_embeddings=False,
                      rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    spread(MistralForCausalLM(c), 4).bfloat16().save_pretrained(out / "mistral")


def phi3(out):
    """bf16, fused q, k, v and gate, up; heads of 16 that rotate in 12; longrope's long factors, with its scale."""
    half = 6
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.05 * i for i in range(half)], "long_factor": [1.5 + 0.5 * i for i in range(half)],
            "original_max_position_embeddings": 2, "attention_factor": 1.05}
    c = Phi3Config(**{**SHAPE, "pad_token_id": 0}, tie_word_embeddings=False, rope_parameters=rope,
                   original_max_position_embeddings=2)
    spread(Phi3ForCausalLM(c), 5).bfloat16().save_pretrained(out / "phi3")


def smollm3(out):
    """bf16, every second of four layers without rotation, the last with a window."""
    c = SmolLM3Config(**{**SHAPE, "num_hidden_layers": 4, "pad_token_id": 0}, tie_word_embeddings=True, no_rope_layer_interval=2,
                      use_sliding_window=True, sliding_window=48, max_window_layers=3,
                      layer_types=["full_attention"] * 3 + ["sliding_attention"],
                      rope_parameters={"rope_type": "default", "rope_theta": 2e6})
    spread(SmolLM3ForCausalLM(c), 6).bfloat16().save_pretrained(out / "smollm3")


def granite(out):
    """bf16, all four multipliers away from 1."""
    c = GraniteConfig(**{**SHAPE, "pad_token_id": 0}, tie_word_embeddings=True, embedding_multiplier=12.0, attention_multiplier=0.3,
                      residual_multiplier=0.22, logits_scaling=3.0,
                      rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    spread(GraniteForCausalLM(c), 7).bfloat16().save_pretrained(out / "granite")


def gemma3(out):
    """bf16, two kinds of layers with windows and rotations of their own, a kind of scaling for the long one."""
    c = Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 3, "pad_token_id": 0}, head_dim=32, sliding_window=40, query_pre_attn_scalar=24,
                         tie_word_embeddings=True, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                         rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                                          "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}})
    gemma(Gemma3ForCausalLM(c), 8).bfloat16().save_pretrained(out / "gemma3")


def gemma(model, seed):
    """Gemma's norms multiply by 1 + w, and its embeddings are scaled up."""
    for name, p in spread(model, seed).named_parameters():
        if "norm" in name:
            p.data -= 1
        elif "embed" in name:
            p.data *= 0.5
    return model


def qwen3moe(out):
    """bf16, a dense layer between routed ones; the weights of the chosen experts are not divided by their sum."""
    c = Qwen3MoeConfig(**{**SHAPE, "num_hidden_layers": 3}, head_dim=32, moe_intermediate_size=40, num_experts=6,
                       num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[1], tie_word_embeddings=True,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    spread(Qwen3MoeForCausalLM(c), 9).bfloat16().save_pretrained(out / "qwen3moe")


def mixtral(out):
    """bf16, sharded, two of five experts, every layer with a window."""
    c = MixtralConfig(**{**SHAPE, "intermediate_size": 48, "pad_token_id": 0}, num_local_experts=5, num_experts_per_tok=2,
                      sliding_window=60, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    spread(MixtralForCausalLM(c), 10).bfloat16().save_pretrained(out / "mixtral")


def gemma2(out):
    """bf16, windows in every other layer, both soft caps so low that they bite."""
    c = Gemma2Config(**{**SHAPE, "num_hidden_layers": 3, "pad_token_id": 0}, head_dim=32, sliding_window=40, query_pre_attn_scalar=24,
                     tie_word_embeddings=True, attn_logit_softcapping=2.0, final_logit_softcapping=6.0,
                     rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    gemma(Gemma2ForCausalLM(c), 9).bfloat16().save_pretrained(out / "gemma2")


def olmo2(out):
    """bf16, norms of whole queries and keys, norms behind the blocks."""
    c = Olmo2Config(**{**SHAPE, "pad_token_id": 0}, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    spread(Olmo2ForCausalLM(c), 10).bfloat16().save_pretrained(out / "olmo2")


def olmo3(out):
    """bf16, as olmo2 with windows; only the layers without one rotate with yarn."""
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 128, "attention_factor": 1.2,
            "beta_fast": 32.0, "beta_slow": 1.0}
    c = Olmo3Config(**{**SHAPE, "num_hidden_layers": 4, "pad_token_id": 0}, tie_word_embeddings=False, sliding_window=40,
                    rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": yarn})
    spread(Olmo3ForCausalLM(c), 12).bfloat16().save_pretrained(out / "olmo3")


def exaone4(out):
    """bf16, norms per head and behind the blocks; the layer without a window does not rotate."""
    scaling = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    c = Exaone4Config(**{**SHAPE, "num_hidden_layers": 4, "pad_token_id": 0}, tie_word_embeddings=True, sliding_window=40,
                      sliding_window_pattern=4, rope_parameters=scaling)
    spread(Exaone4ForCausalLM(c), 15).bfloat16().save_pretrained(out / "exaone4")


def gptoss(out):
    """bf16 with experts in MXFP4 as published; windows in every second layer, sinks, biases, yarn without truncation."""
    c = GptOssConfig(**{**SHAPE, "num_hidden_layers": 3, "intermediate_size": 64, "pad_token_id": 0}, head_dim=16, num_local_experts=5,
                     num_experts_per_tok=2, sliding_window=40, tie_word_embeddings=False,
                     rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                      "truncate": False, "original_max_position_embeddings": 64})
    model = spread(GptOssForCausalLM(c), 12)
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            p.data *= 6
    d = out / "gptoss"
    model.bfloat16().save_pretrained(d)
    g, t = torch.Generator().manual_seed(13), load_file(d / "model.safetensors")
    for i in range(3):
        for name, rows, cols in (("gate_up_proj", 128, 64), ("down_proj", 64, 64)):
            key = f"model.layers.{i}.mlp.experts.{name}"
            del t[key]
            t[key + "_blocks"] = torch.randint(0, 256, (5, rows, cols // 32, 16), generator=g, dtype=torch.uint8)
            t[key + "_scales"] = torch.randint(121, 126, (5, rows, cols // 32), generator=g, dtype=torch.uint8)
    save_file(t, d / "model.safetensors", metadata={"format": "pt"})
    old_spelling(d, 150000.0, {k: v for k, v in c.rope_parameters.items() if k != "rope_theta"})
    config = json.loads((d / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (d / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def ministral(out):
    """bf16, windows in three of four layers, a head size of its own."""
    c = MinistralConfig(**{**SHAPE, "num_hidden_layers": 4}, head_dim=32, sliding_window=40, tie_word_embeddings=False,
                        layer_types=["full_attention"] + ["sliding_attention"] * 3,
                        rope_parameters={"rope_type": "default", "rope_theta": 1e8})
    spread(MinistralForCausalLM(c), 21).bfloat16().save_pretrained(out / "ministral")


def seedoss(out):
    """bf16, biases on q, k and v and not on o."""
    c = SeedOssConfig(**SHAPE, head_dim=32, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    spread(SeedOssForCausalLM(c), 22).bfloat16().save_pretrained(out / "seedoss")


def ernie45(out):
    """bf16, rotation of numbers side by side."""
    c = Ernie4_5Config(**{**SHAPE, "pad_token_id": 0}, head_dim=32, tie_word_embeddings=True,
                       rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    spread(Ernie4_5ForCausalLM(c), 23).bfloat16().save_pretrained(out / "ernie45")


def glm(out):
    """bf16, gate and up in one tensor, half of each head rotates, numbers side by side, biases on q, k and v."""
    c = GlmConfig(**{**SHAPE, "pad_token_id": 0}, head_dim=32, attention_bias=True, tie_word_embeddings=False)
    spread(GlmForCausalLM(c), 24).bfloat16().save_pretrained(out / "glm")


def glm4(out):
    """bf16, as glm, with norms behind both blocks, too; no biases."""
    c = Glm4Config(**{**SHAPE, "pad_token_id": 0}, head_dim=32, attention_bias=False, tie_word_embeddings=False)
    spread(Glm4ForCausalLM(c), 25).bfloat16().save_pretrained(out / "glm4")


def olmoe(out):
    """bf16, three of six experts whose weights are not divided by their sum, norms of whole queries and keys."""
    c = OlmoeConfig(**{**SHAPE, "intermediate_size": 40, "pad_token_id": 0}, num_experts=6, num_experts_per_tok=3,
                    tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    spread(OlmoeForCausalLM(c), 26).bfloat16().save_pretrained(out / "olmoe")


VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, patch_size=2, num_position_embeddings=16)


def sections(*numbers, **more):
    """Rotations with sections for pictures, which do not matter in text."""
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(numbers), **more}


def qwen3vl(out):
    """bf16, the text part of a model that sees pictures, sections of the rotation."""
    text = {**SHAPE, "num_hidden_layers": 3, "head_dim": 32, "rope_parameters": sections(6, 5, 5, mrope_interleaved=True)}
    c = Qwen3VLConfig(text_config=text, vision_config={**VISION, "deepstack_visual_indexes": [0]}, tie_word_embeddings=True)
    spread(Qwen3VLForConditionalGeneration(c), 31).bfloat16().save_pretrained(out / "qwen3vl")


def qwen3vlmoe(out):
    """bf16, as qwen3vl, all experts of a layer in one tensor, in one layer with rows and columns exchanged, as published."""
    text = {**SHAPE, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 3,
            "rope_parameters": sections(6, 5, 5, mrope_interleaved=True)}
    c = Qwen3VLMoeConfig(text_config=text, vision_config={**VISION, "deepstack_visual_indexes": [0]}, tie_word_embeddings=False)
    d = out / "qwen3vlmoe"
    spread(Qwen3VLMoeForConditionalGeneration(c), 32).bfloat16().save_pretrained(d)
    t = load_file(d / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.language_model.layers.0.mlp.experts.{name}"
        t[key] = t[key].transpose(1, 2).contiguous()
    save_file(t, d / "model.safetensors", metadata={"format": "pt"})


def qwen25vl(out):
    """bf16, as the first files: fields of text and pictures side by side, names of tensors as of a model of text."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    c = Qwen2_5_VLConfig(**SHAPE, rope_theta=1e6, rope_scaling=dict(rope), tie_word_embeddings=False,
                         vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, patch_size=2,
                                            fullatt_block_indexes=[0], window_size=4))
    d = out / "qwen25vl"
    spread(Qwen2_5_VLForConditionalGeneration(c), 33).bfloat16().save_pretrained(d)
    path = d / "config.json"
    c = json.loads(path.read_text())
    text = c.pop("text_config")
    text.pop("rope_parameters")
    path.write_text(json.dumps({**text, **c, "rope_theta": 1e6, "rope_scaling": rope}, indent=2) + "\n")
    t = load_file(d / "model.safetensors")
    t = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): x for name, x in t.items()}
    save_file(t, d / "model.safetensors", metadata={"format": "pt"})


SIGLIP = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)


def gemma3vl(out):
    """bf16, as the models from 4B on: heads and their size are left to the class."""
    text = {**SHAPE, "num_hidden_layers": 3, "pad_token_id": 0, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
            "sliding_window": 40, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}
    c = Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4)
    d = out / "gemma3vl"
    gemma(Gemma3ForConditionalGeneration(c), 34).bfloat16().save_pretrained(d)
    path = d / "config.json"
    c = json.loads(path.read_text())
    for name in ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"):
        c["text_config"].pop(name, None)
    path.write_text(json.dumps(c, indent=2) + "\n")


PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}


def mistral3(out):
    """bf16, Mistral Small 3.1's form."""
    text = {**SHAPE, "model_type": "mistral", "head_dim": 32, "sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e9}}
    c = Mistral3Config(text_config=text, vision_config=PIXTRAL, tie_word_embeddings=False)
    spread(Mistral3ForConditionalGeneration(c), 35).bfloat16().save_pretrained(out / "mistral3")


def ministral3(out):
    """bf16, queries that grow every 16 tokens, yarn with an attention factor of 1."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
    text = {**SHAPE, "model_type": "ministral3", "head_dim": 32, "rope_parameters": rope}
    c = Mistral3Config(text_config=text, vision_config=PIXTRAL, tie_word_embeddings=True)
    spread(Mistral3ForConditionalGeneration(c), 36).bfloat16().save_pretrained(out / "ministral3")


def museglimmer(out):
    """bf16, gated outputs of attention, norms without weights, scaled and capped logits; the first of five layers and the last do not rotate."""
    text = {**SHAPE, "num_hidden_layers": 5, "pad_token_id": 0, "head_dim": 32, "sliding_window": 40, "qk_scale_factor": 2.5,
            "output_multiplier": 0.4, "final_logit_softcapping": 3.0, "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 3 + ["full_attention"]}
    vision = dict(patch_size=2, pos_emb_height=2, pos_emb_width=2, num_attention_heads=2, num_hidden_layers=1, hidden_size=16, intermediate_size=16,
                  max_position_embeddings=4)
    c = MuseGlimmerConfig(text_config=text, vision_config=vision, out_hidden_size=64, projector_hidden_size=16)
    model = MuseGlimmerForConditionalGeneration(c)
    for name, p in spread(model, 41).named_parameters():
        if "layernorm" in name:
            p.data -= 1
    model.bfloat16().save_pretrained(out / "museglimmer")


SELECTING = ("e_score_correction_bias", "expert_bias")


def select(model, seed):
    """spread, with biases that select other experts than the scores alone."""
    g = torch.Generator().manual_seed(seed)
    for name, b in list(spread(model, seed).named_buffers()) + list(model.named_parameters()):
        if name.endswith(SELECTING):
            b.data = 0.2 * torch.randn(b.shape, generator=g)
    return model


def qwen2moe(out):
    """bf16, shared experts with a gate; biases on q, k and v."""
    c = Qwen2MoeConfig(**SHAPE, moe_intermediate_size=64, shared_expert_intermediate_size=96, num_experts=6,
                       num_experts_per_tok=3, norm_topk_prob=False, tie_word_embeddings=False)
    spread(Qwen2MoeForCausalLM(c), 51).bfloat16().save_pretrained(out / "qwen2moe")


def glm4moe(out):
    """bf16, a dense layer before routed ones; sigmoid, biases that select, groups; norms of queries and keys, of which half
    rotate. A layer that predicts further tokens lies behind the last."""
    c = Glm4MoeConfig(**{**SHAPE, "num_hidden_layers": 3, "pad_token_id": 0}, head_dim=32, attention_bias=True, use_qk_norm=True, moe_intermediate_size=64,
                      n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2, first_k_dense_replace=1,
                      routed_scaling_factor=1.5, norm_topk_prob=True, num_nextn_predict_layers=0)
    d = out / "glm4moe"
    save_with_bias(select(Glm4MoeForCausalLM(c), 52), d)
    t = load_file(d / "model.safetensors")
    t["model.layers.3.self_attn.o_proj.weight"] = torch.ones(64, 128).bfloat16()
    t["model.layers.3.eh_proj.weight"] = torch.ones(64, 128).bfloat16()
    save_file(t, d / "model.safetensors", metadata={"format": "pt"})


def dots1(out):
    """bf16, as glm4moe without groups and biases on q, k and v; weights of the chosen experts are not divided by their sum."""
    c = Dots1Config(**{**SHAPE, "num_hidden_layers": 3}, moe_intermediate_size=64, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1,
                    first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=False, sliding_window=None)
    save_with_bias(select(Dots1ForCausalLM(c), 53), out / "dots1")


def ernie45moe(out):
    """bf16, softmax with biases that select; shared experts; a dense layer first; rotation of numbers side by side."""
    c = Ernie4_5_MoeConfig(**{**SHAPE, "num_hidden_layers": 3, "pad_token_id": 0}, moe_intermediate_size=64, moe_num_experts=6, moe_k=3, moe_num_shared_experts=2,
                           tie_word_embeddings=True)
    save_with_bias(select(Ernie4_5_MoeForCausalLM(c), 54), out / "ernie45moe")


def minimaxm2(out):
    """bf16, sigmoid with biases that select in every layer; norms over all heads, of which half rotate."""
    c = MiniMaxM2Config(**{**SHAPE, "intermediate_size": 64, "pad_token_id": 0}, head_dim=32, num_local_experts=6, num_experts_per_tok=3,
                        rotary_dim=16, tie_word_embeddings=False)
    save_with_bias(select(MiniMaxM2ForCausalLM(c), 55), out / "minimaxm2")


def lfm2(out):
    """bf16, convolutions over three tokens around two layers with attention, the last layer one of them; published spelling: the width of
    the network follows from another, and layers with attention are listed."""
    c = Lfm2Config(**{**SHAPE, "num_hidden_layers": 6, "intermediate_size": 144, "pad_token_id": 0}, block_multiple_of=32, conv_L_cache=3,
                   full_attn_idxs=[1, 4], rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    d = out / "lfm2"
    spread(Lfm2ForCausalLM(c), 61).bfloat16().save_pretrained(d)
    old_spelling(d, 1e6, None)
    path = d / "config.json"
    c = json.loads(path.read_text())
    for name in ("layer_types", "intermediate_size", "tie_word_embeddings", "rope_scaling"):
        c.pop(name)
    path.write_text(json.dumps({**c, "block_ff_dim": 144, "tie_embedding": True}, indent=2) + "\n")


def lfm2moe(out):
    """bf16, as lfm2 with sigmoid routing behind one dense layer, biases that select."""
    c = Lfm2MoeConfig(**{**SHAPE, "num_hidden_layers": 4, "pad_token_id": 0}, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=3,
                      num_dense_layers=1, routed_scaling_factor=1.5, layer_types=["conv", "full_attention", "conv", "full_attention"],
                      rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    save_with_bias(select(Lfm2MoeForCausalLM(c), 62), out / "lfm2moe")


def delta(model, seed):
    """spread for gated delta rules: norms by 1 + w but for the gated ones, and decays from fast to slow. Large
    inputs of SiLU give queries and keys that are hardly ever at right angles: what they select would be lost in rounding, and a norm follows."""
    g = torch.Generator().manual_seed(seed)
    for name, p in spread(model, seed).named_parameters():
        if "norm" in name and "linear_attn" not in name:
            p.data -= 1
        elif name.endswith("A_log"):
            p.data = 2 * torch.randn(p.shape, generator=g) - 2
        elif "conv1d" in name:
            p.data *= 3
        elif "embed" in name or "lm_head" in name:
            p.data *= 0.5
    return model


DELTA = dict(head_dim=32, rms_norm_eps=1e-3, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=12, linear_value_head_dim=20)
ROUTED = dict(moe_intermediate_size=64, shared_expert_intermediate_size=96, num_experts=6, num_experts_per_tok=3)


def qwen3next(out):
    """bf16, the third of four layers attends, a quarter of each head rotates; inputs of a key head side by side."""
    c = Qwen3NextConfig(**{**SHAPE, "num_hidden_layers": 4}, **DELTA, **ROUTED, full_attention_interval=3)
    d = out / "qwen3next"
    delta(Qwen3NextForCausalLM(c), 71).bfloat16().save_pretrained(d)
    old_spelling(d, 1e4, None)
    path = d / "config.json"
    c = json.loads(path.read_text())
    c.pop("layer_types")
    path.write_text(json.dumps({**c, "full_attention_interval": 3, "partial_rotary_factor": 0.25}, indent=2) + "\n")


def qwen35(out):
    """bf16, text part of a model that sees pictures; the last layer has a recurrent state; heads of values of several blocks."""
    text = {**SHAPE, **DELTA, "num_hidden_layers": 5, "linear_num_value_heads": 12, "linear_key_head_dim": 8, "linear_value_head_dim": 32,
            "rope_parameters": sections(1, 2, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]}
    c = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    delta(Qwen3_5ForConditionalGeneration(c), 74).bfloat16().save_pretrained(out / "qwen35")


def qwen35moe(out):
    """bf16, as qwen35 with the experts of a layer in one tensor, as published; no width of dense layers; tensors that predict further tokens."""
    text = {**SHAPE, **DELTA, **ROUTED, "num_hidden_layers": 4, "rope_parameters": sections(1, 2, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
    text.pop("intermediate_size")
    c = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    d = out / "qwen35moe"
    delta(Qwen3_5MoeForConditionalGeneration(c), 73).bfloat16().save_pretrained(d)
    t = load_file(d / "model.safetensors")
    for i in range(4):
        experts = f"model.language_model.layers.{i}.mlp.experts"
        gate, up, down = (torch.stack([t.pop(f"{experts}.{e}.{p}_proj.weight") for e in range(6)]) for p in ("gate", "up", "down"))
        t[f"{experts}.gate_up_proj"], t[f"{experts}.down_proj"] = torch.cat([gate, up], 1), down
    t["mtp.fc.weight"] = t["mtp.layers.0.self_attn.o_proj.weight"] = torch.ones(64, 128).bfloat16()
    save_file({name: x.contiguous().clone() for name, x in t.items()}, d / "model.safetensors", metadata={"format": "pt"})


def mamba(model, seed):
    """select for Mamba-2: decays from fast to slow."""
    g = torch.Generator().manual_seed(seed)
    for name, p in select(model, seed).named_parameters():
        if name.endswith("A_log"):
            p.data = 2 * torch.randn(p.shape, generator=g) - 2
    return model


NARROW = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0}
GRANITE_HYBRID = dict(layer_types=["linear_attention", "full_attention", "linear_attention"], embedding_multiplier=3.0, attention_multiplier=0.3125,
                      residual_multiplier=0.5, logits_scaling=0.75, rms_norm_eps=1e-3, tie_word_embeddings=True)


def granitehybrid(out):
    """bf16, experts beside a network; four heads of Mamba-2 in two groups; attention does not rotate."""
    c = GraniteMoeHybridConfig(**{**NARROW, "intermediate_size": 8}, **GRANITE_HYBRID, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=8, mamba_expand=2,
                               num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24)
    d = out / "granitehybrid"
    mamba(GraniteMoeHybridForCausalLM(c), 81).bfloat16().save_pretrained(d)
    publish(d, layer_types=["mamba", "attention", "mamba"], position_embedding_type="nope", time_step_limit=None)


def granitehybriddense(out):
    """bf16, as granitehybrid without experts; heads share one group; Mamba-2 behind a layer with attention, which rotates."""
    c = GraniteMoeHybridConfig(**{**NARROW, "num_hidden_layers": 2}, **{**GRANITE_HYBRID, "layer_types": ["full_attention", "linear_attention"]}, mamba_n_heads=4,
                               mamba_n_groups=1, mamba_d_state=12, mamba_expand=3, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=24,
                               mamba_conv_bias=False, position_embedding_type="rope", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    mamba(GraniteMoeHybridForCausalLM(c), 82).bfloat16().save_pretrained(out / "granitehybriddense")


def nemotronh(out):
    """bf16, a mixer or a network in each layer, networks without gates; heads of Mamba-2 in two groups; a layer with attention last; published
    spelling: a letter for each layer."""
    c = NemotronHConfig(**{**NARROW, "intermediate_size": 64}, head_dim=8, layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention"],
                        mamba_num_heads=4, mamba_head_dim=24, n_groups=2, ssm_state_size=8, layer_norm_epsilon=1e-3, tie_word_embeddings=False)
    d = out / "nemotronh"
    mamba(NemotronHForCausalLM(c), 83).bfloat16().save_pretrained(d)
    publish(d, layers_block_type=None, hybrid_override_pattern="M-M*", num_hidden_layers=4)


def nemotronhmoe(out):
    """bf16, as Nemotron 3 Nano: experts without gates in the last layer and between others, sigmoids, biases that select, groups, a factor; a shared expert of
    its own width."""
    c = NemotronHConfig(**{**NARROW, "intermediate_size": 32}, head_dim=8, layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
                        mamba_num_heads=4, mamba_head_dim=16, n_groups=4, ssm_state_size=12, layer_norm_epsilon=1e-3, n_routed_experts=6, num_experts_per_tok=2,
                        moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, n_group=2, topk_group=1, routed_scaling_factor=2.5)
    save_with_bias(mamba(NemotronHForCausalLM(c), 84), out / "nemotronhmoe")


def nemotronhlatent(out):
    """bf16, as Nemotron 3 Super: experts that read and write a space narrower than the model, which the shared one does not; no groups."""
    c = NemotronHConfig(**{**NARROW, "intermediate_size": 32}, head_dim=8, layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
                        mamba_num_heads=4, mamba_head_dim=16, n_groups=4, ssm_state_size=12, layer_norm_epsilon=1e-3, n_routed_experts=6, num_experts_per_tok=3,
                        moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, moe_latent_size=32, n_group=1, topk_group=1,
                        routed_scaling_factor=5.0)
    save_with_bias(mamba(NemotronHForCausalLM(c), 86), out / "nemotronhlatent")


FALCON = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 1e11},
              embedding_multiplier=5.65, lm_head_multiplier=0.4, attention_in_multiplier=1.3, attention_out_multiplier=0.9375, key_multiplier=0.39,
              ssm_in_multiplier=1.25, ssm_out_multiplier=0.6, ssm_multipliers=[0.35, 0.7, 0.36, 0.5, 1.4], mlp_multipliers=[0.88, 0.59])


def falconh1(out):
    """bf16, attention and Mamba-2 side by side in each layer, every factor away from 1; no norm behind the scan."""
    c = FalconH1Config(**{**NARROW, "num_hidden_layers": 2, "intermediate_size": 64}, **FALCON, mamba_n_groups=2, mamba_d_state=8)
    mamba(FalconH1ForCausalLM(c), 85).bfloat16().save_pretrained(out / "falconh1")


def falconh1norm(out):
    """bf16, as falconh1 with a norm of the gated scan; heads share one group; convolutions without biases."""
    c = FalconH1Config(**{**NARROW, "num_hidden_layers": 2, "intermediate_size": 64}, **FALCON, mamba_n_groups=1, mamba_d_state=12, mamba_rms_norm=True,
                       mamba_norm_before_gate=False, mamba_conv_bias=False)
    mamba(FalconH1ForCausalLM(c), 86).bfloat16().save_pretrained(out / "falconh1norm")


GEMMA4_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
               "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}


def gemma4_weights(model, seed):
    """spread, with factors of layers away from 1 and products of queries and keys about as small as those of other families."""
    spread(model, seed)
    for i, layer in enumerate(model.get_decoder().layers):
        layer.layer_scalar.fill_(0.6 + 0.15 * i)
    for name, p in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            p.data *= 0.5
    return model


def gemma4(out):
    """bf16, as E2B: heads of 8 and 16, one KV head, embeddings for each layer; the last two layers read the entries of others and are twice as wide."""
    text = {**NARROW, "num_hidden_layers": 5, "num_key_value_heads": 1, "intermediate_size": 16, "pad_token_id": 0, "head_dim": 8, "global_head_dim": 16,
            "sliding_window": 40, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": NARROW["vocab_size"], "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True, "final_logit_softcapping": 6.0, "rms_norm_eps": 1e-2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": GEMMA4_ROPE}
    c = Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    gemma4_weights(Gemma4ForConditionalGeneration(c), 91).bfloat16().save_pretrained(out / "gemma4")


def gemma4dense(out):
    """bf16, as 31B: eight KV heads of 8 with a window, four of 16 without, where values are the keys; the fields of published files."""
    c = Gemma4TextConfig(**{**NARROW, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 16, "pad_token_id": 0},
                         head_dim=8, global_head_dim=16, num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=40,
                         hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"], rope_parameters=GEMMA4_ROPE)
    d = out / "gemma4dense"
    gemma4_weights(Gemma4ForCausalLM(c), 92).bfloat16().save_pretrained(d)
    publish(d, per_layer_config=None, global_head_dim=16, num_global_key_value_heads=4)


# Latent attention: heads of 20 numbers, of which 8 rotate, results of 10, entries of 24 + 8.
LATENT = {**NARROW, "num_key_value_heads": 4, "intermediate_size": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
          "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "tie_word_embeddings": True}
YARN = {"rope_theta": 10000.0, "factor": 8.0, "beta_fast": 4, "beta_slow": 1, "original_max_position_embeddings": 64}


def latent(model, seed):
    """select, with attention that distinguishes entries: the vector that they are made of has 24 numbers."""
    for name, p in select(model, seed).named_parameters():
        if "kv_b_proj" in name:
            p.data *= 1.5
    return model


def deepseekv2(out):
    """bf16, as V2: queries by a vector of their own; groups by their best expert; yarn with a factor on attention's products."""
    c = DeepseekV2Config(**LATENT, q_lora_rank=20, n_shared_experts=2, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=3.0,
                         norm_topk_prob=False, rope_parameters={"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707, **YARN})
    d = out / "deepseekv2"
    latent(DeepseekV2ForCausalLM(c), 101).bfloat16().save_pretrained(d)
    old_spelling(d, 10000.0, {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707, **{k: v for k, v in YARN.items() if k != "rope_theta"}})
    publish(d, moe_layer_freq=1, scoring_func="softmax", ep_size=1)


def deepseekv2lite(out):
    """bf16, as V2-Lite: queries of the layer's inputs, no groups."""
    c = DeepseekV2Config(**{**LATENT, "num_hidden_layers": 2}, q_lora_rank=None, n_shared_experts=1, topk_method="greedy", n_group=1, topk_group=1,
                         rope_parameters={"rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707, **YARN})
    latent(DeepseekV2ForCausalLM(c), 102).bfloat16().save_pretrained(out / "deepseekv2lite")


def deepseekv3(out):
    """bf16, as V3: sigmoids, biases that select, groups by their two best; a layer that predicts further tokens behind the last."""
    c = DeepseekV3Config(**LATENT, q_lora_rank=20, n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, num_mtp_layers=0,
                         rope_parameters={"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN})
    d = out / "deepseekv3"
    save_with_bias(latent(DeepseekV3ForCausalLM(c), 103), d)
    t = load_file(d / "model.safetensors")
    t["model.layers.3.self_attn.o_proj.weight"] = torch.ones(32, 40).bfloat16()
    save_file(t, d / "model.safetensors", metadata={"format": "pt"})


def glm4moelite(out):
    """f32, as GLM-4.7-Flash: as V3 without groups; an epsilon of its own; rotation of numbers half a head apart, factors on cosine and sine."""
    c = Glm4MoeLiteConfig(**{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}, q_lora_rank=20, n_shared_experts=1, routed_scaling_factor=1.8,
                          rms_norm_eps=1e-2, rope_interleave=False, rope_parameters={"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, **YARN})
    latent(Glm4MoeLiteForCausalLM(c), 104).save_pretrained(out / "glm4moelite")


def mistral4(out):
    """bf16, as Mistral Small 4: a softmax, every layer routed; queries grow with every original context that lies before them."""
    c = Mistral4Config(**{**LATENT, "num_hidden_layers": 2, "first_k_dense_replace": 0}, q_lora_rank=20, n_shared_experts=1,
                       rope_parameters={"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, **YARN})
    latent(Mistral4ForCausalLM(c), 105).bfloat16().save_pretrained(out / "mistral4")


def gemma4moe(out):
    """bf16, as 26B-A4B: experts beside the network of every layer, norms of either and of the router, a factor on each expert."""
    c = Gemma4TextConfig(**{**NARROW, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 32, "pad_token_id": 0},
                         head_dim=8, global_head_dim=16, num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=40, enable_moe_block=True,
                         num_experts=6, top_k_experts=2, moe_intermediate_size=32, rms_norm_eps=1e-2, hidden_size_per_layer_input=0,
                         layer_types=["sliding_attention", "full_attention"], rope_parameters=GEMMA4_ROPE)
    d = out / "gemma4moe"
    model = gemma4_weights(Gemma4ForCausalLM(c), 93)
    for name, p in model.named_parameters():
        if name.endswith(("router.scale", "per_expert_scale")):
            p.data = 1 + p.data
    model.bfloat16().save_pretrained(d)
    publish(d, per_layer_config=None, global_head_dim=16, num_global_key_value_heads=4)


def publish(d, **fields):
    """Fields as published files have them; None: none."""
    path = d / "config.json"
    c = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in c.items() if v is not None}, indent=2) + "\n")


def add_mtp(d):
    """Says that the layer is there: the reference does not read it."""
    path = d / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}, indent=2) + "\n")


def save_with_bias(model, d):
    """Biases that select stay float32, as published."""
    kept = {n: b.data.clone() for n, b in list(model.named_buffers()) + list(model.named_parameters()) if n.endswith(SELECTING)}
    model.bfloat16()
    for n, b in list(model.named_buffers()) + list(model.named_parameters()):
        if n in kept:
            b.data = kept[n]
    model.save_pretrained(d)


FAMILIES = (qwen3, qwen2, llama, mistral, phi3, smollm3, granite, gemma3, qwen3moe, mixtral, gemma2, olmo2, olmo3, exaone4, gptoss, ministral, seedoss,
            ernie45, glm, glm4, olmoe, qwen3vl, qwen3vlmoe, qwen25vl, gemma3vl, mistral3, ministral3, museglimmer, qwen2moe, glm4moe, dots1, ernie45moe, minimaxm2, lfm2,
            lfm2moe, qwen3next, qwen35, qwen35moe, granitehybrid, granitehybriddense, gemma4, gemma4dense, deepseekv2, deepseekv2lite, deepseekv3, glm4moelite,
            mistral4, nemotronh, nemotronhmoe, nemotronhlatent, falconh1, falconh1norm, gemma4moe)


def random_prompts():
    g = torch.Generator().manual_seed(11)
    return [torch.randint(0, 510, (n,), generator=g).tolist() for n in (1, 9, 150)]


def chat_prompts(directory):
    tok = AutoTokenizer.from_pretrained(directory)
    short = [{"role": "user", "content": "My sister Nora lives in Lisbon."}, {"role": "assistant", "content": "Noted."},
             {"role": "user", "content": "Where does Nora live?"}]
    long = [{"role": "user", "content": "The code of the garage is 4815. The birthday of Hugo is on 9 March."},
            {"role": "assistant", "content": "Noted."}]
    for noun in ("river", "forest", "tower", "garden", "bridge", "market"):
        long += [{"role": "user", "content": f"The old {noun} stands behind the wall. It is cold by the {noun} at noon."},
                 {"role": "assistant", "content": "That sounds nice."}]
    long += [{"role": "user", "content": "What is the code of the garage?"}]
    return [tok.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"]
            for m in ([{"role": "user", "content": "Hello!"}], short, long)]


@torch.no_grad()
def golden(directory, source, prompts, new_tokens):
    how = dict(attn_implementation="eager", experts_implementation="eager")
    kind = getattr(transformers, json.loads((source / "config.json").read_text())["architectures"][0])
    model, exact = (kind.from_pretrained(source, dtype=t, **how).eval() for t in (torch.float32, torch.float64))
    cases, last = [], []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(torch.tensor([ids])).logits[0]
        logp = logits.log_softmax(-1)
        off = float((exact(torch.tensor([ids])).logits[0].log_softmax(-1) - logp).abs().max())
        assert off < 1e-4, f"float64 differs by {off}"
        lp = [round(float(logp[i, t]), 6) for i, t in enumerate(ids[1:])]
        top = logp.topk(2, -1).values
        n = len(prompt)
        cases.append({"prompt": prompt, "prompt_logprobs": lp[:n - 1], "greedy": ids[n:], "logprobs": lp[n - 1:],
                      "margin": [round(float(top[i, 0] - top[i, 1]), 6) for i in range(n - 1, len(ids) - 1)]})
        last.append(logits[n - 1])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "golden.json").write_text(json.dumps({"cases": cases}) + "\n")
    (directory / "last_logits.f32").write_bytes(torch.stack(last).float().numpy().astype("<f4").tobytes())


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--model", type=Path, help="bundled model; left out: only the random ones")
    ap.add_argument("--families", nargs="*", help="of the random models, only these")
    ap.add_argument("--only-model", action="store_true")
    ap.add_argument("--out", type=Path, required=True)
    a = ap.parse_args()
    torch.set_num_threads(1)
    if not a.only_model:
        for make in FAMILIES:
            if a.families and make.__name__ not in a.families:
                continue
            make(a.out)
            d = a.out / make.__name__
            (d / "generation_config.json").unlink(missing_ok=True)
            golden(d, d, random_prompts(), 24)
            if make in (glm4moe, deepseekv3):
                add_mtp(d)
    if a.model:
        golden(a.out / a.model.name, a.model, chat_prompts(a.model), 24)


if __name__ == "__main__":
    main()
