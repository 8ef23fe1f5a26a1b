"""Predict operator times from a device's data sheet and from the shares of it that kernels reach.

An operator takes the longer of computing and moving bytes, after a launch. The rates are the makers', without
sparsity. Each share below has a source of its own. The sources give ranges: the shares of products and of
flash attention on Hopper, and the copies around convolutions, were chosen within them after a comparison with
published and measured steps (``benchmarks/platforms.py``), so agreement with those steps is no proof.

* Matrix products reach 0.65. Alone, the largest reach 0.80 on an H100 and 0.87 on an A100 (MAMF, in "Machine
  Learning Engineering", S. Bekman, chapter on accelerators, 2026), and those of training, a kernel at a time,
  0.56 to 0.88 in ``platforms/nvidia-h100-80gb-hbm3.json``. In a step, the power limit lowers the clock.
* Convolutions reach 0.5. Those of 256 and more channels, which computing limits, reach 0.35 to 0.62 in that
  file.
* Attention reaches 0.5, counting what a causal mask leaves: FlashAttention-2 (Dao 2023) reports 0.50 to 0.73
  on an A100, FlashAttention-3 (Shah et al. 2024) up to 0.75 on an H100, cuDNN close to that. Torch's flash
  attention is FlashAttention-2, which by that paper reaches 0.35 on an H100. Gradients reach 0.8 of it.
* Bytes move at 0.9 of the memory bandwidth. Hugging Face's "Ultra-Scale Playbook" measured 3 TB/s of an
  H100's 3.35, as elementwise operators in that file do.
* A launch takes 2.5 microseconds, as the smallest operators in that file do behind a busy queue.

Some kernels move other bytes than each input and output once; `_PASSES` and `_LOOKUPS` name them.
"""

import re
from collections.abc import Mapping
from functools import partial

import attrs

from remat_graph.links import Links
from remat_graph.platforms.base import OpCost

PRODUCT_SHARE = 0.65
CONVOLUTION_SHARE = 0.5
ATTENTION_SHARE = 0.5
FLASH_ON_HOPPER_SHARE = 0.35
GRADIENT_SHARE = 0.8
BANDWIDTH_SHARE = 0.9
LAUNCH_S = 2.5e-6

# Bytes that a kernel moves per byte that it reads or writes once.
_PASSES = {
    # Statistics first, then the output: the input is read twice.
    "cudnn_batch_norm": 3 / 2,
    "_native_batch_norm_legit": 3 / 2,
    "_native_batch_norm_legit_functional": 3 / 2,
    "native_group_norm": 3 / 2,
    # Sums over input and gradient first, then the gradient of the input.
    "cudnn_batch_norm_backward": 5 / 3,
    "native_batch_norm_backward": 5 / 3,
    "native_group_norm_backward": 5 / 3,
    "native_layer_norm_backward": 5 / 3,  # one kernel for the input, one for the parameters
    "_fused_rms_norm_backward": 5 / 3,
    # A row of a vocabulary fits no register file: its maximum, its sum and the result are a read each.
    "_log_softmax": 2,
    "_softmax": 2,
    # The sum of a row, then the result.
    "_log_softmax_backward_data": 5 / 3,
    "_softmax_backward_data": 5 / 3,
    # The gradient of the output is read for the input's gradient and for the weight's.
    "convolution_backward": 4 / 3,
}

# Bytes of a copy per byte copied. Tensor cores take channels last: kernels before and after a convolution
# copy tensors of another layout.
_COPY = 2

# These read the rows or elements that indices name, not the whole table.
_LOOKUPS = frozenset(
    {"embedding", "gather", "index", "index_select", "nll_loss_forward", "nll_loss_backward"}
)

_POSITIVE = attrs.validators.and_(attrs.validators.gt(0.0), attrs.validators.lt(float("inf")))


def _positive_rates(instance: object, attribute: object, value: Mapping[str, float]) -> None:
    wrong = {kind: rate for kind, rate in value.items() if not 0 < rate < float("inf")}
    if wrong or "float32" not in value:
        raise ValueError(f"tflops are positive, one of float32 among them; they were {dict(value)}")


