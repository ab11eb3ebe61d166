"""Tables to read, JSON to keep, plots to look at."""

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
    """Return a value with three digits that matter and a prefix that suits it."""
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
    """Say how the target stands."""
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
    """Say how the targets stand that are against one contender each."""
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
    """Return one case for JSON, every round's value included."""
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
    """Draw the cases of a subject; False where matplotlib is not installed, or nothing is there."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, NullFormatter
    except ImportError:
        return False
    cases = [{**case, "contenders": _drawable(case)} for case in cases if _drawable(case)]
    if not cases:
        return False
    rows = sum(len(case["contenders"]) for case in cases)
    figure = Figure(figsize=(9, 1.2 + 0.9 * len(cases) + 0.3 * rows), layout="constrained")
    axes = figure.subplots(
        len(cases), squeeze=False, height_ratios=[len(case["contenders"]) + 1 for case in cases]
    )[:, 0]
    colours = {"ours": "tab:green", "variant": "tab:olive", "peer": "tab:blue", "floor": "tab:gray"}
    for axis, case in zip(axes, cases, strict=True):
        found = case["contenders"][::-1]
        median = [one["spread"]["median"] for one in found]
        below = [one["spread"]["median"] - one["spread"]["low"] for one in found]
        above = [one["spread"]["high"] - one["spread"]["median"] for one in found]
        for place, one in enumerate(found):
            axis.errorbar(
                median[place],
                place,
                xerr=[[below[place]], [above[place]]],
                fmt="o" if one["counts"] else "x",
                capsize=3,
                color=colours[one["role"]],
            )
        axis.set_yticks(range(len(found)), [one["name"] for one in found])
        axis.set_ylim(-0.6, len(found) - 0.4)
        axis.set_xscale("log")
        # Room for the labels, and a whole decade at least, so that little looks little.
        axis.set_xlim(min(median) / 2, max(max(median) * 4, min(median) * 10))
        axis.grid(axis="x", which="both", alpha=0.3)
        axis.xaxis.set_major_formatter(EngFormatter(unit=case["unit"]))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(case["name"], fontsize=9)
        for place, (one, value) in enumerate(zip(found, median, strict=True)):
            less = "" if one["counts"] else " (not the whole job)"
            axis.text(
                value,
                place + 0.25,
                f"{quantity(value, case['unit'])}{less}",
                va="center",
                fontsize=8,
            )
        axis.set_xlabel(f"per {case['per']}", fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    return True


def _drawable(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the contenders that a logarithmic axis can show."""
    return [one for one in case["contenders"] if one["spread"]["median"] > 0]
