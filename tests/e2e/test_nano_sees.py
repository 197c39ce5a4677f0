"""The bundled model that sees: it reads pictures that it was not trained with, and with a quarter of the cache it still knows a picture
after other talk."""
import base64
import pathlib

import pytest

from conftest import Daemon

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "bundled/keepd-nano-sees"
ASKED = {"sign": {"What does the sign say?": "0973", "What colour is the frame of the sign?": "yellow"},
         "form": {"Which city is on the form?": "DELHI", "Which number is on the form?": "552", "What name is on the form?": "CARLA"},
         "bars": {"Which bar is the lowest?": "the yellow one", "How high is the blue bar?": "4"}}
TALK = ["A pleasant roof stands behind the path. It is quiet in the evening.", "Many painters eat near the fountain from time to time.",
        "The old bridge crosses the river. The visitors rest after lunch.", "A wooden ladder meets the wall of the kitchen."] * 8


@pytest.fixture(scope="module")
def seeing():
    d = Daemon("--model", str(MODEL))
    yield d
    assert d.stop() == 0


def shown(kind, question):
    url = "data:image/png;base64," + base64.b64encode((ROOT / f"tests/data/pictures/{kind}.png").read_bytes()).decode()
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]}


@pytest.mark.parametrize("kind", ASKED)
def test_at_once(seeing, kind):
    for question, answer in ASKED[kind].items():
        assert seeing.chat([shown(kind, question)], max_tokens=14, temperature=0)["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize("kind", ASKED)
def test_after_talk_with_a_quarter(seeing, kind):
    first, *others = ASKED[kind]
    messages = [shown(kind, first), {"role": "assistant", "content": ASKED[kind][first]}]
    for text in TALK:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "That sounds nice."}]
    for question in others:
        answer = seeing.chat([*messages, {"role": "user", "content": question}], max_tokens=14, temperature=0,
                             kv={"policy": "global", "budget": 256, "report": "lengths"})
        assert answer["usage"]["prompt_tokens"] > 900 and answer["usage"]["kv_details"]["evicted_entries"]
        assert answer["choices"][0]["message"]["content"] == ASKED[kind][question]
