"""The reference has a place for every public name, and the site's tables say of every method what is true."""

import sys
from pathlib import Path

import pytest

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import methods

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    sys.path.insert(0, str(ROOT / "docs/_ext"))
    try:
        import pages
    finally:
        sys.path.pop(0)
    return pages


def test_every_public_name_is_in_the_reference(pages):
    missing = set(bo.__all__) - pages.documented() - {"__version__"}
    assert not missing, f"add {sorted(missing)} to REFERENCE in docs/_ext/pages.py"


def test_what_is_said_of_methods_is_said_of_methods(pages):
    for table in (pages.NOISE, pages.MEMORY):
        assert {name for names in table.values() for name in names} <= methods().keys()
    for cls in methods().values():
        page = pages.method_page(cls.__name__)
        assert cls.declared.when in page
        assert cls.declared.cost in page
        assert f'href="reference/{cls.__name__}.html"' in pages.table_with_filters()


def test_the_methods_that_know_their_terms_are_those_of_finite_sums(pages):
    assert set(pages.NOISE["finite sums"]) == {n for n, c in methods().items() if c.declared.data == "finite_sum"}


def test_verdicts_are_those_of_the_method(pages):
    assert "[`001-order-2`](../papers/index.md#001-order-2)" in pages.verdicts("F2SA")
    assert "RT-MLMC" in pages.verdicts("RTMLMC")
    assert "004-meta" not in pages.verdicts("iMAML")
    assert "`000-" in pages.verdicts("HOZOG")


def test_links_that_lead_out_of_the_folder_are_followed_or_named(pages):
    source, target = ROOT / "docs/x.md", ROOT / "docs/howto/x.md"
    text = "[a](../recipes/README.md#cost) [b](torch.md) [`c`](../recipes/compare.py) [d](https://x.y) [e](#here)"
    found = pages.localised(text, source, target)
    assert found == "[a](../papers/recipes.md#cost) [b](../torch.md) `c` [d](https://x.y) [e](#here)"


def test_pages_that_nobody_lists_are_found(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    (tmp_path / "index.md").write_text("```{toctree}\n:hidden:\n\nStart <start>\nchoosing\n```\n")
    (tmp_path / "choosing.md").write_text("```{toctree}\nmethods\n```\n")  # no index lists pages too
    for name in ("start", "gpu", "methods"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n")
    assert pages.unlisted() == "../gpu"


def _listed(pages):
    found = []
    for path in sorted(path for path in pages.DOCS.rglob("*.md") if path.parts[-2] not in ("reference", "papers")):
        found += pages.lists_of(path)
    return found


def test_every_page_is_in_one_list_of_contents(pages):
    found = _listed(pages)
    assert sorted(found) == sorted(set(found))


def test_the_main_bar_has_what_a_user_needs(pages):
    bar = pages.lists_of(ROOT / "docs/index.md")
    assert "papers/recipes" in bar
    assert "papers/index" not in bar
    assert len(bar) <= 9  # more would be behind a button, see header_links_before_dropdown


def test_a_side_bar_has_something(pages):
    assert {"start", "errors", "benchmarks"} <= set(pages.alone())
    assert not {"choosing", "howto/index"} & set(pages.alone())
    assert "html_sidebars = {name: [] for name in pages.alone()}" in (ROOT / "docs/conf.py").read_text()


def test_the_reference_is_grouped_by_kind_of_problem(pages):
    groups = pages.grouped()
    assert sorted(name for names in groups.values() for name in names) == sorted(methods())
    assert all(groups.values())
    assert "RSVRB" in groups["Many lower problems"]
    index = pages.reference_index()
    places = [index.index(f":caption: {title}\n") for title in ("The library", *groups, "The project")]
    assert places == sorted(places)
    assert index.index("papers/changelog") > places[-1]
