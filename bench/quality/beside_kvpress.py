#!/usr/bin/env python3
"""The same model, texts and rows under kvpress (PyPI), beside keepd's policies of the same names.

    beside_kvpress.py kvpress --model DIR --rows rows.jsonl --essays essays/ --out DIR
    beside_kvpress.py keepd   --model FILE --essays essays/ --out DIR
    answers.py        --model FILE --rows rows.jsonl --protocols unknown --methods snapkv,tova --out DIR
    beside_kvpress.py report  --out DIR

kvpress computes with transformers and torch, so the first command needs a Python with kvpress and a model directory in
float32 with the numbers that keepd serves (transformers reads a GGUF file: from_pretrained(folder, gguf_file=name)). Both sides compress once, after
the context and before anything else is known:

  rows     questions in the form of answers.py, with the question unknown at the compression
  essays   the first --length tokens of each text: one half is compressed, the other half is scored with what is left

Writes DIR/answers.jsonl, which answers.py continues, and DIR/nats.jsonl; a later run goes on from there. The report has the
difference of keepd to kvpress, paired by context and by text, with 95 % intervals.
"""
import argparse
import json
import pathlib
import sys

import answers
import texts
from lab import client, report, statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = "kvpress:"   # before the methods' names in answers.jsonl
SINKS = 4


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=("kvpress", "keepd", "report"))
    ap.add_argument("--model")
    ap.add_argument("--gates", help="gates file for the daemon that is started")
    ap.add_argument("--rows", type=pathlib.Path, help="rows in JSON lines, as answers.py takes them")
    ap.add_argument("--essays", type=pathlib.Path, help="folder of .txt files")
    ap.add_argument("--methods", default="snapkv,adakv,tova,keydiff,knorm,streaming,expected_attention")
    ap.add_argument("--shares", default="0.25,0.125", help="of the tokens that are compressed (0.25,0.125)")
    ap.add_argument("--length", type=int, default=1024, help="tokens of a text, of which one half is compressed (1024)")
    ap.add_argument("--count", type=int, default=32, help="at most so many texts (32)")
    ap.add_argument("--contexts", type=int, default=13, help="at most so many contexts of each task (13)")
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--url", help="keepd: a running daemon; default: start one")
    ap.add_argument("--binary", default=str(ROOT / "build" / "keepd"))
    a = ap.parse_args()
    a.shares, a.methods = [float(s) for s in a.shares.split(",")], a.methods.split(",")
    return a


