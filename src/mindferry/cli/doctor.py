"""mindferry doctor: env, startup, loss; `doctor` alone runs what applies."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mindferry.cli.console import Finding, Progress, Result, command

if TYPE_CHECKING:
    from mindferry.diagnosis.startup import Picture

STARTUP_EXAMPLE = "Example: mindferry doctor startup run/logs/train.log"

# Sub-commands that live in files of their own, beside this one.
OTHERS = ("doctor_data", "doctor_comm", "doctor_config")


def _verdict(findings: list[Finding], text: str, checked: list[str]) -> Result:
    """A result whose verdict is "problem" when a finding is one."""
    bad = any(item.severity == "problem" for item in findings)
    return Result("problem" if bad else "good", findings, {"checked": checked}, text)


@command("doctor startup")
def startup(
    log: str = typer.Argument(..., metavar="LOG|DIR|-", help="A log, msrun's --log_dir, or - for stdin."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Find the root of a failed start in its logs and name the cause.

    Reads logs of any size, gzip too, of all ranks; nothing in them is executed. The first failing rank's own
    exception is named, not the timeouts that follow it. What is not known is shown, never guessed at.
    """
    from mindferry.diagnosis.startup.report import findings_of, read, read_stdin

    with Progress("reading", unit="MB") as bar:
        done = [0.0]

        def tick(count: int) -> None:
            done[0] += count / 1e6
            bar.at(int(done[0]))

        picture = read_stdin() if log == "-" else read(Path(log), tick)
    findings = findings_of(picture)
    checked = [f"{name}" for name in picture.sources]
    return _verdict(findings, _startup_text(picture, findings), checked)


def _startup_text(picture: Picture, findings: list[Finding]) -> str:
    many = f"{len(picture.sources)} logs" if len(picture.sources) > 1 else picture.sources[0]
    lines = [f"{many}, {picture.lines:,} lines"]
    root = next((item for item in findings if item.severity == "problem"), None)
    if root is not None:
        lines += ["", *(f"  {row}" for row in root.evidence.splitlines())]
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    doctor = typer.Typer(
        no_args_is_help=False,
        help="Find out what is wrong: with the machine, a start, a loss, the data, the communication.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    doctor.command("startup", epilog=STARTUP_EXAMPLE)(startup)
    for name in OTHERS:
        if importlib.util.find_spec(f"mindferry.cli.{name}") is not None:
            importlib.import_module(f"mindferry.cli.{name}").register(doctor)
    app.add_typer(doctor, name="doctor")
