"""Scaling laws: losses, compute-optimal sizes of models and data, and speed-up by more ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfdist.utils import checks

__all__ = [
    "CHINCHILLA",
    "Law",
    "Optimum",
    "Range",
    "amdahl",
    "fit_law",
    "gustafson",
    "kaplan_loss",
    "kaplan_optimum",
    "parallel_efficiency",
    "serial_share",
    "training_flops",
]

#: Seconds of a day times 10^15: the unit of compute of Kaplan et al.
PETAFLOP_DAY = 8.64e19
_DRAWS = 4000
#: Percentiles of a range, which contains 95% of the samples.
_TAILS = (2.5, 97.5)


@dataclasses.dataclass(frozen=True)
class Range:
    """An estimate with its 95% confidence interval.

    Attributes:
        value: The estimate.
        low: The lower bound.
        high: The upper bound.
    """

    value: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The compute-optimal size of a model and of its data.

    Attributes:
        parameters: N.
        tokens: D.
        loss: The loss in nats per token.
    """

    parameters: Range
    tokens: Range
    loss: Range


@dataclasses.dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token.

    Hoffmann et al. 2022 (arXiv:2203.15556), equation 2. With C = 6 N D the loss is least at
    N = G (C / 6)^a, D = (C / 6)^b / G with a = beta / (alpha + beta), b = alpha / (alpha + beta) and
    G = (alpha A / (beta B))^(1 / (alpha + beta)) (equation 4).

    Attributes:
        irreducible: E.
        of_parameters: A.
        of_tokens: B.
        alpha: The exponent of N.
        beta: The exponent of D.
        errors: Standard errors of E, ln A, ln B, alpha and beta, which are then assumed independent,
            or their covariance: 25 numbers, row by row. Empty for exact figures.

    Raises:
        ValueError: A figure is not positive, or there are not 5 or 25 errors.
    """

    irreducible: float
    of_parameters: float
    of_tokens: float
    alpha: float
    beta: float
    errors: tuple[float, ...] = ()

    def __post_init__(self):
        for name in ("of_parameters", "of_tokens", "alpha", "beta"):
            checks.number(name, getattr(self, name), above=0)
        checks.number("irreducible", self.irreducible, minimum=0)
        if len(self.errors) not in (0, 5, 25):
            raise checks.refuse("errors", self.errors, "5 standard errors, or 25 covariances")

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of a model of N parameters after D tokens."""
        checks.number("parameters", parameters, above=0)
        checks.number("tokens", tokens, above=0)
        return float(_loss(self._values(), parameters, tokens))

    def optimum(self, flops: float) -> Optimum:
        """N and D that minimize the loss for a number of training FLOPs, with confidence intervals."""
        checks.number("flops", flops, above=0)
        draws = self._draws()
        best = _optimum(self._values()[None], flops)
        drawn = _optimum(draws, flops)
        return Optimum(*(_range(one[0], each) for one, each in zip(best, drawn, strict=True)))

    def tokens_for(self, parameters: float) -> float:
        """D for which a model of N parameters is compute-optimal."""
        checks.number("parameters", parameters, above=0)
        ratio = self.alpha * self.of_parameters / (self.beta * self.of_tokens)
        return float((parameters**self.alpha / ratio) ** (1 / self.beta))

    def _values(self) -> np.ndarray:
        return np.array(
            [
                self.irreducible,
                math.log(self.of_parameters),
                math.log(self.of_tokens),
                self.alpha,
                self.beta,
            ]
        )

    def _draws(self) -> np.ndarray:
        values = self._values()
        if not self.errors:
            return values[None]
        errors = np.array(self.errors)
        covariance = errors.reshape(5, 5) if len(errors) == 25 else np.diag(errors**2)
        draws = np.random.default_rng(0).multivariate_normal(values, covariance, _DRAWS)
        return draws[(draws[:, 3:] > 0).all(axis=1)]


