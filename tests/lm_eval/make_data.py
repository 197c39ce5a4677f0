"""make_data.py: writes recall.jsonl and text.jsonl from held-out dialogues of training/corpus.py.

    python training/corpus.py --task memory --split heldout --tokens 256 --count 24 >memory.jsonl
    python tests/lm_eval/make_data.py memory.jsonl

recall: a dialogue up to a question; the right answer among those to three other dialogues' questions.
text: whole dialogues, for their likelihood."""
import json
import pathlib
import random
import sys

FOLDER = pathlib.Path(__file__).parent


def chat(messages):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def questions(dialogues):
    for messages in dialogues:
        at = max(i for i, m in enumerate(messages) if m.get("scored"))
        yield chat(messages[:at]) + "<|im_start|>assistant\n", messages[at]["expected"]


def main(path):
    dialogues = [json.loads(line)["messages"] for line in open(path)]
    rows, rng = list(questions(dialogues)), random.Random(5)
    with open(FOLDER / "recall.jsonl", "w") as out:
        for context, answer in rows:
            choices = rng.sample(sorted({a for _, a in rows} - {answer}), 3) + [answer]
            rng.shuffle(choices)
            out.write(json.dumps({"context": context, "choices": choices, "label": choices.index(answer)}) + "\n")
    with open(FOLDER / "text.jsonl", "w") as out:
        for messages in dialogues[:8]:
            out.write(json.dumps({"text": chat(messages)}) + "\n")


main(sys.argv[1])
