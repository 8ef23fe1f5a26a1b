"""What ends with an `Offmate`: its pending updates, its machine and its host memory."""

import os
from collections.abc import Sequence

import attrs

from remat_executor.errors import warn
from remat_graph import RematError
from remat_offload import HostPool, TrainingSession
from remat_offload.machine.threaded import LanedMachine, outside_of_lanes


@attrs.define(eq=False)
class OffmateEnd:
    """The end of a module, which may be called again, and in the midst of anything.

    Attributes:
        training: what it trains with.
        own: the machine and the pool that were made for it.
        process: the one that made it, in which alone it ends.
        told: whether a failure was told; those of other updates are not told after it.
    """

    training: TrainingSession
    own: Sequence[LanedMachine | HostPool]
    process: int = attrs.field(factory=os.getpid)
    told: bool = False

    def __call__(self) -> None:
        """Finish, since the module was let go: that is nobody's call that could be told of a failure."""
        outside_of_lanes(self._finish_alone)

    def _finish_alone(self) -> None:
        try:
            self.finish()
        except RematError as error:
            warn(f"the last updates of a module that was let go were not all carried out: {error}")

    def finish(self) -> None:
        """Finish its updates; what was made for it ends, whether or not they could be carried out.

        Raises:
            LaneFailed: one could not.
        """
        if self.process != os.getpid():
            return
        try:
            if not self.told:
                self.training.close()
        except RematError:
            self.told = True
            raise
        finally:
            for each in self.own:
                if isinstance(each, HostPool):
                    each.give_up()
                else:
                    each.close()
