"""Refusal of engines that cannot be measured, by name, before anything is touched."""

from __future__ import annotations

import torch

from ds_hessian.backends.findings import (
    Finding,
    backward_under_way,
    findings,
    other_dtypes,
    sharing,
)
from ds_hessian.backends.names import trained
from ds_hessian.backends.random_states import has_plain_random_states
from ds_hessian.backends.zero import host, tensor_parallel
from ds_hessian.backends.zero.host import Engine
from ds_hessian.errors import UnsupportedError


def refuse_unsupported(engine: Engine) -> None:
    """Raise for an engine on which products would be wrong or untested.

    The decision uses the configuration alone, so every rank reaches the same one.

    Raises:
        UnsupportedError: names the option, and what to do.
    """
    import deepspeed

    host.check_version(deepspeed.__version__)
    for name, present, remedy in _findings(engine):
        if present:
            raise UnsupportedError(f"ds_hessian does not support {name}; {remedy}")


KINDS = {
    0: ("FP16_Optimizer", "FP16_UnfusedOptimizer"),  # or the plain optimizer itself
    1: ("DeepSpeedZeroOptimizer", "BF16_Optimizer"),
    2: ("DeepSpeedZeroOptimizer",),
    3: ("DeepSpeedZeroOptimizer_Stage3",),
}
"""Optimizers that DeepSpeed makes at each stage and whose shards are known."""

NO_OPTIMIZER = ("NoneType", "DummyOptim", "DeepSpeedZeRoOffload")
"""Kinds of `engine.optimizer` where it has none; the last at ZeRO-3, for inference."""


def _findings(engine: Engine) -> list[Finding]:
    config, optimizer = engine._config, engine.optimizer
    zero, kind = config.zero_config, type(optimizer).__name__
    stage, plain = int(zero.stage), isinstance(optimizer, torch.optim.Optimizer)
    others = other_dtypes(engine.module.parameters())
    shared = sharing(trained(engine.module)) if stage == 0 else ""
    return [
        ("an engine without an optimizer", kind in NO_OPTIMIZER, "give it one"),
        (
            f"the engine class {type(engine).__name__} (its schedule owns forward and backward)",
            type(engine).__name__ != "DeepSpeedEngine",
            "use the plain DeepSpeedEngine",
        ),
        ("an engine after its destroy()", host.is_destroyed(engine), "measure before it"),
        backward_under_way(),
        ("DeepCompile", _is_deepcompile(engine), "switch compile.deepcompile off"),
        ("offload to NVMe", _offloads(zero, "nvme"), 'use "device": "cpu"'),
        (
            f"the ZeRO-{stage} optimizer {kind}",
            kind not in KINDS[stage] and not (stage == 0 and plain),
            "use the plain one of this stage (no ZenFlow, no SuperOffload)",
        ),
        ("offload_states()", bool(getattr(optimizer, "offloaded_states", None)), "reload them"),
        (
            "frozen weights that are stored in 8 bits",
            bool(getattr(zero, "zero_quantized_nontrainable_weights", False)),
            "switch zero_quantized_nontrainable_weights off",
        ),
        (
            "parameters that ZeRO-3 has not partitioned, as those added to an engine's model",
            stage == 3 and not all(hasattr(p, "ds_id") for p in engine.module.parameters()),
            "make the engine of the whole model",
        ),
        ("MiCS", getattr(zero, "mics_shard_size", -1) > 0, "use plain ZeRO-3"),
        *findings(engine.module),
        (
            f"parameters that share memory at stage 0 without being one: {shared}",
            bool(shared),
            "tie them as one parameter, or use ZeRO 1, 2 or 3, which parts them",
        ),
        (
            f"trainable parameters in {' and '.join(others)}",
            bool(others),
            "train in fp32, bf16 or fp16",
        ),
        *_model_parallel_findings(engine),
        *_expert_findings(engine),
    ]


def _expert_findings(engine: Engine) -> list[Finding]:
    if not host.has_experts(engine):
        return []
    layers = [layer for _, layer in host.expert_layers(engine)]
    several = host.tensor_parallel(engine)[1] * host.sequence_parallel_size(engine) > 1
    marked = sum(map(host.is_expert, engine.module.parameters()))
    inside = {id(p) for layer in layers for p in layer.experts.parameters()}
    return [
        (
            "experts of AutoEP (expert_parallel)",
            any(type(m).__name__ == "AutoEPMoELayer" for m in engine.module.modules()),
            "measure a data-parallel job, of which a checkpoint has the same Hessian",
        ),
        (
            "deepspeed.moe together with tensor or sequence parallelism",
            several,
            "use one of them",
        ),
        (
            "parameters marked as experts (allreduce = False) outside of deepspeed.moe.layer.MoE",
            marked > len(inside),
            "make them by deepspeed.moe.layer.MoE",
        ),
        ("Tutel", any(layer.use_tutel for layer in layers), "switch use_tutel off"),
    ]


def _model_parallel_findings(engine: Engine) -> list[Finding]:
    instead = "measure a job on megatron-core (ds_hessian.megatron), or a data-parallel one"
    sequences = host.sequence_parallel_size(engine) > 1
    split = host.tensor_parallel(engine)[1] > 1
    other = host.other_parallel_size(engine) > 1
    several = other or split
    parameters = list(engine.module.parameters()) if several else []
    configs = [getattr(m, "config", None) for m in engine.module.modules()] if several else []
    gated = any(getattr(config, "gated_linear_unit", False) is True for config in configs)
    return [
        (
            "sequence parallelism over ranks whose gradients the engine does not add up",
            sequences and other,
            "pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp, or that of "
            "UlyssesSPAttentionHF.register_with_transformers, to deepspeed.initialize",
        ),
        (
            "sequence parallelism together with tensor parallelism",
            sequences and split,
            "use one of them",
        ),
        ("pipeline or context parallelism of an mpu", other, instead),
        (
            "an mpu with tensor-parallel ranks where no parameter is split over them",
            several and not any(map(tensor_parallel.is_split, parameters)),
            "use Megatron's parallel layers, which mark theirs (tensor_model_parallel)",
        ),
        (
            "sequence parallelism of an mpu (parameters with sequence_parallel)",
            any(getattr(p, "sequence_parallel", False) is True for p in parameters),
            f"switch it off; or {instead}",
        ),
        (
            "experts in an mpu with tensor-parallel ranks",
            any(map(host.is_expert, parameters))
            or any(getattr(config, "num_moe_experts", None) for config in configs),
            instead,
        ),
        (
            "tensor-parallel gated layers whose partition_stride does not tell their halves apart",
            gated and not any(getattr(p, "partition_stride", 1) > 1 for p in parameters),
            "use layers without a gate; or " + instead,
        ),
        (
            "the random states of CUDA graphs",
            several and not has_plain_random_states(),
            "initialise Megatron's tracker without use_cudagraphable_rng",
        ),
    ]


def _offloads(zero: host.Private, device: str) -> bool:
    sections = (zero.offload_optimizer, zero.offload_param)
    devices = [s.device for s in sections if s is not None]
    return any(str(getattr(d, "value", d)) == device for d in devices)


def _is_deepcompile(engine: Engine) -> bool:
    active = getattr(engine, "is_deepcompile_active", None)
    return bool(active is not None and active())
