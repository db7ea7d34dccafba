"""Figures as text for people."""

from __future__ import annotations

import math

_SHORT = {"forward_backward": "fwd+bwd", "communication": "comm"}
_MEBI = 1 << 20


def big(value: float) -> str:
    """A number with a prefix: 1.23 M."""
    if not math.isfinite(value):
        return str(value)
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    """The duration of a step."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def clock(seconds: float) -> str:
    """A remaining time: 1 h 03 min."""
    if not math.isfinite(seconds):
        return "unknown"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def rows_of(report) -> list[tuple[str, str]]:
    """A report as pairs of a name and a value."""
    logs = report.logs
    mean, spread = logs.get("step_seconds", 0.0), logs.get("step_seconds_std", 0.0)
    found = [
        ("step", f"{report.step:,}, epoch {report.epoch + 1}, batch {report.batch:,}"),
        ("time of a step", f"{milliseconds(mean)} ± {milliseconds(spread)}"),
        ("samples/s", f"{logs.get('samples_per_second', 0.0):,.0f}"),
    ]

    def add(label: str, name: str, form) -> None:
        if name in logs:
            found.append((label, form(logs[name])))

    add("tokens/s", "tokens_per_second", lambda value: f"{value:,.0f}")
    add("model FLOP/s", "model_flops_per_second", big)
    add("MFU", "mfu", lambda value: f"{value:.1%}")
    add("loss", "loss", lambda value: f"{value:.4g}")
    add("gradient norm", "gradient_norm", lambda value: f"{value:.3g}")
    add("loss scale", "loss_scale", lambda value: f"{value:g}")
    for name, share in sorted(report.sections.items(), key=lambda each: -each[1]):
        if share >= 0.0005:
            found.append((name.replace("_", " "), f"{share:.1%}"))
    add("communication hidden", "communication_hidden", lambda value: f"{value:.0%}")
    add("sent while communicating", "bytes_per_second", lambda value: f"{big(value)}B/s")
    add("of the measured bandwidth", "bandwidth_use", lambda value: f"{value:.0%}")
    add("memory", "memory", lambda value: f"{value / _MEBI:,.0f} MiB")
    add("peak memory", "peak_memory", lambda value: f"{value / _MEBI:,.0f} MiB")
    add("imbalance", "imbalance", lambda value: f"{value:.1%}")
    add("time left", "eta_seconds", clock)
    return found


def line_of(report) -> str:
    """A report as one line."""
    logs = report.logs
    mean, spread = logs.get("step_seconds", 0.0), logs.get("step_seconds_std", 0.0)
    parts = [
        f"step {report.step}",
        f"epoch {report.epoch + 1}",
        f"{milliseconds(mean)} ± {milliseconds(spread)}",
        f"{logs.get('samples_per_second', 0.0):,.0f} samples/s",
    ]
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in logs:
        parts.append(f"MFU {logs['mfu']:.1%}")
    if "loss" in logs:
        parts.append(f"loss {logs['loss']:.4g}")
    shares = sorted(report.sections.items(), key=lambda each: -each[1])
    parts.append(
        ", ".join(
            f"{_SHORT.get(name, name)} {share:.0%}" for name, share in shares if share >= 0.005
        )
    )
    if "communication_hidden" in logs:
        parts.append(f"comm hidden {logs['communication_hidden']:.0%}")
    if "gradient_norm" in logs:
        parts.append(f"norm {logs['gradient_norm']:.3g}")
    if "loss_scale" in logs:
        parts.append(f"loss scale {logs['loss_scale']:g}")
    parts.append(f"{logs.get('peak_memory', 0.0) / _MEBI:,.0f} MiB")
    if "eta_seconds" in logs:
        parts.append(f"{clock(logs['eta_seconds'])} left")
    return " | ".join(parts)
