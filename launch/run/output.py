"""The launcher's output: lines of the ranks with a prefix, without startup messages."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence

#: TensorFlow's informational startup messages, and those repeated before its log is initialized. Errors
#: and warnings are kept.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    rb"|I0000 00:00:\d+\.\d+ +\d+ [\w.]+:\d+\] "
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I (?:tensorflow|external)/"
    # The last lines of a message that lists the connected workers.
    rb"|/job:\w+/replica:\d+/task:\d+$"
    rb"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler"
    # Logged as errors at each start of TensorFlow with CUDA, but harmless.
    rb"|(?:E|W)0000 .*Unable to register cu(?:DNN|FFT|BLAS) factory"
    rb"|W0000 .*computation placer already registered"
    # Logged as an error too, although another kernel multiplies integers.
    rb"|E0000 .*oneDNN supports DT_\w+ only on platforms with .* Falling back to the default"
)
#: The same for a machine without a GPU.
_NO_GPU = re.compile(rb"E0000 .*failed call to cuInit|E0000 .*cuda_platform\.cc")
#: Keras: `12/40 ━━━━━ 1s 8ms/step - loss: ...`; tqdm: `30%|███   | 12/40 [...]`.
_KERAS_BAR = re.compile(rb" {0,9}(\d{1,12})/(\d{1,12}|Unknown) [\xe2\x94\x81=>. ]{1,200}(?=\d)")
_TQDM_BAR = re.compile(rb".{0,40}?\d%\|")
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
#: Seconds between the lines of a progress bar if the output is not a terminal.
_SECONDS = 10.0
_ALL = "TF_CPP_MIN_LOG_LEVEL"


def is_noise(line: bytes, *, has_gpu: bool) -> bool:
    """Whether a line is one of TensorFlow's startup messages."""
    plain = line.lstrip()
    return _NOISE.match(plain) is not None or (not has_gpu and _NO_GPU.match(plain) is not None)


class RankOutput:
    """Printer of the ranks' lines on stdout, each with the rank's label as a prefix.

    On a terminal a progress bar is redrawn in place; otherwise it is printed as a line every ten
    seconds and at its end. Colors are kept on terminals only. TF_CPP_MIN_LOG_LEVEL=0 keeps all messages
    of TensorFlow.

    Args:
        write: Function that writes all of the given bytes.
        is_terminal: Whether the output is a terminal.
        has_gpu: Whether ranks may run on GPUs, so that errors of CUDA matter.
        clock: Function that returns seconds.
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
        #: By label, the last state of a bar that is not yet printed as a line.
        self._bars: dict[bytes, bytes] = {}
        self._shown_at: dict[bytes, float] = {}
        #: The label of the bar in the terminal's last line.
        self._drawn: bytes | None = None

    def print(self, label: bytes, lines: Sequence[bytes]) -> None:
        """Print lines of a rank."""
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
        """Print the remaining progress bar of a rank that has ended."""
        if text := self._finished(label):
            self._write(text)

    def _is_left_out(self, line: bytes) -> bool:
        return not self._shows_all and is_noise(line, has_gpu=self._has_gpu)

    def _bar(self, label: bytes, plain: bytes) -> bytes:
        """The text for a new state of a bar: redrawn in place, or a line after some time."""
        # The bar is omitted in favor of the numbers after it.
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
        """The text of the last state of a rank's bar, as a line."""
        said = self._bars.pop(label, None)
        if said is None:
            return b""
        self._shown_at[label] = self._clock()
        return self._clear() + b"[%s] %s\n" % (label, said)

    def _clear(self) -> bytes:
        """The text that clears the bar in the terminal's last line."""
        if self._drawn is None:
            return b""
        self._drawn = None
        return b"\r\x1b[K"
