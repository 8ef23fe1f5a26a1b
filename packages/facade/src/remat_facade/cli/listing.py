"""The commands `remat config` and `remat solvers`: what there is to choose from."""

from remat_facade.cli import options


def config(
    type: options.TypeArgument, out: options.OutOption = None, json: options.JsonOption = False
) -> None:
    """Print or write a config with every field explained."""
    from remat_facade.cli.output import CommandOutput
    from remat_facade.config.types import generate_config
    from remat_facade.config.yaml_io import config_facts, config_text

    made = generate_config(type)
    with CommandOutput(as_json=json) as output:
        output.facts |= config_facts(made)
        if out is None:
            output.say(config_text(made).rstrip("\n"))
        output.write(out, lambda: config_text(made))


def solvers(json: options.JsonOption = False) -> None:
    """List the solvers."""
    from remat_facade.cli.output import CommandOutput
    from remat_facade.report.table import Table
    from remat_solvers import about_solver, solver_names

    with CommandOutput(as_json=json) as output:
        rows = tuple((name, about_solver(name)) for name in solver_names())
        output.facts["solvers"] = dict(rows)
        output.show(Table(title="solvers", columns=("name", "what it does"), rows=rows, prose=True))
