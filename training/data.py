"""Where training rows come from: the generated dialogues, a text file, or chats in JSON lines.

A source has `batch(step) -> Batch`, the rows of this process at that step.  Several processes get
different rows.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import corpus

MARK = ("\ue000", "\ue001")        # private characters around the number of a message
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")


class Batch(NamedTuple):
    ids: torch.Tensor           # [B, T + 1]; the inputs are ids[:, :-1], the targets ids[:, 1:]
    weight: torch.Tensor        # [B, T] of each target; 0 where a row is padded
    positions: torch.Tensor     # [B, T] strictly increasing
    lengths: torch.Tensor       # [B] inputs that are not padding

    def to(self, device):
        return Batch(*(x.to(device) for x in self))


def jump(positions, boundaries, reach, rng, share):
    """In a share of the rows the positions jump once, mostly between messages.

    Ages are positions, as in the daemon; a jump lets the gate meet long ages in short rows.
    """
    length = len(positions)
    if rng.random() >= share or reach - length <= 64:
        return
    spare = int(math.exp(rng.uniform(math.log(64), math.log(reach - length))))
    positions[int(rng.choice(boundaries)) if len(boundaries) else length // 2:] += spare


class Dialogues:
    """The generated dialogues, without end."""

    def __init__(self, tokenizer, seed, length, rows, reach, gap_share):
        self.encoder = corpus.Encoder(tokenizer)
        if self.encoder.start is None:
            raise SystemExit(f"the tokenizer has no {corpus.IM_START}: the generated dialogues are for keepd-nano; "
                             "give --chats or --text")
        self.source = corpus.mixture("train", seed, length)
        self.rng = np.random.default_rng(seed)
        self.length, self.rows, self.reach, self.gap_share = length, rows, reach, gap_share

    def batch(self, _step):
        ids, weight, _ = self.encoder.batch([next(self.source) for _ in range(self.rows)], self.length)
        pos = np.tile(np.arange(self.length, dtype=np.int64), (self.rows, 1))
        for r in range(self.rows):
            jump(pos[r], np.flatnonzero(ids[r, 1:-1] == self.encoder.start) + 1, self.reach, self.rng, self.gap_share)
        return Batch(torch.from_numpy(ids), torch.from_numpy(weight), torch.from_numpy(pos),
                     torch.full((self.rows,), self.length))


class PlainText:
    """Windows of a text file, every token of the same weight."""

    def __init__(self, tokenizer, path, seed, length, rows):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise SystemExit(f"{path}: not UTF-8: {e}") from None
        self.ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids)
        if len(self.ids) < length + 2:
            raise SystemExit(f"{path}: fewer than {length + 2} tokens")
        self.seed, self.length, self.rows = seed, length, rows

    def batch(self, step):
        rng = np.random.default_rng((self.seed, step))
        at = rng.integers(0, len(self.ids) - self.length - 1, self.rows)
        ids = torch.from_numpy(np.stack([self.ids[i:i + self.length + 1] for i in at]))
        pos = torch.arange(self.length).expand(self.rows, -1)
        return Batch(ids, torch.ones(self.rows, self.length), pos, torch.full((self.rows,), self.length))


# --- chats ----------------------------------------------------------------

class BadChat(ValueError):
    """An error in one line; names the field."""


def text_of(message, where):
    """The content as one text; templates differ in how they take parts."""
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if None in parts or not all(isinstance(p, str) for p in parts):
            raise BadChat(f"{where}.content: only parts of type \"text\" are supported")
        return "".join(parts)
    if not isinstance(content, str):
        raise BadChat(f"{where}.content: expected a string")
    if MARK[0] in content:
        raise BadChat(f"{where}.content: holds the private character U+E000")
    return content


def check_chat(line):
    """{"messages": [...], "tools": [...]?} of one JSON line, with every content a text."""
    try:
        chat = json.loads(line)
    except ValueError as e:
        raise BadChat(f"not JSON: {e}") from None
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadChat("messages: expected a list that is not empty")
    out = []
    for i, m in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise BadChat(f"{where}.role: expected a string")
        out.append({**m, "content": text_of(m, where)})
    if not any(m["role"] == "assistant" for m in out):
        raise BadChat("messages: no assistant message to learn from")
    return {"messages": out, "tools": chat.get("tools")}


def answer_text(message):
    """Returns the model's text, preceded by its reasoning; None if it wrote none."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    content = message["content"].strip()
    return f"<think>\n{thought.strip()}\n</think>\n\n{content}" if isinstance(thought, str) and thought.strip() else content


