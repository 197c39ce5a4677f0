"""Rows of questions about a context, in the form that kvpress's evaluation reads: context, question, answer_prefix,
answer (a list, all of which must occur in the reply), max_new_tokens, task; and choices, the words of which the reply is
one, or none. A small model knows the word but would rather go on with a sentence of its own.

  niah    RULER's needles with several keys (arXiv 2404.06654): sentences that give a word a number, hidden in essays
  pairs   a list that gives every word a number
  told    facts about people, in sentences of several forms, hidden in essays
  chat    the same facts, told by the user of a dialogue between other turns
  tool    an agent's session: numbered steps, and what the tool of each has printed; a question is about one step
  helper  a module of functions; a question is to repeat the first line of one, with its three parameters in order

Every context has QUESTIONS questions, whose facts stand at depths that cover it evenly. Words, names and sentences are
those of this file and of `essays`, none of which any gates were trained on. Contexts are cut to a number of tokens by
`count(text)`.
"""
import json
import random

QUESTIONS = 8
SEED = 2026

WORDS = """abacus acorn almond anchor apron arrow aspen atlas badger bagel ballad bamboo banjo barley basil beacon beaver
bellows birch bishop bonnet boulder bramble bridge bronze bucket cabin cactus camel candle canyon carbon castle cedar
cellar cherry chisel cider clover cobalt comet copper coral cotton cradle crater cricket crystal curtain cymbal dagger
daisy desert diamond dolphin donkey dragon drum eagle easel ebony elbow ember emerald engine falcon feather fern fiddle
flannel flint forest fossil fountain fox galaxy garlic garnet geyser ginger glacier goblet granite grape gravel hammer
harbor hazel helmet hermit heron hickory honey horizon hornet igloo indigo iris island ivory jacket jasmine jigsaw jungle
kayak kettle kitten ladder lagoon lantern lemon lily linen lizard lobster locket magnet mango maple marble meadow melon
mirror mitten mosaic mountain muffin nectar needle nickel nutmeg oasis ocean olive onion opal orchid otter oyster paddle
panther parrot pebble pepper piano pigeon pillow planet plum pocket poppy prism puddle pumpkin puzzle quartz quilt rabbit
radish ribbon river robin rocket rooster ruby saddle saffron salmon sapphire scarf shadow shovel silver sparrow spider
spruce squirrel statue sunset teapot temple thunder timber tulip tunnel turtle umbrella valley velvet violet violin
walnut walrus whistle willow window winter wizard zebra""".split()
NAMES = """Amir Beatrice Carlos Dmitri Elena Farah Gustav Hana Ingrid Javier Katrin Leila Marcus Nadia Oscar Priya Quentin
Rosa Stefan Tamara Ulrich Vera Wendell Yusuf Zelda Bruno Celeste Edgar Fiona Gideon""".split()
TOWNS = """Lisbon Oslo Dublin Vienna Prague Warsaw Athens Madrid Geneva Boston Denver Seattle Chicago Toronto Sydney
Nairobi Cairo Mumbai Tokyo Seoul Lima Havana Berlin Milan Naples Porto Bergen Krakow Antwerp Zurich""".split()
JOBS = """baker plumber dentist lawyer teacher farmer sailor painter carpenter librarian nurse chemist tailor butcher
gardener mechanic violinist translator architect pilot potter beekeeper judge surgeon""".split()
ANIMALS = """parrot tortoise hamster goat donkey ferret canary lizard rabbit pony goldfish hedgehog iguana duck sheep
llama crow python""".split()
INSTRUMENTS = """violin piano guitar trumpet flute cello clarinet harp banjo drums saxophone accordion trombone oboe
organ mandolin""".split()
COLORS = "red blue green yellow purple orange brown black white pink gray golden silver crimson turquoise beige".split()

DISHES = """lasagna paella goulash risotto ramen falafel dumplings pancakes curry chili ratatouille moussaka tacos pierogi
couscous meatballs""".split()
SPORTS = """tennis chess hockey rugby golf cricket volleyball badminton baseball basketball fencing rowing wrestling bowling
archery karate""".split()
LANGUAGES = """Spanish German Italian Greek Turkish Polish Swedish Dutch Russian Arabic Japanese Korean Hungarian Danish
Portuguese Finnish""".split()
MONTHS = "January February March April May June July August September October November December".split()
FRUITS = """apples cherries plums peaches pears grapes lemons oranges mangoes apricots figs bananas melons strawberries
blueberries raspberries""".split()

