"""Compiled files that are not as they were built."""

from __future__ import annotations

import shutil

import pytest

from tfdist.backend.native import Library
from tfdist.launch.install_horovod import build as horovod_build
from tfdist.launch.install_horovod import native_build
from tfdist.launch.install_horovod.digests import write_digest
from tfdist.launch.install_horovod.prerequisites import (
    BuildOptions,
    PrerequisiteError,
    check_interpreter,
)
from tfdist.runtime.digests import matches_digest


def damage_end(path):
    with open(path, "ab") as file:
        file.write(b"x")


def damage_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def without_digest(path):
    path.with_name(f"{path.name}.sha256").unlink()


def empty_digest(path):
    path.with_name(f"{path.name}.sha256").write_bytes(b"\xff")


DAMAGES = [damage_end, damage_bit, cut, without_digest, empty_digest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told(tmp_path, damage):
    path = tmp_path / "library.so"
    path.write_bytes(b"content of a library")
    assert not matches_digest(path)
    write_digest(path)
    assert matches_digest(path)
    damage(path)
    assert not matches_digest(path)


def test_another_file_with_its_digest_is_not_taken(tmp_path):
    for name in ("one.so", "other.so"):
        (tmp_path / name).write_text(name)
        write_digest(tmp_path / name)
    for suffix in ("", ".sha256"):
        shutil.copy(tmp_path / f"other.so{suffix}", tmp_path / f"one.so{suffix}")
    assert not matches_digest(tmp_path / "one.so")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_wheel_is_built_again(tmp_path, monkeypatch, capsys, damage):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / horovod_build.cache_key(BuildOptions(), check_interpreter())
    wheel = folder / f"horovod-{horovod_build.HOROVOD_VERSION}-cp311-none-any.whl"
    folder.mkdir()
    wheel.write_bytes(b"content of a wheel")
    write_digest(wheel)
    assert horovod_build.build(BuildOptions(), tmp_path) == wheel
    damage(wheel)
    # It would be built, if there were a compiler.
    with pytest.raises(PrerequisiteError, match="compiler"):
        horovod_build.build(BuildOptions(), tmp_path)
    assert f"{wheel} does not match its digest" in capsys.readouterr().out


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A library that was built, as far as its name and its digest tell."""
    path = tmp_path / "tfdist-0123.so"
    path.write_bytes(b"content of a library")
    write_digest(path)
    monkeypatch.setattr(Library, "path", lambda self: path)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_not_loaded(built, caplog, damage):
    assert Library(built.parent, "test").find() == built
    damage(built)
    assert Library(built.parent, "test").find() is None
    assert f"{built} is not loaded: it does not match its digest" in caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_of_the_cache_is_not_installed(built, tmp_path, monkeypatch, damage):
    kept = tmp_path / "cache" / built.name
    kept.parent.mkdir()
    shutil.copy(built, kept)
    write_digest(kept)
    built.unlink()
    monkeypatch.setattr(native_build, "find_compiler", lambda _: None)
    # Libraries are installed at once, and `built` gives all of them one path.
    monkeypatch.setattr(native_build, "find_addon", lambda _: None)
    assert "Copied the compiled library" in native_build.install_native(tmp_path / "cache")
    assert matches_digest(built)
    built.unlink()
    damage(kept)
    assert "No C++ compiler" in native_build.install_native(tmp_path / "cache")
    assert not built.exists()
