"""mindferry doctor: env, startup, loss; `doctor` alone runs what applies."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command, output_to
from mindferry.errors import printable
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.diagnosis.environment.checks import Check
    from mindferry.diagnosis.loss import Examination
    from mindferry.diagnosis.startup import Picture

ENV_EXAMPLE = "Example: mindferry doctor env --for mindformers==1.9.0"
LOSS_EXAMPLE = "Example: mindferry doctor loss run/"
EXAMPLE = "Example: mindferry doctor --run run/"
STARTUP_EXAMPLE = "Example: mindferry doctor startup run/logs/train.log"

# Sub-commands that live in files of their own, beside this one.
OTHERS = ("doctor_data", "doctor_comm", "doctor_config")


def _verdict(findings: list[Finding], text: str, checked: list[str]) -> Result:
    """A result whose verdict is "problem" when a finding is one."""
    bad = any(item.severity == "problem" for item in findings)
    return Result("problem" if bad else "good", findings, {"checked": checked}, text)


@command("doctor env")
def env(
    run: Path | None = typer.Argument(None, metavar="[RUN]", help="Check what this run needs, too."),
    target: str | None = typer.Option(
        None, "--for", metavar="mindformers==X", help="What this release needs and whether pip can give it."
    ),
    no_smoke: bool = typer.Option(False, "--no-smoke", help="Leave the ten-second smoke training out."),
    quick: bool = typer.Option(False, "--quick", help="Only look; import, build and train nothing."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Check the chain mindformers, MindSpore, Python, CANN, and what else a run needs of this machine.

    Then trains a tiny GPT-2 with mindformers' own Trainer, so that the installation is known to work before
    anyone looks for a fault in their own code.
    """
    from mindferry.diagnosis.environment import checks, facts, needs, smoke, versions

    wanted = versions.parse_target(target) if target else None
    asked = needs.needs_of(run)
    train = not (no_smoke or quick)
    with Progress("checking", total=2 if train else 1, unit="parts") as bar:
        made = checks.judge(facts.gather(run, probe=not quick), asked, wanted)
        bar.advance(note="smoke training" if train else "")
        if train:
            made.append(_smoke_check(made, smoke))
            bar.advance()
    findings = [item for check in made for item in check.findings]
    return _verdict(findings, _numbered(made), [check.name for check in made])


def _smoke_check(made: list[Check], smoke: Any) -> Check:
    """The smoke training as a check; left out where the packages cannot even be imported."""
    from mindferry.diagnosis.environment.checks import Check

    if any(
        item.id in ("env.import", "env.no-mindspore", "env.no-mindformers")
        for c in made
        for item in c.findings
    ):
        return Check("smoke training", "the packages do not load", skipped=True)
    done = smoke.run()
    detail = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in done.stages.items())
    if done.losses:
        detail += f", loss {done.losses[0]:.3f} to {done.losses[-1]:.3f}"
    return Check("smoke training", detail, smoke.judge(done))


def _numbered(made: list[Check]) -> str:
    """One line a check: number, mark, name, what was found."""
    width = max(len(check.name) for check in made)
    return "\n".join(
        f"{number:2d} {check.mark:4s}  {check.name:{width}s}  {check.detail}"
        for number, check in enumerate(made, start=1)
    )


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

    with Progress("reading", total=None, unit="MB") as bar:
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


