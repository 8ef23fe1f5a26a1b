"""The values that a shell completes: names of platforms, solvers and plans, found without torch."""


def platforms(incomplete: str) -> list[str]:
    """The names of cost platforms that begin so, and those that may be given without an ending."""
    from remat_graph import platform_names
    from remat_graph.platforms.base import BY_DATA_SHEET

    names = platform_names()
    return _begin(incomplete, sorted({*names, *(name.removesuffix(BY_DATA_SHEET) for name in names)}))


def solver(incomplete: str) -> list[str]:
    """The names of solvers that begin so."""
    from remat_solvers import solver_names

    return _begin(incomplete, solver_names())


def several_solvers(incomplete: str) -> list[str]:
    """A list of names of solvers, of which the last begins so."""
    first, comma, last = incomplete.rpartition(",")
    return [f"{first}{comma}{name}" for name in solver(last) if name not in first.split(",")]


def shipped(incomplete: str) -> list[str]:
    """The names of plans that come with remat."""
    from remat_facade.planning.shipped_plans import shipped_plans

    return _begin(incomplete, [each.name for each in shipped_plans()])


def _begin(incomplete: str, names: "list[str] | tuple[str, ...]") -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
