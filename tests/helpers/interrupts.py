"""Ctrl-C at any line of Python."""

import signal
import sys
from typing import Any

import torch


class Interrupt:
    """Raises SIGINT at the k-th line of Python that a step runs in this thread, of these files if given."""

    def __init__(self, line: int, files: tuple[str, ...] = ("",)) -> None:
        self.left, self.files = line, files

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self if self.left > 0 else None

    def during(self, step: Any) -> bool:
        """Whether the step was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            step()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            torch.set_grad_enabled(True)  # which torch's own no_grad may not have come to
        return False
