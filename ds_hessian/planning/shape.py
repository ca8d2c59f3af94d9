"""The sizes of a GPT: its parameters by how ranks share them, and the operations of a token.

Parameters are those of megatron-core's `GPTModel` (models/gpt, transformer/attention.py, mlp.py,
moe/experts.py of 0.16.1): column-parallel layers split their rows and biases over tensor-parallel
ranks, row-parallel ones their columns; norms, biases of row-parallel layers, routers and positions
are whole on each of them.

Operations are those of Narayanan et al. 2021 (arXiv 2104.04473), appendix: two for each weight of a
matrix and token, and those of attention over the whole sequence, 4 s for each coordinate of its
queries. A backward takes twice those of a forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_hessian.errors import ConfigError

Axis = Literal["tensor", "expert", "expert_tensor"]
Sharing = tuple[Axis, ...]
"""The axes over whose ranks some parameters are split."""

WHOLE: Sharing = ()
SPLIT: Sharing = ("tensor",)
ROUTED: Sharing = ("expert", "expert_tensor")
OF_EXPERT: Sharing = ("expert",)

Parameters = Counter[Sharing]
"""The number of parameters by the axes over which they are split."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT; those that are 0 follow from the others.

    Attributes:
        layers: Number of transformer layers.
        hidden: Width of the model.
        heads: Heads of attention.
        vocabulary: Rows of the embedding, padded as it is stored.
        sequence: Tokens of a sequence.
        groups: Heads of keys and values (grouped queries); 0 for as many as there are heads.
        head_width: Width of a head; 0 for hidden / heads.
        ffn: Width of the MLP; 0 for 4 hidden.
        gated: True for gated MLPs (SwiGLU).
        bias: Whether linear layers have biases.
        qkv_bias: Whether queries, keys and values have biases where other layers have none.
        tied: Whether the output layer's weight is the embedding.
        positions: Learned positions; 0 for rotary ones, which have no parameters.
        rms: True for RMSNorm, which has no bias.
        head_norms: Whether queries and keys are normalised, head by head.
        experts: Experts of a layer; 0 for an MLP.
        active: Experts that a token meets in a layer.
        expert_ffn: Width of an expert; 0 for `ffn`.
        shared_ffn: Width of the experts that all tokens meet; 0 for none.
        dense_layers: The first layers, which have an MLP in place of experts.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    groups: int = 0
    head_width: int = 0
    ffn: int = 0
    gated: bool = False
    bias: bool = True
    qkv_bias: bool = False
    tied: bool = True
    positions: int = 0
    rms: bool = False
    head_norms: bool = False
    experts: int = 0
    active: int = 2
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the model's {name} must be at least 1: {getattr(self, name)}")
        if not self.head_width and self.hidden % self.heads:
            raise ConfigError(f"{self.heads} heads do not divide the width {self.hidden}")
        if self.heads % self.key_heads:
            raise ConfigError(f"{self.key_heads} query groups do not divide {self.heads} heads")
        if self.experts and not 1 <= self.active <= self.experts:
            raise ConfigError(f"a token cannot meet {self.active} of {self.experts} experts")

    # ---- widths

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.groups or self.heads

    @property
    def queries(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def keys(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.queries // self.heads * self.key_heads

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Width of an expert."""
        return self.expert_ffn or self.width

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    # ---- parameters

    @property
    def parameters(self) -> int:
        """Parameters of the model; a tied embedding counts once."""
        parts = [self.of_layer(i) for i in range(self.layers)]
        head = Parameters() if self.tied else self.of_output
        return sum((self.of_embedding + self.of_norm + head).values()) + sum(
            sum(part.values()) for part in parts
        )

    @property
    def of_embedding(self) -> Parameters:
        """Parameters in front of the layers."""
        return Parameters(
            {SPLIT: self.vocabulary * self.hidden, WHOLE: self.positions * self.hidden}
        )

    @property
    def of_output(self) -> Parameters:
        """Parameters of an output layer of its own, or of a stage's copy of the embedding."""
        return Parameters({SPLIT: self.vocabulary * self.hidden})

    @property
    def of_norm(self) -> Parameters:
        """Parameters of a norm over the width of the model."""
        return Parameters({WHOLE: self.hidden * (1 if self.rms else 2)})

    def of_layer(self, layer: int) -> Parameters:
        """Return the parameters of a layer."""
        h, attention = self.hidden, self.queries + 2 * self.keys
        split = h * attention + self.queries * h
        split += attention if self.bias or self.qkv_bias else 0
        whole = h if self.bias else 0
        if self.head_norms:
            whole += 2 * (self.queries // self.heads) * (1 if self.rms else 2)
        found = Parameters({SPLIT: split, WHOLE: whole}) + self.of_norm + self.of_norm
        if not self.has_experts(layer):
            return found + self._mlp(self.width, SPLIT, WHOLE, 1)
        found += Parameters({WHOLE: self.experts * (h + (1 if self.bias else 0))})  # the router
        if self.shared_ffn:
            found += self._mlp(self.shared_ffn, SPLIT, WHOLE, 1)
        return found + self._mlp(self.expert_width, ROUTED, OF_EXPERT, self.experts)

    def _mlp(self, width: int, split: Sharing, whole: Sharing, count: int) -> Parameters:
        up = width * (2 if self.gated else 1)
        biases = (up, self.hidden) if self.bias else (0, 0)
        rows = self.hidden * (up + width) + biases[0]
        return Parameters({split: count * rows, whole: count * biases[1]})

    # ---- operations of a token's forward

    def of_forward(self, layer: int) -> float:
        """Return the operations of a layer, without attention's over the sequence."""
        h = self.hidden
        weights = h * (self.queries + 2 * self.keys) + self.queries * h
        per = h * (3 if self.gated else 2)
        if self.has_experts(layer):
            weights += per * (self.active * self.expert_width + self.shared_ffn) + h * self.experts
        else:
            weights += per * self.width
        return 2.0 * weights

    @property
    def of_attention(self) -> float:
        """Operations of a layer's attention over the sequence: scores, and means of the values."""
        return 4.0 * self.sequence * self.queries

    @property
    def of_logits(self) -> float:
        """Operations of the output layer."""
        return 2.0 * self.hidden * self.vocabulary


def on_rank(parameters: Parameters, sizes: Mapping[Axis, int]) -> int:
    """Return how many of the parameters a rank has, which axes of these sizes share."""
    total = 0
    for axes, count in parameters.items():
        for axis in axes:
            count //= sizes[axis]
        total += count
    return total
