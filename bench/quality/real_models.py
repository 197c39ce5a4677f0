#!/usr/bin/env python3
"""Tables and the picture of bounded caches on real models, from the rows that texts.py has stored.

    real_models.py bench/results/real-models.jsonl                      prints a table for each model and share, and the goals
    real_models.py bench/results/real-models.jsonl docs/choosing.svg    and draws the losses at a quarter of the tokens

A row has the name of its model, that of its gates (null: the method needs none), and what texts.py --store writes. A number is the
increase over the full cache in nats per token, paired by text, with a 95 % interval over the texts and their number.
"""
import argparse
import collections
import json
import pathlib
import re

from lab import plots, statistics

CELLS = ("documents", "code", "languages", "chats", "tools")
SHARES = (4, 8)
DRAWN = ("global", "snapkv", "streaming")       # the methods of the picture
DRAWN_FEWEST, SURE_FEWEST = 2, 3                # texts of a cell: fewer are not drawn, or without an interval
GOALS, GOAL = {"code": 0.02}, 0.03              # nats that `global` may lose at a quarter, by cell
TOP = 0.8                                       # nats at the upper edge of a panel
NAMED = re.compile(r"(\w+) (\d+) (\d+) (\{.*\})")


def labelled(gates, fields):
    """The name of a row of a table: the policy, parameters other than the budget, and the gates."""
    more = [f"{k} {v}" for k, v in sorted(fields.items()) if k not in ("policy", "budget", "buffer", "chunk")]
    return ", ".join([f"`{fields['policy']}`", *more, *([gates] if gates else [])])


def share_of(length, fields):
    """The part of the tokens that a method may hold, as 1 / n."""
    return round(length / (fields["budget"] + fields["chunk"]))


class Rows:
    """Samples {(number, digest) of the text: (nats, tokens)} by model, cell, share and label; the full cache's by model and cell."""

    def __init__(self, lines):
        self.full = collections.defaultdict(dict)
        self.bounded = collections.defaultdict(dict)
        for row in map(json.loads, lines):
            cell, number, length, fields = NAMED.fullmatch(row["key"]).groups()
            fields, text, value = json.loads(fields), (int(number), row.get("text")), (row["nats"], row["tokens"])
            if fields["policy"] == "full":
                self.full[row["model"], cell][text] = value
            else:
                label = labelled(row["gates"], fields)
                self.bounded[row["model"], cell, share_of(int(length), fields), label][text] = value

    def models(self):
        return list(dict.fromkeys(model for model, _ in self.full))

    def labels(self, model, share):
        return list(dict.fromkeys(label for m, _, s, label in self.bounded if (m, s) == (model, share)))

    def loss(self, model, cell, share, label):
        """((mean, low, high), texts); None where nothing was measured."""
        found, full = self.bounded.get((model, cell, share, label), {}), self.full.get((model, cell), {})
        texts = len(set(found) & set(full))
        return (statistics.paired(found, full), texts) if texts else None

    def lead(self, model, cell, share, ours, theirs):
        """How much less `ours` loses than `theirs`, in the form of `loss`, where that many texts have an interval."""
        a, b = (self.bounded.get((model, cell, share, label), {}) for label in (theirs, ours))
        texts = len(set(a) & set(b))
        return (statistics.paired(a, b), texts) if texts >= SURE_FEWEST else None


def shown(loss, count):
    """A cell of a table; `count`: with the number of texts, which is not the same in the whole column."""
    if loss is None:
        return ""
    (mean, low, high), texts = loss
    return f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if texts >= SURE_FEWEST else "") + (f" ({texts})" if count else "")


def table(rows, model, share):
    labels = rows.labels(model, share)
    columns = {cell: [rows.loss(model, cell, share, label) for label in labels] for cell in CELLS}
    counts = {cell: {loss[1] for loss in found if loss} for cell, found in columns.items()}
    head = [f"{cell} ({min(n)})" if len(n) == 1 else cell for cell, n in counts.items()]
    lines = [f"| 1/{share} of the tokens | {' | '.join(head)} |", "|---|" + "--:|" * len(CELLS)]
    for i, label in enumerate(labels):
        lines.append(f"| {label} | " + " | ".join(shown(found[i], len(counts[cell]) > 1) for cell, found in columns.items()) + " |")
    return "\n".join(lines)


