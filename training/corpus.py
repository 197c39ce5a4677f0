"""Seeded generator of English dialogues for keepd-nano.

Four tasks, all in chat form:

  memory  facts told over several turns, chatter between, questions later
  needle  facts hidden in a long filler text, asked at the end
  trace   running totals and variable tracking with redundant self-checks
  chat    greetings, thanks, off-topic questions

Every assistant message carries `scored` (is this a question we grade?) and
`expected`; an answer is right when it ends with `expected`.  Names, values,
codes and filler words of the two splits are disjoint, and most of them are
invented from syllables, so the only way to answer is to copy from context.

    python corpus.py --task memory --split heldout --tokens 512 --count 2
"""

import argparse
import json
import random
import zlib
from dataclasses import dataclass, field

import numpy as np

TASKS = ("memory", "needle", "trace", "chat")
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ABOUT = "I am keepd-nano, a tiny demonstration model."

# --- word pools -----------------------------------------------------------
# One word in five of every pool belongs to the held-out split only.

FIRST_NAMES = """Nora Adam Clara Bruno Elena Felix Greta Hugo Irene Jonas Karin Leon Marta Nils
Olga Paul Rosa Simon Tara Victor Wanda Oscar Alice Boris Diana Edgar Flora Gavin Helen Ivan Julia
Kevin Laura Martin Nina Otto Petra Robert Sofia Tomas Ursula Vera Walter Yvonne Zoe Anton Bella
Carl Doris Emil Fiona Georg Hanna Isaac Janet Kurt Linda Mario Nadia Oliver""".split()
CITIES = """Lisbon Oslo Vienna Madrid Prague Dublin Athens Cairo Lima Quito Tokyo Seoul Delhi Berlin
Paris Rome Geneva Bergen Porto Turin Zurich Krakow Bremen Ghent Malmo Tampere Riga Vilnius Tallinn
Sofia Zagreb Split Valencia Seville Bilbao Nantes Lyon Lille Milan Naples Genoa Verona Graz Linz
Brno Gdansk Leeds York Cardiff Cork Galway Perth Sydney Boston Denver Austin Dallas Toronto""".split()
JOBS = """baker teacher nurse pilot farmer lawyer painter plumber doctor tailor waiter driver singer
dancer writer judge butcher barber gardener carpenter electrician dentist librarian surgeon chemist
mechanic sailor soldier actor chef clerk banker editor miner potter welder tutor guide coach porter""".split()
COLOURS = """red blue green yellow purple orange black white brown pink grey silver golden violet
crimson turquoise beige scarlet maroon ivory""".split()
FAVOURITES = "colour fruit song book film game drink dish flower sport".split()
ANIMALS = "dog cat parrot horse rabbit hamster turtle pony goldfish ferret canary goat lizard lamb duck".split()
PLACES = """garage office locker cellar kitchen library attic workshop warehouse studio shed stable
gate vault safe lobby bakery chapel museum theatre bank harbour station clinic school""".split()
OBJECTS = """key map letter ring lamp book camera passport umbrella hammer wallet ticket notebook
violin helmet blanket basket mirror candle clock kettle scarf laptop whistle compass bottle""".split()
CONTAINERS = "drawer box bag cupboard basket trunk suitcase chest crate bucket jar cabinet shelf tin pouch".split()
RELATIONS = "sister brother mother father aunt uncle cousin friend neighbour boss teacher colleague".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()
NOUNS = """river mountain forest road bridge window garden table chair market street village train
tower field cloud storm winter summer morning evening harbour island coffee bread cheese paper
picture story letter machine engine wheel carpet curtain ladder roof wall door kitchen meadow stone
lantern valley orchard barrel fence path lake shore candle bench tunnel square fountain""".split()
ADJECTIVES = """old quiet small large bright dark warm cold narrow wide heavy light gentle busy empty
plain simple strange famous modern ancient pleasant dusty wooden clean slow""".split()
VERBS = """crosses follows touches covers faces joins meets passes reaches shades borders guards
hides overlooks serves suits""".split()
PLURALS = """people children visitors farmers sailors travellers students workers neighbours
merchants painters tourists""".split()
ACTS = """walk rest talk sing wait work read meet play sleep eat gather""".split()
TIMES = """in the morning|at noon|in the evening|after lunch|before dinner|every week|in spring|
in autumn|on quiet days|during the holidays|from time to time|once a year""".replace("\n", "").split("|")

