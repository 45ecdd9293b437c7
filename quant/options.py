"""What a quantization run is asked for, and what it says it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from turbomill.convert.linear import QuantScheme
from turbomill.errors import UsageError

Method = Literal["rtn", "awq", "gptq", "auto"]
METHODS: tuple[Method, ...] = get_args(Method)
AUTO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class QuantOptions:
    """How to quantize. Defaults are LMDeploy's, except that the AWQ search is on: here it costs seconds."""

    bits: int = 4
    group: int = 128  # 0: the largest of 128, 64, 32 that divides every K; -1: all of K
    symmetric: bool = False
    pad: bool = False  # the inner size of MLPs with zeros, to whole groups
    format: str = ""  # of the checkpoint: awq, gptq, gptq_v2, compressed-tensors; empty: the method's
    calib_dataset: str = "builtin"
    calib_samples: int = 128
    calib_seqlen: int = 2048
    batch_size: int = 0  # windows run together; 0: about 4,096 tokens
    seed: int = 0
    search_scale: bool = True  # AWQ: search the scale's ratio, else x^0.5
    damping: float = 0.01  # GPTQ: share of the Hessian's mean diagonal
    correct: bool = True  # make up for the drift that quantizing the layers before brought to the inputs
    correction_damping: float = 0.1  # of that correction, likewise
    budget: float = (
        0.0  # bits per weight, scales and zeros counted, for mixed precision; 0: one scheme for all
    )
    device: str = "auto"  # where calibration and the solvers run: cpu, cuda, cuda:1; auto: a GPU if there is
    spool: bool | None = None  # calibration activations on disk; None: when they would not fit well in memory
    max_shard_bytes: int = 5 * 10**9
    overwrite: bool = False  # replace a work dir that this program did not write

    def __post_init__(self) -> None:
        for option, value in (
            ("--calib-samples", self.calib_samples),
            ("--calib-seqlen", self.calib_seqlen),
        ):
            if value < 1:
                raise UsageError(f"{option} {value}: expected at least 1")
        if self.group < -1:
            raise UsageError(
                f"--w-group-size {self.group}: expected a size, 0 (automatic) or -1 (all inputs)"
            )
        if self.budget and not 2 < self.budget < 9:
            raise UsageError(f"--budget {self.budget}: expected bits per weight, between 2 and 9")
        if self.batch_size < 0:
            raise UsageError(f"--batch-size {self.batch_size}: expected 0 (automatic) or more")
        if not 2 <= self.bits <= 8:
            raise UsageError(f"--w-bits {self.bits}: expected 2 to 8")
        for option, share in (("--damping", self.damping), ("--correction-damping", self.correction_damping)):
            if not 0 < share < 10:
                raise UsageError(f"{option} {share}: expected a share above 0")

    @property
    def scheme(self) -> QuantScheme:
        """Bits, group and symmetry."""
        return QuantScheme(self.bits, self.group, self.symmetric)

    def batch_of(self, length: int) -> int:
        """Windows of `length` tokens to run together."""
        return self.batch_size or max(1, AUTO_BATCH_TOKENS // length)

    def describe(self) -> dict[str, Any]:
        """What provenance records: everything that can change the result."""
        fields = asdict(self)
        del fields["overwrite"], fields["max_shard_bytes"], fields["spool"]
        return fields


@dataclass(frozen=True)
class LayerRow:
    """What happened to one linear. Losses are output errors relative to the output's energy; None without
    calibration."""

    layer: int
    linear: str
    method: str  # the one used: "rtn" where `fallback`
    weight_error: float  # |W - W'|^2 / |W|^2
    rtn_loss: float | None  # rounding to nearest would have given this
    loss: float | None  # this was given
    fallback: bool
    seconds: float
    tokens: int | None = None  # of calibration that the linear read
    scheme: str = ""


@dataclass(frozen=True)
class QuantResult:
    """A finished run."""

    work_dir: Path
    method: str
    scheme: str
    seconds: float
    peak_bytes: int  # resident memory of the process at its largest
    disk_bytes: int
    calibration: dict[str, Any] | None
    rows: tuple[LayerRow, ...] = field(repr=False)

    @property
    def fallbacks(self) -> int:
        """Linears that kept rounding to nearest."""
        return sum(row.fallback for row in self.rows)

    def summary(self) -> dict[str, Any]:
        """For `--json`."""
        fields = asdict(self)
        fields["work_dir"] = str(self.work_dir)
        return {**fields, "fallbacks": self.fallbacks}
