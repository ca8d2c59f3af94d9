"""The activations that a rank's passes hold, which training's passes hold too.

They are counted as by Korthikanti et al. 2022 (arXiv 2205.05198, sections 4 and 5), for any widths:
of a layer its inputs of norms and matrices, queries, keys and values, the MLP's inside, masks of
dropout, and of attention's scores the softmax, its mask and what dropout makes of it. Fused
attention keeps no scores, as selective recomputation. Of full recomputation the input of every
layer is left, and one layer. Output and embedding are left out.
"""

from __future__ import annotations

from ds_hessian.planning.job import Job
from ds_hessian.planning.mesh import Mesh
from ds_hessian.planning.shape import Shape


def activations(job: Job, tokens: int, micro_batches: int, size: int | None = None) -> int:
    """Return the bytes that the first stage's ranks hold, in whose passes most are under way.

    Args:
        job: The job; its model's shape is known.
        tokens: Tokens of a micro-batch.
        micro_batches: Their number in a run.
        size: Bytes of a value; None for that of the weights.
    """
    assert job.shape is not None
    mesh, shape, size = job.mesh or Mesh(), job.shape, size or job.weight_bytes
    layers = mesh.layers(shape, 0)
    # Of as many micro-batches as there are stages; interleaved, of some more (section 4.2.3).
    stages = mesh.pipeline
    under_way = min(stages, micro_batches) * (1 + (stages - 1) / (stages * mesh.virtual))
    if mesh.virtual == 1:
        under_way = min(stages, micro_batches)
    mine = tokens / mesh.context
    if job.recompute == "full":
        kept = size * shape.hidden * len(layers) * under_way
        return int(mine * (kept + _of_layer(shape, mesh, layers[-1], size, scores=True)))
    scores = job.recompute == "none"
    each = sum(_of_layer(shape, mesh, layer, size, scores) for layer in layers)
    return int(mine * each * under_way)


def _of_layer(shape: Shape, mesh: Mesh, layer: int, size: int, scores: bool) -> float:
    """Return the bytes of a token in a layer."""
    h, inner = shape.hidden, shape.width
    copies, up = 1, 2 if shape.gated else 1
    if shape.has_experts(layer):
        copies, inner = shape.active, shape.active * shape.expert_width + shape.shared_ffn
    split = size * (2 * shape.queries + 2 * shape.keys + (up + 1) * inner)
    if scores:
        split += shape.heads * shape.sequence * (2 * size + 1)
    whole = size * h * (2 + 1 + copies) + 2 * h  # norms, inputs of matrices; masks of dropout
    return split / mesh.tensor + whole / (mesh.tensor if mesh.sequence_parallel else 1)
