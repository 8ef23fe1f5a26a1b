"""One plan for all ranks: rank 0 solves, the others receive its plan.

Ranks that run different plans compute the same gradients, but all wait for the slowest rank and peak at
different times. With a shared plan, each rank captures and measures its own step and the graphs are compared.
Rank 0 plans with its own times and, per op, the largest workspace of any rank, so the plan is valid on all of
them. The plan travels as JSON, and each rank simulates it on its own graph.

An error on a rank, before, during or after the exchange, is raised on every rank. There are three
collectives: reports of graphs or errors, rank 0's plan or error, and whether all ranks could use the plan. A
rank that fails reports its error in the next collective.
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
from remat_executor.module.pipeline import PlanFunction
from remat_graph import Graph, Plan, RematError, fingerprint
from remat_graph.errors import shown, text_of
from remat_graph.serialization.plans import plan_from_data, plan_to_data

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ranks: TypeAlias = Literal["together", "alone"] | "ProcessGroup"


def check_ranks(ranks: Ranks | None) -> None:
    """Check which ranks plan together.

    Raises:
        BadInput: it is neither "together", nor "alone", nor a process group, nor None.
    """
    # What `dist.new_group` gives ranks outside of the group; `SharedPlan` refuses it as such.
    outside: object = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
    is_group = dist.is_available() and isinstance(ranks, dist.ProcessGroup)
    if not is_group and ranks not in (None, "together", "alone", outside):
        raise BadInput(
            problem=f"ranks={shown(ranks)} is invalid", advice='give "together", "alone" or a process group'
        )


def plan_sharing(ranks: Ranks | None) -> AbstractContextManager["SharedPlan | None"]:
    """The context in which to build a module: a `SharedPlan` if ranks plan together.

    Args:
        ranks: "together" for the ranks of the default group, or a group; "alone" if each plans for itself;
            None for the same, with a warning if there are several ranks.

    Raises:
        BadInput: it is none of these.
    """
    check_ranks(ranks)
    if ranks is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warn(
                "each rank plans for itself, and different measurements may give different plans: give "
                'ranks="together" to let rank 0 plan for all, or ranks="alone" to keep this without a warning'
            )
        return nullcontext()
    if ranks == "alone":
        return nullcontext()
    return SharedPlan(None if isinstance(ranks, str) else ranks)


class SharedPlan(AbstractContextManager["SharedPlan"]):
    """A context in which all ranks of a group build one planned module at the same time.

        with SharedPlan(group) as shared:
            module = PlannedModule(model, args, kwargs, shared.planner(planner))

    The exchange uses the object collectives of `torch.distributed`; on a GPU backend they use the current
    device, so set it first. The other ranks wait for rank 0's solver within the group's timeout.

    Later captures, during training, are planned by each rank for itself: the other ranks may not meet the
    same shapes and would never answer.

    Args:
        group: the ranks; None for the default group.

    Raises:
        BadInput: there is no such group, or this rank is not in it.
        RanksDiffer: a rank has another graph or other terms; on every rank.
        RankFailed: another rank could not plan or build. A `RematError` of another rank is raised from this.
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

    def planner(self, planner: PlanFunction, terms: Mapping[str, str] | None = None) -> PlanFunction:
        """The planner for `PlannedModule`.

        Args:
            planner: asked on rank 0 for the first graph, on every rank for later ones.
            terms: what else must be equal on all ranks, such as the budget, by name.
        """

        def plan(graph: Graph) -> Plan:
            return self._share(planner, graph, terms or {}) if self._next == "reports" else planner(graph)

        return plan

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report the outcome to the other ranks; raise their first error."""
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

    def _share(self, planner: PlanFunction, graph: Graph, terms: Mapping[str, str]) -> Plan:
        """Rank 0's plan, simulated on this rank's graph."""
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
        """Rank 0's plan as JSON; an error is sent to the other ranks before it is raised."""
        try:
            return [json.dumps({"plan": plan_to_data(plan())})]
        except Exception as error:
            data = [json.dumps({"error": _error_data(error) | {"rank": 0}})]
            dist.broadcast_object_list(data, group=self._group, group_src=0)
            raise

    def _gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """The reports of all ranks. No other collective follows unless the caller sets `_next`."""
        self._next = "nothing"
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, json.dumps(report), group=self._group)
        reports = [json.loads(text) for text in gathered]
        for rank, found in enumerate(reports):
            if "error" in found:
                found["error"]["rank"] = rank
        return reports


def _raise_first(reports: Iterable[Mapping[str, Any]]) -> None:
    """Raise the first error of a rank; a `RematError` keeps its class, so that all ranks can handle it."""
    for report in reports:
        if "error" in report:
            data = report["error"]
            failed = RankFailed(rank=data["rank"], problem=f"{data['kind']}: {data['text']}")
            same = _error_from_data(data)
            if same is not None:
                raise same from failed
            raise failed


def _error_data(error: BaseException) -> dict[str, Any]:
    """An error as JSON data; a `RematError` with its fields."""
    data: dict[str, Any] = {"kind": type(error).__qualname__, "text": text_of(error)}
    if isinstance(error, RematError) and attrs.has(kind := type(error)):
        fields = {field.name: getattr(error, field.name) for field in attrs.fields(kind)}
        if all(isinstance(content, str | int | float) for content in fields.values()):
            data.update(module=type(error).__module__, fields=fields)
    return data


def _error_from_data(data: Mapping[str, Any]) -> RematError | None:
    """The same error, if it is a `RematError` with plain fields."""
    # By name: among the subclasses are also those that attrs has replaced, until they are collected.
    kind = getattr(sys.modules.get(data.get("module", "")), data["kind"], None)
    if isinstance(kind, type) and issubclass(kind, RematError):
        return kind(**data["fields"])
    return None


def _description(graph: Graph, terms: Mapping[str, str]) -> dict[str, str]:
    """What must be equal on all ranks; the fingerprint last, since it explains the least."""
    return {
        **terms,
        "model": graph.name,
        **dict(graph.conditions),
        "ops": str(len(graph.ops)),
        "bytes": str(sum(value.nbytes for value in graph.values)),
        "graph": fingerprint(graph),
    }


def _differences(descriptions: list[dict[str, str]]) -> Iterator[str]:
    """The first difference of each rank from rank 0."""
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
