"""What the site makes by itself: reference pages, the table with filters, copies of documents that lie elsewhere."""

from __future__ import annotations

import html
import re
import shutil
import warnings
from os.path import relpath
from pathlib import Path

import docstrings
import torch
from method_tables import COLUMNS

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import REGISTRY, MethodInfo, methods

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Documents of the repository that are pages of the site, and their place under docs/.
COPIED = {
    "recipes/papers/RESULTS.md": "papers/index.md",
    "recipes/few_shot/README.md": "papers/few_shot.md",
    "recipes/README.md": "papers/recipes.md",
    "CHANGELOG.md": "papers/changelog.md",
    "CONTRIBUTING.md": "papers/contributing.md",
    "README.md": "index.md",
}

MORE = {"papers/recipes.md": "\n```{toctree}\n:hidden:\n\nfew_shot\nPapers <index>\n```\n"}

# What a method defines for the base class: described there, once.
SHARED = sorted(name for name in dir(bo.BilevelOptimizer) if name[0] != "_")

# The public names that have no page of a method: title, what the page says first, names.
REFERENCE = {
    "optimizer": (
        "BilevelOptimizer",
        "What every method can do: `step`, `backward`, `run`, `compile`, `metrics`, `adapt`, and saving.",
        ("BilevelOptimizer", "BilevelWarning", "DerivativeError", "NonFiniteError", "RankError"),
    ),
    "objective": (
        "Objective and other data",
        "A loss with its data: a step draws as many batches as the method needs.",
        ("Objective", "FiniteSum"),
    ),
    "tasks": ("Tasks", "Many lower problems: where their data come from.", ("TensorTasks", "TaskSampler")),
    "checking": (
        "Checking and suggesting",
        "Compare an estimate with an independent reference ([how to](../checking.md)).",
        ("check_hypergradient", "HypergradientReport", "GradcheckError", "suggest", "Suggestion", "SuggestionRow"),
    ),
    "hypergradient": (
        "Estimators as functions",
        "`bilevel_optim.hypergradient`: estimators without an optimizer, for research that wants only them.",
        ("hypergradient", "Oracle", "Vector", "finite_difference"),
    ),
    "solve": (
        "A lower problem as a layer",
        "The solution of a lower problem as a differentiable operation ([how to](../howto/layer.md)).",
        ("solve",),
    ),
    "linear": (
        "Linear solvers",
        "`bilevel_optim.linear`: solvers of $Hv = b$ from products with H.",
        ("linear",),
    ),
    "other": (
        "Other optimizers and helpers",
        "Single-level optimizers, a lower solver for noisy gradients, probabilities of tasks.",
        ("RestartedAGD", "AGD", "UniformIterate", "epoch_sgd", "importance_probabilities"),
    ),
}

# The methods by kind of problem, in the reference and in the table of all. One that remembers each task is for many.
MANY = "Many lower problems"
GROUPS = {
    "One lower problem": ("implicit", "unrolled", "penalty", "restarted", "control"),
    "Small batches": ("stochastic", "tracked"),
    "No derivative": ("zeroth-order",),
    MANY: ("contextual",),
    "Few-shot learning": ("meta",),
    "One loss, minimax": ("minimax",),
}

# The methods that the table shows first: those of the README. The others are behind a button.
FIRST = ("AID", "ITD", "F2SA", "SOBA", "PZOBO", "RSVRB", "MAML", "RAGDA")

# The gallery in sections: title, what it is about, examples by number.
SECTIONS = (
    ("Data", "Which examples to trust, how much of each kind, and which few would do.", (1, 5, 10, 4)),
    ("Hyper-parameters", "Many at once, by gradient instead of by search.", (2, 13, 3)),
    ("Many lower problems", "Tasks and users that share what is learned.", (6, 9)),
    ("Minimax and saddle points", "One loss for two players, and points where hypergradients vanish.", (7, 8)),
    ("Right and fast", "Is the hypergradient right, and how steps are compiled.", (11, 12)),
)

# Which panels of its figure are the picture on the card of an example. The first, if it is not named.
PANEL = {1: (1,), 2: (1,), 3: (0, 1, 2, 3), 4: range(20), 6: (1,), 9: (1,), 13: (2,)}

