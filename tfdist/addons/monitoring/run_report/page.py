"""A report of a training as a self-contained HTML page with pictures in SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tfdist.addons.monitoring.monitor.words import milliseconds
from tfdist.addons.monitoring.run_report.reading import RankTimes, Run, Slice
from tfdist.addons.monitoring.run_report.text import figures, rank_rows, section_names, slowest

_COLORS = {
    "forward_backward": "#4c78a8",
    "optimizer": "#72b7b2",
    "communication": "#f58518",
    "input": "#e45756",
    "callbacks": "#b279a2",
    "checkpoint": "#9d755d",
    "monitor": "#bab0ac",
    "other": "#d8d8d8",
}
_MORE_COLORS = ("#54a24b", "#eeca3b", "#ff9da6", "#8c6bb1")
_WIDTH, _LEFT, _BAR = 900, 170, 16
#: In a timeline with more slices they could not be distinguished.
_MOST_SLICES = 20_000
_MOST_POINTS = 2000

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 980px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } svg { max-width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: #333 }
.key { display: inline-block; margin-right: 1.2em } .key i { display: inline-block; width: .9em; height: .9em; margin-right: .35em; vertical-align: -0.1em }
"""


def html_page(run: Run) -> str:
    """The page: figures, timeline, breakdown, overlap, slowest ranks, and curves."""
    parts = [f"<h1>Training: {_text(run.title)}</h1>"]
    if found := figures(run):
        parts.append("<h2>Last report</h2>" + _table([], [list(row) for row in found]))
    parts += _of_reports(run)
    if run.slices:
        times = run.rank_times()
        names = section_names(times)
        colors = _colors(names)
        parts.append("<h2>Traced steps by section</h2>" + _breakdown(times, names, colors))
        parts.append(_table(*rank_rows(times)))
        parts.append("<h2>Overlap of communication and computation</h2>" + _overlap(times))
        if len(times) > 1:
            rows = [
                [each.name, milliseconds(each.work), f"{score:.2f}"]
                for each, score in slowest(times)
            ]
            parts.append("<h2>Slowest ranks</h2>" + _table(["rank", "work", "score"], rows))
        parts.append("<h2>Timeline</h2>" + _timeline(run.slices, run.names, colors))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{_text(run.title)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _colors(names: Sequence[str]) -> dict[str, str]:
    found, more = dict(_COLORS), 0
    for name in names:
        if name not in found:
            found[name] = _MORE_COLORS[more % len(_MORE_COLORS)]
            more += 1
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if head else ''}{body}</table>"


def _svg(height: float, parts: Sequence[str], what: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="{_text(what)}">' + "".join(parts) + "</svg>"
    )


def _bar(x: float, y: float, width: float, color: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.2):.2f}" height="{_BAR - 3}" '
        f'fill="{color}"><title>{_text(title)}</title></rect>'
    )


def _label(text: str, y: float) -> str:
    short = text if len(text) <= 26 else f"{text[:25]}…"
    return f'<text x="0" y="{y + _BAR - 6:.1f}">{_text(short)}</text>'


def _breakdown(times: Sequence[RankTimes], names: Sequence[str], colors: dict[str, str]) -> str:
    parts, most = [], max((each.steps for each in times), default=0.0) or 1.0
    for place, each in enumerate(times):
        x, y = float(_LEFT), place * (_BAR + 4)
        parts.append(_label(each.name, y))
        for name in names:
            seconds = each.sections.get(name, 0.0)
            width = seconds / most * (_WIDTH - _LEFT)
            if width > 0:
                title = f"{name.replace('_', ' ')}: {milliseconds(seconds)}"
                parts.append(_bar(x, y, width, colors[name], title))
                x += width
    keys = "".join(
        f'<span class="key"><i style="background:{colors[name]}"></i>{_text(name.replace("_", " "))}</span>'
        for name in names
    )
    return f"<p>{keys}</p>" + _svg(len(times) * (_BAR + 4), parts, "Sections by rank")