@attrs.frozen(kw_only=True)
class DataSheet:
    """A device and its host by their data sheets; nothing was measured.

    Attributes:
        device: its name as a platform.
        tflops: 1e12 floating-point operations a second of matrix products, without sparsity, by what
            `OpCost.arithmetic` names. Products in an arithmetic that is not there, or that is not known,
            are computed in float32.
        nbytes_per_s: bandwidth of its memory.
        flash_share: of the rate of products that torch's flash attention reaches.
        launch_s: seconds of an operator that does nothing.
        links: bandwidths between the device and its host, and of the host's memory; None for a CPU.
    """

    device: str
    tflops: Mapping[str, float] = attrs.field(validator=_positive_rates, hash=False)
    nbytes_per_s: float = attrs.field(converter=float, validator=_POSITIVE)
    flash_share: float = attrs.field(default=ATTENTION_SHARE, converter=float, validator=_POSITIVE)
    launch_s: float = attrs.field(
        default=LAUNCH_S,
        converter=float,
        validator=attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.lt(float("inf"))),
    )
    links: Links | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(Links))
    )

    @property
    def name(self) -> str:
        """The device and its rates, with the note that nothing was measured."""
        best = max(self.tflops.values(), key=float)
        rates = f"up to {best:g}e12 FLOP/s, {self.nbytes_per_s:g} B/s, launch {self.launch_s:g} s"
        return f"{self.device} (by its data sheet, not measured: {rates})"

    def time_s(self, cost: OpCost) -> float:
        """The launch, and the longer of computing and moving bytes, at the shares declared above."""
        operator = cost.operator.removeprefix("aten.").partition(".")[0]
        nbytes = cost.read_nbytes + cost.written_nbytes
        if operator in _LOOKUPS:
            nbytes = 2 * cost.written_nbytes
        if not nbytes and not cost.flops:
            return 0.0  # no kernel runs, for instance where a generator's state is read
        moved_s = _PASSES.get(operator, 1.0) * nbytes / (BANDWIDTH_SHARE * self.nbytes_per_s)
        copied_s = moved_s * _COPY if _is_copied(operator, cost) else 0.0
        tflops = self.tflops.get(cost.arithmetic, self.tflops["float32"])
        computed_s = cost.flops / (self._product_share(operator) * tflops * 1e12)
        return self.launch_s + copied_s + max(computed_s, moved_s)

    def _product_share(self, operator: str) -> float:
        """The share of the data sheet's rate that the products of an operator reach."""
        if "attention" in operator:
            share = self.flash_share if "flash" in operator else ATTENTION_SHARE
            return share * (GRADIENT_SHARE if operator.endswith("backward") else 1.0)
        return CONVOLUTION_SHARE if "convolution" in operator else PRODUCT_SHARE


def _is_copied(operator: str, cost: OpCost) -> bool:
    """Whether cuDNN copies the tensors of a convolution into the layout of its kernels, and back."""
    on_tensor_cores = cost.arithmetic in ("tf32", "float16", "bfloat16")
    return "convolution" in operator and on_tensor_cores and not _is_channels_last(cost.key)


def _is_channels_last(key: str) -> bool:
    """Whether the first tensor in a key has its channels last; true if the key shows no such tensor."""
    found = re.match(r"[^(]*\(\w+\[([\d, ]+)\]\[([\d, ]+)\]", key)
    if found is None:
        return True
    shape, stride = (tuple(map(int, numbers.split(","))) for numbers in found.groups())
    return shape[1] == 1 or stride[1] == 1


def _rates(*, half: float, tf32: float, float32: float, float64: float, eight_bit: float) -> dict[str, float]:
    eight = dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), eight_bit)
    return {
        "bfloat16": half,
        "float16": half,
        "tf32": tf32,
        "float32": float32,
        "float64": float64,
        **eight,
    }


