"""Every message of the package has an entry on the page of errors, and every entry is of a message."""

from pathlib import Path

import pytest

from .messages import Source, entries, first_words, matches

PAGE = (Path(__file__).parents[2] / "docs/errors.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def said():
    return Source().messages()


def test_every_message_has_an_entry(said):
    known = entries(PAGE)
    missing = {words: place for words, place in said.items() if not any(matches(entry, words) for entry in known)}
    lines = "\n\n".join(
        f"`{words}`\n: Why it appears ({place}). **Do:** what helps." for words, place in missing.items()
    )
    assert not missing, f"add to docs/errors.md, under the heading that fits:\n\n{lines}\n"


def test_every_entry_is_of_a_message(said):
    gone = [entry for entry in entries(PAGE) if not any(matches(entry, words) for words in said)]
    assert not gone, f"take out of docs/errors.md, or change to the new words: {gone}"


def test_messages_are_found_however_they_are_made(tmp_path):
    (tmp_path / "module.py").write_text(
        'LONG = "a constant of this module is said"\n'
        "def made(n):\n    return f'a function makes {n} of these'\n"
        "def all_of(x, checks, warnings):\n"
        '    checks.alert("key", LONG, x)\n'
        "    warnings.warn(made(3), stacklevel=2)\n"
        '    text = "one of two words" if x else "the other of two words"\n'
        '    checks.alert_if("key", text + " and more", x)\n'
        '    require("nu", x, x > 0)\n'
        '    raise ValueError(f"the value {x} is " "not good")\n'
    )
    source = Source(tmp_path)
    words = {first_words(text) for path, tree in source.trees.items() for _, text in _all(source, path, tree)}
    assert words >= {
        "a constant of this module is said",
        "a function makes … of these",
        "one of two words and more",
        "the other of two words and more",
        "Invalid … value: …",
        "the value … is not good",
    }


def _all(source, path, tree):
    from .messages import _with_scope

    for scope, node in _with_scope(tree):
        for text in source._said(node, path, scope):
            yield node, text


def test_an_entry_matches_only_its_own_messages():
    assert matches("the … must return a scalar", "the upper loss must return a scalar tensor, but")
    assert not matches("the … must return a scalar", "a loss must return a scalar")
    assert entries("`one`, `two …`\n: Cause.\n\n`three` is code\n") == ["one", "two …"]
