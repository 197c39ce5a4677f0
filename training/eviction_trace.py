"""Records of what a daemon answered and evicted, and the attention mask they mean.

One JSON line per answer (`record.py` writes them):

    {"prompt_ids": [...], "completion_ids": [...],
     "trace": [{"tokens": T, "evicted": [[[positions], ... per KV head], ... per layer]}, ...]}

`trace` is `usage.kv_details.trace` of an answer with "kv": {"report": "trace"}: the evictions in order.
An eviction with `tokens` T happened after T tokens were read, so queries at positions >= T no longer see
the positions it lists.  A record starts from an empty cache, so a position is an index of
prompt_ids + completion_ids.
"""

import json
import sys
from dataclasses import dataclass

import torch


class BadRecord(ValueError):
    """An error in one record; names the field."""


@dataclass
class Record:
    ids: list               # prompt and completion
    prompt: int             # tokens of the prompt
    until: torch.Tensor     # [L, H, N] int32: queries at positions < until see the entry; N where it stayed


def token_ids(record, field, vocab):
    ids = record.get(field)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise BadRecord(f"{field}: expected a list of token ids below {vocab}")
    return ids


def check_eviction(eviction, where, before, count, layers, heads):
    """`tokens` of one eviction, its shape checked."""
    tokens = eviction.get("tokens") if isinstance(eviction, dict) else None
    if type(tokens) is not int or not before <= tokens <= count:
        raise BadRecord(f"{where}.tokens: expected a number from {before} to {count}, found {tokens}")
    evicted = eviction.get("evicted")
    if not isinstance(evicted, list) or len(evicted) != layers:
        raise BadRecord(f"{where}.evicted: expected {layers} layers")
    for i, layer in enumerate(evicted):
        if not isinstance(layer, list) or len(layer) != heads:
            raise BadRecord(f"{where}.evicted[{i}]: expected {heads} KV heads")
        for h, positions in enumerate(layer):
            if not isinstance(positions, list) or not all(type(p) is int and 0 <= p < tokens for p in positions):
                raise BadRecord(f"{where}.evicted[{i}][{h}]: expected positions below {tokens}")
    return tokens


def visible_until(trace, count, layers, heads):
    """[L, H, count] int32 of a trace over `count` tokens."""
    until = torch.full((layers, heads, count), count, dtype=torch.int32)
    gone = torch.zeros(layers, heads, count, dtype=torch.bool)
    before = 0
    for n, eviction in enumerate(trace):
        where = f"trace[{n}]"
        before = check_eviction(eviction, where, before, count, layers, heads)
        for i, layer in enumerate(eviction["evicted"]):
            for h, positions in enumerate(layer):
                at = torch.tensor(positions, dtype=torch.long)
                if len(set(positions)) < len(positions) or gone[i, h, at].any():
                    raise BadRecord(f"{where}.evicted[{i}][{h}]: a position that was already evicted")
                gone[i, h, at] = True
                until[i, h, at] = before
    return until


def parse_record(line, layers, heads, vocab):
    try:
        record = json.loads(line)
    except ValueError as e:
        raise BadRecord(f"not JSON: {e}") from None
    if not isinstance(record, dict):
        raise BadRecord("expected an object")
    prompt, completion = token_ids(record, "prompt_ids", vocab), token_ids(record, "completion_ids", vocab)
    if not prompt or not completion:
        raise BadRecord("prompt_ids and completion_ids must not be empty")
    if not isinstance(record.get("trace"), list):
        raise BadRecord("trace: expected a list of evictions")
    ids = prompt + completion
    return Record(ids, len(prompt), visible_until(record["trace"], len(ids), layers, heads))


def sees(until, begin, end):
    """The mask of queries begin .. end - 1 over keys 0 .. end - 1: [H, end - begin, end], true where seen."""
    t = torch.arange(begin, end, device=until.device)[:, None]
    return (torch.arange(end, device=until.device) <= t) & (t < until[:, None, :end])


class Records:
    """The records of a file, each cut to `length` + 1 tokens; those whose completion begins later are left out."""

    def __init__(self, path, layers, heads, vocab, length):
        self.path, self.shape, self.length, self.lines = path, (layers, heads, vocab), length, []
        self.file = path.open("rb")
        at, long = 0, 0
        for number, line in enumerate(self.file, 1):
            if line.strip():
                fits = self.parse(line, number).prompt <= length    # a malformed record ends the run before it begins
                long += not fits
                self.lines += [(number, at)] if fits else []
            at += len(line)
        if long:
            print(f"{path}: {long} records left out: the prompt is longer than {length} tokens", file=sys.stderr)
        if not self.lines:
            raise SystemExit(f"{path}: no records")

    def parse(self, line, number):
        try:
            return parse_record(line, *self.shape)
        except BadRecord as e:
            raise SystemExit(f"{self.path}:{number}: {e}") from None

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        number, offset = self.lines[i]
        self.file.seek(offset)
        record = self.parse(self.file.readline(), number)
        count = min(len(record.ids), self.length + 1)
        return Record(record.ids[:count], record.prompt, record.until[..., :count])
