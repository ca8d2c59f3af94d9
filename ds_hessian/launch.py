"""Spectra of an unmodified DeepSpeed script, driven by its "hessian" section alone.

    deepspeed --module ds_hessian.launch train.py --its-arguments --deepspeed_config ds_config.json

The script runs unchanged, but `deepspeed.initialize` returns engines with their Hessian attached,
so that spectra are taken every `interval` steps (`ds_hessian.schedule`): on micro-batches captured
from training, never drawn from the script's iterator. Training stays bit for bit the same.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ds_hessian.backends.zero.host import DeepSpeedEngine

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a script whose engines take spectra automatically, and end the process.

    Args:
        arguments: `[--local_rank=N] script.py ...`, as the deepspeed launcher gives them.

    Raises:
        ConfigError: the "hessian" section of the script's configuration is wrong, or schedules
            no measurement.
    """
    show_log()
    run_script("ds_hessian.launch", arguments, attach_scheduled)
    sys.exit(0)


def show_log() -> None:
    """Show what ds_hessian logs, tables included, on stderr of a script that shows no log itself.

    A script that knows nothing of ds_hessian may still set up logging: its handlers then get the
    messages, and they are shown once.
    """
    ours, handler = logging.getLogger("ds_hessian"), logging.StreamHandler()
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def attach_scheduled(engine: DeepSpeedEngine) -> None:
    """Give an engine its Hessian if its configuration asks for measurements.

    Measurements of a job's second engine and further ones are refused with the `output_path` of the
    first: give their configurations another.

    Raises:
        ConfigError: the section is wrong, or it names no steps to measure at.
    """
    from ds_hessian.backends.zero import settings_of
    from ds_hessian.config import HessianConfig
    from ds_hessian.hosts import attach

    section = HessianConfig.from_deepspeed(settings_of(engine))
    if section is None or not section.enabled:
        logger.warning('no "hessian" section that is enabled: the script runs as without it')
        return
    section.require_scheduled("a script that measures nothing itself")
    attach(engine, section)


def run_script(
    module: str, arguments: Sequence[str], on_engine: Callable[[DeepSpeedEngine], None]
) -> None:
    """Run a script as `__main__`, with a call for each engine that it makes.

    Args:
        module: The module whose command line this is, for the usage message.
        arguments: `[--local_rank=N] script.py ...`, as the deepspeed launcher gives them.
        on_engine: Called with each engine that `deepspeed.initialize` returns, before the script
            gets it. A script that ends without one is warned of.
    """
    import deepspeed

    local = [a for a in arguments[:1] if a.startswith("--local_rank")]
    script = list(arguments[len(local) :])
    if not script:
        sys.exit(f"usage: deepspeed --module {module} script.py [its arguments]")
    if not Path(script[0]).is_file():
        sys.exit(f"{module}: no such script: {script[0]}")
    initialize, engines = deepspeed.initialize, itertools.count()

    @functools.wraps(initialize)
    def initialize_and_report(*args: object, **kwargs: object) -> Sequence[object]:
        result: Sequence[DeepSpeedEngine] = initialize(*args, **kwargs)
        next(engines)
        on_engine(result[0])
        return result

    deepspeed.initialize = initialize_and_report
    sys.argv = [script[0], *local, *script[1:]]
    sys.path[0] = str(Path(script[0]).resolve().parent)  # as python does: its imports lie there
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        ended = sys.exception() is None or isinstance(sys.exception(), SystemExit)
        if ended and next(engines) == 0 and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "%s has made no engine with deepspeed.initialize, so that nothing was measured; "
                "attach ds_hessian to a job without DeepSpeed in the script itself",
                script[0],
            )


if __name__ == "__main__":
    main(sys.argv[1:])
