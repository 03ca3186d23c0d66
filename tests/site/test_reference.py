"""The reference has a place for every public name, and the site's tables are right about every method."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.fixture(scope="module")
def docstrings(pages):
    return pages.docstrings


@pytest.mark.usually("AID", "F2SA", "ITD", "MAML", "PAID", "SUSTAIN")  # the class's doctest runs the same lines
@pytest.mark.parametrize("name", methods())
def test_the_example_on_a_page_runs_and_prints_what_it_says(docstrings, name, capsys):
    code = docstrings.example(name)
    torch.set_default_dtype(torch.float32)
    exec(compile(code, name, "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert printed.replace(" ", "") in re.sub(r"[(), ]", "", code) or f"# {printed}" in code


@pytest.mark.parametrize("name", methods())
def test_the_example_on_a_page_is_short_and_names_the_method(docstrings, name):
    code = docstrings.example(name)
    compile(code, name, "exec")
    assert f"bo.{name}(" in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert max(map(len, code.splitlines())) <= 88


@pytest.mark.parametrize("name", methods())
def test_a_page_has_formula_example_cost_and_arguments_in_this_order(docstrings, name):
    lines = docstrings.arranged(name, ["FACTS"])
    text = "\n".join(lines)
    heads = [line.removeprefix(".. rubric:: ") for line in lines if line.startswith(".. rubric::")]
    assert heads[:3] == ["Example", "When, and what it needs", "Cost"]
    assert text.index("*Cost per step*") < text.index("FACTS") < text.index(".. rubric:: Arguments")
    assert "Args:" not in text
    assert ">>>" not in text
    said = {word for line in lines for word in re.findall(r"``(\w+)``", line) if re.match(r" *``\w+``", line)}
    entries = docstrings.parts_of(inspect.getdoc(methods()[name]) + "\n")[1]
    known = {word for names, _ in entries for word in names.split(", ")}
    assert {"upper", "lower"} <= known <= said


def test_arguments_have_types_and_those_of_all_methods_are_folded(docstrings):
    lines = docstrings.arguments(bo.AID)
    fold = lines.index(".. dropdown:: Arguments that methods share")
    assert "``damping`` : float" in lines[:fold]
    assert "    ``check_finite`` : bool" in lines[fold:]
    assert docstrings.type_of("Callable[[Any], Optimizer] | None") == "function or None"
    assert docstrings.signature(None, "class", "", bo.AID, None, "(everything)", None)[0] == (
        "(upper, lower, *, lr, lower_lr, lower_steps, **options)"
    )


def test_every_public_name_is_in_the_reference(pages):
    missing = set(bo.__all__) - pages.documented() - {"__version__"}
    assert not missing, f"add {sorted(missing)} to REFERENCE in docs/_ext/pages.py"


def test_pages_and_tables_name_existing_methods(pages):
    for table in (pages.NOISE, pages.MEMORY):
        assert {name for names in table.values() for name in names} <= methods().keys()
    for cls in methods().values():
        page = pages.method_page(cls.__name__)
        assert cls.declared.when in page
        assert f"      - {cls.declared.cost}" in pages.facts_of(cls.__name__)
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


def test_the_words_that_people_type_are_those_of_one_page(pages):
    typed = [(word, name) for name, words in pages.WORDS.items() for word in words.split(", ")]
    assert len(typed) == len({word for word, _ in typed})
    assert all(word == word.lower() for word, _ in typed)  # as Sphinx has them in its index
    for name in pages.WORDS:
        path = f"gallery/{name.removeprefix('auto_gallery/')}.py" if name.startswith("auto_gallery") else f"{name}.md"
        assert (pages.DOCS / path).exists(), name
    first = dict(typed)
    assert first["noisy labels"] == "auto_gallery/plot_01_data_cleaning"
    assert first["multiple gpus"] == "howto/ddp"
    assert first["torch.compile"] == "speed"


@pytest.fixture(scope="module")
def entries_of_a_page(pages):
    """Return the index entries that the extension `entries` makes of a page with one section and one term."""
    pytest.importorskip("sphinx")
    from types import SimpleNamespace

    from docutils import nodes, utils

    sys.path.insert(0, str(ROOT / "docs/_ext"))
    try:
        import entries
    finally:
        sys.path.pop(0)

    def read(name, said):
        document = utils.new_document(name)
        section = nodes.section("", nodes.title("", "A page"), ids=["a-page"])
        section += nodes.definition_list_item("", nodes.term("", "", *(nodes.literal("", words) for words in said)))
        document += section
        document.settings.env = SimpleNamespace(docname=name)
        entries.Entries(document).apply()
        found = [entry for node in document.findall(entries.addnodes.index) for entry in node["entries"]]
        return {words: place for _, words, place, main, _ in found if main == "main"}, document

    return read


def test_the_search_is_told_the_words_of_a_page(entries_of_a_page):
    found, _ = entries_of_a_page("speed", ["a term"])
    assert found["torch.compile"] == "a-page"  # not an empty anchor, from which no summary can be made
    assert "a term" not in found
    assert not entries_of_a_page("security", ["a term"])[0]


def test_the_search_finds_each_error_by_its_words(entries_of_a_page):
    found, document = entries_of_a_page("errors", ["the … must return a scalar tensor", "another; too"])
    place = "the-must-return-a-scalar-tensor"
    assert found["must return a scalar tensor"] == found["the … must return a scalar tensor"] == place
    assert found["another, too"] == place
    assert f'ids="{place}"' in str(document)
    assert f'refid="{place}"' in str(document)


def test_each_entry_of_the_errors_has_an_address_of_its_own():
    pytest.importorskip("docutils")
    from docutils import nodes

    from .messages import entries

    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    places = [nodes.make_id(line) for line in entries(page)]
    assert len(places) > 150
    assert all(places)
    assert len(places) == len(set(places))


def test_the_glossary_has_the_words_and_is_linked(pages):
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    for word in ("Upper and lower", "nu", "lambda", "Spread", "T", "Q", "hvp", "jvp"):
        assert f"\n## {word}\n" in text
    assert "glossary" in pages.lists_of(ROOT / "docs/explain/index.md")
    for name in ("start", "methods", "diagnostics", "explain/penalty"):
        assert "glossary.md" in (ROOT / f"docs/{name}.md").read_text(encoding="utf-8"), name
    assert "(:doc:`/glossary`)" in pages.facts_of("AID")[-1]


CARD = """
.. raw:: html

    <div class="sphx-glr-thumbcontainer" tooltip="x">

