"""What decoding with wide expert parallelism would take: bytes and times of a layer and of a step, on paper.

Attention runs by data: each device has its own sequences and the whole weights of attention. The experts lie over all devices.
A layer of a step has four parts: attention; dispatch, which sends each row to the devices that have its experts; the experts;
combine, which sends the result of every route back to the row's device. There the results are added in the order of the routes,
so that the sum has the bits of one device.

    python benchmarks/wide_ep.py                                # DeepSeek-V3 on 8, 64 and 1,000 H200
    python benchmarks/wide_ep.py --devices 32 --sequences 256 --context 8192

Nothing is measured here. The rates of devices and links (`H200`, `NVLINK`, `RDMA_64`, `RDMA_1000`) are assumptions, below the
peaks that the hardware has; replace them by measured ones. Routes are taken as balanced: redundant experts are there to make
them so.

What is left out, because it is small or hidden: the shared expert, which can run while rows are dispatched (`Layer.shared_us`);
the logits (`logits_us`, once a step); norms, router and sampler. In times the leading dense layers count like mixtures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

BF16, FP8, FLOAT32 = 2, 1, 4
FP8_BLOCK = 128
"""Values that share one float32 scale when a row is sent in FP8."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A mixture with latent attention (MLA). Weights are FP8, the cache and the logits bf16.

    Args:
        hidden, layers, vocabulary: Width of a row, number of layers, rows of the vocabulary.
        heads, nope, rope, value: Heads, and widths of a head's two parts of q and of its value.
        q_rank, kv_rank: Widths of the latents of q, and of k and v.
        experts, chosen, expert_width, shared: Experts of a layer, experts of a row, width of one, and shared experts.
        dense, dense_width: Leading layers without experts, and the width of their MLP.
    """

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    nope: int
    rope: int
    value: int
    q_rank: int
    kv_rank: int
    experts: int
    chosen: int
    expert_width: int
    shared: int
    dense: int
    dense_width: int

    @property
    def attention_bytes(self) -> int:
        """Bytes of a layer's projections: q down and up, k and v down and up, output."""
        q = self.hidden * self.q_rank + self.q_rank * self.heads * (self.nope + self.rope)
        kv = self.hidden * (self.kv_rank + self.rope) + self.kv_rank * self.heads * (self.nope + self.value)
        return (q + kv + self.heads * self.value * self.hidden) * FP8

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width * FP8

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache for one token in one layer: the latent and the rope key, for all heads together."""
        return (self.kv_rank + self.rope) * BF16

    @property
    def logits_bytes(self) -> int:
        """Bytes of the matrix of the logits."""
        return self.vocabulary * self.hidden * BF16


@dataclass(frozen=True, kw_only=True)
class Device:
    """The rates that kernels of a device reach.

    Args:
        bytes_per_s: Reading memory.
        attention_flops: bf16 arithmetic of latent attention, per second.
        expert_flops: FP8 arithmetic of grouped matrix products, per second.
    """

    bytes_per_s: float
    attention_flops: float
    expert_flops: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one device reaches to all others.

    Args:
        name: For the table.
        bytes_per_s: Bytes that a device sends.
        latency_us: What an exchange takes before its bytes count: signals, the slowest peer.
    """

    name: str
    bytes_per_s: float
    latency_us: float


@dataclass(frozen=True)
class Layer:
    """Bytes and microseconds of one layer on one device."""

    dispatch_bytes: float
    combine_bytes: float
    attention_us: float
    experts_us: float
    dispatch_us: float
    combine_us: float
    shared_us: float

    @property
    def serial_us(self) -> float:
        """One after the other."""
        return self.attention_us + self.experts_us + self.dispatch_us + self.combine_us

    @property
    def overlapped_us(self) -> float:
        """Two half batches in turns: one computes while the other one's rows travel; the longer of both counts.

        This is a lower bound: two half batches read the weights twice, which counts where reading them takes the time of the
        experts, as on 8 devices.
        """
        return max(self.attention_us + self.experts_us, self.dispatch_us + self.combine_us)


DEEPSEEK_V3 = Shape(
    hidden=7168, layers=61, vocabulary=129280, heads=128, nope=128, rope=64, value=128, q_rank=1536, kv_rank=512,
    experts=256, chosen=8, expert_width=2048, shared=1, dense=3, dense_width=18432,
)  # fmt: skip
H200 = Device(bytes_per_s=4.6e12, attention_flops=700e12, expert_flops=1.2e15)
"""4.6 of 4.8 TB/s; 700 of 989 TFLOP/s in bf16; 1.2 of 1.98 PFLOP/s in FP8."""
NVLINK = Link(name="NVLink", bytes_per_s=360e9, latency_us=5)
"""360 of 450 GB/s in one direction."""
RDMA_64 = Link(name="400 Gb/s", bytes_per_s=45e9, latency_us=15)
RDMA_1000 = Link(name="400 Gb/s", bytes_per_s=40e9, latency_us=30)
"""More peers: less of the 50 GB/s is reached, and the slowest of them comes later."""
COUNTS = (8, 64, 1000)


def attention_us(shape: Shape, device: Device, sequences: int, context: int) -> float:
    """Time of a layer's attention on one device: its projections, then latent attention.

    The projections of a step's few rows take the time of reading their weights. Latent attention reads the cache once for all
    heads, so it takes the longer of reading the cache and multiplying. For each head and cached token it multiplies q by the
    latent and the rope key (kv_rank + rope), then the probability by the latent (kv_rank), two operations each.
    """
    projections = shape.attention_bytes / device.bytes_per_s
    tokens = sequences * context
    reading = tokens * shape.token_bytes / device.bytes_per_s
    multiplying = 2 * tokens * shape.heads * (2 * shape.kv_rank + shape.rope) / device.attention_flops
    return 1e6 * (projections + max(reading, multiplying))


