"""The command `remat`.

Each command is in a file of its own and imports the heavy libraries that it needs when it runs, so help is
quick and `remat solve` needs no torch. A user error gives one line on stderr and exit code 2. Ctrl-C ends a
search, whose best result so far is shown and written, with one line and exit code 130; before there is one,
or pressed again, it ends the command. A model that does not fit, or a failed check, gives exit code 1.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from remat_command import INTERRUPTED, UNREAD, USER_ERROR, give_up_output
from remat_facade.cli.check import check
from remat_facade.cli.demo import demo
from remat_facade.cli.doctor import doctor
from remat_facade.cli.listing import config, solvers
from remat_facade.cli.max_batch import largest_batch
from remat_facade.cli.plan import plan
from remat_facade.cli.show import show
from remat_facade.cli.solve import smallest_budget, solve
from remat_facade.cli.sweep import sweep
from remat_facade.cli.terminal import complain
from remat_facade.cli.version import show_version
from remat_facade.cli.zoo import zoo

app = typer.Typer(
    name="remat",
    help="Train any PyTorch model inside a memory budget given in bytes.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_COMPLETION = "_REMAT_COMPLETE"  # a shell that completes a line sets this variable


@app.callback()
def remat(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the versions.")
    ] = False,
) -> None:
    """Train any PyTorch model inside a memory budget given in bytes."""


_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "plan": plan,
    "check": check,
    "max-batch": largest_batch,
    "sweep": sweep,
    "doctor": doctor,
    "solve": solve,
    "min-budget": smallest_budget,
    "show": show,
    "config": config,
    "solvers": solvers,
    "zoo": zoo,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
        return _run(words or ["--help"])


def _run(words: list[str]) -> int:
    usage_error: type[Any] = typer.BadParameter.__mro__[1]  # typer versions define it in different modules
    try:
        # Not `app(...)`, which sets attributes on errors: ours are frozen.
        code = typer.main.get_command(app).main(words, prog_name="remat", standalone_mode=False)
        if code == INTERRUPTED:  # what newer versions of typer return
            raise KeyboardInterrupt
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted; files of earlier runs are unchanged")
        return INTERRUPTED
    except usage_error as error:
        known = [word for word in words[:1] if word in _COMMANDS]  # for an option without value
        command = error.ctx.command_path if error.ctx else " ".join(["remat", *known])
        problem = error.format_message().replace("Value error, ", "").rstrip(".?") + _advice(error, words)
        complain(f"{problem}; see `{command} --help`")
        return USER_ERROR
    except SystemExit as ended:  # raised by the model or a function that it calls
        if isinstance(ended.__context__, BrokenPipeError):  # or by the libraries that print
            return UNREAD
        if _COMPLETION in os.environ or any(word.endswith("-completion") for word in words):
            raise
        complain(f"the model ended the program (exit code {ended.code!r:.60}): remove its call of sys.exit")
        return USER_ERROR
    except MemoryError:
        complain("out of memory: use a smaller model or batch, or a machine with more memory")
        return USER_ERROR
    except Exception as error:
        code = _reported(error)
        if code is None:
            raise
        return code
    return code if isinstance(code, int) else 0


def _advice(error: Any, words: list[str]) -> str:
    """What to do about a word too many, if that is the unit of a number before it."""
    if "unexpected extra argument" not in error.format_message():
        return ""
    from remat_graph.budget import in_one_word

    amount = in_one_word(words)
    return f": write {amount} without a space" if amount else ""


def _reported(error: Exception) -> int | None:
    """Report an error in one line and return the exit code; None for an error that remat did not expect."""
    from remat_facade.cli.searches import EndedEarly
    from remat_graph import RematError
    from remat_graph.errors import text_of

    if isinstance(error, EndedEarly):  # a plan has its own warning
        if error.args:
            complain(f"interrupted: {text_of(error)}")
        return INTERRUPTED
    if isinstance(error, RematError):
        complain(text_of(error))
        return USER_ERROR
    note = None
    if "remat_executor" in sys.modules:  # only its code leaves notes, and it imports torch
        from remat_executor.errors import note_on

        note = note_on(error)
    if note is not None:
        complain(f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}; {note}")
    elif isinstance(error, OSError):  # errors of files have their own class: it is the output or a device
        give_up_output()
        complain(f"system error: {error.strerror or error}; check the output and the disk")
    else:
        return None
    return USER_ERROR
