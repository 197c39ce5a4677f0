"""Adapts a model's weights to an eviction policy, by distillation with recorded evictions.

    python record.py --url http://127.0.0.1:8080 --chats chats.jsonl --policy gkv --budget 256 --out records.jsonl
    python distill.py /path/to/model --records records.jsonl --run RUN/distill --out /path/to/adapted

The recipe of G-KV (arXiv 2512.00504): the student attends only to what the daemon still held when each token
was read, the teacher to everything, and the student learns KL(teacher || student) * temperature^2 on the
completion.  A policy that merges entries is known here only by what it evicted.
"""

import argparse
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import losses
from data import Shuffle
from eviction_trace import Records, seen
from gates import read_header, write_gates
from models import DTYPES, OwnAttention, base_digests, read_config
from options import count, file, positive
from runs import Run, World, add_arguments

COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "chat_template.jinja", "generation_config.json")


def sparse(q, k, v, until, scaling, first=0, block=128):
    """Attention in which query t sees key i of KV head h if i <= t < until[h, i]; q [1, Hq, T, d], its first query is `first`.

    By blocks of queries and by KV heads, so that only keys that some query of a block sees are multiplied: with most of a
    text evicted they are few.
    """
    heads = k.shape[1]
    rows = q.unflatten(1, (heads, -1))
    out = []
    for begin in range(first, first + q.shape[2], block):
        end = min(begin + block, first + q.shape[2])
        found = []
        for h in range(heads):
            at, mask = seen(until[h], begin, end)
            part = rows[:, h, :, begin - first:end - first]
            group = part.shape[1]
            read = F.scaled_dot_product_attention(part.flatten(1, 2)[:, None], *(x[:, h:h + 1].index_select(2, at) for x in (k, v)),
                                                  attn_mask=mask.repeat(group, 1), scale=scaling)
            found.append(read[:, 0].unflatten(1, (group, -1)))
        out.append(torch.cat(found, 1))
    return torch.cat(out, 2)


class SparseModel(OwnAttention):
    """A model that attends to all, or to what the daemon held."""

    until, branches = None, ()

    def hidden(self, ids, until=None):
        """Whole texts [B, T], of which all see the same -> what feeds the output matrix, [B, T, d_model]."""
        self.until, self.branches = until, ()
        return super().hidden(ids, torch.arange(ids.shape[1], device=ids.device)[None])

    def completions(self, records, full=False):
        """Several answers to a prompt, read at once -> for each, what feeds the output matrix for its tokens, [n, d_model].

        The answers stand one behind the other. Each is a branch that sees the prompt and itself; evictions of the prompt are
        the same for all, and later ones their own.
        """
        prompt = records[0].prompt
        inputs = [rec.ids[prompt:-1] for rec in records]
        ends = torch.tensor([prompt] + [len(x) for x in inputs]).cumsum(0).tolist()
        until = [None if full else rec.until[..., :len(rec.ids) - 1].to(self.device) for rec in records]
        self.until = None if full else until[0][..., :prompt]
        self.branches = list(zip(ends, ends[1:], until))
        ids = torch.tensor([records[0].ids[:prompt] + sum(inputs, [])], device=self.device)
        places = torch.cat([torch.arange(prompt)] + [torch.arange(prompt, prompt + len(x)) for x in inputs])
        found = super().hidden(ids, places[None].to(self.device))[0]
        return [torch.cat([found[prompt - 1:prompt], found[begin:end]]) for begin, end, _ in self.branches]

    def attend(self, layer, q, k, v, scaling):
        size = self.branches[0][0] if self.branches else q.shape[2]
        prompt = [x[:, :, :size] for x in (q, k, v)]
        out = [super().attend(layer, *prompt, scaling) if self.until is None else sparse(*prompt, self.until[layer], scaling)]
        for begin, end, until in self.branches:
            if end > begin:
                keys, values = (torch.cat([x[:, :, :size], x[:, :, begin:end]], 2) for x in (k, v))
                stays = torch.full((k.shape[1], keys.shape[2]), keys.shape[2], device=k.device) if until is None else until[layer]
                out.append(sparse(q[:, :, begin:end], keys, values, stays, scaling, first=size))
        return torch.cat(out, 2)


