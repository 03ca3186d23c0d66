"""The built site in a headless Chromium: search, copying, dark mode, a phone's width, links, alt texts.

Skipped without the site (docs/_build/html), playwright, or Chromium; with REQUIRE_BROWSER set they have to be there.
Screenshots are left in the folder SCREENSHOTS, if that is set.
"""

import functools
import http.server
import os
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs/_build/html"
SHOWN = {
    "home": "index.html",
    "start": "start.html",
    "choose": "choosing.html",
    "gallery": "auto_gallery/index.html",
    "example": "auto_gallery/plot_03_learned_filters.html",
    "how-to": "howto/index.html",
    "question": "howto/hyperparameters.html",
    "method": "reference/F2SA.html",
    "AID": "reference/AID.html",
    "errors": "errors.html",
    "unrolled": "explain/unrolled.html",
    "hypergradient": "explain/hypergradient.html",
}
PHONE = {"width": 390, "height": 812}
DESK = {"width": 1280, "height": 900}

pytestmark = pytest.mark.filterwarnings("default")  # of playwright's own


def _lacking(reason):
    if os.environ.get("REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def address():
    if not (SITE / "index.html").exists():
        _lacking("the site is not built: python -m sphinx -b html docs docs/_build/html")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        _lacking("playwright is not installed")
    with sync_playwright() as playwright:
        installed = shutil.which("chromium") or shutil.which("chromium-browser")
        try:
            started = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except Error as error:
            _lacking(f"no Chromium: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def open_page(browser, address):
    """Opens a page of the site; it must not say an error on the console, nor ask anything from elsewhere."""
    contexts, said = [], []

    def elsewhere(route):
        said.append(f"asks for {route.request.url}")
        route.fulfill(body="")

    def opened(path, **options):
        context = browser.new_context(**options)
        context.route(lambda url: not url.startswith((address, "data:")), elsewhere)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address.rstrip("/"))
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto(address + path, wait_until="load")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("F2SA", "reference/F2SA.html"),
        ("must return a scalar tensor", "errors.html#the-must-return-a-scalar-tensor"),
        ("writes into its batch", "errors.html#the-loss-writes-into-its-batch"),
        ("checkpoint", "howto/checkpoints"),
        ("noisy labels", "auto_gallery/plot_01_data_cleaning.html"),
        ("weight decay per layer", "howto/hyperparameters.html"),
        ("multiple GPUs", "howto/ddp.html"),
        ("torch.compile", "speed.html"),
        ("compile fallback", "howto/compile.html"),
        ("my own data", "howto/wrong_labels.html"),
        ("out of memory", "howto/memory.html"),
        ("inner", "glossary.html"),
        ("lambda", "glossary.html#lambda"),
    ],
)
def test_search_finds_it_among_the_first_three(open_page, words, expected):
    page = open_page(f"search.html?q={words.replace(' ', '+')}")
    page.wait_for_selector("#search-results ul.search li a", timeout=20_000)
    page.wait_for_function("!document.querySelector('#search-progress')?.textContent.includes('Searching')")
    links = page.eval_on_selector_all(
        "#search-results ul.search li a", "links => links.map(a => a.getAttribute('href'))"
    )
    assert any(expected in link for link in links[:3]), links[:20]


def test_the_copy_buttons_copy_the_two_commands(open_page):
    page = open_page("start.html")
    copied = []
    for block in page.query_selector_all("div.highlight-sh")[:2]:
        block.hover()
        block.query_selector("button.copybtn").click()
        page.wait_for_function("navigator.clipboard.readText().then(text => text.length > 0)")
        copied.append(page.evaluate("navigator.clipboard.readText()").strip())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(set(copied)) == 2
    assert all(f"```sh\n{command}\n```" in readme for command in copied)


