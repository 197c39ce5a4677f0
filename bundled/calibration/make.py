#!/usr/bin/env python3
"""Writes manual.txt, code.txt, dialogues.jsonl, passages.jsonl and tools.jsonl beside this file, from keepd's own documents and source and from word
lists here. The same state of the repository gives the same files; they are kept, so that gates can be fitted again to the same texts.

    python3 bundled/calibration/make.py
"""
import json
import pathlib
import random
import re

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
TEXT = 4600                     # characters of a chat, at least: more than 1,024 tokens with most tokenizers
DIALOGUES, PASSAGES, SESSIONS = 26, 20, 20
MANUAL = ("docs/OPERATIONS.md", "docs/SCALING.md", "docs/MODELS.md", "SECURITY.md")
CODE = ("engine/steps/queue.c", "text/tok/vocab.c", "text/ends.c", "base/buf.c", "server/quota.c", "paging/due.c", "tools/run_pytest",
        "training/losses.py", "training/data.py", "bench/speed/fair.py", "kernels/cpu/team.c", "config/config.c")
MANUAL_BYTES, CODE_BYTES = 7000, 4200   # taken from each file

PEOPLE = """Adaeze Bogdan Carmela Dimitri Esra Florian Gwen Hiroshi Imani Jovana Kofi Lucija Malik Noor Oksana Paolo Quentin Renata Sunita
Tomasz Ursula Vikram Wiebke Xenia Yusuf Zeynep Amara Benno Chidi Daria""".split()
PLACES = """Antwerp Bilbao Catania Dresden Evora Freiburg Ghent Haifa Innsbruck Jena Krakow Lund Malaga Novara Oulu Porto Quimper Riga Split
Tartu Uppsala Verona Wroclaw York Zadar""".split()
THINGS = """accordion barometer camcorder dehumidifier espresso-machine film-projector glockenspiel harmonium inkjet-printer jigsaw kayak
ladder mandolin nightstand oil-heater piano-stool quilt record-player sewing-kit typewriter unicycle wardrobe xylophone zither""".split()
JOBS = "a glazier|an optician|a tram driver|a notary|a beekeeper|a court reporter|a diver|a piano tuner|a surveyor|a pastry cook".split("|")
FOODS = "rhubarb|buckwheat|fennel|mackerel|goat cheese|chestnuts|lentils|pickled beets|sesame|quince".split("|")
COLOURS = "ochre turquoise crimson ivory violet teal amber charcoal olive coral".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NOTED = ["Noted.", "Thanks, I will remember that.", "Good to know.", "Okay.", "I have written that down.", "Understood, go on.", "Fine.", "That helps."]


def number(rng, digits):
    return str(rng.randrange(10 ** (digits - 1), 10 ** digits))


def code_word(rng):
    return "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=rng.choice((2, 3)))) + rng.choice("-/.") + number(rng, rng.choice((2, 3, 4)))


def clock(rng):
    return f"{rng.randint(7, 21)}:{rng.choice(('05', '10', '15', '20', '35', '40', '50'))}"


# (told, asked, answered in a sentence, answered shortly, what draws the value)
FACTS = [
    ("{n} works as {v} these days.", "What is {n}'s profession?", "{n} works as {v}.", "{n} is {v}.", lambda r: r.choice(JOBS)),
    ("The door code for {n}'s house is {v}.", "I stand in front of {n}'s house. What is the door code?", "The door code for {n}'s house is {v}.", "{v}.", lambda r: number(r, 4)),
    ("{n} was born in {v}, I think.", "Which town does {n} come from?", "{n} was born in {v}.", "{n} comes from {v}.", lambda r: r.choice(PLACES)),
    ("My appointment with {n} is at {v} on {d}.", "When do I see {n}?", "Your appointment with {n} is at {v} on {d}.", "On {d} at {v}.", clock),
    ("{n} cannot eat {v}, so no {v} in the salad.", "What should I leave out of the salad because of {n}?", "Leave out the {v}: {n} cannot eat it.", "The {v}.", lambda r: r.choice(FOODS)),
    ("I lent {n} the {v} in spring.", "Who has my {v}?", "You lent the {v} to {n}.", "{n} has it.", lambda r: r.choice(THINGS)),
    ("For {n}'s room we chose {v}.", "Which colour did we choose for {n}'s room?", "You chose {v} for {n}'s room.", "{v}.", lambda r: r.choice(COLOURS)),
    ("{n}'s new number is 0{v}.", "How can I phone {n}?", "{n}'s new number is 0{v}.", "Dial 0{v}.", lambda r: number(r, 8)),
    ("The customs form of {n} has the reference {v}.", "The office asks for the reference of {n}'s customs form.", "The reference of {n}'s customs form is {v}.", "It is {v}.", code_word),
    ("{n} paid {v} euros for the {t}.", "How much did {n} pay for the {t}?", "{n} paid {v} euros for the {t}.", "{v} euros.", lambda r: number(r, 3)),
    ("On {d}s {n} teaches in {v}.", "Where can I find {n} on a {d}?", "On {d}s {n} teaches in {v}.", "In {v}.", lambda r: r.choice(PLACES)),
    ("{n} keeps the spare key under the {v}.", "I am locked out. Where does {n} keep the spare key?", "{n} keeps the spare key under the {v}.", "Under the {v}.", lambda r: r.choice(THINGS)),
]


