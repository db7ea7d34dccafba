"""Filter of output that ranks print only because their job was interrupted.

A rank that is interrupted by Ctrl-C prints a traceback, and ranks that wait for it print an error of a
collective, warnings of TensorFlow or Horovod, and the watchdog's diagnosis. All of these are omitted. Output
of the program, and tracebacks of other errors, such as one in a `finally`, are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG

_TRACEBACK = re.compile(rb"Traceback \(most recent call last\):$")
#: Lines before a traceback that belong to it: of an exception that Python could not raise, and of a
#: process of `multiprocessing`.
_BEFORE = re.compile(rb"Exception ignored (?:in|on|while)\b.*:|Process [\w:-]+:$")
#: The lines between chained tracebacks.
_AND_THEN = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
#: An import from C loses the exception that interrupted it.
_INTERRUPT = re.compile(
    rb"KeyboardInterrupt\b|.*REPLACED BY KeyboardInterrupt\b|.*PyCapsule_Import could not import module\b"
)
_OF_LIBRARIES = re.compile(
    rb"[WE]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] "
    rb"|\d{4}-\d\d-\d\d [\d:.]+: [WE] (?:tensorflow|external)/"
    rb"|\[\d{4}-\d\d-\d\d [\d:.]+: [WEF] \S*horovod/\S+\] "
)
_OF_WATCHDOG = re.compile(rb"tfdist watchdog\b")
_END_OF_VERDICT = b"Ending this rank."
#: The beginning and end of the message of an error in a graph.
_OF_GRAPH, _END_OF_GRAPH = b"Graph execution error:", b"[Op:"
#: The same of NumPy's advice about an import that failed.
_OF_IMPORT, _END_OF_IMPORT = b"ImportError: ", b"Original error was: "


class LastWords:
    """Filter of the lines of ranks after the job was interrupted.

    Lines before the first sign of an interruption are returned immediately. The rest is held until the
    rank has ended, because its exit code determines which errors are kept.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[bytes]] = {}

    def take(self, rank: int, lines: Sequence[bytes]) -> Sequence[bytes]:
        """Add lines of a rank, and return those to print now."""
        if rank in self._held:
            self._held[rank] += lines
            return []
        for place, line in enumerate(lines):
            if any(sign.match(line) for sign in (_TRACEBACK, _BEFORE, _OF_LIBRARIES, _OF_WATCHDOG)):
                self._held[rank] = list(lines[place:])
                return lines[:place]
        return lines

    def end(self, rank: int, code: int) -> list[bytes]:
        """Return the remaining lines to print of a rank that has ended.

        Args:
            rank: The rank.
            code: Its exit code. With the watchdog's code, all errors are consequences of another
                rank's end.
        """
        lines, found = self._held.pop(rank, []), []
        place = 0
        while place < len(lines):
            begin = place
            if _is_traceback(lines, place):
                place, error = _end_of_traceback(lines, place)
                # A traceback without an error was truncated by SIGKILL.
                if error and code != ENDED_BY_WATCHDOG and not _INTERRUPT.match(error):
                    found += lines[begin:place]
            elif _OF_WATCHDOG.match(lines[place]):
                while place < len(lines) and not lines[place].endswith(_END_OF_VERDICT):
                    place += 1
                place += 1
            elif _OF_LIBRARIES.match(lines[place]):
                place = _indented(lines, place + 1)
            else:
                found.append(lines[place])
                place += 1
        return found


def _is_traceback(lines: Sequence[bytes], place: int) -> bool:
    if _BEFORE.match(lines[place]):
        place += 1
    return place < len(lines) and _TRACEBACK.match(lines[place]) is not None


def _end_of_traceback(lines: Sequence[bytes], place: int) -> tuple[int, bytes]:
    """The index after a traceback and those chained to it, and the last error's first line."""
    while not _TRACEBACK.match(lines[place]):
        place += 1
    # Python prints empty lines for source lines without an underlined part.
    place = _indented(lines, place + 1, b" \t\n")
    error = lines[place] if place < len(lines) else b""
    end = _end_of_message(lines, place)
    if error == _OF_IMPORT:
        error = lines[end - 1]
    place = end
    following = _indented(lines, place, b"\n")
    if following < len(lines) and lines[following] in _AND_THEN:
        following = _indented(lines, following + 1, b"\n")
        if following < len(lines) and _TRACEBACK.match(lines[following]):
            return _end_of_traceback(lines, following)
    return place, error


def _end_of_message(lines: Sequence[bytes], place: int) -> int:
    """The index after an error's message, which has several lines in TensorFlow and pybind11."""
    if place >= len(lines):
        return place
    for beginning, end in ((_OF_GRAPH, _END_OF_GRAPH), (_OF_IMPORT, _END_OF_IMPORT)):
        if lines[place].endswith(beginning):
            for last in range(place, len(lines)):
                if end in lines[last]:
                    return last + 1
    at = _indented(lines, place + 1, b"\n")
    if at < len(lines) and lines[at] == b"At:":
        return _indented(lines, at + 1, b" \t")
    return place + 1


def _indented(lines: Sequence[bytes], place: int, beginnings: bytes = b" \t") -> int:
    """The index after lines that begin with one of the characters; an empty line counts as a newline."""
    while place < len(lines) and (lines[place][:1] or b"\n") in beginnings:
        place += 1
    return place