POOLS = (FIRST_NAMES, CITIES, JOBS, COLOURS, ANIMALS, PLACES, OBJECTS, CONTAINERS, NOUNS, ADJECTIVES, VERBS, PLURALS)

ONSETS = """b c d f g h j k l m n p r s t v w z br cr dr fr gr pr tr bl cl fl gl pl sl st sp sk sh ch
th qu y""".split()
VOWELS = "a e i o u a e i o u ai ea ee oo ou ia io".split()
CODAS = ["", "", "", "", "n", "r", "l", "s", "t", "m", "d", "k", "x", "nd", "rt", "st", "ck", "ng", "ll", "p", "b", "g", "z"]
# A second, wilder way to invent words: without it a model that knows only the syllables
# above cannot copy a real word it has not met, because its pieces never followed each other.
WILD_ONSETS = ONSETS + ["", "", "", "kn", "wh", "ph", "sc", "scr", "str", "thr", "spr", "x", "wr", "gh", "tw", "sm", "sn", "sw"]
WILD_VOWELS = "a e i o u y ae au aw ay ei eu ey ie oa oi ow oy ue ui".split()
WILD_CODAS = ["", "", "b", "c", "ch", "ct", "d", "dge", "f", "ff", "ft", "g", "gh", "k", "l", "ld", "le", "lf", "lm", "lt", "m",
              "mp", "n", "nce", "nk", "nt", "p", "pt", "que", "r", "rch", "rd", "re", "rk", "rm", "rn", "s", "se", "sh",
              "sk", "sp", "ss", "t", "tch", "te", "th", "tre", "tt", "v", "ve", "w", "x", "y", "z", "er", "on", "an", "ine"]


def held_out(text):
    """The split of an invented word or a code is a property of its spelling."""
    return zlib.crc32(text.encode()) % 5 == 4


def pool(words, split):
    return [w for i, w in enumerate(words) if (i % 5 == 4) == (split == "heldout")]


class Words:
    """Draws words of one split.

    A name never opens a message: byte-level BPE cuts a word after a space and at the
    start of a text differently, and a small model should not have to learn both.
    """

    def __init__(self, rng, split):
        self.rng, self.split = rng, split
        self.pools, self.known = {}, []

    def pick(self, words):
        if id(words) not in self.pools:
            self.pools[id(words)] = pool(words, self.split)
        return self.rng.choice(self.pools[id(words)])

    def fragment(self):
        if not self.known:
            self.known = [w.lower() for words in POOLS for w in pool(words, "train")]
        word = self.rng.choice(self.known)
        at = self.rng.randrange(max(1, len(word) - 2))
        return word[at:at + self.rng.choice((1, 2, 3, 3, 4))]

    def invented(self, syllables=None):
        rng = self.rng
        while True:
            n = syllables or rng.choice((2, 2, 2, 3))
            kind = rng.random()
            if kind < 0.4:                      # fragments of known words: every piece gets copied at times
                word = "".join(self.fragment() for _ in range(rng.choice((2, 2, 3))))
            elif kind < 0.7:
                word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(n)) + rng.choice(CODAS)
            else:
                word = "".join(rng.choice(WILD_ONSETS) + rng.choice(WILD_VOWELS) + rng.choice(WILD_CODAS)
                               for _ in range(rng.choice((1, 2, 2))))
            if len(word) > 2 and held_out(word) == (self.split == "heldout"):
                return word

    def mixed(self, words, share=0.4):
        return self.pick(words) if self.rng.random() < share else self.invented()

    def name(self):
        return self.mixed(FIRST_NAMES, 0.35).capitalize()

    def digits(self, n):
        while True:
            code = "".join(self.rng.choice("0123456789") for _ in range(n))
            if held_out(code) == (self.split == "heldout"):
                return code