# Kinds of facts: several ways to tell one, the question, how the reply begins, the possible values
FACTS = [
    (["{n} has lived in {v} since last spring.", "These days {n} lives in {v}, close to the station."],
     "In which city does {n} live?", "{n} lives in", TOWNS),
    (["{n} works as a {v}.", "For a living, {n} is a {v}."],
     "What is {n}'s job?", "{n} works as a", JOBS),
    (["{n} keeps a {v} at home.", "At home {n} has a {v}, which everybody spoils."],
     "Which animal does {n} have?", "{n} has a", ANIMALS),
    (["{n} plays the {v}.", "On Sundays {n} plays the {v} for an hour."],
     "Which instrument does {n} play?", "{n} plays the", INSTRUMENTS),
    (["{n} drives a {v} car.", "The car that {n} drives is {v}."],
     "What color is {n}'s car?", "The color of {n}'s car is", COLORS),
    (["{n}'s favorite dish is {v}.", "{n} would eat {v} every day."],
     "What does {n} like to eat best?", "{n} likes to eat", DISHES),
    (["{n} plays {v} with friends.", "{n} has been good at {v} since childhood."],
     "Which game or sport does {n} play?", "{n} plays", SPORTS),
    (["{n} is learning {v}.", "{n} takes lessons in {v} in the evening."],
     "Which language is {n} learning?", "{n} is learning", LANGUAGES),
    (["{n}'s birthday is in {v}.", "{n} was born in {v}."],
     "In which month is {n}'s birthday?", "{n}'s birthday is in", MONTHS),
    (["{n} grows {v} in the garden.", "In the garden {n} has planted {v}."],
     "What does {n} grow in the garden?", "In the garden {n} grows", FRUITS),
]
SMALL_TALK = [
    ("How are you today?", "I am doing well, thank you. What would you like to talk about?"),
    ("Can you tell me what makes bread rise?", "Yeast eats the sugar in the dough and gives off carbon dioxide. The gas is "
     "caught in the dough, and so the bread rises before it is baked."),
    ("Why is the sky blue?", "Air scatters blue light more than red light, because blue light has a shorter wavelength. So "
     "blue light reaches your eyes from every part of the sky."),
    ("Give me a tip for sleeping better.", "Go to bed at the same time every day, keep the room dark and cool, and put away "
     "your phone an hour before."),
    ("What is a good way to learn a language?", "Practice a little every day, listen to people who speak it, and do not be "
     "afraid of mistakes. Reading simple books helps, too."),
    ("How do I keep my plants alive?", "Most plants need light and a little water. Water them when the top of the soil is "
     "dry, and turn the pots from time to time."),
    ("What should I see in a museum of art?", "Start with one room and look at a few pictures for a long time. You will "
     "remember more than when you hurry past all of them."),
    ("What is the difference between weather and climate?", "Weather is what happens outside today. Climate is what usually "
     "happens over many years in one place."),
    ("How does a bicycle stay upright?", "When it begins to fall to one side, the front wheel turns to that side, and this "
     "brings the wheels back under the rider."),
    ("Why do leaves change color?", "In autumn trees stop making the green pigment. What is left are yellow and orange ones, "
     "which were there all along."),
    ("How can I save money?", "Write down what you spend for a month. Then choose one or two things that you do not need, "
     "and put that money aside on the day you are paid."),
    ("What is a prime number?", "A prime number is a whole number above one that can be divided only by one and by itself, "
     "such as two, three, five and seven."),
    ("Is tea better than coffee?", "Both are fine. Tea has less caffeine than coffee, and many people find that it keeps "
     "them awake less."),
    ("What do bees do in winter?", "They stay in the hive, close together around the queen, and eat the honey that they "
     "gathered in summer."),
]
PROSE = " ".join(said for _, said in SMALL_TALK)
NOTED = ["Thanks, I will remember that.", "Good to know.", "Noted.", "That is nice to hear.", "I will keep that in mind."]


def number(rng, digits):
    return str(rng.randint(10 ** (digits - 1), 10 ** digits - 1))


def depths(rng):
    """One depth in each of as many equal parts of the context."""
    return [(i + rng.random()) / QUESTIONS for i in range(QUESTIONS)]


