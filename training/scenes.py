"""Pictures made from seeds, and dialogues about them: what keepd-nano with eyes learns and is tested with.

Four kinds of pictures of SIDE x SIDE pixels: shapes and numbers in a grid, a sign with a code, bars with their heights, and a form
with a name and a city. Every question has one answer. Codes, words and pairs of shape and colour are divided into those for training and
those for tests (corpus.held_out).

    python scenes.py --count 8 --out pictures.png     shows some, with their questions
"""

import argparse
import random
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import corpus

SIDE = 128
ROWS = 64                                    # rows of embeddings of a picture: a patch has 8 pixels, and 2 x 2 are joined
IMAGE, FAKE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
SHOWN = FAKE + GLOBAL + IMAGE * ROWS + FAKE  # the published processor puts it in a picture's place

COLOURS = {"red": (214, 40, 40), "green": (42, 157, 70), "blue": (38, 84, 200), "yellow": (240, 200, 30), "purple": (140, 60, 170),
           "orange": (240, 130, 30), "black": (30, 30, 30), "grey": (140, 140, 140)}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PLACES = ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right")
NAMES = ("ANNA", "BEN", "CARLA", "DAVID", "EVA", "FRED", "GRETA", "HUGO", "IDA", "JAN", "KARL", "LENA", "MAX", "NORA", "OTTO", "PAUL",
         "ROSA", "SAM", "TINA", "VERA")
CITIES = ("ROME", "PARIS", "OSLO", "CAIRO", "LIMA", "TOKYO", "BERN", "DELHI", "QUITO", "MINSK", "HANOI", "TUNIS", "SOFIA", "RIGA", "BONN")


DIGITS = tuple("0123456789")
# Facts that a picture shows, as places and their values, for an encoder that learns before it meets a text model. A picture says only some places.
VALUES = ("", *COLOURS, *SHAPES, "number", *DIGITS, *NAMES, *CITIES, "grid", "sign", "bars", "form")
SEEN_AT = ("kind", *(f"cell {i}{part}" for i in range(9) for part in ("", " colour", " 0", " 1")), "frame", *(f"code {i}" for i in range(4)),
           "count", *(f"bar {i}{part}" for i in range(4) for part in ("", " colour")), "name", "city", *(f"number {i}" for i in range(3)))


@dataclass
class Scene:
    picture: np.ndarray                                        # uint8 [SIDE, SIDE, 3]
    questions: list = field(default_factory=list)              # [(question, answer)]
    shows: dict = field(default_factory=dict)                  # places (SEEN_AT) to VALUES


def digits_at(name, text):
    return {f"{name} {i}": digit for i, digit in enumerate(text)}


def font(size):
    return ImageFont.load_default(size)


def background(rng):
    return tuple(rng.randrange(215, 256) for _ in range(3))


def polygon(points, x, y, r):
    return [(x + r * px, y + r * py) for px, py in points]


def draw_shape(draw, shape, x, y, r, colour):
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "ring":
        draw.ellipse(box, outline=colour, width=max(3, int(r / 2.6)))
    elif shape == "square":
        draw.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=colour)
    elif shape == "triangle":
        draw.polygon(polygon(((0, -1), (0.95, 0.8), (-0.95, 0.8)), x, y, r), fill=colour)
    elif shape == "cross":
        draw.rectangle((x - r, y - 0.34 * r, x + r, y + 0.34 * r), fill=colour)
        draw.rectangle((x - 0.34 * r, y - r, x + 0.34 * r, y + r), fill=colour)
    else:
        angles = np.arange(10) * np.pi / 5 - np.pi / 2
        radii = np.where(np.arange(10) % 2 == 0, 1.08, 0.45)
        draw.polygon(polygon(zip(radii * np.cos(angles), radii * np.sin(angles)), x, y, r), fill=colour)


def draw_text(draw, text, x, y, size, colour):
    draw.text((x, y), text, fill=colour, font=font(size), anchor="mm")


def grid(w):
    """Shapes and numbers in the cells of a grid of 3 x 3: all shapes and all colours differ."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, scene = ImageDraw.Draw(image), []
    cells, shapes, colours = rng.sample(range(9), rng.randint(3, 5)), rng.sample(SHAPES, len(SHAPES)), rng.sample(list(COLOURS), len(COLOURS))
    for cell in cells:
        x, y = (21 + 43 * (cell % 3) + rng.randint(-4, 4), 21 + 43 * (cell // 3) + rng.randint(-4, 4))
        number = rng.random() < 0.3
        what = w.digits(2) if number else shapes.pop()
        for _ in range(0 if number else len(colours)):
            if corpus.held_out(what + colours[-1]) == (w.split == "heldout"):
                break
            colours.insert(0, colours.pop())
        colour = colours.pop()
        if number:
            draw_text(draw, what, x, y, rng.randint(24, 29), COLOURS[colour])
        else:
            draw_shape(draw, what, x, y, rng.randint(12, 17), COLOURS[colour])
        scene.append((what, number, colour, PLACES[cell]))
    asked, shows = [("How many things are there?", str(len(scene)))], {"kind": "grid", "count": str(len(scene))}
    shows |= {f"cell {i}": "" for i in range(9)}
    for what, number, colour, place in scene:
        cell = f"cell {PLACES.index(place)}"
        shows |= {cell: "number" if number else what, f"{cell} colour": colour} | (digits_at(cell, what) if number else {})
        name = f"number {what}" if number else what
        asked += [(f"What colour is the {name}?", colour), (f"Where is the {name}?", place), (f"What is {colour}?", f"the {name}"),
                  (f"What is at the {place}?" if place != "middle" else "What is in the middle?", f"the {colour} {name}")]
    return Scene(np.asarray(image), asked, shows)


def sign(w):
    """A code on a coloured sign."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, code = ImageDraw.Draw(image), w.digits(4)
    colour, x, y = rng.choice(list(COLOURS)), 64 + rng.randint(-8, 8), rng.randint(34, 94)
    draw.rectangle((x - 50, y - 24, x + 50, y + 24), fill=(255, 255, 255), outline=COLOURS[colour], width=rng.randint(4, 7))
    draw_text(draw, code, x, y, rng.randint(32, 37), (20, 20, 20))
    return Scene(np.asarray(image), [("What does the sign say?", code), ("Which code is on the sign?", code),
                                     ("What colour is the frame of the sign?", colour)],
                 {"kind": "sign", "frame": colour, **digits_at("code", code)})