# --- facts ----------------------------------------------------------------

@dataclass
class Fact:
    key: str                 # two facts of one dialogue never share a key
    told: list               # statements of the user
    asked: list              # questions of the user
    answer: str              # the assistant's answer, graded


def fact_lives(w):
    n, r, c = w.name(), w.rng.choice(RELATIONS), w.mixed(CITIES).capitalize()
    return Fact(f"lives {n}",
                [f"My {r} {n} lives in {c}.", f"I know that {n} lives in {c}.", f"My {r} is called {n} and {n} lives in {c}."],
                [f"Where does {n} live?", f"Which city does {n} live in?", f"Can you tell me where {n} lives?"],
                f"You said {n} lives in {c}.")


def fact_job(w):
    n, r, j = w.name(), w.rng.choice(RELATIONS), w.mixed(JOBS, 0.6)
    return Fact(f"job {n}",
                [f"My {r} {n} works as a {j}.", f"I know that {n} works as a {j}.", f"These days {n} works as a {j}."],
                [f"What does {n} do for a living?", f"What is the job of {n}?", f"What does {n} work as?"],
                f"You said {n} works as a {j}.")


def place(w):
    p = w.mixed(PLACES, 0.65)
    kind = w.rng.random()
    if kind < 0.3:
        return p
    return f"{w.mixed(COLOURS, 0.7)} {p}" if kind < 0.65 else f"{w.invented().capitalize()} {p}"


def fact_code(w):
    p, c = place(w), w.digits(w.rng.choice((3, 4, 4, 5)))
    return Fact(f"code {p}",
                [f"The code of the {p} is {c}.", f"I was told that the code of the {p} is {c}."],
                [f"What is the code of the {p}?", f"Which code opens the {p}?", f"I need the code of the {p}."],
                f"The code of the {p} is {c}.")


def fact_pet(w):
    n, a, p = w.name(), w.mixed(ANIMALS, 0.6), w.name()
    return Fact(f"pet {n} {a}",
                [f"The {a} of {n} is called {p}.", f"You should know that the {a} of {n} is called {p}."],
                [f"What is the {a} of {n} called?", f"What is the name of the {a} of {n}?"],
                f"The {a} of {n} is called {p}.")


def fact_favourite(w):
    n, f = w.name(), w.rng.choice(FAVOURITES)
    v = w.mixed(COLOURS) if f == "colour" else w.invented()
    return Fact(f"favourite {n} {f}",
                [f"The favourite {f} of {n} is {v}.", f"I heard that the favourite {f} of {n} is {v}."],
                [f"What is the favourite {f} of {n}?", f"Which {f} does {n} like best?"],
                f"The favourite {f} of {n} is {v}.")


def fact_where(w):
    o = w.mixed(OBJECTS, 0.65)
    o = f"{w.mixed(COLOURS, 0.65)} {o}" if w.rng.random() < 0.6 else f"{o} of {w.name()}"
    c = f"{w.mixed(COLOURS, 0.6)} {w.mixed(CONTAINERS, 0.65)}"
    return Fact(f"where {o}",
                [f"The {o} is in the {c}.", f"I put it away, so the {o} is in the {c}."],
                [f"Where is the {o}?", f"Where did I put the {o}?", f"I cannot find the {o}. Where is it?"],
                f"The {o} is in the {c}.")


def fact_phone(w):
    n, d = w.name(), w.digits(w.rng.choice((5, 6)))
    return Fact(f"phone {n}",
                [f"The phone number of {n} is {d}.", f"Write this down: the phone number of {n} is {d}."],
                [f"What is the phone number of {n}?", f"How can I call {n}?", f"I want to call {n}. Which number?"],
                f"The phone number of {n} is {d}.")


