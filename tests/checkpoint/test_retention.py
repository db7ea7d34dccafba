"""What is kept, what is deleted, and what a deletion never reaches."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint import damage_programs
from tests.checkpoint.test_damage import call, chunk_of, lose_manifest
from tfdist import callbacks

STEPS = {"every_steps": 10}


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*"))


def test_none_keeps_all(one_process, tmp_path):
    for _ in range(2):
        call(
            one_process, damage_programs.kept, str(tmp_path), **STEPS, keep_last=None, resume=False
        )
    assert steps_in(tmp_path) == [10, 10, 20, 20]


def test_a_damaged_one_does_not_count_for_one_that_is_kept(one_process, tmp_path):
    paths = call(one_process, damage_programs.saved, str(tmp_path), [1, 2, 3])
    chunk_of(Path(paths[2])).unlink()
    options = {"every_steps": 20, "keep_last": 2, "resume": False}
    call(one_process, damage_programs.kept, str(tmp_path), **options)
    # The newest, the damaged one before it, and the first good one before that.
    assert steps_in(tmp_path) == [2, 3, 20]


def test_a_link_is_deleted_and_not_what_it_leads_to(one_process, tmp_path):
    goal, folder = tmp_path / "goal", tmp_path / "saved"
    (path,) = call(one_process, damage_programs.saved, str(goal), [1])
    folder.mkdir()
    link = folder / Path(path).name
    link.symlink_to(path)
    inside = call(one_process, damage_programs.saved, str(folder), [2])[0]
    (Path(inside) / "more").symlink_to(goal)
    before = {each: each.stat().st_size for each in goal.rglob("*")}
    options = {**STEPS, "keep_last": 1, "resume": False}
    call(one_process, damage_programs.kept, str(folder), **options)
    assert steps_in(folder) == [20]
    assert not link.is_symlink()
    assert {each: each.stat().st_size for each in goal.rglob("*")} == before


def test_what_a_killed_save_left_is_deleted_at_the_next_start(one_process, tmp_path):
    torn = tmp_path / "step-0000000007-00000000"
    (torn / "arrays").mkdir(parents=True)
    (torn / "unfinished").write_text("{}")
    damaged = tmp_path / "step-0000000008-00000000"
    damaged.mkdir()  # Complete once: kept until a newer one is.
    found = call(one_process, damage_programs.starts, str(tmp_path))
    assert found == [[damaged.name], []]


def test_a_failed_save_leaves_nothing(one_process, tmp_path):
    kind, text = call(one_process, damage_programs.saved_on_a_full_disk, str(tmp_path))
    assert kind == "StorageError" and "\n" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_room_for_the_probe(one_process, tmp_path):
    kind, text = call(one_process, damage_programs.begun_on_a_full_disk, str(tmp_path))
    assert kind == "StorageError" and "\n" not in text
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_lost_manifest_is_told(one_process, tmp_path):
    paths = call(one_process, damage_programs.saved, str(tmp_path), [1, 2])
    lose_manifest(Path(paths[1]))
    found, said = call(one_process, damage_programs.restored_and_said, str(tmp_path))
    assert found == {1.0}
    assert len(said) == 1 and Path(paths[1]).name in said[0] and "manifest.json" in said[0]


def test_a_checkpoint_may_be_copied_under_a_name_of_the_users(one_process, tmp_path):
    (path,) = call(one_process, damage_programs.saved, str(tmp_path), [2])
    best = Path(path).rename(tmp_path / "best")
    assert call(one_process, damage_programs.restored, str(best)) == {2.0}
    later = best.rename(tmp_path / "step-0000000003-00000000")
    kind, text, _ = call(one_process, damage_programs.restored, str(later))
    assert kind == "StorageError" and "it belongs to step 2" in text


def test_names_lead_nowhere_else(one_process, tmp_path):
    """Names of layers become names of files."""
    folder = tmp_path / "inside"
    found = call(one_process, damage_programs.saved_with_odd_names, str(folder))
    assert found is True
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    kinds = {stat.S_IFMT(path.lstat().st_mode) for path in tmp_path.rglob("*")}
    assert kinds == {stat.S_IFDIR, stat.S_IFREG}


def test_an_object_store(one_process, tmp_path):
    """By way of what TensorStore calls a key-value store; its driver of files stands in for one."""
    found = call(one_process, damage_programs.saved_at_an_address, str(tmp_path))
    damaged = "kernel/c/0/0 is corrupt: digest mismatch"
    assert found == [{2.0}, damaged, {1.0}, "bias/c/0 is missing"]
    assert not os.path.exists(tmp_path / "tfdist.lock")


WRONG = {
    "every_steps": [0, -1, 1.5, True, "2", np.nan, np.inf, [1]],
    "every_seconds": [0, -1.0, np.nan, np.inf, "60", True, 10**400],
    "failure_seconds": [0, np.nan, -np.inf, None, "x"],
    "keep_last": [0, -2, 1.0, np.nan, True, "2"],
    "keep_every": [0, 2.0, np.nan, False],
    "batch_size": [0, -1, 1.5, "8", True],
    "resume": ["no", 1, None, 0.0],
    "asynchronous": ["yes", 0, None],
    "directory": ["", " ", "/", "//", "/..", "gs://", "gs:///x", "nosuch://x", "http://x/y", "a\0b",
                  None, 3, b"x", "file://", "file:///"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=str,
)
def test_a_wrong_argument(name, value, tmp_path):

    arguments = {"directory": tmp_path, name: value}
    with pytest.raises((TypeError, ValueError), match=f"`{name}`") as error:
        callbacks.Checkpointer(**arguments)
    assert re.search(r"Received: ", str(error.value)) and "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", WRONG["directory"], ids=str)
@pytest.mark.parametrize("function", ["save", "restore", "latest"])
def test_a_wrong_path(function, value):
    from tfdist import checkpoint

    calls = {
        "save": lambda: checkpoint.save(value, None, step=1),
        "restore": lambda: checkpoint.restore(value, None),
        "latest": lambda: checkpoint.latest(value),
    }
    with pytest.raises((TypeError, ValueError), match=r"must be (a|the) ") as error:
        calls[function]()
    assert "Received: " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("step", [-1, 1.0, True, None, "1", 1 << 63, np.nan])
def test_a_wrong_step(step, tmp_path):
    from tfdist import checkpoint

    with pytest.raises((TypeError, ValueError), match="`step`"):
        checkpoint.save(tmp_path, None, step=step)


@pytest.mark.parametrize("state", [[], "x", {"a": object}, {"a": {1, 2}}, {(1, 2): 3}], ids=str)
def test_a_wrong_state(state, tmp_path):
    from tfdist import checkpoint

    with pytest.raises((TypeError, ValueError), match="`state`"):
        checkpoint.save(tmp_path, None, step=1, state=state)
