"""Whatever happens to files, no wrong number is restored, and no good checkpoint is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.checkpoint import damage_programs


def call(one_process, function, *args, **kwargs):
    return one_process.run(function, *args, timeout=120, **kwargs)[0]


@pytest.fixture
def two(one_process, tmp_path):
    """The paths of a good checkpoint and of a newer one."""
    return [Path(path) for path in call(one_process, damage_programs.saved, str(tmp_path), [1, 2])]


def chunk_of(path: Path) -> Path:
    """A file with numbers, of 128 bytes and a checksum."""
    return path / "arrays/model/first/kernel/c/0/0"


def truncate(path: Path) -> None:
    data = chunk_of(path).read_bytes()
    chunk_of(path).write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(chunk_of(path).read_bytes())
    data[7] ^= 4
    chunk_of(path).write_bytes(data)


def lose_chunk(path: Path) -> None:
    chunk_of(path).unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[:-20])


def change_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 3'))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "kernel/c/0/0 is corrupt: expected 132 bytes, found 66 bytes"),
        (flip, "kernel/c/0/0 is corrupt: digest mismatch"),
        (lose_chunk, "kernel/c/0/0 is missing"),
        (lose_manifest, None),
        (cut_manifest, "manifest.json is corrupt"),
        (change_manifest, "checksum"),
    ],
)
def test_the_checkpoint_before_is_taken(one_process, two, tmp_path, damage, said):
    damage(two[1])
    assert call(one_process, damage_programs.restored, str(tmp_path)) == {1.0}
    # Asked for by its own path, it is an error, and the model stays as it was.
    kind, text, values = call(one_process, damage_programs.restored, str(two[1]))
    assert kind == "StorageError", text
    assert re.search(said or "the manifest is missing|no complete checkpoint", text), text
    assert "\n" not in text
    assert values == {-1.0}
    assert two[0].exists() and two[1].exists()


def test_a_newer_format_is_refused(one_process, two):
    file = two[1] / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tfdist_checkpoint": 99}))
    kind, text, values = call(one_process, damage_programs.restored, str(two[1]))
    assert (kind, values) == ("NewerFormatError", {-1.0})
    assert "newer tfdist, in version 99" in text and "\n" not in text


def test_another_model_is_refused(one_process, two):
    options = {"width": 5, "extra": True}
    kind, text, values = call(one_process, damage_programs.restored, str(two[0]), **options)
    assert (kind, values) == ("OtherModelError", {-1.0})
    assert "not in the checkpoint: model/second/bias" in text
    assert "model/first/kernel (float32[4, 8], in the model float32[4, 5])" in text
    assert "\n" not in text


def test_a_folder_that_cannot_be_written(one_process):
    kind, text = "", ""
    try:
        call(one_process, damage_programs.kept, "/dev/null/x", every_steps=2)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    assert "Could not write to /dev/null/x" in text, (kind, text)


def test_a_fit_that_does_not_begin_says_why(one_process, tmp_path):
    kind, text = call(one_process, damage_programs.never_begun, str(tmp_path))
    assert kind == "ValueError" and "cardinality" in text, (kind, text)


def test_a_full_disk(one_process, two, tmp_path):
    kind, text = call(one_process, damage_programs.saved_on_a_full_disk, str(tmp_path))
    assert kind == "StorageError"
    assert "Could not write" in text and "\n" not in text
    assert call(one_process, damage_programs.restored, str(tmp_path)) == {2.0}


def test_two_writers(one_process, tmp_path):
    kind, text = call(one_process, damage_programs.trained_twice, str(tmp_path))
    assert kind == "StorageError"
    assert "Another training saves into" in text
    assert len(list(tmp_path.glob("step-*/manifest.json"))) >= 3


def test_a_damaged_checkpoint_does_not_outlive_good_ones(one_process, tmp_path):
    options = {"every_steps": 10, "keep_last": 1}
    call(one_process, damage_programs.kept, str(tmp_path), **options)
    (newest,) = tmp_path.glob("step-*")
    lose_manifest(newest)
    later = newest.with_name("step-0000000099-00000000")
    newest.rename(later)
    (later / "manifest.json").write_text("{")  # Complete by its name, and damaged.
    found = call(one_process, damage_programs.kept, str(tmp_path), **options, resume=False)
    assert [int(name.split("-")[1]) for name in found] == [20, 99]


def test_what_is_kept(one_process, tmp_path):
    options = {"every_steps": 3, "keep_last": 2, "keep_every": 6}
    found = call(one_process, damage_programs.kept, str(tmp_path), **options)
    assert [int(name.split("-")[1]) for name in found] == [6, 12, 18, 20]
