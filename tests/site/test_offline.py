"""The site reads without network: formulas are made when it is built, and no page loads anything from elsewhere."""

import inspect
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = DOCS / "_build/html"
ELSEWHERE = re.compile(r"(https?:)?//")


def _formulas():
    """Every formula of the pages and of the docstrings, and whether it has lines of its own."""
    for path in [ROOT / "README.md", *(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.S)
        for block, line in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, re.S):
            yield path.name, block or line, bool(block)
    for path in (ROOT / "bilevel_optim").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r":math:`([^`]+)`", text):
            yield path.name, line, False
        for indent, block in re.findall(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*)?$)*)", text, re.M):
            for part in re.split(r"\n\s*\n", inspect.cleandoc(indent + block).strip()):
                yield path.name, part, True


@pytest.fixture(scope="module")
def renderer():
    pytest.importorskip("math_core")
    pytest.importorskip("docutils")
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        import mathml
    finally:
        sys.path.pop(0)
    return mathml.mathml


def test_every_formula_is_made_when_the_site_is_built(renderer):
    found = list(_formulas())
    assert len(found) > 300
    for name, tex, display in found:
        shown = re.sub(r"<[^>]+>", "", renderer(tex, display))
        assert not re.search(r"\\|&(?!\w+;)", shown), f"{name}: {tex} is shown as {shown}"


def test_a_formula_that_is_not_understood_stops_the_build(renderer):
    with pytest.raises(Exception, match="nabbla"):
        renderer(r"\nabbla f", False)


def test_lines_of_a_formula_are_aligned(renderer):
    shown = renderer("a &= b,\\\\\nc &= d.", True)
    assert shown.count("<mtr>") == 2
    assert shown.count("<mtd") == 4


def test_sources_of_pages_load_nothing_from_elsewhere():
    conf = (DOCS / "conf.py").read_text(encoding="utf-8")
    assert 'html_math_renderer = "mathml"' in conf
    assert "mathjax" not in conf
    assert '"write_computation_times": False' in conf  # sphinx-gallery's page of times has its scripts elsewhere
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:https?:)?//|!\[[^\]]*\]\((?:https?:)?//", text), path
    for path in (DOCS / "_static").glob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


@pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built")
def test_no_page_loads_anything_from_elsewhere():
    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            found = dict(attributes)
            if tag == "link" and found.get("rel") in ("canonical", "author", "license", "prev", "next", "search"):
                return  # names a page, loads nothing
            address = found.get("href") if tag == "link" else None if tag == "a" else found.get("src")
            if ELSEWHERE.match(address or ""):
                loaded.add((path.relative_to(SITE).as_posix(), address))

    loaded = set()
    for path in SITE.rglob("*.html"):
        Reader().feed(path.read_text(encoding="utf-8"))
    for path in (SITE / "_static").rglob("*.css"):
        for address in re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", path.read_text(encoding="utf-8")):
            if ELSEWHERE.match(address):
                loaded.add((path.relative_to(SITE).as_posix(), address))
    assert not loaded
