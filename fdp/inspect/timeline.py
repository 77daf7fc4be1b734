"""An estimate of when each operation of a step runs, from published peaks: no measurement, no hardware."""

from __future__ import annotations

import dataclasses

from fdp.inspect.hardware import Hardware, find_hardware
from fdp.inspect.program import Inspectable, load
from fdp.inspect.simulate import Event, Simulation


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Estimated times of one step on one device. Not a measurement: see ``timeline``.

    Attributes:
      hardware: whose figures were used.
      events: on both lanes, by start.
      seconds: of the whole step.
      compute_seconds: that the device computes.
      link_seconds: that the links are busy.
      exposed_seconds: that the device waits for the links.
    """

    hardware: Hardware
    events: tuple[Event, ...]
    seconds: float
    compute_seconds: float
    link_seconds: float
    exposed_seconds: float

    @property
    def hidden(self) -> float:
        """Part of the communication that computation hides, 0 to 1; 1 if there is none."""
        if not self.link_seconds:
            return 1.0
        return max(0.0, 1.0 - self.exposed_seconds / self.link_seconds)

    def __str__(self) -> str:
        lines = [
            f"estimate for {self.hardware.device} (published peaks, no measurement)",
            f"  step     {_micro(self.seconds)}",
            f"  compute  {_micro(self.compute_seconds)}",
            f"  links    {_micro(self.link_seconds)}, {self.hidden:.0%} of it hidden",
            f"  waiting  {_micro(self.exposed_seconds)}",
            "",
            "  start us    end us  on the wire",
        ]
        lines += [
            f"{event.start * 1e6:10.1f}{event.end * 1e6:10.1f}  {event.name} ({event.nbytes:,} bytes)"
            for event in self.events
            if event.lane == "link"
        ]
        return "\n".join(lines)


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:10.1f} us"


def timeline(
    compiled: Inspectable, hardware: Hardware | str | None = None, *, efficiency: float = 1.0
) -> Timeline:
    """Estimates when each operation of a step starts and ends.

    A device does one kernel after the other, in schedule order; a kernel takes the longer of flops over peak and
    bytes over memory bandwidth. The links do one collective after the other; each takes latency times steps plus
    bytes over bandwidth. A collective starts when the schedule comes to it, and the device waits where the schedule
    waits for it. The text of a CPU program is no schedule: there the device takes the first operation that has its
    inputs, and waits only if there is none. What kernels and collectives cost each other, and what hosts cost, is
    not modelled.

    Args:
      compiled: a ``jax.stages.Compiled`` or its text.
      hardware: a ``Hardware``, a name in ``HARDWARE``, or None for the device it was compiled for.
      efficiency: part of the peak that matmuls reach; 1 gives compute its shortest time, and so the least room to
        hide communication in.

    Returns:
      A ``Timeline``; ``str`` gives a table, ``fdp.inspect.plot`` a picture.

    Raises:
      ValueError: the hardware is unknown or of another platform than the program, ``efficiency`` is not in (0, 1],
        or the text is no compiled program of a known backend.
    """
    program = load(compiled)
    found = find_hardware(hardware, program.device_kind)
    if not 0 < efficiency <= 1:
        raise ValueError(
            f"expected efficiency in (0, 1], the part of the peak that matmuls reach, got {efficiency!r}."
        )
    if program.platform not in ("cpu", found.platform):
        raise ValueError(
            f"expected a program compiled for {found.platform}, as {found.name!r} is one, "
            f"got one for {program.platform}: its schedule is another. Compile for {found.name!r} first."
        )
    run = Simulation(program, found, efficiency)
    run.step()
    events = tuple(sorted(run.events, key=lambda event: (event.start, event.lane)))
    busy = {
        lane: sum(event.end - event.start for event in events if event.lane == lane)
        for lane in ("compute", "link")
    }
    seconds = max(run.now, run.link_free)
    return Timeline(found, events, seconds, busy["compute"], busy["link"], run.exposed)
