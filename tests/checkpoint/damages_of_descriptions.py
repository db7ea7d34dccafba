"""Ways in which `zarr.json`, the manifest or a whole checkpoint is changed: see `damages.py`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint.damages import (
    BOUND,
    DAMAGES,
    RECORDED,
    bound,
    damage,
    descriptions,
    files,
    recorded,
    replaced,
)

__all__ = ["BOUND", "DAMAGES", "RECORDED"]


# -- zarr.json -----------------------------------------------------------------------------------


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@damage
def other_endian(chance, new, old):
    def change(found):
        found["codecs"][0].setdefault("configuration", {})["endian"] = "big"

    edited(chance.choice(descriptions(new)), change)


@damage
def other_codecs(chance, new, old):
    codecs = [[], [{"name": "bytes"}], [{"name": "gzip"}], None, [{"name": "transpose"}]]
    value = chance.choice(codecs)
    edited(chance.choice(descriptions(new)), lambda found: found.update(codecs=value))


@damage
def other_keys_of_chunks(chance, new, old):
    value = chance.choice(
        [{"name": "v2"}, {"name": "default", "configuration": {"separator": "."}}]
    )
    edited(chance.choice(descriptions(new)), lambda found: found.update(chunk_key_encoding=value))


@damage
def other_shape(chance, new, old):
    def change(found):
        shape = (
            found["shape"]
            if chance.random() < 0.5
            else (found["chunk_grid"]["configuration"]["chunk_shape"])
        )
        shape[:] = [chance.choice([0, 1, 7, -1, 1 << 40, 1 << 62]) for _ in shape] or [1 << 40]

    edited(chance.choice(descriptions(new)), change)


@damage
def other_kind_of_numbers(chance, new, old):
    value = chance.choice(["float64", "int32", "bfloat16", "nonsense", None, 7])
    edited(chance.choice(descriptions(new)), lambda found: found.update(data_type=value))


# -- the manifest --------------------------------------------------------------------------------


def places(value, path=()) -> list[tuple]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            found += places(each, (*path, number))
    return found


def sealed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest, and gives it the checksum of what it then holds."""
    found = json.loads(path.read_text())
    change(found["content"])
    if found["tfdist_checkpoint"] == 1:
        found["crc32"] = zlib.crc32(json.dumps(found["content"], sort_keys=True).encode())
    else:
        text = json.dumps(found["content"], sort_keys=True, separators=(",", ":"))
        found["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(found))


@bound
def manifest_of_nonsense(chance, new, old):
    values: list[Any] = [
        None, True, -1, 1.5, float("nan"), float("inf"), 1 << 70, 10**400, "", "../../x", "/etc/passwd",
        "\0", "\ud800", [], {}, [[]], {"": ""}, [1 << 40] * 3, [-1], "a" * 10_000, [0] * 40, "string",
    ]  # fmt: skip

    def change(content):
        parts = [key for key in content if key != "state"]
        where = chance.choice(places({key: content[key] for key in parts}))
        for step in where[:-1]:
            content = content[step]
        content[where[-1]] = chance.choice(values)

    sealed(new / "manifest.json", change)


@bound
def manifest_without_a_part(chance, new, old):
    def change(content):
        where = chance.choice([each for each in places(content) if each[0] != "state"])
        for step in where[:-1]:
            content = content[step]
        del content[where[-1]]

    sealed(new / "manifest.json", change)


@damage
def manifest_of_another_kind(chance, new, old):
    texts = [
        b"", b"null", b"[]", b"{}", b"7", b'"x"', b"[" * 100_000, b"{\"a\":" * 50_000, b"\xff\xfe\0",
        b"\xef\xbb\xbf{}", b"9" * 10_000, b'{"tfdist_checkpoint": 2}', b"NaN",
        b'{"tfdist_checkpoint": 1, "content": {}, "crc32": 0}', b'{"tfdist_checkpoint": true}',
        b'{"tfdist_checkpoint": 2, "content": [], "sha256": null}', b'{"tfdist_checkpoint": -1}',
        b'{"tfdist_checkpoint": 1e999}', b'{"tfdist_checkpoint": 2, "sha256": 1, "content": {"step": 1}}',
    ]  # fmt: skip
    (new / "manifest.json").write_bytes(chance.choice(texts))


@damage
def manifest_not_utf8(chance, new, old):
    path = new / "manifest.json"
    encoding = chance.choice(["utf-16", "utf-32", "utf-8-sig"])
    path.write_bytes(path.read_text().encode(encoding))


# -- whole folders -------------------------------------------------------------------------------


@recorded
def newest_renamed(chance, new, old):
    new.rename(
        new.with_name(
            chance.choice([f"{new.name}.bak", "x", f"old-{new.name}", new.name[:-1] + "g"])
        )
    )


@recorded
def newest_lost(chance, new, old):
    shutil.rmtree(new)


@damage
def newest_is_a_file(chance, new, old):
    replaced(new).write_bytes(b"")


@damage
def newest_is_a_pipe(chance, new, old):
    os.mkfifo(replaced(new))


@damage
def newest_is_a_link(chance, new, old):
    goal = chance.choice([old, old.name, "nowhere", new.name, "/", "."])
    replaced(new).symlink_to(goal)


@damage
def newest_is_a_link_to_itself_elsewhere(chance, new, old):
    goal = new.parent / "elsewhere"
    new.rename(goal)
    new.symlink_to(goal)


@damage
def copied_under_a_later_step(chance, new, old):
    later = f"step-{chance.choice([21, 99, 10**10, 10**18]):010d}-{new.name.rpartition('-')[2]}"
    shutil.copytree(chance.choice([new, old]), new.with_name(later))


@damage
def names_exchanged(chance, new, old):
    aside = new.parent / "aside"
    new.rename(aside)
    old.rename(new)
    aside.rename(old)


@damage
def named_as_the_newest(chance, new, old):
    shutil.copytree(old, replaced(new))


@damage
def both_are_damaged(chance, new, old):
    for folder, other in ((new, old), (old, new)):
        DAMAGES[chance.choice(["truncated", "file_lost", "file_is_a_pipe"])](chance, folder, other)


@damage
def twice(chance, new, old):
    for _ in range(2):
        name = chance.choice(
            ["flip_bit", "truncated", "extended", "zeros", "file_lost", "stray_files"]
        )
        DAMAGES[name](chance, new, old)


# -- no damage -----------------------------------------------------------------------------------


@damage
def stray_files(chance, new, old):
    for _ in range(3):
        folder = chance.choice([new.parent, new, *(path.parent for path in files(new))])
        name = chance.choice([".DS_Store", "0.bak", ".0.aB3xYz", "x y", "core", "step-1", "\n"])
        # What an earlier damage has put there stays: to open a pipe would wait for a reader.
        if not os.path.lexists(folder / name):
            if chance.random() < 0.2:
                (folder / name).symlink_to("/")
            elif chance.random() < 0.2:
                os.mkfifo(folder / name)
            else:
                (folder / name).write_bytes(b"stray")


@damage
def record_of_the_newest(chance, new, old):
    path = replaced(new.parent / "newest.json") if (new.parent / "newest.json").exists() else None
    if path is not None and chance.random() < 0.8:
        path.write_bytes(
            chance.choice([b"", b"[]", b'{"folder": 7}', b'{"folder": "../x"}', b"\xff"])
        )
