"""The documentation site: ``make docs`` builds it, offline.

There is no intersphinx: it reads inventories of other projects over the network, and a build must
not depend on a network. Links to other projects are written out.
"""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]

project = PROJECT["name"]
release = version = PROJECT["version"]
author = "the dask-devctx developers"
copyright = author

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"  # the prompt and the output of a console

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "pydata_sphinx_theme"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 5,
    "use_edit_page_button": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars: dict[str, list[str]] = {
    page: [] for page in ("index", "get-started", "gallery", "speed", "changelog")
}


def write_llms_txt(app: Any, failed: Exception | None) -> None:
    """Write ``llms.txt``, a list of the pages as plain text, in the order of the site."""
    if failed is not None or app.builder.name != "html":
        return
    env = app.env
    summary = PROJECT["description"]
    lines = [f"# {project} {release}", "", f"> {summary}", "", "## Pages", ""]
    for page in pages_in_order(env, "index"):
        source = env.doc2path(page, base=False)
        lines.append(f"- [{env.titles[page].astext()}](_sources/{source}.txt)")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_examples(app: Any, failed: Exception | None) -> None:
    """Write ``examples.zip``: no example runs without the modules beside it."""
    if failed is not None or app.builder.name != "html":
        return
    with zipfile.ZipFile(Path(app.outdir, "examples.zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((HERE.parent / "examples").glob("*.py")):
            archive.write(path, f"examples/{path.name}")


def pages_in_order(env: Any, page: str) -> list[str]:
    """Return a page and all that its tables of contents name, in their order."""
    found = [page]
    for child in env.toctree_includes.get(page, []):
        found += [one for one in pages_in_order(env, child) if one not in found]
    return found


def show_defaults(app: Any, kind: str, name: str, obj: Any, options: Any, *said: Any) -> Any:
    """Return a signature that can be parsed: dask's default "not given" is no Python."""
    signature, returns = said
    return (signature or "").replace("<no_default>", "...") or None, returns


# The pages by their titles, by which docstrings and the help of commands name them.
TITLES = {
    page.read_text().split("\n")[0].removeprefix("# "): page.stem for page in HERE.glob("*.md")
}


def link_pages(app: Any, kind: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make links of the pages that a docstring names."""
    lines[:] = re.sub(
        r'"([^"]+)"\s+in\s+the\s+documentation',
        lambda named: f":doc:`/{TITLES[' '.join(named[1].split())]}`",
        "\n".join(lines),
    ).split("\n")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("build-finished", write_llms_txt)
    app.connect("build-finished", write_examples)
