"""Runs a program of this folder as one rank: a line with a number asks for a block of so many steps.

    python -P start.py '{"program": "torch_data_parallel", ...}'

Each answer is a line of JSON on stdout: what was built, then for each block its times and its loss.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

_PACKAGE = "peers"


def main() -> None:
    """Serves until its standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print is no answer.
    _make_package()
    serving = importlib.import_module(f"{_PACKAGE}.serving")
    settings = serving.Settings(**json.loads(sys.argv[1]))
    for name in settings.without:
        sys.modules[name] = None  # type: ignore[assignment]
    program = importlib.import_module(f"{_PACKAGE}.{settings.program}")
    imported = serving.memory("VmRSS")
    training = program.prepare(settings)

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")

    tell(
        parameters=training.parameters,
        trained=training.trained,
        imported=imported,
        tfdist=getattr(sys.modules.get("tfdist"), "__file__", None),
    )
    for line in sys.stdin:
        block = training.block(int(line))
        tell(
            seconds=statistics.median(block.seconds),
            processor=statistics.mean(block.processor),
            loss=block.loss,
            peak=serving.memory("VmHWM"),
        )


def _make_package() -> None:
    """Makes this folder a package, without what lies beside it on the path."""
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a package.")
    sys.modules[_PACKAGE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
