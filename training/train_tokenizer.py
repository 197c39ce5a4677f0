"""Trains the byte-level BPE of keepd-nano and writes the tokenizer files of its directory.

    python train_tokenizer.py --out ../bundled/keepd-nano
"""

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import corpus

# Qwen2's split with single digits: a code must be copied digit by digit.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = [corpus.END_OF_TEXT, corpus.IM_START, corpus.IM_END]

# No default system prompt and no trimming: turn n must render to a token prefix of turn n+1.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train(vocab, seed, count):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    source = corpus.mixture("train", seed, 512)

    def texts():
        # Role names are part of every prompt; each must become a single token.
        for _ in range(count):
            for m in next(source).messages:
                yield m["role"] + "\n"
                yield m["content"]

    tok.train_from_iterator(texts(), trainer)
    return tok


def tokenizer_config():
    decoder = {str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                        "single_word": False, "special": True} for i, t in enumerate(SPECIAL)}
    return {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": decoder,
            "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": corpus.IM_END,
            "errors": "replace", "model_max_length": 8192, "pad_token": corpus.END_OF_TEXT,
            "split_special_tokens": False, "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None}


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--vocab", type=int, default=2048)
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--dialogues", type=int, default=4000)
    a = ap.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    tok = train(a.vocab, a.seed, a.dialogues)
    tok.save(str(a.out / "tokenizer.json"))
    (a.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    (a.out / "chat_template.jinja").write_text(TEMPLATE)
    generation = {"do_sample": False, "eos_token_id": [tok.token_to_id(corpus.IM_END), tok.token_to_id(corpus.END_OF_TEXT)],
                  "pad_token_id": tok.token_to_id(corpus.END_OF_TEXT)}
    (a.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    print(f"{tok.get_vocab_size()} entries in {a.out / 'tokenizer.json'}")


if __name__ == "__main__":
    main()
