"""Writes python.jsonl: random templates and what jinja2 makes of them, for test_chat.c.

    python3 make_python.py [SEED [COUNT]] > python.jsonl        (needs jinja2 3.1.6)

The first line is the context of all cases, each other line {template, expected} or {template, error}.
Differs from jinja2 on purpose and is kept out: the address in a printed generator, generators that
fail only when somebody looks (here |map and its kin work at once), arithmetic beyond 64 bits.
"""
import copy
import datetime
import json
import random
import re
import sys
import warnings

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CONTEXT = {
    "s": "Hello, World", "e": "", "u": "  Grüße ß İ日本語😀 ﬁn\u00a0x\t", "n": 5, "m": -3, "z": 0,
    "f": 2.5, "g": 1e-7, "h": 1e16, "t": True, "x": None, "l": [3, 1, 2],
    "sl": ["b", "A", "c", "a"], "el": [], "ml": [1, "a", None, 2.0, True, [1, 2]],
    "d": {"b": 1, "A": 2, "c": None, "items": "shadow"}, "ed": {}, "q": "it's \"q\" \\ \n<&>",
    "users": [{"name": "Bob", "age": 30, "tags": ["x", "y"]}, {"name": "al", "age": 25, "tags": []},
              {"name": "Zoe", "age": 25}],
    "big": 123456789012345678901234567890, "nums": "12 -7 0x1f 3.75 1_000 abc",
    "pairs": [[1, "a"], [2, "b"]], "json": '{"a":[1,2.50,true,null,"\\u00e9"],"b":{}}',
    "lines": "one\n two\r\nthree\n\nfour\u2028five",
}

# arithmetic beyond 64 bits is refused, so no `big` here
ATOMS = [name for name in CONTEXT if name != "big"] + [
    "'abc'", '"x,y,z"', "'a b  c'", "1", "2", "0", "-1", "10", "3.0", "0.1", "1e5", "true", "none",
    "false", "[]", "{}", "()", "(1,)", "(1,2)", "[1,2,3]", "['a','b']", "{'k':1,'v':'w'}", "undef",
    "undef2", "''", "' '", "'ab'", "'b'"]
BINARY = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", ">", "<=", ">=", "in", "not in",
          "and", "or", "** 2 +"]
FILTERS = """abs|capitalize|count|default|dictsort|escape|first|float|indent|int|items|join|last
length|list|lower|max|min|reverse|round|safe|sort|string|sum|title|tojson|trim|truncate|unique|upper
e|forceescape|map('upper')|map(attribute='name')|map('int')|select('odd')
reject('even')|selectattr('age')|selectattr('age','equalto',25)|rejectattr('name','==','al')
sum(attribute='age')|sort(attribute='age,name')|sort(attribute='name')|join(', ')
join('-',attribute='name')|replace('a','Q')|replace('l','')|default('D')|default('D',true)
tojson(indent=2)|tojson(sort_keys=true)|tojson(separators=(',',':'))|tojson(ensure_ascii=true)
indent(2)|indent(3,true)|indent(2,blank=true)|int(7)|int(base=16)|float(1)|round(1)|round(2,'floor')
round(0,'ceil')|dictsort(by='value')|dictsort(true)|dictsort(reverse=true)|sort(true)
sort(case_sensitive=true)|trim('aH')|truncate(5)|truncate(7,true)|truncate(9,false,'~',0)
attr('upper')|attr('name')|select|reject('none')|select('string')|select('in',[1,2,'a'])
unique(true)|format(1)|format('a','b')|min(attribute='age')|max(attribute='name')|map('length')|map('default','z')
map(attribute='age',default=0)|map(attribute='tags.0')|from_json|xx_unknown
""".replace("\n", "|").strip("|").split("|")
METHODS = """upper()|lower()|title()|capitalize()|strip()|lstrip()|rstrip()|strip('Hd ')|split()
split(' ')|split(',')|split(',',1)|split(none,1)|rsplit(' ',1)|rsplit(none,1)|rsplit()|splitlines()
splitlines(true)|startswith('H')|endswith('d')|startswith(('a','H'))|startswith('e',1)
endswith('l',0,4)|find('l')|rfind('l')|find('l',4)|count('l')|count('')|replace('l','LL')
replace('l','_',1)|replace('','.')|join(['a','b'])|join('xyz')|isdigit()|isalpha()|isalnum()
isspace()|isupper()|islower()|swapcase()|center(21,'*')|ljust(15,'.')|rjust(15)|zfill(15)
partition(',')|rpartition('l')|removeprefix('He')|removesuffix('ld')|index('o')|rindex('o')|items()
keys()|values()|get('b')|get('zz')|get('zz',4)|items|name|b|append(1)|pop()|pop(0)|insert(1,'i')
extend([9])|copy()|count(1)|index(2)|reverse()|sort()|update({'n':1})|isascii()|isdecimal()
isprintable()|casefold()|format(1,2)|format('a',b=3)""".replace("\n", "|").split("|")
TESTS = """defined|undefined|none|string|number|integer|float|boolean|mapping|sequence|iterable|odd
even|true|false|lower|upper|callable|escaped|divisibleby 2|divisibleby(3)|eq 5|in [1,2,5]|sameas none
gt 1|lt(4)|ne 3|==|equalto 5""".replace("\n", "|").split("|")
PERCENT = ["%s", "%d", "%5.2f|%-5s", "%r", "%05d", "%x", "%e", "%g", "%%", "%(b)s", "%s %s", "%c",
           "%10s|", "%.2s|", "%o", "%i", "%#x"]
