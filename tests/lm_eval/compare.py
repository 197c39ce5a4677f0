"""compare.py URL [TOLERANCE]: the likelihoods that lm-eval gets from a running keepd (its local-completions), beside
those that transformers computes for the same model and the same texts, on the local tasks of this folder.

    pip install 'lm-eval[api]' torch transformers
    build/keepd --model bundled/keepd-nano --kv-policy full
    python tests/lm_eval/compare.py http://127.0.0.1:8080

Exit 1 when one differs by more than TOLERANCE per token (0.05)."""
import os
import sys

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))  # the tasks name their files from here
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "bundled/keepd-nano"
TASKS = ["keepd_recall", "keepd_text"]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def keepd_samples(url):
    """lm-eval as anybody runs it; the tokenizer is the model's own, for which <|im_start|> in a text is a token."""
    arguments = {"model": "keepd-nano", "base_url": f"{url}/v1/completions", "tokenizer": MODEL, "num_concurrent": 1,
                 "tokenizer_backend": "huggingface", "tokenized_requests": True, "batch_size": 4, "max_length": 4096}
    result = lm_eval.simple_evaluate(model="local-completions", model_args=arguments, tasks=TASKS, log_samples=True,
                                     bootstrap_iters=0,
                                     task_manager=TaskManager(include_path="tests/lm_eval", include_defaults=False))
    return result["samples"], result["results"]


def likelihood(model, before, ids):
    """log p(ids | before), and whether each was the most likely."""
    with torch.no_grad():
        logits = model(torch.tensor([(before + ids)[:-1]])).logits[0, len(before) - 1:].float()
    scores = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])
    return scores.sum().item(), bool((logits.argmax(-1) == torch.tensor(ids)).all())


def pair_ids(context, continuation):
    """As lm-eval splits them: blanks at the end belong to what follows."""
    kept = context.rstrip()
    whole, before = TOKENIZER(context + continuation)["input_ids"], TOKENIZER(kept)["input_ids"]
    return before, whole[len(before):]


def show(task, samples, model):
    worst = count = tokens = right = same_greedy = 0
    for sample in samples:
        ours, theirs = [], []
        for arguments, response in zip(sample["arguments"], sample["filtered_resps"], strict=True):
            rolling = len(arguments) == 1
            before, ids = ([TOKENIZER.eos_token_id], TOKENIZER(arguments[0])["input_ids"]) if rolling else pair_ids(*arguments)
            want, greedy = likelihood(model, before, ids)
            got = float(response) if rolling else float(response[0])
            same_greedy += rolling or (str(response[1]) == str(greedy))
            ours.append(got), theirs.append(want)
            worst, count, tokens = max(worst, abs(got - want) / len(ids)), count + 1, tokens + len(ids)
        right += max(ours) == ours[theirs.index(max(theirs))]
    print(f"{task:13} {len(samples):7} {count:12} {tokens:7} {worst:15.2g} {same_greedy:11}/{count} {right:9}/{len(samples)}")
    return worst


def main(url, tolerance=0.05):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    samples, results = keepd_samples(url)
    print("task          samples  likelihoods  tokens  worst per token  same greedy  same best")
    worst = max(show(task, samples[task], model) for task in TASKS)
    for task in TASKS:
        print("lm-eval says", task, {k.split(",")[0]: round(v, 4) for k, v in results[task].items()
                                     if isinstance(v, float) and "stderr" not in k})
    return worst > tolerance


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/"), *map(float, sys.argv[2:])))
