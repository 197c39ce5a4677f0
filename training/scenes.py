"""Pictures made from seeds, and dialogues about them: what keepd-nano with eyes learns and is tested with.

Four kinds of pictures of SIDE x SIDE pixels: shapes and numbers in a grid, a sign with a code, bars with their heights, and a form
with a name and a city. Every question has one answer. Codes, words and pairs of shape and colour are divided into those for training and
those for tests (corpus.held_out).

    python scenes.py --count 8 --out pictures.png                     shows some, with their questions
    python scenes.py --count 40 --out chats.jsonl --tokens 512         writes dialogues, in the form of the chat API
"""

import argparse
import base64
import functools
import io
import json
import random
import string
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


# An encoder learns the mark in each square of CELL pixels, and the colour that belongs to it (of a code the frame's, of a height the
# bar's), before it meets a text model. A picture has a row of embeddings for each square.
CELL = 16
CELLS = SIDE // CELL
MARKS_SEEN = ("", *"0123456789", *string.ascii_uppercase, *SHAPES)
COLOURS_SEEN = ("", *COLOURS)


@dataclass
class Scene:
    kind: str
    picture: np.ndarray                                        # uint8 [SIDE, SIDE, 3]
    questions: list = field(default_factory=list)              # [(question, answer)]
    shows: dict = field(default_factory=dict)                  # (column, line) of a square to (mark, colour)


def middle(cell, jitter=0):
    return CELL * cell + CELL // 2 + jitter


@functools.cache
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
    """Writes one character in each square, from the one around (x, y) to the right."""
    for i, character in enumerate(text):
        draw.text((x + CELL * i, y), character, fill=colour, font=font(size), anchor="mm")


def text_at(column, line, text, colour=""):
    return {(column + i, line): (character, colour) for i, character in enumerate(text)}


def grid(w):
    """Shapes and numbers in the cells of a grid of 3 x 3: all shapes and all colours differ."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, things, shows = ImageDraw.Draw(image), [], {}
    columns, lines = (rng.choice(((1, 3, 6), (1, 4, 6))) for _ in range(2))
    cells, shapes, colours = rng.sample(range(9), rng.randint(3, 5)), rng.sample(SHAPES, len(SHAPES)), rng.sample(list(COLOURS), len(COLOURS))
    for cell in cells:
        column, line = columns[cell % 3], lines[cell // 3]
        x, y = (middle(at, rng.randint(-2, 2)) for at in (column, line))
        room = cell % 3 == 2 or cell + 1 not in cells or columns[cell % 3 + 1] - column > 2
        number = room and rng.random() < 0.3
        what = w.digits(2) if number else shapes.pop()
        for _ in range(0 if number else len(colours)):
            if corpus.held_out(what + colours[-1]) == (w.split == "heldout"):
                break
            colours.insert(0, colours.pop())
        colour = colours.pop()
        if number:
            draw_text(draw, what, x, y, rng.randint(22, 25), COLOURS[colour])
        else:
            draw_shape(draw, what, x, y, rng.randint(11, 15), COLOURS[colour])
        shows |= text_at(column, line, what, colour) if number else {(column, line): (what, colour)}
        things.append((what, number, colour, PLACES[cell]))
    asked = [("How many things are there?", str(len(things)))]
    for what, number, colour, place in things:
        name = f"number {what}" if number else what
        asked += [(f"What colour is the {name}?", colour), (f"Where is the {name}?", place), (f"What is {colour}?", f"the {name}"),
                  (f"What is at the {place}?" if place != "middle" else "What is in the middle?", f"the {colour} {name}")]
    return Scene("grid", np.asarray(image), asked, shows)


def sign(w):
    """A code on a coloured sign."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, code, column, line = ImageDraw.Draw(image), w.digits(4), rng.randint(1, 3), rng.randint(1, 6)
    colour, x, y = rng.choice(list(COLOURS)), middle(column, rng.randint(-2, 2)), middle(line, rng.randint(-3, 3))
    draw.rectangle((x - 18, y - 22, x + 3 * CELL + 18, y + 22), fill=(255, 255, 255), outline=COLOURS[colour], width=rng.randint(4, 7))
    draw_text(draw, code, x, y, rng.randint(22, 26), (20, 20, 20))
    return Scene("sign", np.asarray(image), [("What does the sign say?", code), ("Which code is on the sign?", code),
                                             ("What colour is the frame of the sign?", colour)], text_at(column, line, code, colour))


