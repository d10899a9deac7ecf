"""Sphinx settings. Build with `sphinx-build -W docs docs/_build/html`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tf_dsgd

project = "tf_dsgd"
author = "the tf_dsgd authors"
project_copyright = "the tf_dsgd authors, Apache-2.0"
version = release = tf_dsgd.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinxcontrib.bibtex",
]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
bibtex_bibfiles = ["references.bib"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"tf_dsgd {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
