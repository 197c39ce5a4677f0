"""The five held-out tasks.

A dialogue is a history and questions that all continue that same history (they are forks of it, not
a sequence). The history is read, and compressed, before any question is known, as in every chat. So
a method that looks at the question before it decides what to keep gets no such favour here.

  memory   facts told over several turns, chatter after them, questions at the end
  needle   facts at chosen depths of a long filler text
  trace    step-by-step work with redundant self-checks: variables set long ago, running totals
  second   as needle, but an unrelated question has been asked and answered: a cache shaped by the
           first question must serve the second
  loss     a long dialogue, scored as text: negative log-likelihood per token of its second half

Names, values, codes and fillers are those of the generator's held-out split, and lengths are drawn
between 90 and 100 % of the nominal length, so that no length of the training curriculum recurs.
"""
import pathlib
import random
import sys
from dataclasses import dataclass, field

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "training"))
import corpus  # noqa: E402  (the generator whose other split the model was trained on)

SEED = 2026
FORKS = 4                 # questions per dialogue
DEPTHS = 8                # depth bins of the needle grid; every dialogue covers half of them
SHORTEST, LONGEST = 0.9, 0.98   # parts of the nominal length; fitting adds or removes up to 0.02
QUESTION_ROOM = 64        # tokens left for a question and its answer
ANSWER_TOKENS = {"memory": 48, "needle": 48, "second": 48, "trace": 120}
ANSWERED = tuple(ANSWER_TOKENS)      # tasks whose score is a share of right answers
TASKS = ANSWERED + ("loss",)


@dataclass
class Question:
    text: str
    expected: str                    # an answer is right when it ends with this
    depth: float | None = None       # where in the history the fact stands, 0 = start

    @property
    def message(self):
        return {"role": "user", "content": self.text}


@dataclass
class Dialogue:
    history: list                    # messages; the last is the assistant's
    questions: list = field(default_factory=list)
    tokens: int = 0                  # length of the history
    read: int = 0                    # length of the prompt that reads the history: all but the last reply
    turn: int = 0                    # the most that a question's prompt adds to that


def messages(dialogue):
    return [{"role": m["role"], "content": m["content"]} for m in dialogue.messages]


def questions(w, facts, depths):
    return [Question(w.rng.choice(f.asked), f.answer, d) for f, d in zip(facts, depths)]


# --- the tasks: (words, tokens of the history, number of the dialogue) -> Dialogue -----------------

