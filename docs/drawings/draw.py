"""Draws the pictures of ``concepts.md``: plain SVG, nothing to install. ``python docs/drawings/draw.py``.

Times are schematic; who waits for whom is not: it comes from the rules that the pictures are about. Dark boxes are
computed, hatched ones are on the wire, so that a print in black and white reads as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from svg import Drawing

HERE = Path(__file__).parent


class Sent(NamedTuple):
    """When one bucket is on the wire."""

    start: float
    end: float


def on_the_wire(ready: Sequence[float], size: Sequence[float], window: int) -> list[Sent]:
    """Buckets in launch order: k starts once it is ready and k - window is done; those on the wire share it."""
    left, begun, ended = list(size), [0.0] * len(size), [0.0] * len(size)
    now, waiting, flying = 0.0, list(range(len(size))), list[int]()
    while waiting or flying:
        for k in list(waiting):
            free = k < window or (k - window not in waiting and k - window not in flying)
            if free and ready[k] <= now + 1e-9:
                begun[k] = now
                waiting.remove(k)
                flying.append(k)
        births = [ready[k] for k in waiting if ready[k] > now + 1e-9]
        ends = [now + min(left[k] for k in flying) * len(flying)] if flying else []
        then = min(births + ends)
        for k in list(flying):
            left[k] -= (then - now) / len(flying)
        now = then
        for k in [k for k in flying if left[k] < 1e-9]:
            ended[k] = now
            flying.remove(k)
    return [Sent(*pair) for pair in zip(begun, ended, strict=True)]


# Sizes in MiB, in tree order; the plan of concepts.md: cap 16 MiB, first cap 4 MiB.
LEAVES = {"w1": 4, "w2": 8, "w3": 8, "w4": 12, "w5": 3}
BUCKETS = [["w5"], ["w4"], ["w3", "w2"], ["w1"]]


def buckets() -> Drawing:
    """From a tree to buckets."""
    d = Drawing(
        210, "Leaves of a tree, the order their gradients are ready in, and the buckets they make"
    )
    scale, left = 16.6, 160
    for row, (y, label, names) in enumerate(
        [(24, "parameters,", list(LEAVES)), (106, "gradients, in the", list(LEAVES)[::-1])]
    ):
        d.text(14, y + 14, label)
        d.text(14, y + 31, ["in tree order", "order they are ready"][row])
        x = left + 0.0
        for name in names:
            width = LEAVES[name] * scale
            d.box(x, y, width, 38, f"{name}: {LEAVES[name]}", "leaf")
            x += width
    d.text(left, 90, "the backward pass begins with the last layer")
    d.line(left + 330, 86, left + 400, 86, arrow=True)
    x = left + 0.0
    d.text(14, 171, "buckets")
    for number, names in enumerate(BUCKETS):
        width = sum(LEAVES[name] for name in names) * scale
        d.brace(x, x + width, 150, f"#{number}")
        x += width
    d.text(
        14,
        200,
        "Sizes in MiB. No bucket of several leaves is over the cap, here 16; that of the first is 4.",
    )
    return d


def ready_order() -> Drawing:
    """What the order of buckets is worth."""
    d = Drawing(226, "Sent in ready order the wire starts earlier than in reverse tree order")
    unit, left, height = 92.0, 160, 30
    born = ["layer_10", "layer_2", "layer_1", "layer_0"]
    d.text(14, 38, "backward pass")
    for k, name in enumerate(born):
        d.box(left + k * unit, 18, unit, height, name, "compute")
    rows = [
        (86, "wire, reverse of", "tree order", ["layer_2", "layer_10", "layer_1", "layer_0"]),
        (150, "wire, ready order", "", born),
    ]
    for y, first, second, names in rows:
        d.text(14, y + (14 if second else 20), first)
        d.text(14, y + 31, second)
        sent = on_the_wire([(born.index(name) + 1) * unit for name in names], [unit * 0.9] * 4, 1)
        for name, when in zip(names, sent, strict=True):
            d.box(left + when.start, y, when.end - when.start, height, name, "wire")
        end = left + sent[-1].end
        d.line(end, y - 8, end, y + height + 8, dashed=True)
        d.text(end + 5, y + 20, "step ends")
    d.line(left + unit, 48, left + unit, 150, dashed=True)
    d.text(
        14,
        212,
        "Trees sort their keys as text: layer_10 comes before layer_2. The traced gradient knows better.",
    )
    return d


def schedules() -> Drawing:
    """Four buckets under each schedule."""
    d = Drawing(470, "The same four buckets under five schedules")
    unit, cross, left, height = 60.0, 84.0, 150, 26
    d.text(14, 36, "backward pass")
    for number in range(4):
        d.box(left + number * unit, 18, unit, height, f"#{number}", "compute")
    backward = 4 * unit
    d.line(left + backward, 14, left + backward, 446, dashed=True)
    ready, late, sizes = [(k + 1) * unit for k in range(4)], [backward] * 4, [cross] * 4
    rows = [
        ("ordered(1)", "one on the wire", on_the_wire(ready, sizes, 1)),
        ("ordered(2)", "at most two", on_the_wire(ready, sizes, 2)),
        ("unordered()", "all that are ready", on_the_wire(ready, sizes, 4)),
        ("serialized()", "after the backward", on_the_wire(late, sizes, 1)),
        ("fused()", "one, of all", on_the_wire([backward], [sum(sizes)], 1)),
    ]
    y = 62
    for name, what, sent in rows:
        lanes: list[float] = []
        d.text(14, y + 14, name)
        d.text(14, y + 30, what, size=11)
        for number, when in enumerate(sent):
            lane = next((i for i, end in enumerate(lanes) if end <= when.start + 1e-6), len(lanes))
            lanes[lane : lane + 1] = [when.end]
            label = "#0 #1 #2 #3" if len(sent) == 1 else f"#{number}"
            d.box(
                left + when.start,
                y + lane * (height + 2),
                when.end - when.start,
                height,
                label,
                "wire",
            )
        y += len(lanes) * (height + 2) + 26
    d.text(
        14,
        462,
        "Buckets in flight share the wire. Under unordered() the compiler may also merge and reorder.",
    )
    return d


def accumulate() -> Drawing:
    """Microbatches, and how often they are reduced."""
    d = Drawing(
        300, "Four microbatches: reduced once, held back by three steps, or reduced every time"
    )
    left, height, forward, back = 170, 26, 34.0, 62.0
    both = forward + back
    rows = [
        (20, "num_microbatches=4", "one train_step"),
        (116, "3 no_sync_step,", "1 train_step"),
        (212, "without fdp, in one", "loop (auto sharding)"),
    ]
    for y, first, second in rows:
        d.text(14, y + 16, first)
        d.text(14, y + 33, second)
        x = left + 0.0
        for number in range(4):
            d.box(x, y, forward, height, "F", "forward")
            d.box(x + forward, y, back, height, f"B{number}", "compute")
            x += both
            if y == 212:
                d.box(x, y + height + 4, 40, height, "all", "wire")
                x += 40
            elif y == 116 and number < 3:
                x += 8  # another call
        if y != 212:
            start = x - back
            ready = [start + back * share for share in (0.25, 0.5, 0.75, 1.0)]
            for number, when in enumerate(on_the_wire(ready, [15.0] * 4, 1)):
                d.box(when.start, y + height + 4, when.end - when.start, height, "", "wire")
                if number == 3:
                    d.text(when.end + 8, y + height + 22, "4 buckets, once")
    d.text(
        14,
        288,
        "F forward, B backward. The last microbatch is outside of the loop: its gradients come one by one.",
    )
    return d


def loops() -> Drawing:
    """A scan over layers, reduced behind it and inside it."""
    d = Drawing(236, "A scan over layers: reduced behind it, or inside it, one iteration late")
    left, height, unit = 150, 28, 84.0
    layers = [4, 3, 2, 1]
    for y, first, second in (
        (20, "reduced after", "the loop"),
        (122, "reduced in the", "loop, one late"),
    ):
        d.text(14, y + 16, first)
        d.text(14, y + 33, second)
        d.line(left - 6, y - 8, left - 6, y + 70)
        for k, layer in enumerate(layers):
            d.box(left + k * unit, y, unit, height, f"layer {layer}", "compute")
        d.line(left + 4 * unit, y - 8, left + 4 * unit, y + 70, dashed=True)
    end = left + 4 * unit
    d.box(end, 20 + height + 6, 4 * unit * 0.62, height, "layers 4, 3, 2, 1", "wire")
    for k, layer in enumerate(layers):
        d.box(left + (k + 1) * unit, 122 + height + 6, unit * 0.62, height, f"{layer}", "wire")
    d.text(end + 6, 134, "loop ends", size=11)
    d.text(end + 6, 32, "loop ends", size=11)
    d.text(
        14,
        222,
        "While layer 3 is computed, the gradients of layer 4 cross. The last slice crosses after the loop.",
    )
    return d


DRAWINGS = {
    "buckets": buckets,
    "ready_order": ready_order,
    "schedules": schedules,
    "accumulate": accumulate,
    "loops": loops,
}


def main() -> None:
    """Writes the files."""
    for name, make in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(make().svg(), "utf-8")


if __name__ == "__main__":
    main()
