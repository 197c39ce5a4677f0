"""Teaches keepd-nano to see: an encoder of pictures in front of it, trained on pictures made from seeds (scenes.py), and exported as a
directory of the family Idefics3.

    python train_seeing.py --looking 13 --minutes 30 --threads 1 --run ../../train-run/seeing --out ../bundled/keepd-nano-sees

First the encoder alone learns what is where in a picture (--looking): the row of a square becomes the sum of the text model's embeddings
of the mark and of the colour in that square. So the text model meets something that it knows. A picture teaches all that it shows at
once, and no text model is computed, so this part sees four times as many pictures in the same time. Then the text model learns
dialogues (--minutes), while the encoder stays as it is: what a model says wrongly at first would undo what the encoder has learnt.
Both budgets are minutes of --threads processors, whatever else the machine does, and a run goes on from its last checkpoint.
"""

import argparse
import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

import corpus
import scenes
from modeling import CONFIG, Nano, rope_tables
from train_base import Muon, schedule

NANO = Path(__file__).parent.parent / "bundled/keepd-nano"
MARKS = (scenes.IMAGE, scenes.FAKE, scenes.GLOBAL, "<end_of_utterance>")
TEXT = {**CONFIG, "vocab_size": CONFIG["vocab_size"] + 8}
VISION = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, image_size=scenes.SIDE, patch_size=8,
              num_channels=3, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)
MERGE = 2
STAGES = (256, 512, 1024)
FORM = 2  # The number of the form in which checkpoints are written
COUNTERS = ("looked", "looked_s", "step", "used_s", "stage")


# --- model: names as transformers' Idefics3 has them ---------------------------------------------------------------------

class VisionAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    def __init__(self, width, ff):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, ff), nn.Linear(ff, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c["hidden_size"]
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, c["layer_norm_eps"]) for _ in range(2))
        self.self_attn, self.mlp = VisionAttention(width, c["num_attention_heads"]), VisionMLP(width, c["intermediate_size"])

    def forward(self, x):
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, c["hidden_size"], c["patch_size"], c["patch_size"])
        self.position_embedding = nn.Embedding((c["image_size"] // c["patch_size"]) ** 2, c["hidden_size"])
        nn.init.normal_(self.position_embedding.weight, std=0.1)

    def forward(self, pixels):
        return self.patch_embedding(pixels).flatten(2).mT + self.position_embedding.weight


class VisionModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = Embeddings(c)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(VisionLayer(c) for _ in range(c["num_hidden_layers"]))})
        self.post_layernorm = nn.LayerNorm(c["hidden_size"], c["layer_norm_eps"])

    def forward(self, pixels):
        x = self.embeddings(pixels)
        for layer in self.encoder["layers"]:
            x = layer(x)
        return self.post_layernorm(x)


class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = Nano(TEXT)
        self.vision_model = VisionModel(VISION)
        self.connector = nn.Linear(VISION["hidden_size"] * MERGE ** 2, TEXT["hidden_size"], bias=False)
        self.stack = self.run_layers

    def run_layers(self, x, cos, sin):
        for layer in self.text.model.layers:
            x = layer(x, cos, sin)
        return x

    def rows(self, pictures):
        """uint8 [n, SIDE, SIDE, 3] -> [n, ROWS, width]: squares of MERGE x MERGE patches side by side, as Idefics3 joins them."""
        x = self.vision_model((pictures.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5)
        side = VISION["image_size"] // VISION["patch_size"] // MERGE
        x = x.view(len(x), side, MERGE, side, MERGE, -1).transpose(2, 3).reshape(len(x), side * side, -1)
        return self.connector(x)

    def forward(self, ids, positions, pictures, image):
        """`image`: the id of a picture's rows, whose embeddings are those of `pictures` in their order."""
        net = self.text
        cos, sin = rope_tables(positions, TEXT["head_dim"], TEXT["rope_theta"])
        x = net.model.embed_tokens(ids)
        if len(pictures):
            with torch.no_grad():
                rows = self.rows(pictures).to(x.dtype)
            x = x.masked_scatter((ids == image)[..., None], rows.flatten(0, 1))
        return F.linear(net.model.norm(self.stack(x, cos, sin)), net.model.embed_tokens.weight)


class Words:
    """The text model's embeddings of words, as long as those of single tokens. The first word, "", stands for nothing: zeros."""

    def __init__(self, tokenizer, table, words):
        spelt = [tokenizer.encode(word if len(word) == 1 else " " + word, add_special_tokens=False).ids for word in words if word]
        known = F.normalize(torch.stack([table[ids].mean(0) for ids in spelt]), dim=1) * table[:CONFIG["vocab_size"]].norm(dim=1).mean()
        self.embeddings = torch.cat((torch.zeros_like(known[:1]), known))

    def logits(self, rows):
        """A row that is the sum of a word's embedding and of others has about 10 for that word; nothing has 5."""
        known = self.embeddings[1:]
        return torch.cat((torch.full_like(rows[..., :1], 5), rows @ (10 * known / known.square().sum(1, keepdim=True)).T), -1)


def start_from_nano(net):
    """The text model begins as keepd-nano, whose table of embeddings gets rows for the marks."""
    tensors = load_file(NANO / "model.safetensors")
    table = net.text.model.embed_tokens.weight.data
    name = "model.embed_tokens.weight"
    known = tensors.pop(name)
    table[:len(known)] = known.float()
    missing = net.text.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    assert missing.missing_keys == [name], missing


# --- data ------------------------------------------------------------------------------------------------------------------

def write_tokenizer(out):
    """keepd-nano's with the marks behind its vocabulary."""
    tokenizer = json.loads((NANO / "tokenizer.json").read_text())
    first = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**first, "id": CONFIG["vocab_size"] + i, "content": mark} for i, mark in enumerate(MARKS)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    shutil.copy(NANO / "tokenizer_config.json", out)
    return Tokenizer.from_file(str(out / "tokenizer.json"))