def fact_meeting(w):
    n, day, hour = w.name(), w.rng.choice(DAYS), w.rng.randint(1, 12)
    return Fact(f"meeting {n}",
                [f"The meeting with {n} is on {day} at {hour}.", f"We agreed that the meeting with {n} is on {day} at {hour}."],
                [f"When is the meeting with {n}?", f"When do I meet {n}?"],
                f"The meeting with {n} is on {day} at {hour}.")


def fact_password(w):
    p, v = place(w), f"{w.invented()}-{w.invented(2)}" if w.rng.random() < 0.5 else w.invented(3)
    return Fact(f"password {p}",
                [f"The password for the {p} is {v}.", f"They changed it, and the password for the {p} is {v}."],
                [f"What is the password for the {p}?", f"Which password does the {p} need?"],
                f"The password for the {p} is {v}.")


def fact_birthday(w):
    n, d, m = w.name(), w.rng.randint(1, 28), w.rng.choice(MONTHS)
    return Fact(f"birthday {n}",
                [f"The birthday of {n} is on {d} {m}.", f"Do not forget that the birthday of {n} is on {d} {m}."],
                [f"When is the birthday of {n}?", f"On which day is the birthday of {n}?"],
                f"The birthday of {n} is on {d} {m}.")


FACTS = (fact_lives, fact_lives, fact_job, fact_code, fact_code, fact_pet, fact_favourite, fact_where,
         fact_phone, fact_meeting, fact_password, fact_birthday)


def facts(w, n):
    out, seen = [], set()
    while len(out) < n:
        f = w.rng.choice(FACTS)(w)
        if f.key not in seen:
            seen.add(f.key)
            out.append(f)
    return out


# --- filler ---------------------------------------------------------------

def filler_sentence(w):
    a, b = w.pick(NOUNS), w.pick(NOUNS)
    x, y = w.pick(ADJECTIVES), w.pick(ADJECTIVES)
    t = w.rng.choice(TIMES)
    k = w.rng.randrange(7)
    if k == 0:
        return f"The {x} {a} {w.pick(VERBS)} the {y} {b}."
    if k == 1:
        return f"Many {w.pick(PLURALS)} {w.pick(ACTS)} near the {a} {t}."
    if k == 2:
        return f"A {x} {a} stands behind the {b}."
    if k == 3:
        return f"Some {w.pick(PLURALS)} say that the {a} looks {x} {t}."
    if k == 4:
        return f"It is {x} and {y} by the {a} {t}."
    if k == 5:
        return f"There was a {a} near the {x} {b}, and the {w.pick(PLURALS)} liked it."
    return f"{t.capitalize()} the {w.pick(PLURALS)} {w.pick(ACTS)} and {w.pick(ACTS)}."


def filler(w, low, high):
    return " ".join(filler_sentence(w) for _ in range(w.rng.randint(low, high)))


# (what the user may say, what the assistant answers)
SMALLTALK = (
    (("Hello!", "Hi there!", "Good morning!", "Hey!"), f"Hello! {ABOUT}"),
    (("Thank you!", "Thanks a lot.", "Thanks, that helps."), "You are welcome."),
    (("Who are you?", "What are you?", "Are you a person?", "What is your name?"), ABOUT),
    (("What can you do?", "How can you help me?"),
     f"{ABOUT} Tell me a few facts and ask me about them later."),
    (("Goodbye!", "Bye for now.", "See you later."), "Goodbye!"),
    (("How are you?", "How are you today?"), "I am fine, thank you."),
)
OFF_TOPIC = (
    "Write me a poem about the {a}.", "What is the capital of {c}?", "Can you translate this for me?",
    "Explain the theory of the {x} {a}.", "Who won the game last night?", "What is the weather like in {c}?",
    "Please write a program for my {a}.", "Tell me a joke about a {x} {a}.", "How does a {a} work?",
    "What is the meaning of life?", "Which {a} should I buy?", "Give me a recipe with {b}.",
)
CANNOT = f"{ABOUT} I cannot help with that."


