"""`initialize` and `attach`: the only module that inspects a job and chooses its backend.

    engine, optimizer, _, scheduler = ds_hessian.initialize(model=model, config=config, ...)
    spectrum = engine.hessian_spectrum(batches)

`initialize` is `deepspeed.initialize`: same arguments, same return value. If the config has no
`"hessian"` section (or one with `"enabled": false`), nothing else happens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import nn

from ds_hessian import ops
from ds_hessian.backends import plain, zero
from ds_hessian.config import SECTION, HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.hessian import Hessian
from ds_hessian.ranks import collective, device_of_collectives
from ds_hessian.schedule import Schedule, follow

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk
    from ds_hessian.backends.zero.host import DeepSpeedEngine

    Job: TypeAlias = DeepSpeedEngine | Chunk | Sequence[Chunk] | nn.Module

Settings = HessianConfig | Mapping[str, object] | str | Path | None

OF_DEEPSPEED = (SECTION, "train_batch_size", "train_micro_batch_size_per_gpu")
"""Keys of which a whole DeepSpeed config has one: it asks for a batch size."""


def attach(job: Job, optimizer: Any = None, config: Settings = None) -> Hessian:
    """Give a running job its Hessian.

    On a DeepSpeed engine it is also `engine.hessian`, with `engine.hessian_spectrum`. With an
    interval or `steps` in the config, measurements are then taken automatically
    (`ds_hessian.schedule`): after an engine's steps, or, for a plain module, when `hessian.step()`
    counts a step.

    Args:
        job: An engine from `deepspeed.initialize`; model chunks on megatron-core, one or the list
            that its schedules take; or a plain `nn.Module`, maybe in `DistributedDataParallel`.
        optimizer: The optimizer of a plain module or of chunks on megatron-core, whose Adam state
            preconditions. The config may be this argument.
        config: The settings: a `HessianConfig`, a dict of them, or a whole DeepSpeed config (dict
            or path) with a `"hessian"` section. None for the section of the engine's own config, or
            defaults.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the job uses a feature on which products would be wrong.

    Collective.
    """
    if config is None and isinstance(optimizer, HessianConfig | Mapping | str | Path):
        optimizer, config = None, optimizer
    with _attaching(job, lambda: settings_for(job, config)):
        if getattr(job, "hessian", None) is not None:
            raise ConfigError("this engine has its Hessian already: use engine.hessian")
        hessian = hessian_of(job, config, optimizer)
        if _is_engine(job):
            job.hessian = hessian
            job.hessian_spectrum = hessian.spectrum
            if hessian.config.scheduled:
                follow(job, hessian)
        elif isinstance(hessian.backend, plain.ModuleBackend) and hessian.config.scheduled:
            assert isinstance(job, nn.Module)
            hessian.backend.after_step = Schedule(job, hessian).after_step
        return hessian


def hessian_of(job: Job, config: Settings = None, optimizer: Any = None) -> Hessian:
    """Return the Hessian of a job, which is not changed; the arguments are those of `attach`.

    Raises:
        ConfigError: the section has an unknown key or an impossible value.
        UnsupportedError: the job uses a feature on which products would be wrong.

    Collective.
    """
    with _attaching(job, lambda: settings_for(job, config)):
        _require_optimizer(optimizer)
        if _is_megatron(job):
            return megatron_hessian(job, settings_for(job, config), optimizer)
        if _is_engine(job):
            zero.refuse_unsupported(job)
            return Hessian(zero.ZeroBackend(job), settings_for(job, config))
        assert isinstance(job, nn.Module)
        return Hessian(plain.ModuleBackend(job, optimizer), settings_for(job, config))


def settings_for(job: Job, config: Settings) -> HessianConfig:
    """Return the settings of what `attach` is given."""
    if isinstance(config, HessianConfig):
        return config
    if _is_engine(job) and config is None:
        config = zero.settings_of(job)
    if isinstance(config, Mapping) and config.keys().isdisjoint(OF_DEEPSPEED):
        return HessianConfig.parse(config)
    return HessianConfig.from_deepspeed(config) or HessianConfig()


@contextmanager
def _attaching(job: object, settings: Callable[[], HessianConfig]) -> Iterator[None]:
    """Build the kernels if need be, once on each node, before ranks wait for each other.

    Args:
        job: The job.
        settings: Returns the settings.
    """
    device, failed = device_of_collectives(), None
    try:
        device = device_of(job)
        ops.prepare(device.type)
    except BaseException as error:  # raised on all ranks
        failed = error
    with collective("attaching", device, given=lambda: settings().given()):
        if failed is not None:
            raise failed
        yield


def device_of(job: object) -> torch.device:
    """Return the device of the tensors of a job's collectives. Not collective.

    Raises:
        ConfigError: it is none of the jobs that `attach` takes.
    """
    if _is_engine(job):
        return torch.device(job.device)
    if isinstance(job, (list, tuple)) and not job:
        raise ConfigError("got no model chunks; pass what get_forward_backward_func() takes")
    listed = _is_megatron(job) and isinstance(job, (list, tuple))
    modules: Any = job if listed else [job]
    if all(isinstance(module, nn.Module) for module in modules):
        found = (p.device for module in modules for p in module.parameters())
        return next(found, device_of_collectives())  # of an empty stage of a pipeline
    raise ConfigError(
        "attach() takes a DeepSpeed engine, model chunks of Megatron or an nn.Module, got "
        f"{type(job).__name__}"
    )


def megatron_hessian(
    model: Chunk | Sequence[Chunk],
    config: HessianConfig | Mapping[str, object] | None = None,
    optimizer: Any = None,
) -> Hessian:
    """Return the Hessian of model chunks on megatron-core.

    Args:
        model: The chunks: one, or the list that the schedules take.
        config: The settings, or a dictionary of them; None for the defaults.
        optimizer: Their optimizer, of megatron-core too, whose Adam state preconditions.

    Raises:
        ConfigError: a setting is unknown or impossible, or the chunks are not those of the job.
        UnsupportedError: the job uses a feature on which products would be wrong.

    Collective.
    """
    from ds_hessian.backends import megatron

    def settings() -> HessianConfig:
        if isinstance(config, HessianConfig):
            return config
        return HessianConfig.parse({} if config is None else config)

    with _attaching(model, settings):
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        megatron.refuse_unsupported(chunks)
        return Hessian(megatron.MegatronBackend(chunks, optimizer), settings())


def _is_engine(job: object) -> TypeGuard[DeepSpeedEngine]:
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(job).__mro__)


def _is_megatron(job: object) -> TypeGuard[Chunk | Sequence[Chunk]]:
    chunks = job if isinstance(job, (list, tuple)) else [job]
    kinds = [type(chunk) for chunk in chunks]
    # NeMo's wrapper is a subclass of Megatron's.
    kinds += [b for k in kinds for b in k.__mro__ if b.__name__ == "DistributedDataParallel"]
    return any(kind.__module__.startswith("megatron.") for kind in kinds)


def _require_optimizer(found: object) -> None:
    """Raise if what is given as an optimizer has no parameters that it steps.

    Raises:
        ConfigError: says what it is.
    """
    if found is None or (not isinstance(found, type) and hasattr(found, "param_groups")):
        return
    what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
    raise ConfigError(
        f"the optimizer must be the one that steps the model's parameters, got {what}: pass that "
        "optimizer, or none"
    )


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize`, with the same arguments and return value.

    If the config has an enabled `"hessian"` section, the engine comes with its Hessian attached.
    The section is checked before DeepSpeed builds anything.

    Args:
        *args: As `deepspeed.initialize` takes them; all are passed on.
        **kwargs: The same by name. The section is in `config` (a dictionary, or the path of a
            file), or in `config_params` or `args.deepspeed_config`.

    Returns:
        The engine, the optimizer, the data loader of `training_data` (else None), the scheduler.

    Raises:
        ConfigError: the section has an unknown key or an impossible value; or the process was
            started without a launcher.
        UnsupportedError: the engine uses a feature on which products would be wrong.
    """
    import deepspeed

    bound = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    config = bound.get("config") or bound.get("config_params")
    if config is None:
        config = getattr(bound.get("args"), "deepspeed_config", None)
    section = HessianConfig.from_deepspeed(config)
    try:
        result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise ConfigError(
            "this process was started without a launcher, which tells DeepSpeed its rank: start it "
            "with `deepspeed SCRIPT` or `torchrun --nproc_per_node 1 SCRIPT`, or install mpi4py"
        ) from error
    launched = hasattr(result[0], "hessian")  # by ds_hessian.launch, which runs any script
    if section is not None and section.enabled and not launched:
        attach(result[0], section)
    return result
