"""Published figures of accelerators, and the simple model of time that is made of them.

Every figure is a maker's peak. Real programs reach a part of it, so whatever is computed from them is an estimate,
good for comparing two schedules of one model and not for predicting a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from fdp.inspect.collectives import Collective
from fdp.inspect.cost import Cost


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of accelerator and the links between several.

    Attributes:
      name: key in ``HARDWARE``.
      device: what it is.
      platform: ``"gpu"`` or ``"tpu"``.
      bf16_flops: peak matmul operations a second on bfloat16 and float16, dense.
      f32_flops: the same for float32 at JAX's default precision: TF32 on GPU, one bfloat16 pass on TPU.
      memory_bandwidth: of device memory, bytes a second.
      link_bandwidth: bytes a second that one device can send to its neighbours, all links together, one direction.
      base_latency: seconds that any collective takes, however small.
      hop_latency: seconds for each step from device to device.
      torus_dims: dimensions of the torus that links the devices; 0 where a switch does.
      full_link_devices: a torus has its wrap-around links, and so its full bandwidth, from this many devices on;
        with fewer, half of the bandwidth counts. Behind a switch: devices of one node, that is, one switch.
      network_bandwidth: bytes a second that a node can send to other nodes; 0 where there are no nodes.
      launch_latency: seconds that each kernel takes, however small.
      source: where the figures come from.
    """

    name: str
    device: str
    platform: str
    bf16_flops: float
    f32_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    base_latency: float
    hop_latency: float
    torus_dims: int
    full_link_devices: int
    network_bandwidth: float
    launch_latency: float
    source: str

    def compute_seconds(self, cost: Cost, efficiency: float = 1.0) -> float:
        """Time of one kernel: the longer of its arithmetic and its memory traffic (a roofline)."""
        wide = cost.element_type in ("f32", "f64", "c64", "c128")
        peak = (self.f32_flops if wide else self.bf16_flops) * efficiency
        return self.launch_latency + max(cost.flops / peak, cost.nbytes / self.memory_bandwidth)

    def collective_seconds(self, collective: Collective) -> float:
        """Time of one collective: latency of its steps plus bytes sent over bandwidth (alpha-beta)."""
        n = collective.group_size
        if n <= 1:
            return 0.0
        rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}.get(collective.kind, 0)
        hop, bandwidth = self.hop_latency, self.link_bandwidth
        if self.torus_dims:
            # A ring along each dimension, of a torus that is as square as possible.
            steps = self.torus_dims * (n ** (1 / self.torus_dims) - 1)
            bandwidth *= 1.0 if n >= self.full_link_devices else 0.5
        else:
            steps = n - 1
            if n > self.full_link_devices:
                bandwidth = min(bandwidth, self.network_bandwidth)
        steps = rounds * steps if rounds else 1
        return self.base_latency + steps * hop + collective.wire_bytes / bandwidth


_GPU_LATENCY = (
    "latencies: NCCL src/graph/tuning.cc, ring, Simple protocol, NVLink; 2 us a launch is assumed"
)
_TPU_LATENCY = "1 us a hop is assumed (jax-ml.github.io/scaling-book, ICI)"

_ALL = (
    Hardware(
        name="h100",
        device="NVIDIA H100 SXM5 80 GB",
        platform="gpu",
        bf16_flops=989.4e12,
        f32_flops=494.7e12,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        base_latency=8.4e-6,
        hop_latency=3.4e-6,
        torus_dims=0,
        full_link_devices=8,
        network_bandwidth=8 * 50e9,
        launch_latency=2e-6,
        source="NVIDIA H100 Tensor Core GPU Architecture (white paper) and data sheet: bf16 and TF32 dense, "
        "HBM3, NVLink 4 at 900 GB/s both ways; DGX H100 data sheet: 8 x 400 Gbit/s; "
        + _GPU_LATENCY,
    ),
    Hardware(
        name="a100",
        device="NVIDIA A100 SXM4 80 GB",
        platform="gpu",
        bf16_flops=312e12,
        f32_flops=156e12,
        memory_bandwidth=2.039e12,
        link_bandwidth=300e9,
        base_latency=8.4e-6,
        hop_latency=3.4e-6,
        torus_dims=0,
        full_link_devices=8,
        network_bandwidth=8 * 25e9,
        launch_latency=2e-6,
        source="NVIDIA A100 80GB data sheet: bf16 and TF32 dense, HBM2e, NVLink 3 at 600 GB/s both ways; "
        "DGX A100 data sheet: 8 x 200 Gbit/s; " + _GPU_LATENCY,
    ),
    Hardware(
        name="v5e",
        device="Cloud TPU v5e",
        platform="tpu",
        bf16_flops=197e12,
        f32_flops=197e12,
        memory_bandwidth=819e9,
        link_bandwidth=200e9,
        base_latency=0.0,
        hop_latency=1e-6,
        torus_dims=2,
        full_link_devices=256,
        network_bandwidth=0.0,
        launch_latency=0.0,
        source="cloud.google.com/tpu/docs/v5e: 197 TFLOPS bf16, 819 GB/s, ICI 400 GB/s both ways, 2D torus, "
        "wrap-around in slices of 16x16; " + _TPU_LATENCY,
    ),
    Hardware(
        name="v5p",
        device="Cloud TPU v5p",
        platform="tpu",
        bf16_flops=459e12,
        f32_flops=459e12,
        memory_bandwidth=2.765e12,
        link_bandwidth=600e9,
        base_latency=0.0,
        hop_latency=1e-6,
        torus_dims=3,
        full_link_devices=64,
        network_bandwidth=0.0,
        launch_latency=0.0,
        source="cloud.google.com/tpu/docs/v5p: 459 TFLOPS bf16, 2765 GB/s, ICI 1200 GB/s both ways, 3D torus, "
        "wrap-around from 4x4x4 on; " + _TPU_LATENCY,
    ),
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType({hardware.name: hardware for hardware in _ALL})

# Words in the name that JAX gives a device, lower case.
_DEVICE_KINDS = {"h100": "h100", "a100": "a100", "v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p"}


def find_hardware(hardware: Hardware | str | None, device_kind: str) -> Hardware:
    """The figures that were asked for, or those of the device that a program was compiled for.

    Raises:
      ValueError: the name is not in ``HARDWARE``, or no name is given and the device is not in it.
    """
    if isinstance(hardware, Hardware):
        return hardware
    names = ", ".join(map(repr, HARDWARE))
    if hardware is not None:
        if hardware not in HARDWARE:
            raise ValueError(
                f"expected hardware to be one of {names} or a fdp.inspect.Hardware, got {hardware!r}."
            )
        return HARDWARE[hardware]
    # JAX calls a v5p "TPU v5".
    kind = device_kind.lower().replace("tpu v5p", "v5p")
    kind = "v5p" if kind == "tpu v5" else kind
    for word, name in _DEVICE_KINDS.items():
        if word in kind:
            return HARDWARE[name]
    what = f"for {device_kind!r}" if device_kind else "with its text alone"
    raise ValueError(
        f"expected a program compiled for hardware with known figures, got one {what}: "
        f"pass hardware=, one of {names}, or a fdp.inspect.Hardware of your own."
    )