def facts(rng, wanted):
    out = []
    for name, kind in zip(rng.sample(PEOPLE, wanted), rng.choices(FACTS, k=wanted)):
        told, asked, long, short, value = kind
        fill = {"n": name, "v": value(rng), "d": rng.choice(DAYS), "t": rng.choice(THINGS)}
        out.append([form.format(**fill) for form in (told, asked, rng.choice((long, long, short)))])
    return out


# --- Dialogues ---

class Talk:
    def __init__(self, rng, system=None):
        self.rng, self.messages, self.size = rng, [], 0
        if system:
            self.add("system", system)

    def add(self, role, content, **more):
        self.messages.append({"role": role, "content": content, **more})
        self.size += len(content) + 30

    def say(self, user, answer):
        self.add("user", user)
        self.add("assistant", answer)


def paragraphs():
    prose = (HERE / "english.txt").read_text().split("\n\n")
    return [p for p in prose if 300 < len(p) < 1500]


def passages():
    """Pieces of the other files: prose of all languages, manuals and code."""
    found = []
    for name in ("english.txt", "languages.txt", "manual.txt", "code.txt"):
        parts = [" ".join(p.split()) for p in re.split(r"\n\s*\n", (HERE / name).read_text())]
        found += [p for p in parts if len(p) > 140 and not p.startswith("|")]
    return found


def sentences(paragraph):
    return [s for s in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph) if 30 < len(s) < 240]


SMALL = [("Does it often rain in {p} in autumn?", "In {p} autumn is wetter than spring, but long rain is rare there. A light coat is enough."),
         ("How do I get a stain of {f} out of a tablecloth?", "Rinse it with cold water first, then leave salt on it for half an hour and wash it as usual."),
         ("Give me a word that rhymes with {c}.", "There are few words that rhyme with {c}; you could rearrange the line so that it ends with another word."),
         ("Is a {t} heavy?", "Most are not: one person can carry it down the stairs, two if it is an old one."),
         ("What could I cook with {f} tonight?", "Fry some onions, add the {f}, a little stock and pepper, and let it simmer for twenty minutes. Serve it with bread."),
         ("I want to see {p} for two days. What is worth it?", "Walk through the old town on the first day and along the water on the second. Museums are quiet in the morning.")]


def small_talk(rng, talk):
    asked, answer = rng.choice(SMALL)
    fill = {"p": rng.choice(PLACES), "f": rng.choice(FOODS), "c": rng.choice(COLOURS), "t": rng.choice(THINGS)}
    talk.say(asked.format(**fill), answer.format(**fill))


def told_facts(rng):
    """Facts between small talk, then questions in two rounds."""
    talk = Talk(rng, rng.choice([None, "You are a helpful assistant.", "You answer briefly."]))
    known = facts(rng, 9)
    for i, (told, _, _) in enumerate(known):
        talk.say(rng.choice(["", "Before I forget: ", "Something else. ", "Please note: "]) + told, rng.choice(NOTED))
        if i % 3 != 2:
            small_talk(rng, talk)
    while talk.size < TEXT:
        for _, asked, answered in rng.sample(known, len(known)):
            talk.say(asked, answered)
        small_talk(rng, talk)
    return talk


def told_together(rng):
    """Many facts in one message; some change later, and the last word counts."""
    talk = Talk(rng)
    known = facts(rng, 12)
    talk.say("Here are my notes of this week. " + " ".join(told for told, _, _ in known), "I have read your notes. What would you like to know?")
    for _ in range(3):
        small_talk(rng, talk)
    for told, asked, answered in facts(rng, 2):
        talk.say(f"One more note: {told}", rng.choice(NOTED))
        known.append((told, asked, answered))
    while talk.size < TEXT:
        for _, asked, answered in rng.sample(known, 7):
            talk.say(asked, answered)
        small_talk(rng, talk)
    return talk