def smalltalk(w):
    said, reply = w.rng.choice(SMALLTALK)
    return w.rng.choice(said), reply


def off_topic(w):
    q = w.rng.choice(OFF_TOPIC)
    return q.format(a=w.pick(NOUNS), b=w.pick(NOUNS), c=w.pick(CITIES), x=w.pick(ADJECTIVES)), CANNOT


def chatter(w):
    """One exchange that carries no fact."""
    k = w.rng.random()
    if k < 0.15:
        return smalltalk(w)
    if k < 0.22:
        return off_topic(w)
    text = filler(w, 1, 3)
    return text, "I see." if text.count(".") == 1 else "That sounds nice."


# --- dialogues ------------------------------------------------------------

@dataclass
class Dialogue:
    task: str
    split: str = "train"
    messages: list = field(default_factory=list)
    length: int = 0

    def add(self, message):
        self.messages.append(message)
        self.length += estimate(message["content"], self.split)

    def say(self, user, assistant, scored=False):
        self.add({"role": "user", "content": user})
        self.add({"role": "assistant", "content": assistant, "scored": scored,
                  "expected": assistant if scored else None})

    def tokens(self):
        return self.length


def text_tokens(text, split):
    """Tokens of a text, about right for our tokenizer, which cuts held-out words into more pieces."""
    return int(len(text) * (0.225 if split == "train" else 0.33)) + sum(ch.isdigit() for ch in text)


def estimate(text, split):
    """Tokens of one rendered message."""
    return 6 + text_tokens(text, split)


def start(task, w):
    d = Dialogue(task, w.split)
    if w.rng.random() < 0.1:
        d.add({"role": "system", "content": w.rng.choice((
            "You are a helpful assistant.", "Answer briefly.", "You are keepd-nano. Remember what the user says."))})
    return d


OPENERS = ("", "", "", "By the way: ", "Please remember: ", "One more thing: ", "For later: ")


def tell(w, d, group):
    opener = w.rng.choice(OPENERS)
    text = opener + " ".join(w.rng.choice(f.told) for f in group)
    d.say(text, "I will remember that." if opener.startswith("Please") else "Noted.")


def ask(w, d, fact):
    d.say(w.rng.choice(fact.asked), fact.answer, scored=True)


