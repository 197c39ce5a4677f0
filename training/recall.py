"""Writes chats in which things that were said are asked for later: training text for the gates of any chat model.

    python recall.py --text book.txt --talk chats.jsonl --count 80 --out recall.jsonl

Plain text and free conversation rarely ask for what they said before, so gates that are fitted to them alone learn
little about what a user will ask for. Each chat here has facts in natural words, in one of three forms: hidden in
pieces of a text, told between other turns, or in the result of a tool. Later turns ask for most of them, in another
order. The same arguments give the same chats. Nothing here occurs in what the quality benches ask
(bench/quality/lab/rows.py): no kind of fact, no sentence, no name, and no value.
"""

import argparse
import json
import random
import re
from pathlib import Path

from options import count, file

PEOPLE = """Abel Agnes Alma Anton Arlo Astrid Bela Bridget Cecil Clara Conrad Dagmar Della Desmond Edith Elias Esther
Ezra Felix Freya Gerald Greta Harold Hedda Hugo Ines Irma Isaac Jonas Judith Kurt Lars Lorna Lucius Mabel Magnus Martha
Milo Myra Nils Nora Olaf Osmund Otto Pearl Percy Petra Ralph Ramona Rufus Ruth Selma Sigrid Silas Stella Thea Theo Tobias
Una Victor Viola Walter Wilma Winston""".split()
THINGS = """toaster blender kettlebell backpack tripod notebook stapler flashlight hairdryer keyboard wheelbarrow suitcase
thermos bookshelf armchair mattress doormat teaspoon saucepan corkscrew screwdriver pliers sandpaper paintbrush hose
trowel ladle raincoat sandals gloves earphones charger projector microscope telescope calculator stopwatch whisk
colander grater rolling-pin lampshade cushion hammock parasol surfboard snorkel racket dumbbell treadmill""".split()
ALLERGIES = "peanuts|shellfish|pollen|cat hair|soy|gluten|penicillin|dust|sesame|latex|eggs|bee stings".split("|")
SUBJECTS = "geology|anthropology|statistics|theology|linguistics|botany|economics|astronomy|nursing|archaeology".split("|")
COLLECTIONS = "stamps|old coins|vinyl records|postcards|seashells|comic books|teapots|model trains|watches|maps".split("|")
DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday".split("|")
DRINKS = "ginger ale|buttermilk|black coffee|oat milk|hot chocolate|lemonade|iced tea|apple juice|mineral water".split("|")
FEARS = "spiders|heights|lightning|deep water|small rooms|snakes|needles|the dark|crowds|elevators".split("|")
GIFTS = "a bicycle|a clock|a leather bag|concert tickets|a cookbook|a pair of skis|a tent|a sewing machine".split("|")
FLOORS = "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth".split("|")
MATERIALS = "oak|cardboard|steel|glass|plastic|marble-look tile|wool|rubber|aluminium|cork|felt|copper wire".split("|")


def digits(rng, n):
    return str(rng.randrange(10 ** (n - 1), 10 ** n))


def reference(rng):
    return "".join(rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=2)) + "-" + digits(rng, rng.choice((3, 4, 5)))


def one_of(values):
    return lambda rng: rng.choice(values)


