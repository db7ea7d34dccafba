"""Cost models of training: memory, traffic and step time of layouts, and a search for the fastest.

Only the description of a built model and calibration require TensorFlow.
"""

from tfdist.addons.planner import goodput, laws
from tfdist.addons.planner.choice import Plan, plan
from tfdist.addons.planner.configs import from_config
from tfdist.addons.planner.describing import describe
from tfdist.addons.planner.estimates import Estimate, estimate
from tfdist.addons.planner.jobs import JobTimes, bottleneck, simulate_job
from tfdist.addons.planner.layouts import Layout
from tfdist.addons.planner.machines import DEVICES, Link, Machine, machine
from tfdist.addons.planner.models import MLP, ConvNet, Transformer
from tfdist.addons.planner.requirements import Requirement, largest_latency, requirement
from tfdist.addons.planner.search import Limits
from tfdist.addons.planner.simulation import simulate_step

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
    "requirement",
    "simulate_job",
    "simulate_step",
]
