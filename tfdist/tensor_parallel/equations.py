"""The equations of EinsumDense layers: inputs, kernel and outputs, a label for each dim."""

from __future__ import annotations


def terms(equation: str) -> tuple[str, str, str]:
    """The labels of inputs, kernel and outputs."""
    left, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, outputs


def equation_of_a(equation: str) -> str | None:
    """The equation of inputs and LoRA's A; None if the kernel's last dim is not the last output.

    A's last dim is the rank in place of the kernel's last, and B maps the rank to the latter. So that
    dim must be the last of the outputs.
    """
    inputs, kernel, outputs = terms(equation)
    if not outputs.endswith(kernel[-1]):
        return None
    rank = next(label for label in "rzyxwvu" if label not in equation)
    return f"{inputs},{kernel[:-1]}{rank}->{outputs[:-1]}{rank}"


def position(term: str, label: str) -> int:
    """The position of a label, counted from the end without an ellipsis."""
    if term.endswith("..."):
        return term.index(label)
    return term.index(label) - len(term)
