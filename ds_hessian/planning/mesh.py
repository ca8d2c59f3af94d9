"""The parallel axes of a Megatron job, and which parameters its ranks share by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_hessian.errors import ConfigError
from ds_hessian.planning.shape import OF_EXPERT, ROUTED, Axis, Parameters, Shape, on_rank


@dataclass(frozen=True)
class Mesh:
    """The axes of a Megatron job. The ranks that they leave are data-parallel.

    Attributes:
        tensor: Tensor-parallel size.
        pipeline: Pipeline stages.
        virtual: Virtual stages of each (interleaved pipeline).
        context: Context-parallel size.
        expert: Expert-parallel size.
        expert_tensor: Tensor-parallel size of experts; 0 for that of the other layers.
        sequence_parallel: Whether tensor-parallel ranks split activations by the sequence.
        distributed_optimizer: Whether data-parallel ranks split the optimizer's state.
        instances: Groups of data-parallel ranks that split it, each all of it.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    instances: int = 1

    def __str__(self) -> str:
        names = {
            "TP": self.tensor,
            "PP": self.pipeline,
            "VPP": self.virtual,
            "CP": self.context,
            "EP": self.expert,
        }
        words = [f"{name} {size}" for name, size in names.items() if size > 1]
        kind = "distributed optimizer" if self.distributed_optimizer else "DDP"
        return ", ".join([*words, kind])

    @property
    def sizes(self) -> dict[Axis, int]:
        """Sizes of the axes over which parameters of one stage are split."""
        expert_tensor = self.expert_tensor or self.tensor
        return {"tensor": self.tensor, "expert": self.expert, "expert_tensor": expert_tensor}

    def copies(self, ranks: int) -> tuple[int, int]:
        """Return how many ranks have the same parameters: of experts, and of all others."""
        of_expert = self.expert * self.sizes["expert_tensor"] * self.pipeline
        return ranks // of_expert, ranks // (self.tensor * self.pipeline)

    def sharers(self, ranks: int) -> tuple[int, int]:
        """Return how many of these share the parameters out: with the distributed optimizer, those
        of an instance (`intra_dp_cp` and `intra_expt_dp` of megatron-core's parallel_state.py).
        """
        if not self.distributed_optimizer:
            return 1, 1
        of_expert, others = self.copies(ranks)
        return of_expert // self.instances, others // self.instances

    def data(self, ranks: int) -> int:
        """Return the data-parallel size."""
        return ranks // (self.tensor * self.pipeline * self.context)

    @property
    def bubble(self) -> float:
        """Micro-batches in whose time a run of the schedule waits for stages.

        (p - 1) / v: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
        """
        return (self.pipeline - 1) / self.virtual

    @property
    def group(self) -> int:
        """Micro-batches that the schedule can only run together (interleaved: one per stage)."""
        return self.pipeline if self.virtual > 1 else 1

    def refuse(self, ranks: int, shape: Shape | None) -> None:
        """Raise for what Megatron would not start with.

        Raises:
            ConfigError: says which sizes do not fit which.
        """
        for name in ("tensor", "pipeline", "virtual", "context", "expert", "instances"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the {name} size must be at least 1: {getattr(self, name)}")
        model = self.tensor * self.pipeline * self.context
        if ranks % model:
            raise ConfigError(
                f"{ranks} ranks are not a multiple of tensor {self.tensor} x pipeline "
                f"{self.pipeline} x context {self.context} = {model}"
            )
        of_expert = math.prod(self.sizes[axis] for axis in ROUTED) * self.pipeline
        if ranks % of_expert:
            raise ConfigError(
                f"{ranks} ranks are not a multiple of expert {self.expert} x expert-tensor "
                f"{self.sizes['expert_tensor']} x pipeline {self.pipeline} = {of_expert}"
            )
        for of, copies in zip(("experts", "other layers"), self.copies(ranks), strict=True):
            if copies % self.instances:
                raise ConfigError(
                    f"{self.instances} instances of the optimizer do not divide the {copies} "
                    f"data-parallel ranks of {of}"
                )
        if self.virtual > 1 and self.pipeline == 1:
            raise ConfigError("virtual stages need a pipeline: give its stages too")
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError("sequence parallelism splits over tensor-parallel ranks: give them")
        if shape is None:
            if self.expert > 1:
                raise ConfigError("expert parallelism needs the number of experts: give the model")
            return
        if self.expert > 1 and not shape.experts:
            raise ConfigError("expert parallelism needs experts, of which the model has none")
        for what, number, by, size in (
            ("layers", shape.layers, "stages", self.pipeline * self.virtual),
            ("heads", shape.heads, "tensor-parallel ranks", self.tensor),
            ("query groups", shape.key_heads, "tensor-parallel ranks", self.tensor),
            ("rows of the vocabulary", shape.vocabulary, "tensor-parallel ranks", self.tensor),
            ("columns of the MLP", shape.width, "tensor-parallel ranks", self.tensor),
            ("experts", shape.experts, "expert-parallel ranks", self.expert),
            (
                "columns of an expert",
                shape.expert_width if shape.experts else 0,
                "ranks of its tensor parallelism",
                self.sizes["expert_tensor"],
            ),
            ("tokens of a sequence", shape.sequence, "context-parallel ranks", self.context),
        ):
            if number % size:
                raise ConfigError(f"{size} {by} do not divide {number} {what}")

    # ---- one stage

    def layers(self, shape: Shape, stage: int) -> list[int]:
        """Return the layers of a stage: with virtual stages, in turns."""
        each = shape.layers // (self.pipeline * self.virtual)
        starts = [(turn * self.pipeline + stage) * each for turn in range(self.virtual)]
        return [layer for start in starts for layer in range(start, start + each)]

    def parameters(self, shape: Shape, stage: int) -> Parameters:
        """Return the parameters of a stage; the last has a copy of a tied embedding."""
        found = sum((shape.of_layer(i) for i in self.layers(shape, stage)), Parameters())
        last = stage == self.pipeline - 1
        if stage == 0:
            found += shape.of_embedding
        if last:
            found += shape.of_norm
        if last and (self.pipeline > 1 or not shape.tied):
            found += shape.of_output
        return found

    def on_rank(self, shape: Shape, stage: int) -> tuple[int, int]:
        """Return the parameters of a rank's layers: of its experts, and all others."""
        parts = self.parameters(shape, stage)
        experts = Parameters({a: n for a, n in parts.items() if a in (ROUTED, OF_EXPERT)})
        return on_rank(experts, self.sizes), on_rank(parts - experts, self.sizes)
