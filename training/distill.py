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
from eviction_trace import Records, sees
from gates import read_header, write_gates
from models import DTYPES, OwnAttention, base_digests, read_config
from options import count, file, positive
from runs import Run, World, add_arguments

COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "chat_template.jinja", "generation_config.json")


def sparse(q, k, v, until, scaling, block=512):
    """Attention in which query t sees key i of KV head h if i <= t < until[h, i]; q [B, Hq, T, d].

    By blocks of queries, so that the mask of [Hq, block, T] is the largest thing beside q, k and v.
    """
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    out = []
    for begin in range(0, q.shape[2], block):
        end = min(begin + block, q.shape[2])
        mask = sees(until, begin, end).repeat_interleave(g, 0)[None]
        out.append(F.scaled_dot_product_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], attn_mask=mask,
                                                  scale=scaling))
    return torch.cat(out, 2)


class SparseModel(OwnAttention):
    """A model that attends to all, or to what the daemon held."""

    until = None

    def hidden(self, ids, until=None):
        self.until = until
        return super().hidden(ids, torch.arange(ids.shape[1], device=ids.device)[None])

    def attend(self, layer, q, k, v, scaling):
        if self.until is None:
            return super().attend(layer, q, k, v, scaling)
        return sparse(q, k, v, self.until[layer], scaling)


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
        self.shuffle = Shuffle(a.seed, len(self.records))
        super().__init__(a, world, self.student.model,
                         torch.optim.AdamW(self.student.model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0))

    def batch(self):
        """This process's records of the step."""
        first = (self.step * self.world.size + self.world.rank) * self.a.rows
        return [self.records[self.shuffle[n]] for n in range(first, first + self.a.rows)]

    def record_loss(self, record, total):
        """One record's share of the step's loss; 1/total is the weight of each of its completion's tokens."""
        count = len(record.ids) - 1
        ids = torch.tensor([record.ids[:count]], device=self.world.device)
        until = record.until[..., :count].to(self.world.device)
        weight = torch.zeros(1, count, device=self.world.device)
        weight[:, record.prompt - 1:] = 1 / total
        with torch.autocast(torch.device(self.world.device).type, torch.bfloat16, enabled=self.a.bf16):
            with torch.no_grad():
                full = self.teacher.hidden(ids)
            held = self.student.hidden(ids, until)

            def divergence(s, t, w):
                return losses.divergence(self.student.logits(s), self.teacher.logits(t), w, self.a.temperature)

            return losses.by_blocks(divergence, self.a.logit_block, held, full, weight)

    def train_step(self):
        records = self.batch()
        graded = float(sum(len(r.ids) - r.prompt for r in records))
        total = self.world.sum(torch.tensor(graded, dtype=torch.float64, device=self.world.device)).item()
        kl = 0.0
        for record in records:
            loss = self.record_loss(record, total)
            loss.backward()
            kl += loss.item()
        tokens = sum(len(r.ids) - 1 for r in records)
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
    ap.add_argument("--rows", type=count, default=8, help="records per step and process, one after another")
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
