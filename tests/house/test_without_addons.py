"""The tests of the core where there are no add-ons: that they can be imported; the program itself runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.sources import ROOT
from tests.house.without_addons import paths


@pytest.mark.slow
def test_core_tests_import_no_add_on():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.house.without_addons", "--collect-only", *paths()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert not ran.returncode, ran.stdout[-2000:] + ran.stderr[-2000:]
