"""The plan: the cells, the budget of each, and the order of their dialogues."""
from dataclasses import dataclass

from . import tasks

# Every method the laboratory knows, in the order of tables and legends; which of them a daemon
# offers is asked of it (client.offered).
METHODS = ("full", "global", "trimkv", "gkv", "rkv", "d2o", "ems", "kvcompress", "cake", "adakv",
           "pyramidkv", "snapkv", "morphkv", "h2o", "tova", "expected_attention", "keydiff", "knorm", "lagkv", "streaming")
SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
QUARTER = 1 / 4
STEP = 1 / 4              # buffer and chunk as parts of the fraction
NEVER = 1 << 20           # a chunk that no prompt reaches
SMALLEST = 16             # entries per head; smaller fractions of short texts are not measured


@dataclass(frozen=True)
class Cell:
    """A task at a length under a method that may hold `share` of the history's tokens.

    `weight`: dialogues per round. `extra`: further kv fields, "step" for another buffer and chunk, or
    "known": history and question are read together and compressed once, before the answer. `gates`: which gates the daemon serves, where a run compares several.
    """
    task: str
    length: int
    method: str
    share: float = 1.0
    weight: float = 1.0
    extra: tuple = ()
    gates: str = ""

    @property
    def variant(self):
        return ",".join([f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.extra]
                        + ([f"gates={self.gates}"] if self.gates else []))

    @property
    def name(self):
        variant = self.variant
        return f"{self.task}/{self.length}/{self.method}/{self.share:g}" + (f"/{variant}" if variant else "")

    @property
    def group(self):
        """Cells whose dialogues are the same, so that they can be compared in pairs."""
        return self.task, self.length


def peak(step, read, turn):
    """Entries above the budget that a conversation holds at its fullest, per head on average, when it
    reads a prompt of `read` tokens and then a turn of `turn` more, with buffer = chunk = step.

    The daemon evicts after every step-th new prompt token, so a prompt leaves read % step entries
    above the budget, on which the next turn builds; an answer never adds more than the buffer."""
    return max(step, read % step + min(turn, step))


def spacing(total, part, read, turn):
    """The step at which the least is held above it: near `part` of the total, and such that little of
    the history is left over when its reading ends. More steps would only lower the budget."""
    most = max(1, round(total * part))
    return min(range(most, max(0, round(0.75 * most) - 1), -1), key=lambda s: peak(s, read, turn) - s)


def kv_fields(cell, dialogue):
    """The request's kv object: never more than the share of the history's tokens is held."""
    if cell.method == "full":
        return {"policy": "full"}
    extra = dict(cell.extra)
    total = max(SMALLEST, int(dialogue.tokens * cell.share))
    if extra.pop("known", 0):
        return {"policy": cell.method, "budget": total, "buffer": tasks.ANSWER_TOKENS[cell.task], "chunk": NEVER, **extra}
    step = spacing(total, extra.pop("step", STEP), dialogue.read, dialogue.turn)
    budget = max(1, total - peak(step, dialogue.read, dialogue.turn))
    return {"policy": cell.method, "budget": budget, "buffer": step, "chunk": step, **extra}


def lengths(trained):
    """(task, length, shares) of the table; the grid of needles also has a shorter row."""
    rows = [(task, trained, SHARES) for task in tasks.TASKS]
    rows += [("needle", trained // 2, (QUARTER,))]
    return rows + [(task, times * trained, (QUARTER,)) for times in (2, 4) for task in tasks.TASKS]


def weight(task, method, share):
    """Dialogues per round: one, and two in the cells that carry the first goals (at least 400 pairs)."""
    goal = task == "memory" and share in (1.0, QUARTER) and method in ("full", "global", "trimkv", "streaming")
    return 2.0 if goal else 1.0


def table(trained, methods):
    """All cells of the table for the methods that a daemon offers."""
    cells = []
    for task, length, shares in lengths(trained):
        for method in methods:
            for share in (1.0,) if method == "full" else shares:
                cells.append(Cell(task, length, method, share, weight(task, method, share)))
    return cells


ABLATED = (("memory", 1.0), ("needle", 1.0), ("trace", 1.0))
# One parameter away from the defaults (horizon 128, 4 sinks, 16 recent, STEP), which are the table's own cells.
ABLATIONS = ((("recent", 0),), (("recent", 8),), (("recent", 32),), (("horizon", 1),), (("horizon", 16),),
             (("horizon", "inf"),), (("sinks", 0),), (("step", 1 / 16),), (("step", 1 / 8),), (("step", 3 / 8),))


def ablations(trained, method="global"):
    """`method` at a quarter, one parameter changed at a time."""
    return [Cell(task, trained, method, QUARTER, w, extra) for task, w in ABLATED for extra in ABLATIONS]


GATES_SHARES = (1 / 4, 1 / 8)


def with_gates(trained, label, method="global"):
    """The cells that compare gates; the model's own have label ""."""
    return [Cell(task, trained, method, share, 1.0, (), label) for task in tasks.ANSWERED for share in GATES_SHARES]


KNOWN_SHARES = (1 / 4, 1 / 8)
# Windows nearer to the length of nano's questions than the defaults of 16 and 32.
KNOWN_WINDOWS = {"snapkv": 8, "adakv": 8, "cake": 8, "morphkv": 8, "gkv": 8}


def known(trained, methods):
    """The cells in which the question is known when the cache is compressed; also with a shorter window."""
    variants = [(m, (("known", 1),)) for m in methods if m != "full"]
    variants += [(m, (("known", 1), ("window", KNOWN_WINDOWS[m]))) for m in methods if m in KNOWN_WINDOWS]
    plain = [Cell(task, trained, "full") for task in tasks.ANSWERED if "full" in methods]
    return plain + [Cell(task, trained, method, share, 1.0, extra)
                    for task in tasks.ANSWERED for share in KNOWN_SHARES for method, extra in variants]


def smoke(trained, methods):
    """One small cell of every kind: what the smoke test runs."""
    return [Cell(task, trained, method, 1.0 if method == "full" else QUARTER)
            for task in tasks.TASKS for method in methods]


def schedule(cells, rounds):
    """[(cell, dialogue)] in an order of which every beginning is a balanced table.

    Dialogue d of a cell is due at (d + 1) / weight: all cells advance together, and wherever the
    run stops, those compared in pairs have seen the same dialogues but for the last.
    """
    due = [((d + 1) / cell.weight, cell.length, cell.task, METHODS.index(cell.method), -cell.share, i, d)
           for i, cell in enumerate(cells) for d in range(max(1, int(rounds * cell.weight)))]
    return [(cells[i], d) for *_, i, d in sorted(due)]


def cost(cell, shared):
    """Tokens of one dialogue, about: what progress is measured in."""
    if cell.task == "loss":
        return cell.length
    generated = tasks.ANSWER_TOKENS[cell.task] / 2     # one token at a time costs more than its share
    return cell.length * (1 if shared else tasks.FORKS) + tasks.FORKS * (tasks.QUESTION_ROOM + 2 * generated)
