"""What a training costs before it runs: bytes, traffic and time of layouts, and the best of them.

Nothing here needs TensorFlow, but the description of a built model and calibration.
"""

from tfdist.planner import goodput, laws
from tfdist.planner.choice import Plan, plan
from tfdist.planner.estimates import Estimate, estimate
from tfdist.planner.layouts import Layout
from tfdist.planner.machines import DEVICES, Link, Machine, machine
from tfdist.planner.models import MLP, ConvNet, Transformer, from_config
from tfdist.planner.search import Limits

__all__ = [
    "ConvNet",
    "DEVICES",
    "Estimate",
    "Layout",
    "Limits",
    "Link",
    "MLP",
    "Machine",
    "Plan",
    "Transformer",
    "estimate",
    "from_config",
    "goodput",
    "laws",
    "machine",
    "plan",
]