def bars(w):
    """Bars of different heights, which are written above them."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, count = ImageDraw.Draw(image), rng.randint(3, 4)
    heights, colours = rng.sample(range(1, 10), count), rng.sample(list(COLOURS), count)
    step = 120 / count
    for i, (height, colour) in enumerate(zip(heights, colours)):
        x = 4 + step * (i + 0.5)
        draw.rectangle((x - step * 0.32, 122 - 10 * height, x + step * 0.32, 122), fill=COLOURS[colour])
        draw_text(draw, str(height), x, 122 - 10 * height - 11, 19, (20, 20, 20))
    draw.line((2, 123, 126, 123), fill=(20, 20, 20), width=2)
    asked = [("How many bars are there?", str(count)), ("Which bar is the highest?", f"the {colours[int(np.argmax(heights))]} one"),
             ("Which bar is the lowest?", f"the {colours[int(np.argmin(heights))]} one")]
    shows = {"kind": "bars", "count": str(count)}
    for i, (height, colour) in enumerate(zip(heights, colours)):
        shows |= {f"bar {i}": str(height), f"bar {i} colour": colour}
    return Scene(np.asarray(image), asked + [(f"How high is the {c} bar?", str(h)) for h, c in zip(heights, colours)], shows)


def form(w):
    """A form with a name, a city and a number."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, ink = ImageDraw.Draw(image), rng.choice([(20, 20, 20), (30, 60, 150), (120, 20, 20)])
    name, city, number = rng.choice(NAMES), rng.choice(CITIES), w.digits(3)
    for i, value in enumerate((name, city, number)):
        y = 24 + 40 * i + rng.randint(-3, 3)
        draw_text(draw, value, 64 + rng.randint(-10, 10), y, 26, ink)
        draw.line((10, y + 16, 118, y + 16), fill=(150, 150, 150))
    return Scene(np.asarray(image), [("What name is on the form?", name), ("Which city is on the form?", city),
                                     ("Which number is on the form?", number)],
                 {"kind": "form", "name": name, "city": city, **digits_at("number", number)})


KINDS = {"grid": grid, "sign": sign, "bars": bars, "form": form}
SHARES = {"grid": 0.4, "sign": 0.25, "bars": 0.15, "form": 0.2}


def scene(w, kind=None):
    return KINDS[kind or w.rng.choices(list(SHARES), SHARES.values())[0]](w)


@dataclass
class Seen(corpus.Dialogue):
    pictures: list = field(default_factory=list)               # in the order of their marks in the messages

    def show(self, scene, question, answer):
        self.pictures.append(scene.picture)
        self.messages.append({"role": "user", "content": SHOWN + question})
        self.messages.append({"role": "assistant", "content": answer, "scored": True, "expected": answer})
        self.length += ROWS + 40


def ask(w, d, scene, answered):
    question, answer = answered or w.rng.choice(scene.questions)
    d.say(question, answer, scored=True)


def dialogue(w, tokens):
    """Pictures with questions at once, and questions about the last picture after other talk."""
    rng, d = w.rng, Seen("pictures", w.split)
    if rng.random() < 0.1:
        d.add({"role": "system", "content": "Answer briefly."})
    facts = []
    while d.tokens() < 0.92 * tokens - 30:
        room = 0.92 * tokens - d.tokens()
        if room > ROWS + 90 or not d.pictures:
            now = scene(w)
            asked = rng.sample(now.questions, len(now.questions))
            d.show(now, *asked[0])
            for one in asked[1:rng.randint(2, 5)]:
                ask(w, d, now, one)
        for _ in range(rng.choice((0, 0, 1, 2, 4)) if tokens > 256 else rng.choice((0, 0, 0, 1))):
            if rng.random() < 0.25:
                facts += corpus.facts(w, 1)
                corpus.tell(w, d, facts[-1:])
            else:
                d.say(*corpus.chatter(w))
        if facts and rng.random() < 0.4:
            corpus.ask(w, d, rng.choice(facts))
        ask(w, d, now, None)
    return d


def dialogues(split, seed, tokens):
    """Endless dialogues of about `tokens` tokens."""
    w = corpus.Words(random.Random(f"scenes/{split}/{seed}/{tokens}"), split)
    while True:
        yield dialogue(w, tokens)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--count", type=int, default=8)
    ap.add_argument("--split", choices=("train", "heldout"), default="train")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    w = corpus.Words(random.Random(a.seed), a.split)
    scenes = [scene(w) for _ in range(a.count)]
    Image.fromarray(np.concatenate([s.picture for s in scenes], 1)).save(a.out)
    for s in scenes:
        print(s.questions)


if __name__ == "__main__":
    main()
