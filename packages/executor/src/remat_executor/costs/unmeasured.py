"""Estimate the seconds of operators that did not fit in the memory that was free when they were measured.

A plan runs them in another way; the time of the original step, with which it is compared, needs theirs. They
take as long as the measured operators of the same step would at their rates.
"""

from collections.abc import Iterable

import attrs

from remat_graph import OpCost


@attrs.frozen(kw_only=True)
class Rates:
    """What the measured operators of a step took.

    Attributes:
        s_per_byte: of those that do no products, for the bytes that they read and write.
        s_per_flop: of those that do.
    """

    s_per_byte: float
    s_per_flop: float

    @classmethod
    def of(cls, measured: Iterable[tuple[OpCost, float]]) -> "Rates":
        """The rates of operators, given with their seconds."""
        sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for cost, time_s in measured:
            products = cost.flops > 0
            sums[products][0] += time_s
            sums[products][1] += cost.flops if products else cost.read_nbytes + cost.written_nbytes
        (product_s, flops), (moved_s, nbytes) = sums[True], sums[False]
        return cls(
            s_per_byte=moved_s / nbytes if nbytes else 0.0, s_per_flop=product_s / flops if flops else 0.0
        )

    def time_s(self, cost: OpCost) -> float:
        """Seconds of an operator: of its products or of its bytes, whichever take longer."""
        return max(cost.flops * self.s_per_flop, (cost.read_nbytes + cost.written_nbytes) * self.s_per_byte)
