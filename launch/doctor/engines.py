"""Test of each engine by an all-reduce on two ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
import time

from tfdist.launch.doctor.findings import Finding, Section, answer_of, ended_by, ok, problem

_SECONDS = 120.0
_REMEDIES = {
    "horovod": "tfdist-install-horovod --force; --engine=tensorflow trains without it",
    "tensorflow": "allow TCP on the interface lo; unset http_proxy and https_proxy",
}
#: The program of the ranks and of the process that starts them.
_PROGRAM = """
import sys
from tfdist.testing import run_ranks

def add():
    import tensorflow as tf
    import tfdist
    strategy = tfdist.testing.strategy()
    return float(tfdist.collectives.all_reduce(tf.ones([1]), strategy.group())[0])

if __name__ == "__main__":
    found = run_ranks(add, engine=sys.argv[1], num_ranks=2)
    sys.exit(None if found == [2.0, 2.0] else f"1 + 1 is {found}")
"""


def section() -> Section:
    """The findings for both engines, tested one after the other."""
    engines = ["tensorflow"]
    if importlib.util.find_spec("horovod") is not None:
        engines.append("horovod")
    return Section("Two ranks", tuple(_meet(engine) for engine in engines))


def _meet(engine: str) -> Finding:
    what = {"tensorflow": "TensorFlow engine", "horovod": "Horovod engine"}[engine]
    begin = time.monotonic()
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    code, _, errors = answer_of([sys.executable, "-c", _PROGRAM, engine], _SECONDS, environment)
    if code is None:
        text = f"two ranks did not finish within {_SECONDS:g} s"
        return problem(what, text, _REMEDIES[engine])
    if code:
        words = "".join(f": {line}" for line in errors.strip().splitlines()[-1:])
        text = f"the test on two ranks failed: {ended_by(code)}{words}"
        return problem(what, text, _REMEDIES[engine])
    return ok(what, f"two ranks ran an all-reduce in {time.monotonic() - begin:.0f} s")
