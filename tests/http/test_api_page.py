"""The examples of docs/API.md are answered: each is a body of the route that the comment before it names."""
import json
import re

import pytest
import requests
from conftest import ROOT

PAGE = (ROOT / "docs/API.md").read_text()
EXAMPLES = re.findall(r"<!-- test: POST (\S+) -->\n```json\n(.*?)```", PAGE, re.S)


def test_every_example_is_marked():
    assert len(EXAMPLES) == PAGE.count("```json") >= 8


@pytest.mark.parametrize("route, body", EXAMPLES, ids=[f"{i} {route}" for i, (route, _) in enumerate(EXAMPLES)])
def test_example_is_answered(shared, route, body):
    r = requests.post(f"{shared.url}{route}", json=json.loads(body), timeout=60)
    assert r.status_code == 200, r.text
