"""Programs that use the extensions pass a type checker, which finds a wrong one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import ROOT

WRONG = """
from tfdist.extend import Schedule, check_schedule

check_schedule("1f1b")
Schedule(name="none", num_ranks="two", num_microbatches=4, chunks=1, splits_backward=False, actions=())
"""


def check_types(files: list[Path]) -> tuple[int, str]:
    flags = ["--check-untyped-defs", "--follow-imports=silent", "--ignore-missing-imports"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", *flags, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=files[0].parent,
        # Type checkers do not follow an editable installation.
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_programs_of_the_page_are_checked(tmp_path):
    page = (ROOT / "docs" / "extending.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) >= 6
    files = [tmp_path / f"program{number}.py" for number in range(len(programs))]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program)
    code, said = check_types(files)
    assert code == 0, said
    files[0].write_text(WRONG)
    code, said = check_types(files[:1])
    assert code == 1 and 'Argument 1 to "check_schedule"' in said and "num_ranks" in said, said
