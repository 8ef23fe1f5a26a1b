"""The zoo: plans saved on disk, so that a second process on the same model need not run a solver.

The key of a file is the graph (by its fingerprint), the budget, the solver with its parameters, the source of
times, and the source code of the packages that solve, so another version of a solver never loads the plans of
this one. The referee simulates a loaded plan on the present graph. The plan is used if its peak is within the
budget and its overhead, by the times measured now, is hardly more than when it was made.

Names of files end with the structure of the graph, so plans of another size of the step, or for another
budget, are found without reading all files. Files of before end with the key, and are found by it alone.

A plan of a search that a time limit ended is saved with that limit. A call with a longer limit solves again
and replaces the plan. The folder holds a bounded number of files; the least recently used is deleted first.

A file that cannot be read or has another key is ignored, and a folder that cannot be written is not used;
each gives one warning.
"""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from remat_facade.errors import PlanNotKept
from remat_facade.planning.method import Method
from remat_facade.planning.shipped_plans import SHIPPED, shipped_of
from remat_graph import (
    BadFile,
    ForeignPlan,
    Grads,
    Graph,
    OverBudget,
    Plan,
    RematError,
    Schedule,
    fingerprint,
    structure,
)
from remat_graph.serialization.json_reader import read_sealed, write_sealed
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.training import with_placement

FORMAT = "remat-zoo"
VERSION = 2

SLOWER = 0.01
"""Largest increase of a saved plan's overhead since it was made, as a share of the step's time."""

MOST_PLANS = 500
"""Most files in the folder, of about 100 KiB each."""

MOST_OF_STEP = 8
"""Most plans of other sizes and budgets of a step that are read; the latest ones."""

_OF_SIZE = ("fingerprint", "rounding_nbytes", "budget_nbytes", "times")
"""Entries of a key in which these plans may differ."""