def about_texts(rng, parts):
    """Texts are shown, and facts hidden in them; later turns quote them."""
    talk = Talk(rng)
    shown, known = [], facts(rng, 6)
    for i, text in enumerate(rng.sample(parts, 3)):
        inner = sentences(text)
        for told, _, _ in known[2 * i:2 * i + 2]:
            inner.insert(rng.randint(0, len(inner)), told)
        shown.append(inner)
        talk.say(f"Text {i + 1}: " + " ".join(inner), rng.choice(["I have read it.", f"Thank you, that was text {i + 1}.", "What about it?"]))
    small_talk(rng, talk)
    while talk.size < TEXT:
        which = rng.randrange(3)
        inner = shown[which]
        at = rng.randrange(len(inner) - 1)
        _, asked, answered = rng.choice(known)
        talk.say(asked, answered)
        talk.say(*rng.choice([
            (f"Which sentence follows \"{inner[at]}\" in text {which + 1}?", f"It is followed by: \"{inner[at + 1]}\""),
            (f"How does text {which + 1} begin?", f"Text {which + 1} begins with: \"{inner[0]}\""),
            (f"Quote the sentence of text {which + 1} with the words \"{' '.join(inner[at].split()[:3])}\".", f"\"{inner[at]}\"")]))
    return talk


READ = [("Here is a passage that somebody sent me: {t}", ["It is clear enough.", "I see what it is about.", "Thanks, I have read it."]),
        ("{t}\n\nIs that well written?", ["Yes, it reads well.", "It could be shorter.", "Mostly, yes."]),
        ("For later, from another page: {t}", ["All right.", "I have it.", "Okay, what is next?"]),
        ("What language or style is this in? {t}", ["It is plain, technical writing.", "It looks like an excerpt of a longer text.", "It is a note, I think."])]


def told_between(rng, parts):
    """Facts between long passages that nobody asks for, then questions for the facts alone, with passages between them."""
    talk = Talk(rng, rng.choice([None, None, "You are a helpful assistant."]))
    known, texts = facts(rng, 7), iter(rng.sample(parts, min(len(parts), 40)))

    def passage(size):
        form, answers = rng.choice(READ)
        talk.say(form.format(t=next(texts)[:size].rsplit(" ", 1)[0]), rng.choice(answers))

    for told, _, _ in known:
        talk.say(rng.choice(["", "", "By the way: ", "Keep this in mind: "]) + told, rng.choice(NOTED))
        for _ in range(rng.choice((0, 1, 1, 2))):
            passage(rng.choice((180, 260, 340)))
    while talk.size < TEXT:
        for _, asked, answered in rng.sample(known, rng.choice((2, 3, 4))):
            talk.say(asked, answered)
        passage(rng.choice((180, 260)))
    return talk


def about_lists(rng):
    """A stock list that is changed and asked for."""
    talk = Talk(rng, "You keep the stock list of a shop for used things.")
    stock = {t: [number(rng, rng.choice((2, 3))), rng.choice(COLOURS), rng.choice("ABCDEFG") + number(rng, 2)] for t in rng.sample(THINGS, 12)}
    talk.say("The list:\n" + "\n".join(f"{t}: {a} pieces, {b}, shelf {c}" for t, (a, b, c) in stock.items()), f"I have {len(stock)} entries.")
    for turn in range(60):
        if talk.size > TEXT:
            break
        thing = rng.choice(list(stock))
        row = stock[thing]
        kind = rng.randrange(5)
        if turn % 7 == 3:
            small_talk(rng, talk)
        elif kind == 0:
            row[2] = rng.choice("ABCDEFG") + number(rng, 2)
            talk.say(f"The {thing} is on shelf {row[2]} now.", f"I have moved the {thing} to shelf {row[2]}.")
        elif kind == 1:
            talk.say(f"On which shelf is the {thing}?", f"The {thing} is on shelf {row[2]}.")
        elif kind == 2:
            talk.say(f"How many pieces of the {thing} do we have?", f"We have {row[0]} pieces of the {thing}.")
        elif kind == 3:
            talk.say(f"Which colour has the {thing}?", f"It is {row[1]}.")
        else:
            talk.say(f"Give me the whole line of the {thing}.", f"{thing}: {row[0]} pieces, {row[1]}, shelf {row[2]}")
    return talk