# What the table of all methods says beside what they declare. Noise: what the gradients may be.
NOISE = {
    "full batches": ("BOME", "RAHGD", "PRAHGD", "PAID", "BA", "iMCN", "RAGDA", "PRAGDA"),
    "finite sums": ("SABA", "SRBA"),
}
MEMORY = {
    "T graphs": ("ITD", "MAML", "ANIL"),
    "copies of y": ("F2SA", "PZOBO", "HOZOG", "ESMAML"),
    "matrices": ("SVRB", "STABLE"),
    "a row for each task": ("RSVRB", "BSVRB"),
    "all batches": ("SABA",),
}
FILTERS = {"derivatives": "Second derivatives", "tasks": "Tasks", "noise": "Gradients", "memory": "Memory"}

# What people type into the search, where a page says it in other words. The page comes first among what is found.
WORDS = {
    "auto_gallery/plot_01_data_cleaning": "noisy labels, label noise, wrong labels, clean labels, reweight examples",
    "auto_gallery/plot_02_cnn_hyperparameters": "tune a network, hyper-parameters of a cnn",
    "auto_gallery/plot_05_class_weights": "imbalanced classes, class imbalance, rare classes, long tail",
    "auto_gallery/plot_06_few_shot": "few-shot learning, meta-learning, maml example",
    "auto_gallery/plot_10_data_mixing": "data mixing, domain weights, mixture of data",
    "auto_gallery/plot_13_penalty_per_pixel": "ridge per feature, regularization per feature",
    "checking": "check gradient, gradcheck, is the gradient right",
    "choosing": "which method, which optimizer, mini-batches, compare methods",
    "glossary": "inner, outer, inner loop, outer loop, inner problem, outer problem, meta-gradient",
    "howto/batchnorm": "batch normalization, batchnorm, dropout",
    "howto/checkpoints": "resume, resume training, save and load, checkpoint",
    "howto/compile": "compile fallback, why does compile fall back, graph break, fullgraph, eager steps",
    "howto/data_mixing": "data mixture, language model, pretraining, doremi, my own text files",
    "howto/ddp": "multiple gpus, 2 gpus, several gpus, multi-gpu, torchrun, distributed training, ddp, fsdp",
    "howto/hyperparameters": "weight decay per layer, hyperparameter tuning, tune weight decay, retrain",
    "howto/lightning": "lightning, two loaders, combinedloader",
    "howto/memory": "out of memory, cuda out of memory, how much memory, gradient checkpointing",
    "howto/mixed_precision": "amp, autocast, bfloat16",
    "howto/other_optimizers": "adam for both levels, adam, momentum, learning rate schedule, gradient clipping",
    "howto/wrong_labels": "my own data, imagefolder, dataset with an index, find mislabeled examples, clean my labels, "
    "label errors, confident learning, cleanlab, loss correction, audit labels",
    "speed": "torch.compile, compile, cuda graphs, faster steps",
    "suggest": "learning rate, choose nu, default settings",
}


def quiet(_conf, _name):
    """Before each example: what another one has set is undone, and a warning of the library is an error."""
    torch.set_default_dtype(torch.float32)
    warnings.filterwarnings("error", category=bo.BilevelWarning)


def _in(table: dict[str, tuple[str, ...]], name: str, otherwise: str) -> str:
    return next((value for value, names in table.items() if name in names), otherwise)


def facts(name: str, method: MethodInfo) -> dict[str, str]:
    """What the filters ask of a method."""
    return {
        "derivatives": "needed" if method.second_order else "not needed",
        "tasks": {"stacked": "yes", "rows": "remembers each", "required": "needs them", "none": "no"}[method.tasks],
        "noise": _in(NOISE, name, "full or sampled"),
        "memory": _in(MEMORY, name, "one graph"),
    }