@command("doctor loss")
def loss(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory made by migrate; it is only read."),
    every: bool = typer.Option(False, "--all", help="Take all four steps, also after a culprit."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Look for the reason of a strange loss: data, precision, learning rate, gradients, in this order.

    Works from run.yaml, the data, migration.json and metrics.jsonl; trains some steps in a scratch directory
    where a comparison needs them. Stops at the first culprit.
    """
    import tempfile

    from mindferry.diagnosis.loss import examine

    with (
        tempfile.TemporaryDirectory(prefix="mindferry-doctor-") as folder,
        Progress("examining", total=None, unit="parts") as bar,
        output_to(Path(folder) / "loss.log"),
    ):
        exam = examine(run, every_step=every, tick=lambda note: bar.advance(note=note))
    result = _verdict(exam.findings, _loss_text(exam), [step.name for step in exam.steps])
    result.extra["culprit"] = exam.culprit
    result.extra["steps"] = [
        {"name": step.name, "verdict": step.verdict, "summary": step.summary, "evidence": step.evidence}
        for step in exam.steps
    ]
    return result


def _loss_text(exam: Examination) -> str:
    from mindferry.diagnosis.loss.step import STEPS

    taken = {step.name: step for step in exam.steps}
    lines = []
    for number, name in enumerate(STEPS, start=1):
        step = taken.get(name)
        verdict, summary = (step.verdict, step.summary) if step else ("not taken", "")
        lines.append(f"{number} {name:14s} {verdict:10s} {summary}".rstrip())
    text = next((s.evidence.get("text") for s in exam.steps if s.evidence.get("text")), "")
    if text:
        lines.append(f"  first tokens of the first batch: {printable(' '.join(str(text).split()))[:120]!r}")
    return "\n".join(lines)


@command("doctor")
def everything(
    run: Path | None = typer.Option(None, "--run", metavar="RUN", help="Look at this run, too."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Run what applies: the machine; with --run also its last start, its run.yaml, its data and its loss."""
    return _everything(run)


def _everything(run: Path | None) -> Result:
    from mindferry.cli import doctor_config
    from mindferry.diagnosis.environment import checks, facts, needs, smoke
    from mindferry.diagnosis.startup.report import findings_of, read

    asked = needs.needs_of(run)
    with Progress("checking", total=None, unit="parts") as bar:
        made = checks.judge(facts.gather(run), asked)
        bar.advance(note="smoke training")
        made.append(_smoke_check(made, smoke))
        bar.advance()
    findings = [item for check in made for item in check.findings]
    checked, text = [check.name for check in made], [_numbered(made)]
    if run is not None:
        log = run / "logs/train.log"
        if log.is_file():
            started = findings_of(read(log))
            findings += started
            checked.append("startup")
            text.append(f"last start ({log}): {started[0].message}")
        items, advice = doctor_config.look(run)
        findings += [item for item in advice if item.severity == "problem"]
        checked.append("config")
        text.append(doctor_config.table(items))
        items_of_data, line = _data(run)
        findings += items_of_data
        checked.append("data")
        text.append(line)
        # A model that waits is slow, which says nothing about its loss.
        if not any(item.severity == "problem" and item.id != "data.waits" for item in findings):
            import tempfile

            from mindferry.diagnosis.loss import examine

            with tempfile.TemporaryDirectory() as folder, output_to(Path(folder) / "loss.log"):
                exam = examine(run)
            findings += exam.findings
            checked += [f"loss: {step.name}" for step in exam.steps]
            text.append(_loss_text(exam))
    return _verdict(findings, "\n\n".join(text), checked)


def _data(run: Path) -> tuple[list[Finding], str]:
    """The quick part of `doctor data`; data that cannot be read is a finding here, as the other checks go on."""
    from mindferry.cli import doctor_data
    from mindferry.errors import MindferryError

    try:
        return doctor_data.look(run)
    except MindferryError as err:
        return [
            Finding(err.id or "data.unreadable", "problem", err.message, cause=err.cause, remedy=err.remedy)
        ], "data: cannot be read"


def register(app: typer.Typer) -> None:
    doctor = typer.Typer(
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @doctor.callback(epilog=EXAMPLE)
    def bare(
        context: typer.Context,
        run: Path | None = typer.Option(None, "--run", metavar="RUN", help="Look at this run, too."),
        json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
    ) -> None:
        """Find out what is wrong: with the machine, a start, a loss. Without a sub-command: run what applies."""
        if context.invoked_subcommand is None:
            everything(run=run, json_output=json_output)

    doctor.command("env", epilog=ENV_EXAMPLE)(env)
    doctor.command("startup", epilog=STARTUP_EXAMPLE)(startup)
    doctor.command("loss", epilog=LOSS_EXAMPLE)(loss)
    for name in OTHERS:
        if importlib.util.find_spec(f"mindferry.cli.{name}") is not None:
            importlib.import_module(f"mindferry.cli.{name}").register(doctor)
    app.add_typer(doctor, name="doctor")