def hidden(rng, essays, sentences, tokens, count):
    """Sentences at their depths of a piece of an essay, `tokens` long in all."""
    wanted = tokens - sum(count(s) for s in sentences)
    text = rng.choice(essays)
    at = rng.randrange(max(1, len(text) - 6 * wanted))
    filler = text[at:].replace("\n", " ").split(". ")[1:]
    kept, used = [], 0
    while used < wanted:
        piece = (filler.pop(0) if filler else rng.choice(text.replace("\n", " ").split(". "))).strip() + "."
        kept.append(piece)
        used += count(piece)
    where = [round(d * len(kept)) for d in depths(rng)]
    for place, sentence in sorted(zip(where, sentences), key=lambda pair: -pair[0]):
        kept.insert(place, sentence)
    return " ".join(kept)


def facts(rng):
    """[(told, asked, how the reply begins, value, the values of its kind)], each of another person and kind."""
    out = []
    for name, (told_as, asked, begins, values) in zip(rng.sample(NAMES, QUESTIONS), rng.sample(FACTS, QUESTIONS)):
        fill = dict(n=name, v=rng.choice(values))
        out.append((rng.choice(told_as).format(**fill), asked.format(**fill), begins.format(**fill), fill["v"], values))
    return out


def row(task, context, question, begins, value, tokens, choices=None):
    return dict(choices=choices, context=context, question=question, answer_prefix=begins, answer=[value], max_new_tokens=tokens, task=task)


def niah(rng, essays, tokens, count):
    words = rng.sample(WORDS, QUESTIONS)
    values = [number(rng, 7) for _ in words]
    told = [f"One of the special magic numbers for {w} is: {v}." for w, v in zip(words, values)]
    context = "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you " \
              "about the numbers afterwards.\n" + hidden(rng, essays, told, tokens - 30, count)
    return [row("niah", context, f"\nWhat is the special magic number for {w} mentioned in the provided text?",
                f"The special magic number for {w} mentioned in the provided text is", v, 12) for w, v in zip(words, values)]


def pairs(rng, _, tokens, count):
    words = rng.sample(WORDS, len(WORDS))
    lines, used = [], 30
    while used < tokens and words:
        lines.append((words.pop(), number(rng, 4)))
        used += count(f"{lines[-1][0]}: {lines[-1][1]}\n")
    context = "Every word in this list has a number.\n" + "\n".join(f"{w}: {v}" for w, v in lines) + "\n"
    chosen = [lines[int(d * len(lines))] for d in depths(rng)]
    return [row("pairs", context, f"Which number does the word {w} have in the list?", f"{w}:", v, 6) for w, v in chosen]


def told(rng, essays, tokens, count):
    known = facts(rng)
    context = "Read this text. I will ask you about the people in it.\n" + \
        hidden(rng, essays, [f[0] for f in known], tokens - 20, count)
    return [row("told", context, f"\n{asked}", begins, value, 8, values) for _, asked, begins, value, values in known]


def chat(rng, _, tokens, count):
    """The context is a list of messages; the question belongs to the next one."""
    known, talk = facts(rng), list(SMALL_TALK)
    rng.shuffle(talk)
    pieces = [[("user", f[0]), ("assistant", rng.choice(NOTED))] for f in known]
    used = sum(count(text) + 5 for piece in pieces for _, text in piece)
    between = [[] for _ in pieces]
    while used < tokens:
        asked, said = talk[sum(map(len, between)) % len(talk)]
        between[rng.randrange(len(between))] += [("user", asked), ("assistant", said)]
        used += count(asked) + count(said) + 10
    turns = [turn for piece, after in zip(pieces, between) for turn in piece + after]
    context = [dict(role=role, content=text) for role, text in turns]
    return [row("chat", context, asked, begins, value, 8, values) for _, asked, begins, value, values in known]


# --- Tools and code ---