def _overlap(times: Sequence[RankTimes]) -> str:
    rows = [
        [
            each.name,
            milliseconds(each.communication),
            milliseconds(each.hidden),
            f"{each.overlap:.1%}",
        ]
        for each in times
    ]
    return _table(["rank", "communication", "hidden", "overlap"], rows)


def _timeline(slices: Sequence[Slice], names: dict[int, str], colors: dict[str, str]) -> str:
    shown = [each for each in slices if each.lane != "step"][:_MOST_SLICES]
    end = max((each.end for each in shown), default=0.0) or 1.0
    lanes = list(dict.fromkeys((each.rank, each.lane) for each in shown))
    lanes.sort(key=lambda lane: lane[0])
    rows: dict[tuple[int, str], float] = {}
    parts, y, last = [], 0.0, None
    for rank, lane in lanes:
        if rank != last:
            y += 4
            parts.append(_label(names.get(rank, f"rank {rank}"), y))
            y, last = y + _BAR, rank
        parts.append(_label(f"  {lane}", y))
        rows[rank, lane] = y
        y += _BAR
    for each in shown:
        color = colors["communication"] if each.is_communication else colors.get(each.name, "#888")
        x = _LEFT + each.begin / end * (_WIDTH - _LEFT)
        width = (each.end - each.begin) / end * (_WIDTH - _LEFT)
        title = f"{each.name}: {milliseconds(each.end - each.begin)}"
        parts.append(_bar(x, rows[each.rank, each.lane], width, color, title))
    text = f'<text x="{_LEFT}" y="{y + 14:.0f}">0</text>'
    text += f'<text x="{_WIDTH}" y="{y + 14:.0f}" text-anchor="end">{milliseconds(end)}</text>'
    return _svg(y + 20, [*parts, text], "Timeline of the traced steps")


def _of_reports(run: Run) -> list[str]:
    """Curves of loss and throughput, and the sections of the last report."""
    reports = run.intervals or run.epochs
    if not reports:
        return []
    parts = []
    curves = (
        ("Loss", "loss"),
        ("Samples per second", "samples_per_second"),
        ("Tokens per second", "tokens_per_second"),
        ("Time of a step, seconds", "step_seconds"),
    )
    for title, name in curves:
        points = [
            (float(each["step"]), each["logs"][name]) for each in reports if name in each["logs"]
        ]
        if points:
            parts.append(f"<h2>{title}</h2>" + _curve(points, title))
    sections = reports[-1]["sections"]
    if sections:
        rows = [
            [name.replace("_", " "), f"{share:.1%}"]
            for name, share in sorted(sections.items(), key=lambda each: -each[1])
        ]
        parts.append("<h2>Sections of a step, all ranks</h2>" + _table([], rows))
    return parts


def _curve(points: Sequence[tuple[float, float]], title: str) -> str:
    points = points[:: max(len(points) // _MOST_POINTS, 1)]
    height, right = 180.0, 20.0
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(*ys, 0.0), max(*ys, 0.0)
    high = high if high > low else low + 1.0
    first, last = min(xs), max(xs)
    last = last if last > first else first + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = 70 + (x - first) / (last - first) * (_WIDTH - 70 - right)
        return across, 10 + (1 - (y - low) / (high - low)) * (height - 40)

    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in points))
    dots = "".join(
        f'<circle cx="{place(x, y)[0]:.1f}" cy="{place(x, y)[1]:.1f}" r="2.5" fill="#4c78a8">'
        f"<title>step {x:.0f}: {y:.5g}</title></circle>"
        for x, y in points
    )
    axis = (
        f'<path d="M70 10V{height - 30}H{_WIDTH - right}" fill="none" stroke="#999"/>'
        f'<text x="64" y="18" text-anchor="end">{high:.4g}</text>'
        f'<text x="64" y="{height - 30}" text-anchor="end">{low:.4g}</text>'
        f'<text x="70" y="{height - 12}">step {first:.0f}</text>'
        f'<text x="{_WIDTH - right}" y="{height - 12}" text-anchor="end">{last:.0f}</text>'
    )
    path = f'<polyline points="{line}" fill="none" stroke="#4c78a8" stroke-width="1.5"/>'
    return _svg(height, [axis, path, dots], title)
