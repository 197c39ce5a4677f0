"""When a sequence evicts: fixed by its request alone."""


def schedule(tokens, prompt, budget, buffer, chunk):
    """(tokens to append, evict afterwards?), one pair after the other: after every chunk of the
    prompt, after the prompt when more than budget + buffer is held, and before exceeding that."""
    at = held = 0
    steps = []
    while at < tokens:
        if at < prompt:
            count = min(chunk - at % chunk, prompt - at)
            full = held + count > (budget if (at + count) % chunk == 0 else budget + buffer)
        else:  # the tokens that can be generated before the next eviction
            count = min(max(budget + max(buffer, 1) - held, 0), tokens - at)
            full = at + count < tokens
        if count or full:
            steps.append((count, full))
        at, held = at + count, budget if full else held + count
    return steps
