"""`initialize` and `attach`: the only place that looks at what it was given and picks a host.

    engine, optimizer, _, scheduler = ds_hessian.initialize(model=model, config=config, ...)
    spectrum = engine.hessian_spectrum(batches)

`initialize` is `deepspeed.initialize`: same arguments, same return value. If the config has no
`"hessian"` section (or one with `"enabled": false`), nothing else happens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ds_hessian.backends import plain, zero
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.hessian import Hessian
from ds_hessian.schedule import ModuleSchedule, Schedule

Settings = HessianConfig | Mapping[str, Any] | str | Path | None


def attach(job: Any, optimizer: Any = None, config: Settings = None) -> Hessian:
    """Give a job its Hessian: a DeepSpeed engine, or a plain module in a training loop of its own.

    Sets `engine.hessian` (also returned) and `engine.hessian_spectrum`. With an `interval` in the
    config, measurements are then taken by themselves (see `ds_hessian.schedule`): after an engine's
    steps, or for a module when `hessian.step()` is called after the optimizer's.

    Args:
        job: From `deepspeed.initialize`; or an `nn.Module`, maybe in `DistributedDataParallel`.
        optimizer: The training's, for a module; an engine has its own, and its second positional
            argument is the config.
        config: The settings: a `HessianConfig`, or a whole DeepSpeed config (dict or path) with a
            `"hessian"` section. None for the section of the engine's own config, or defaults. For
            a module also the settings themselves, as a dict.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the job uses a feature on which products would be wrong.
    """
    if not _is_engine(job):
        return _attach_module(job, optimizer, config)
    return _attach_engine(job, config if optimizer is None else optimizer)


def _is_engine(job: Any) -> bool:
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(job).__mro__)


def _attach_module(module: Any, optimizer: Any, config: Settings) -> Hessian:
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "attach() takes a DeepSpeed engine or an nn.Module, got "
            f"{type(module).__name__}; for Megatron's model chunks use ds_hessian.megatron"
        )
    if not isinstance(config, HessianConfig):
        if isinstance(config, Mapping) and "hessian" not in config:
            config = HessianConfig.parse(config)
        else:
            config = HessianConfig.from_deepspeed(config) or HessianConfig()
    backend = plain.ModuleBackend(module, optimizer)
    hessian = Hessian(backend, config)
    if config.scheduled:
        backend.after_step = ModuleSchedule(module, hessian).after_step
    return hessian


def _attach_engine(engine: Any, config: Settings) -> Hessian:
    if getattr(engine, "hessian", None) is not None:
        raise ConfigError("this engine has its Hessian already: use engine.hessian")
    hessian = hessian_of(engine, config)
    engine.hessian = hessian
    engine.hessian_spectrum = hessian.spectrum
    if hessian.config.scheduled:
        Schedule(engine, hessian).install()
    return hessian


def hessian_of(engine: Any, config: Settings = None) -> Hessian:
    """The Hessian of a DeepSpeed engine, which is left as it is.

    Args:
        engine: As for `attach`.
        config: As for `attach`.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the engine uses a feature on which products would be wrong.
    """
    zero.refuse_unsupported(engine)
    if not isinstance(config, HessianConfig):
        source = zero.settings_of(engine) if config is None else config
        config = HessianConfig.from_deepspeed(source) or HessianConfig()
    return Hessian(zero.ZeroBackend(engine), config)


def megatron_hessian(model: Any, config: HessianConfig | Mapping[str, Any] | None) -> Hessian:
    """The Hessian of model chunks on megatron-core; see `ds_hessian.megatron.MegatronHessian`."""
    from ds_hessian.backends import megatron

    if not isinstance(config, HessianConfig):
        config = HessianConfig.parse({} if config is None else config)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    megatron.refuse_unsupported(chunks)
    return Hessian(megatron.MegatronBackend(chunks), config)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` with the same arguments and return value.

    If the config has an enabled `"hessian"` section, the engine comes with its Hessian attached.
    The section is checked before DeepSpeed builds anything.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the engine uses a feature on which products would be wrong.
    """
    import deepspeed

    bound = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    config = bound.get("config") or bound.get("config_params")
    if config is None:
        config = getattr(bound.get("args"), "deepspeed_config", None)
    section = HessianConfig.from_deepspeed(config)
    result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
    launched = hasattr(result[0], "hessian")  # by ds_hessian.launch, which runs any script
    if section is not None and section.enabled and not launched:
        attach(result[0], section)
    return result
