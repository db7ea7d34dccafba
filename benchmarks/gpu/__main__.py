"""`python -m benchmarks.gpu`: what only a GPU can tell, the most important first, within a budget of seconds.

    python -m benchmarks.gpu --budget=480 --json=gpu.json
    python -m benchmarks.gpu --budget=480 --json=gpu.json --skip-done=gpu.json     # the rest, in a second call
    python -m benchmarks.gpu --rehearse --only=libraries,attention                 # small, without a GPU

Each part runs in processes of its own with a time-out, and adds a line of JSON at once, so that nothing is lost
when the machine is. Ranks share a GPU where there are fewer GPUs (`TFDIST_SHARE_GPUS`): such parts tell right from
wrong, and not how fast. `--document=docs/performance.md` writes the table there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.table import table
from benchmarks.measuring import write_between
from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.flags.values import YEAR
from tfdist.launch.run.processes import kill_session
from tfdist.launch.signals import exit_on_signals

_MARK = "benchmarks.gpu"
_TAIL = 1500


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """The options of the program; see the flags of the same names."""

    budget: float = option(480.0, "Seconds in which parts are started", least=1.0, most=YEAR)
    only: tuple[str, ...] | None = option(None, "Names of parts, with commas")
    json: str | None = option(None, "A file to which each part adds a line at once")
    skip_done: str | None = option(None, "Such a file, whose parts are not repeated")
    document: str | None = option(None, "A document whose table is renewed: docs/performance.md")
    rehearse: bool = option(False, "Small sizes, also without a GPU")


_FLAGS = define_flags(GpuOptions)


def _check(_: list[str]) -> GpuOptions:
    options = _FLAGS.read()
    unknown = set(options.only or ()) - {part.name for part in PARTS}
    if unknown:
        raise command.UsageError(
            f"--only must name parts: {', '.join(part.name for part in PARTS)}. Received: "
            f"{', '.join(sorted(unknown))}."
        )
    return options


def read(path: str | None) -> dict[str, dict]:
    """The lines of a file by their parts, the last of each."""
    if path is None or not Path(path).exists():
        return {}
    lines = map(json.loads, Path(path).read_text().splitlines())
    return {line["part"]: line for line in lines}


def run_part(part: Part, seconds: float, rehearse: bool) -> dict:
    """Runs a part; what it found, or the end of what it said.

    Args:
        part: The part.
        seconds: Its time-out.
        rehearse: Whether sizes are small.
    """
    began = time.monotonic()
    environment = {
        **os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "TFDIST_SHARE_GPUS": "1", "NCCL_DEBUG": "WARN",
        **part.environment,
    }  # fmt: skip
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu.part",
            part.name,
            *(["--rehearse"] if rehearse else []),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    found: dict = {"part": part.name}
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        said, _ = process.communicate()
        found["timed_out"] = seconds
    finally:
        kill_session(process.pid)
    results = [line for line in said.splitlines() if line.startswith("RESULT ")]
    if results:
        found["result"] = json.loads(results[-1].removeprefix("RESULT "))
    else:
        found["said"] = said[-_TAIL:]
    return {**found, "code": process.returncode, "seconds": round(time.monotonic() - began, 1)}


def _main(options: GpuOptions) -> int:
    done, began = read(options.skip_done), time.monotonic()
    found = dict(done)
    chosen = [part for part in PARTS if options.only is None or part.name in options.only]
    with exit_on_signals():
        for part in chosen:
            left = options.budget - (time.monotonic() - began)
            if part.name in done or left < min(part.seconds, 30.0):
                continue
            line = run_part(part, min(part.seconds, left), options.rehearse)
            found[part.name] = line
            print(json.dumps(line), flush=True)
            if options.json is not None:
                with open(options.json, "a") as file:
                    file.write(json.dumps(line) + "\n")
    text = table(found)
    print(text)
    if options.document is not None:
        write_between(options.document, _MARK, text)
    return int(any("result" not in line for line in found.values()))


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="python -m benchmarks.gpu [flags]",
    summary="Runs what needs a GPU, the most important first, within a budget of seconds.",
    check=_check,
)


if __name__ == "__main__":
    PROGRAM.run()
