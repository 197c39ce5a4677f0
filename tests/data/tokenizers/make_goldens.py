#!/usr/bin/env python3
"""Makes the small tokenizers and the golden ids of this folder.

Needs the packages `tokenizers` (0.22.2) and `sentencepiece` (0.2.3), which the test suite itself does not need:
    pip install tokenizers==0.22.2 sentencepiece==0.2.3 && python make_goldens.py [MORE_DATA]
MORE_DATA, a folder with tokenizers/smollm2, qwen2 and phi-3-mini, adds golden-smollm2.json,
golden-qwen2.json and golden-phi-3-mini.json: ids of those vocabularies, which are too large to be kept here.
"""
import json
import pathlib
import sys
import tempfile

import sentencepiece as sp
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


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(size=420, alphabet=90, **model):
    """BPE over characters as converted from SentencePiece: three control tokens, bytes, pieces."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(
        vocab_size=size, show_progress=False, min_frequency=2, limit_alphabet=alphabet))
    learned = json.loads(learner.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + (BYTES if model.get("byte_fallback") else [])
    names += sorted(learned["vocab"], key=learned["vocab"].get)
    t = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)},
                             merges=[tuple(m) for m in learned["merges"]], unk_token="<unk>", **model))
    t.add_special_tokens([AddedToken(n, normalized=False) for n in ("<unk>", "<s>")])
    return t


def begin_with(t, token):
    t.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, t.token_to_id(token))])
    return t


def llama2_style():
    """Prepend and Replace; an added token that is normalised, one that swallows what follows."""
    t = sentencepiece(byte_fallback=True, fuse_unk=True)
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([AddedToken("</s>", rstrip=True, normalized=False),
                          AddedToken("<|im_start|>", rstrip=True, normalized=False),
                          AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False),
                          AddedToken("[NFC\u00e9]", normalized=True)])
    t.add_tokens([AddedToken("AND", single_word=True, normalized=True), AddedToken("<think>", normalized=False)])
    return begin_with(t, "<s>")


def gemma_style():
    t = sentencepiece(byte_fallback=True, fuse_unk=True)
    t.normalizer = normalizers.Replace(" ", "\u2581")
    t.pre_tokenizer = split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_tokens([AddedToken(n, normalized=False) for n in
                  ("\n\n", "\n\n\n", "\t\t", "\u2581\u2581", "\u2581\u2581\u2581", "<think>")])
    t.add_special_tokens([AddedToken(n, normalized=False) for n in ("</s>", "<|im_start|>", "<|im_end|>")])
    return begin_with(t, "<s>")


def metaspace_style():
    """Metaspace before the first word alone and no cut, as in files that are not legacy."""
    t = sentencepiece(byte_fallback=True, fuse_unk=True, ignore_merges=True)
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([AddedToken("</s>", normalized=False), AddedToken("  ", lstrip=True, rstrip=True)])
    return begin_with(t, "<s>")


def unknown_style():
    """No bytes to fall back on: unknown tokens, one for each character; NFKC; words by Metaspace."""
    t = sentencepiece(alphabet=40)
    t.normalizer = normalizers.NFKC()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    t.decoder = decoders.Metaspace()
    t.add_special_tokens([AddedToken("</s>", normalized=False), AddedToken("<mask>", lstrip=True)])
    end = t.token_to_id("</s>")
    t.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", t.token_to_id("<s>")))
    return t


def falcon_style():
    """Stages after ByteLevel see its characters; bytes that are missing become the unknown token."""
    t = train(pre_tokenizers.Sequence([
        pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False), split(Regex("[0-9][0-9][0-9]"), "isolated"),
        split("\u0120", "merged_with_next")]))
    return t


def lacking_style():
    """A byte-level vocabulary without all bytes, and an unknown token that is fused."""
    t = train(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), bytes_only()]), normalizers.NFD())
    model = json.loads(t.to_str())["model"]
    merges = [tuple(m) for m in model["merges"]]
    used = {x for m in merges for x in (m[0], m[1], m[0] + m[1])}
    names = ["<unk>"] + sorted(n for n in model["vocab"] if n in used or n.isascii())
    new = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges,
                               unk_token="<unk>", fuse_unk=True))
    new.normalizer, new.pre_tokenizer, new.decoder = t.normalizer, t.pre_tokenizer, t.decoder
    return new


def fields(message):
    """(number, value) of the fields of a protobuf message that are numbers, floats or bytes."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value
    while at < len(message):
        key = number()
        size = {0: 0, 1: 8, 5: 4}.get(key & 7)
        size = number() if size is None else size
        value = message[at:at + size] if size else number() if key & 7 == 0 else b""
        at += size
        yield key >> 3, value