# An output: the tool, its argument, a line with the value, the question about a step, how the reply begins, the digits
PRINTED = [
    ("run_tests", "{w}", "{v} tests of {w} passed", "How many tests passed at step {i}?", "At step {i} the number of tests that passed was", 3),
    ("file_size", "{w}.dat", "{w}.dat: {v} bytes", "How many bytes did the file have at step {i}?", "At step {i} the number of bytes was", 5),
    ("start_server", "{w}", "{w} listens on port {v}", "On which port does the server of step {i} listen?", "The server of step {i} listens on port", 4),
    ("compile", "{w}.c", "{w}.c:{v}: error: expected ';'", "In which line was the error of step {i}?", "The error of step {i} was in line", 3),
    ("process_id", "{w}", "{w} runs as process {v}", "Which process number was printed at step {i}?", "The process number at step {i} was", 5),
    ("query", "SELECT count(*) FROM {w}", "count: {v}", "Which count did the query of step {i} return?", "The query of step {i} returned the count", 4),
    ("ping", "{w}.example", "{w}.example: {v} us", "How many microseconds did the ping of step {i} take?", "The ping of step {i} took", 4),
    ("open_ticket", "{w}", "opened ticket {v}", "Which ticket was opened at step {i}?", "The ticket opened at step {i} has the number", 5),
]
NOISE = ["loading {w} ... ok", "warning: {w} is deprecated, use {x}", "{w}: {x} unchanged", "skipped {w} ({x})", "checked {w} in {n} ms", "cache of {w}: {n} entries"]


def tool(rng, _, tokens, count):
    """The context is a list of messages; as many steps as questions, each with lines that nobody asks for."""
    each = tokens // QUESTIONS
    messages, out = [dict(role="system", content="You are an agent that works on a project with tools.")], []
    for i, (name, argument, line, asked, begins, digits) in enumerate(rng.sample(PRINTED, QUESTIONS), 1):
        fill = dict(i=i, w=rng.choice(WORDS), v=number(rng, digits))
        call = dict(name=name, arguments=json.dumps({"of": argument.format(**fill)}))
        lines, used = [line.format(**fill)], 50
        while used < each:
            noise = rng.choice(NOISE).format(w=rng.choice(WORDS), x=rng.choice(WORDS), n=number(rng, 2))
            lines.insert(rng.randint(0, len(lines)), noise)
            used += count(noise + "\n")
        messages += [dict(role="user", content=f"Step {i}: please use {name}."),
                     dict(role="assistant", content="", tool_calls=[dict(id=f"call{i}", type="function", function=call)]),
                     dict(role="tool", tool_call_id=f"call{i}", content="\n".join(lines)),
                     dict(role="assistant", content=f"Step {i} is done.")]
        out.append((asked.format(**fill), begins.format(**fill), fill["v"]))
    return [row("tool", messages, asked, begins, value, 8) for asked, begins, value in out]


VERBS = "merge scale split count clean rank check shift pack trim".split()
PARAMETERS = """amount batch column depth entry factor group height index job key limit margin name offset part quota rate size
table unit value width zone""".split()
BODIES = ["    total = {a} + {b}\n    return total * {c}\n", "    if {a} is None:\n        return {c}\n    return {a}[{b}]\n",
          "    for item in {a}:\n        {b}.append(item)\n    return {b}[{c}]\n", "    left = max({b}, {c})\n    return left - {a}\n"]


def helper(rng, _, tokens, count):
    names = [f"{verb}_{word}" for verb, word in zip(rng.choices(VERBS, k=len(WORDS)), rng.sample(WORDS, len(WORDS)))]
    defined, used = [], 20
    while used < tokens and names:
        a, b, c = rng.sample(PARAMETERS, 3)
        text = f"def {names[-1]}({a}, {b}, {c}):\n" + rng.choice(BODIES).format(a=a, b=b, c=c)
        defined.append((names.pop(), f"{a}, {b}, {c}", text))
        used += count(text + "\n\n")
    parts = [i * len(defined) // QUESTIONS for i in range(QUESTIONS + 1)]
    chosen = [rng.choice(defined[i:j]) for i, j in zip(parts, parts[1:])]
    context = "This is a Python module:\n\n" + "\n\n".join(text for _, _, text in defined)
    return [row("helper", context, f"\nRepeat the first line of the definition of {name}.", f"```python\ndef {name}", given, 14)
            for name, given, _ in chosen]


MAKERS = {"niah": niah, "pairs": pairs, "told": told, "chat": chat, "tool": tool, "helper": helper}


def make(task, length, number_of, essays, count):
    """The rows of one context; the same arguments give the same rows."""
    return MAKERS[task](random.Random(f"{SEED}/{task}/{length}/{number_of}"), essays, length, count)
