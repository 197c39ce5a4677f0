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
    gone = [[[] for _ in range(heads)] for _ in range(layers)]
    times = [[[] for _ in range(heads)] for _ in range(layers)]
    before = 0
    for n, eviction in enumerate(trace):
        before = check_eviction(eviction, f"trace[{n}]", before, count, layers, heads)
        for i, layer in enumerate(eviction["evicted"]):
            for h, positions in enumerate(layer):
                gone[i][h] += positions
                times[i][h] += [n] * len(positions)
    tokens = torch.tensor([eviction["tokens"] for eviction in trace], dtype=torch.int32)
    for i in range(layers):
        for h in range(heads):
            if len(set(gone[i][h])) < len(gone[i][h]):
                n = twice(gone[i][h], times[i][h])
                raise BadRecord(f"trace[{n}].evicted[{i}][{h}]: a position that was already evicted")
            until[i, h, torch.tensor(gone[i][h], dtype=torch.long)] = tokens[torch.tensor(times[i][h], dtype=torch.long)]
    return until


def twice(positions, times):
    """When a position was evicted for the second time."""
    seen = set()
    for position, n in zip(positions, times):
        if position in seen:
            return n
        seen.add(position)


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


def seen(until, begin, end):
    """(keys, mask): what queries begin .. end - 1 of a head see; until [N], mask [end - begin, keys]. Other keys no query sees."""
    keys = (until[:end] > begin).nonzero()[:, 0]
    t = torch.arange(begin, end, device=until.device)[:, None]
    return keys, (keys <= t) & (t < until[keys])


class Records:
    """The records of a file, each cut to `length` + 1 tokens; those whose completion begins later are left out.

    `groups`: lists of the numbers of neighbours that answer the same prompt under the same evictions.
    """

    def __init__(self, path, layers, heads, vocab, length):
        self.path, self.shape, self.length, self.lines, self.groups = path, (layers, heads, vocab), length, [], []
        self.file = path.open("rb")
        at, long, before = 0, 0, None
        for number, line in enumerate(self.file, 1):
            if line.strip():
                record = self.parse(line, number)       # a malformed record ends the run before it begins
                if record.prompt <= length:
                    key = record.ids[:record.prompt], record.until[..., :record.prompt].clamp(max=record.prompt).tolist()
                    if key == before:
                        self.groups[-1].append(len(self.lines))
                    else:
                        self.groups.append([len(self.lines)])
                    self.lines.append((number, at))
                    before = key
                else:
                    long += 1
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
