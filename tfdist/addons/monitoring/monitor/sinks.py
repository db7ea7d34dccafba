"""Outputs of reports: the terminal, files, and services that collect figures of many programs."""

from __future__ import annotations

import abc
import http.server
import importlib
import json
import math
import os
import re
import sys
import threading
from typing import Any

import tensorflow as tf

from tfdist.addons.monitoring.monitor.summary import Report
from tfdist.addons.monitoring.monitor.words import line_of, rows_of


class Sink(abc.ABC):
    """An output of reports. Only the chief has outputs."""

    @abc.abstractmethod
    def take(self, report: Report) -> None:
        """Writes a report."""

    def close(self) -> None:
        """Called when `fit` is over."""


class Terminal(Sink):
    """One table that is updated in a terminal; elsewhere a line per report."""

    def __init__(self) -> None:
        self._live: Any = None
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"

    def take(self, report: Report) -> None:
        """Shows a report."""
        if not self._is_terminal:
            if report.kind == "interval":
                print(line_of(report), flush=True)
            return
        from rich.live import Live

        if self._live is None:
            self._live = Live(auto_refresh=False)
            self._live.start()
        self._live.update(_table(report), refresh=True)

    def close(self) -> None:
        """Keeps the last table on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _table(report: Report):
    from rich.table import Table

    table = Table(title="Training", show_header=False, title_justify="left")
    for what, value in rows_of(report):
        table.add_row(what, value)
    for rank, each in enumerate(report.ranks if len(report.ranks) > 1 else ()):
        words = f"works {1e3 * each['work']:.1f} ms a step"
        if "score" in each:
            words += f", score {each['score']:.2f}, came last in {each['came_last']:.0%}"
        table.add_row(f"rank {rank}", words)
    return table


class JsonLines(Sink):
    """A line of JSON per report, appended to a file.

    Args:
        path: The file.
        begin: The contents of the first line of this `fit`.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: str, begin: dict[str, Any]):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._write({"kind": "begin", **begin})

    def take(self, report: Report) -> None:
        """Writes a report."""
        self._write(report.to_json())

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard(Sink):
    """Scalars for TensorBoard.

    Args:
        directory: The directory of event files.
    """

    def __init__(self, directory: str):
        self._writer = tf.summary.create_file_writer(directory)

    def take(self, report: Report) -> None:
        """Writes a report."""
        with self._writer.as_default(step=report.step):
            for name, value in _flat(report).items():
                prefix = "monitor" if report.kind == "interval" else "monitor_epoch"
                tf.summary.scalar(f"{prefix}/{name}", value)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _flat(report: Report) -> dict[str, float]:
    shares = {f"section/{name}": share for name, share in report.sections.items()}
    return {name: value for name, value in (report.logs | shares).items() if math.isfinite(value)}


class Prometheus(Sink):
    """The figures of the last report in Prometheus' text format, served to this machine only.

    Args:
        port: The port; 0 for any free port.

    Raises:
        OSError: The port is in use.

    Attributes:
        port: The port.
    """

    def __init__(self, port: int):
        self._text = ""
        sink = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self):
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = sink._text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                """Logs nothing: it would be written to the terminal of the training."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, name="tfdist-prometheus", daemon=True
        ).start()

    def take(self, report: Report) -> None:
        """Stores a report."""
        if report.kind != "interval":
            return
        lines = []
        figures = report.logs | {"step": report.step, "epoch": report.epoch}
        for name, value in figures.items():
            if math.isfinite(value):
                lines += [f"# TYPE tfdist_{_plain(name)} gauge", f"tfdist_{_plain(name)} {value!r}"]
        lines.append("# TYPE tfdist_section_share gauge")
        for name, share in report.sections.items():
            lines.append(f'tfdist_section_share{{section="{_quoted(name)}"}} {share!r}')
        if len(report.ranks) > 1:
            lines.append("# TYPE tfdist_rank_work_seconds gauge")
            for rank, each in enumerate(report.ranks):
                lines.append(f'tfdist_rank_work_seconds{{rank="{rank}"}} {each["work"]!r}')
        self._text = "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()


def _plain(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _quoted(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class OpenTelemetry(Sink):
    """Gauges of the meter provider that the program has set.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """

    def __init__(self) -> None:
        try:
            metrics: Any = importlib.import_module("opentelemetry.metrics")
        except ImportError as error:
            raise ImportError(
                "Monitor(opentelemetry=True) requires a package that is not installed. Run: pip install "
                "opentelemetry-api"
            ) from error
        self._meter = metrics.get_meter("tfdist")
        self._gauges: dict[str, Any] = {}

    def take(self, report: Report) -> None:
        """Sets the gauges."""
        if report.kind != "interval":
            return
        for name, value in report.logs.items():
            if math.isfinite(value):
                self._gauge(f"tfdist.{name}").set(value)
        for name, share in report.sections.items():
            self._gauge("tfdist.section_share").set(share, {"section": name})

    def _gauge(self, name: str):
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        return self._gauges[name]
