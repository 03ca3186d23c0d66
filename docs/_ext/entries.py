"""What the search is told: words that people type for a page, and an address for each entry of the page of errors."""

from __future__ import annotations

from docutils import nodes
from pages import WORDS
from sphinx import addnodes
from sphinx.transforms import SphinxTransform


def searched(said: list[str]) -> list[str]:
    """The words of an entry by which it is found: each message, and its parts between what differs."""
    parts = [part for words in said for part in words.split(" … ") if len(part) > 12]
    return list(dict.fromkeys([*said, *parts]))


def index(words: list[str], place: str) -> addnodes.index:
    """Main entries of the index, which the search shows first."""
    return addnodes.index(entries=[("single", word.replace(";", ","), place, "main", None) for word in words])


class Entries(SphinxTransform):
    """Puts an anchor, entries of the index and a link into each term of the errors, and the words of a page into it."""

    default_priority = 400  # before the index is made

    def apply(self, **_):
        """Do so for the page that is read."""
        name = self.env.docname
        if name in WORDS:
            section = next(self.document.findall(nodes.section))
            section.insert(1, index(WORDS[name].split(", "), section["ids"][0]))
        for term in self.document.findall(nodes.term) if name == "errors" else ():
            said = [literal.astext() for literal in term.findall(nodes.literal)]
            place = nodes.make_id(said[0])
            term["ids"].append(place)
            term += index(searched(said), place)
            term += nodes.reference("", "#", refid=place, classes=["headerlink"], reftitle="Link to this entry")


def again(_app, env, _added, _changed, _removed):
    """Read these pages in every build: the search index forgets the entries of pages that are not read."""
    return [name for name in (*WORDS, "errors") if name in env.found_docs]


def setup(app):
    """Add the transform."""
    app.add_transform(Entries)
    app.connect("env-get-outdated", again)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
