"""`tfdist-doctor` on a machine with a TPU."""

from __future__ import annotations

import pytest

from tfdist.launch.doctor import machine
from tfdist.runtime.versions import why_no_tpu


@pytest.mark.parametrize(
    ("version", "has"), [("2.18.0", True), ("2.20.1", True), ("2.21.0", False)]
)
def test_the_last_build(version, has):
    assert (why_no_tpu(version) == "") == has


def test_a_tpu_is_noted(monkeypatch):
    assert machine.tpus() == []
    monkeypatch.setenv("TPU_NAME", "node-7")
    monkeypatch.setattr(machine, "installed_version", lambda name: "2.21.0")
    (found,) = machine.tpus()
    assert "no build for TPUs" in str(found) and "Keras on JAX" in str(found)
    monkeypatch.setattr(machine, "installed_version", lambda name: "2.20.0")
    (found,) = machine.tpus()
    assert "not tested on TPUs" in str(found)
