"""Writes layout.jsonl: random texts and values under the filters that lay text out, for test_chat_data.c.

    python3 make_layout.py > layout.jsonl        (needs jinja2 3.1.6)

The first line is the context of all cases, each other line {template, expected}. Left out are references to characters
that striptags refuses here (&copy;).
"""
import json
import random

from make_python import environment

WORDS = ["the", "quick", "brown-fox", "a", "e-mail", "--", "word--word", "x-y-z", "supercalifragilistic", " ", "  ", "\t",
         "\u00a0", "\u00e9t\u00e9", "don't", "self-contained-item", "-", "--foo", "1-2", "ab-cd", "<b>", "</b>", "<!-- c -->", "<!--", "-->",
         "<", "&amp;", "&#65;", "&lt;", "R& D", "\u65e5\u672c\u8a9e", "\n", "\r\n", "\n\n", ".", "!", "ab--", "_a-b_", "''"]
URLS = ["http://", "https://", "HTTP://", "www.", "mailto:", "ftp://", "tel:", "a.b", "example", ".com", ".org", "1.2.3.4", "[1:2:3:4]",
        "xn--p1ai", "/path", "?q=1&x=2", ":8080", "(", ")", "<", ">", "&", "'", ".", ",", "@", "user@host.de", "a.b-c@x.y.zz",
        "\u00e9t\u00e9.fr", "foo_bar.net", "%20", "-"]
CASES = 180


def text(r, most):
    return "".join(r.choice(WORDS) + (" " if r.random() < .6 else "") for _ in range(r.randrange(most)))


def addresses(r):
    words = ("".join(r.choice(URLS) for _ in range(r.randrange(1, 6))) for _ in range(r.randrange(9)))
    return "".join(word + r.choice([" ", "\n", "\u3000"]) for word in words)


def value(r, depth):
    kind = r.random()
    if depth == 0 or kind < .4:
        return r.choice([text(r, 12), text(r, 40), r.randrange(10 ** 6), None, True, 1.5, ""])
    if kind < .7:
        return [value(r, depth - 1) for _ in range(r.randrange(6))]
    return {text(r, 3): value(r, depth - 1) for _ in range(r.randrange(6))}


def main():
    r, env = random.Random(1), environment()
    values = [text(r, 30) if i % 3 else value(r, 3) for i in range(CASES)]
    print(json.dumps({"values": values}, ensure_ascii=False))
    for i in range(CASES):
        wrap = (f"wordwrap({r.randrange(1, 30)}, {r.choice(['true', 'false'])}, {r.choice(['none', repr('|')])}, "
                f"{r.choice(['true', 'false'])})")
        template = "{{ values[%d]|%s }}" % (i, ["pprint", wrap, "striptags"][i % 3])
        print(json.dumps({"template": template, "expected": env.from_string(template).render(values=values)}, ensure_ascii=False))
    for i in range(CASES):
        options = [name for name in ("trim_url_limit=9", "nofollow=true", "target='_b<'", "rel='z  a noopener'",
                                     "extra_schemes=['ftp:', 'tel:']") if r.random() < .3]
        template = "{{ %r%s|urlize(%s) }}" % (addresses(r), r.choice(["", "|safe"]), ", ".join(options))
        print(json.dumps({"template": template, "expected": env.from_string(template).render(values=values)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
