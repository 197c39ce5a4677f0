"""Evaluates gates: replays held-out text with hard eviction, as the daemon does by default."""

import numpy as np
import torch

import corpus
from gates import simulate

POLICIES = ("full", "global", "trimkv", "streaming")


def recall(gated, tokenizer, length=1024, cases=100, share=0.25, chunk=64, task="memory", policies=POLICIES, seed=5):
    """Held-out answers exactly right per policy when the sequence holds `share` of its tokens, chunk included."""
    encoder = corpus.Encoder(tokenizer)
    source = corpus.dialogues(task, "heldout", seed, int(0.92 * length))
    budget = int(0.92 * length * share) - chunk
    score, held = {p: [0, 0] for p in policies}, {}
    while score[policies[0]][1] < cases:
        ids, _, answer = encoder.batch(encoder.fitting(source, 8, length), length)
        for p in policies:
            guess, held[p] = simulate(gated, torch.from_numpy(ids[:, :-1]).to(gated.device), p, budget, chunk)
            wrong = guess.cpu().numpy() != ids[:, 1:]
            for r in range(len(ids)):
                for n in np.unique(answer[r][answer[r] >= 0]):
                    score[p][1] += 1
                    score[p][0] += not wrong[r][answer[r] == n].any()
    result = {p: round(a / b, 4) for p, (a, b) in score.items()}
    result.update(task=task, length=length, budget=budget, chunk=chunk, cases=score[policies[0]][1])
    if "global" in held:
        result["global_lengths"] = held["global"].sum(-1).float().mean(0).round().int().tolist()
    return result


def agreement(gated, chats, cases, share, chunk, policies=POLICIES):
    """Share of the answers' tokens whose arg max is that of the full cache, when each row holds `share` of its tokens,
    chunk included.  Rows too short for that are left out."""
    same, count, rows, n = {p: 0 for p in policies if p != "full"}, 0, 0, 0
    while rows < cases and n < len(chats.lines):
        ids, weight, _ = chats.row(n)
        n += 1
        budget = int((len(ids) - 1) * share) - chunk
        if budget < 1:
            continue
        x, graded = torch.from_numpy(ids[None, :-1]).to(gated.device), weight == 1
        full = simulate(gated, x, "full", 0, chunk)[0].cpu().numpy()[0][graded]
        for p in same:
            guess = simulate(gated, x, p, budget, chunk)[0].cpu().numpy()[0][graded]
            same[p] += int((guess == full).sum())
        rows, count = rows + 1, count + int(graded.sum())
    if not count:
        raise SystemExit(f"{chats.path}: no chat is longer than {int((chunk + 1) / share)} tokens, which --share and --chunk need")
    return {**{p: round(s / count, 4) for p, s in same.items()}, "share": share, "chunk": chunk, "rows": rows,
            "tokens": count}
