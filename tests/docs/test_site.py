"""The documentation site, as `make docs` builds it: without a warning, whole, and fetching nothing."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.public import public_objects

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
#: Attributes by which a browser fetches something as it shows a page.
FETCHES = {"src", "srcset", "poster", "data"}


class Parsed(html.parser.HTMLParser):
    """What a page has: its anchors, its links, what it fetches, and the text of its paragraphs."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.paragraphs: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(found["href"])
        self.fetched += [found[name] for name in FETCHES & set(found) if found[name]]
        if tag == "p":
            self.paragraphs.append("")
            self._inside = True

    def handle_endtag(self, tag):
        self._inside &= tag != "p"

    def handle_data(self, data):
        if self._inside:
            self.paragraphs[-1] += data


def build(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not re.search(r"WARNING|ERROR|^Traceback", said, re.MULTILINE), said
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Parsed]:
    return {path: Parsed(path.read_text()) for path in sorted(site.rglob("*.html"))}


def test_every_document_is_a_page(pages, site):
    documents = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix(".md") for path in pages}
    assert documents <= built, documents - built
    (contents,) = [page.links for path, page in pages.items() if path == site / "index.html"]
    listed = {site / urllib.parse.urlsplit(link).path for link in contents}
    missing = {path for path in pages if path not in listed and path.name != "404.html"}
    assert not missing, f"Not in the navigation: {missing}"


def test_every_public_name_is_described_on_a_page(pages, site):
    described = {
        anchor
        for path, page in pages.items()
        if path.parent.name == "api"
        for anchor in page.anchors
    }
    missing = set(public_objects()) - described
    assert not missing, missing
    for path in (site / "api").glob("*.html"):  # A module would hide the function of its name.
        assert "doc-symbol-module" not in path.read_text(), path.name


def dead(pages: dict[Path, Parsed], site: Path) -> Iterator[str]:
    """Links to a page or an anchor that is not there."""
    for path, page in pages.items():
        if path.name == "404.html":  # It is served for any address, and its links begin at the top.
            continue
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (
                (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            )
            if not target.is_file() or not target.is_relative_to(site):
                yield f"{path.name}: {link}"
            elif (
                parts.fragment and urllib.parse.unquote(parts.fragment) not in pages[target].anchors
            ):
                yield f"{path.name}: {link} has no such anchor"


def test_no_link_is_dead(pages, site):
    found = list(dead(pages, site))
    assert not found, "\n".join(found)


def test_nothing_is_fetched_from_elsewhere(pages, site):
    elsewhere = {
        url for page in pages.values() for url in page.fetched if re.match(r"(\w+:)?//", url)
    }
    assert not elsewhere, elsewhere
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*", styles)


def test_lists_are_lists(pages):
    """GitHub begins a list right below a paragraph; here a blank line must stand before it."""
    wrong = [
        f"{path.name}: {line}"
        for path, page in pages.items()
        for text in page.paragraphs
        for line in text.splitlines()[1:]
        if re.match(r"\s*([-*]|\d+\.) ", line)
    ]
    assert not wrong, "\n".join(wrong)


def test_code_blocks_are_blocks(pages):
    wrong = [
        f"{path.name}: {text}"
        for path, page in pages.items()
        for text in page.paragraphs
        if "```" in text
    ]
    assert not wrong, "\n".join(wrong)


def test_the_repositorys_links_are_not_dead():
    """What GitHub would show: links between documents of the repository."""
    wrong = []
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *ROOT.glob("tfdist/addons/*/README.md"),
    ]:
        prose = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            found = path.parent / target if target else path
            if not found.exists() or (anchor and anchor not in anchors_of(found)):
                wrong.append(f"{path.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_dead_link_is_found(pages, site):
    page = Parsed('<p id="here"><a href="index.html#nowhere">a</a> <a href="gone.html">b</a></p>')
    found = list(dead({**pages, site / "made.html": page}, site))
    assert found == [
        "made.html: index.html#nowhere has no such anchor",
        "made.html: gone.html",
    ]
