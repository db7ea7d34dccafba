"""The key of ranks that no launcher gave a secret."""

from __future__ import annotations

import multiprocessing
import os
import stat

import pytest

from tfdist.runtime.job_key import JOB_TOKEN, job_key

JOB = ["12", "0"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def path_in(home):
    return home / ".cache" / "tfdist" / "job-key"


def key(*, job=JOB, is_one_host=True, **environment):
    return job_key(job, environment, is_one_host=is_one_host)


def test_ranks_of_one_host_share_a_file_that_only_the_user_reads(home, caplog):
    found = key()
    assert key() == found and len(found) == 32
    assert stat.S_IMODE(path_in(home).stat().st_mode) == 0o600
    assert key(job=["13", "0"]) != found
    path_in(home).unlink()
    assert key() != found
    assert not caplog.text


def _key_of_a_process(home):
    os.environ["HOME"] = home
    return job_key(JOB, {}, is_one_host=True)


def test_ranks_that_start_at_once_find_one_key(home):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(_key_of_a_process, [str(home)] * 16))) == 1


def test_a_token_goes_before_the_file(home):
    found = key(**{JOB_TOKEN: "secret"})
    assert key(is_one_host=False, **{JOB_TOKEN: "secret"}) == found
    assert key(**{JOB_TOKEN: "another"}) != found
    assert not path_in(home).exists()


def test_without_a_secret_the_log_says_so(home, caplog):
    found = key(is_one_host=False)
    assert key(is_one_host=False) == found
    assert f"Set {JOB_TOKEN} to a secret" in caplog.text
    assert not path_in(home).exists()


def readable(path):
    path.chmod(0o640)


def short(path):
    path.write_bytes(b"x")


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("change", [readable, short, pipe])
def test_a_file_that_others_may_know_is_refused(home, change):
    key()
    change(path_in(home))
    with pytest.raises(PermissionError, match="Remove it"):
        key()


def test_a_link_is_not_followed(home, caplog):
    found = key()
    link(path_in(home))
    assert key() != found
    assert f"Set {JOB_TOKEN}" in caplog.text


def test_a_home_that_cannot_be_written(home, caplog):
    (home / ".cache").write_text("a file")
    assert len(key()) == 32
    assert f"Set {JOB_TOKEN}" in caplog.text