RAW_TEX = r"\\[(\[]|\\(nabla|frac|text|arg)\b"


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("view", ["desk", "desk-dark", "phone", "phone-dark"])
def test_a_page_fits_and_says_nothing_wrong(open_page, name, view):
    dark = view.endswith("dark")
    page = open_page(SHOWN[name], color_scheme="dark" if dark else "light", viewport=PHONE if "phone" in view else DESK)
    if dark:
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert over <= 0, f"{over} px wider than the window"
    if name == "choose":  # its columns fit, and When is the widest
        table = page.query_selector(".method-table").bounding_box()
        assert page.evaluate("document.querySelector('.method-table').parentElement.scrollWidth") <= table["width"] + 1
        assert (
            page.query_selector(".method-table thead th:nth-child(2)").bounding_box()["width"] > 0.45 * table["width"]
        )
    assert not re.search(RAW_TEX, page.inner_text("article")), "raw TeX"
    without = page.eval_on_selector_all("img", "images => images.filter(i => !i.alt).map(i => i.src)")
    assert not without
    broken = page.eval_on_selector_all(
        "img", "images => images.filter(i => i.complete && !i.naturalWidth && i.loading !== 'lazy').map(i => i.src)"
    )
    assert not broken
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{folder}/{name}-{view}.png")


@pytest.mark.parametrize(("viewport", "theme"), [(PHONE, "light"), (DESK, "dark")], ids=["phone", "desk"])
def test_every_page_fits(open_page, address, viewport, theme):
    paths = [path for path in sorted(SITE.rglob("*.html")) if not {"_static", "_modules"} & set(path.parts)]
    names = [path.relative_to(SITE).as_posix() for path in paths]
    page = open_page("index.html", viewport=viewport, color_scheme=theme)
    wide, raw = {}, []
    for name in names:
        page.goto(address + name, wait_until="load")
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if over > 0:
            wide[name] = over
        if re.search(RAW_TEX, page.evaluate("document.querySelector('article')?.innerText ?? ''")):
            raw.append(name)
    assert not wide
    assert not raw
    assert len(names) > 100


def test_each_page_has_the_logo_and_says_its_version(open_page):
    import bilevel_optim

    page = open_page("howto/ddp.html", viewport=DESK)
    assert page.inner_text(".site-version") == bilevel_optim.__version__
    assert page.eval_on_selector(".navbar-brand img", "image => image.naturalWidth") > 0


def test_an_example_is_downloaded_as_a_notebook(open_page):
    page = open_page("auto_gallery/plot_01_data_cleaning.html", viewport=DESK)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as a notebook").first.click()
    assert download.value.suggested_filename == "plot_01_data_cleaning.ipynb"


def test_arguments_that_methods_share_are_folded(open_page):
    page = open_page("reference/AID.html", viewport=DESK)
    shared = page.get_by_text("average all oracles over the ranks")
    assert not shared.is_visible()
    page.get_by_text("Arguments that methods share").click()
    shared.wait_for(state="visible")
    assert page.get_by_role("link", name="[source]").first.is_visible()


def test_the_table_of_methods_is_filtered(open_page):
    page = open_page("choosing.html")
    rows = ".method-table tr[data-tasks]:not([hidden])"
    assert len(page.query_selector_all(rows)) == 8
    page.get_by_role("button", name="Show all").click()
    everything = len(page.query_selector_all(rows))
    assert everything > 30
    page.select_option("select[data-key=derivatives]", "not needed")
    names = page.eval_on_selector_all(f"{rows} td:first-child", "cells => cells.map(c => c.textContent)")
    assert "F2SA" in names
    assert "AID" not in names
    assert len(names) < everything
    if folder := os.environ.get("SCREENSHOTS"):
        page.query_selector(".method-filters").scroll_into_view_if_needed()
        page.screenshot(path=f"{folder}/filtered.png")


# A newcomer's questions: the links to click from the first page, and words of the answer.
TASKS = {
    "install it": (["Start"], "pip install"),
    "choose without second derivatives": (["Choose", "F2SA"], "first derivatives"),
    "resume a run": (["How to", "Save a run, and resume it"], "optimizer.load_state_dict"),
    "use Adam below": (["How to", "Adam, momentum, schedulers, clipping"], "lower_optimizer=torch.optim.Adam"),
    "why the hypergradient is zero": (["How to", "When the hypergradient is wrong, or zero"], "Is it zero?"),
    "understand a warning": (["Errors"], "the gradient of the lower loss grows over the lower"),
    "use BatchNorm": (["How to", "BatchNorm, dropout, and other state of modules"], "once per outer step"),
    "train with Lightning": (["How to", "Lightning"], "automatic_optimization = False"),
    "come from higher": (["How to", "Coming from higher"], "innerloop_ctx"),
    "make steps faster": (["How to", "Fast steps"], "optimizer.compile()"),
    "need less memory": (["How to", "How much memory"], "checkpoint=True"),
    "see a few-shot example": (["Gallery", "Learn to adapt: few-shot regression"], "bo.MAML"),
}


