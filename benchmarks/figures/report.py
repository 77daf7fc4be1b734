"""Results as Markdown: plain functions from the figures' JSON to text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.figures import compare, drawing

Results = Mapping[str, Mapping[str, Any]]
NOTHING = "No result of full size is here yet: `python -m benchmarks.figures.t1_step_time` makes the first.\n"
PICTURES = "../benchmarks/results"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def model_of(result: Mapping[str, Any]) -> str:
    """Model, batch and wire in one cell."""
    wire = (result["machine"] or {}).get("wire") or {}
    rate = f"{wire['rate'] / 1e6:g} Mbit/s" if wire.get("rate") else "loopback"
    return f"{drawing.short(result['model'])}, batch {result['batch']}, {rate}"


def of(results: Results, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The results of one figure, one a model."""
    return [(key, found) for key, found in results.items() if key.startswith(name)]


def best_of(
    result: Mapping[str, Any], who: str, *, carrying: bool = False
) -> tuple[str, Mapping[str, Any]] | None:
    """The fastest way of "torch", "jax" or "fdp" that communicates and overlaps what it can.

    ``carrying``: of those that leave buckets to the next step, rather than of those that do not.
    """
    names = [
        name
        for name, way in result["ways"].items()
        if drawing.who(name) == who
        and way["communicates"]
        and "serialized" not in name
        and ("carry" in name) == carrying
    ]
    if not names:
        return None
    name = compare.best(result["ways"], names)[0]
    return name, result["ways"][name]


def verdict(result: Mapping[str, Any], *, carrying: bool = False) -> str:
    """fdp's best against DDP's best."""
    torch, ours = best_of(result, "torch"), best_of(result, "fdp", carrying=carrying)
    if torch is None or ours is None:
        return "-"
    said = f"{100 * (ours[1]['median_s'] / torch[1]['median_s'] - 1):+.1f} %"
    known = result.get("compared") or {}
    known = known.get("carrying", {}) if carrying else known
    faster = known["fdp_faster"] if "fdp_faster" in known else compare.faster(ours[1], torch[1])
    return said if faster is not None else f"{said}, not separated"


def short(results: Results) -> str:
    """One row a model: computing alone, the best way of each, and the limits with a step boundary."""
    found = of(results, "t1_step_time")
    if not found:
        return NOTHING
    rows: list[list[str]] = []
    for _, result in found:
        limits = {who: result["limits"].get(who, {}) for who in ("torch", "jax")}
        best = {who: best_of(result, who) for who in ("jax", "torch", "fdp")}
        carried = best_of(result, "fdp", carrying=True)
        rows.append(
            [
                model_of(result),
                *(seconds(limit.get("compute_s")) for limit in limits.values()),
                seconds(limits["jax"].get("wire_s")),
                *("-" if way is None else seconds(way[1]["median_s"]) for way in best.values()),
                verdict(result),
                "-" if carried is None else seconds(carried[1]["median_s"]),
                verdict(result, carrying=True),
                *(seconds(limit.get("step_boundary_s")) for limit in limits.values()),
            ]
        )
    head = (
        "seconds a step",
        "torch, compute alone",
        "JAX, compute alone",
        "wire",
        "plain JAX",
        "PyTorch DDP",
        "fdp",
        "fdp against DDP",
        "fdp, carry_over",
        "carry_over against DDP",
        "limit, torch",
        "limit, JAX",
    )
    return table(head, rows) + across(results)


def across(results: Results) -> str:
    """What several runs of one model say of fdp's best step beside DDP's best: a sentence a model, or nothing."""
    runs: dict[str, list[float]] = {}
    for name, result in results.items():
        measures_steps = name.startswith(("t1_", "fig06_", "fig07_", "fig12_"))
        if measures_steps and not result.get("emulated"):
            torch, ours = best_of(result, "torch"), best_of(result, "fdp")
            if torch is not None and ours is not None:
                ratio = ours[1]["median_s"] / torch[1]["median_s"]
                runs.setdefault(model_of(result), []).append(100 * (ratio - 1))
    said: list[str] = []
    for model, percents in runs.items():
        if len(percents) < 2:
            continue
        agree = min(percents) > 0 or max(percents) < 0
        said.append(
            f"{len(percents)} runs of {model}: fdp's best step beside DDP's best, "
            f"{min(percents):+.1f} to {max(percents):+.1f} %"
            f"{'' if agree else ', so they do not say who is ahead'}."
        )
    return f"\n{' '.join(said)}\n" if said else ""


