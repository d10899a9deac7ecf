"""Sphinx settings. Build with `sphinx-build -W docs docs/_build/html`.

The pages are Markdown that also reads well where no Sphinx is, on GitHub: no directive, no role.
What they leave out stands here: the order of the pages, and how a formula becomes HTML.
"""

import os
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tf_dsgd

# The order of the pages: what a reader wants to do comes before what a reader looks up.
NAVIGATION = {
    "Train": [
        "is_it_for_me",
        "getting_started",
        "data",
        "loops",
        "callbacks",
        "staleness_monitor",
    ],
    "On which machines": [
        "gpu",
        "jit_compile",
        "cluster",
        "tables",
        "model_parallelism",
        "averaging_callback",
        "spark",
        "simulator",
    ],
    "Which algorithm": [
        "downpour",
        "staleness",
        "optimizers",
        "averaging",
        "which_period",
        "sending_less",
        "hogwild",
        "batch_methods",
    ],
    "Extend": ["writing_an_algorithm", "architecture", "how_fit_reaches_the_workers"],
    "Results": ["reproduced", "reproduced_averaging", "tried_by_hand"],
    "Reference": ["api", "glossary", "waits", "references"],
}

project = "tf_dsgd"
author = "the tf_dsgd authors"
project_copyright = "the tf_dsgd authors, Apache-2.0"
version = release = tf_dsgd.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["alert", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# The extra [spark] is large, and the docstrings need nothing of it.
autodoc_mock_imports = ["pyspark", "pyarrow"]

html_theme = "furo"
html_title = f"tf_dsgd {release}"
html_static_path = ["static"]
html_css_files = ["math.css"]
html_math_renderer = "mathml"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def add_navigation(app, page, source):
    """Puts the tree of pages at the end of the home page."""
    if page == "index":
        for caption, pages in NAVIGATION.items():
            lines = ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
            source[0] += "\n".join(lines)


def write_math(translator, node):
    """Writes a formula as MathML, which browsers show by themselves: offline, without a script."""
    block = isinstance(node, nodes.math_block)
    try:
        formula = tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s in: %s", error, node.astext(), location=node)
        formula = f"<code>{translator.encode(node.astext())}</code>"
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app):
    app.connect("source-read", add_navigation)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