def table_with_filters() -> str:
    """HTML: one row for each method, under its kind of problem, and a choice for each filter."""
    rows = {name: facts(name, cls.declared) for name, cls in REGISTRY.items()}
    parts = ['<div class="method-filters" role="group" aria-label="Show methods with">']
    for key, title in FILTERS.items():
        values = sorted({row[key] for row in rows.values()})
        choices = "".join(f"<option>{value}</option>" for value in values)
        parts.append(f'<label>{title} <select data-key="{key}"><option value="">any</option>{choices}</select></label>')
    parts.append('<output class="method-count"></output></div>')
    head = "".join(f"<th>{title}</th>" for title in ("Method", "When", *FILTERS.values()))
    parts.append(
        f'<div class="pst-scrollable-table-container"><table class="table method-table"><thead><tr>{head}</tr></thead>'
    )
    for title, names in grouped().items():
        parts.append(f'<tbody><tr class="method-group"><th colspan="{2 + len(FILTERS)}">{title}</th></tr>')
        for name in sorted(names, key=lambda name: name not in FIRST):
            data = "".join(f' data-{key}="{value}"' for key, value in rows[name].items()) + " data-first" * (
                name in FIRST
            )
            cells = "".join(f"<td>{value}</td>" for value in rows[name].values())
            link = f'<a href="reference/{name}.html"><code>{name}</code></a>'
            parts.append(f"<tr{data}><td>{link}</td><td>{html.escape(REGISTRY[name].declared.when)}</td>{cells}</tr>")
        parts.append("</tbody>")
    button = f'<button class="btn btn-outline-primary method-all" hidden>Show all {len(rows)} methods</button>'
    return "\n".join([*parts, "</table></div>", button])


def examples() -> dict[str, tuple[str, str]]:
    """The gallery: for each example its title and its source."""
    found = {}
    for path in sorted((DOCS / "gallery").glob("plot_*.py")):
        text = path.read_text(encoding="utf-8")
        found[path.stem] = (re.search(r'^r?"""\n?(.+)', text)[1], text)
    return found


def gallery_links(name: str, up: str = "../") -> str:
    """Cards of the examples that use a public name."""
    cards = [
        f":::{{grid-item-card}} {title}\n:link: {up}auto_gallery/{stem}\n:link-type: doc\n"
        f":img-top: {up}auto_gallery/images/thumb/sphx_glr_{stem}_thumb.png\n:img-alt: {title}\n:::"
        for stem, (title, text) in examples().items()
        if re.search(rf"\bbo\.{name}\b", text)
    ]
    if not cards:
        return ""
    return "## In the gallery\n\n::::{grid} 1 2 3 3\n:gutter: 2\n\n" + "\n\n".join(cards) + "\n\n::::\n"


def verdicts(name: str) -> str:
    """Rows of the papers' experiments whose claim names a method."""
    text = (ROOT / "recipes/papers/RESULTS.md").read_text(encoding="utf-8")
    names = {name, {"RTMLMC": "RT-MLMC", "DLSGD": "DL-SGD", "ESMAML": "ES-MAML"}.get(name, name)}
    found, columns = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "claim" in cells and "verdict" in cells:
            columns = cells
        elif len(cells) == len(columns) > 2:
            row = dict(zip(columns, cells, strict=True))
            words = set(re.findall(r"[\w-]+", re.sub(r"(?<=[A-Z])-[12345]\b", "", row["claim"])))
            if names & words:
                first = cells[0].replace("](#", "](../papers/index.md#")
                found.append(f"| {first} | {row['claim']} | {row['verdict']} |")
    if not found:
        return ""
    head = "| experiment | claim of the paper | verdict here |\n|---|---|---|\n"
    return "## Its paper's claims, tested\n\n" + head + "\n".join(found) + "\n\n[All experiments](../papers/index.md)\n"


def facts_of(name: str) -> list[str]:
    """The table of facts on the page of a method, in reStructuredText: its cost in symbols, and what it needs."""
    declared = methods()[name].declared
    rows = [(title, column(declared)) for title, column in COLUMNS.items() if title != "when"]
    rows[0] = ("in symbols", rows[0][1])
    rows += [
        (FILTERS[key].lower(), value) for key, value in facts(name, declared).items() if key in ("noise", "memory")
    ]
    if declared.lower_optimizer != "any":
        rows.append(("lower_optimizer", declared.lower_optimizer))
    rows.append(("compiled by ``compile``", declared.uncaptured or ("the estimate" if declared.host_update else "yes")))
    rows.append(("family", declared.family))
    lines = [".. list-table::", "    :widths: 30 70", ""]
    for title, value in rows:
        value = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r"`\1 <\2>`__", value)
        lines += [f"    * - {title}", f"      - {value}"]
    return [
        *lines,
        "",
        "T is ``lower_steps``; an hvp and a jvp are products of second derivatives with a vector (:doc:`/glossary`). "
        "All methods: :doc:`/methods`.",
    ]


