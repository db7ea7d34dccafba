"""Ways in which a checkpoint is damaged, by accident or on purpose.

Each is a function of a random generator, the newest checkpoint's folder and that of the one before.
Those of `BOUND` put right bytes in a wrong place, which only a manifest with digests tells; those of
`RECORDED` leave nothing that could be looked at, and are told by the record of the newest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["BOUND", "DAMAGES", "RECORDED", "Damage"]

Damage = Callable[[random.Random, Path, Path], None]
DAMAGES: dict[str, Damage] = {}
BOUND: set[str] = set()
RECORDED: set[str] = set()


def damage(function: Damage) -> Damage:
    DAMAGES[function.__name__] = function
    return function


def bound(function: Damage) -> Damage:
    BOUND.add(function.__name__)
    return damage(function)


def recorded(function: Damage) -> Damage:
    RECORDED.add(function.__name__)
    return damage(function)


# -- what is chosen ------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def chunks(folder: Path) -> list[Path]:
    return [path for path in files(folder / "arrays") if path.name != "zarr.json"]


def descriptions(folder: Path) -> list[Path]:
    return sorted((folder / "arrays").rglob("zarr.json"))


def arrays(folder: Path) -> list[Path]:
    return [path.parent for path in descriptions(folder)]


def equal_pair(chance: random.Random, folder: Path) -> tuple[Path, Path]:
    """Two chunks of one length and of other content."""
    by_content: dict[int, dict[bytes, Path]] = {}
    for path in chunks(folder):
        content = path.read_bytes()
        by_content.setdefault(len(content), {})[content] = path
    pairs = [list(some.values()) for some in by_content.values() if len(some) > 1]
    first, second = chance.sample(chance.choice(pairs), 2)
    return first, second


def replaced(path: Path) -> Path:
    """The path, at which nothing is any more."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return path


# -- content -------------------------------------------------------------------------------------


@damage
def flip_bit(chance, new, old):
    path = chance.choice(files(new))
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


@damage
def random_bytes(chance, new, old):
    path = chance.choice(files(new))
    content = bytearray(path.read_bytes())
    begin = chance.randrange(len(content))
    content[begin : begin + 16] = chance.randbytes(len(content[begin : begin + 16]))
    path.write_bytes(content)


@damage
def truncated(chance, new, old):
    path = chance.choice(files(new))
    os.truncate(path, chance.randrange(path.stat().st_size))


@damage
def emptied(chance, new, old):
    os.truncate(chance.choice(files(new)), 0)


@damage
def extended(chance, new, old):
    with open(chance.choice(files(new)), "ab") as file:
        file.write(chance.choice([b"\n", b"\0", b" ", chance.randbytes(chance.randrange(1, 5000))]))


@damage
def grown_without_end(chance, new, old):
    os.truncate(chance.choice(files(new)), 1 << chance.choice([31, 36, 40]))


@damage
def zeros(chance, new, old):
    path = chance.choice(chunks(new))
    path.write_bytes(bytes(path.stat().st_size))


@damage
def two_lines_swapped(chance, new, old):
    path = chance.choice([new / "manifest.json", *descriptions(new)])
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[middle:] + content[:middle])


# -- lost, renamed, in another place -------------------------------------------------------------


@damage
def file_lost(chance, new, old):
    chance.choice(files(new)).unlink()


@damage
def array_lost(chance, new, old):
    shutil.rmtree(chance.choice(arrays(new)))


@damage
def all_arrays_lost(chance, new, old):
    shutil.rmtree(new / "arrays")


@damage
def chunk_renamed(chance, new, old):
    path = chance.choice(chunks(new))
    pattern = chance.choice(
        [".{}.aB3xYz", "{}.bak", "{}~", "{}.part", ".nfs000001234", "{} ", "0{}"]
    )
    path.rename(path.with_name(pattern.format(path.name)))


@damage
def case_changed(chance, new, old):
    path = chance.choice([*files(new), *arrays(new)])
    path.rename(
        path.with_name(
            path.name.swapcase() + ("" if path.name.lower() != path.name.upper() else "x")
        )
    )