def about_code(rng, functions):
    """Functions are shown; later turns ask for their heads and bodies."""
    talk = Talk(rng, "You are a programmer's assistant.")
    shown = rng.sample(functions, 4)
    for name, text in shown:
        talk.say(f"This is `{name}`:\n```c\n{text}\n```", rng.choice(["I see.", f"I have read `{name}`.", "Go on."]))
    while talk.size < TEXT:
        name, text = rng.choice(shown)
        head = text.split("{")[0].strip()
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 24]
        at = rng.randrange(len(lines) - 1)
        talk.say(*rng.choice([
            (f"With which parameters is `{name}` called?", f"Its head is `{' '.join(head.split())}`."),
            (f"What does `{name}` do after `{lines[at]}`?", f"The next line is `{lines[at + 1]}`."),
            (f"Show me `{name}` again.", f"```c\n{text}\n```")]))
        small_talk(rng, talk)
    return talk


# --- Tool sessions ---

STEMS = "invoice backup router schema report index client worker parser layout metrics session upload thumbnail export cache".split()
ENDS = [".py", ".ts", ".go", ".md", ".sql", ".yaml", ".log", ".csv"]


def tool_find(rng):
    rows = [(f"{rng.choice(['src', 'lib', 'var', 'test'])}/{rng.choice(STEMS)}{rng.choice(['', '_old', '_v2', '-main'])}{rng.choice(ENDS)}", number(rng, rng.choice((3, 4, 5))),
             f"2025-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}") for _ in range(18)]
    path, size, day = rng.choice(rows)
    return ("find_files", {"pattern": "*"}, "\n".join(f"{size:>7} {day} {path}" for path, size, day in rows),
            [(f"When was {path} changed?", f"{path} was changed on {day}."), (f"What is the size of {path}?", f"{path} has {size} bytes.")],
            ("read_file", {"path": path}))


def tool_log(rng):
    second, rows = rng.randint(20000, 60000), []
    for _ in range(16):
        second += rng.randint(1, 40)
        rows.append((f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}", rng.choice(["INFO", "INFO", "INFO", "WARN", "ERROR"]), rng.choice(STEMS),
                     rng.choice(["request {} took {} ms", "connection {} closed after {} bytes", "retry of {} in {} s", "user {} has {} open items"]).format(number(rng, 5), number(rng, 3))))
    rows[rng.randrange(16)] = (rows[5][0], "ERROR", rng.choice(STEMS), f"disk quota of volume {code_word(rng)} exceeded")
    bad = rng.choice([row for row in rows if row[1] == "ERROR"])
    return ("tail_log", {"service": rng.choice(STEMS), "lines": 16}, "\n".join(f"{a} {b:5} [{c}] {d}" for a, b, c, d in rows),
            [(f"What was the error of {bad[0]}?", f"At {bad[0]} {bad[2]} reported: {bad[3]}"), ("Which component reported an error?", f"{bad[2]}: {bad[3]}")],
            ("restart", {"component": bad[2], "reason": bad[3]}))


def tool_json(rng):
    rows = [{"ticket": int(number(rng, 5)), "assignee": rng.choice(PEOPLE), "state": rng.choice(["open", "waiting", "closed"]), "title": f"{rng.choice(STEMS)} fails in {rng.choice(PLACES)}"}
            for _ in range(9)]
    row = rng.choice(rows)
    return ("search_tickets", {"query": "fails", "limit": 9}, json.dumps({"total": 9, "tickets": rows}, indent=rng.choice((None, 1))),
            [(f"Who works on ticket {row['ticket']}?", f"{row['assignee']} works on ticket {row['ticket']}; it is {row['state']}."),
             (f"What is ticket {row['ticket']} about?", f"Its title is \"{row['title']}\".")],
            ("assign_ticket", {"ticket": row["ticket"], "to": rng.choice(PEOPLE)}))


def tool_test(rng):
    names = [f"test_{rng.choice(STEMS)}_{rng.choice(['empty', 'large', 'twice', 'utf8', 'timeout', 'order'])}" for _ in range(14)]
    failed, line, want, got = rng.choice(names), number(rng, 3), number(rng, 2), number(rng, 2)
    text = "\n".join(f"{n} {'FAILED' if n == failed else 'ok'} ({rng.randint(1, 900)} ms)" for n in names)
    return ("run_tests", {"suite": "unit"}, f"{text}\n\n{failed}: line {line}: expected {want}, found {got}\n1 failed, 13 passed",
            [("Which test failed, and where?", f"{failed} failed in line {line}: expected {want}, found {got}."), (f"What did {failed} expect?", f"It expected {want} and found {got}.")],
            ("run_tests", {"only": failed}))


