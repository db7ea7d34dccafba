"""What `mkdocs build` does with the documents: links and code that work in the repository work on the site.

MkDocs calls the functions whose names begin with `on_`.

- Documents that lie outside of `docs/`, such as CONTRIBUTING.md, become pages.
- Each room of the package gets a page with its public names, of which `docs/api.txt` and `docs/api_addons.txt` are the lists.
- Links are written as they hold in the repository; here they lead to pages.
- Public names in code, such as `tfdist.Mesh`, become links to the reference.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Documents outside of `docs/`, by their place in the repository, and their pages.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "report.md",
    "examples/README.md": "examples.md",
    **{
        f"tfdist/addons/{name}/README.md": f"{name}.md"
        for name in (
            *(
                "asynchronous",
                "datasets",
                "optimizers",
                "planner",
                "ray",
                "recommenders",
                "slow_links",
                "trackers",
            ),
            "unequal_ranks",
        )
    },
}
#: What else documents link to in the repository, and the page that says the same.
STANDS_FOR = {
    "docs/api.txt": "api/index.md",
    "docs/api_addons.txt": "api/index.md",
    "README.md": "index.md",
}

#: What is described beside the public names, and linked to: the base that has their common arguments.
BASES = {
    "tfdist.strategies": [
        "tfdist.strategies.parallel.ParallelStrategy",
        "tfdist.strategies.options.StrategyOptions",
    ]
}
#: Of the members that these inherit, those that programs use.
INHERITED = {"tfdist.strategies.parallel.ParallelStrategy": ["mesh", "is_chief", "group"]}
#: Methods that Keras' loops are patched to call, not programs.
INSIDE = {
    "tfdist.addons.asynchronous.HogwildStrategy": ("fit", "train_step"),
    "tfdist.addons.asynchronous.ParameterServerStrategy": ("fit", "train_step", "before_reading"),
}

_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})")
#: A public name in code; what is called may stand behind it. Not where it is a link's text already.
_NAME = re.compile(r"(?<!\[)`(tfdist(?:\.\w+)+)(\([^`]*\))?`(?!\])")


def public_names() -> list[str]:
    """The names of `docs/api.txt` and of `docs/api_addons.txt`."""
    lines = [
        line
        for name in ("api.txt", "api_addons.txt")
        for line in (ROOT / "docs" / name).read_text().splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def rooms() -> dict[str, list[str]]:
    """The public names by the room that they are imported from."""
    found: dict[str, list[str]] = {}
    for name in public_names():
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the rooms into the navigation."""
    pages = [{room: f"api/{room}.md"} for room in rooms()]
    for entry in config.nav or []:
        if "API" in entry:
            entry["API"] = ["api/index.md", *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that have no file in `docs/`."""
    for place, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / place).read_text()))
    for room, names in rooms().items():
        files.append(File.generated(config, f"api/{room}.md", content=_room_page(room, names)))
    files.append(File.generated(config, "api/index.md", content=_overview()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links and names outside of code blocks into links of the site."""
    uri = page.file.src_uri
    if uri.startswith("api/"):
        return markdown
    public = set(public_names())
    # A name on its own page of the changelog may be one that was renamed since.
    lines, fence = [], ""
    for line in markdown.splitlines():
        found = _FENCE.match(line)
        if found and (not fence or found[2].startswith(fence)):
            fence = "" if fence else found[2]
        elif not fence:
            line = _LINK.sub(_site_link(uri), line)
            if not line.startswith("#"):
                line = _NAME.sub(_reference(public), line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links documents that docstrings name by their path."""
    if not page.file.src_uri.startswith("api/"):
        return html

    def replaced(found: re.Match[str]) -> str:
        title = (ROOT / found[0]).read_text().partition("\n")[0].removeprefix("# ")
        page = ELSEWHERE.get(found[0]) or found[0].removeprefix("docs/")
        return f'<a href="../{page.removesuffix(".md")}.html">{title}</a>'

    elsewhere = "|".join(map(re.escape, ELSEWHERE))
    return re.sub(rf"\bdocs/\w+\.md\b|\b(?:{elsewhere})\b", replaced, html)


def _site_link(uri: str) -> Callable[[re.Match[str]], str]:
    """What a link of a page's source is on the site."""
    source = {page: place for place, page in ELSEWHERE.items()}.get(uri, f"docs/{uri}")

    def replaced(found: re.Match[str]) -> str:
        target, hash_, anchor = found[1].partition("#")
        if not target or "://" in target:
            return found[1]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = {**ELSEWHERE, **STANDS_FOR}.get(place) or place.removeprefix("docs/")
        if not os.path.exists(ROOT / place) or (page == place and not place.startswith("docs/")):
            raise PluginError(f"{source}: the link to {found[1]!r} leads to no page of the site.")
        return posixpath.relpath(page, posixpath.dirname(uri) or ".") + hash_ + anchor

    return replaced


def _reference(public: set[str]) -> Callable[[re.Match[str]], str]:
    """The link of a name to its description, where it or what it is part of is public."""

    def replaced(found: re.Match[str]) -> str:
        name = found[1]
        if name in public:
            return f"[{found[0]}][{name}]"
        if name.count(".") > 1 and name.rpartition(".")[0] in public:  # A method.
            return f"[{found[0]}][{name.rpartition('.')[0]}]"
        return found[0]

    return replaced


def _room_page(room: str, names: list[str]) -> str:
    """A page with a room's public names, each from its docstring."""
    described = "\n\n".join(_described(name) for name in [*names, *BASES.get(room, [])])
    head = (
        ""
        if room == "tfdist"
        else f"::: {room}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}\n\n"
    )
    return f"# {room}\n\n{head}{described}\n"


def _described(name: str) -> str:
    """The directive that describes a name."""
    filters = ["!^_", *(f"!^{method}$" for method in INSIDE.get(name, ()))]
    options = f"\n    options: {{filters: {filters}}}" if name in INSIDE else ""
    if name in INHERITED:
        options = f"\n    options: {{inherited_members: {INHERITED[name]}}}"
    if (ROOT / f"{name.replace('.', '/')}.py").exists():
        # The room has a module of this name, too, which would be described in its place.
        return f"[](){{#{name}}}\n\n::: {_home(name)}{options}"
    return f"::: {name}{options}"


def _home(name: str) -> str:
    """The full name by which a room's `__init__.py` imports a public name."""
    room, _, own = name.rpartition(".")
    tree = ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and own in [alias.name for alias in node.names]:
            return f"{node.module}.{own}"
    raise PluginError(f"{room} does not import {own}, of docs/api.txt, from anywhere.")


def _overview() -> str:
    """The table of all public names."""
    rows = []
    for room, names in rooms().items():
        listed = ", ".join(f"[`{name.rpartition('.')[2]}`][{name}]" for name in names)
        rows.append(f"| [`{room}`]({room}.md) | {listed} |")
    return (
        "# The public names\n\nMade from the docstrings of the package. "
        "[Stability](../stability.md) says which of these names may change.\n\n| Imported from | Names |\n|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
