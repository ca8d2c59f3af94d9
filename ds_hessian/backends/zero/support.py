"""What is measured and what is refused, by name, before anything is touched."""

from __future__ import annotations

from typing import Any

from ds_hessian.backends.zero import host
from ds_hessian.errors import UnsupportedError


def refuse_unsupported(engine: Any) -> None:
    """Raise for an engine on which products would be wrong or untested.

    The decision uses the configuration alone, so every rank takes the same one.

    Raises:
        UnsupportedError: names the option, and what to do.
    """
    import deepspeed

    host.check_version(deepspeed.__version__)
    for name, present, remedy in _findings(engine):
        if present:
            raise UnsupportedError(f"ds_hessian does not support {name}; {remedy}")


def _findings(engine: Any) -> list[tuple[str, bool, str]]:
    config, optimizer = engine._config, engine.optimizer
    zero = config.zero_config
    kind = type(optimizer).__name__
    stage3 = "use zero_optimization.stage 3 for the measurement (a checkpoint loads in any stage)"
    full = "use fp32 for the measurement"
    return [
        ("an engine without an optimizer", kind in ("NoneType", "DummyOptim"), "give it one"),
        (
            f"the engine class {type(engine).__name__} (its schedule owns forward and backward)",
            type(engine).__name__ != "DeepSpeedEngine",
            "use the plain DeepSpeedEngine",
        ),
        ("DeepCompile", _is_deepcompile(engine), "switch compile.deepcompile off"),
        (f"ZeRO stage {zero.stage}", zero.stage != 3, stage3),
        (f"the ZeRO-3 optimizer {kind}", kind != "DeepSpeedZeroOptimizer_Stage3", "use the plain"),
        ("bf16 training", bool(engine.bfloat16_enabled()), full),
        ("fp16 training", bool(engine.fp16_enabled()), full),
        ("torch_autocast", bool(getattr(config, "torch_autocast_enabled", False)), full),
        ("optimizer offload", _offloads(zero.offload_optimizer), "keep the optimizer on device"),
        ("parameter offload", _offloads(zero.offload_param), "keep the parameters on device"),
        ("offload_states()", bool(getattr(optimizer, "offloaded_states", None)), "reload them"),
        ("ZeRO++ hpZ", zero.zero_hpz_partition_size > 1, "set zero_hpz_partition_size to 1"),
        ("ZeRO++ qwZ", bool(zero.zero_quantized_weights), "switch zero_quantized_weights off"),
        ("ZeRO++ qgZ", bool(zero.zero_quantized_gradients), "switch it off"),
        (
            "tensor, expert or sequence parallelism",
            not host.is_data_parallel_only(engine),
            "measure a data-parallel job",
        ),
        (
            "Muon",
            any(getattr(p, "use_muon", False) for p in engine.module.parameters()),
            "use Adam",
        ),
    ]


def _offloads(section: Any) -> bool:
    return section is not None and str(getattr(section.device, "value", section.device)) != "none"


def _is_deepcompile(engine: Any) -> bool:
    active = getattr(engine, "is_deepcompile_active", None)
    return bool(active is not None and active())
