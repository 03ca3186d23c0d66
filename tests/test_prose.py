"""Docstrings and comments of the package and the recipes are plain English, as far as a program can see."""

import ast
import inspect
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("bilevel_optim", "recipes") for path in (ROOT / top).rglob("*.py"))
FOLDERS = sorted({path.parent.relative_to(ROOT).as_posix() for path in FILES})

OPENERS = ("What", "Whether", "Where", "How", "Of", "Which", "Whose", "That", "Those", "As")
WORDS = r"\b(anew|likewise|beside|alike|of wh(ich|ose)|whereof|is to be had|stands? for|what (is|it|was|they|are))\b"
LONGEST = 35  # words of a sentence
INDENTED = r"(?m)^ {4}.*"
NOT_PROSE = {
    r"(?m)^( *)\.\. (?:math|code).*(?:\n\1 +\S.*|\n *$)*": ".",  # blocks
    r"(?m)^=+(?: =+)+(?:\n.*\S.*)*": ".",  # tables
    r"(?m)^ *(?:>>>|\.\.\.).*$|^ *\w*:?$": ".",  # doctests; blank lines and headings end a sentence
    r"(?m)^[\w*, `.\[\]]+: ": ". ",  # names of arguments
    r":\w+:`[^`]*`|``[^`]*``|`[^`]*`": "C",  # code and formulas count as one word
}


def texts(path):
    """Lines and texts of docstrings and comments; the lines of one comment are joined."""
    for node in ast.walk(ast.parse(path.read_text())):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (docstring := ast.get_docstring(node, clean=False)):
            # Commands are indented in docstrings of modules; those of functions indent the texts of their arguments.
            module = isinstance(node, ast.Module)
            yield node.body[0].lineno, re.sub(INDENTED, ".", docstring) if module else inspect.cleandoc(docstring)
    start, block, column = 0, [], 0
    with path.open() as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                if token.start != (start + len(block), column):
                    yield start, " ".join(block)
                    (start, column), block = token.start, []
                block.append(token.string.lstrip("# "))
    yield start, " ".join(block)


def faults(text):
    """Descriptions of the rules that a docstring or comment breaks."""
    found = [f"opens with {word!r}" for word in text.split()[:1] if word in OPENERS]
    for pattern, replacement in NOT_PROSE.items():
        text = re.sub(pattern, replacement, text)
    text = " ".join(text.split())
    found += [f"says {match[0]!r}" for match in re.finditer(WORDS, text, re.IGNORECASE)]
    sentences = {sentence: len(sentence.split()) for sentence in re.split(r"(?<=[.;:!?]) ", text)}
    return found + [f"has a sentence of {n} words: {sentence}" for sentence, n in sentences.items() if n > LONGEST]


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_is_plain(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted((ROOT / folder).glob("*.py"))
        for line, text in texts(path)
        for fault in faults(text)
    ]
    assert not found, "\n".join(found)
