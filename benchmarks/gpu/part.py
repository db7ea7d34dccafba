"""`python -m benchmarks.gpu.part NAME`: one part, in this process; its last line is RESULT and JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys

from benchmarks.gpu.parts import PARTS


def main() -> None:
    """Runs the part of the command line."""
    name, *flags = sys.argv[1:]
    (part,) = (each for each in PARTS if each.name == name)
    module, function = part.function.split(":")
    call = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    result = call(rehearse="--rehearse" in flags, **part.arguments)
    print("RESULT", json.dumps(result), flush=True)
    os._exit(0)  # Without the seconds that libraries take to leave.


if __name__ == "__main__":
    main()
