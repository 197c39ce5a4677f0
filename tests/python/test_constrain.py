"""Languages of constrain/ against other programs: generated answers against jsonschema, masks against llguidance.

KEEPD_CONSTRAIN_PLAY names the driver.  KEEPD_JSONSCHEMABENCH may name the folder of MaskBench's data
(github.com/guidance-ai/jsonschemabench, maskbench/data), KEEPD_JSON_SCHEMA_TEST_SUITE that of
github.com/json-schema-org/JSON-Schema-Test-Suite; without them the schemas below are used alone.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import jsonschema
import pytest

llguidance = pytest.importorskip("llguidance", reason="skip: llguidance is not installed")

PLAY = os.environ.get("KEEPD_CONSTRAIN_PLAY", "")
BENCH = os.environ.get("KEEPD_JSONSCHEMABENCH", "")
SUITE = os.environ.get("KEEPD_JSON_SCHEMA_TEST_SUITE", "")
DRAFTS = {"draft2020-12": jsonschema.Draft202012Validator, "draft2019-09": jsonschema.Draft201909Validator,
          "draft7": jsonschema.Draft7Validator, "draft6": jsonschema.Draft6Validator,
          "draft4": jsonschema.Draft4Validator}

LEFT_TO_READERS = {"uniqueItems"}  # where the schema does not list the values (docs/API.md)
# Files of JSON-Schema-Test-Suite: formats that are not enforced (docs/API.md), and `content`, whose keywords are annotations since 2019-09,
# and optional before.
UNENFORCED = {"content", "ecmascript-regex", "regex", "idn-email", "idn-hostname", "iri", "iri-reference", "uri-template"}

pytestmark = pytest.mark.skipif(not PLAY, reason="skip: constrain_play is not built")

SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0},
                                      "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"type": "number"}}},
    {"enum": ["red", "green", "re", 1, 12, None, True, {"a": [1, {}]}, [1, 2]]},
    {"type": "string", "minLength": 2, "maxLength": 5}, {"type": "string", "pattern": "^[a-c]{2,4}x*$"},
    {"type": "string", "pattern": "b+[0-9]"}, {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"}, {"type": "string", "format": "ipv4"},
    {"type": "integer", "minimum": -12, "maximum": 1234}, {"type": "integer", "exclusiveMinimum": 99},
    {"type": "number", "minimum": 0.25, "exclusiveMaximum": 10}, {"type": "integer", "multipleOf": 7},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": {"type": "integer"}, "minItems": 2},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}, {"type": "null"}]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
                "required": ["kind"], "additionalProperties": False},
               {"type": "object", "properties": {"kind": {"const": "b"}, "y": {"type": "string"}},
                "required": ["kind", "y"], "additionalProperties": False}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
               {"properties": {"b": {"enum": [1, 2]}}}]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id", "extra"],
     "additionalProperties": {"type": "integer"}},
    {"$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"},
                                                         "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                        "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    {"type": ["string", "null", "array"], "items": {"type": "null"}}, {"const": {"a": "b\n\"c\""}},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
]


class Play:
    """The driver; its vocabulary are the 256 bytes and some words."""

    WORDS = ["true", "null", "{\"", "\":", "\": \"", "\",", "},", "[[", "12", "0.5", "abc", "ab", "hello", "  ", "\n  ", "é",
             "日本", b"\xe6\x97", "-1", "\\u00", "}}", "]]"]
    TOKENS = [bytes([i]) for i in range(256)] + [w if isinstance(w, bytes) else w.encode() for w in WORDS]

    def __init__(self):
        self.process = subprocess.Popen([PLAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **order):
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the driver ended: {json.dumps(order)[:300]}"
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module")
def play():
    driver = Play()
    yield driver
    driver.close()


def bench_schemas(count):
    """`count` schemas of MaskBench, evenly from all of them; none without the data."""
    files = sorted(Path(BENCH).glob("*.json")) if BENCH else []
    for path in files[::max(1, len(files) // count)][:count]:
        yield json.loads(path.read_text())["schema"]


# --- answers --------------------------------------------------------------------------------


def validator(schema):
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator) \
        if isinstance(schema, dict) else jsonschema.Draft202012Validator
    return kind(schema)


def check_answers(play, schema, count, seed):
    answer = play.ask(schema=schema, generate=count, seed=seed)
    if answer["rc"]:
        return 0
    for text in answer["generated"]:
        errors = [e.message[:200] for e in validator(schema).iter_errors(json.loads(text)) if e.validator not in LEFT_TO_READERS]
        assert not errors, f"{json.dumps(schema)[:500]}\n{text[:500]}\n{errors}"
    return len(answer["generated"])


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_answers_satisfy_their_schema(play, number):
    """Random walks through the masks, to the end."""
    assert check_answers(play, SCHEMAS[number], 40, number + 1) > 0


@pytest.mark.skipif(not BENCH, reason="skip: no data of MaskBench")
@pytest.mark.slow
def test_answers_satisfy_schemas_of_maskbench(play):
    done = 0
    for i, schema in enumerate(bench_schemas(2000)):
        try:
            done += check_answers(play, schema, 5, i + 1) > 0
        except (jsonschema.exceptions.SchemaError, jsonschema.exceptions._WrappedReferencingError):
            continue
    assert done > 1000


# --- masks ----------------------------------------------------------------------------------


class Tokenizer:
    eos_token_id = len(Play.TOKENS)
    bos_token_id = None
    tokens = Play.TOKENS + [b"<eos>"]
    special_token_ids = [len(Play.TOKENS)]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def tokenizer():
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokenizer()))


def in_string(text):
    """0: outside; 1: inside of a string; 2: inside of an escape."""
    state = 0
    i = 0
    while i < len(text):
        if state == 0:
            state = text[i] == '"'
        elif text[i] == "\\":
            width = 6 if text[i + 1:i + 2] == "u" else 2
            if i + width > len(text):
                return 2
            i += width - 1
        elif text[i] == '"':
            state = 0
        i += 1
    return int(state)


def explained(text, token):
    """Differences that both programs mean: what this one allows, the other one does, or reverse."""
    inside = in_string(text)
    if inside == 2:
        return "escapes"  # llguidance allows halves of surrogate pairs and refuses other things
    if b"\\" in token:
        return "escapes"  # strings with conditions are written in one way here
    blank = any(c in token for c in b" \t\r\n")
    if not inside and text[-1:] in (" ", "\t", "\r", "\n") or blank and (not inside or b'"' in token):
        return "white space"  # llguidance: anywhere, any amount
    tail = text.lower().rsplit(",", 1)[-1].rsplit("[", 1)[-1].rsplit(":", 1)[-1]
    if "\ufeff".encode().startswith(token):
        return "U+FEFF"  # a space in ECMAScript, and not in the Rust regex crate
    if not inside and "e" in tail and "r" not in tail and "l" not in tail:
        return "exponents"  # here at most 299
    return None


def masks_of(schema, tokenizer, paths):
    """The sets of allowed ids after each path; None: refused, or the path is not allowed."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_flexible": True})
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    if matcher.is_error():
        return None
    masks = []
    for path in paths:
        at = matcher.deep_copy()
        if not at.consume_tokens(list(path.encode())) or at.is_error():
            masks.append(None)
            continue
        bits = at.compute_bitmask()
        masks.append({i for i in range(len(Play.TOKENS)) if bits[i // 8] >> (i % 8) & 1})
    return masks


def compare(play, schema, tokenizer, seed, count):
    """(masks that were the same, those with explained differences, others as texts)."""
    texts = play.ask(schema=schema, generate=count, seed=seed)
    if texts["rc"] or not texts["generated"]:
        return None
    draw = random.Random(seed)
    paths = []
    for text in texts["generated"]:
        at = draw.randrange(len(text) + 1)
        paths.append(text[:at])
    theirs = masks_of(schema, tokenizer, paths)
    if theirs is None:
        return None
    mine = play.ask(schema=schema, paths=paths)["paths"]
    same, known, other = 0, {}, []
    for path, a, b in zip(paths, mine, theirs):
        if b is None:
            if "\\" in path or "\ufeff" in path:
                known["refused"] = known.get("refused", 0) + 1
            else:
                other.append((path[-60:], "refused by llguidance"))
            continue
        differences = {(path, Play.TOKENS[i]) for i in set(a["ids"]) ^ b}
        reasons = {explained(*d) for d in differences}
        if len(b) == 1 and b < set(a["ids"]):
            reasons = {"forced"}  # llguidance gives one token where the grammar leaves one text
        if not differences:
            same += 1
        elif None not in reasons:
            for reason in reasons:
                known[reason] = known.get(reason, 0) + 1
        else:
            other.append((path[-60:], sorted((t, Play.TOKENS.index(t) in a["ids"]) for p, t in differences
                                             if explained(p, t) is None)[:5]))
    return same, known, other


def compare_all(play, schemas, tokenizer, count):
    same, known, other, done = 0, {}, [], 0
    for i, schema in enumerate(schemas):
        result = compare(play, schema, tokenizer, i + 1, count)
        if result is None:
            continue
        done += 1
        same += result[0]
        other += [(i, *o) for o in result[2]]
        for reason, number in result[1].items():
            known[reason] = known.get(reason, 0) + number
    print(f"{done} schemas, {same} masks the same, others {known}")
    assert not other, other[:20]
    return done


def test_masks_are_those_of_llguidance(play, tokenizer):
    assert compare_all(play, SCHEMAS, tokenizer, 20) > len(SCHEMAS) - 3


@pytest.mark.skipif(not BENCH, reason="skip: no data of MaskBench")
@pytest.mark.slow
def test_masks_are_those_of_llguidance_on_maskbench(play, tokenizer):
    assert compare_all(play, bench_schemas(600), tokenizer, 20) >= 500


# --- the standard's own tests ---------------------------------------------------------------


def left_to_readers(kind, schema, data):
    """Is the instance invalid by keywords alone that are left to readers?"""
    errors = list(kind(schema).iter_errors(data))
    return bool(errors) and all(e.validator in LEFT_TO_READERS for e in errors)


@pytest.mark.skipif(not SUITE, reason="skip: no JSON-Schema-Test-Suite")
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_instance_belongs(play, draft):
    """Every schema is refused, or none of its invalid instances belongs.  Valid ones may be missing: those whose
    members stand in another order, or whose numbers are written otherwise.  UNENFORCED is left out."""
    folder = Path(SUITE) / "tests" / draft
    accepted = valid = 0
    for path in sorted(folder.rglob("*.json")):
        if path.stem in UNENFORCED:
            continue
        for group in json.loads(path.read_text()):
            texts = [json.dumps(case["data"], ensure_ascii=False) for case in group["tests"]]
            if any("\ud800" <= c <= "\udfff" for text in texts for c in text):
                continue
            answer = play.ask(schema=group["schema"], texts=texts)
            if answer["rc"]:
                continue
            for case, text, belongs in zip(group["tests"], texts, answer["texts"]):
                assert case["valid"] or not belongs or left_to_readers(DRAFTS[draft], group["schema"], case["data"]), \
                    f"{path.name}: {group['description']}: {case['description']}"
                valid += case["valid"]
                accepted += case["valid"] and belongs
    assert accepted > 0.9 * valid > 100
