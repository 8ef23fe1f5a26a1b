"""Who is at home where: a linear program over runs of parameters, and its shares as whole parameters.

A parameter has three fates. *Resident*: it, its gradient and its states are on the device. *Streamed*: its
states are placed on the host and pass through the device to be updated there. *On the host*: all of it is at
home there, it is fetched before each use, its gradient leaves, the CPU updates it. Each run of parameters is
shared out between the three, and one number more says how much activation memory an order may ask for: what
the device does not have of it is moved. The program takes the whole step's seconds and makes them small:

* recomputation falls with activation memory along the convex hull of the orders that are known;
* the device's bytes hold at the boundary and at the end, the host's bytes hold;
* each direction's bytes pass in the time there is for them, per prefix of the forward and of the backward;
* updates on the CPU with copies beside them fit between a gradient's birth and the next forward's read. Those
  windows lie within each other, so that one condition for each prefix of the forward says it.

What does not fit are stalls, in the forward, in the backward and before the next forward. A small price on
what moves decides where nothing else does. Shares become whole parameters by passing on what is left over
from run to run. About 100 variables: 0.1 s, and 0.01 s to solve it again with other budgets.

Imperfect: copies are taken as if there were always room to begin them early, so what comes out is a place to
begin; the referee decides (`solver`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from remat_graph import Graph, Links
from remat_solvers.offload.order_frontier import Rung
from remat_solvers.offload.parameter_groups import Param, Run
from remat_solvers.offload.training_problem import Style

Floats = NDArray[np.float64]

RESIDENT, STREAMED, ON_HOST = range(3)
PRICE = 0.002  # of moving everything, in base times: below what is measured, above rounding
WAITING = 0.5  # of the gradients on the host, which wait for the CPU within the backward


@attrs.frozen(kw_only=True)
class Terms:
    """What a step has to get by with.

    Attributes:
        device_nbytes: for all that is on the device.
        host_nbytes: for all that is on the host; None for no limit.
        links: bandwidths.
        style: how the step is trained.
        curve: orders known, by their peaks.
        floor_nbytes: what some op needs of activations on the device, whatever moves.
        streams: whether states may be streamed.
    """

    device_nbytes: int
    host_nbytes: int | None
    links: Links
    style: Style
    curve: Sequence[Rung]
    floor_nbytes: int
    streams: bool = True


@attrs.frozen(kw_only=True)
class Shares:
    """What the program says.

    Attributes:
        shares: per run, how much of it has which fate.
        activation_nbytes: peak of the order to use.
        time_s: predicted seconds of a step.
    """

    shares: Floats
    activation_nbytes: int
    time_s: float


class Program:
    """The program, put together once: most of its time is that, and budgets are parameters of it.

    Bytes are counted in device budgets: a solver likes numbers near 1.

    Attributes:
        runs: the parameters.
    """

    def __init__(self, graph: Graph, runs: Sequence[Run], terms: Terms) -> None:
        """Put together.

        Args:
            graph: the training step.
            runs: its parameters.
            terms: budgets and rates.
        """
        import cvxpy as cp

        self.runs = runs

        self.cp, self.graph, self.terms, self.style = cp, graph, terms, terms.style
        self.unit = max(1.0, float(terms.device_nbytes))
        self.weights, self.grads, self.states = (
            np.array([getattr(run, name) for run in runs]) / self.unit
            for name in ("nbytes", "grad_nbytes", "states_nbytes")
        )
        self.cpu_s, self.device_s, self.read_s, self.made_s = (
            np.array([getattr(run, name) for run in runs])
            for name in ("cpu_s", "device_s", "read_s", "made_s")
        )
        self.forward_s = sum(op.first.time_s for op in graph.ops if not op.backward)
        self.backward_s = graph.time_s - self.forward_s
        self.read = self.read_s / (self.forward_s or 1.0)  # how much of the forward comes before a run
        self.made = self.made_s / (
            self.backward_s or 1.0
        )  # and of the backward, until its gradients are made
        self.share = cp.Variable((3, len(runs)), nonneg=True)
        self.resident, self.streamed, self.on_host = (self.share[fate] for fate in range(3))
        # Activations at the boundary, on the device and moved; recomputation; stalls in the forward, in the
        # backward, and where the optimizer steps.
        self.held, self.moved = cp.Variable(nonneg=True), cp.Variable(nonneg=True)
        self.again_s, self.ahead_s, self.behind_s, self.call_s = (cp.Variable(nonneg=True) for _ in range(4))
        self.half_s = self.again_s + self.backward_s

        # What changes from solve to solve.
        self.device, self.host, self.streams = (cp.Parameter(nonneg=True) for _ in range(3))
        self.least, self.most = cp.Parameter(nonneg=True), cp.Parameter(nonneg=True)
        self.step_s, self.program = self._put_together()

    def share_out(self, terms: Terms, moved: float | None = None) -> Shares | None:
        """Solve the program.

        Args:
            terms: whose budgets, and whether states may be streamed, are to hold; all else is as it was.
            moved: which part of the bytes that could move shall; None for the best.

        Returns:
            the shares, or None if no shares keep the budgets.
        """
        if min(terms.device_nbytes, terms.host_nbytes or 0) < 0:
            return None
        self.device.value = terms.device_nbytes / self.unit
        self.host.value = 0.0 if terms.host_nbytes is None else terms.host_nbytes / self.unit
        self.streams.value = float(terms.streams)
        self.least.value, self.most.value = (0.0, 1.0) if moved is None else (moved, moved)
        try:
            self.program.solve(solver=self.cp.HIGHS)
        except (self.cp.SolverError, ValueError):  # HiGHS, of some that have no solution
            return None
        if self.program.status not in (self.cp.OPTIMAL, self.cp.OPTIMAL_INACCURATE):
            return None
        return Shares(
            shares=np.clip(self.share.value, 0.0, 1.0),
            activation_nbytes=int((self.held.value + self.moved.value) * self.unit),
            time_s=float(self.step_s.value),
        )

    def _put_together(self) -> tuple[Any, Any]:
        """Seconds of a step, and the program that makes them small."""
        cp = self.cp
        limits = [cp.sum(self.share, axis=0) == 1, *self.memory(), *self.copies()]
        limits += self.updates_within() if self.style.in_backward else self.updates_behind()
        limits.append(self.streamed <= self.streams)
        charge = self.weights + self.states
        whole = charge.sum() or 1.0
        moved = (charge @ self.on_host + self.states @ self.streamed) / whole
        limits += [moved >= self.least, moved <= self.most]
        # What is needed last and updated first is the best to be far away.
        dearer = np.linspace(3.0, 1.0, len(charge)) * PRICE / whole
        price = (charge * dearer) @ self.on_host + (self.states * dearer) @ self.streamed
        passes_s = self.forward_s + self.half_s + self.ahead_s + self.behind_s
        step_s = self.style.micro_batches * passes_s + self.call_s
        step_s += self.device_s @ (self.resident + self.streamed)
        base_s = self.graph.time_s or 1.0
        return step_s, cp.Problem(cp.Minimize(step_s / base_s + price), limits)

    def up_to(self, amounts: Floats, fate: Any) -> Any:
        """Sums over each prefix of the forward."""
        return self.cp.cumsum(self.cp.multiply(amounts, fate))

    def onward(self, amounts: Floats, fate: Any) -> Any:
        """Sums over each prefix of the backward, in the forward's order."""
        terms = self.cp.multiply(amounts, fate)
        return self.cp.sum(terms) - self.cp.cumsum(terms) + terms

    def memory(self) -> list[Any]:
        """Both budgets, and the recomputation that activations cost which are neither held nor moved."""
        style, terms, unit = self.style, self.terms, self.unit
        weights, grads, states = self.weights, self.grads, self.states
        there = grads if style.adds else 0.0 * grads
        boundary = (weights + states + there) @ self.resident + (weights + there) @ self.streamed
        asked = self.held + self.moved
        limits = [
            boundary + self.held <= self.device,
            self.held >= terms.floor_nbytes / unit,
            asked <= terms.curve[-1].nbytes / unit,
            asked >= terms.curve[0].nbytes / unit,
        ]
        limits += [self.again_s >= rate * asked + at_zero for rate, at_zero in self.recomputation()]
        # States that pass through: a run's worth on its way in, and one on its way out.
        passing = self.cp.multiply(2 * states, self.streamed)
        if style.in_backward:
            limits.append(boundary + self.cp.multiply(self.read, self.held) + passing <= self.device)
        else:
            outputs = sum(self.graph.allocated_nbytes(v) for v in self.graph.outputs) / unit
            end = (weights + states + grads) @ self.resident + (weights + grads) @ self.streamed
            limits.append(end + outputs + passing <= self.device)
        if terms.host_nbytes is not None:
            made = WAITING * grads if style.in_backward else 0.0 * grads if style.adds else grads
            on_host = states @ self.streamed + (weights + states + there + made) @ self.on_host
            limits.append(on_host + self.moved <= self.host)
        return limits

    def copies(self) -> list[Any]:
        """In each pass: weights come in for either half, activations leave and return, gradients leave."""
        into, out = self.rates()
        weights = self.cp.sum(self.cp.multiply(self.weights / into, self.on_host))
        self.left_s = self.cp.multiply(1.0 - self.made, self.half_s)  # from a gradient's birth to the end
        return [
            self.up_to(self.weights / into, self.on_host) <= self.read_s + self.ahead_s,
            self.moved / out <= self.forward_s + self.ahead_s,
            weights + self.moved / into <= self.half_s + self.behind_s,
            self.up_to(self.grads / out, self.on_host) <= self.left_s + self.behind_s,
        ]

    def updates_within(self) -> list[Any]:
        """Updates in the backward, streamed states beside the copies; the CPU goes on in the next forward."""
        into, out = self.rates()
        passing = self.per_host_byte()
        adding = 3 * self.grads * passing if self.style.adds else 0.0
        slack = self.behind_s + self.call_s
        states = self.cp.sum(self.cp.multiply(self.states / into, self.streamed))
        weights = self.cp.sum(self.cp.multiply(self.weights / into, self.on_host))
        beside = self.moved * passing * (1.0 - self.made + self.read)
        return [
            weights + states + self.moved / into <= self.half_s + slack,
            self.onward(self.states / into, self.streamed)
            <= self.cp.multiply(self.made, self.half_s) + slack,
            self.up_to(self.grads / out, self.on_host) + self.up_to(self.states / out, self.streamed)
            <= self.left_s + slack,
            self.up_to(self.cpu_s + adding + (2 * self.weights + self.grads) * passing, self.on_host)
            + self.up_to(2 * self.states * passing, self.streamed)
            + beside
            <= self.left_s + self.read_s + self.ahead_s + slack,
        ]

    def updates_behind(self) -> list[Any]:
        """Updates behind the backward: streamed states are waited for, the CPU goes on in the forward."""
        passing = self.per_host_byte()
        states = self.cp.sum(self.cp.multiply(self.states, self.streamed))
        beside = self.moved * passing * self.read
        return [
            states / min(self.rates()) <= self.call_s,
            self.up_to(self.cpu_s + self.weights * passing, self.on_host) + 2 * states * passing + beside
            <= self.call_s + self.read_s + self.ahead_s,
        ]

    def rates(self) -> tuple[float, float]:
        """To the device and to the host, in units a second, both directions busy."""
        links = self.terms.links
        into = links.to_device_duplex_nbytes_per_s or links.to_device_nbytes_per_s
        out = links.to_host_duplex_nbytes_per_s or links.to_host_nbytes_per_s
        return into / self.unit, out / self.unit

    def per_host_byte(self) -> float:
        """Seconds that the CPU's updates lose for each unit that is copied beside them."""
        rate = self.terms.links.host_nbytes_per_s
        return 0.0 if rate is None else self.unit / rate

    def recomputation(self) -> list[tuple[float, float]]:
        """Seconds of recomputation over activations, from below: lines, (per unit, at zero)."""
        hull: list[tuple[float, float]] = []
        for rung in sorted(self.terms.curve, key=lambda rung: (rung.nbytes, rung.time_s)):
            point = rung.nbytes / self.unit, rung.time_s - self.graph.time_s
            if hull and point[0] <= hull[-1][0]:
                continue
            while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        return [(_slope(one, other), one[1] - _slope(one, other) * one[0]) for one, other in pairwise(hull)]


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def whole_params(runs: Sequence[Run], shares: Floats) -> tuple[frozenset[int], frozenset[int]]:
    """Shares as whole parameters.

    Args:
        runs: the parameters.
        shares: per fate and run.

    Returns:
        parameters on the host, and parameters whose states are streamed.
    """
    owed = np.zeros(3)
    chosen: tuple[list[Param], ...] = ([], [], [])
    for number, run in enumerate(runs):
        owed += shares[:, number] * sum(param.charge_nbytes for param in run.params)
        for param in sorted(run.params, key=lambda param: -param.charge_nbytes):
            fates = [RESIDENT, ON_HOST]
            if param.update is not None and param.states_nbytes:
                fates.append(STREAMED)
            fate = max(fates, key=lambda fate: owed[fate])
            owed[fate] -= param.charge_nbytes
            chosen[fate].append(param)
    return (
        frozenset(param.index for param in chosen[ON_HOST]),
        frozenset(param.index for param in chosen[STREAMED]),
    )