def _links(pcie_nbytes_per_s: float, host_nbytes_per_s: float) -> Links:
    return Links(
        to_host_nbytes_per_s=pcie_nbytes_per_s,
        to_device_nbytes_per_s=pcie_nbytes_per_s,
        host_nbytes_per_s=host_nbytes_per_s,
    )


# Pinned memory over 16 lanes of PCIe 5, 4 and 3 (63, 31.5 and 15.8 GB/s; an H100 was measured at 54).
_PCIE_5, _PCIE_4, _PCIE_3 = 55e9, 26e9, 13e9
# STREAM on a socket of a server, and on a desktop with two channels of DDR5.
_SERVER, _DESKTOP = 150e9, 60e9

# One device each; add yours here and in the entry points of pyproject.toml.

# "NVIDIA H200 Tensor Core GPU", data sheet, 2024: SXM.
h200 = partial(
    DataSheet,
    device="h200-spec",
    tflops=_rates(half=989.5, tf32=494.7, float32=67.0, float64=67.0, eight_bit=1979.0),
    nbytes_per_s=4.8e12,
    flash_share=FLASH_ON_HOPPER_SHARE,
    links=_links(_PCIE_5, _SERVER),
)

# "NVIDIA H100 Tensor Core GPU", data sheet, 2023: SXM, 80 GB.
h100 = partial(
    DataSheet,
    device="h100-spec",
    tflops=_rates(half=989.5, tf32=494.7, float32=67.0, float64=67.0, eight_bit=1979.0),
    nbytes_per_s=3.35e12,
    flash_share=FLASH_ON_HOPPER_SHARE,
    links=_links(_PCIE_5, _SERVER),
)

# "NVIDIA A100 Tensor Core GPU", data sheet, 2021: SXM, 80 GB. It has no 8-bit floats.
a100 = partial(
    DataSheet,
    device="a100-spec",
    tflops={
        "bfloat16": 312.0,
        "float16": 312.0,
        "tf32": 156.0,
        "float32": 19.5,
        "float64": 19.5,
        "int8": 624.0,
    },
    nbytes_per_s=2.039e12,
    links=_links(_PCIE_4, _SERVER),
)

# "NVIDIA Ada GPU Architecture", 2023, appendix A: products that are summed in float32.
rtx4090 = partial(
    DataSheet,
    device="rtx4090-spec",
    tflops=_rates(half=165.2, tf32=82.6, float32=82.6, float64=1.29, eight_bit=330.3),
    nbytes_per_s=1.008e12,
    links=_links(_PCIE_4, _DESKTOP),
)

# "NVIDIA V100 Tensor Core GPU", data sheet, 2020: SXM2. Its tensor cores know float16 only.
v100 = partial(
    DataSheet,
    device="v100-spec",
    tflops={"float16": 125.0, "float32": 15.7, "float64": 7.8},
    nbytes_per_s=0.9e12,
    links=_links(_PCIE_3, _SERVER),
)

# "Tesla K80 GPU accelerator", board specification BD-07317-001, 2015: a board has two GPUs, and a device here
# is one of them, with half of the board's 8.74 and 2.91 TFLOP/s at the boost clock and half of its 480 GB/s.
# Kepler computes nothing in 16 bits.
k80 = partial(
    DataSheet,
    device="k80-spec",
    tflops={"float32": 4.37, "float64": 1.455},
    nbytes_per_s=0.24e12,
    links=_links(_PCIE_3, _SERVER),
)

# "Amazon EC2 C5 instances", 2020: 96 virtual CPUs, so 48 cores, of two Intel Xeon Platinum 8275CL at 3.0 GHz.
# Each core has two AVX-512 units ("Second generation Intel Xeon scalable processors", 2019), so 64 operations
# in float32 a cycle, and each socket six channels of DDR4-2933, of 23.5 GB/s. That an operator of torch takes
# 5 microseconds on a CPU if it does nothing is assumed.
c5_24xlarge = partial(
    DataSheet,
    device="c5.24xlarge-spec",
    tflops={"float32": 9.2, "float64": 4.6},
    nbytes_per_s=0.2816e12,
    launch_s=5e-6,
)
