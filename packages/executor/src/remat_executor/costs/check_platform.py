"""Check that what was given as a platform is one, before a step is traced for it."""

from remat_executor.errors import BadInput
from remat_graph import Platform


def check_platform(platform: object) -> None:
    """Check the type of a platform; None stands for measured times.

    Raises:
        BadInput: it has no `name` or no `time_s`, as a platform's name or its class has not.
    """
    if platform is None or (isinstance(platform, Platform) and not isinstance(platform, type)):
        return
    came = f"the class {platform.__name__}" if isinstance(platform, type) else f"{platform!r:.60}"
    raise BadInput(
        problem=f"the platform is {came}, not an object with `name` and `time_s`",
        advice='get one by its name with `remat_graph.get_platform("roofline")`, or give None to measure',
    )
