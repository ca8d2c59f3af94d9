"""A job that need not exist yet, of DeepSpeed or of Megatron, in plain figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ds_hessian.backends.megatron.memory import MegatronFigures, memory_of_megatron
from ds_hessian.backends.protocol import Precision
from ds_hessian.backends.zero.memory import ZERO_BUCKET, ZeroFigures, memory_of_zero
from ds_hessian.errors import ConfigError
from ds_hessian.memory import DTYPES, FP32, Tier
from ds_hessian.planning.mesh import Mesh
from ds_hessian.planning.shape import Shape
from ds_hessian.planning.share import Share

Recompute = Literal["none", "selective", "full"]
"""What the passes compute anew in backward: nothing, attention over the sequence, or all layers."""


@dataclass(frozen=True)
class Job:
    """A job that need not exist yet: of DeepSpeed, or of Megatron where there is a mesh.

    Attributes:
        num_parameters: Trainable parameters of the model.
        world_size: Number of ranks.
        stage: Stage of ZeRO.
        dtype: Dtype of the weights in forward and backward.
        offload_optimizer: Whether the optimizer is offloaded to the CPU.
        offload_parameters: Whether the parameters are offloaded to the CPU.
        accelerator: False for a job on the CPU.
        secondary: Ranks that share a secondary copy of the weights (hpZ of ZeRO++); 1 for none.
        mesh: The axes of a Megatron job; None for DeepSpeed.
        shape: The sizes of the model; None where only its parameters are known, which are then
            taken to be split evenly over stages and tensor-parallel ranks.
        recompute: What the passes compute anew.

    Raises:
        ConfigError: the job could not be started, or not be measured.
    """

    num_parameters: int
    world_size: int
    stage: Literal[0, 1, 2, 3] = 3
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    offload_optimizer: bool = False
    offload_parameters: bool = False
    accelerator: bool = True
    secondary: int = 1
    mesh: Mesh | None = None
    shape: Shape | None = None
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        if self.secondary > 1 and (self.stage < 3 or self.mesh is not None):
            raise ConfigError("a secondary copy of the weights (hpZ) is of ZeRO-3")
        if self.world_size % self.secondary:
            raise ConfigError(
                f"{self.secondary} ranks of a secondary copy do not divide {self.world_size} ranks"
            )
        if self.mesh is None:
            return
        if self.offload_optimizer or self.offload_parameters:
            raise ConfigError("offload is of ZeRO: a Megatron job is planned without it")
        if self.dtype == "fp16":
            raise ConfigError("Megatron jobs in fp16 are not measured: plan bf16 or fp32")
        self.mesh.refuse(self.world_size, self.shape)

    @property
    def weight_bytes(self) -> int:
        """The bytes of one weight in the passes."""
        return FP32 if self.dtype == "fp32" else 2

    @property
    def tier(self) -> Tier:
        """Where vectors are."""
        return "accelerator" if self.accelerator else "host"

    @property
    def share(self) -> Share:
        """The largest share of a rank."""
        return max(self.shares, key=lambda share: share.n_local)

    @property
    def shares(self) -> list[Share]:
        """The shares of ranks, the largest of each pipeline stage."""
        if self.mesh is None:
            return [self._of_zero()]
        return [self._of_stage(self.mesh, stage) for stage in range(self.mesh.pipeline)]

    def _of_zero(self) -> Share:
        n = self.num_parameters
        n_local = n if self.stage == 0 else math.ceil(n / self.world_size)
        figures = ZeroFigures(
            stage=self.stage,
            n=n,
            n_local=n_local,
            weight_bytes=self.weight_bytes,
            narrow=self.dtype != "fp32",
            gradient_bytes=self.weight_bytes,
            has_masters=self.stage > 0 or self.dtype != "fp32",
            tier=self.tier,
            offloads_optimizer=self.offload_optimizer,
            offloads_parameters=self.offload_parameters,
            bucket=ZERO_BUCKET if self.stage == 3 else 0,
        )
        return Share(
            n,
            n_local,
            self.tier,
            lambda precision: memory_of_zero(figures, precision),
            get_args(Precision),
            DTYPES[self.dtype],
        )

    def _of_stage(self, mesh: Mesh, stage: int) -> Share:
        parts = self.on_rank(mesh, stage)
        ranks = mesh.sharers(self.world_size)
        n_local = sum(math.ceil(n / r) for n, r in zip(parts, ranks, strict=True))
        narrow = self.dtype != "fp32"
        alone = 0 if narrow else FP32 * n_local
        figures = MegatronFigures(sum(parts), alone, narrow, self.tier)
        return Share(
            self.num_parameters,
            n_local,
            self.tier,
            lambda precision: memory_of_megatron(figures, precision),
            get_args(Precision),
            DTYPES[self.dtype],
        )

    def on_rank(self, mesh: Mesh, stage: int) -> tuple[int, int]:
        """Return the parameters of a rank's layers: of its experts, and all others."""
        if self.shape is not None:
            return mesh.on_rank(self.shape, stage)
        return 0, math.ceil(self.num_parameters / (mesh.tensor * mesh.pipeline))
