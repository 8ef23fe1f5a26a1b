"""What can go wrong with a graph, a schedule or a saved file: one small class a mistake."""

import attrs


class RematError(Exception):
    """Base of every error that remat raises on purpose; its text is one line that says what to do."""


@attrs.frozen(kw_only=True, str=False)
class InvalidGraph(RematError):
    """The graph breaks a rule of the IR.

    Attributes:
        where: the op or value at fault.
        problem: what came and what was wanted.
    """

    where: str
    problem: str

    def __str__(self) -> str:
        return f"invalid graph: {self.where}: {self.problem}"


@attrs.frozen(kw_only=True, str=False)
class InvalidSchedule(RematError):
    """A step of a schedule cannot be carried out.

    Attributes:
        step: index of the step, or ``len(steps)`` when the end state is at fault.
        problem: what was missing.
    """

    step: int
    problem: str

    def __str__(self) -> str:
        return f"invalid schedule: step {self.step}: {self.problem}"


@attrs.frozen(kw_only=True, str=False)
class BadFile(RematError):
    """A file is not what its reader wants: corrupt, truncated, newer, or of another kind.

    Attributes:
        path: the file.
        problem: what came, what was wanted, what to do.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"
