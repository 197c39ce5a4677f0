#!/usr/bin/env python3
"""Makes the small tokenizers and the golden ids of this folder.

Needs the package `tokenizers` (0.22.2), which the test suite itself does not need:
    pip install tokenizers==0.22.2 && python make_goldens.py [MORE_DATA]
MORE_DATA, a folder with tokenizers/smollm2 and tokenizers/qwen2, adds golden-smollm2.json and
golden-qwen2.json: ids of those vocabularies, which are too large to be kept here.
"""
import json
import pathlib
import sys

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

HERE = pathlib.Path(__file__).parent

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

CORPUS = """
The quick brown fox jumps over the lazy dog. The dog was not amused, and neither was the fox.
What is the budget of a cache? It is the number of entries that it may hold on average.
I'm sure they'll say it's what we'd have done; you've seen that they're right, haven't you?
There were 1234 pages in 12 books, 7 of them from 1999, and 3.14159 is about pi.
def main(argc, argv):\n    for i in range(10):\n        print(i, argv[i])\n    return 0\n
for (int i = 0; i < n; i++) {\n\tsum += values[i] * weights[i];\n}\n
Le chat dort sur la chaise près de la fenêtre; où est-il allé après le déjeuner ?
Der Bär läuft über die Straße und schläft später im großen Wald.
El niño comió una manzana y después jugó con su perro pequeño.
Съешь же ещё этих мягких французских булок, да выпей чаю.
吃葡萄不吐葡萄皮。我们今天去公园散步，天气很好。
今日は天気がいいので、散歩に行きましょう。
오늘은 날씨가 좋아서 산책을 갑니다.
مرحبا بالعالم، كيف حالك اليوم؟
नमस्ते दुनिया, आप कैसे हैं?
👍 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🎉🎉🎉
""".strip().split("\n")

TEXTS = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", " \n ", "a", "ab", "é", "e\u0301",
    "Hello, world!", " Hello, world!", "Hello  world", "the the the the", "   leading and trailing   ",
    "I'm sure they'll say it's what we'd have done; you've seen THEY'RE RIGHT, HAVEN'T YOU?",
    "1", "12", "123", "1234", "12345", "123456789012345678901234567890", "3.14159", "v1.2.3-rc4",
    "\u0661\u0662\u0663 \u0967\u0968\u0969 \uff11\uff12\uff13 \u216b \u00b2 \u00bd \u2460 \u4e00\u4e8c",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))  # comment\n", "\tif (a<b) {\r\n\t\treturn;\r\n\t}\r\n",
    "https://example.com/path?x=1&y=%20#frag foo@example.com",
    "Le chat est allé près de la fenêtre", "Der große Bär schläft auf der Straße",
    "Съешь же ещё этих мягких французских булок", "吃葡萄不吐葡萄皮。", "今日は天気がいい", "오늘은 날씨가 좋다",
    "مرحبا بالعالم", "नमस्ते दुनिया", "ไทยภาษา", "\u1100\u1161\u11a8\u1102\u1161",
    "a\u0323\u0307 a\u0307\u0323 q\u0307\u0323 \u212b \u2126 \ufb01 \u1e9b\u0323 \u0344",
    "Cafe\u0301 cafe\u0301s CAFE\u0301", "x\u0338 <\u0338 >\u0338 =\u0338",
    "👍", "👍🏽👍🏿", "👨‍👩‍👧‍👦 family", "🏳️‍🌈", "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
    "\u00a0non\u00a0breaking\u00a0", "\u3000wide\u3000", "zero\u200bwidth", "line\u2028sep\u2029para", "\u180emongolian\u180e",
    "\ufefftext with a mark", "tab\tand\x0bvertical\x0cfeed\x1funit", "\u0085next line",
    "!!!???...", "(((nested)))[brackets]{braces}", "a-b_c/d\\e|f~g`h^i", "\"quoted\" 'single' “curly” ‘curly’",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 50 + "x" + " " * 49, "\n" * 20 + " " * 20 + "\n" * 3, "abc" * 40, "the quick brown fox " * 8,
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "<|im_start|><|im_start|><|im_end|>",
    "<|im_start|", "<|im_start|>>", "<<|im_start|>", "<|im_<|im_start|>start|>",
    "<think>\nlet me see\n</think>\n\nanswer", "a <think> b</think>c", "x<tool_call>y</tool_call>z",
    "this AND that", "thisANDthat", "AND", " AND ", "éANDé", "_AND_ .AND.", "AND AND",
    "fill  <mask>  here", "<mask><mask>", " <mask>", "end</s>   next", "</s>\n\n</s>", "</s>  <mask>",
    "caf\u00e9 token and cafe\u0301 token", "[NFC\u00e9] [NFCe\u0301]", "\u2581under\u2581line",
    "<|begin|>x<|end|>", "<|begin|>", "2<|end|>3 <|end|>",
]