def clicked(open_page, links):
    """The page that these links lead to, one after another, from the first page."""
    page = open_page("index.html", viewport=DESK)
    for text in links:
        page.get_by_role("link", name=text, exact=True).filter(visible=True).first.click(timeout=20_000)
        page.wait_for_load_state("load")
    return page


@pytest.mark.parametrize("task", TASKS)
def test_a_newcomer_finds_it_in_three_clicks(open_page, task):
    clicks, answer = TASKS[task]
    assert len(clicks) <= 3
    page = clicked(open_page, clicks)
    assert answer in page.inner_text("article")


# Questions of users, and parts of a full answer. Two clicks from the first page.
QUESTIONS = {
    "which method": (["Choose"], ["Are there one to three upper parameters?", "RSVRB", "suggest"]),
    "weight decay per layer": (["How to", "Weight decay for each layer"], ["log_decay", "train anew", "weight_decay"]),
    "labels of my own data": (
        ["How to", "Find wrong labels in your own data"],
        ["ImageFolder", "threshold", "How many"],
    ),
    "Lightning": (["How to", "Lightning"], ["CombinedLoader", "validation_step", "optimizer.compile("]),
    "Adam for both levels": (
        ["How to", "Adam for both levels"],
        ['{"upper_optimizer": torch.optim.Adam, "lower_optimizer": torch.optim.Adam}'],
    ),
    "is the gradient right": (["How to", "Checking a hypergradient"], ["check_hypergradient", "print(report)"]),
    "how much memory": (["How to", "How much memory"], ["How much will it take?", "suggest", "max_memory_allocated"]),
    "why compile falls back": (["How to", "torch.compile"], ['diagnostics.get("compile_fallback"', "fullgraph=True"]),
    "resume": (["How to", "Save a run, and resume it"], ["optimizer.load_state_dict", "set_rng_state"]),
    "two GPUs": (["How to", "Two GPUs and more"], ["torchrun", "DistributedSampler", "set_epoch"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_in_two_clicks(open_page, question):
    clicks, answers = QUESTIONS[question]
    assert len(clicks) <= 2
    page = clicked(open_page, clicks)
    said = page.inner_text("article")
    assert all(answer in said for answer in answers)


def test_every_internal_link_answers(address):
    """Read from the files: pages, pictures, and the places on a page."""
    from html.parser import HTMLParser

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.links, self.places, self.bare = [], set(), []

        def handle_starttag(self, tag, attributes):
            found = dict(attributes)
            self.places |= {found[key] for key in ("id", "name") if found.get(key)}
            if tag in ("a", "img", "link", "script"):
                self.links += [found[key] for key in ("href", "src") if found.get(key)]
            if tag == "img" and not found.get("alt"):
                self.bare.append(found.get("src"))

    pages = {}
    for path in sorted(SITE.rglob("*.html")):
        if "_static" in path.parts:
            continue  # templates of the theme
        reader = Reader()
        reader.feed(path.read_text(encoding="utf-8"))
        pages[path.relative_to(SITE).as_posix()] = reader
    wrong = []
    for name, reader in pages.items():
        for link in reader.links:
            target, place = urldefrag(urljoin(address + name, link))
            if not target.startswith(address):
                continue
            file = target.removeprefix(address).split("?")[0] or "index.html"
            known = pages.get(file)
            if (known is None and not (SITE / file).exists()) or (known and place and place not in known.places):
                wrong.append(f"{name}: {link}")
    assert not wrong, "\n".join(wrong[:40])
    assert not {name: reader.bare for name, reader in pages.items() if reader.bare}
    assert len(pages) > 100
