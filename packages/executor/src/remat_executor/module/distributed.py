"""One plan for all ranks: rank 0 solves, the others receive its plan.

Ranks that run different plans give the same gradients, but wait for the slowest and peak apart. Planned
together, each rank captures and measures its own step; the graphs are compared; rank 0 plans with its own
times and, per op, the largest workspace measured on any rank, so that the plan holds on all of them; the plan
travels as JSON, and each rank asks the referee about it on its own graph.

Whatever goes wrong on a rank, before, during or after the exchange, is raised on every rank. There are three
collectives: reports of graphs or errors, rank 0's plan or error, and whether all ranks could use it. A rank
that fails takes part in the next one due, and says so there.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import torch.distributed as dist

from remat_executor.errors import BadInput, RankFailed, RanksDiffer, warn
from remat_graph import Graph, RematError
from remat_graph.errors import shown, text_of
from remat_graph.fingerprint import fingerprint
from remat_graph.plan import Plan
from remat_graph.serialization.plans import plan_from_data, plan_to_data

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from remat_executor.module.pipeline import PlanFunction

Ranks: TypeAlias = Literal["together", "alone"] | "ProcessGroup"


def plan_sharing(ranks: Ranks | None) -> AbstractContextManager["SharedPlan | None"]:
    """The context in which a module is built: a `SharedPlan` if ranks plan together.

    Args:
        ranks: "together" for the ranks of the default group, or a group; "alone" if each plans for itself;
            None for the same with a word of warning where there are several.

    Raises:
        BadInput: it is none of these.
    """
    if ranks is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warn(
                "each rank plans for itself, and what they measure may give them different plans: "
                'with ranks="together" rank 0 solves for all ("alone" says that this is meant)'
            )
        return nullcontext()
    if ranks == "alone":
        return nullcontext()
    if isinstance(ranks, str) and ranks != "together":
        raise BadInput(
            problem=f"ranks={shown(ranks)} means nothing",
            advice='give "together", "alone" or a process group',
        )
    return SharedPlan(None if isinstance(ranks, str) else ranks)


class SharedPlan(AbstractContextManager["SharedPlan"]):
    """A context around the building of one planned module, by all ranks of a group at once.

        with OnePlan(group) as together:
            module = PlannedModule(model, args, kwargs, together.planner(planner))

    The exchange goes through `torch.distributed`'s collectives for objects, on a GPU backend by way of the
    current device: set it first. Others wait for rank 0's solver within the group's timeout.

    Graphs that are captured later, in training, are planned by each rank for itself: the others may not have
    met the same shapes, and would never answer.

    Args:
        group: the ranks; None for the default group.

    Raises:
        BadInput: there is no such group, or this rank is not in it.
        RanksDiffer: a rank has another graph or other terms; on every rank.
        RankFailed: another rank could not plan or build; an error of ours is raised as itself, from this one.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise BadInput(
                problem="ranks cannot plan together before there is a process group",
                advice="call torch.distributed.init_process_group first, or plan without ranks=",
            )
        self._group = group
        self._rank = dist.get_rank(group)
        if self._rank < 0:
            raise BadInput(
                problem=f"rank {dist.get_rank()} is not in the group whose ranks plan together",
                advice="plan on the ranks of the group only",
            )
        self._next: Literal["reports", "verdicts", "nothing"] = "reports"

    def planner(self, planner: "PlanFunction", terms: Mapping[str, str] | None = None) -> "PlanFunction":
        """The planner to build the module with.

        Args:
            planner: asked on rank 0 for the first graph, on every rank for later ones.
            terms: what else all ranks must have in common, such as the budget, by name.
        """

        def plan(graph: Graph) -> Plan:
            return self._share(planner, graph, terms or {}) if self._next == "reports" else planner(graph)

        return plan

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others how it ended; raise what went wrong with them."""
        interrupted = error is not None and not isinstance(error, Exception)
        if self._next == "nothing" or interrupted:
            return
        report: dict[str, Any] = {}
        if error is not None:
            report = {"error": _error_data(error)}
        elif self._next == "reports":
            report = {"error": {"kind": "no plan", "text": "its planner was not asked"}}
        reports = self._gather(report)
        if error is None:
            _raise_first(reports)

    def _share(self, planner: "PlanFunction", graph: Graph, terms: Mapping[str, str]) -> Plan:
        """Rank 0's plan, judged on this rank's graph."""
        reports = self._gather({"graph": _description(graph, terms), "workspaces": list(_workspaces(graph))})
        _raise_first(reports)
        differences = tuple(_differences([report["graph"] for report in reports]))
        if differences:
            raise RanksDiffer(differences=differences)
        box: list[Any] = [None]
        if self._rank == 0:
            largest = (max(of_ranks) for of_ranks in zip(*(r["workspaces"] for r in reports), strict=True))
            box = self._solved(lambda: planner(_with_workspaces(graph, largest)))
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        answer = json.loads(box[0])
        _raise_first([answer])
        self._next = "verdicts"
        return plan_from_data(answer["plan"], graph=graph, source="the plan of rank 0")

    def _solved(self, plan: Callable[[], Plan]) -> list[str]:
        """Rank 0's plan as text; what it raises goes to the others first."""
        try:
            return [json.dumps({"plan": plan_to_data(plan())})]
        except Exception as error:
            data = [json.dumps({"error": _error_data(error) | {"rank": 0}})]
            dist.broadcast_object_list(data, group=self._group, group_src=0)
            raise

    def _gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """The reports of all ranks; until something else is said, no other collective is due."""
        self._next = "nothing"
        texts: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(texts, json.dumps(report), group=self._group)
        reports = [json.loads(text) for text in texts]
        for rank, found in enumerate(reports):
            if "error" in found:
                found["error"]["rank"] = rank
        return reports


