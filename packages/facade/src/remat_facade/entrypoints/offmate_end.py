"""End an `Offmate`: finish its pending updates, close its machine and free its host memory."""

import os
from collections.abc import Sequence

import attrs

from remat_executor.errors import warn
from remat_graph import RematError
from remat_offload import HostPool, TrainingSession
from remat_offload.copy_lanes.threaded import LanedMachine, outside_of_lanes


@attrs.define(eq=False)
class OffmateEnd:
    """The end of a module: a finalizer that may run at any time, more than once.

    Attributes:
        training: the training session of the module.
        own: the machine and the pool that were created for the module.
        process: the process that created the module; in a fork nothing is ended.
        reported: whether a failed update was reported; later failures are not reported.
    """

    training: TrainingSession
    own: Sequence[LanedMachine | HostPool]
    process: int = attrs.field(factory=os.getpid)
    reported: bool = False

    def __call__(self) -> None:
        """Finish after the module was garbage-collected: a failure is a warning, as there is no caller."""
        outside_of_lanes(self._finish_alone)

    def _finish_alone(self) -> None:
        try:
            self.finish()
        except RematError as error:
            warn(f"updates of a garbage-collected module failed: {error}; call close() before you drop it")

    def finish(self) -> None:
        """Finish the updates, and close the machine and the pool even if an update failed.

        Raises:
            LaneFailed: an update failed.
        """
        if self.process != os.getpid():
            return
        try:
            if not self.reported:
                self.training.close()
        except RematError:
            self.reported = True
            raise
        finally:
            for each in self.own:
                if isinstance(each, HostPool):
                    each.give_up()
                else:
                    each.close()