@damage
def array_renamed(chance, new, old):
    path = chance.choice(arrays(new))
    path.rename(path.with_name(path.name + chance.choice(["_1", ".bak", "~"])))


@bound
def chunks_swapped(chance, new, old):
    first, second = equal_pair(chance, new)
    ours, theirs = first.read_bytes(), second.read_bytes()
    first.write_bytes(theirs)
    second.write_bytes(ours)


@bound
def chunk_copied(chance, new, old):
    first, second = equal_pair(chance, new)
    shutil.copyfile(first, second)


@bound
def chunk_of_another_step(chance, new, old):
    path = chance.choice(chunks(new))
    shutil.copyfile(old / path.relative_to(new), path)


@bound
def array_of_another_step(chance, new, old):
    path = replaced(chance.choice(arrays(new)))
    shutil.copytree(old / path.relative_to(new), path)


@bound
def all_arrays_of_another_step(chance, new, old):
    shutil.copytree(old / "arrays", replaced(new / "arrays"))


@bound
def arrays_swapped(chance, new, old):
    first, second = (path.parent for path in chance.sample(descriptions(new), 2))
    aside = new / "aside"
    first.rename(aside)
    if second.exists():
        second.rename(first)
        aside.rename(second)


@bound
def array_copied(chance, new, old):
    first, second = chance.sample(arrays(new), 2)
    content = {path.relative_to(first): path.read_bytes() for path in files(first)}
    replaced(second)
    for path, each in content.items():
        (second / path).parent.mkdir(parents=True, exist_ok=True)
        (second / path).write_bytes(each)


@damage
def manifest_of_another_step(chance, new, old):
    shutil.copyfile(old / "manifest.json", new / "manifest.json")


# -- no file any more ----------------------------------------------------------------------------


@damage
def file_is_a_folder(chance, new, old):
    path = replaced(chance.choice(files(new)))
    path.mkdir()
    if chance.random() < 0.5:
        (path / "0").write_bytes(b"0")


@damage
def folder_is_a_file(chance, new, old):
    path = replaced(chance.choice([each / "c" for each in arrays(new)] + arrays(new)))
    path.write_bytes(chance.randbytes(10))


@damage
def file_is_a_link(chance, new, old):
    path = chance.choice(files(new))
    goals = [new / "nowhere", path, old / path.relative_to(new), Path("/dev/zero"), Path("/"), new]
    goal = chance.choice(goals)
    replaced(path).symlink_to(goal)


@damage
def file_is_a_link_to_itself_elsewhere(chance, new, old):
    path = chance.choice(files(new))
    goal = new.parent / "elsewhere"
    path.rename(goal)
    path.symlink_to(goal)


@damage
def folder_is_a_link(chance, new, old):
    path = chance.choice([*arrays(new), new / "arrays"])
    goal = chance.choice([old / path.relative_to(new), new, Path("/"), new / "nowhere"])
    replaced(path).symlink_to(goal)


@damage
def file_is_a_pipe(chance, new, old):
    os.mkfifo(replaced(chance.choice(files(new))))


@damage
def file_is_a_socket(chance, new, old):
    path = replaced(chance.choice(files(new)))
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"/proc/self/fd/{here}/{path.name}")  # A socket's path is short.
    finally:
        os.close(here)


@damage
def file_is_a_device(chance, new, old):
    path = replaced(chance.choice(files(new)))
    with contextlib.suppress(PermissionError):
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, chance.choice([3, 5])))


@bound
def hard_link_to_another(chance, new, old):
    first, second = equal_pair(chance, new)
    replaced(second).hardlink_to(first)


@bound
def hard_link_to_another_step(chance, new, old):
    path = replaced(chance.choice(chunks(new)))
    path.hardlink_to(old / path.relative_to(new))


@damage
def not_readable(chance, new, old):
    chance.choice([*files(new), *arrays(new)]).chmod(0)


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
    import zlib

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
    values = [
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
        with contextlib.suppress(FileExistsError):
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
