"""What another number of devices would do: the compiled schedule, played through with the links of that many."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from fdp.cli.terminal import USAGE, Stop
from fdp.inspect import HARDWARE, Collective, Hardware, Program, timeline
from fdp.inspect.hardware import find_hardware

ASSUMPTIONS = (
    "not a measurement: makers' peaks, rings with latency and bandwidth; each device keeps the share of the batch it "
    "has here, and schedule and work are those of the program above; TPUs are one slice; no congestion, no stragglers, "
    "no input"
)


class Estimate(NamedTuple):
    """Estimated times of one step on one of ``devices``, in seconds; see ``fdp.inspect.Timeline``.

    ``efficiency`` is the part of the step in which the device does not wait for the links: the throughput a device
    has, compared with one that is alone.
    """

    devices: int
    hardware: str
    device: str
    step_seconds: float
    compute_seconds: float
    link_seconds: float
    exposed_seconds: float
    hidden: float
    efficiency: float


@dataclasses.dataclass(frozen=True)
class _Cluster(Hardware):
    """The same hardware where each collective spans ``devices`` instead of ``compiled_for``."""

    devices: int
    compiled_for: int

    def collective_seconds(self, collective: Collective) -> float:
        """As for ``Hardware``."""
        if collective.group_size == self.compiled_for:
            collective = dataclasses.replace(collective, group_size=self.devices)
        return super().collective_seconds(collective)


def check_hardware(target: str, platform: str, devices: int | None, hardware: str | None) -> None:
    """Whether an estimate that was asked for can be made, before anything is compiled for it.

    Raises:
      Stop: a CPU program without the hardware to estimate with, or hardware of another platform.
    """
    if platform == "cpu":
        if devices is not None and hardware is None:
            raise Stop(
                f"expected hardware to estimate {devices} devices with, got the target {target!r} alone, which has "
                f"no published figures: add --hardware, one of {', '.join(HARDWARE)}.",
                USAGE,
            )
    elif hardware is not None and HARDWARE[hardware].platform != platform:
        raise Stop(
            f"expected hardware of the target {target!r}, a {platform.upper()}, got {hardware!r}: the schedule for "
            f"another is another. Leave --hardware out, or compile for {hardware!r}.",
            USAGE,
        )


def estimate(program: Program, devices: int | None, hardware: str | None) -> Estimate | None:
    """Estimates a step on ``devices``; on those it was compiled for if None.

    Returns:
      None where nothing was asked for and the hardware has no known figures (CPU).

    Raises:
      Stop: no hardware is known, or the program has nothing on the wire to scale.
    """
    try:
        known = find_hardware(hardware, program.device_kind)
    except ValueError as error:
        if devices is None:
            return None
        raise Stop(
            f"expected hardware with published figures to estimate {devices} devices with, got "
            f"{program.device_kind or program.platform}: add --hardware, one of {', '.join(HARDWARE)}.",
            USAGE,
        ) from error
    here = program.module.device_count
    if devices is not None and here < 2:
        raise Stop(
            f"expected a program for several devices to estimate {devices} from, got one for {here}, which "
            "sends nothing: compile for at least 2, such as --target cpu:8.",
            USAGE,
        )
    count = here if devices is None else devices
    cluster = _Cluster(**dataclasses.asdict(known), devices=count, compiled_for=here)
    found = timeline(program, cluster)
    return Estimate(
        devices=count,
        hardware=known.name,
        device=known.device,
        step_seconds=found.seconds,
        compute_seconds=found.compute_seconds,
        link_seconds=found.link_seconds,
        exposed_seconds=found.exposed_seconds,
        hidden=found.hidden,
        efficiency=1 - found.exposed_seconds / found.seconds if found.seconds else 1.0,
    )
