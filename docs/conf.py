"""Sphinx builds the site from this folder: ``python -m sphinx -W -n --keep-going -b html docs docs/_build/html``."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # examples are small: more threads make them slower

import docstrings  # noqa: E402
import pages  # noqa: E402

import bilevel_optim  # noqa: E402

pages.write(HERE)  # the pages that are made

project = "bilevel_optim"
author = "The bilevel_optim authors"
copyright = author
version = release = bilevel_optim.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "mathml",
    "entries",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_ext", "_templates", "gallery", "pictures", "records"]
suppress_warnings = ["config.cache"]  # sphinx-gallery is configured with functions
nitpicky = True
default_role = "py:obj"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = ["Cost", ("Attributes", "params_style")]
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "bilevel_optim"
html_favicon = "_static/favicon.svg"
html_sidebars = {name: [] for name in pages.alone()}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["methods.js"]
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "header_links_before_dropdown": 9,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "navbar_align": "left",
    "logo": {f"image_{mode}": "_static/logo.svg" for mode in ("light", "dark")}
    | {"text": "bilevel_optim", "alt_text": "Two valleys, one above the other"},
    "navbar_start": ["navbar-logo", "site-version"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": {"**": ["page-toc"], **{name: [] for name in pages.wide()}},
}
if "DOCS_VERSIONS" in os.environ:  # the address of the list of versions, where several are published side by side
    html_theme_options["switcher"] = {
        "json_url": os.environ["DOCS_VERSIONS"],
        "version_match": os.environ.get("DOCS_VERSION", version),
    }
    html_theme_options["navbar_end"] = ["version-switcher", "theme-switcher"]

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",  # pictures and the hash of each source: what has not changed is not run again
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "abort_on_example_error": False,  # all pages are written, that of the example with its error; then the build fails
    "write_computation_times": False,  # a page that loads its table from elsewhere
    "image_scrapers": (pages.pictures,),
    "thumbnail_size": (520, 360),
    "first_notebook_cell": "# %pip install bilevel-optim scikit-learn matplotlib\n%matplotlib inline",
    "reset_modules": ("pages.quiet",),
}


def setup(app):
    """Follow links that lead out of this folder."""
    app.connect("builder-inited", pages.cards, priority=900)  # after sphinx-gallery
    app.connect("source-read", pages.on_source_read)
    app.connect("autodoc-process-docstring", pages.arrange, priority=300)
    app.connect("autodoc-process-docstring", pages.join_names, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", docstrings.signature)
    app.connect("missing-reference", pages.public_name)
