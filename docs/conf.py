from importlib.util import find_spec

from sketchssm import __version__ as release  # noqa: F401  Sphinx reads it

project = "sketchssm"
author = "the sketchssm developers"
copyright = "the sketchssm developers"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc", "myst_parser"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = "sketchssm"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

autodoc_mock_imports = [name for name in ("torch", "transformers") if find_spec(name) is None]
autodoc_typehints = "none"  # docstrings name types and shapes
autosummary_generate = True
numpydoc_show_class_members = False  # the class template lists them
