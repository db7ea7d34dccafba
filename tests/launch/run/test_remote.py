"""What goes to other hosts, and how they are called."""

from __future__ import annotations

import shlex

import pytest

from tfdist.launch.run import remote
from tfdist.launch.run.hosts import parse_host


@pytest.fixture(autouse=True)
def fresh():
    remote._passed.cache_clear()
    yield
    remote._passed.cache_clear()


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "-", "-h:2", "--host", "-oProxyCommand=x y"])
def test_a_host_that_begins_with_a_hyphen_is_none(text):
    assert parse_host(text) is None


def test_a_host_is_no_option_of_ssh():
    words = remote.ssh("host", ["python", "a b"])
    assert words[words.index("host") - 1] == "--"
    assert words[-1] == "python 'a b'"


def test_few_connections_to_a_host_are_opened_at_once(tmp_path):
    """sshd refuses some of more than ten that have not logged in yet; other hosts do not wait for these."""

    def shell(host, command):
        opened.append(host)
        at_once.append(opened.count(host) - len(list(tmp_path.glob(f"{host}-*"))))
        log_in = f"sleep 0.5; : > {tmp_path}/{host}-$$; exec {shlex.join(command)}"
        return ["env", "SSH_CONNECTION=127.0.0.1 1 127.0.0.1 22", "sh", "-c", log_in]

    opened, at_once = [], []
    hosts = ["a"] * 11 + ["b"] * 3
    reached = remote.reach(hosts, shell)
    for each in reached:
        each.process.kill()
        each.process.wait()
    assert [each.host for each in reached] == hosts
    assert opened == ["a"] * 8 + ["b"] * 3 + ["a"] * 3
    assert max(at_once) == 8


def test_what_looks_like_a_secret_stays_here(monkeypatch, capsys):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "TFDIST_JOB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    passed = remote._passed()
    assert passed["OMP_NUM_THREADS"] == "2"
    assert "secret" not in passed.values() and "SSH_AUTH_SOCK" not in passed
    said = capsys.readouterr().err
    assert (
        "AWS_SECRET_ACCESS_KEY, HF_TOKEN, TFDIST_JOB_TOKEN, db_password look like secrets" in said
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "goes"),
    [("0,1", True), ("", True), ("-1", True), ("GPU-8932f937", False), ("0,MIG-GPU-1/2/3", False)],
)
def test_numbers_of_gpus_are_meant_for_each_host_and_names_are_not(monkeypatch, value, goes):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert remote._passed().get("CUDA_VISIBLE_DEVICES") == (value if goes else None)


def test_variables_that_are_named_go_all_the_same(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv(remote.PASS, "HF_TOKEN,OTHER")
    assert remote._passed()["HF_TOKEN"] == "secret"
    assert not capsys.readouterr().err
