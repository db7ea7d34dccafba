"""What a training costs before it runs: bytes, traffic and time of layouts, and the best of them.

Nothing here needs TensorFlow, but the description of a built model and calibration.
"""

from tfdist.planner import goodput, laws
from tfdist.planner.choice import Plan, plan
from tfdist.planner.configs import from_config
from tfdist.planner.describing import describe
from tfdist.planner.estimates import Estimate, estimate
from tfdist.planner.goodput import required_bandwidth
from tfdist.planner.jobs import JobTimes, bottleneck, simulate_job
from tfdist.planner.layouts import Layout
from tfdist.planner.machines import DEVICES, Link, Machine, machine
from tfdist.planner.models import MLP, ConvNet, Transformer
from tfdist.planner.requirements import Requirement, largest_latency, requirement
from tfdist.planner.search import Limits
from tfdist.planner.simulation import simulate_step

__all__ = [
    "ConvNet",
    "DEVICES",
    "Estimate",
    "JobTimes",
    "Layout",
    "Limits",
    "Link",
    "MLP",
    "Machine",
    "Plan",
    "Requirement",
    "Transformer",
    "bottleneck",
    "describe",
    "estimate",
    "from_config",
    "goodput",
    "largest_latency",
    "laws",
    "machine",
    "plan",
    "required_bandwidth",
    "requirement",
    "simulate_job",
    "simulate_step",
]
