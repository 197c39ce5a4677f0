"""Tests that the documents name files, flags and sections that exist."""
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench/results").rglob("*.md")])


def anchors(page):
    """The anchors of a page's headings, as the usual renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = {name for name in re.findall(r"`([a-z]+/[A-Za-z0-9_/.]+)`", text) if not name.endswith("/")}
    assert len(names) > 30
    missing = [name for name in sorted(names) if not (ROOT / name).exists()]
    assert not missing
