"""Tables, JSON files and plots of the results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Measured
from benchmarks.measure import spread, verdict

_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}


def quantity(value: float, unit: str) -> str:
    """Return a value with three significant digits and a suitable prefix."""
    scale, name = next((s for s in _SCALES[unit] if value >= s[0]), _SCALES[unit][-1])
    scaled = value / scale
    digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
    return f"{scaled:.{digits}f} {name}"


def table(case: Case, measured: Sequence[Measured]) -> str:
    """Return one case as text."""
    rows = [["contender", f"per {case.per}", "quartiles", "ours ÷ it", "quartiles", "remark"]]
    most = max(len(one.values) for one in measured)
    for one in measured:
        if one.failed:
            continue
        value = spread(one.values)
        ratio = spread(one.ratios) if one.ratios else None
        few = f"{len(one.values)} of {most} rounds" if len(one.values) < most else ""
        rows.append(
            [
                one.contender.name,
                quantity(value.median, case.unit),
                f"{quantity(value.low, case.unit)} – {quantity(value.high, case.unit)}",
                f"{ratio.median:.3f}" if ratio else "",
                f"{ratio.low:.3f} – {ratio.high:.3f}" if ratio else "",
                "; ".join(filter(None, [one.contender.remark, few])),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [f"{case.name}"]
    text += [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    text += [f"  FAILED: {one.contender.name}: {one.failed}" for one in measured if one.failed]
    text += [f"  missing: {one.name}: {one.reason}" for one in case.missing]
    text += ["  " + line for line in [judgement(case, measured), *own_targets(case, measured)]]
    return "\n".join(text)


def judgement(case: Case, measured: Sequence[Measured]) -> str:
    """Return a sentence on whether the target is met."""
    best = verdict(measured)
    if best is None:
        return "no peer that does the whole job could be measured: no verdict"
    if not best.ratios:
        return "ours could not be measured: no verdict"
    ratio = spread(best.ratios)
    against = f"ours ÷ {best.contender.name} = {ratio.median:.3f}"
    if case.target is None:
        return against
    return f"{against}, target at most {case.target:.3g}: {_met(ratio.median, case.target)}"


def own_targets(case: Case, measured: Sequence[Measured]) -> list[str]:
    """Return a sentence for each target that is set against one contender."""
    ours = next(one for one in measured if one.contender.role == "ours")
    lines = []
    for one in measured:
        name, ratio, more = one.contender.name, one.contender.at_most, one.contender.at_most_more
        if not one.ratios:
            continue
        if ratio is not None:
            found = spread(one.ratios).median
            lines.append(
                f"ours ÷ {name} = {found:.3f}, target at most {ratio:.3g}: {_met(found, ratio)}"
            )
        if more is not None:
            pairs = zip(ours.values, one.values, strict=False)
            found = spread([o - it for o, it in pairs]).median
            sign = "-" if found < 0 else ""
            lines.append(
                f"ours less {name} = {sign}{quantity(abs(found), case.unit)}, "
                f"target at most {quantity(more, case.unit)}: {_met(found, more)}"
            )
    return lines


def _met(value: float, target: float) -> str:
    return "met" if value <= target else "MISSED"


def as_data(case: Case, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return one case for JSON, with the values of all rounds."""
    best = verdict(measured)
    found = best.ratios if best else ()
    return {
        "name": case.name,
        "per": case.per,
        "unit": case.unit,
        "target": case.target,
        "against": best.contender.name if best else None,
        "ratio": spread(found)._asdict() if found else None,
        "judgement": [judgement(case, measured), *own_targets(case, measured)],
        "contenders": [
            {
                "name": one.contender.name,
                "role": one.contender.role,
                "counts": one.contender.counts,
                "remark": one.contender.remark,
                "values": list(one.values),
                "spread": spread(one.values)._asdict(),
                "ratio": spread(one.ratios)._asdict() if one.ratios else None,
            }
            for one in measured
            if not one.failed
        ],
        "failed": [
            {"name": one.contender.name, "reason": one.failed} for one in measured if one.failed
        ],
        "missing": [dataclasses.asdict(one) for one in case.missing],
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plot(path: Path, title: str, cases: Sequence[dict[str, Any]]) -> bool:
    """Draw ours divided by each peer, a row for each case: left of 1 ours is faster.

    Returns
    -------
    bool
        False where matplotlib is not installed, or no case has a peer.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
    except ImportError:
        return False
    rows = [(case, found) for case in cases if (found := _compared(case))]
    if not rows:
        return False
    names = sorted({one["name"] for _, found in rows for one in found})
    colours = {name: f"C{place}" for place, name in enumerate(names)}
    figure = Figure(figsize=(10, 1.8 + 0.34 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for place, (_, found) in enumerate(rows):
        for step, one in enumerate(found):
            low, median, high = (one["ratio"][key] for key in ("low", "median", "high"))
            axis.errorbar(
                median,
                place + (step - (len(found) - 1) / 2) * 0.16,
                xerr=[[median - low], [high - median]],
                fmt="o" if one["counts"] else "x",
                markersize=5,
                capsize=2,
                color=colours[one["name"]],
            )
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_yticks(
        range(len(rows)),
        [f"{case['name'].partition(':')[0]}  ({_ours(case)})" for case, _ in rows],
        fontsize=8,
    )
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xscale("log")
    found = [one["ratio"]["median"] for _, several in rows for one in several]
    axis.set_xlim(min(0.45, min(found) / 1.3), max(2.2, max(found) * 1.3))
    axis.xaxis.set_major_locator(FixedLocator([0.001, 0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("ours ÷ peer: left of 1 ours takes less", fontsize=9)
    for name, colour in colours.items():
        axis.plot([], [], "o", color=colour, label=name)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    return True


def _compared(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the contenders by which ours is divided: peers and variants."""
    return [
        one
        for one in case["contenders"]
        if one["role"] in ("peer", "variant") and one["ratio"] and one["ratio"]["median"] > 0
    ]


def _ours(case: dict[str, Any]) -> str:
    """Return the median of ours in words."""
    (ours,) = (one for one in case["contenders"] if one["role"] == "ours")
    return quantity(ours["spread"]["median"], case["unit"])
