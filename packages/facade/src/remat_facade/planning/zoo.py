"""The zoo: plans kept on disk, so that a second process on the same model need not solve.

One JSON file for each graph (by its fingerprint), budget, solver with its parameters, source of times, and
sources of the packages that solve: another version of a solver, installed or edited, never finds the plans of
this one. A plan that is found is judged by the referee on the graph at hand. It is used if it peaks within
the budget and if, by the times measured now, it recomputes hardly more than it did when it was made.

A plan that a time limit cut short is kept too, with that limit: a call that allows more time solves anew, and
what it finds takes its place.

The folder holds a bounded number of files; the plan that was not used for the longest time makes room.

Like the cache of costs the zoo is a convenience: a file that cannot be read or is not what its name says is
ignored, a folder that cannot be written is left alone, each with one warning.
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
from remat_graph import BadFile, ForeignPlan, Graph, OverBudget, Plan, RematError, fingerprint
from remat_graph.serialization.json_reader import read_sealed, write_sealed
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.training import with_placement

FORMAT = "remat-zoo"
VERSION = 2

SLOWER = 0.01
"""A saved plan may recompute so much more than when it was made, as a ratio of the step's time."""

MOST_PLANS = 500
"""So many files are kept, of some hundred KiB each; the one not used for the longest goes first."""


@attrs.define(kw_only=True, eq=False)
class Zoo:
    """Saved plans in one folder.

    Attributes:
        folder: where the files are.
        times: where the graph's times come from: a device with its flags, or a platform.
    """

    folder: Path
    times: str
    _said: set[str] = attrs.field(factory=set, init=False)

    def find(self, graph: Graph, budget_nbytes: int, method: Method) -> Plan | None:
        """The plan of an earlier process, judged again on this graph; None if there is none that serves."""
        key = self.key(graph, budget_nbytes, method)
        path = self.path(key)
        if not os.path.isfile(path):  # which no error of the system interrupts
            return None
        try:
            reader = read_sealed(path, FORMAT, VERSION)
            if reader.get("key").data != key:
                reader.fail("is of another graph, budget or solver than its name says")
            limit = reader.get("time_limit_s")
            limit_s = math.inf if limit.data is None else limit.seconds()
            data = reader.get("plan").data
            was = plan_from_data(data, source=str(path))
            settled = with_placement(graph, was.on_host) if was.on_host else graph
            plan = plan_from_data(data, graph=settled, source=str(path))
        except OverBudget:  # workspaces were measured anew and are larger
            return None
        except (BadFile, ForeignPlan, RematError, ValueError, TypeError, RecursionError) as error:
            self._say("read", f"{error}; the plan is made again")
            return None
        if plan.deadline_hit and limit_s < (math.inf if method.time_limit_s is None else method.time_limit_s):
            return None
        if plan.peak_nbytes > budget_nbytes or plan.overhead > was.overhead + SLOWER:
            return None
        with suppress(OSError):  # in a folder that is only read, nothing is ever dropped
            os.utime(path)
        return plan

    def keep(self, graph: Graph, budget_nbytes: int, method: Method, plan: Plan) -> None:
        """Save a plan; an earlier one is replaced in one go."""
        key = self.key(graph, budget_nbytes, method)
        data = {"format": FORMAT, "version": VERSION, "key": key, "time_limit_s": method.time_limit_s}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_sealed({**data, "plan": plan_to_data(plan)}, self.path(key))
            self._drop_oldest()
        except OSError as error:
            # Where nothing can be written beside it either, the cache of costs has said so.
            if os.access(self.folder.parent, os.W_OK) and self.folder.parent.is_dir():
                reason = error.strerror or str(error)
                self._say(
                    "write",
                    f"plans are not kept: {self.folder}: {reason}; set REMAT_CACHE_DIR to a folder that can "
                    "be written, or zoo=False",
                )

    def _drop_oldest(self) -> None:
        used_s = {}
        for path in self.folder.glob("plan-v*.json"):
            with suppress(FileNotFoundError):  # another process dropped it
                used_s[path] = path.stat().st_mtime
        for path in sorted(used_s, key=used_s.__getitem__)[:-MOST_PLANS]:
            path.unlink(missing_ok=True)

    def key(self, graph: Graph, budget_nbytes: int, method: Method) -> dict[str, Any]:
        """What a plan depends on, as JSON data."""
        return {
            "fingerprint": fingerprint(graph),
            "rounding_nbytes": graph.rounding_nbytes,
            "budget_nbytes": budget_nbytes,
            "solver": method.solver,
            "parameters": {name: repr(value) for name, value in sorted(method.parameters.items())},
            "times": self.times,
            "sources": _sources(method.solver),
        }

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a key, there or not."""
        text = json.dumps(key, sort_keys=True)
        return self.folder / f"plan-v{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, PlanNotKept, stacklevel=2)


def _sources(solver: str) -> dict[str, str]:
    """What decides which schedule a solver finds: our two packages' code, and versions of what it calls.

    A version alone would serve an edited solver the plans of the one before.
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
    """A hash of a package's source files; some 5 ms."""
    spec = find_spec(package)
    hashed = hashlib.sha256()
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).rglob("*.py")):
            hashed.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]
