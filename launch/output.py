"""What the launcher prints of the ranks' output: lines behind [rank], without noise, bars in one line."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence

#: TensorFlow's information at start-up, and what it says once more before its log is set up. Errors and
#: warnings stay.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    rb"|I0000 00:00:\d+\.\d+ +\d+ [\w.]+:\d+\] "
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I (?:tensorflow|external)/"
    # What is left of a message of several lines, which lists the workers that have met.
    rb"|/job:\w+/replica:\d+/task:\d+$"
    rb"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler"
    # Each is logged as an error at every start of a TensorFlow with CUDA, and is none.
    rb"|(?:E|W)0000 .*Unable to register cu(?:DNN|FFT|BLAS) factory"
    rb"|W0000 .*computation placer already registered"
    # Logged as an error too, where another kernel multiplies integers.
    rb"|E0000 .*oneDNN supports DT_\w+ only on platforms with .* Falling back to the default"
)
#: The same of a machine without a GPU: CUDA finds none.
_NO_GPU = re.compile(rb"E0000 .*failed call to cuInit|E0000 .*cuda_platform\.cc")
#: Of Keras, `12/40 ━━━━━ 1s 8ms/step - loss: ...`; of tqdm, `30%|███   | 12/40 [...]`.
_KERAS_BAR = re.compile(rb" {0,9}(\d{1,12})/(\d{1,12}|Unknown) [\xe2\x94\x81=>. ]{1,200}(?=\d)")
_TQDM_BAR = re.compile(rb".{0,40}?\d%\|")
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
#: How often a bar is shown where it cannot be drawn over itself: in a file.
_SECONDS = 10.0
_ALL = "TF_CPP_MIN_LOG_LEVEL"


def is_noise(line: bytes, *, has_gpu: bool) -> bool:
    """Whether a line is TensorFlow's talk at its start, which says nothing of the training."""
    plain = line.lstrip()
    return _NOISE.match(plain) is not None or (not has_gpu and _NO_GPU.match(plain) is not None)


class RankOutput:
    """Prints lines of the ranks on stdout, each behind the rank's label.

    On a terminal a progress bar is drawn over itself; elsewhere it is a line every ten seconds and
    one when it is over. Colours are for terminals alone. TF_CPP_MIN_LOG_LEVEL=0 asks for all that
    TensorFlow says.

    Args:
        write: Writes bytes; all of them.
        is_terminal: Whether they go to a terminal.
        has_gpu: Whether ranks may run on GPUs, so that errors of CUDA are some.
        clock: Seconds, of any origin.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        *,
        is_terminal: bool | None = None,
        has_gpu: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write, self._clock, self._has_gpu = write, clock, has_gpu
        self._is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        self._has_colours = self._is_terminal and not os.environ.get("NO_COLOR")
        self._shows_all = os.environ.get(_ALL) == "0"
        #: By label, the last state of a bar that is still to be printed as a line.
        self._bars: dict[bytes, bytes] = {}
        self._shown_at: dict[bytes, float] = {}
        #: Whose bar stands in the terminal's last line.
        self._drawn: bytes | None = None

    def print(self, label: bytes, lines: Sequence[bytes]) -> None:
        """Prints lines of a rank."""
        text = bytearray()
        for line in lines:
            line = line.strip(b"\x08")
            if not line.strip(b"\x08 ") or self._is_left_out(line):
                continue
            plain = _COLOURS.sub(b"", line)
            if _KERAS_BAR.match(plain) or _TQDM_BAR.match(plain):
                text += self._bar(label, plain)
                continue
            text += self._finished(label)
            text += self._clear()
            shown = line if self._has_colours else plain
            text += b"[%s] %s\n" % (label, shown)
        if text:
            self._write(bytes(text))

    def end(self, label: bytes) -> None:
        """Prints what is left of a rank that has ended."""
        if text := self._finished(label):
            self._write(text)

    def _is_left_out(self, line: bytes) -> bool:
        return not self._shows_all and is_noise(line, has_gpu=self._has_gpu)

    def _bar(self, label: bytes, plain: bytes) -> bytes:
        """A new state of a bar: drawn over the last one, or a line now and then."""
        # The bar itself takes the place of the numbers behind it.
        found = _KERAS_BAR.match(plain)
        said = plain if found is None else b"%s/%s %s" % (*found.groups(), plain[found.end() :])
        self._bars[label] = said
        if self._is_terminal:
            width = shutil.get_terminal_size((80, 24)).columns - len(label) - 4
            cut = said.decode(errors="replace")
            if len(cut) > width:
                cut = cut[: max(width - 1, 1)] + "…"
            text = self._clear() + b"[%s] %s" % (label, cut.encode())
            self._drawn = label
            return text
        now = self._clock()
        since = self._shown_at.setdefault(label, now)
        if now - since < _SECONDS:
            return b""
        return self._finished(label)

    def _finished(self, label: bytes) -> bytes:
        """The last state of a rank's bar, as a line."""
        said = self._bars.pop(label, None)
        if said is None:
            return b""
        self._shown_at[label] = self._clock()
        return self._clear() + b"[%s] %s\n" % (label, said)

    def _clear(self) -> bytes:
        """Takes away the bar in the terminal's last line."""
        if self._drawn is None:
            return b""
        self._drawn = None
        return b"\r\x1b[K"