def memory(w, tokens, _):
    d = corpus.Dialogue("memory", w.split)
    known = corpus.facts(w, max(FORKS, min(8, tokens // 64)))
    told_at = []
    for i, fact in enumerate(known):
        told_at.append(d.tokens() / tokens)
        corpus.tell(w, d, [fact])
        while d.tokens() < 0.6 * tokens * (i + 1) / len(known):
            d.say(*corpus.chatter(w))
    while d.tokens() < tokens:
        d.say(*corpus.chatter(w))
    chosen = sorted(w.rng.sample(range(len(known)), FORKS))
    return Dialogue(messages(d), questions(w, [known[i] for i in chosen], [told_at[i] for i in chosen]))


def hidden_text(w, tokens, facts, depths):
    """Filler of about `tokens` tokens with each fact at its depth (0 to 1)."""
    parts, body = [], tokens - sum(corpus.text_tokens(f.told[-1], w.split) for f in facts)
    while body > 0:
        parts.append(corpus.filler_sentence(w))
        body -= corpus.text_tokens(parts[-1], w.split)
    count = len(parts)
    for fact, depth in sorted(zip(facts, depths), key=lambda pair: -pair[1]):   # the last first:
        parts.insert(round(depth * count), w.rng.choice(fact.told))             # earlier places stay
    return " ".join(parts)


def needle(w, tokens, number):
    """Even dialogues hide in the even depth bins, odd ones in the odd bins: two cover the grid."""
    facts = corpus.facts(w, FORKS)
    depths = [(2 * i + number % 2 + w.rng.random()) / DEPTHS for i in range(FORKS)]
    text = hidden_text(w, tokens - 40, facts, depths)
    history = [{"role": "user", "content": f"Read this text. {text}"},
               {"role": "assistant", "content": "I have read it."}]
    return Dialogue(history, questions(w, facts, depths))


def second(w, tokens, _):
    facts = corpus.facts(w, FORKS + 1)
    depths = [(i + w.rng.random()) / len(facts) for i in range(len(facts))]
    text = hidden_text(w, tokens - 60, facts, depths)
    first = w.rng.randrange(len(facts))
    history = [{"role": "user", "content": f"{text} {w.rng.choice(facts[first].asked)}"},
               {"role": "assistant", "content": facts[first].answer}]
    others = [i for i in range(len(facts)) if i != first]
    return Dialogue(history, questions(w, [facts[i] for i in others], [depths[i] for i in others]))


def trace_variables(w, tokens):
    """Five variables; three of them are left alone from some point on and asked for at the end."""
    rng, d = w.rng, corpus.Dialogue("trace", w.split)
    names = rng.sample("abcdefghkmnpqrstuvwxyz", 5)
    until = dict(zip(names, (0.35, 0.55, 0.75, 1.0, 1.0)))
    value, touched = {}, {}
    while d.tokens() < tokens or len(value) < len(names):
        live = [n for n in names if d.tokens() < until[n] * tokens and n in value]
        unset = [n for n in names if n not in value]
        touch(w, d, value, touched, live, unset)
    asked = names[:3] + [rng.choice(names[3:])]
    return Dialogue(messages(d), [Question(f"What is {n}?", f"{n} = {value[n]}.", touched[n] / d.tokens())
                                  for n in asked])


def touch(w, d, value, touched, live, unset):
    """One exchange about the variables that are still in use."""
    rng, k = w.rng, w.rng.random()
    if unset or not live or k > 0.7:
        if k > 0.93 and value:
            return d.say(*corpus.chatter(w))
        name = rng.choice(unset or live)
        value[name] = w.digits(2)
        d.say(f"Set {name} to {value[name]}.", f"{name} = {value[name]}. Check: {name} = {value[name]}.")
    elif k < 0.45 or len(live) < 2:
        name = rng.choice(live)
        d.say(f"What is {name}?", f"{name} = {value[name]}.")
    else:
        name, source = rng.sample(live, 2)
        value[name] = value[source]
        d.say(f"Set {name} to {source}.",
              f"{source} = {value[source]}. So {name} = {value[name]}. Check: {name} = {value[name]}.")
    touched[name] = d.tokens()
    return None


def work(rng, total, steps):
    """(what is asked, what is answered, the new total) of a few additions and subtractions."""
    asked, said = [], []
    for _ in range(steps):
        n = rng.randint(1, 9)
        plus = total + n < 100 if total < 10 else (rng.random() < 0.55 and total + n < 100)
        new = total + n if plus else total - n
        asked.append(f"{'Add' if plus else 'Subtract'} {n}.")
        said.append(f"{total} {'+' if plus else '-'} {n} = {new}. Check: {new} {'-' if plus else '+'} {n} = {total}.")
        total = new
    return " ".join(asked), f"{' '.join(said)} The total is {total}.", total


def trace_totals(w, tokens):
    """A running total: the answers to come are work of two or three steps, generated by the model."""
    rng, d = w.rng, corpus.Dialogue("trace", w.split)
    total = rng.randint(1, 60)
    d.say(f"Keep a running total of the {w.mixed(corpus.NOUNS, 0.5)}. Start with {total}.", f"The total is {total}.")
    while d.tokens() < tokens:
        k = rng.random()
        if k < 0.12:
            d.say("What is the total now?", f"The total is {total}.")
        elif k < 0.2:
            d.say(*corpus.chatter(w))
        else:
            asked, said, total = work(rng, total, rng.randint(1, 3))
            d.say(asked, said)
    out = [Question("What is the total now?", f"The total is {total}.")]
    for steps in (2, 2, 3):
        asked, _, result = work(rng, total, steps)
        out.append(Question(asked, f"The total is {result}."))
    return Dialogue(messages(d), out)


def trace(w, tokens, number):
    return trace_variables(w, tokens) if number % 2 == 0 else trace_totals(w, tokens)


def loss(w, tokens, _):
    """The shape the model was trained on, whole: facts, chatter, and many answered questions."""
    return Dialogue(messages(corpus.memory(w, tokens)))


MAKERS = {"memory": memory, "needle": needle, "trace": trace, "second": second, "loss": loss}


def fitting(task, length, number, count):
    """Dialogue `number`, its history 90 to 100 % of `length` tokens long. The generator only
    estimates tokens, so its target is corrected until `count` agrees."""
    wanted = length * random.Random(f"length/{task}/{SEED}/{length}/{number}").uniform(SHORTEST, LONGEST)
    wanted = max(wanted - QUESTION_ROOM, wanted / 2) if task != "loss" else wanted
    target, best = wanted, None
    for _ in range(6):
        w = corpus.Words(random.Random(f"lab/{task}/{SEED}/{length}/{number}"), "heldout")
        dialogue = MAKERS[task](w, target, number)
        dialogue.tokens = count(dialogue.history, False)
        if best is None or abs(dialogue.tokens - wanted) < abs(best.tokens - wanted):
            best = dialogue
        if abs(dialogue.tokens - wanted) <= 0.02 * wanted:
            break
        target *= wanted / dialogue.tokens
    return best


def make(task, length, number, count):
    """Dialogue `number` of a task; the same arguments give the same one. `count(messages, prompt)`:
    tokens of messages as the model's template renders them, with the opening of an answer or not."""
    dialogue = fitting(task, length, number, count)
    if dialogue.questions:
        dialogue.read = count(dialogue.history[:-1], True)
        dialogue.turn = max(count(dialogue.history + [q.message], True) for q in dialogue.questions) - dialogue.read
    return dialogue