def bars(w):
    """Bars of different heights, which are written above them."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, count = ImageDraw.Draw(image), rng.randint(3, 4)
    heights, colours = rng.sample(range(1, 10), count), rng.sample(list(COLOURS), count)
    first, shows = rng.randint(0, 1) + (count == 3) * rng.randint(0, 1), {}
    for i, (height, colour) in enumerate(zip(heights, colours)):
        x, top = middle(first + 2 * i), 122 - 10 * height
        draw.rectangle((x - 12, top, x + 12, 122), fill=COLOURS[colour])
        draw_text(draw, str(height), x, top - 11, 22, (20, 20, 20))
        shows[first + 2 * i, (top - 11) // CELL] = (str(height), colour)
    draw.line((2, 123, 126, 123), fill=(20, 20, 20), width=2)
    asked = [("How many bars are there?", str(count)), ("Which bar is the highest?", f"the {colours[int(np.argmax(heights))]} one"),
             ("Which bar is the lowest?", f"the {colours[int(np.argmin(heights))]} one")]
    return Scene("bars", np.asarray(image), asked + [(f"How high is the {c} bar?", str(h)) for h, c in zip(heights, colours)], shows)


def form(w):
    """A form with a name, a city and a number."""
    rng = w.rng
    image = Image.new("RGB", (SIDE, SIDE), background(rng))
    draw, ink = ImageDraw.Draw(image), rng.choice([(20, 20, 20), (30, 60, 150), (120, 20, 20)])
    name, city, number, shows = rng.choice(NAMES), rng.choice(CITIES), w.digits(3), {}
    for line, value in zip((1, 4, 6), (name, city, number)):
        column = rng.randint(0, CELLS - len(value))
        x, y = middle(column), middle(line, rng.randint(-3, 3))
        draw_text(draw, value, x, y, 22, ink)
        draw.line((10, y + 13, 118, y + 13), fill=(150, 150, 150))
        shows |= text_at(column, line, value)
    return Scene("form", np.asarray(image), [("What name is on the form?", name), ("Which city is on the form?", city),
                                             ("Which number is on the form?", number)], shows)


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


def part(picture):
    """A picture as a part of a message."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}}


def as_chat(d):
    """A dialogue's messages in the form of the chat API."""
    pictures, out = iter(d.pictures), []
    for m in d.messages:
        text = m["content"].removeprefix(SHOWN)
        seen = [part(next(pictures))] if text != m["content"] else []
        out.append({"role": m["role"], "content": [*seen, {"type": "text", "text": text}] if seen else text})
    return out


def write_chats(a):
    source = dialogues(a.split, a.seed, a.tokens)
    with open(a.out, "w") as f:
        for _ in range(a.count):
            f.write(json.dumps({"messages": as_chat(next(source))}) + "\n")


def draw_some(a):
    w = corpus.Words(random.Random(a.seed), a.split)
    some = [scene(w) for _ in range(a.count)]
    Image.fromarray(np.concatenate([s.picture for s in some], 1)).save(a.out)
    for s in some:
        print(s.questions)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--count", type=int, default=8)
    ap.add_argument("--split", choices=("train", "heldout"), default="train")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--tokens", type=int, default=512, help="of a dialogue (512)")
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    (write_chats if a.out.endswith(".jsonl") else draw_some)(a)


if __name__ == "__main__":
    main()
