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

from ds_hessian.backends import zero
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.hessian import Hessian
from ds_hessian.schedule import Schedule

Settings = HessianConfig | Mapping[str, Any] | str | Path | None


def attach(job: Any, config: Settings = None) -> Hessian:
    """Give a running job its Hessian.

    On a DeepSpeed engine it is also `engine.hessian`, with `engine.hessian_spectrum`; with an
    `interval` in the config, measurements are then taken by themselves (`ds_hessian.schedule`).

    Args:
        job: An engine from `deepspeed.initialize`, or model chunks on megatron-core: one, or the
            list that its schedules take.
        config: The settings: a `HessianConfig`, or a whole DeepSpeed config (dict or path) with a
            `"hessian"` section. None for the section of the engine's own config, or defaults.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the job uses a feature on which products would be wrong.

    Collective.
    """
    if getattr(job, "hessian", None) is not None:
        raise ConfigError("this engine has its Hessian already: use engine.hessian")
    hessian = hessian_of(job, config)
    if not _is_megatron(job):
        job.hessian = hessian
        job.hessian_spectrum = hessian.spectrum
        if hessian.config.scheduled:
            Schedule(job, hessian).install()
    return hessian


def hessian_of(job: Any, config: Settings = None) -> Hessian:
    """The Hessian of a job, which is left as it is; the arguments are those of `attach`.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the job uses a feature on which products would be wrong.

    Collective.
    """
    if _is_megatron(job):
        return megatron_hessian(job, _section(config))
    zero.refuse_unsupported(job)
    settings = _section(zero.settings_of(job) if config is None else config)
    return Hessian(zero.ZeroBackend(job), settings)


def megatron_hessian(
    model: Any, config: HessianConfig | Mapping[str, Any] | None = None
) -> Hessian:
    """The Hessian of model chunks on megatron-core.

    Args:
        model: The chunks: one, or the list that the schedules take.
        config: The settings, or a dictionary of them; None for the defaults.

    Raises:
        ConfigError: a setting is unknown or impossible, or there are other chunks than the job's.
        UnsupportedError: the job uses a feature on which products would be wrong.

    Collective.
    """
    from ds_hessian.backends import megatron

    if not isinstance(config, HessianConfig):
        config = HessianConfig.parse({} if config is None else config)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    megatron.refuse_unsupported(chunks)
    return Hessian(megatron.MegatronBackend(chunks), config)


def _is_megatron(job: Any) -> bool:
    chunks = job if isinstance(job, (list, tuple)) else [job]
    return any(type(chunk).__module__.startswith("megatron.") for chunk in chunks)


def _section(config: Settings) -> HessianConfig:
    if isinstance(config, HessianConfig):
        return config
    return HessianConfig.from_deepspeed(config) or HessianConfig()


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
