"""Choose the placement of parameters by a linear program over groups of them, and round its shares.

A parameter has three options. *Resident*: the parameter, its gradient and its states are on the device.
*Streamed*: its states are placed on the host and pass through the device to be updated there. *On the host*:
all of it is placed on the host; it is fetched before each use, its gradient is copied to the host, the CPU
updates it. The program divides each group among the three. One more variable says how much activation memory
an order may use; what the device cannot hold of that is swapped. The program minimizes the time of the step:

* recomputation falls with activation memory along the convex hull of the known orders;
* the device's bytes fit at the boundary and at the end, the host's bytes fit;
* each direction's bytes pass in the time there is for them, per prefix of the forward and of the backward;
* CPU updates with concurrent copies fit between the computation of a gradient and the next forward's read.
  The time windows are nested, so one condition for each prefix of the forward is enough.

The excess becomes stalls: in the forward, in the backward and before the next forward. A small price on moved
bytes breaks ties. Shares are rounded to whole parameters, and the remainder passes from group to group. About
100 variables: 0.1 s, and 0.01 s to solve it again with other budgets.

Imperfect: the program assumes that copies can always start early enough, so its result is only a starting
point; the referee decides (`solver`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from remat_graph import Graph, Links
from remat_solvers.evaluation.arrays import Floats
from remat_solvers.offload.order_frontier import FrontierPoint
from remat_solvers.offload.parameter_groups import Param, ParameterGroup
from remat_solvers.offload.training_problem import UpdateMode

RESIDENT, STREAMED, ON_HOST = range(3)
PRICE = 0.002  # of moving everything, in base times: below measurement noise, above rounding
WAITING = 0.5  # share of the gradients on the host that wait for the CPU during the backward


@attrs.frozen(kw_only=True)
class PlacementLimits:
    """Budgets and rates of a step."""

    device_nbytes: int  # device budget
    host_nbytes: int | None  # host budget; None for no limit
    links: Links  # bandwidths
    mode: UpdateMode  # how the step is trained
    curve: Sequence[FrontierPoint]  # known orders, by their peaks
    floor_nbytes: int  # activation bytes on the device that some op needs in any plan
    streams: bool = True  # whether states may be streamed


@attrs.frozen(kw_only=True)
class Shares:
    """The solution of the program."""

    shares: Floats  # per option and group, the share of the group
    activation_nbytes: int  # peak of the order to use
    time_s: float  # predicted seconds of a step


class PlacementProgram:
    """The program, built once because that takes most of its time; budgets are parameters of it.

    Bytes are counted in device budgets, since a solver needs numbers near 1.
    """

    def __init__(self, graph: Graph, groups: Sequence[ParameterGroup], limits: PlacementLimits) -> None:
        import cvxpy as cp

        self.groups = groups
        self.cp, self.graph, self.limits, self.mode = cp, graph, limits, limits.mode
        self.unit = max(1.0, float(limits.device_nbytes))
        self.weights, self.grads, self.states = (
            np.array([getattr(group, name) for group in groups]) / self.unit
            for name in ("nbytes", "grad_nbytes", "states_nbytes")
        )
        self.cpu_s, self.device_s, self.read_s, self.made_s = (
            np.array([getattr(group, name) for group in groups])
            for name in ("cpu_s", "device_s", "read_s", "made_s")
        )
        self.forward_s = sum(op.first.time_s for op in graph.ops if not op.backward)
        self.backward_s = graph.time_s - self.forward_s
        # The part of the forward before a group is read, and of the backward until its gradients are made.
        self.read = self.read_s / (self.forward_s or 1.0)
        self.made = self.made_s / (self.backward_s or 1.0)
        self.share = cp.Variable((3, len(groups)), nonneg=True)
        self.resident, self.streamed, self.on_host = (self.share[option] for option in range(3))
        # Activations at the boundary, on the device and swapped; recomputation; stalls in the forward, in
        # the backward and in the optimizer's call.
        self.held, self.moved = cp.Variable(nonneg=True), cp.Variable(nonneg=True)
        self.recompute_s, self.forward_stall_s, self.backward_stall_s, self.optimizer_stall_s = (
            cp.Variable(nonneg=True) for _ in range(4)
        )
        self.half_s = self.recompute_s + self.backward_s

        # Parameters that change from solve to solve.
        self.device, self.host, self.streams = (cp.Parameter(nonneg=True) for _ in range(3))
        self.least, self.most = cp.Parameter(nonneg=True), cp.Parameter(nonneg=True)
        self.step_s, self.program = self._build()

    def solve(self, limits: PlacementLimits, moved: float | None = None) -> Shares | None:
        """Solve the program.

        Args:
            limits: their budgets and `streams` are used; everything else is fixed by the constructor.
            moved: the share of the movable bytes that must move; None for the best.

        Returns:
            the shares, or None if no shares keep the budgets.
        """
        if min(limits.device_nbytes, limits.host_nbytes or 0) < 0:
            return None
        self.device.value = limits.device_nbytes / self.unit
        self.host.value = 0.0 if limits.host_nbytes is None else limits.host_nbytes / self.unit
        self.streams.value = float(limits.streams)
        self.least.value, self.most.value = (0.0, 1.0) if moved is None else (moved, moved)
        try:
            self.program.solve(solver=self.cp.HIGHS)
        except (self.cp.SolverError, ValueError):  # raised by HiGHS for some infeasible programs
            return None
        if self.program.status not in (self.cp.OPTIMAL, self.cp.OPTIMAL_INACCURATE):
            return None
        return Shares(
            shares=np.clip(self.share.value, 0.0, 1.0),
            activation_nbytes=int((self.held.value + self.moved.value) * self.unit),
            time_s=float(self.step_s.value),
        )

    def _build(self) -> tuple[Any, Any]:
        """Seconds of a step, and the program that minimizes them."""
        cp = self.cp
        constraints = [cp.sum(self.share, axis=0) == 1, *self.memory(), *self.copies()]
        constraints += self.updates_in_backward() if self.mode.in_backward else self.updates_after_backward()
        constraints.append(self.streamed <= self.streams)
        charge = self.weights + self.states
        whole = charge.sum() or 1.0
        moved = (charge @ self.on_host + self.states @ self.streamed) / whole
        constraints += [moved >= self.least, moved <= self.most]
        # Parameters that are read last and updated first are the cheapest to place on the host.
        price_per_unit = np.linspace(3.0, 1.0, len(charge)) * PRICE / whole
        price = (charge * price_per_unit) @ self.on_host + (self.states * price_per_unit) @ self.streamed
        passes_s = self.forward_s + self.half_s + self.forward_stall_s + self.backward_stall_s
        step_s = self.mode.micro_batches * passes_s + self.optimizer_stall_s
        step_s += self.device_s @ (self.resident + self.streamed)
        base_s = self.graph.time_s or 1.0
        return step_s, cp.Problem(cp.Minimize(step_s / base_s + price), constraints)

    def prefix_sums(self, amounts: Floats, share: Any) -> Any:
        """Sums over each prefix of the forward."""
        return self.cp.cumsum(self.cp.multiply(amounts, share))

    def suffix_sums(self, amounts: Floats, share: Any) -> Any:
        """Sums over each prefix of the backward, in the forward's order."""
        products = self.cp.multiply(amounts, share)
        return self.cp.sum(products) - self.cp.cumsum(products) + products

    def memory(self) -> list[Any]:
        """Both budgets, and the recomputation of activations that are neither held nor swapped."""
        mode, limits, unit = self.mode, self.limits, self.unit
        weights, grads, states = self.weights, self.grads, self.states
        there = grads if mode.adds_gradients else 0.0 * grads
        boundary = (weights + states + there) @ self.resident + (weights + there) @ self.streamed
        asked = self.held + self.moved
        constraints = [
            boundary + self.held <= self.device,
            self.held >= limits.floor_nbytes / unit,
            asked <= limits.curve[-1].nbytes / unit,
            asked >= limits.curve[0].nbytes / unit,
        ]
        constraints += [self.recompute_s >= rate * asked + at_zero for rate, at_zero in self.recomputation()]
        # Streamed states: one group is being fetched while another is copied back.
        passing = self.cp.multiply(2 * states, self.streamed)
        if mode.in_backward:
            constraints.append(boundary + self.cp.multiply(self.read, self.held) + passing <= self.device)
        else:
            outputs = sum(self.graph.allocated_nbytes(v) for v in self.graph.outputs) / unit
            end = (weights + states + grads) @ self.resident + (weights + grads) @ self.streamed
            constraints.append(end + outputs + passing <= self.device)
        if limits.host_nbytes is not None:
            made = WAITING * grads if mode.in_backward else 0.0 * grads if mode.adds_gradients else grads
            on_host = states @ self.streamed + (weights + states + there + made) @ self.on_host
            constraints.append(on_host + self.moved <= self.host)
        return constraints

    def copies(self) -> list[Any]:
        """In each pass weights are fetched for either half, activations swapped, gradients copied out."""
        into, out = self.bandwidths()
        weights = self.cp.sum(self.cp.multiply(self.weights / into, self.on_host))
        self.left_s = self.cp.multiply(
            1.0 - self.made, self.half_s
        )  # from the computation of a gradient to the end
        return [
            self.prefix_sums(self.weights / into, self.on_host) <= self.read_s + self.forward_stall_s,
            self.moved / out <= self.forward_s + self.forward_stall_s,
            weights + self.moved / into <= self.half_s + self.backward_stall_s,
            self.prefix_sums(self.grads / out, self.on_host) <= self.left_s + self.backward_stall_s,
        ]

    def updates_in_backward(self) -> list[Any]:
        """Updates in the backward, with streamed states and copies; the CPU continues in the next forward."""
        into, out = self.bandwidths()
        passing = self.per_host_byte()
        adding = 3 * self.grads * passing if self.mode.adds_gradients else 0.0
        slack = self.backward_stall_s + self.optimizer_stall_s
        states = self.cp.sum(self.cp.multiply(self.states / into, self.streamed))
        weights = self.cp.sum(self.cp.multiply(self.weights / into, self.on_host))
        swaps_s = self.moved * passing * (1.0 - self.made + self.read)
        return [
            weights + states + self.moved / into <= self.half_s + slack,
            self.suffix_sums(self.states / into, self.streamed)
            <= self.cp.multiply(self.made, self.half_s) + slack,
            self.prefix_sums(self.grads / out, self.on_host)
            + self.prefix_sums(self.states / out, self.streamed)
            <= self.left_s + slack,
            self.prefix_sums(self.cpu_s + adding + (2 * self.weights + self.grads) * passing, self.on_host)
            + self.prefix_sums(2 * self.states * passing, self.streamed)
            + swaps_s
            <= self.left_s + self.read_s + self.forward_stall_s + slack,
        ]

    def updates_after_backward(self) -> list[Any]:
        """Updates after the backward: streamed states are waited for, the CPU continues in the forward."""
        passing = self.per_host_byte()
        states = self.cp.sum(self.cp.multiply(self.states, self.streamed))
        swaps_s = self.moved * passing * self.read
        return [
            states / min(self.bandwidths()) <= self.optimizer_stall_s,
            self.prefix_sums(self.cpu_s + self.weights * passing, self.on_host)
            + 2 * states * passing
            + swaps_s
            <= self.optimizer_stall_s + self.read_s + self.forward_stall_s,
        ]

    def bandwidths(self) -> tuple[float, float]:
        """To the device and to the host, in units a second, with both directions busy."""
        links = self.limits.links
        into = links.to_device_duplex_nbytes_per_s or links.to_device_nbytes_per_s
        out = links.to_host_duplex_nbytes_per_s or links.to_host_nbytes_per_s
        return into / self.unit, out / self.unit

    def per_host_byte(self) -> float:
        """Seconds that CPU updates lose for each unit that is copied at the same time."""
        rate = self.limits.links.host_nbytes_per_s
        return 0.0 if rate is None else self.unit / rate

    def recomputation(self) -> list[tuple[float, float]]:
        """Lower bounds on recomputation seconds as lines in the activation memory: (slope, value at zero)."""
        hull: list[tuple[float, float]] = []
        for known in sorted(self.limits.curve, key=lambda known: (known.nbytes, known.time_s)):
            point = known.nbytes / self.unit, known.time_s - self.graph.time_s
            if hull and point[0] <= hull[-1][0]:
                continue
            while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        return [(_slope(one, other), one[1] - _slope(one, other) * one[0]) for one, other in pairwise(hull)]


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def whole_params(groups: Sequence[ParameterGroup], shares: Floats) -> tuple[frozenset[int], frozenset[int]]:
    """Round the shares per option and group to parameters on the host and parameters with streamed states."""
    owed = np.zeros(3)
    chosen: tuple[list[Param], ...] = ([], [], [])
    for number, group in enumerate(groups):
        owed += shares[:, number] * sum(param.charge_nbytes for param in group.params)
        for param in sorted(group.params, key=lambda param: -param.charge_nbytes):
            options = [RESIDENT, ON_HOST]
            if param.update is not None and param.states_nbytes:
                options.append(STREAMED)
            option = max(options, key=lambda option: owed[option])
            owed[option] -= param.charge_nbytes
            chosen[option].append(param)
    return (
        frozenset(param.index for param in chosen[ON_HOST]),
        frozenset(param.index for param in chosen[STREAMED]),
    )