def _loss(values: np.ndarray, parameters, tokens):
    e, a, b, alpha, beta = np.moveaxis(np.asarray(values), -1, 0)
    return e + np.exp(a - alpha * np.log(parameters)) + np.exp(b - beta * np.log(tokens))


def _optimum(values: np.ndarray, flops: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    _, a, b, alpha, beta = np.moveaxis(values, -1, 0)
    total = alpha + beta
    g = (np.log(alpha) + a - np.log(beta) - b) / total
    parameters = np.exp(g + beta / total * math.log(flops / 6))
    tokens = flops / 6 / parameters
    return parameters, tokens, _loss(values, parameters, tokens)


def _range(value: float, drawn: np.ndarray) -> Range:
    low, high = np.percentile(drawn, _TAILS)
    return Range(float(value), float(low), float(high))


def _chinchilla() -> Law:
    e, a, b, alpha, beta = 0.03, 124.58 / 482.01, 1293.23 / 2085.43, 0.02, 0.02
    covariance = np.diag(np.square([e, a, b, alpha, beta]))
    covariance[1, 3] = covariance[3, 1] = a * alpha
    covariance[2, 4] = covariance[4, 2] = b * beta
    errors = tuple(float(each) for each in covariance.ravel())
    return Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658, errors)


#: Besiroglu et al. 2024, "Chinchilla Scaling: A replication attempt" (arXiv:2404.10102), table 1: a fit to
#: the runs of Hoffmann et al., whose own constants (1.69, 406.4, 410.7, 0.34, 0.28) do not agree with
#: those. The standard errors of A, B, E, alpha and beta are 124.58, 1293.23, 0.03, 0.02 and 0.02. The table has
#: no covariances. The factor and the exponent of a power law are correlated because all runs are far from
#: N = 1 and D = 1, so A and alpha, and B and beta, are assumed fully correlated.
CHINCHILLA = _chinchilla()


