"""A report of a training from the files that a `Monitor` wrote: as text, and as a page of HTML."""

from tfdist.addons.monitoring.run_report.page import html_page
from tfdist.addons.monitoring.run_report.reading import Run, UnreadableError, read_run
from tfdist.addons.monitoring.run_report.text import text_report

__all__ = ["Run", "UnreadableError", "html_page", "read_run", "text_report"]
