"""Sphinx configuration of the documentation site, built by `make docs` into build/docs.

The source folder is the root of the repository, so that links such as ../README.md work in the site as they do in the
plain view of the repository. Links to files that are not pages become downloads.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import ringattn  # noqa: E402

project = "ringattn"
author = "the ringattn contributors"
release = version = ringattn.__version__
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/results/*/*.md"]
exclude_patterns = [".*", "build", "ringattn", "kernels", "launch", "tests", "**/__pycache__"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "site_reference",
]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # tables of bench/results begin with headings of level 3

autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape", "Cause", "Remedy", "Guarantees"]
default_role = "code"  # docstrings are Markdown: a name between single backquotes is code

html_theme = "furo"
html_title = f"ringattn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_sphinx = False
