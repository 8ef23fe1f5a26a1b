"""The commands `remat config` and `remat solvers`: what there is to choose from."""

from remat_facade.cli import options
from remat_facade.cli.terminal import say, show


def config(type: options.TypeArgument, out: options.OutOption = None) -> None:
    """Print or write a config with every field explained."""
    from remat_facade.config.types import generate_config
    from remat_facade.config.yaml_io import config_text, save_config

    made = generate_config(type)
    if out is None:
        say(config_text(made).rstrip("\n"))
    else:
        say(f"wrote {save_config(made, out)}")


def solvers() -> None:
    """List the solvers."""
    from remat_facade.report.table import Table
    from remat_graph.errors import text_of
    from remat_solvers import get_solver, solver_names

    rows = []
    for name in solver_names():
        try:
            about = (type(get_solver(name)).__doc__ or "").strip()
        except ImportError as error:  # one broken package must not hide the other solvers
            about = f"cannot be loaded: {text_of(error)}"
        rows.append((name, about.partition("\n")[0]))
    show(Table(title="solvers", columns=("name", "what it does"), rows=tuple(rows), prose=True))
