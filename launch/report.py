"""`tfdist-report`: a report of a training run, from files of `tfdist.callbacks.Monitor`.

tfdist-report trace.json
tfdist-report runs/7 --output=report.html
"""

from __future__ import annotations

import dataclasses
import os

from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.flags.values import output_file
from tfdist.utils.checks import one_line


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """The options of the program; see the flags of the same names."""

    output: str | None = option(None, "File for the HTML page [report.html]")


_FLAGS = define_flags(ReportOptions)


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(words: list[str]) -> tuple[str, str]:
    if len(words) != 1:
        raise command.UsageError(
            "tfdist-report requires one trace, file of reports, or folder of them. Received: "
            f"{one_line(' '.join(words), 200) or 'none'}."
        )
    path = words[0]
    if not os.path.exists(path):
        raise command.UsageError(f"{path} does not exist.")
    output = _FLAGS.read().output or "report.html"
    output_file("output", output)
    return path, output


def _main(checked: tuple[str, str]) -> None:
    path, output = checked
    from tfdist.addons.monitoring.run_report import (
        UnreadableError,
        html_page,
        read_run,
        text_report,
    )

    try:
        found = read_run(path)
    except (UnreadableError, OSError) as error:
        raise command.UsageError(str(error)) from error
    print(text_report(found))
    with open(os.path.expanduser(output), "w", encoding="utf-8") as file:
        file.write(html_page(found))
    print(f"\nWrote the page to {output}.")


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-report PATH [flags]",
    summary="Summarizes a training run from the trace or the reports of a Monitor, or a folder of them: as "
    "text, and as one self-contained HTML page.",
    check=_check,
    words=True,
)


if __name__ == "__main__":
    run()
