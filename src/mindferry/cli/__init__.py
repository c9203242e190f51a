"""The command `mindferry`: one thin file per verb."""

from __future__ import annotations

import sys

import typer

from mindferry import __version__

app = typer.Typer(
    name="mindferry",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Carry a GPT-class training run over to MindSpore Transformers, prove that the numbers match, "
    "and make it fast.",
    epilog="Start with: mindferry migrate SRC --data corpus/ --out run/ --seq-length 1024",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"mindferry {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


# The verbs, in the order of --help. Each module has `register(app)` and imports its work when called.
COMMANDS = (
    "map",
    "migrate",
    "verify",
    "train",
    "plan",
    "export",
    "reshard",
    "rehearse",
    "launch",
    "data",
    "doctor",
    "bench",
    "tune",
    "compare",
    "report",
)


def _register() -> None:
    import importlib

    for name in COMMANDS:
        importlib.import_module(f"mindferry.cli.{name}").register(app)


_register()


# Options that take several values after one mention, as a shell's `--data corpus/*.txt` gives them.
MULTIPLE = ("--data",)


def spread(arguments: list[str]) -> list[str]:
    """Repeat the option before each of its values: `--data a b` becomes `--data a --data b`."""
    result: list[str] = []
    current: str | None = None
    for argument in arguments:
        if argument in MULTIPLE:
            current = argument
        elif argument.startswith("-"):
            current = None
            result.append(argument)
        elif current is not None:
            result += [current, argument]
        else:
            result.append(argument)
    return result


def main() -> None:
    """Entry point of the console script."""
    app(args=spread(sys.argv[1:]))
