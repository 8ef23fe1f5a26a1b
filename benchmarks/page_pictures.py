"""Write a figure for the pages: one SVG for wide, one for narrow screens, with the colours of both modes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from matplotlib.figure import Figure

from remat_facade.report.picture import DARK, LIGHT, Look, svg
from remat_facade.report.sweep import SERIES
from remat_graph.serialization.outputs import write_whole

Draw = Callable[[Look], Figure]


def both_modes(figure: Figure, name: str) -> str:
    """The figure as the text of a file, with the colours of both modes."""
    text = svg(figure, name)
    light, dark = attrs.asdict(LIGHT), attrs.asdict(DARK)
    for number, (bright, dim) in enumerate(zip(*SERIES, strict=True)):
        if bright not in light.values():
            light[f"series-{number}"], dark[f"series-{number}"] = bright, dim
            text = text.replace(bright, f"var(--series-{number})")
    modes = (" ".join(f"--{each}: {colour};" for each, colour in mode.items()) for mode in (light, dark))
    style = "svg {{ {} }} @media (prefers-color-scheme: dark) {{ svg {{ {} }} }}".format(*modes)
    return text.replace(">", f">\n <style>{style}</style>", 1)


def written(folder: Path, name: str, draw: Draw) -> Iterator[Path]:
    """Draw a figure for both widths; yield the files."""
    for kind in ("", "-narrow"):
        figure = draw(Look(narrow=bool(kind)))
        yield write_whole(folder / f"{name}{kind}.svg", both_modes(figure, name + kind))


def shown(place: str, about: str) -> str:
    """The lines of a page that show a picture.

    Args:
        place: of its files, without `.svg`, from the page.
        about: the picture in words.
    """
    return (
        f'<picture>\n<source media="(max-width: 45em)" srcset="{place}-narrow.svg">\n'
        f'<img src="{place}.svg" alt="{about}">\n</picture>\n'
    )