def goals(rows, model):
    """Lines that say which cells of `global` miss the goals: the losses at a quarter, and at an eighth the lead before the other methods."""
    ours = chosen(rows, model, "global")
    losses = {cell: rows.loss(model, cell, 4, ours) for cell in CELLS}
    missed = [f"{cell} {loss[0][0]:.3f}" for cell, loss in losses.items() if loss and loss[0][0] > GOALS.get(cell, GOAL)]
    measured = sum(loss is not None for loss in losses.values())
    lines = [f"1/4: {measured - len(missed)} of {measured} goals met" + (f"; missed: {', '.join(missed)}" if missed else "")]
    for label in rows.labels(model, 8):
        leads = {cell: rows.lead(model, cell, 8, ours, label) for cell in CELLS} if not label.startswith("`global`") else {}
        leads = {cell: lead for cell, lead in leads.items() if lead}
        behind = [f"{cell} {mean:.3f} [{low:.3f}, {high:.3f}]" for cell, ((mean, low, high), _) in leads.items() if low <= 0]
        if leads:
            lines.append(f"1/8: ahead of {label} in {len(leads) - len(behind)} of {len(leads)}" + (f"; not in {', '.join(behind)}" if behind else ""))
    return "\n".join(lines)


def chosen(rows, model, method):
    """The label of a method with its defaults: with gates from `keepd fit`, where it needs gates."""
    wanted = {f"`{method}`", f"`{method}`, keepd fit"}
    return next((label for label in rows.labels(model, 4) if label in wanted), None)


def is_drawn(loss):
    return loss is not None and loss[1] >= DRAWN_FEWEST


def panel(rows, model, x0, y0, width, height):
    out = [plots.text(x0, y0 - 10, model)]
    level = lambda v: y0 + height * (1 - min(max(v, 0), TOP) / TOP)        # noqa: E731
    for i in range(5):
        y = level(TOP * i / 4)
        out.append(f'<path class="grid" d="M{x0} {y:.1f}h{width}"/>' + plots.text(x0 - 5, y + 4, f"{TOP * i / 4:.1f}", "end", "dim"))
    step = width / len(CELLS)
    for c, cell in enumerate(CELLS):
        out.append(plots.text(x0 + step * (c + 0.5), y0 + height + 16, cell, "middle", "dim"))
        for m, method in enumerate(DRAWN):
            loss = rows.loss(model, cell, 4, chosen(rows, model, method))
            if not is_drawn(loss):
                continue
            (mean, low, high), texts = loss
            x, colour = x0 + step * (c + 0.2 + 0.3 * m), plots.LOOK[method][0]
            out.append(f'<rect x="{x - 6:.1f}" y="{level(mean):.1f}" width="12" height="{level(0) - level(mean):.1f}" fill="{colour}"/>')
            if texts >= SURE_FEWEST:
                out.append(f'<path d="M{x:.1f} {level(low):.1f}V{level(high):.1f}" class="grid" stroke-width="1.5"/>')
    return out


def drawn(rows):
    models = [m for m in rows.models() if is_drawn(rows.loss(m, "documents", 4, chosen(rows, m, "global")))]
    width, height, left, top = 360, 150, 50, 66
    out = [plots.text(20, 24, "Nats per token lost with a quarter of the tokens held")]
    for i, model in enumerate(models):
        out += panel(rows, model, left + i % 2 * (width + 60), top + i // 2 * (height + 62), width, height)
    below = top + -(-len(models) // 2) * (height + 62) - 10
    keys, used = plots.legend(DRAWN, left, below, 500)
    return plots.page(left + min(2, len(models)) * (width + 60), below + used, out + keys)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("rows", type=pathlib.Path)
    ap.add_argument("picture", type=pathlib.Path, nargs="?")
    a = ap.parse_args()
    rows = Rows(a.rows.read_text().splitlines())
    for model in rows.models():
        for share in SHARES:
            if rows.labels(model, share):
                print(f"\n{model}\n\n{table(rows, model, share)}")
        if chosen(rows, model, "global"):
            print(f"\n{goals(rows, model)}")
    if a.picture:
        a.picture.write_text(drawn(rows))


if __name__ == "__main__":
    main()
