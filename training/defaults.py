"""defaults.py OUT: writes the defaults of the configuration classes of transformers (5.24), for
tests/unit/model/test_published.c: a line for each family that keepd serves. A file of a model may leave any of these fields out,
and then means the default."""
import json
import pathlib
import sys

import transformers
from published import fields
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES = {
    "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "granite": "GraniteForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM", "mixtral": "MixtralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM",
    "ministral": "MinistralForCausalLM", "seed_oss": "SeedOssForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
    "glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM", "olmoe": "OlmoeForCausalLM", "exaone4": "Exaone4ForCausalLM",
    "qwen3_vl_text": "Qwen3VLForConditionalGeneration", "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "qwen2_5_vl_text": "Qwen2_5_VLForConditionalGeneration", "muse_glimmer_text": "MuseGlimmerForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "dots1": "Dots1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM", "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM", "nemotron_h": "NemotronHForCausalLM", "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM", "ministral3": "Ministral3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
# Fields without which the defaults of a class do not fit each other.
SIZES = {
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "attention"]},
}


def main():
    transformers.logging.set_verbosity_error()
    lines = []
    for family, architecture in FAMILIES.items():
        if family not in CONFIG_MAPPING:
            print(f"{family}: transformers {transformers.__version__} has no such class", file=sys.stderr)
            continue
        config = json.loads(CONFIG_MAPPING[family](**SIZES.get(family, {})).to_json_string(use_diff=False))
        config = fields({**config, "architectures": [architecture], "model_type": family})
        lines.append(json.dumps(config, separators=(",", ":")).replace("Infinity", "1e999"))
    pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