# Kinds of facts about a person or a thing: ways to tell one, ways to ask, ways to answer, and what draws a value
ABOUT_PEOPLE = [
    (["{n} is allergic to {v}.", "We cannot serve {n} anything with {v}: an allergy.", "Because of {v}, {n} had to see a doctor: it is an allergy."],
     ["What is {n} allergic to?", "Does {n} have an allergy?"], ["{n} is allergic to {v}.", "Yes, to {v}."], one_of(ALLERGIES)),
    (["{n} studied {v} at college.", "Years ago {n} took a degree in {v}.", "{v} was what {n} read at university."],
     ["What did {n} study?", "Remind me which degree {n} took."], ["{n} studied {v}.", "A degree in {v}."], one_of(SUBJECTS)),
    (["{n} collects {v}.", "You should see the {v} in {n}'s cupboard, a whole collection.", "All of {n}'s pocket money went into collecting {v}."],
     ["What does {n} collect?", "Which things are in {n}'s collection?"], ["{n} collects {v}.", "The collection is of {v}."], one_of(COLLECTIONS)),
    (["{n} comes to the office on {v}s.", "If you want to meet {n} in person, try a {v}.", "The regular appointment with {n} is every {v}."],
     ["On which day can I meet {n}?", "When is {n} there?"], ["{n} is there on {v}.", "On {v}."], one_of(DAYS)),
    (["{n} drinks nothing but {v}.", "Please order {v} for {n}.", "For {n} it was {v}, as always."],
     ["What should I order for {n} to drink?", "What does {n} drink?"], ["Order {v}.", "{n} drinks {v}."], one_of(DRINKS)),
    (["{n} is afraid of {v}.", "Since childhood {n} has been terrified of {v}.", "Nothing scares {n} more than {v}."],
     ["What scares {n}?", "Which fear does {n} have?"], ["{n} is afraid of {v}.", "It is {v}."], one_of(FEARS)),
    (["We gave {n} {v} as a present.", "At the party {n} unwrapped {v}.", "{n} was delighted to get {v}."],
     ["Which present did {n} get?", "What did we give to {n}?"], ["{n} got {v}.", "The present was {v}."], one_of(GIFTS)),
    (["{n}'s extension is {v}.", "Dial {v} to reach {n}.", "To call {n} inside the house, use {v}."],
     ["Which extension has {n}?", "How do I reach {n} by phone?"], ["The extension is {v}.", "Dial {v}."], lambda rng: digits(rng, rng.choice((3, 4)))),
    (["{n} stays in room {v}.", "Room {v} has been booked for {n}.", "They put {n} into {v}, a room at the back."],
     ["In which room is {n}?", "Where does {n} sleep?"], ["{n} is in room {v}.", "In room {v}."], lambda rng: digits(rng, 3)),
    (["{n}'s office is on the {v} floor.", "Take the stairs to the {v} floor, there is {n}.", "{n} moved up to the {v} floor."],
     ["On which floor do I find {n}?", "Which floor is {n} on?"], ["On the {v} floor.", "{n} is on the {v} floor."], one_of(FLOORS)),
    (["{n}'s ticket has the reference {v}.", "Booking {v} is {n}'s.", "The clerk wrote {v} on the form for {n}."],
     ["What is the booking reference of {n}?", "Which reference belongs to {n}?"], ["The reference is {v}.", "{v}."], reference),
]
ABOUT_THINGS = [
    (["The {n} costs {v} dollars.", "We pay {v} dollars for a {n}.", "A price of {v} dollars was agreed for the {n}."],
     ["How much is the {n}?", "What does the {n} cost?"], ["The {n} costs {v} dollars.", "{v} dollars."], lambda rng: digits(rng, rng.choice((2, 3)))),
    (["The {n} has the order number {v}.", "Order {v} is for the {n}.", "For the {n}, the supplier asked us to quote {v}."],
     ["Which order number has the {n}?", "What do we quote for the {n}?"], ["The order number is {v}.", "Quote {v}."], reference),
    (["There are {v} pieces of the {n} left.", "We counted {v} of the {n}.", "Of the {n} the store still has {v}."],
     ["How many of the {n} are left?", "What is the stock of the {n}?"], ["There are {v} left.", "{v} pieces."], lambda rng: digits(rng, rng.choice((2, 3, 4)))),
    (["The {n} is made of {v}.", "Somebody chose {v} for the {n}.", "For the {n} they used {v}."],
     ["What is the {n} made of?", "Which material has the {n}?"], ["It is made of {v}.", "{v}."], one_of(MATERIALS)),
    (["The serial number of the {n} ends with {v}.", "On the back of the {n} one reads {v}.", "The label of the {n} says {v}."],
     ["What is on the label of the {n}?", "How does the serial number of the {n} end?"], ["It says {v}.", "{v}."], lambda rng: digits(rng, rng.choice((5, 6, 8)))),
]
REMEMBERED = ["I see.", "All right, I have that.", "Okay.", "Understood.", "Got it.", "Fine, anything else?"]
BEFORE = ["Here is a text. I have questions about it later.", "Please read this.", "Text:", "Keep the details of the following in mind.",
          "These are my notes, mixed with a page that I am reading."]
COLUMNS = [("price", lambda rng: digits(rng, rng.choice((2, 3)))), ("stock", lambda rng: digits(rng, rng.choice((2, 3)))),
           ("shelf", lambda rng: rng.choice("ABCDEFGHJK") + digits(rng, 2)), ("code", reference), ("material", one_of(MATERIALS))]


def facts(rng, wanted):
    """[(told, asked, answered)] of different persons or things."""
    out = []
    kinds, names = rng.choice([(ABOUT_PEOPLE, PEOPLE), (ABOUT_PEOPLE, PEOPLE), (ABOUT_THINGS, THINGS)])
    for name in rng.sample(names, wanted):
        told, asked, answered, value = rng.choice(kinds)
        fill = dict(n=name, v=value(rng))
        out.append(tuple(rng.choice(forms).format(**fill) for forms in (told, asked, answered)))
    return out


