"""The floating-point operations of a step of the models in `SIZES`, and the most that products reach here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.comparisons import Comparison
from benchmarks.job_variables import outside
from benchmarks.jobs import JobError
from tfdist.addons.planner import Transformer
from tfdist.addons.planner.parts import training_flops
from tfdist.launch.sessions import run_in_session
from tfdist.utils.checks import one_line


def step_flops(comparison: Comparison, sizes: Mapping[str, int]) -> float | None:
    """Those of the products of a step over the global batch; None for a model that is not counted.

    A backward pass counts as two forward passes, and what a mask hides counts (Chowdhery et al. 2022,
    "PaLM", appendix B).

    Args:
        comparison: Which model, and with which experts.
        sizes: Of it.
    """
    if comparison.model == "gpt":
        experts = comparison.ours.options.get("experts", {})
        model = Transformer(
            layers=sizes["layers"],
            width=sizes["width"],
            heads=sizes["heads"],
            vocabulary=sizes["vocabulary"],
            length=sizes["tokens"],
            experts=experts.get("num_experts"),
            top_k=experts.get("top_k", 2),
        )
        return sizes["batch"] * training_flops(model)
    counts = {"convnet": _convnet, "dlrm": _dlrm}
    if comparison.model not in counts:
        return None
    return 3.0 * 2.0 * sizes["batch"] * counts[comparison.model](sizes)


def _convnet(sizes: Mapping[str, int]) -> float:
    """The multiplications of a forward pass over an image."""
    total, channels, side = 0, 3, sizes["side"]
    for filters in (32, 64):
        total += 3 * 3 * side * side * (channels + filters) * filters
        channels, side = filters, side // 2
    return float(total + side * side * channels * 128 + 128 * sizes["classes"])


def _dlrm(sizes: Mapping[str, int]) -> float:
    """The multiplications of a forward pass over a row."""
    width, hidden, vectors = sizes["width"], sizes["hidden"], sizes["tables"] + 1
    pairs = vectors * (vectors - 1) // 2
    widths = (sizes["dense"], hidden, width), (width + pairs, 2 * hidden, hidden, 1)
    products = sum(one * other for each in widths for one, other in itertools.pairwise(each))
    return float(products + vectors * vectors * width)


def gemm_peak(threads: int) -> float:
    """The FLOP/s of products of large matrices on so many threads, by `tfdist-bench peak`.

    Raises:
        JobError: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
        path = Path(folder) / "peak.json"
        module = "tfdist.launch.bench.peak"
        finished = run_in_session(
            [sys.executable, "-P", "-m", module, f"--threads={threads}", f"--output={path}"],
            stderr=subprocess.PIPE,
            text=True,
            env={**outside(), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        )
        if finished.returncode:
            said = (finished.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise JobError(f"The peak of products could not be measured: {one_line(said)}")
        return float(json.loads(path.read_text())["flops"])
