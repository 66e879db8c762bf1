"""The site: `sphinx-build -W docs build/site` (extra `docs`). Pages are Markdown, the reference comes from docstrings."""

import llmpy

project, author, copyright = "llmpy", "the llmpy authors", "the llmpy authors, Apache-2.0"
version = release = llmpy.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**.ipynb_checkpoints"]
default_role = "code"  # docstrings write `name`
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are shown with the outputs that they were saved with

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": True}
autodoc_typehints_format = "short"
napoleon_use_rtype = False
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"llmpy {version}"
html_theme_options = {"navigation_with_keys": True}
smartquotes = False  # options begin with two dashes
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_static_path, html_css_files = ["_static"], ["site.css"]
html_extra_path = ["results"]  # board.html
