"""Losses of the trainers. Weights [B, T] sum to 1 over all that a step sees, so sums are means."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def divergence(student, teacher, weight, temperature=1.0):
    """temperature^2 * KL(teacher || student) of logits [B, T, vocab]."""
    s = F.log_softmax(student.float() / temperature, -1)
    t = F.log_softmax(teacher.float() / temperature, -1)
    return temperature ** 2 * ((t.exp() * (t - s)).sum(-1) * weight).sum()


def next_token(student, targets, weight):
    """Cross entropy of the targets [B, T]."""
    nll = F.cross_entropy(student.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (nll * weight.flatten()).sum()


def by_blocks(loss, block, *parts):
    """The sum of loss(*[p[:, i:i + block] for p in parts]) over blocks of positions; block 0: all at once.

    Logits [T, vocab] of a large vocabulary are the largest tensor of a step.  With several blocks each is
    computed again in backward, so that the logits of one block exist at a time.
    """
    length = parts[0].shape[1]
    if not block or block >= length:
        return loss(*parts)
    return sum(checkpoint(loss, *(p[:, i:i + block] for p in parts), use_reentrant=False)
               for i in range(0, length, block))


def soft_size(log_beta, age):
    """sum over heads and i <= t of beta_i^(t - i); log_beta [B, H, T], age [B, s, T] (< 0: later) -> [B, s]."""
    alive = torch.exp(log_beta[:, :, None] * age.clamp(min=0)[:, None]) * (age >= 0)[:, None]
    return alive.sum((1, 3))


def capacity(log_beta, positions, times, budget):
    """Mean over t of max(0, S_t - M) / (t + 1), with S_t the soft cache size per head of the row.

    One sum over all layers and heads, as the single ranking of the `global` policy needs it (the form of
    arXiv 2605.09649, section 4).  log_beta: per layer [B, H, T]; times [B, s]: the indices t of a row that
    estimate the mean, as the exact sum over all t costs T x T per head; budget [B].
    Also the mean soft size in entries, and as a share of the tokens.
    """
    age = (positions.gather(1, times)[:, :, None] - positions[:, None, :]).float()
    total = sum(checkpoint(soft_size, lb, age, use_reentrant=False) for lb in log_beta)
    size = total / (len(log_beta) * log_beta[0].shape[1])
    loss = ((size - budget[:, None]).clamp(min=0) / (times + 1)).mean()
    return loss, size.detach().mean(), (size.detach() / (times + 1)).mean()
