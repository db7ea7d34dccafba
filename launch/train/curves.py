"""`--plot`: a plot of the logs of `fit` over epochs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from tfdist.launch.flags.values import UsageError, output_file

_ENDINGS = (".png", ".svg", ".pdf")
#: Logs that do not measure the model's quality.
_LEFT_OUT = ("skipped_steps",)


def check_plot(flag: str, path: str | None) -> None:
    """Reject a file that cannot be written, and any file if matplotlib is not installed."""
    if path is None:
        return
    output_file(flag, path, _ENDINGS)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"--{flag}={path} requires matplotlib. Run pip install 'tfdist[plots]', or omit --{flag}."
        )


def draw(history: Mapping[str, Sequence[float]], path: str, title: str) -> None:
    """Plot a panel for each logged value, together with its validation value.

    Args:
        history: By name, a number for each epoch; names of validation values begin with "val_".
        path: The file; its suffix determines the format.
        title: The title of the plot.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [n for n in history if not n.startswith("val_") and n not in _LEFT_OUT]
    # pyplot would require a display.
    figure = Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), number)
        epochs = range(1, len(history[name]) + 1)
        axes.plot(epochs, history[name], marker=".", label="training")
        if f"val_{name}" in history:
            axes.plot(epochs, history[f"val_{name}"], marker=".", label="validation")
            axes.legend()
        axes.set_xlabel("epoch")
        axes.set_ylabel(name.replace("_", " "))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
