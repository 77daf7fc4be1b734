"""Sphinx: builds these pages into a site (``make docs``). Warnings are errors there."""

import re

from sphinx.application import Sphinx

import fdp

project = "fdp"
author = "the fdp authors"
copyright = author
release = version = fdp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"fdp {release}"
html_show_sphinx = False
html_copy_source = False

# Links between pages may name a heading, as on a code host; one that does not exist is a warning, so an error.
myst_heading_anchors = 3

# Single backticks in docstrings are code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nitpicky = True
# References in signatures that no page here describes. Without a network there is no inventory of theirs to link to.
nitpick_ignore_regex = [
    # JAX's, optax's, NumPy's, matplotlib's and Python's own types.
    (r"py:.*", r"(jax|jaxlib|optax|numpy|np|matplotlib|collections|typing|pathlib)\..*"),
    (
        r"py:.*",
        r"(Mesh|NamedSharding|Figure|NDArray|Any|Callable|Iterable|Iterator|Mapping|Sequence)",
    ),
    # fdp's own names for types: any tree, a mesh axis, buffers, a hook's state, and what other modules pass around.
    (r"py:.*", r"(fdp\.\w+\.)?(Tree|AxisName|Buffers|HookState|ReducedGrad|StepConfig|Series)"),
    (r"py:.*", r"fdp\.inspect\.(cost\.Cost|hlo\.Module)"),
]


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""

    def plain_outside(app: Sphinx, docname: str, source: list[str]) -> None:
        # On a code host a link to README leads there. It is no page of the site: here the words are enough.
        source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[\w./]*\.md(#[^)]*)?\)", r"\1", source[0])

    app.connect("source-read", plain_outside)