def train(pre_tokenizer, normalizer=None, size=600, model=None):
    tokenizer = Tokenizer(models.BPE(**(model or {})))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(
        vocab_size=size, show_progress=False, min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def bytes_only(**kind):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, **kind)


def split(pattern, behavior, invert=False):
    return pre_tokenizers.Split(pattern, behavior, invert)


def qwen_style():
    t = train(pre_tokenizers.Sequence([split(Regex(QWEN2), "isolated"), bytes_only()]), normalizers.NFC())
    t.add_special_tokens([AddedToken(c, normalized=False) for c in
                          ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    t.add_tokens([AddedToken(c, normalized=False) for c in
                  ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    t.add_tokens([AddedToken("AND", single_word=True, normalized=False),
                  AddedToken("caf\u00e9", normalized=True), AddedToken("\u2581", normalized=True)])
    t.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False),
                          AddedToken("</s>", rstrip=True, normalized=False),
                          AddedToken("[NFC\u00e9]", normalized=True)])
    return t


def llama3_style():
    t = train(pre_tokenizers.Sequence([split(Regex(LLAMA3), "isolated"), bytes_only()]),
              model={"ignore_merges": True})
    t.add_special_tokens([AddedToken(c, normalized=False) for c in ("<|begin|>", "<|end|>")])
    begin = t.token_to_id("<|begin|>")
    t.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B",
                                      special_tokens=[("<|begin|>", begin)])])
    return t


def smollm_style():
    t = train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                       pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    t.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    end = t.token_to_id("<|im_end|>")
    t.post_processor = processors.TemplateProcessing(single="$A <|im_end|>",
                                                     special_tokens=[("<|im_end|>", end)])
    return t


def gpt2_style():
    return train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False),
                                          pre_tokenizers.ByteLevel(add_prefix_space=True)]))


def deepseek_style():
    return train(pre_tokenizers.Sequence([
        split(Regex(r"[\r\n]"), "isolated"), split(Regex(r"\s?\p{L}+"), "isolated"),
        split(Regex(r"\s?\p{P}+"), "isolated"), split(Regex("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True), bytes_only()]))


def behaviors():
    """Every behaviour of Split, in and out, by string and by regex."""
    return train(pre_tokenizers.Sequence([
        split(" ", "merged_with_next"), split(Regex(r"\p{Lu}"), "merged_with_previous"),
        split(Regex(r"\d+"), "contiguous"), split(".", "merged_with_previous"),
        split(Regex(r"[a-z]+|\s"), "merged_with_next", True), split(Regex(r"[!?]"), "removed"),
        split(Regex(r"(?=x)"), "isolated"), split(Regex(r"[^|]+"), "removed", True), bytes_only()]))


def case(tokenizer, text, specials, template):
    tokenizer.encode_special_tokens = not specials
    ids = tokenizer.encode(text, add_special_tokens=template).ids
    return {"text": text, "specials": specials, "template": template, "ids": ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False)}


def write_cases(path, tokenizer):
    cases = [case(tokenizer, text, True, False) for text in TEXTS]
    # The other settings only where they change something.
    for text in TEXTS:
        for specials, template in ((False, False), (True, True)):
            other = case(tokenizer, text, specials, template)
            if other["ids"] != case(tokenizer, text, True, False)["ids"]:
                cases.append(other)
    lines = ",\n".join(json.dumps(c, ensure_ascii=True, separators=(",", ":")) for c in cases)
    path.write_text("[\n" + lines + "\n]\n")
    print(path.name, len(cases), "cases")


def qwen2(folder):
    """tokenizer.json of a directory that has none, as transformers makes it."""
    t = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([split(Regex(QWEN2), "isolated"), bytes_only()])
    t.decoder = decoders.ByteLevel()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for key, token in sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
        special = token["special"]
        added = AddedToken(token.pop("content"), **token)
        (t.add_special_tokens if special else t.add_tokens)([added])
        assert t.token_to_id(added.content) == int(key)
    return t


def main():
    for make in (qwen_style, llama3_style, smollm_style, gpt2_style, deepseek_style, behaviors):
        name = make.__name__.replace("_", "-")
        tokenizer = make()
        tokenizer.save(str(HERE / f"{name}.json"), pretty=False)
        write_cases(HERE / f"golden-{name}.json", tokenizer)
    if len(sys.argv) > 1:
        more = pathlib.Path(sys.argv[1]) / "tokenizers"
        write_cases(HERE / "golden-smollm2.json", Tokenizer.from_file(str(more / "smollm2/tokenizer.json")))
        write_cases(HERE / "golden-qwen2.json", qwen2(more / "qwen2"))


main()