BRACES = ["{}", "{0}{1}", "{:>8}", "{:<8}|", "{:^9}|", "{:05d}", "{:.2f}", "{:,}", "{!r}", "{x}",
          "{:*^11}", "{:+}", "{:x}", "{:e}", "{:%}", "{0[0]}", "{{}}", "{:10.3}|", "{:g}"]
INDICES = ["0", "-1", "1", "7", "'b'", "'name'", "'upper'", "n", "-9", "true", "none", "1.0"]
LOOP = ["index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem",
        "depth", "cycle('a','b')", "changed(i)"]


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_run"), [], [], body).set_lineno(line)

    def _run(self, caller):
        return caller()


def eager(function):
    """The same filter, but what fails fails at once."""
    import functools

    @functools.wraps(function)
    def at_once(*args, **kwargs):
        items = list(function(*args, **kwargs))
        return (item for item in items)
    return at_once


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, loopcontrols])

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)
    env.filters["tojson"] = tojson
    env.filters["from_json"] = json.loads
    now = datetime.datetime(2025, 7, 10, 12, 0, 0)
    env.globals["strftime_now"] = now.strftime
    for name in "map select reject selectattr rejectattr unique items".split():
        env.filters[name] = eager(env.filters[name])
    return env


class Maker:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def pick(self, items):
        return self.r.choice(items)

    def primary(self, depth):
        return self.pick(ATOMS) if self.r.random() < .5 else f"({self.expression(depth)})"

    def index(self, depth):
        k = self.r.random()
        if k < .7:
            return self.pick(INDICES)
        return self.expression(depth - 1)

    def slice(self):
        bounds = ["", "", "1", "-1", "2", "-2", "0", "9", "-9", "n"]
        steps = ["", ":", ":1", ":-1", ":2", ":-2"]
        return f"[{self.pick(bounds)}:{self.pick(bounds)}{self.pick(steps)}]"

    def expressions(self, depth, low, high):
        return ", ".join(self.expression(depth) for _ in range(self.r.randint(low, high)))

    def expression(self, depth):
        if depth <= 0:
            return self.pick(ATOMS)
        d, k = depth - 1, self.r.random()
        if k < .14:
            return self.pick(ATOMS)
        if k < .30:
            return f"{self.expression(d)} {self.pick(BINARY)} {self.expression(d)}"
        if k < .34:
            return f"({self.expression(d)})"
        if k < .52:
            return f"{self.primary(d)}|{self.pick(FILTERS)}"
        if k < .68:
            return f"{self.primary(d)}.{self.pick(METHODS)}"
        if k < .74:
            return f"{self.primary(d)} is {self.pick(['', 'not '])}{self.pick(TESTS)}"
        if k < .77:
            return f"{self.primary(d)}[{self.index(depth)}]"
        if k < .80:
            # never of constants that have no slices: Jinja folds those to undefined, not an error
            return self.pick(["s", "u", "q", "l", "ml", "users", "'abc'", "d", "x"]) + self.slice()
        if k < .83:
            return f"{self.expression(d)} if {self.expression(d)} else {self.expression(d)}"
        if k < .85:
            return f"not {self.expression(d)}"
        if k < .87:
            return f"-{self.primary(d)}"
        if k < .90:
            return "[" + self.expressions(d, 0, 3) + "]"
        if k < .92:
            pairs = [f"{self.pick(ATOMS)}: {self.expression(d)}"
                     for _ in range(self.r.randint(0, 3))]
            return "{" + ", ".join(pairs) + "}"
        if k < .94:
            return f"'{self.pick(PERCENT)}' % {self.primary(d)}"
        if k < .96:
            return f"'{self.pick(BRACES)}'.format({self.expressions(d, 1, 2)})"
        if k < .98:
            bounds = [self.pick(["n", "m", "0", "1", "7", "x", "f"])
                      for _ in range(self.r.randint(1, 3))]
            return f"range({', '.join(bounds)})|list"
        return f"namespace(a={self.expression(d)})"

    def space(self):
        return self.pick(["", "", " ", "\n", "  \n ", "a", "\t\n"])

    def begin(self):
        return self.pick(["{%", "{%", "{%-", "{%+"])

    def end(self):
        return self.pick(["%}", "%}", "-%}", "+%}"])

    def tag(self, text):
        return f"{self.begin()} {text} {self.end()}"

    def body(self, depth):
        return "".join(self.statement(depth) for _ in range(self.r.randint(1, 3)))

    def statement(self, depth):
        k, d, tag = self.r.random(), depth - 1, self.tag
        if depth <= 0 or k < .4:
            return (self.space() + self.pick(["{{", "{{-"]) + f" {self.expression(2)} "
                    + self.pick(["}}", "-}}"]) + self.space())
        if k < .5:
            other = tag(f"elif {self.expression(1)}") + self.body(d) if k < .45 else ""
            return (self.space() + tag(f"if {self.expression(1)}") + self.body(d) + other
                    + tag("else") + self.body(d) + tag("endif") + self.space())
        if k < .65:
            return self.loop(d)
        if k < .75:
            return self.space() + tag(f"set {self.pick(['y', 'l', 's', 'y, v'])} = "
                                      + self.expression(2))
        if k < .8:
            return (tag("set y" + self.pick(["", "|upper", "|trim|title"])) + self.body(d)
                    + tag("endset") + "{{ y }}")
        if k < .86:
            return self.macro(d)
        if k < .9:
            return (tag("filter " + self.pick(["upper", "trim", "replace(1,2)", "indent"]))
                    + self.body(d) + tag("endfilter"))
        if k < .93:
            return tag(f"with y = {self.expression(1)}") + self.body(d) + tag("endwith") + "{{ y }}"
        if k < .95:
            return (self.space() + self.pick(["{#", "{#-", "{#+"]) + " c "
                    + self.pick(["#}", "-#}", "+#}"]) + self.space())
        if k < .97:
            return (self.space() + self.begin() + " raw " + self.pick(["%}", "-%}"])
                    + " {{ x }} {% if " + tag("endraw") + self.space())
        return tag("generation") + self.body(d) + tag("endgeneration") + self.space()

    def loop(self, depth):
        target = self.pick(["i", "i", "i", "k, v"])
        source = self.pick([self.pick(ATOMS), "l", "sl", "users", "d", "d.items()", "pairs", "s",
                            "range(4)", "[1,2,3,4,5]"])
        test = self.pick(["", "", " if " + self.expression(1)])
        control = self.pick(["", "", "{% if loop.index0 == 2 %}{% break %}{% endif %}",
                             "{% if loop.first %}{% continue %}{% endif %}",
                             "{% set y = (y or 0) + 1 %}{{ y }}"])
        return (self.space() + self.tag(f"for {target} in {source}{test}") + control
                + "{{ loop." + self.pick(LOOP) + " }}" + self.body(depth)
                + (self.tag("else") + self.body(depth) if self.r.random() < .3 else "")
                + self.tag("endfor") + self.space())

    def macro(self, depth):
        extra = self.pick(["", "{{ caller() }}", "{{ varargs }}{{ kwargs }}"])
        call = self.pick(["", "{{ m(b=1, a=2) }}", "{{ m(*l) }}", "{{ m(**d) }}",
                          "{% call m(1) %}C{{ n }}{% endcall %}"])
        return (self.tag(f"macro m(a, b={self.expression(1)})") + self.body(depth) + "{{ a }}"
                + extra + self.tag("endmacro") + "{{ m(" + self.expressions(1, 0, 3) + ") }}" + call)

    def template(self):
        count, depth = self.pick([1, 1, 1, 2, 3]), self.pick([0, 0, 1, 2])
        return ("".join(self.statement(depth) for _ in range(count))
                + self.pick(["", "\n", "\n\n"]))


def render(env, template):
    try:
        return {"template": template,
                "expected": env.from_string(template).render(**copy.deepcopy(CONTEXT))}
    except Exception as error:
        return {"template": template, "error": type(error).__name__}


def comparable(case):
    if len(case["template"]) > 400 or len(case.get("expected", "")) > 1000:
        return False
    return not re.search(r"(?i) at 0x|object|<bound|<built|<Loop|<Macro", case.get("expected", ""))


def main():
    warnings.simplefilter("ignore")
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1500
    env, maker = environment(), Maker(seed)
    cases = [render(env, maker.template()) for _ in range(count)]
    print(json.dumps(CONTEXT, ensure_ascii=False))
    for case in cases:
        # An error is easy to meet: one in eight of them is enough.
        if comparable(case) and ("expected" in case or maker.r.random() < .125):
            print(json.dumps(case, ensure_ascii=False))


if __name__ == "__main__":
    main()