class DistillRun(Run):
    NAME = "model"

    def __init__(self, a, world):
        self.student = SparseModel(a.model, world.device)
        self.teacher = SparseModel(a.teacher or a.model, world.device, DTYPES[a.dtype])
        self.teacher.model.requires_grad_(False)
        if a.checkpointing:
            self.student.checkpoint_layers()
        c = self.student.model.config
        self.records = Records(a.records, c.num_hidden_layers, c.num_key_value_heads, c.vocab_size, a.length)
        self.shuffle = Shuffle(a.seed, len(self.records.groups))
        super().__init__(a, world, self.student.model,
                         torch.optim.AdamW(self.student.model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0))

    def batch(self):
        """This process's groups of records of the step."""
        first = (self.step * self.world.size + self.world.rank) * self.a.rows
        groups = self.records.groups
        return [[self.records[i] for i in groups[self.shuffle[n]]] for n in range(first, first + self.a.rows)]

    def group_loss(self, records, total):
        """The share of the step's loss that answers to one prompt have; 1/total is the weight of each of their tokens."""
        with torch.autocast(torch.device(self.world.device).type, torch.bfloat16, enabled=self.a.bf16):
            with torch.no_grad():
                full = torch.cat(self.teacher.completions(records, full=True))[None]
            held = torch.cat(self.student.completions(records))[None]
            weight = torch.full(held.shape[:2], 1 / total, device=held.device)

            def divergence(s, t, w):
                return losses.divergence(self.student.logits(s), self.teacher.logits(t), w, self.a.temperature)

            return losses.by_blocks(divergence, self.a.logit_block, held, full, weight)

    def train_step(self):
        groups = self.batch()
        graded = float(sum(len(r.ids) - r.prompt for records in groups for r in records))
        total = self.world.sum(torch.tensor(graded, dtype=torch.float64, device=self.world.device)).item()
        kl = 0.0
        for records in groups:
            loss = self.group_loss(records, total)
            loss.backward()
            kl += loss.item()
        tokens = sum(records[0].prompt + sum(len(r.ids) - r.prompt - 1 for r in records) for records in groups)
        values = torch.tensor([kl, float(tokens)], dtype=torch.float64, device=self.world.device)
        return dict(zip(("loss", "tokens"), self.world.sum(values).tolist()))


def export(model, source, out):
    """The adapted model as published directories are: weights in the source's type, tokenizer, template.

    Gates of the source go with it: they were in force when the evictions were recorded.
    """
    config = read_config(source)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    model.to(dtype).save_pretrained(out)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)        # as gates.write_gates
    for name in COPIED:
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    gates = source / "gates.safetensors"
    if gates.exists():
        write_gates(out / gates.name, load_file(gates), {**read_header(gates), "base": base_digests(out)})


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("model", type=Path, help="model directory")
    ap.add_argument("--records", type=file, required=True, help="JSON lines written by record.py")
    ap.add_argument("--out", type=Path, required=True, help="model directory to write at the end")
    ap.add_argument("--teacher", type=Path, help="model directory of the teacher (default: the model itself, unadapted)")
    ap.add_argument("--temperature", type=positive, default=1.0)
    ap.add_argument("--length", type=count, default=4096, help="tokens of a record that are used")
    ap.add_argument("--rows", type=count, default=8, help="prompts per step and process, one after another, each with its answers")
    add_arguments(ap, minutes=60, lr=1e-6, warmup=10)
    a = ap.parse_args()
    if a.run is None:
        ap.error("--run is required")
    if a.out.resolve() == a.model.resolve():
        ap.error("--out is the model itself: a stopped run could not go on from it")
    return a


def main():
    a = arguments()
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    world = World(a.device)
    run = DistillRun(a, world)
    run.resume()
    run.train()
    if world.first:
        export(run.student.model, a.model, a.out)
    world.close()


if __name__ == "__main__":
    main()