class Data:
    def __init__(self, tokenizer, split, seed, tokens, other_weight=0.1):
        self.encoder, self.tokens, self.other_weight = corpus.Encoder(tokenizer), tokens, other_weight
        self.image = tokenizer.token_to_id(scenes.IMAGE)
        self.seen = {n: scenes.dialogues(split, seed, n) for n in STAGES}
        self.plain = {n: corpus.mixture(split, seed, n) for n in STAGES}
        self.rng = np.random.default_rng(seed)

    def batch(self, length, rows=None):
        """ids, weights, numbers of the answers, pictures. A fifth of the rows are keepd-nano's own dialogues."""
        rows = rows or self.tokens // length
        plain = 0 if length == STAGES[0] else rows // 5
        dialogues = self.encoder.fitting(self.seen[length], rows - plain, length)
        dialogues += [next(self.plain[length]) for _ in range(plain)]
        ids, weight, answer = self.encoder.batch(dialogues, length, self.other_weight)
        weight[ids[:, 1:] == self.image] = 0
        pictures = [p for d in dialogues for p in getattr(d, "pictures", ())]
        return (torch.from_numpy(ids), torch.from_numpy(weight), answer,
                torch.from_numpy(np.stack(pictures)) if pictures else torch.zeros(0))


def looks(split, seed, count):
    """Endless batches of pictures and of what their squares show: marks and colours [count, ROWS], and kinds."""
    w = corpus.Words(random.Random(f"looks/{split}/{seed}"), split)
    marks, colours = ({name: i for i, name in enumerate(names)} for names in (scenes.MARKS_SEEN, scenes.COLOURS_SEEN))
    while True:
        made = [scenes.scene(w) for _ in range(count)]
        shown = np.zeros((2, count, scenes.ROWS), dtype=np.int64)
        for n, scene in enumerate(made):
            for (column, line), (mark, colour) in scene.shows.items():
                shown[:, n, scenes.CELLS * line + column] = marks[mark], colours[colour]
        yield torch.from_numpy(np.stack([scene.picture for scene in made])), *torch.from_numpy(shown), [scene.kind for scene in made]


def positions_of(ids, rng=None, reach=8192):
    """Positions of a row; in half of the rows they jump once, as if there had been more talk."""
    rows, length = ids.shape
    out = np.tile(np.arange(length), (rows, 1))
    for r in range(rows if rng is not None else 0):
        if rng.random() < 0.5:
            out[r, int(rng.integers(80, length)):] += int(np.exp(rng.uniform(np.log(16), np.log(reach - length))))
    return torch.from_numpy(out)


# --- run -------------------------------------------------------------------------------------------------------------------

WARM_UP = {"eyes": 100, "text": 20}  # steps
LOOKS = 64   # pictures of a step
EMPTY = 0.1  # weight of squares that show nothing
NEAR = 0.3   # weight of the distance of rows to what they are to become


def optimizers(net, a):
    """Optimizers by what they change: text model or eyes."""
    def of(prefix):
        return [(n, p) for n, p in net.named_parameters() if n.startswith(prefix)]

    def is_matrix(n, p):
        return p.dim() == 2 and "embed" not in n

    def both(params, lr, lr_other):
        return [Muon([p for n, p in params if is_matrix(n, p)], lr=lr),
                torch.optim.AdamW([p for n, p in params if not is_matrix(n, p)], lr=lr_other, betas=(0.9, 0.95), weight_decay=0.0)]

    out = {"text": both(of("text."), a.lr_text, a.lr_text / 5), "eyes": both(of("vision_model.") + of("connector."), a.lr, 1e-3)}
    for group in (g for opts in out.values() for o in opts for g in o.param_groups):
        group["peak"] = group["lr"]
    return out


