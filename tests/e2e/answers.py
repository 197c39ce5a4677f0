"""Members of an answer that tests compare."""


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(answer):
    """Token and log-probability, to the last bit."""
    return [(t["token"], t["logprob"]) for t in answer["choices"][0]["logprobs"]["content"]]