def passage(rng, text, size):
    """Whole sentences from a random place of the text, about `size` characters."""
    at = rng.randrange(max(1, len(text) - 4 * size))
    words = re.sub(r"\s+", " ", text[at:at + 2 * size])
    sentences = re.split(r"(?<=[.!?]) ", words)[1:-1]
    out = []
    while sentences and sum(map(len, out)) < size:
        out.append(sentences.pop(0))
    return out


def hidden(rng, text, known, size):
    sentences = passage(rng, text, size) or ["."]
    for said, _, _ in known:
        sentences.insert(rng.randint(0, len(sentences)), said)
    return [("user", rng.choice(BEFORE) + "\n\n" + " ".join(sentences))], known


def told(rng, talk, known, size):
    turns, between = [], 0
    for n, (said, _, _) in enumerate(known, 1):
        turns += [("user", said), ("assistant", rng.choice(REMEMBERED))]
        while between < size * n / len(known) and rng.random() < 0.8:
            pair = rng.choice(talk)
            turns += [("user", pair[0]), ("assistant", pair[1])]
            between += len(pair[0]) + len(pair[1])
    return turns, known


def table(rng, text, size):
    """The result of a tool: records in JSON, as lines, or separated by commas."""
    columns = rng.sample(COLUMNS, rng.choice((1, 2)))
    things = rng.sample(THINGS, min(len(THINGS), size // (30 + 15 * len(columns))))
    records = [{"item": n, **{c: draw(rng) for c, draw in columns}} for n in things]
    form = rng.randrange(4)
    if form == 0:
        shown = json.dumps(records)
    elif form == 1:
        shown = "\n".join(", ".join(r.values()) for r in [{c: c for c in records[0]}, *records])
    elif form == 2:
        shown = "\n".join(f"- {r['item']} (" + "; ".join(f"{c} {r[c]}" for c, _ in columns) + ")" for r in records)
    else:
        shown = "\n".join(f"{r['item']}.{c} = {r[c]}" for r in records for c, _ in columns)
    known = [("", rng.choice(["What is the {c} of the {n}?", "{n}, {c}?", "Look up the {c} of the {n}."]).format(c=c, n=r["item"]),
              rng.choice(["The {c} of the {n} is {v}.", "{v}", "It is {v}."]).format(c=c, n=r["item"], v=r[c]))
             for r in rng.sample(records, min(8, len(records))) for c, _ in columns[:1]]
    note = " ".join(passage(rng, text, size // 4))
    return [("user", "The tool returned:\n" + shown + "\n\n" + note)], known


def chat(rng, text, talk, size):
    form = rng.choice(["hidden", "hidden", "told", "table"] if talk else ["hidden", "hidden", "table"])
    if form == "table":
        turns, known = table(rng, text, size)
    else:
        known = facts(rng, rng.randint(5, 9))
        turns, known = hidden(rng, text, known, size) if form == "hidden" else told(rng, talk, known, size)
    asked = rng.sample(known, max(2, len(known) - rng.randint(0, 2)))
    for n, (_, question, answer) in enumerate(asked):
        if n == 0 and form != "told":
            turns[-1] = ("user", turns[-1][1] + "\n\n" + question)
            turns.append(("assistant", answer))
        else:
            turns += [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": said} for role, said in turns]}


def pairs_of(path, longest):
    """[(user, assistant)] of the chats of a file, without long ones."""
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        for a, b in zip(messages, messages[1:]):
            if (a["role"], b["role"]) == ("user", "assistant") and len(a["content"]) + len(b["content"]) < longest:
                out.append((a["content"].strip(), b["content"].strip()))
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--text", type=file, required=True, help="text in which facts are hidden")
    ap.add_argument("--talk", type=file, help="chats whose turns stand between the facts (JSON lines)")
    ap.add_argument("--count", type=count, default=80)
    ap.add_argument("--size", type=count, default=2600, help="characters of a chat before its questions, at most")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", type=Path, required=True)
    a = ap.parse_args()
    text, talk = a.text.read_text(encoding="utf-8"), pairs_of(a.talk, a.size // 4) if a.talk else []
    with a.out.open("w", encoding="utf-8") as f:
        for n in range(a.count):
            rng = random.Random(f"{a.seed} {n}")
            f.write(json.dumps(chat(rng, text, talk, int(rng.uniform(0.4, 1.0) * a.size))) + "\n")


if __name__ == "__main__":
    main()
