#!/usr/bin/env python3
"""Draws the tokens that each reading of the weights gives, by kind of work, from the file that drafts.py --json writes.

    drafts_picture.py RESULTS.json [--out docs/drafts.svg]
"""
import argparse
import json
import pathlib
import statistics
import xml.sax.saxutils as saxutils

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = {"edit": "edit of 200 lines", "predicted": "edit, predicted", "document": "quotations", "json": "JSON by a schema",
        "agent": "an agent's commands", "prose": "a story"}
COLOURS = {"keepd, text": "#0b6e4f", "keepd, draft model": "#55b38f",
           "llama.cpp, text": "#c46210", "llama.cpp, draft model": "#e8b07a"}
LEFT, WIDTH, BAR, GAP, TOP = 150, 470, 15, 14, 40


def draw(results):
    work = results["work"]
    kinds = [k for k in COLOURS if any(k in done for done in work.values())]
    longest = max(max(done[k]["tokens_a_read"] for k in kinds if k in done) for done in work.values())
    scale = WIDTH / max(longest, 2)
    svg, y = [], TOP
    for name, done in work.items():
        own = [k for k in kinds if k in done]
        svg.append(f'<text x="{LEFT - 8}" y="{y + len(own) * BAR / 2 + 4:.1f}" text-anchor="end">{WORK.get(name, name)}</text>')
        for kind in own:
            value, times = done[kind]["tokens_a_read"], statistics.median(done[kind]["times"])
            svg.append(f'<rect x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="{BAR - 2}" fill="{COLOURS[kind]}"/>'
                       f'<text x="{LEFT + value * scale + 5:.1f}" y="{y + 11}" font-size="11">{value:.3g} '
                       f'<tspan fill="#777">({times:.3g} times as fast)</tspan></text>')
            y += BAR
        y += GAP
    one = LEFT + scale
    svg.append(f'<path d="M{one:.1f} {TOP - 6}V{y - GAP + 4}" stroke="#999" stroke-dasharray="4 3"/>')
    x = LEFT
    for kind in kinds:
        svg.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS[kind]}"/><text x="{x + 17}" y="20">{kind}</text>')
        x += 150
    drafts = f', draft model {results["draft_model"]}' if results["draft_model"] else ""
    foot = f'{results["model"]}{drafts}; {results["threads"]} threads, {results["processor"]}, {results["date"]}'
    for line, text in enumerate(("Tokens that each reading of the weights gives; dashed: one, without guesses.", foot)):
        svg.append(f'<text x="10" y="{y + 14 + 16 * line}" font-size="11" fill="#555">{saxutils.escape(text)}</text>')
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 190}" height="{y + 40}" font-family="sans-serif" font-size="12">'
            '<rect width="100%" height="100%" fill="white"/>')
    return "\n".join([head, *svg, "</svg>"]) + "\n"


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("results", type=pathlib.Path)
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "drafts.svg")
    args = ap.parse_args()
    args.out.write_text(draw(json.loads(args.results.read_text())))


if __name__ == "__main__":
    main()