def memory(w, tokens, share=None):
    """Tell for `share` of the length, ask in the rest.

    Short dialogues are dense (facts in one message, questions at once), long ones
    are mostly chatter, so the learner meets recall first and distance later.
    """
    rng = w.rng
    d = start("memory", w)
    share = share or rng.uniform(0.35, 0.7)
    dense = rng.random() < (0.9 if tokens <= 192 else 0.25)
    known, pending = [], facts(w, max(2, tokens // rng.choice((45, 60, 90, 120))))
    if rng.random() < 0.08:
        d.say(*smalltalk(w))
    while pending and (not known or d.tokens() < share * tokens):
        if dense or not known or rng.random() < 0.55:
            n = rng.choice((2, 3) if dense and tokens <= 192 else (1, 1, 2))
            group, pending = pending[:n], pending[n:]
            tell(w, d, group)
            known += group
            if rng.random() < 0.1:
                ask(w, d, rng.choice(known))
        else:
            d.say(*chatter(w))
    while d.tokens() < 0.95 * tokens:
        if dense or rng.random() < 0.7:
            ask(w, d, rng.choice(known))
        else:
            d.say(*chatter(w))
    return d


def memory_eval(w, tokens):
    """The shape of the quality bench: eight facts early, chatter, then four questions."""
    rng = w.rng
    d = Dialogue("memory", w.split)
    known = facts(w, max(2, min(8, tokens // 64)))
    asked = rng.sample(known, max(2, len(known) // 2))
    pending = list(known)
    while pending:
        tell(w, d, [pending.pop(0)])
        while d.tokens() < 0.6 * tokens * (1 - len(pending) / len(known)):
            d.say(*chatter(w))
    for i, f in enumerate(asked):
        ask(w, d, f)
        while d.tokens() < tokens * (0.6 + 0.33 * (i + 1) / len(asked)):
            d.say(*chatter(w))
    return d


def needle(w, tokens):
    rng = w.rng
    d = start("needle", w)
    hidden = facts(w, 1 if tokens < 200 else rng.choice((1, 2, 3, 4)))
    questions = [rng.choice(hidden) for _ in range(rng.randint(1, 4))]
    body = tokens - 20 - sum(estimate(f.asked[0], w.split) + estimate(f.answer, w.split) for f in questions)
    body -= sum(text_tokens(f.told[-1], w.split) for f in hidden)
    parts = []
    while body > 0:
        parts.append(filler_sentence(w))
        body -= text_tokens(parts[-1], w.split)
    for f in hidden:
        parts.insert(rng.randint(0, len(parts)), rng.choice(f.told))
    text = " ".join(parts)
    first = questions[0]
    if rng.random() < 0.7:
        d.say(f"{text} {rng.choice(first.asked)}", first.answer, scored=True)
    else:
        d.say(f"Read this text. {text}", "I have read it.")
        ask(w, d, first)
    for f in questions[1:]:
        ask(w, d, f)
    return d


def trace_total(w, tokens):
    rng = w.rng
    d = start("trace", w)
    total = rng.randint(1, 60)
    what = w.mixed(NOUNS, 0.5)
    d.say(f"Keep a running total of the {what}. Start with {total}.", f"The total is {total}.")
    while d.tokens() < 0.92 * tokens:
        k = rng.random()
        if k < 0.12:
            d.say("What is the total now?", f"The total is {total}.", scored=True)
        elif k < 0.2:
            d.say(*chatter(w))
        else:
            steps, said = [], []
            for _ in range(rng.randint(1, 3)):
                n = rng.randint(1, 9)
                plus = total + n < 100 if total < 10 else (rng.random() < 0.55 and total + n < 100)
                new = total + n if plus else total - n
                said.append(f"{'Add' if plus else 'Subtract'} {n}.")
                steps.append(f"{total} {'+' if plus else '-'} {n} = {new}. Check: {new} {'-' if plus else '+'} {n} = {total}.")
                total = new
            d.say(" ".join(said), f"{' '.join(steps)} The total is {total}.", scored=True)
            d.messages[-1]["expected"] = f"The total is {total}."
    return d


def trace_variables(w, tokens):
    rng = w.rng
    d = start("trace", w)
    names = rng.sample("abcdefghkmnpqrstuvwxyz", rng.randint(2, 5))
    value = {}
    while d.tokens() < 0.92 * tokens:
        k = rng.random()
        v = rng.choice(names)
        if value and k < 0.45:
            v = rng.choice(list(value))
            d.say(f"What is {v}?", f"{v} = {value[v]}.", scored=True)
        elif k > 0.93:
            d.say(*chatter(w))
        elif len(value) > 1 and k > 0.75:
            u = rng.choice([x for x in value if x != v] or list(value))
            value[v] = value[u]
            d.say(f"Set {v} to {u}.", f"{u} = {value[u]}. So {v} = {value[v]}. Check: {v} = {value[v]}.", scored=True)
            d.messages[-1]["expected"] = f"{v} = {value[v]}."
        else:
            value[v] = w.digits(2)
            d.say(f"Set {v} to {value[v]}.", f"{v} = {value[v]}. Check: {v} = {value[v]}.")
    return d


def trace(w, tokens):
    return (trace_total if w.rng.random() < 0.5 else trace_variables)(w, tokens)


def chat(w, tokens):
    d = start("chat", w)
    while d.tokens() < 0.9 * tokens:
        d.say(*(smalltalk if w.rng.random() < 0.5 else off_topic)(w))
    return d


MAKERS = {"memory": memory, "needle": needle, "trace": trace, "chat": chat}
MIX = {"memory": 0.66, "needle": 0.14, "trace": 0.15, "chat": 0.05}


def dialogues(task, split, seed, tokens, bench=True):
    """Endless dialogues of one task of about `tokens` tokens.

    With `bench` the memory task has the fixed shape that the quality bench and the
    recall probe grade; without it, the varied shapes the model trains on.
    """
    rng = random.Random(f"{task}/{split}/{seed}/{tokens}")
    w = Words(rng, split)
    make = memory_eval if bench and task == "memory" and tokens > 192 else MAKERS[task]
    while True:
        yield make(w, tokens)


def mixture(split, seed, tokens):
    """Endless training dialogues of all tasks."""
    rng = random.Random(f"mixture/{split}/{seed}/{tokens}")
    sources = {t: dialogues(t, split, seed, tokens, bench=False) for t in TASKS}
    bench = dialogues("memory", split, f"{seed}b", tokens)
    while True:
        task = rng.choices(list(MIX), MIX.values())[0]
        yield next(bench if task == "memory" and rng.random() < 0.25 else sources[task])


# --- tokens ---------------------------------------------------------------

def render(messages):
    """ChatML, the same text as chat_template.jinja produces."""
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)


class Encoder:
    """Turns dialogues into arrays: ids, weight per target, number of the scored answer."""

    def __init__(self, tokenizer):
        self.tok = tokenizer
        self.start, self.end = tokenizer.token_to_id(IM_START), tokenizer.token_to_id(IM_END)
        self.pad = tokenizer.token_to_id(END_OF_TEXT)
        self.assistant = tokenizer.encode("assistant", add_special_tokens=False).ids

    def fitting(self, source, count, length):
        """The next dialogues of at most `length` tokens: a cut one would lose its questions."""
        out = []
        while len(out) < count:
            d = next(source)
            if len(self.tok.encode(render(d.messages), add_special_tokens=False).ids) <= length + 1:
                out.append(d)
        return out

    def batch(self, batch, length, other_weight=0.3):
        """ids [B, length+1]; for each target ids[:,1:]: weight and answer number (-1 = none)."""
        ids = np.full((len(batch), length + 1), self.pad, np.int64)
        weight = np.zeros((len(batch), length), np.float32)
        answer = np.full((len(batch), length), -1, np.int32)
        texts = self.tok.encode_batch([render(d.messages) for d in batch], add_special_tokens=False)
        for row, (d, enc) in enumerate(zip(batch, texts)):
            seq = np.asarray(enc.ids[:length + 1])
            ids[row, :len(seq)] = seq
            weight[row, :len(seq) - 1] = other_weight
            starts, ends = np.flatnonzero(seq == self.start), np.flatnonzero(seq == self.end)
            for i, m in enumerate(d.messages):
                if i >= len(starts) or m["role"] != "assistant":
                    continue
                first = starts[i] + len(self.assistant) + 2      # after <|im_start|>assistant\n
                whole = i < len(ends)
                last = ends[i] if whole else len(seq) - 1
                weight[row, first - 1:last] = 1.0
                if m["scored"] and whole:
                    answer[row, first - 1:last] = i
        return ids, weight, answer


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--task", choices=TASKS + ("mixture",), default="mixture")
    ap.add_argument("--split", choices=("train", "heldout"), default="train")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--count", type=int, default=1)
    ap.add_argument("--text", action="store_true", help="print rendered text, not JSON lines")
    a = ap.parse_args()
    source = mixture(a.split, a.seed, a.tokens) if a.task == "mixture" else dialogues(a.task, a.split, a.seed, a.tokens)
    for _ in range(a.count):
        d = next(source)
        print(render(d.messages) if a.text else json.dumps({"task": d.task, "messages": d.messages}))


if __name__ == "__main__":
    main()
