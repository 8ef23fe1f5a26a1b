"""Compiled annealing of a sequence in chunks; `methods.annealing` explains the objective."""

import numpy as np

from remat_solvers.kernels.derived import apply, rebuild
from remat_solvers.kernels.incremental import begin, evaluate_change, uniform
from remat_solvers.kernels.jit import njit_in_place as njit
from remat_solvers.kernels.jit import njit_inner as inner
from remat_solvers.kernels.moves import describe_random
from remat_solvers.kernels.switch import cost_of_switches, flip, flip_back


@inner
def keep_best(S):  # type: ignore[no-untyped-def]
    """Store the sequence if it fits and is the fastest so far."""
    meta = S.meta
    if meta.excess <= 0.0 and meta.seconds < meta.best_seconds:
        meta.best_seconds = meta.seconds
        meta.best_count = meta.count
        for p in range(meta.count):
            S.pos[p].best = S.pos[p].order
        for i in range(S.ops.shape[0]):
            S.ops[i].best_now = S.ops[i].now


@njit
def anneal(S, budget, moves, hot, cold, weights, adapt, flips):  # type: ignore[no-untyped-def]
    """Try `moves` changes while the temperature falls from `hot` to `cold` (seconds).

    A share `flips` of the changes flip switches.
    """
    meta = S.meta
    meta.seconds, meta.excess = rebuild(S, budget)
    keep_best(S)
    temperature = hot
    cool = (cold / hot) ** (1.0 / max(1, moves)) if hot > 0 else 1.0
    for i in range(moves):
        temperature *= cool
        if i % 256 == 255:
            # The price rises while the budget is exceeded, else it falls, so the walk stays at the border.
            meta.price *= adapt if meta.excess > 0 else 1.0 / adapt
            meta.price = max(meta.price, meta.price_low)
        if flips > 0.0 and uniform(S) < flips:
            was_seconds, was_excess = meta.seconds, meta.excess
            flip(S)
            good, seconds, excess = cost_of_switches(S, budget)
            meta.tried += 1
            rise = seconds - was_seconds + meta.price * (excess - was_excess)
            if good and (rise <= 0 or (temperature > 0 and uniform(S) < np.exp(-rise / temperature))):
                meta.seconds, meta.excess = rebuild(S, budget)
                keep_best(S)
            else:
                flip_back(S)
            continue
        begin(S)
        # Metropolis' rule, its random number drawn first: most changes are refused before all of it is known.
        most = -temperature * np.log(uniform(S) + 1e-300)
        if not describe_random(S, weights, most):
            continue
        good, change, _ = evaluate_change(S, budget, most)
        meta.tried += 1
        if good:
            meta.seconds += change
            meta.excess = apply(S, budget)
            keep_best(S)
    return temperature
