"""Capture, measure, lower and run PyTorch models under a plan, and meter the memory they use."""

from remat_executor.errors import BadInput, CaptureError, RematWarning, UnplannedUse, UnsupportedTorch
from remat_executor.memory.allocator import AllocatorRecord, allocator_peak
from remat_executor.memory.meter import MemoryMeter
from remat_executor.module.buckets import Buckets
from remat_executor.module.pipeline import PlanFunction
from remat_executor.module.planned_module import PlannedModule
from remat_executor.module.step_graph import step_graph

__version__ = "0.1.0"

__all__ = [
    "AllocatorRecord",
    "BadInput",
    "Buckets",
    "CaptureError",
    "MemoryMeter",
    "PlanFunction",
    "PlannedModule",
    "RematWarning",
    "UnplannedUse",
    "UnsupportedTorch",
    "allocator_peak",
    "step_graph",
]