@attrs.define(kw_only=True, eq=False)
class Zoo:
    """Saved plans in one folder."""

    folder: Path  # the folder of the files
    times: str  # the source of the graph's times: a device with its flags, or a platform
    shipped: Path = SHIPPED  # plans that came with the package, carried over where none were saved
    _warned: set[str] = attrs.field(factory=set, init=False)

    def find(self, graph: Graph, budget_nbytes: int, method: Method) -> Plan | None:
        """The saved plan, simulated again on this graph; None if there is no valid one."""
        key = self.key(graph, budget_nbytes, method)
        places = self.path(key, graph), self.path(key)
        path = next((place for place in places if os.path.isfile(place)), None)  # False on any system error
        if path is None:
            return None
        try:
            reader = read_sealed(path, FORMAT, VERSION)
            if reader.get("key").data != key:
                reader.fail("has another graph, budget or solver than its name")
            limit = reader.get("time_limit_s")
            limit_s = math.inf if limit.data is None else limit.seconds()
            data = reader.get("plan").data
            recorded = plan_from_data(data, source=str(path))
            placed = with_placement(graph, recorded.on_host) if recorded.on_host else graph
            plan = plan_from_data(data, graph=placed, source=str(path))
        except OverBudget:  # workspaces were measured again and are larger
            return None
        except (BadFile, ForeignPlan, RematError, ValueError, TypeError, RecursionError) as error:
            self._warn("read", f"{error}; the model is planned again")
            return None
        if plan.deadline_hit and limit_s < (math.inf if method.time_limit_s is None else method.time_limit_s):
            return None
        if plan.peak_nbytes > budget_nbytes or plan.overhead > recorded.overhead + SLOWER:
            return None
        with suppress(OSError):  # a read-only folder, in which no file is ever deleted
            os.utime(path)
        return plan

    def of_step(self, graph: Graph, method: Method) -> list[Plan]:
        """Plans of the same step at other sizes or budgets, the latest first; not simulated on this graph.

        Last come the plans of the package, which are for steps that make new gradients.
        """
        key = self.key(graph, 0, method)
        paths = sorted(self._paths(f"plan-v{VERSION}-*{_step_of(graph)}"), key=_used_s, reverse=True)
        found = []
        for path in paths[:MOST_OF_STEP]:
            with suppress(BadFile, ForeignPlan, RematError, ValueError, TypeError, RecursionError):
                reader = read_sealed(path, FORMAT, VERSION)
                of = dict(reader.get("key").mapping())
                if {**of, **{name: key[name] for name in _OF_SIZE}} == key:
                    found.append(plan_from_data(reader.get("plan").data, source=str(path)))
        return found if "grads" in method.parameters else found + shipped_of(structure(graph), self.shipped)

    def keep(self, graph: Graph, budget_nbytes: int, method: Method, plan: Plan) -> None:
        """Save a plan; it atomically replaces an earlier one."""
        key = self.key(graph, budget_nbytes, method)
        data = {"format": FORMAT, "version": VERSION, "key": key, "time_limit_s": method.time_limit_s}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_sealed({**data, "plan": plan_to_data(plan)}, self.path(key, graph))
            self._drop_oldest()
        except OSError as error:
            # If the parent folder cannot be written either, the cost cache has warned about it.
            if os.access(self.folder.parent, os.W_OK) and self.folder.parent.is_dir():
                reason = error.strerror or str(error)
                self._warn(
                    "write",
                    f"plans are not saved: {self.folder}: {reason}; set REMAT_CACHE_DIR to a writable "
                    "folder, or zoo=False",
                )

    def keep_smallest(
        self, graph: Graph, schedule: Schedule, nbytes: int, method: Method, grads: Grads
    ) -> None:
        """Save the schedule of the smallest budget that an error names."""
        plan = Plan.from_schedule(
            graph, schedule, budget_nbytes=nbytes, lower_bound_s=0.0, solver=method.solver, grads=grads
        )
        self.keep(graph, *smallest_as(grads), plan)

    def _drop_oldest(self) -> None:
        for path in sorted(self._paths("plan-v*.json"), key=_used_s)[:-MOST_PLANS]:
            path.unlink(missing_ok=True)

    def _paths(self, pattern: str) -> list[Path]:
        """Files of the folder; none on a system error."""
        with suppress(OSError):
            return list(self.folder.glob(pattern))
        return []

    def key(self, graph: Graph, budget_nbytes: int, method: Method) -> dict[str, Any]:
        """All that a plan depends on, as JSON data."""
        return {
            "fingerprint": fingerprint(graph),
            "rounding_nbytes": graph.rounding_nbytes,
            "budget_nbytes": budget_nbytes,
            "solver": method.solver,
            "parameters": {name: repr(value) for name, value in sorted(method.parameters.items())},
            "times": self.times,
            "sources": _sources(method.solver),
        }

    def path(self, key: Mapping[str, Any], graph: Graph | None = None) -> Path:
        """The file of a key, with the structure of its graph in the name if given; it may not exist."""
        text = json.dumps(key, sort_keys=True)
        end = ".json" if graph is None else _step_of(graph)
        return self.folder / f"plan-v{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:32]}{end}"

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, PlanNotKept, stacklevel=2)


def smallest_as(grads: Grads) -> tuple[int, Method]:
    """The budget and the method of the key of schedules for the smallest budgets that errors name."""
    return 2**63 - 1, Method(solver="smallest", parameters={"grads": grads})


def _step_of(graph: Graph) -> str:
    """The end of the names of all plans of a step."""
    return f"-{structure(graph)[:16]}.json"


def _used_s(path: Path) -> float:
    """When a file was used last; 0 if another process has deleted it."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _sources(solver: str) -> dict[str, str]:
    """What determines a solver's schedule: the code of our two packages, and the versions of libraries.

    A version number alone would not change when a solver is edited.
    """
    found = {name: _digest(name) for name in ("remat_graph", "remat_solvers")}
    for name in ("highspy", "numba", "numpy"):
        if find_spec(name) is not None:
            found[name] = version(name)
    for point in entry_points(group="remat.solvers", name=solver):
        if point.dist is not None:
            found[point.dist.name] = point.dist.version
    return found


def _digest(package: str) -> str:
    """A hash of a package's source files; takes about 5 ms."""
    spec = find_spec(package)
    hashed = hashlib.sha256()
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).rglob("*.py")):
            hashed.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]