def charsmap(rules):
    """SentencePiece's compiled table of replacements, {text: text}."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        words = (" ".join(f"{ord(c):X}" for c in text) for pair in rules.items() for text in pair)
        (folder / "rules.tsv").write_text("".join(f"{old}\t{new}\n" for old, new in zip(words, words)))
        (folder / "text").write_text("some words of text\n" * 20)
        sp.SentencePieceTrainer.train(input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=30,
                                      normalization_rule_tsv=str(folder / "rules.tsv"), hard_vocab_limit=False,
                                      minloglevel=2)
        return dict(fields(dict(fields((folder / "m.model").read_bytes()))[3]))[2]


def unigram(size, pieces=(), **more):
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.train_from_iterator(CORPUS * 3, trainers.UnigramTrainer(
        vocab_size=size, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", *pieces], unk_token="<unk>"))
    file = json.loads(t.to_str())
    file["added_tokens"] = []
    file["model"].update(more)
    t = Tokenizer.from_str(json.dumps(file))
    t.add_special_tokens([AddedToken(n, normalized=False) for n in ("<unk>", "<s>", "</s>")])
    return t


def t5_style():
    t = unigram(400)
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    t.decoder = decoders.Metaspace()
    t.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    end = t.token_to_id("</s>")
    t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return t


def unigram_bytes():
    """Unigram with byte fallback, over whole texts."""
    t = unigram(360, BYTES, byte_fallback=True)
    t.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Replace(" ", "\u2581")])
    t.pre_tokenizer = None
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return begin_with(t, "<s>")


def precompiled_style():
    """As T5 and XLM-R: SentencePiece's own normalisation, cluster by cluster."""
    t = unigram(380)
    rules = {"e\u0301": "\u00e9", "\ufb01": "fi", "\uff11": "1", "\uff12": "2", "\u2460": "1", "\u2126": "\u03a9", "\u212b": "\u00c5",
             "\r": " ", "\n": " ", "\t": " ", "\u3000": " ", "\u00a0": " ", "\u200b": "", "\u2026": "...", "\u00df": "ss",
             "\u1100\u1161": "\uac00", "a\u0323": "\u1ea1", "\u2028": " "}
    t.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap(rules)), normalizers.Strip(False, True),
                                         normalizers.Replace(Regex(" {2,}"), "\u2581")])
    t.decoder = decoders.Metaspace()
    t.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    end = t.token_to_id("</s>")
    t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return t


def lowercase_style():
    t = unigram(380)
    t.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKD(), normalizers.StripAccents(),
                                         normalizers.Lowercase(), normalizers.Strip()])
    t.decoder = decoders.Metaspace()
    return t


def bert_style():
    t = unigram(380)
    t.normalizer = normalizers.BertNormalizer()
    t.decoder = decoders.Metaspace()
    return t


def wordpiece(normalizer, cleanup=True, prefix="##", size=500, most=100):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer = normalizer
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    t.train_from_iterator(CORPUS * 3, trainers.WordPieceTrainer(
        vocab_size=size, show_progress=False, min_frequency=2, limit_alphabet=150, continuing_subword_prefix=prefix,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    t.model = models.WordPiece(vocab=t.get_vocab(), unk_token="[UNK]", continuing_subword_prefix=prefix,
                               max_input_chars_per_word=most)
    t.decoder = decoders.WordPiece(prefix=prefix, cleanup=cleanup)
    t.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(n, t.token_to_id(n)) for n in ("[CLS]", "[SEP]")])
    return t


def wordpiece_style():
    """As BERT's, in small letters without accents."""
    return wordpiece(normalizers.BertNormalizer())


def wordpiece_cased():
    """Letters and accents stay; short words are unknown already; another prefix; texts as they are."""
    return wordpiece(normalizers.BertNormalizer(lowercase=False), cleanup=False, prefix="@@", size=380, most=9)


def case(tokenizer, text, specials, template):
    tokenizer.encode_special_tokens = not specials
    ids = tokenizer.encode(text, add_special_tokens=template).ids
    return {"text": text, "specials": specials, "template": template, "ids": ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False)}


def write_cases(path, tokenizer):
    marked = {i for i, token in tokenizer.get_added_tokens_decoder().items()
              if token.special and token.content != "<unk>"}
    cases = [case(tokenizer, text, True, False) for text in TEXTS]
    # The other settings only where they change something; what a template adds is always the same.
    for i, text in enumerate(TEXTS):
        for specials, template in ((False, False), (True, True))[:2 if i % 10 == 0 else 1]:
            other = case(tokenizer, text, specials, template)
            # A vocabulary may hold special tokens that a model makes of text; keepd never does.
            if not specials and marked & set(other["ids"]):
                continue
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
    for make in (qwen_style, llama3_style, smollm_style, gpt2_style, deepseek_style, behaviors, llama2_style,
                 gemma_style, metaspace_style, unknown_style, falcon_style, lacking_style, t5_style, unigram_bytes,
                 precompiled_style, lowercase_style, bert_style, wordpiece_style, wordpiece_cased):
        name = make.__name__.replace("_", "-")
        tokenizer = make()
        tokenizer.save(str(HERE / f"{name}.json"), pretty=False)
        write_cases(HERE / f"golden-{name}.json", tokenizer)
    if len(sys.argv) > 1:
        more = pathlib.Path(sys.argv[1]) / "tokenizers"
        write_cases(HERE / "golden-smollm2.json", Tokenizer.from_file(str(more / "smollm2/tokenizer.json")))
        write_cases(HERE / "golden-qwen2.json", qwen2(more / "qwen2"))
        write_cases(HERE / "golden-phi-3-mini.json", Tokenizer.from_file(str(more / "phi-3-mini/tokenizer.json")))


main()
