#!/usr/bin/env python3
"""Draws what rewards for right answers did to keepd-nano (docs/QUALITY.md, weights adapted to evictions).

    reward_curve.py bench/results/reinforce-nano.jsonl docs/quality-rewards.svg

Left: right answers to the new questions of each step, by the weights in training and by the model as it is. Right: other
questions afterwards, with 95 % intervals over the questions. The rows are those of training/reinforce.py: two steps, or the
twelve answers to each of eight questions.
"""
import argparse
import json
import pathlib

from lab import plots, statistics

AROUND = 2                      # rows on both sides of a moving mean; five rows are ten steps
SHARE = "0.0625"                # share of the tokens that is held, in training and in the picture
BEFORE, AFTER = plots.LOOK["full"][0], plots.LOOK["global"][0]
MODELS = {"as-it-is": ("as it is", BEFORE), "distilled2": ("distilled", plots.LOOK["trimkv"][0]), "rewarded": ("rewards", AFTER)}


def moving(points):
    """Means over neighbouring rows; fewer neighbours at both ends."""
    near = [points[max(0, i - AROUND):i + AROUND + 1] for i in range(len(points))]
    return [(step, sum(v for _, v in some) / len(some)) for (step, _), some in zip(points, near)]


def held_out(rows, model):
    """{question: (right answers, answers)} of a model afterwards."""
    return {(row["step"], i): (digits.count("1"), len(digits)) for row in rows
            if row.get("model") == model and row["share"] == SHARE for i, digits in enumerate(row["rewards"])}


def draw(rows):
    steps = [row["reward_in_training"] for row in rows if "reward_in_training" in row]
    out, place, level = plots.step_axes((50, 62, 470, 190), steps[-1]["step"], 10)
    out += [plots.text(20, 24, "Right answers in %, a sixteenth of the tokens kept"),
            plots.text(50, 50, "while rewards are given: new questions in each step", kind="dim"),
            plots.text(600, 50, "afterwards: 48 other questions", kind="dim"),
            plots.text(285, 284, "steps", "middle", "dim")]
    for field, colour, label in (("as_it_is", BEFORE, "as it is"), ("in_training", AFTER, "in training")):
        points = [(row["step"], row[field]) for row in steps]
        means = moving(points)
        out += plots.line_of_steps(points, means, colour, place, level)
        out.append(plots.text(place(means[-1][0]) + 6, level(means[-1][1]) + 4, label))
    out += [f'<path class="grid" d="M600 {level(p / 100):.1f}h270"/>' for p in range(0, 101, 25)]
    shown = [(label, colour, statistics.mean(statistics.aligned(held_out(rows, model))[0])) for model, (label, colour) in MODELS.items()]
    return plots.page(890, 296, out + plots.bars(600, 90, shown, level))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("rows", type=pathlib.Path)
    ap.add_argument("svg", type=pathlib.Path)
    a = ap.parse_args()
    a.svg.write_text(draw([json.loads(line) for line in a.rows.read_text().splitlines()]))


if __name__ == "__main__":
    main()
