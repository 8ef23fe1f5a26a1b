"""A training step as plain data: the graph, the schedule, and the referee that judges one on the other."""

from remat_graph.errors import BadFile, InvalidGraph, InvalidSchedule, RematError
from remat_graph.ir import Graph, Home, Implementation, Op, Role, Update, Value
from remat_graph.schedule import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Lane,
    OptimizerStep,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
)
from remat_graph.simulate import Grads, Links, Timeline, simulate
from remat_graph.verify import verify

__version__ = "0.1.0"

__all__ = [
    "BadFile",
    "Compute",
    "Deliver",
    "Free",
    "FreeHost",
    "Grads",
    "Graph",
    "Home",
    "Implementation",
    "InvalidGraph",
    "InvalidSchedule",
    "Lane",
    "Links",
    "Op",
    "OptimizerStep",
    "RematError",
    "Role",
    "Schedule",
    "Start",
    "Step",
    "Timeline",
    "Transfer",
    "Update",
    "Value",
    "Wait",
    "simulate",
    "verify",
]