def render(tokenizer, chat):
    """The chat as the model's own template writes it, and the [begin, end, closed] of each answer's text.

    Templates drop the thinking of earlier turns, and few mark what the model wrote.  So every answer is
    rendered as a mark, and its text, thinking included, put in the mark's place.  `closed`: nothing but
    the end of turn follows the text (no tool calls).
    """
    answers, messages = {}, []
    for i, m in enumerate(chat["messages"]):
        if m["role"] == "assistant":
            answers[i] = answer_text(m)
            m = {k: v for k, v in m.items() if k not in ("reasoning_content", "reasoning")}
            m["content"] = f"{MARK[0]}{i}{MARK[1]}"
        messages.append(m)
    try:
        rest = tokenizer.apply_chat_template(messages, tools=chat["tools"], tokenize=False)
    except Exception as e:          # a template may raise whatever Jinja and its filters raise
        raise BadChat(f"messages: the chat template refuses them: {e}") from None
    text, spans = "", []
    for i, answer in answers.items():
        before, found, rest = rest.partition(f"{MARK[0]}{i}{MARK[1]}")
        if not found or f"{MARK[0]}{i}{MARK[1]}" in rest:
            raise BadChat(f"messages[{i}]: the chat template does not write this answer exactly once")
        if "</think>" in answer:
            before = EMPTY_THOUGHT.sub("", before)
        text += before
        spans.append((len(text), len(text) + len(answer), not chat["messages"][i].get("tool_calls")))
        text += answer
    return text + rest, spans


class ChatEncoder:
    """Chats to token ids and the weights of the tokens."""

    def __init__(self, tokenizer, other_weight):
        if not getattr(tokenizer, "chat_template", None):
            raise SystemExit(f"{tokenizer.name_or_path}: the tokenizer has no chat template")
        if not tokenizer.is_fast:
            raise SystemExit(f"{tokenizer.name_or_path}: tokenizer.json is needed for the places of tokens in the text")
        self.tokenizer, self.other_weight = tokenizer, other_weight
        self.special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}

    def encode(self, chat):
        """ids [N], weight of each token [N], and where turns begin after an answer.

        An answer's weight includes the special token that ends its turn: the model must learn to stop.
        """
        text, spans = render(self.tokenizer, chat)
        enc = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = np.asarray(enc["input_ids"], np.int64), enc["offset_mapping"]
        if len(ids) < 2:
            raise BadChat("messages: fewer than two tokens")
        begin, end = np.asarray([p[0] for p in places]), np.asarray([p[1] for p in places])
        weight = np.full(len(ids), self.other_weight, np.float32)
        turns = []
        for n, (first, last, closed) in enumerate(spans):
            limit = spans[n + 1][0] if n + 1 < len(spans) else len(text)
            weight[(begin < last) & (end > first)] = 1.0
            at = int(np.searchsorted(begin, last))
            stop = next((i for i in range(at, len(ids)) if ids[i] in self.special or begin[i] >= limit), None)
            if stop is not None and ids[stop] in self.special and begin[stop] < limit:
                if not closed or not text[last:begin[stop]].strip():
                    weight[at:stop + 1] = 1.0
                    at = stop + 1
            turns.append(at)
        return ids, weight, [t for t in turns if 0 < t < len(ids)]