def experts_us(shape: Shape, device: Device, sequences: int, per_device: int) -> float:
    """Time of a layer's experts on one device: the longer of reading its experts and multiplying its routes.

    With balanced routes a device has as many routes as its own rows have, `sequences * chosen`, for any number of devices.
    Every expert of a device is read, since it has at least one route in all but tiny batches.
    """
    reading = per_device * shape.expert_bytes / device.bytes_per_s
    multiplying = 2 * sequences * shape.chosen * (shape.expert_bytes / FP8) / device.expert_flops
    return 1e6 * max(reading, multiplying)


def row_bytes(shape: Shape) -> tuple[int, int]:
    """Bytes of a row on its way to one expert, FP8 with scales, and of its result, bf16."""
    return shape.hidden * FP8 + math.ceil(shape.hidden / FP8_BLOCK) * FLOAT32, shape.hidden * BF16


def layer_of(shape: Shape, device: Device, link: Link, devices: int, physical: int, sequences: int, context: int) -> Layer:
    """One layer on one device.

    A row is sent once for each of its experts; a share of 1 / devices stays at home.

    Args:
        shape, device, link: What runs where.
        devices: Number of devices.
        physical: Experts of a layer with their copies; a device has at most the share of it, rounded up.
        sequences: Sequences of each device, each with one row in the step.
        context: Tokens in the cache of each sequence.
    """
    routes, away = sequences * shape.chosen, (devices - 1) / devices
    there, back = (routes * size for size in row_bytes(shape))
    times = [1e6 * size * away / link.bytes_per_s + link.latency_us for size in (there, back)]
    return Layer(
        there,
        back,
        attention_us(shape, device, sequences, context),
        experts_us(shape, device, sequences, math.ceil(physical / devices)),
        *times,
        1e6 * shape.shared * shape.expert_bytes / device.bytes_per_s,
    )


def memory_gb(shape: Shape, devices: int, physical: int, sequences: int, context: int) -> float:
    """1e9 bytes of weights and cache of one device."""
    mixture = (math.ceil(physical / devices) + shape.shared) * shape.expert_bytes
    dense = 3 * shape.hidden * shape.dense_width * FP8
    layer = shape.attention_bytes + sequences * context * shape.token_bytes
    mlps = (shape.layers - shape.dense) * mixture + shape.dense * dense
    return 1e-9 * (shape.layers * layer + mlps + 2 * shape.logits_bytes)


def logits_us(shape: Shape, device: Device) -> float:
    """Time of reading the matrix of the logits, once a step; the table leaves it out."""
    return 1e6 * shape.logits_bytes / device.bytes_per_s


def rounded(value: float) -> int:
    """A rate with three digits."""
    scale = 10 ** max(len(str(int(value))) - 3, 0)
    return round(value / scale) * scale


def table(cases: Sequence[tuple[int, int, Link]], sequences: int, context: int) -> list[str]:
    """The rows for DeepSeek-V3 on H200, with a head. A case: devices, experts of a layer with their copies, link."""
    found = [
        "| devices, experts a layer, link | attention / experts / dispatch / combine, us a layer "
        "| step serial / overlapped, ms | tok/s a device | GB a device |",
        "|---|---|---|---|---|",
    ]
    for devices, physical, link in cases:
        layer = layer_of(DEEPSEEK_V3, H200, link, devices, physical, sequences, context)
        parts = (layer.attention_us, layer.experts_us, layer.dispatch_us, layer.combine_us)
        steps = [1e-3 * DEEPSEEK_V3.layers * us for us in (layer.serial_us, layer.overlapped_us)]
        rates = [f"{rounded(1e3 * sequences / step):,}" for step in steps]
        found.append(
            f"| {devices:,}, {physical:,}, {link.name} | {' / '.join(f'{us:.0f}' for us in parts)} "
            f"| {steps[0]:.1f} / {steps[1]:.1f} | {rates[0]} / {rates[1]} "
            f"| {memory_gb(DEEPSEEK_V3, devices, physical, sequences, context):.0f} |"
        )
    return found


def case_of(devices: int) -> tuple[int, int, Link]:
    """A case for a number of devices: 32 redundant experts beyond one host, whole copies of all experts beyond 288 devices."""
    if devices <= 8:
        return devices, DEEPSEEK_V3.experts, NVLINK
    if devices <= 288:
        return devices, DEEPSEEK_V3.experts + 32, RDMA_64
    return devices, DEEPSEEK_V3.experts * math.ceil(devices / DEEPSEEK_V3.experts), RDMA_1000


def main() -> None:
    """Prints the table and what it leaves out."""
    parser = argparse.ArgumentParser(description="Wide expert parallelism of DeepSeek-V3 on H200, on paper.")
    parser.add_argument("--devices", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--sequences", type=int, default=128, help="of each device")
    parser.add_argument("--context", type=int, default=4096, help="tokens in the cache of each sequence")
    given = parser.parse_args()
    cases = [case_of(devices) for devices in given.devices]
    print("\n".join(table(cases, given.sequences, given.context)))
    layer = layer_of(DEEPSEEK_V3, H200, NVLINK, 8, 256, given.sequences, given.context)
    logits = logits_us(DEEPSEEK_V3, H200)
    print(f"\nA layer dispatches {layer.dispatch_bytes / 1e6:.1f} MB and combines {layer.combine_bytes / 1e6:.1f} MB a device.")
    print(f"Left out: the shared expert ({layer.shared_us:.0f} us a layer), the logits ({logits:.0f} us a step).")


if __name__ == "__main__":
    main()
