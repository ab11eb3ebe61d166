"""The command line: ``python -m benchmarks [SUBJECT ...]``."""

from __future__ import annotations

import datetime
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from benchmarks import machine, report, subjects
from benchmarks.case import FULL, TINY, CannotRunError
from benchmarks.measure import measure


@click.command()
@click.argument("names", metavar="[SUBJECT]...", nargs=-1, type=click.Choice(subjects.NAMES))
@click.option("--tiny", is_flag=True, help="Measure very little, to show that everything runs.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("benchmark-results"),
    show_default=True,
    help="The folder for the JSON file and the plots.",
)
@click.option(
    "-k",
    "only",
    multiple=True,
    metavar="TEXT",
    help="Only cases whose name contains TEXT, in upper or lower case. May be repeated.",
)
@click.option(
    "--more",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="N times as many rounds, for cases that differ by less than their noise.",
)
def main(
    names: tuple[str, ...], tiny: bool, output: Path, only: tuple[str, ...], more: int
) -> None:
    """Measure SUBJECTs, all of them by default, beside the peers that are installed.

    The exit status is 1 if a subject cannot run, dask-devctx fails, or no case contains the TEXT.
    """
    size = replace(TINY if tiny else FULL, only=only, more=more)
    about = machine.describe()
    click.echo("\n".join(machine.lines(about)))
    if tiny:
        click.echo("TINY: these numbers show that the benchmarks run, and nothing else")
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {}

    def keep() -> None:
        report.write_json(path, {"when": when, "tiny": tiny, "machine": about, "subjects": found})

    failed = False
    for name in names or subjects.NAMES:
        subject = subjects.load(name)
        click.echo(f"\n== {name}: {subject.TITLE}")
        found[name] = {"title": subject.TITLE, "cases": []}
        try:
            for case in subject.cases(size):
                if not size.wants(case.name):
                    continue
                measured = measure(case, size)
                failed |= any(m.failed for m in measured if m.contender.role == "ours")
                click.echo(report.table(case, measured) + "\n")
                found[name]["cases"].append(report.as_data(case, measured))
                keep()  # a later case may fail
        except CannotRunError as error:
            failed = True
            click.echo(f"  cannot run here: {error}")
            found[name]["cannot_run"] = str(error)
            continue
        picture = output / f"{name}.png"
        if only and not found[name]["cases"]:
            click.echo(f"  no case's name has {' or '.join(map(repr, only))}")
        elif report.plot(picture, subject.TITLE, found[name]["cases"]):
            click.echo(f"  plot: {picture}")
        elif find_spec("matplotlib") is None:
            click.echo("  no plot: matplotlib is not installed")
        else:
            click.echo("  no plot: there is nothing to draw")
    if any(subject["cases"] for subject in found.values()):
        keep()
        click.echo(f"\nresults: {path}")
    else:  # the results of an earlier run stay
        failed = True
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
