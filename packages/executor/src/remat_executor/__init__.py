"""Capture, measure, lower and run PyTorch models under a plan, and meter the memory they use."""

from remat_executor.costs.estimate import estimated_graph
from remat_executor.errors import (
    BadInput,
    CaptureError,
    RankFailed,
    RanksDiffer,
    RematWarning,
    StepOverBudget,
    UnplannedUse,
    UnsupportedTorch,
    WrongPrediction,
)
from remat_executor.lowering.step_handler import OffloadBackend, StepHandler
from remat_executor.memory.allocator import AllocatorRecord, allocator_peak
from remat_executor.memory.meter import MemoryMeter
from remat_executor.module.buckets import Buckets
from remat_executor.module.peak_check import MarginPlanner
from remat_executor.module.pipeline import PlanFunction
from remat_executor.module.planned_module import PlannedModule
from remat_executor.module.shared_plan import SharedPlan
from remat_executor.module.step_graph import step_graph

__version__ = "0.1.0"

__all__ = [
    "AllocatorRecord",
    "BadInput",
    "Buckets",
    "CaptureError",
    "MarginPlanner",
    "MemoryMeter",
    "OffloadBackend",
    "PlanFunction",
    "PlannedModule",
    "RankFailed",
    "RanksDiffer",
    "RematWarning",
    "SharedPlan",
    "StepHandler",
    "StepOverBudget",
    "UnplannedUse",
    "UnsupportedTorch",
    "WrongPrediction",
    "allocator_peak",
    "estimated_graph",
    "step_graph",
]
