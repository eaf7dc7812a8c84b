"""Configuration of the documentation site. `make docs` builds it."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_site"), str(DOCS.parent)]

project = "Varuna"
author = "The Varuna authors"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "reference"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links such as checkpoints.md#loading work as in a Markdown viewer
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "Varuna"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"

default_role = "code"  # docstrings mark code with one backtick
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# Types in signatures link to their description if there is one here. Those of other packages and of inner
# modules have none; all other references, and classes that users import, must exist.
nitpick_ignore_regex = [("py:class", r"(?!(varuna|varuna\.hf|varuna\.lightning|pyrannc)\.[A-Za-z]\w*$).*")]