def kaplan_loss(
    parameters: float | None = None, tokens: float | None = None, flops: float | None = None
) -> float:
    """Loss in nats per token by the laws of Kaplan et al. 2020 (arXiv:2001.08361).

    Of parameters N without embeddings: (8.8e13 / N)^0.076; of tokens D: (5.4e13 / D)^0.095; of both:
    ((6.4e13 / N)^(0.076 / 0.103) + 1.8e13 / D)^0.103 (equations 1.1, 1.2 and 1.5 with table 2); of
    compute C, if compute-optimal: (3.1e8 / C)^0.050 with C in petaFLOP days (equation 1.3).

    Args:
        parameters: N.
        tokens: D.
        flops: C in FLOPs, without the others.

    Raises:
        ValueError: No argument is given, or `flops` and another one.
    """
    for name, value in (("parameters", parameters), ("tokens", tokens), ("flops", flops)):
        checks.number(name, value, above=0, optional=True)
    if (flops is None) == (parameters is None and tokens is None):
        raise ValueError(
            "`kaplan_loss` requires `parameters`, `tokens` or both, or else `flops`. Received: "
            f"parameters={parameters}, tokens={tokens}, flops={flops}."
        )
    if flops is not None:
        return float((3.1e8 / (flops / PETAFLOP_DAY)) ** 0.050)
    if parameters is None:
        return float((5.4e13 / tokens) ** 0.095)  # type: ignore[operator]
    if tokens is None:
        return float((8.8e13 / parameters) ** 0.076)
    return float(((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103)


def kaplan_optimum(flops: float) -> tuple[float, float]:
    """Parameters and tokens by Kaplan et al. 2020, table 6: N = 1.3e9 C^0.73, D = 2e10 C^0.27.

    `flops` is converted to C in petaFLOP days. Hoffmann et al. 2022 recommend far more tokens: see
    `CHINCHILLA`.
    """
    checks.number("flops", flops, above=0)
    days = flops / PETAFLOP_DAY
    return 1.3e9 * days**0.73, 2e10 * days**0.27


def training_flops(parameters: float, tokens: float) -> float:
    """Training FLOPs by 6 N D: 2 forward and 4 backward for each parameter and token.

    Kaplan et al. 2020, section 2.1. `tfdist.addons.planner.estimate` counts the FLOPs of each layer.
    """
    checks.number("parameters", parameters, above=0)
    checks.number("tokens", tokens, above=0)
    return 6.0 * parameters * tokens


def amdahl(parallel: float, ranks: float) -> float:
    """Speed-up of fixed work on n ranks, of which a share p is parallel: 1 / (1 - p + p / n).

    Amdahl 1967, "Validity of the single processor approach to achieving large scale computing
    capabilities".
    """
    checks.number("parallel", parallel, minimum=0, maximum=1)
    checks.number("ranks", ranks, minimum=1)
    return 1.0 / (1.0 - parallel + parallel / ranks)


def gustafson(parallel: float, ranks: float) -> float:
    """Speed-up of work that grows with n ranks, of which a share p is parallel: 1 - p + p n.

    Gustafson 1988, "Reevaluating Amdahl's law".
    """
    checks.number("parallel", parallel, minimum=0, maximum=1)
    checks.number("ranks", ranks, minimum=1)
    return 1.0 - parallel + parallel * ranks


def parallel_efficiency(one: float, many: float, ranks: int, *, weak: bool = False) -> float:
    """Parallel efficiency: T_1 / (n T_n), or T_1 / T_n with `weak`.

    Args:
        one: T_1, seconds of one rank.
        many: T_n, seconds of n ranks for the same work; with `weak`, for n times the work.
        ranks: n.
        weak: Whether the work grows with the number of ranks (weak scaling).
    """
    checks.number("one", one, above=0)
    checks.number("many", many, above=0)
    checks.integer("ranks", ranks, minimum=1)
    checks.boolean("weak", weak)
    return one / many if weak else one / (many * ranks)


def serial_share(ranks: Sequence[int], seconds: Sequence[float], *, weak: bool = False) -> Range:
    """Estimate the serial share of work by least squares, with its confidence interval.

    By Amdahl's law, T_n = T_1 (s + (1 - s) / n), which is linear in 1 / n. With `weak` by Gustafson's
    law: the speed-up S_n = n T_1 / T_n is n - s (n - 1). The interval is that of Student's t at 95%,
    and infinite for two measurements.

    Args:
        ranks: Numbers of ranks, at least two different ones; with `weak` they must include 1.
        seconds: Seconds of the same work for each number of ranks; with `weak`, of n times the work.
        weak: Whether the work grows with the number of ranks (weak scaling).

    Raises:
        ValueError: There are too few measurements, or not one of `seconds` for each of `ranks`.
    """
    from scipy import stats

    ranks = checks.integers("ranks", ranks, minimum=1)
    seconds = checks.numbers_of("seconds", seconds, above=0)
    checks.boolean("weak", weak)
    if len(ranks) != len(seconds) or len(set(ranks)) < 2 or (weak and 1 not in ranks):
        raise ValueError(
            "`ranks` must be at least two different numbers, including 1 with `weak`, and `seconds` must "
            f"have the same length. Received: ranks={checks.shown(ranks)}, seconds={checks.shown(seconds)}."
        )
    if weak:
        share, error = _lost_share(np.array(ranks, float), np.array(seconds))
    else:
        share, error = _serial_intercept(1 / np.array(ranks, float), np.array(seconds))
    if len(ranks) == 2:
        return Range(share, -math.inf, math.inf)
    width = float(stats.t.ppf(0.975, len(ranks) - 2)) * error
    return Range(share, share - width, share + width)


def _serial_intercept(inverse: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Amdahl's serial share and its standard error."""
    from scipy import stats

    line = stats.linregress(inverse, seconds)
    whole = line.slope + line.intercept
    # First-order error of intercept / (slope + intercept); their covariance is -mean(x) var(slope).
    cov = -inverse.mean() * line.stderr**2
    gradient = np.array([-line.intercept, line.slope]) / whole**2
    matrix = np.array([[line.stderr**2, cov], [cov, line.intercept_stderr**2]])
    return float(line.intercept / whole), math.sqrt(gradient @ matrix @ gradient)


def _lost_share(ranks: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Gustafson's serial share and its standard error, of a line through n = 1."""
    speed_up = ranks * seconds[ranks == 1].mean() / seconds
    more, lost = ranks - 1, ranks - speed_up
    share = float(more @ lost / (more @ more))
    freedom = max(len(ranks) - 2, 1)
    return share, math.sqrt(
        float(((lost - share * more) ** 2).sum()) / freedom / float(more @ more)
    )


def fit_law(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> Law:
    """Fit L(N, D) to measured runs.

    As Hoffmann et al. 2022, section 3.3: Huber loss (delta 1e-3) of the logarithm of the loss, from
    a grid of starting points. The covariance is that of 100 bootstrap fits (Besiroglu et al. 2024),
    so confidence intervals include the correlations of the constants.

    Args:
        parameters: N of each run, for at least 6 runs.
        tokens: D of each run.
        losses: The loss of each run, in nats per token.

    Raises:
        ValueError: There are too few runs, or all have the same size or number of tokens.
    """
    n = np.array(checks.numbers_of("parameters", parameters, minimum=1), float)
    d = np.array(checks.numbers_of("tokens", tokens, minimum=1), float)
    y = np.array(checks.numbers_of("losses", losses, minimum=1e-9), float)
    if not len(n) == len(d) == len(y) or len(y) < 6 or len(set(n)) < 2 or len(set(d)) < 2:
        raise ValueError(
            "A fit requires at least 6 runs, with at least two sizes and two numbers of tokens. "
            f"Received: {len(y)} losses, {len(set(n))} sizes, {len(set(d))} numbers of tokens of "
            f"{len(n)} and {len(d)} runs."
        )
    best = min(
        (_minimize(start, n, d, y) for start in _beginnings(n, d, y)), key=lambda found: found[1]
    )[0]
    draw = np.random.default_rng(0)
    found = []
    for _ in range(100):
        chosen = draw.integers(0, len(y), len(y))
        if len(set(n[chosen])) > 1 and len(set(d[chosen])) > 1:
            found.append(_minimize(best, n[chosen], d[chosen], y[chosen])[0])
    spread = np.cov(np.array([_natural(each) for each in found]).T)
    e, a, b, alpha, beta = _natural(best)
    errors = tuple(float(each) for each in spread.ravel())
    return Law(float(e), math.exp(a), math.exp(b), float(alpha), float(beta), errors)


def _natural(x: np.ndarray) -> np.ndarray:
    return np.array([math.exp(x[0]), x[1], x[2], math.exp(x[3]), math.exp(x[4])])


def _beginnings(n: np.ndarray, d: np.ndarray, y: np.ndarray):
    floor = math.log(max(float(y.min()), 1e-9))
    for share in (0.3, 0.7, 0.95):
        rest = math.log(max(float(y.mean()) - share * math.exp(floor), 1e-6) / 2)
        for exponent in (0.2, 0.4, 0.7):
            yield np.array(
                [
                    floor + math.log(share),
                    rest + exponent * float(np.log(n).mean()),
                    rest + exponent * float(np.log(d).mean()),
                    math.log(exponent),
                    math.log(exponent),
                ]
            )


def _minimize(start: np.ndarray, n: np.ndarray, d: np.ndarray, y: np.ndarray):
    from scipy import optimize

    log_n, log_d, log_y = np.log(n), np.log(d), np.log(y)

    def residuals(x):
        alpha, beta = np.exp(np.clip(x[3:], -5, 1.5))
        terms = np.stack([np.full_like(log_y, x[0]), x[1] - alpha * log_n, x[2] - beta * log_d])
        return np.logaddexp.reduce(terms) - log_y

    found = optimize.least_squares(
        residuals, start, loss="huber", f_scale=1e-3, x_scale="jac", max_nfev=400
    )
    return found.x, found.cost