def _raise_first(reports: Iterable[Mapping[str, Any]]) -> None:
    """Raise the first error of a rank: as itself if it is ours, so that who handles it does on every rank."""
    for report in reports:
        if "error" in report:
            data = report["error"]
            failed = RankFailed(rank=data["rank"], problem=f"{data['kind']}: {data['text']}")
            same = _error_from_data(data)
            if same is not None:
                raise same from failed
            raise failed


def _error_data(error: BaseException) -> dict[str, Any]:
    """An error as JSON data: an error of ours with its fields."""
    data: dict[str, Any] = {"kind": type(error).__qualname__, "text": text_of(error)}
    if isinstance(error, RematError) and attrs.has(kind := type(error)):
        fields = {field.name: getattr(error, field.name) for field in attrs.fields(kind)}
        if all(isinstance(content, str | int | float) for content in fields.values()):
            data.update(module=type(error).__module__, fields=fields)
    return data


def _error_from_data(data: Mapping[str, Any]) -> RematError | None:
    """The same error, if it is one of ours with plain fields."""
    # By name: among the subclasses are also those that attrs has replaced, until they are collected.
    kind = getattr(sys.modules.get(data.get("module", "")), data["kind"], None)
    if isinstance(kind, type) and issubclass(kind, RematError):
        return kind(**data["fields"])
    return None


def _description(graph: Graph, terms: Mapping[str, str]) -> dict[str, str]:
    """What all ranks must have in common; the fingerprint last, since it explains the least."""
    return {
        **terms,
        "model": graph.name,
        **dict(graph.conditions),
        "ops": str(len(graph.ops)),
        "bytes": str(sum(value.nbytes for value in graph.values)),
        "graph": fingerprint(graph),
    }


def _differences(descriptions: list[dict[str, str]]) -> Iterator[str]:
    """In what the ranks differ from rank 0, each rank by the first thing that does."""
    first = descriptions[0]
    for rank, found in enumerate(descriptions):
        keys = [key for key in {**first, **found} if first.get(key) != found.get(key)]
        if keys == ["graph"]:
            yield f"rank {rank} has other ops than rank 0"
        elif keys:
            yield f"rank {rank} has {keys[0]} {found.get(keys[0])} and rank 0 has {first.get(keys[0])}"


def _workspaces(graph: Graph) -> Iterator[int]:
    return (i.workspace_nbytes for op in graph.ops for i in op.implementations)


def _with_workspaces(graph: Graph, nbytes: Iterator[int]) -> Graph:
    """The graph with other workspaces, in the order of `_workspaces`."""
    ops = tuple(
        attrs.evolve(
            op,
            implementations=tuple(attrs.evolve(i, workspace_nbytes=next(nbytes)) for i in op.implementations),
        )
        for op in graph.ops
    )
    return attrs.evolve(graph, ops=ops)