def tool_table(rng):
    rows = [(rng.choice(PEOPLE), rng.choice(PLACES), number(rng, 4), code_word(rng)) for _ in range(11)]
    who, place, amount, code = rng.choice(rows)
    return ("run_sql", {"statement": "SELECT customer, city, amount, code FROM orders"}, "customer,city,amount,code\n" + "\n".join(",".join(r) for r in rows),
            [(f"What is the code of the order from {place} over {amount}?", f"The order over {amount} from {place} has the code {code}."),
             (f"Whose order is {code}?", f"Order {code} is from {who} in {place}.")],
            ("cancel_order", {"code": code}))


def tool_grep(rng, functions):
    lines = [line for _, text in rng.sample(functions, 4) for line in text.splitlines() if len(line) > 30][:14]
    rows = [(f"{rng.choice(STEMS)}.c", number(rng, 3), line.strip()) for line in lines]
    file, line, text = rng.choice(rows)
    return ("grep", {"pattern": "="}, "\n".join(f"{a}:{b}: {c}" for a, b, c in rows),
            [(f"What is in line {line} of {file}?", f"Line {line} of {file} is `{text}`."), (f"Where is `{text}`?", f"In line {line} of {file}.")],
            ("edit_file", {"path": file, "line": int(line), "old": text}))


SEEN = ["Here is what I found.", "Done.", "I have it.", "That is the whole output.", "There are some entries."]


def call(talk, name, arguments, result):
    ident = f"call_{len(talk.messages)}"
    talk.add("assistant", "", tool_calls=[{"id": ident, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}])
    talk.size += 40 + len(json.dumps(arguments))
    talk.add("tool", result, tool_call_id=ident)


def session(rng, functions):
    talk = Talk(rng, rng.choice(["You are an agent that maintains a software project with tools.", "You support the operators of a web shop. Use the tools.", "You are a coding agent."]))
    asked, kinds = [], [tool_find, tool_log, tool_json, tool_test, tool_table, lambda r: tool_grep(r, functions)]
    wishes = ["Have a look at {}.", "Please run {}.", "What does {} say?", "Use {} and tell me when you have it.", "Next, {}."]
    for kind in rng.sample(kinds, 3):
        name, arguments, result, questions, follow = kind(rng)
        talk.add("user", rng.choice(wishes).format(name.replace("_", " ")))
        call(talk, name, arguments, result)
        talk.add("assistant", rng.choice(SEEN))
        asked.append((questions, follow))
    while talk.size < TEXT:
        questions, (name, arguments) = rng.choice(asked)
        question, answer = rng.choice(questions)
        talk.say(question, answer)
        if rng.random() < 0.4:
            talk.add("user", f"Then please {name.replace('_', ' ')}.")
            call(talk, name, arguments, "ok")
            talk.add("assistant", "Done: " + ", ".join(f"{k} {v}" for k, v in arguments.items()) + ".")
    return talk


# --- The files ---

def head(path, size):
    """The first lines after the beginning of a file, about `size` bytes."""
    lines = (ROOT / path).read_text().splitlines(keepends=True)
    out = ""
    for line in lines[min(12, len(lines) // 10):]:
        out += line
        if len(out) >= size:
            break
    return out


def c_functions():
    """(name, text) of short C functions."""
    found = []
    for path in CODE:
        if path.endswith(".c"):
            for m in re.finditer(r"^[a-z][^\n;{}]*?\b(\w+)\([^;{}]*\) \{\n(?:[ ].*\n|\n)+?\}\n", (ROOT / path).read_text(), re.M):
                if 200 < len(m.group(0)) < 700:
                    found.append((m.group(1), m.group(0).strip()))
    return found


def write_chats(name, talks):
    with (HERE / name).open("w") as f:
        for talk in talks:
            f.write(json.dumps({"messages": talk.messages}, ensure_ascii=False) + "\n")


def write_passages(rng):
    found = passages()
    write_chats("passages.jsonl", [told_between(rng, found) for _ in range(PASSAGES)])


def main():
    rng = random.Random(1)
    (HERE / "manual.txt").write_text("\n".join(head(p, MANUAL_BYTES) for p in MANUAL))
    (HERE / "code.txt").write_text("\n".join(head(p, CODE_BYTES) for p in CODE))
    parts, functions = paragraphs(), c_functions()
    makers = [told_facts, told_together, lambda r: about_texts(r, parts), about_lists, lambda r: about_code(r, functions)]
    write_chats("dialogues.jsonl", [makers[i % len(makers)](rng) for i in range(DIALOGUES)])
    write_chats("tools.jsonl", [session(rng, functions) for _ in range(SESSIONS)])
    write_passages(random.Random(2))


if __name__ == "__main__":
    main()
