"""`tfdist-plan fit`, `goodput` and `optimum`: scaling laws and failures, without a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tfdist.addons.planner import goodput, laws
from tfdist.addons.planner.quantities import as_count, as_seconds
from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option, refuse_ignored
from tfdist.launch.flags.values import MOST_RANKS, UsageError, input_file, refuse

_MOST_LINES = 100_000


def _shown(found: laws.Range, show=as_count) -> str:
    if found.low == found.high:
        return show(found.value)
    return f"{show(found.value)} ({show(found.low)} to {show(found.high)})"


# --- fit ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """The options of `fit`; see the flags of the same names."""

    flops: float | None = option(
        None, "Training FLOPs to find the optimum for", least=1.0, most=1e40
    )


_FIT = define_flags(FitOptions)


def _check_fit(words: list[str]) -> list[dict[str, float]]:
    """Read the runs of the given files."""
    if not words:
        raise UsageError("tfdist-plan fit requires files of runs: tfdist-plan fit runs.jsonl.")
    found: list[dict[str, float]] = []
    for word in words:
        input_file(None, word)
        try:
            lines = Path(word).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{word} cannot be read: {error}.") from None
        for number, line in enumerate(filter(str.strip, lines), 1):
            found.append(_run_of(line, f"{word}, line {number}"))
            if len(found) > _MOST_LINES:
                raise UsageError(
                    f"A fit is not supported for more than {_MOST_LINES:,} runs. Received: {word}."
                )
    names = {frozenset(run) for run in found}
    if len(names) != 1:
        raise UsageError(
            "All runs must have the same fields, and there must be at least one run. Received: "
            f"{'; '.join(', '.join(sorted(each)) for each in names) or 'none'}."
        )
    return found


def _run_of(line: str, place: str) -> dict[str, float]:
    try:
        run = json.loads(line)
    except (ValueError, RecursionError):
        run = None
    for names in (("parameters", "tokens", "loss"), ("ranks", "seconds")):
        if isinstance(run, dict) and all(
            isinstance(run.get(name), int | float) and not isinstance(run.get(name), bool)
            for name in names
        ):
            return {name: run[name] for name in names}
    raise UsageError(
        f"{place} must be a line of JSON with parameters, tokens and loss, or with ranks and seconds. "
        f"Received: {line[:100]!r}."
    )


def _fit(runs: Sequence[dict[str, float]]) -> int:
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    try:
        if "ranks" in columns:
            share = laws.serial_share([int(n) for n in columns["ranks"]], columns["seconds"])
            print(f"Serial share: {_shown(share, '{:.2%}'.format)} of the work of one rank.")
            print(f"Upper bound of the speed-up: {1 / max(share.value, 1e-9):,.1f} times.")
            return 0
        law = laws.fit_law(columns["parameters"], columns["tokens"], columns["loss"])
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(
        f"L(N, D) = {law.irreducible:.4g} + {law.of_parameters:.4g} / N^{law.alpha:.4f} + "
        f"{law.of_tokens:.4g} / D^{law.beta:.4f}, fitted to {len(runs)} runs."
    )
    errors = [law.errors[6 * place] ** 0.5 for place in range(5)]
    for name, deviation in zip(("E", "ln A", "ln B", "alpha", "beta"), errors, strict=True):
        print(f"standard error of {name}: {deviation:.3g}")
    spent = max(6 * n * d for n, d in zip(columns["parameters"], columns["tokens"], strict=True))
    flops = _FIT.read().flops
    _print_optimum(law, flops or 10 * spent)
    if flops is not None and flops > 100 * spent:
        print(f"Extrapolated: the largest run had {as_count(spent)} FLOPs.")
    return 0


def _print_optimum(law: laws.Law, flops: float) -> None:
    best = law.optimum(flops)
    print(
        f"Optimum for {as_count(flops)} FLOPs, with 95% intervals: {_shown(best.parameters)} parameters, "
        f"{_shown(best.tokens)} tokens, loss {_shown(best.loss, '{:.3f}'.format)}."
    )


FIT = command.Program(
    _fit,
    _FIT.values,
    usage="tfdist-plan fit [flags] FILE...",
    summary="Fits a scaling law to runs: lines of JSON with parameters, tokens and loss; or Amdahl's "
    "law to lines with ranks and seconds.",
    check=_check_fit,
    rest=True,
)


# --- optimum -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OptimumOptions:
    """The options of `optimum`; see the flags of the same names."""

    flops: float | None = option(None, "Training FLOPs", least=1.0, most=1e40)
    parameters: float | None = option(
        None,
        "Parameters of a model; of a mixture of experts the active ones",
        least=1.0,
        most=1e18,
    )
    tokens: float | None = option(
        None, "Training tokens [the optimal number]", least=1.0, most=1e18
    )


_OPTIMUM = define_flags(OptimumOptions)


def _check_optimum(_: list[str]) -> OptimumOptions:
    options = _OPTIMUM.read()
    if (options.flops is None) == (options.parameters is None):
        raise UsageError(
            "tfdist-plan optimum requires either --flops or --parameters. Received: "
            f"--flops={options.flops}, --parameters={options.parameters}."
        )
    if options.parameters is None:
        refuse_ignored(options, ["tokens"], "requires --parameters", "--flops")
    return options


def _optimum(options: OptimumOptions) -> int:
    parameters = options.parameters
    if parameters is not None and options.tokens is not None:
        flops = laws.training_flops(parameters, options.tokens)
        _print_losses(parameters, options.tokens)
    elif parameters is not None:
        tokens = laws.CHINCHILLA.tokens_for(parameters)
        flops = laws.training_flops(parameters, tokens)
        print(
            f"{as_count(parameters)} parameters are optimal for {as_count(flops)} FLOPs, with "
            f"{as_count(tokens)} tokens."
        )
        _print_losses(parameters, tokens)
    else:
        flops = options.flops or 0.0
        n, d = laws.kaplan_optimum(flops)
        print(
            f"Kaplan et al. 2020: {as_count(n)} parameters, {as_count(d)} tokens, loss "
            f"L(C) = (3.1e8 / C)^0.050 = {laws.kaplan_loss(flops=flops):.3f}."
        )
    print("Hoffmann et al. 2022, constants of Besiroglu et al. 2024:")
    _print_optimum(laws.CHINCHILLA, flops)
    return 0


def _print_losses(n: float, d: float) -> None:
    """Print the losses of both laws for N parameters and D tokens, in nats per token."""
    law = laws.CHINCHILLA
    chinchilla = (
        f"E + A/N^alpha + B/D^beta = {law.irreducible:g} + {law.of_parameters:g}/N^{law.alpha:g} + "
        f"{law.of_tokens:g}/D^{law.beta:g}"
    )
    rows = [
        ("Kaplan et al. 2020, L(N)", "(8.8e13/N)^0.076", laws.kaplan_loss(n)),
        ("L(D)", "(5.4e13/D)^0.095", laws.kaplan_loss(tokens=d)),
        (
            "L(N, D)",
            "((6.4e13/N)^(0.076/0.103) + 1.8e13/D)^0.103",
            laws.kaplan_loss(n, d),
        ),
        ("Hoffmann et al. 2022", chinchilla, law.loss(n, d)),
    ]
    shown = [(name, formula, f"{loss:.3f}") for name, formula, loss in rows]
    head = (f"loss of {as_count(n)} parameters after {as_count(d)} tokens", "formula", "nats")
    print(f"\n{tabulate(shown, head, disable_numparse=True)}\n")


OPTIMUM = command.Program(
    _optimum,
    _OPTIMUM.values,
    usage="tfdist-plan optimum [flags]",
    summary="Computes the optimal sizes of a model and its data for a number of training FLOPs.",
    check=_check_optimum,
)


# --- goodput -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GoodputOptions:
    """The options of `goodput`; see the flags of the same names."""

    ranks: int = option(8, "Ranks of the job", least=1, most=MOST_RANKS)
    mtbf_hours: float = option(50_000.0, "Hours between failures of a rank", least=1e-3, most=1e9)
    save_seconds: float = option(30.0, "Seconds that a save blocks training", least=1e-3, most=1e6)
    restart_seconds: float = option(
        300.0, "Seconds from a failure to the next step", least=0.0, most=1e6
    )
    interval: str | None = option(None, "Seconds between saves [the best]")

    def seconds(self) -> float | None:
        """The seconds between saves; None for the best.

        Raises:
            UsageError: The interval is not a number within bounds.
        """
        if self.interval is None:
            return None
        try:
            seconds = float(self.interval)
        except ValueError:
            seconds = 0.0
        if not 1e-3 <= seconds <= 1e9:
            raise refuse("interval", self.interval, "a number of seconds from 0.001 to 1e9")
        return seconds


_GOODPUT = define_flags(GoodputOptions)


def _check_goodput(_: list[str]) -> dict[str, Any]:
    """The arguments of `goodput`."""
    options = _GOODPUT.read()
    return {**dataclasses.asdict(options), "interval": options.seconds()}


def _goodput(arguments: dict[str, Any]) -> int:
    found = goodput.goodput(**arguments)
    rows = [
        ("time between failures of the job", as_seconds(found.mtbf)),
        ("time of training between saves", as_seconds(found.interval)),
        ("goodput", f"{found.share:.2%}"),
        ("saving", f"{found.saving:.2%}"),
        ("repeated steps", f"{found.lost:.2%}"),
        ("restarting", f"{found.restarting:.2%}"),
    ]
    print(tabulate(rows, tablefmt="plain", disable_numparse=True))
    return 0


GOODPUT = command.Program(
    _goodput,
    _GOODPUT.values,
    usage="tfdist-plan goodput [flags]",
    summary="Computes the best checkpoint interval, and the share of a job's time for training.",
    check=_check_goodput,
)