def arrange(_app, what, _name, value, _options, lines: list[str]) -> None:
    """Put the docstring of a method into the order of its page, before napoleon reads it."""
    if what == "class" and value in methods().values():
        lines[:] = docstrings.arranged(value.__name__, facts_of(value.__name__))


def method_page(name: str) -> str:
    """The reference page of a method."""
    declared = methods()[name].declared
    return (
        f"# {name}\n\n**When:** {declared.when}.\n\n"
        f"```{{eval-rst}}\n.. autoclass:: bilevel_optim.{name}\n   :members:\n   :inherited-members: BilevelOptimizer\n"
        f"   :exclude-members: {', '.join(SHARED)}\n```\n\n"
        "What it shares with every method, such as `step` and `state_dict`, is on the page of "
        "[BilevelOptimizer](optimizer.md).\n\n" + "\n".join(filter(None, (gallery_links(name), verdicts(name))))
    )


def reference_page(key: str) -> str:
    """A reference page of public names that are no methods."""
    title, first, names = REFERENCE[key]
    parts = [f"# {title}\n\n{first}\n"]
    for name in names:
        value = getattr(bo, name, None)
        if value is None:
            continue
        path = f"bilevel_optim.{name}"
        if type(value).__name__ == "module":
            parts.append(f"```{{eval-rst}}\n.. automodule:: {path}\n   :members:\n   :imported-members:\n```\n")
        else:
            kind = "autoclass" if isinstance(value, type) else "autofunction"
            members = "\n   :members:" if kind == "autoclass" else ""
            members += "\n   :inherited-members:" * (name == "Oracle")  # what it says of itself is of a private class
            parts.append(f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: {path}{members}\n```\n")
        parts.append(gallery_links(name).replace("## In", "### In"))
    return "\n".join(filter(None, parts))


def documented() -> set[str]:
    """The public names that have a place in the reference."""
    return set(methods()) | {name for _, _, names in REFERENCE.values() for name in names}


def grouped() -> dict[str, list[str]]:
    """The names of the methods by kind of problem."""
    found = {title: [] for title in GROUPS}
    for name, cls in REGISTRY.items():
        kinds = (title for title, families in GROUPS.items() if cls.declared.family in families)
        found[MANY if cls.declared.tasks == "rows" else next(kinds)].append(name)
    return found


def contents(title: str, names: list[str]) -> str:
    """A list of contents that only the side bar shows, under its title."""
    return f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n```\n"


def reference_index() -> str:
    """The contents of the reference: what all share, the methods by kind of problem, and what is about the project."""
    parts = ["# Reference\n\nA page for each method, and for what they take. `help(bo.AID)` has the same text.\n"]
    parts.append("## The library\n\n" + "\n".join(f"* [{v[0]}]({k}.md): {v[1]}" for k, v in REFERENCE.items()))
    parts.append(contents("The library", [*REFERENCE]))
    for title, names in grouped().items():
        lines = "\n".join(f"* [{name}]({name}.md): {REGISTRY[name].declared.when}" for name in names)
        parts.append(f"## {title}\n\n{lines}\n\n{contents(title, names)}")
    parts.append(contents("The project", ["../papers/changelog", "../papers/contributing"]))
    return "\n".join(parts)


def with_curves(text: str) -> str:
    """The papers' experiments, each with the picture of its curves."""

    def picture(found: re.Match[str]) -> str:
        curves = f"results/{found[1]}/curves.png"
        there = (ROOT / "recipes/papers" / curves).exists()  # what is judged from another's records has none
        return f"{found[0]}\n![Curves of {found[1]}]({curves})\n" if there else found[0]

    return re.sub(r"^### (\d{3}-\S+)\n", picture, text, flags=re.M)


def _put(path: Path, text: str) -> None:
    """Write a page if it has changed, so that Sphinx reads it again only then."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write(docs: Path) -> None:
    """Make all pages that are made."""
    made = {f"reference/{name}.md": method_page(name) for name in methods()}
    made |= {f"reference/{key}.md": reference_page(key) for key in REFERENCE}
    made["reference/index.md"] = reference_index()
    for source, target in COPIED.items():
        if source != "README.md":
            text = (ROOT / source).read_text(encoding="utf-8") + MORE.get(target, "")
            made[target] = localised(with_curves(text) if "RESULTS" in source else text, ROOT / source, docs / target)
    for name, text in made.items():
        _put(docs / name, text)
    for old in (docs / "reference").glob("*.md"):
        if f"reference/{old.name}" not in made:
            old.unlink()


def localised(text: str, source: Path, target: Path) -> str:
    """A document with its links as they are seen from another place; what is no page is named, without a link."""

    def link(found: re.Match[str]) -> str:
        mark, label, where = found.groups()
        path, _, anchor = where.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        file = (source.parent / path).resolve()
        inside = file.relative_to(ROOT).as_posix()
        anchor = f"#{anchor}" * bool(anchor)
        if inside in COPIED:
            return f"[{label}]({relpath(DOCS / COPIED[inside], target.parent)}{anchor})"
        if file.suffix == ".png":
            if not file.is_relative_to(DOCS):
                kept = DOCS / "papers" / "pictures" / f"{file.parent.name}-{file.name}"
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, kept)
                file = kept
            return f"{mark}[{label}]({relpath(file, target.parent)})"
        if file.is_relative_to(DOCS) and file.suffix == ".md":
            return f"[{label}]({relpath(file, target.parent)}{anchor})"
        return label if label.startswith("`") else f"{label} (`{inside}`)"

    return re.sub(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, text)


def join_names(_app, _what, _name, _object, _options, lines: list[str]) -> None:
    """Put the names of several arguments into one line: napoleon reads no more of them."""
    for i in reversed(range(len(lines) - 1)):
        if re.fullmatch(r"\s{4,}[\w, ]+,", lines[i]) and re.match(r"\s+[\w, ]+:", lines[i + 1]):
            lines[i : i + 2] = [f"{lines[i]} {lines[i + 1].strip()}"]


def public_name(app, env, node, content):
    """Follow a name in a docstring of a module to the public name of the package."""
    domain = env.get_domain("py")
    name = node.get("reftarget", "").removeprefix("bo.")  # as it is imported in examples
    for target in (f"bilevel_optim.{name}", f"{node.get('py:module')}.{name}"):
        if node.get("refdomain") == "py" and target in domain.objects:
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)
    return None


def lists_of(path: Path) -> list[str]:
    """What the lists of contents of a page name, from docs/ on; an entry may have a title, as in ``Start <start>``."""
    found = []
    for block in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
        for entry in re.findall(r"^(?!:)(?:.*<)?([\w./-]+)>?$", block, re.M):
            found.append(relpath(path.parent / entry, DOCS))
    return found


def unlisted() -> str:
    """Pages of this folder that no list of contents names, so that a new page is found before somebody lists it."""
    pages = [path for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    listed = {name for path in pages for name in lists_of(path)} | {"index"}
    return "\n".join(f"../{path.stem}" for path in sorted(DOCS.glob("*.md")) if path.stem not in listed)


def alone() -> list[str]:
    """Pages of the main bar that have no list of contents: a side bar beside them would be empty."""
    pages = [name for name in lists_of(DOCS / "index.md") if (DOCS / f"{name}.md").exists()]
    return [name for name in pages if not lists_of(DOCS / f"{name}.md")]


def in_sections(text: str) -> str:
    """The index of the gallery with a heading above the cards of each section, and titles for its pictures."""
    card = re.compile(r'\n\.\. raw:: html\n\n    <div class="sphx-glr-thumbcontainer".*?    </div>\n', re.S)
    cards = {int(re.search(r"/plot_(\d+)_", found)[1]): found for found in card.findall(text)}
    for stem, (title, _) in examples().items():
        number = int(stem.split("_")[1])
        cards[number] = re.sub(r"(_thumb\.png\n\s+:alt:) *$", rf"\1 {title}", cards[number], flags=re.M)
    opening, closing = text.index('\n.. raw:: html\n\n    <div class="sphx-glr-thumbnails"'), text.index(".. toctree::")
    parts = [text[:opening].replace(TAGS, "")]
    for title, about, numbers in SECTIONS:
        div = '.. raw:: html\n\n    <div class="sphx-glr-thumbnails">\n'
        parts.append(f"{title}\n{'-' * len(title)}\n\n{about}\n\n{div}")
        parts += [cards.pop(number) for number in numbers]
        parts.append(".. raw:: html\n\n    </div>\n")
    if cards:
        raise ValueError(f"examples {sorted(cards)} are in no section: add them to SECTIONS in docs/_ext/pages.py")
    return "\n".join([*parts, text[closing:]])


TAGS = """.. raw:: html

  <div id='sg-tag-list' class='sphx-glr-tag-list'></div>
"""


def with_button(text: str, stem: str) -> str:
    """The page of an example with buttons that download it, above its program instead of a note."""
    text = re.sub(
        r"\.\. only:: html\n\n    \.\. note::\n.*?full example code\.?[^\n]*\n", "", text, count=1, flags=re.S
    )
    buttons = (
        ".. container:: example-downloads\n\n"
        f"    :download:`Download as a notebook <{stem}.ipynb>` :download:`as a program <{stem}.py>`\n\n"
    )
    return text.replace(".. GENERATED FROM PYTHON SOURCE LINES", buttons + ".. GENERATED FROM PYTHON SOURCE LINES", 1)


PANELS = DOCS / "auto_gallery/images/panels"


def pictures(block, variables, conf):
    """Keep one panel of the figure as the picture of its card; then do as sphinx-gallery does."""
    import matplotlib.pyplot as plt
    from matplotlib.transforms import Bbox
    from sphinx_gallery.scrapers import matplotlib_scraper

    for number in plt.get_fignums():
        figure = plt.figure(number)
        figure.canvas.draw()
        stem = Path(variables["src_file"]).stem
        chosen = [figure.axes[k] for k in PANEL.get(int(stem.split("_")[1]), (0,))]
        box = Bbox.union([axis.get_tightbbox() for axis in chosen])
        PANELS.mkdir(parents=True, exist_ok=True)
        inches = box.transformed(figure.dpi_scale_trans.inverted()).padded(0.08)
        figure.savefig(PANELS / f"{stem}.png", bbox_inches=inches, dpi=200)
    return matplotlib_scraper(block, variables, conf, dpi=200)


def cards(_app) -> None:
    """Put the kept panels in the place of the thumbnails, once the gallery is made."""
    from sphinx_gallery.utils import scale_image

    for panel in PANELS.glob("*.png"):
        scale_image(panel, PANELS.parent / f"thumb/sphx_glr_{panel.stem}_thumb.png", 520, 360)


def wide() -> list[str]:
    """Pages whose tables and programs need the room of the list of their parts."""
    return ["choosing", "auto_gallery/index", *(f"auto_gallery/{stem}" for stem in examples())]


def on_source_read(_app, name: str, source: list[str]) -> None:
    """Put in what is made, and follow links."""
    text = source[0]
    if (DOCS / f"{name}.md").exists() and not name.startswith(("papers/", "reference/")):
        text = localised(text, DOCS / f"{name}.md", DOCS / f"{name}.md")
        text = text.replace("<!-- table with filters -->", f"```{{raw}} html\n{table_with_filters()}\n```")
        text = text.replace("<!-- unlisted pages -->", unlisted())
        up = "../" * name.count("/")
        known = set(methods())
        text = re.sub(
            r"^\| `(\w+)` \|",
            lambda found: f"| [`{found[1]}`]({up}reference/{found[1]}.md) |" if found[1] in known else found[0],
            text,
            flags=re.M,
        )
    if name == "auto_gallery/index":
        text = in_sections(text)
    elif name.startswith("auto_gallery/"):
        text = with_button(text, name.removeprefix("auto_gallery/"))
    source[0] = text
