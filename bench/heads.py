#!/usr/bin/env python3
"""Draws docs/heads.svg: what each head keeps after the twenty-turn conversation of tests/e2e/test_dialogue.py.

    heads.py [--url http://...]      starts build/keepd with --kv-budget 256 when no daemon is named
"""
import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
sys.path.insert(0, str(ROOT / "training"))
import corpus  # noqa: E402
import requests  # noqa: E402

BUDGET = 256


def turns(count, tokens):
    """User messages of one long, held-out memory dialogue: facts, chatter, questions."""
    dialogue = next(corpus.dialogues("memory", "heldout", 7, count * tokens))
    said = [m["content"] for m in dialogue.messages if m["role"] == "user"]
    size = -(-len(said) // count)
    return [" ".join(said[i:i + size]) for i in range(0, len(said), size)]


def talk(url):
    messages, kept = [], []
    for message in turns(20, 520):
        messages.append({"role": "user", "content": message})
        answer = requests.post(f"{url}/v1/chat/completions", timeout=300, json={
            "model": "keepd-nano", "messages": messages, "max_tokens": 32, "temperature": 0,
            "kv": {"policy": "global", "budget": BUDGET, "report": "lengths"}}).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        details = answer["usage"]["kv_details"]
        kept.append((details["seen_tokens"], details["kept_entries"]))
    return kept, details["lengths"]


def draw(kept, lengths, path):
    """Left: entries seen and kept per turn. Right: one bar per (layer, head) after the last turn."""
    streams = sum(len(layer) for layer in lengths)
    seen_max = max(seen for seen, _ in kept)
    longest = max(n for layer in lengths for n in layer)
    w1, h, x1, y0 = 300, 220, 60, 250
    bar = 14
    x2 = x1 + w1 + 90
    w2 = sum(len(layer) * bar + 10 for layer in lengths)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{x2 + w2 + 20}" height="310" font-family="sans-serif" font-size="12">'
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="{x1}" y="18">tokens per head on average, by turn</text><text x="{x2}" y="18">entries kept by each head after turn {len(kept)}</text>']
    for value in (0, seen_max // 2, seen_max):
        y = y0 - value / seen_max * h
        svg.append(f'<path d="M{x1} {y:.1f}h{w1}" stroke="#ddd"/><text x="{x1 - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for colour, label, values, dy in (("#999999", "seen", [s for s, _ in kept], -6), ("#0b6e4f", "kept", [k / streams for _, k in kept], -6)):
        points = " ".join(f"{x1 + i * w1 / (len(kept) - 1):.1f},{y0 - v / seen_max * h:.1f}" for i, v in enumerate(values))
        svg.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        svg.append(f'<text x="{x1 + w1 - 4}" y="{y0 - values[-1] / seen_max * h + dy:.1f}" text-anchor="end" fill="{colour}">{label} ({values[-1]:.0f})</text>')
    y = y0 - BUDGET / longest * h
    svg.append(f'<path d="M{x2} {y:.1f}h{w2}" stroke="#c46210" stroke-dasharray="4 3"/><text x="{x2 + w2 * 0.42:.0f}" y="{y - 5:.1f}" text-anchor="middle" fill="#c46210">budget {BUDGET}</text>')
    x = x2
    for i, layer in enumerate(lengths):
        for n in layer:
            svg.append(f'<rect x="{x}" y="{y0 - n / longest * h:.1f}" width="{bar - 2}" height="{n / longest * h:.1f}" fill="#0b6e4f"><title>layer {i}: {n}</title></rect>')
            x += bar
        svg.append(f'<text x="{x - len(layer) * bar / 2:.0f}" y="{y0 + 18}" text-anchor="middle">layer {i}</text>')
        x += 10
    svg.append(f'<text x="{x1}" y="295" fill="#555">keepd-nano, {kept[-1][0]} tokens seen; {streams} heads keep {kept[-1][1]} entries of {kept[-1][0] * streams}</text></svg>')
    path.write_text("\n".join(svg) + "\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--url")
    ap.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "heads.svg")
    a = ap.parse_args()
    daemon = None
    if a.url is None:
        from conftest import Daemon
        daemon = Daemon("--kv-budget", str(BUDGET))
    try:
        kept, lengths = talk(a.url or daemon.url)
    finally:
        if daemon:
            daemon.stop()
    draw(kept, lengths, a.out)
    print(f"{a.out}: {kept[-1][0]} tokens seen, lengths {min(min(x) for x in lengths)}..{max(max(x) for x in lengths)}")


if __name__ == "__main__":
    main()