class Nats:
    """Scores of the second halves: {(side, method, share): {text: (nats, tokens)}}."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.cells = folder / "nats.jsonl", {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            self.keep(**json.loads(line))

    def keep(self, side, method, share, text, nats, tokens):
        self.cells.setdefault((side, method, share), {})[text] = nats, tokens

    def add(self, **line):
        self.keep(**line)
        with self.path.open("a") as f:
            f.write(json.dumps(line) + "\n")

    def has(self, side, method, share, text):
        return text in self.cells.get((side, method, share), {})


# --- kvpress ---------------------------------------------------------------------------------------


def presses(name, share):
    """kvpress's method of that name, with the window and the smoothing that keepd's row has."""
    import kvpress
    ratio = 1 - share
    made = {"snapkv": lambda: kvpress.SnapKVPress(ratio, window_size=32, kernel_size=5),
            "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=32, kernel_size=7), alpha_safeguard=0.2),
            "tova": lambda: kvpress.TOVAPress(ratio), "keydiff": lambda: kvpress.KeyDiffPress(ratio),
            "knorm": lambda: kvpress.KnormPress(ratio), "lagkv": lambda: kvpress.LagKVPress(ratio, n_sink=SINKS),
            "streaming": lambda: kvpress.StreamingLLMPress(ratio, n_sink=SINKS),
            "expected_attention": lambda: kvpress.ExpectedAttentionPress(ratio, n_sink=SINKS)}
    if name not in made:
        raise SystemExit(f"{name}: kvpress is asked for {', '.join(made)}")
    return made[name]()


class Press:
    """The model, and what several methods keep of one context, which is read once."""

    def __init__(self, folder, threads):
        import kvpress
        import torch
        import transformers
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.transformers, self.base = torch, transformers, kvpress.BasePress
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.strings = {}
        for token in range(len(self.tokenizer)):
            self.strings.setdefault(self.tokenizer.decode([token]), []).append(token)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def read(self, ids, methods):
        """({method: [(keys, values, masked) of each layer]}, logits of the last token). `methods`: {name: press or None}."""
        kept = {name: [] for name in methods}

        class Many(self.base):
            def forward_hook(_, module, inputs, kwargs, output):
                layer = kwargs["past_key_values"].layers[module.layer_idx]
                for name, press in methods.items():
                    module.masked_key_indices = None
                    found = layer.keys, layer.values
                    if press:
                        found = press.compress(module, kwargs["hidden_states"], *found, output[1], kwargs)
                    kept[name].append((*found, module.masked_key_indices))
                module.masked_key_indices = None
                return output

        for press in filter(None, methods.values()):
            press.post_init_from_model(self.model)
        with self.torch.no_grad(), Many()(self.model):
            out = self.model(self.torch.tensor([ids]), past_key_values=self.transformers.DynamicCache())
        return kept, out.logits[0, -1]

    def cache(self, kept, copies):
        """A cache of what was kept, for so many texts that continue it."""
        cache = self.transformers.DynamicCache()
        for layer, (keys, values, masked) in enumerate(kept):
            cache.update(keys.repeat(copies, 1, 1, 1), values.repeat(copies, 1, 1, 1), layer)
            module = self.model.model.layers[layer].self_attn
            module.masked_key_indices = masked and tuple(
                self.torch.cat([index + copy * (part == 0) for copy in range(copies)]) for part, index in enumerate(masked))
        return cache

    def forward(self, cache, rows, mask, places):
        with self.torch.no_grad():
            return self.model(self.torch.tensor(rows), past_key_values=cache, attention_mask=mask,
                              position_ids=self.torch.tensor(places)).logits

    def score(self, kept, last, ids, following):
        """Summed negative log-likelihood of `following`, the first of which the context's last token predicts."""
        torch, count = self.torch, len(following)
        cache = self.cache(kept, 1)
        mask = torch.ones(1, cache.get_seq_length() + count - 1, dtype=torch.long)
        logits = self.forward(cache, [following[:-1]], mask, [list(range(len(ids), len(ids) + count - 1))])[0]
        chances = torch.log_softmax(torch.cat([last[None], logits]).double(), -1)
        return -chances[torch.arange(count), torch.tensor(following)].sum().item()

    def allowed(self, row, text):
        """Tokens with which an answer may go on; None: any. An answer that is a choice has ended."""
        if not row.get("choices"):
            return None
        left = [" " + c for c in row["choices"]]
        left = [c[len(text):] for c in left if c.startswith(text) and c != text]
        return [t for c in left for n in range(1, len(c) + 1) for t in self.strings.get(c[:n], ())]

    def pick(self, row, tokens, logits):
        """The next token, greedy; None at the end."""
        if len(tokens) >= row["max_new_tokens"]:
            return None
        text = self.tokenizer.decode(tokens)
        among = self.allowed(row, text)
        if among is None:
            token = int(logits.argmax())
        elif among:
            token = max(among, key=lambda t: float(logits[t]))
        else:
            return None
        return None if token in self.ends else token

    def answer(self, kept, length, questions, rows):
        """The replies to questions that all continue a compressed context of `length` tokens, at once."""
        torch, most = self.torch, max(map(len, questions))
        cache = self.cache(kept, len(rows))
        pads = [most - len(q) for q in questions]
        mask = torch.ones(len(rows), cache.get_seq_length() + most, dtype=torch.long)
        for i, pad in enumerate(pads):
            mask[i, mask.shape[1] - most:mask.shape[1] - most + pad] = 0
        places = [[length] * pad + list(range(length, length + len(q))) for pad, q in zip(pads, questions)]
        logits = self.forward(cache, [[q[0]] * pad + q for pad, q in zip(pads, questions)], mask, places)[:, -1]
        said, at = [[] for _ in rows], [length + len(q) for q in questions]
        open_ = set(range(len(rows)))
        while True:
            for i in sorted(open_):
                token = self.pick(rows[i], said[i], logits[i])
                said[i].append(token) if token is not None else open_.discard(i)
            if not open_:
                return [self.tokenizer.decode(tokens) for tokens in said]
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
            logits = self.forward(cache, [[tokens[-1] if tokens else 0] for tokens in said], mask, [[n] for n in at])[:, -1]
            at = [n + 1 for n in at]


def pieces(press, row):
    """Token ids of the context, and of the question with what precedes the answer (answers.pieces)."""
    chat = row["context"] if isinstance(row["context"], list) else []
    text = "" if chat else row["context"]
    turn = chat + [{"role": "user", "content": text + answers.MARK + row["question"] + answers.MARK}]
    prompt = press.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + row["answer_prefix"]
    context, question, begins = (press.ids(part) for part in prompt.split(answers.MARK))
    return context, question + begins


def methods_of(a):
    """{(name, share): press}, with the full cache."""
    return {("full", 1.0): None, **{(m, s): presses(m, s) for s in a.shares for m in a.methods}}


def press_rows(a, press):
    store = answers.Store(a.out)
    for task, number, rows in answers.groups(a, None):
        left = {cell: p for cell, p in methods_of(a).items()
                if (task, number, PREFIX + cell[0], cell[1], "unknown") not in store.done}
        if number >= a.contexts or not left:
            continue
        parts = [pieces(press, row) for row in rows]
        kept, _ = press.read(parts[0][0], left)
        for (method, share), found in kept.items():
            replies = press.answer(found, len(parts[0][0]), [question for _, question in parts], rows)
            store.add(task=task, context=number, method=PREFIX + method, share=share, protocol="unknown",
                      got=sum(answers.right(row, text) for row, text in zip(rows, replies)), of=len(rows), texts=replies)
        print(f"{task} {number}", file=sys.stderr, flush=True)


