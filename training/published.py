"""published.py OUT CONFIG...: writes what published models are, for tests/unit/model/test_published.c.

Each CONFIG is a copy of a model's config.json, the file named after the model. A line of OUT has the fields of the configuration
that a language model may depend on, and numbers that come from the classes of transformers, whose model is built without
memory: how many numbers its weights have, how many a token adds to the cache, its positions, layers with a window, layers with a
recurrent state. It needs transformers 5.24; the files are not kept here, only what they say."""
import json
import pathlib
import re
import sys
import tempfile

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

# Classes whose defaults are written, too: of families that none of the files is of.
DEFAULTS = {
    "Qwen3NextConfig": "Qwen3NextForCausalLM",
    "Lfm2Config": "Lfm2ForCausalLM",
    "Glm4MoeLiteConfig": "Glm4MoeLiteForCausalLM",
    "Ministral3Config": "Ministral3ForCausalLM",
    "Mistral4Config": "Mistral4ForCausalLM",
    "Ernie4_5_MoeConfig": "Ernie4_5_MoeForCausalLM",
    "SeedOssConfig": "SeedOssForCausalLM",
    "SmolLM3Config": "SmolLM3ForCausalLM",
}
# Types that transformers knows by another name.
OTHERS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Fields of files that say nothing of the language model.
UNREAD = re.compile(r"^(_|auto_map$|id2label|label2id|quantization|vision_|audio_|transformers_version|use_cache|initializer_range|"
                    r"image_|video_|pad_token|.*dropout|.*aux_loss|output_|media_|ignore_index|boi_|eoi_|boa_|eoa_|mamba_ssm|"
                    r"time_step_(floor|max|min)$|chunk_size$|use_mamba_kernels|rescale_|num_logits|pretraining_tp|ep_size|seq_aux|"
                    r"(max|min)_length|.*beam|return_dict|is_(en|de)coder|.*penalty|no_repeat|top_[kp]$|temperature$|bad_words|"
                    r"begin_supp|suppress|task_specific|torchscript|tokenizer_class|typical_p|cross_attention|add_cross|tie_encoder|"
                    r"finetuning|forced_|problem_type|prefix|pruned|sep_token|decoder_start|remove_invalid|diversity|early_stop|"
                    r"length_pen|do_sample|chunk_size_feed|use_bfloat16|exponential|tf_legacy|num_return|unsloth)")
NOT_TEXT = re.compile(r"(^|\.)mtp\.|vision|visual|audio|multi_modal")


def fields(config):
    return {key: fields(value) if key == "text_config" else value for key, value in config.items() if not UNREAD.match(key)}


def facts(config):
    text = config.get_text_config()
    with torch.device("meta"):
        try:
            model, headless = AutoModelForCausalLM.from_config(text), False
        except ValueError:  # the text part of a multimodal model has no class with a head
            model, headless = AutoModel.from_config(text), True
    tensors = {id(t): t.numel() for name, t in model.state_dict(keep_vars=True).items() if not NOT_TEXT.search(name)}
    tied = getattr(config, "tie_word_embeddings", None)
    if tied is None:
        tied = getattr(text, "tie_word_embeddings", False)
    modules = [(name, module) for name, module in model.named_modules() if not NOT_TEXT.search(name)]
    entry = 0
    for name, module in modules:
        last = name.split(".")[-1]
        if last in ("k_proj", "v_proj", "kv_a_proj_with_mqa"):
            entry += module.out_features
        if last == "k_proj" and getattr(model.get_submodule(name.rsplit(".", 1)[0]), "v_proj", 0) is None:
            entry += module.out_features  # Gemma 4: values are the keys
    states = sum(any(c in ("conv", "conv1d") for c, _ in module.named_children()) for _, module in modules)
    return {
        "numbers": sum(tensors.values()) + (text.vocab_size * text.hidden_size if headless and not tied else 0),
        "entry": entry,
        "positions": text.max_position_embeddings,
        "windowed": sum(kind == "sliding_attention" for kind in getattr(text, "layer_types", None) or []),
        "states": states,
    }


def read(path):
    config = json.loads(pathlib.Path(path).read_text())
    known = {**config, "model_type": OTHERS.get(config["model_type"], config["model_type"])}
    for key in ("auto_map", "quantization_config"):
        known.pop(key, None)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(known))
        return fields(config), facts(AutoConfig.from_pretrained(folder))


def main():
    transformers.logging.set_verbosity_error()
    rows = []
    for path in sys.argv[2:]:
        name = pathlib.Path(path).name.removesuffix(".json").removesuffix("_config").split("--")[-1]
        config, numbers = read(path)
        rows.append({"model": name, "config": config, **numbers})
    for class_name, architecture in DEFAULTS.items():
        config = getattr(transformers, class_name)()
        said = {"architectures": [architecture], **fields(json.loads(config.to_json_string(use_diff=False)))}
        rows.append({"model": class_name, "config": said, **facts(config)})
    rows.sort(key=lambda row: row["model"].lower())
    lines = [json.dumps(row, separators=(",", ":")).replace("Infinity", "1e999") for row in rows]
    pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
