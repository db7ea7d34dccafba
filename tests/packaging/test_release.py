"""What `make release` checks before it builds anything, and the files that a release carries."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import yaml

import tfdist
from tests.packaging import release

FILES = ("tfdist/_version.py", "CHANGELOG.md", "CITATION.cff")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The files that name the version, in a folder of the test's."""
    (tmp_path / "tfdist").mkdir()
    for name in FILES:
        shutil.copy(release.ROOT / name, tmp_path / name)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


def test_files_name_the_version_of_the_package():
    assert release.check_version() == tfdist.__version__


@pytest.mark.parametrize("name", FILES)
def test_another_version_ends_the_release(copied, name):
    text = (copied / name).read_text()
    (copied / name).write_text(text.replace(tfdist.__version__, "9.9.9"))
    with pytest.raises(SystemExit, match=r"different versions: .*9\.9\.9"):
        release.check_version()


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_a_version_ends_the_release(copied, name):
    (copied / name).write_text("")
    with pytest.raises(SystemExit, match="no version"):
        release.check_version()


def test_the_citation_has_what_the_format_asks_for():
    """The keys that version 1.2.0 of the Citation File Format requires."""
    found = yaml.safe_load((release.ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["license"] == "Apache-2.0"
    assert all(author["name"] for author in found["authors"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_release_is_built_and_trains(tmp_path, capsys):
    for module in ("build", "twine", "check_wheel_contents"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[release]'")
    release.main([f"--out={tmp_path / 'dist'}"])
    said = capsys.readouterr().out
    assert f"MultiWorkerStrategy of tfdist {tfdist.__version__} on 2: loss" in said
    assert "s  in all, of at most 180" in said and "Ready in" in said