.. only:: html

  .. image:: /auto_gallery/images/thumb/sphx_glr_{stem}_thumb.png
    :alt:

  :doc:`/auto_gallery/{stem}`

.. raw:: html

      <div class="sphx-glr-thumbnail-title">A title</div>
    </div>

"""


def test_the_gallery_has_sections(pages):
    cards = "".join(CARD.replace("{stem}", stem) for stem in pages.examples())
    opening = '\n.. raw:: html\n\n    <div class="sphx-glr-thumbnails">\n'
    page = f"Gallery\n=======\n{opening}{cards}\n.. raw:: html\n\n    </div>\n\n.. toctree::\n   :hidden:\n"
    found = pages.in_sections(page)
    numbers = [int(number) for number in re.findall(r":doc:`/auto_gallery/plot_(\d+)_", found)]
    assert numbers == [number for _, _, section in pages.SECTIONS for number in section]
    assert found.count('class="sphx-glr-thumbnails"') == len(pages.SECTIONS)
    assert ":alt: Find wrong labels" in found
    assert not re.search(r":alt: *$", found, re.M)
    assert found.endswith(".. toctree::\n   :hidden:\n")
    another = cards + CARD.replace("{stem}", "plot_99_another")
    with pytest.raises(ValueError, match=r"\[99\] are in no section"):
        pages.in_sections(page.replace(cards, another))


def test_a_button_downloads_an_example_as_a_notebook(pages):
    link = ":ref:`Go to the end <x>`\n        to download the full example code.\n"
    note = f".. only:: html\n\n    .. note::\n\n        {link}"
    line = ".. GENERATED FROM PYTHON SOURCE LINES 9-29\n"
    found = pages.with_button(f"{note}\nTitle\n=====\n\n{line}\ncode\n\n{line}", "plot_01_data_cleaning")
    assert "Go to the end" not in found
    assert found.count(":download:`Download as a notebook <plot_01_data_cleaning.ipynb>`") == 1
    assert found.index("=====") < found.index(":download:") < found.index("GENERATED")


def test_choosing_agrees_with_the_readme(pages):
    """The methods that the README names come first in the table here, and are links in the text."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("and which method")[1]
    named = set(re.findall(r"`(\w+)`", section))
    assert len(pages.FIRST) == 8
    assert set(pages.FIRST) <= named
    questions = (ROOT / "docs/choosing.md").read_text(encoding="utf-8").split("## All methods")[0]
    for name in named - {"FirstOrder"}:
        assert f"[{name}](reference/{name}.md)" in questions
    assert pages.table_with_filters().count(" data-first>") == 8