def steps(result: Mapping[str, Any]) -> str:
    """Every way of one run."""
    rows = [
        [
            f"`{name}`",
            seconds(way["median_s"]),
            f"{way['q1_s']:.3f} to {way['q3_s']:.3f}",
            percent(way.get("hidden")),
            "-" if way.get("over_limit") is None else f"{way['over_limit']:.3f}",
        ]
        for name, way in sorted(result["ways"].items(), key=lambda item: item[1]["median_s"])
    ]
    head = ("way", "step, s", "quartiles", "communication hidden", "step / limit")
    said = [
        f"{'torch' if framework == 'torch' else 'JAX'}: compute alone {seconds(x['compute_s'])} s, wire "
        f"{seconds(x['wire_s'])}, limit with a step boundary {seconds(x['step_boundary_s'])}, max(compute, wire) "
        f"{seconds(x['overall_s'])}."
        for framework, x in result["limits"].items()
    ]
    if any("carry" in name for name in result["ways"]):
        said.append(
            "Ways with carry leave buckets to the next step: no step boundary limits them, max(compute, wire) does."
        )
    twice = (result.get("compared") or {}).get("same_twice", {})
    if twice:
        apart = max(twice.values())
        said.append(
            f"The same configuration under two names differed by up to {100 * apart:.1f} %."
        )
    return "\n".join(said) + "\n\n" + table(head, rows)


def breakdown(result: Mapping[str, Any]) -> str:
    """Figure 6."""
    emulated = "Compute is slept, not done; in JAX a sleeping layer holds XLA's thread (`benchmarks/NOTES.md`).\n\n"
    rows = [
        [
            name,
            f"`{bar['way']}`",
            *(seconds(bar[part]) for part in ("forward", "backward", "exposed", "optimizer")),
            f"{bar['of_serialized']:.3f}",
        ]
        for name, bar in result["bars"].items()
    ]
    head = (
        "",
        "way",
        "forward, s",
        "backward, s",
        "exposed, s",
        "optimizer, s",
        "of not overlapped",
    )
    return (emulated if result.get("emulated") else "") + table(head, rows)


def caps(result: Mapping[str, Any]) -> str:
    """Figures 7 and 8."""
    found = result["optimum"].items()
    return "".join(f"- {drawing.BARS[who]['label']}: {x['said']}.\n" for who, x in found)


def windows(result: Mapping[str, Any]) -> str:
    """Figure 12."""
    return "".join(f"- cap {cap} MiB: {x['said']}.\n" for cap, x in result["windows"].items())


def no_sync(result: Mapping[str, Any]) -> str:
    """Figure 10."""
    rows = [
        [
            drawing.BARS[who]["label"],
            str(row["n"]),
            seconds(row["median_s"]),
            seconds(row["expected_s"]),
            f"{100 * row['excess']:+.1f} %",
        ]
        for who, found in result["no_sync"].items()
        for row in found["rows"]
    ]
    return table(("", "n", "an iteration, s", "expected, s", "off"), rows)


# What a figure is called, its heading, and what is said beside the picture.
SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str] | None]] = {
    "t1_step_time": ("Step time by way to train", steps),
    "fig02_": ("Figure 2: all-reduce by tensor size, and when gradients are ready", None),
    "fig06_": ("Figure 6: where a step's time goes", breakdown),
    "fig07_": ("Figures 7 and 8: bucket cap", caps),
    "fig09_": ("Figure 9: weak scaling", None),
    "fig10_": ("Figure 10: skipping synchronization", no_sync),
    "fig11_": ("Figure 11: convergence", None),
    "fig12_": ("Figure 12: several buckets in flight", windows),
}


def full(results: Results) -> str:
    """The short table, then every figure: text, picture, and how it was made."""
    parts = [short(results)]
    for name, (heading, say) in SECTIONS.items():
        found = of(results, name)
        if found:
            parts.append(f"### {heading}\n")
        for key, result in found:
            if "model" in result and "batch" in result:
                parts.append(f"**{model_of(result)}**\n")
            if say is not None:
                parts.append(say(result))
            parts.append(f"![{heading}, {key}]({PICTURES}/{key}.png)\n")
            load = (result.get("machine") or {}).get("load_average")
            parts.append(f"`{result['command']}`, load average before it {load}.\n")
    return "\n".join(parts)