def press_texts(a, press):
    nats = Nats(a.out)
    found = (press.ids(path.read_text(errors="replace")) for path in sorted(a.essays.glob("*.txt")))
    for text, ids in enumerate([ids[:a.length] for ids in found if len(ids) >= a.length][:a.count]):
        left = {cell: p for cell, p in methods_of(a).items() if not nats.has("kvpress", *cell, text)}
        if not left:
            continue
        half = a.length // 2
        kept, last = press.read(ids[:half], left)
        for (method, share), found in kept.items():
            try:
                score = press.score(found, last, ids[:half], ids[half:])
            except ValueError as error:   # adakv hides entries behind keys that must repel all queries, and may find none
                print(f"{method}: {error}", file=sys.stderr)
                continue
            nats.add(side="kvpress", method=method, share=share, text=text, tokens=half, nats=score)
        print(f"text {text}", file=sys.stderr, flush=True)


# --- keepd -----------------------------------------------------------------------------------------


def keepd_texts(a, c):
    """One chunk is one half, so that the first eviction comes after it, and the second after the last token."""
    nats, half = Nats(a.out), a.length // 2
    found = [ids[:a.length] for ids in texts.raw_texts(c, a.essays) if len(ids) >= a.length][:a.count]
    for text, ids in enumerate(found):
        for method, share in methods_of_keepd(a):
            if nats.has("keepd", method, share, text):
                continue
            kv = {"policy": "full"} if method == "full" else {"policy": method, "budget": int(half * share), "buffer": half, "chunk": half}
            if method in answers.BARE:
                kv["recent"] = 0
            nats.add(side="keepd", method=method, share=share, text=text, tokens=half, nats=-sum(c.score(ids, kv)[half - 1:]))
        print(f"text {text}", file=sys.stderr, flush=True)


def methods_of_keepd(a):
    return [("full", 1.0)] + [(m, s) for s in a.shares for m in a.methods]


# --- the report ------------------------------------------------------------------------------------


def signed(triple, digits):
    return "" if triple is None else f"{triple[0]:+.{digits}f} [{triple[1]:.{digits}f}, {triple[2]:.{digits}f}]"


def nats_table(nats):
    lines, full = [], {side: nats.cells.get((side, "full", 1.0), {}) for side in ("keepd", "kvpress")}
    for side, method, share in nats.cells:
        own, theirs = nats.cells.get(("keepd", method, share), {}), nats.cells.get(("kvpress", method, share), {})
        common = set(own) & set(theirs)
        if side != "kvpress" or not common:
            continue
        over = [statistics.paired({t: x[t] for t in common}, base) if method != "full" and set(base) >= common else None
                for x, base in ((own, full["keepd"]), (theirs, full["kvpress"]))]
        lines.append([f"`{method}`", report.share_name(share), *(signed(x, 3) for x in over),
                      signed(statistics.paired(own, theirs), 3), str(len(common))])
    return report.table(["method", "kept", "keepd - full", "kvpress - full", "keepd - kvpress", "texts"], lines)


def answers_table(store):
    cells = {}
    for (task, number, method, share, protocol), line in store.done.items():
        if protocol == "unknown":
            cells.setdefault((method, share), {})[task, number] = line["got"], line["of"]
    lines = []
    for (method, share), theirs in cells.items():
        own = cells.get((method.removeprefix(PREFIX), share), {})
        common = set(own) & set(theirs)
        if not method.startswith(PREFIX) or not common:
            continue
        means = [statistics.mean(statistics.aligned({c: x[c] for c in common})[0]) for x in (own, theirs)]
        lines.append([f"`{method.removeprefix(PREFIX)}`", report.share_name(share), *map(report.percent, means),
                      report.percent(statistics.paired(own, theirs)), str(sum(theirs[c][1] for c in common))])
    return report.table(["method", "kept", "keepd, %", "kvpress, %", "keepd - kvpress", "questions"], lines)


def show(a):
    print(f"Nats per token of the second halves\n\n{nats_table(Nats(a.out))}")
    print(f"\nRight answers in %, question unknown\n\n{answers_table(answers.Store(a.out))}")


def main():
    a = arguments()
    if a.what == "kvpress":
        press = Press(a.model, a.threads)
        if a.essays:
            press_texts(a, press)
        if a.rows:
            press_rows(a, press)
    elif a.what == "keepd":
        daemon = None if a.url else client.Daemon(a.binary, a.model, "--kv-policy", "full", *(("--gates", a.gates) if a.gates else ()))
        try:
            keepd_texts(a, client.Client(a.url or daemon.url))
        finally:
            if daemon:
                daemon.stop()
    show(a)


if __name__ == "__main__":
    main()
