"""What `ds-hessian measure` was asked for, and what of it can be refused before anything is loaded.

The heavy imports are inside of functions: the command line has to start fast.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ds_hessian.errors import ConfigError

if TYPE_CHECKING:
    from ds_hessian.analyses import Analysis
    from ds_hessian.checkpoints import Checkpoint, Sequences
    from ds_hessian.config import HessianConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command was asked for.

    Attributes:
        checkpoints: The paths.
        data: A file, or `module:function` that returns the micro-batches of all ranks.
        model: `module:function` that makes the module; None for that of the checkpoint.
        loss: `module:function`, the loss; None for the model's own.
        tokenizer: Folder of a tokenizer; None for that of the checkpoint.
        sequences: The part of the file.
        analysis: What is measured.
        settings: Arguments of the analysis, and values of the configuration.
        config: The configuration file whose "hessian" section counts; None without one.
        dtype: Of the passes.
        stage: Of ZeRO.
        output: Folder of the run.
        resume: Whether to keep the state of what is unfinished, and to continue from it.
        only_plan: Whether to stop after saying what it costs.
    """

    checkpoints: tuple[Path, ...]
    data: str
    model: str | None
    loss: str | None
    tokenizer: Path | None
    sequences: Sequences
    analysis: str
    settings: dict[str, object]
    config: Path | None
    dtype: Literal["fp32", "bf16", "fp16"]
    stage: Literal[0, 3]
    output: Path
    resume: bool
    only_plan: bool

    @property
    def data_file(self) -> Path | None:
        """The file of data; None where a function makes the micro-batches."""
        path = Path(self.data)
        return None if ":" in self.data and not path.exists() else path


@dataclass(frozen=True, kw_only=True)
class Work:
    """A request with what it comes to.

    Attributes:
        request: The request.
        series: Its checkpoints, in the order of their steps.
        config: The settings.
        analysis: The analysis with its arguments.
    """

    request: Request
    series: list[Checkpoint]
    config: HessianConfig
    analysis: Analysis[Any]

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of the analysis that were given; all other settings are in `config`."""
        own = {field.name for field in fields(self.analysis)}
        return {name: value for name, value in self.request.settings.items() if name in own}

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint's results."""
        from ds_hessian.vector_files import step_folder

        return step_folder(self.request.output, checkpoint.step or 0, self.config.operator)


def checked(request: Request) -> Work:
    """Return what a request comes to; refuse what can be refused without loading a checkpoint.

    Raises:
        ConfigError: a setting is wrong, or there is no such data.
        ResultError: something is no checkpoint.
    """
    from ds_hessian.checkpoints import series_of
    from ds_hessian.checkpoints.measuring import require_offered
    from ds_hessian.cli.plan import settings_of

    series = series_of(request.checkpoints)
    require_offered(request.analysis)
    config, analysis = settings_of(request.config, request.analysis, request.settings)
    if request.data_file is not None and not request.data_file.exists():
        raise ConfigError(f"no such data: {request.data}")
    if "output_path" in request.settings:
        raise ConfigError("output_path: the folder of the run is that of --output; leave it out")
    return Work(request=request, series=series, config=config, analysis=analysis)
