"""Docstrings and comments of the package are plain English, as far as a program can see."""

import ast
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "bilevel_optim"
FOLDERS = sorted({path.parent.name for path in PACKAGE.glob("*/*.py")})

OPENERS = ("What", "Whether", "Where", "How", "Of", "Which", "Whose", "That", "Those", "As")
WORDS = r"\b(anew|likewise|beside|alike|of wh(ich|ose)|whereof|is to be had|stands? for|what (is|it|was|they|are))\b"
LONGEST = 35  # words of a sentence
NOT_PROSE = {
    r"(?m)^( *)\.\. (?:math|code).*(?:\n\1 +\S.*|\n *$)*": ".",  # blocks
    r"(?m)^ *(?:>>>|\.\.\.).*$|^ *\w*:?$": ".",  # doctests; blank lines and headings end a sentence
    r"(?m)^[\w*, `.\[\]]+: ": ". ",  # names of arguments
    r":\w+:`[^`]*`|``[^`]*``|`[^`]*`": "C",  # code and formulas count as one word
}


def texts(path):
    """Lines and texts of docstrings and comments; the lines of one comment are joined."""
    for node in ast.walk(ast.parse(path.read_text())):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring
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


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_prose_is_plain(folder):
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {fault}"
        for path in sorted((PACKAGE / folder).glob("**/*.py" if folder else "*.py"))
        for line, text in texts(path)
        for fault in faults(text)
    ]
    assert not found, "\n".join(found)