class Shuffle:
    """Numbers 0, 1, ... to indices below `count`, without end: a new order every epoch."""

    def __init__(self, seed, count):
        self.seed, self.count, self.epoch, self.order = seed, count, None, None

    def __getitem__(self, n):
        epoch, at = divmod(n, self.count)
        if epoch != self.epoch:
            self.order, self.epoch = np.random.default_rng((self.seed, epoch)).permutation(self.count), epoch
        return int(self.order[at])


class Chats:
    """The user's own chats: row n is a pure function of the seed, so a run that stopped goes on exactly.

    A chat longer than the row gives one window of it per visit; shorter rows are padded to the longest
    of their batch.
    """

    def __init__(self, path, tokenizer, seed, length, rows, reach, gap_share, other_weight=0.3, world=None):
        self.path, self.encoder = Path(path), ChatEncoder(tokenizer, other_weight)
        self.bos = tokenizer.bos_token_id
        self.seed, self.length, self.rows = seed, length, rows
        self.reach, self.gap_share = reach, gap_share
        self.rank, self.size = (world.rank, world.size) if world else (0, 1)
        self.lines, self.warned = self.index(), set()
        self.shuffle = Shuffle(seed, len(self.lines))
        self.file = self.path.open("rb")

    def index(self):
        """(line number, offset) of every chat; a malformed line ends the run before it begins."""
        out, at = [], 0
        with self.path.open("rb") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    try:
                        check_chat(line)
                    except BadChat as e:
                        raise SystemExit(f"{self.path}:{number}: {e}") from None
                    out.append((number, at))
                at += len(line)
        if not out:
            raise SystemExit(f"{self.path}: no chats")
        return out

    def chat(self, n):
        """Chat number n of the endless sequence of shuffled epochs; one that the template refuses is replaced
        by the next."""
        count = len(self.lines)
        for k in range(count):
            number, offset = self.lines[self.shuffle[n - n % count + (n + k) % count]]
            self.file.seek(offset)
            try:
                return self.encoder.encode(check_chat(self.file.readline()))
            except BadChat as e:
                if number not in self.warned:
                    print(f"{self.path}:{number}: skipped: {e}", file=sys.stderr, flush=True)
                self.warned.add(number)
        raise SystemExit(f"{self.path}: the chat template refuses every chat")

    def row(self, n):
        """ids [t + 1], weight [t], positions [t] with t <= length."""
        ids, weight, turns = self.chat(n)
        start = ids[0]
        rng = np.random.default_rng((self.seed, 1, n))
        spare = len(ids) - (self.length + 1)
        if spare > 0:
            begin = int(rng.choice([0] + [t for t in turns if t < spare] + [spare]))
            part = slice(begin, begin + self.length + 1)
            ids, weight = ids[part].copy(), weight[part]
            if start == self.bos:
                ids[0] = self.bos           # models that always saw it lean on it
            turns = [t - begin for t in turns if 0 < t - begin < self.length]
        positions = np.arange(len(ids) - 1, dtype=np.int64)
        jump(positions, [t for t in turns if t < len(positions)], self.reach, rng, self.gap_share)
        return ids, weight[1:], positions

    def batch(self, step):
        first = (step * self.size + self.rank) * self.rows
        rows = [self.row(first + r) for r in range(self.rows)]
        lengths = [len(p) for _, _, p in rows]
        ids = np.zeros((self.rows, max(lengths) + 1), np.int64)
        weight = np.zeros((self.rows, max(lengths)), np.float32)
        pos = np.zeros((self.rows, max(lengths)), np.int64)
        for r, (i, w, p) in enumerate(rows):
            t = len(p)
            ids[r, :t + 1], weight[r, :t] = i, w
            pos[r] = np.concatenate((p, p[-1] + 1 + np.arange(len(pos[r]) - t)))
        return Batch(*map(torch.from_numpy, (ids, weight, pos)), torch.tensor(lengths))