class Run:
    def __init__(self, a):
        self.a = a
        torch.manual_seed(a.seed)
        torch.set_num_threads(a.threads)
        self.tokenizer = write_tokenizer(a.out)
        self.net = Seeing()
        start_from_nano(self.net)
        table = self.net.text.model.embed_tokens.weight.detach().clone()
        self.marks, self.colours = (Words(self.tokenizer, table, words) for words in (scenes.MARKS_SEEN, scenes.COLOURS_SEEN))
        self.blank = table[self.tokenizer.token_to_id("Ġ")]
        if a.compile:
            self.net.stack = torch.compile(self.net.run_layers, dynamic=False)
        self.opts = optimizers(self.net, a)
        self.looked, self.looked_s, self.step, self.used_s, self.stage = 0, 0.0, 0, 0.0, 0
        a.run.mkdir(parents=True, exist_ok=True)
        self.file = a.run / "checkpoint.pt"
        if self.file.exists():
            self.load()
        self.looks = looks("train", a.seed + 1000003 * self.looked, LOOKS)
        self.looks_held = next(looks("heldout", 99, 4 * LOOKS))
        self.data = Data(self.tokenizer, "train", a.seed + 1000003 * self.step, a.batch_tokens)
        held = Data(self.tokenizer, "heldout", 99, a.batch_tokens)
        self.probes = {n: held.batch(n, rows) for n, rows in zip(STAGES, (48, 24, 12))}

    def look(self, pictures):
        """Rows, and their logits of marks and of colours: [n, ROWS, ...] each."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.a.bf16):
            rows = self.net.rows(pictures).float()
        return rows, self.marks.logits(rows), self.colours.logits(rows)

    def forward(self, ids, positions, pictures):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.a.bf16):
            return self.net(ids, positions, pictures, self.data.image)

    def save(self):
        state = {"form": FORM, "net": self.net.state_dict(), "opts": {name: [o.state_dict() for o in opts] for name, opts in self.opts.items()},
                 **{name: getattr(self, name) for name in COUNTERS}}
        torch.save(state, self.file.with_suffix(".tmp"))
        self.file.with_suffix(".tmp").replace(self.file)

    def load(self):
        s = torch.load(self.file, weights_only=True)
        if s.get("form") != FORM:
            raise SystemExit(f"{self.file}: written by another version of this program; name another folder with --run")
        self.net.load_state_dict(s["net"])
        for name, states in s["opts"].items():
            for o, state in zip(self.opts[name], states):
                o.load_state_dict(state)
        for name in COUNTERS:
            setattr(self, name, s[name])
        print(f"resumed after {self.looked} steps of looking and {self.step} of dialogues", flush=True)

    def change(self, name, step, used):
        """Takes a step with the optimizers of this name."""
        for o in self.opts[name]:
            for g in o.param_groups:
                g["lr"] = g["peak"] * schedule(step, used, WARM_UP[name])
            o.step()
        self.net.zero_grad(set_to_none=True)

    def look_step(self, used):
        """The distance of rows to the sums that they are to become keeps their size near that of embeddings of text."""
        pictures, marks, colours, _ = next(self.looks)
        rows, *logits = self.look(pictures)
        loss = sum(F.cross_entropy(found.flatten(0, 1), shown.flatten(), torch.tensor([EMPTY] + [1.0] * (found.shape[-1] - 1)))
                   for found, shown in zip(logits, (marks, colours)))
        wanted = torch.where((marks > 0)[..., None], self.marks.embeddings[marks] + self.colours.embeddings[colours], self.blank)
        weight = torch.where(marks > 0, 1.0, EMPTY)
        loss = loss + NEAR * ((rows - wanted).square().sum(-1) * weight).sum() / weight.sum() / self.blank.square().sum()
        loss.backward()
        self.change("eyes", self.looked, used)
        self.looked += 1
        return loss.item()

    @torch.no_grad()
    def probe_looks(self):
        """Share of held-out pictures of each kind of which all marks and all colours are right."""
        pictures, *shown, kinds = self.looks_held
        right = sum((logits.argmax(-1) != wanted).sum(1) for logits, wanted in zip(self.look(pictures)[1:], shown)) == 0
        return {kind: round(float(right[[k == kind for k in kinds]].float().mean()), 3) for kind in scenes.KINDS}

    def learn_to_look(self):
        a, last, losses = self.a, time.process_time(), []
        budget = a.looking * 60 * a.threads
        while self.looked_s < budget and self.looked < a.max_steps:
            losses.append(self.look_step(self.looked_s / budget))
            now = time.process_time()
            self.looked_s += now - last
            last = now
            if self.looked % a.every == 0:
                print(json.dumps({"looked": self.looked, "loss": round(float(np.mean(losses)), 4), "right": self.probe_looks(),
                                  "minutes_left": round((budget - self.looked_s) / 60 / a.threads, 1)}), flush=True)
                self.save()
                losses, last = [], time.process_time()

    def train_step(self, used):
        rng = self.data.rng
        length = STAGES[int(rng.integers(0, self.stage + 1))] if rng.random() < 0.5 else STAGES[self.stage]
        ids, weight, _, pictures = self.data.batch(length)
        logits = self.forward(ids[:, :-1], positions_of(ids[:, :-1], rng), pictures)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        w = weight.flatten()
        ((loss * w).sum() / w.sum()).backward()
        self.change("text", self.step, used)
        self.step += 1
        return ((loss.detach() * (w == 1)).sum() / (w == 1).sum().clamp(min=1)).item()

    @torch.no_grad()
    def probe(self, length):
        """Share of held-out answers that are right, token for token."""
        ids, _, answer, pictures = self.probes[length]
        guess = self.forward(ids[:, :-1], positions_of(ids[:, :-1]), pictures).argmax(-1)
        wrong = (guess != ids[:, 1:]).numpy()
        right = [not wrong[r][answer[r] == n].any() for r in range(len(ids)) for n in np.unique(answer[r]) if n >= 0]
        return sum(right) / max(1, len(right))

    def train(self):
        self.learn_to_look()
        a, last, losses = self.a, time.process_time(), []
        budget = a.minutes * 60 * a.threads
        while self.used_s < budget and self.step < a.max_steps:
            losses.append(self.train_step(self.used_s / budget))
            if self.step % a.every:
                continue
            now = time.process_time()
            self.used_s += now - last
            right = self.probe(STAGES[self.stage])
            self.stage += self.stage < 2 and (right > 0.85 or self.used_s / budget > (0.5, 0.75)[self.stage])
            print(json.dumps({"step": self.step, "length": STAGES[self.stage], "answer_loss": round(float(np.mean(losses)), 4),
                              "right": round(right, 3), "tokens_per_s": int(a.every * a.batch_tokens * a.threads / (now - last)),
                              "minutes_left": round((budget - self.used_s) / 60 / a.threads, 1)}), flush=True)
            self.save()
            losses, last = [], now
        self.save()
        export(self.net, a.out)
        print(json.dumps({"final": {n: round(self.probe(n), 3) for n in STAGES}, "step": self.step, "seconds": int(self.used_s)}), flush=True)


# --- export ----------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def export(net, out):
    """The directory as published for transformers, in bf16."""
    def name(n):
        if n.startswith("text.model."):
            return "model.text_model." + n.removeprefix("text.model.")
        return {"connector.weight": "model.connector.modality_projection.proj.weight"}.get(n, "model." + n)

    save_file({name(n): p.detach().bfloat16().contiguous() for n, p in net.named_parameters()},
              out / "model.safetensors", metadata={"format": "pt"})
    text = {**json.loads((NANO / "config.json").read_text()), **TEXT}
    config = {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "scale_factor": MERGE,
              "image_token_id": CONFIG["vocab_size"], "tie_word_embeddings": True, "torch_dtype": "bfloat16", "text_config": text,
              "vision_config": {**VISION, "model_type": "idefics3_vision"}}
    processor = {"image_processor_type": "Idefics3ImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
                 "do_convert_rgb": True, "do_pad": True, "do_image_splitting": False, "resample": 1, "rescale_factor": 1 / 255,
                 "size": {"longest_edge": scenes.SIDE}, "max_image_size": {"longest_edge": scenes.SIDE}, "image_mean": [0.5] * 3,
                 "image_std": [0.5] * 3}
    for file, content in ("config.json", config), ("preprocessor_config.json", processor):
        (out / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    shutil.copy(NANO / "generation_config.json", out)
    (out / "chat_template.jinja").write_text(TEMPLATE)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--run", type=Path, required=True, help="folder of the checkpoint")
    ap.add_argument("--out", type=Path, required=True, help="model directory to write")
    ap.add_argument("--looking", type=float, default=60, help="minutes of the first part")
    ap.add_argument("--minutes", type=float, default=60, help="minutes of the second part")
    ap.add_argument("--max-steps", type=int, default=10**9)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--batch-tokens", type=int, default=4096)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--lr-text", type=float, default=0.01)
    ap.add_argument("--every", type=int, default=50, help="steps between probes and checkpoints")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--bf16", action=argparse.BooleanOptionalAction, default="amx_bf16" in Path("/proc/cpuinfo").read_text(),
                    help="faster where the processor has AMX, slower elsewhere")
    ap.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    Run(ap.parse_args()).train()


if __name__ == "__main__":
    main()
