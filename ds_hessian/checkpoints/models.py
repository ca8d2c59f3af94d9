"""Modules of checkpoints: of transformers by their `config.json`, of others by a factory.

Everything is read from the disk alone, and no code that a folder contains is executed.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hessian.checkpoints.sources import WHOLE, Checkpoint, reading, require_whole
from ds_hessian.checkpoints.text import Tokenize
from ds_hessian.checkpoints.weights import load_into, weights_of
from ds_hessian.errors import ConfigError, ResultError

Factory = Callable[[], nn.Module]

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' classes that predict the next token."""

CONTEXTS = ("max_position_embeddings", "n_positions")
"""Names of the length of the context in configurations of transformers."""


@dataclass(frozen=True)
class Language:
    """What a model of transformers needs to read text.

    Attributes:
        tokenize: Returns the tokens of a text; None where the folder has no tokenizer.
        context: Tokens that the model takes at most; None where its configuration does not say.
    """

    tokenize: Tokenize | None = None
    context: int | None = None


def named(text: str) -> Any:
    """Return the object that `module:name` names; modules of the working directory are found.

    Raises:
        ConfigError: it is not of this form, or there is no such module or name.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"expected module:name, got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything when it is imported
        raise ConfigError(f"there is no {text}: {type(error).__name__}: {error}") from error


def module_of(checkpoint: Checkpoint, factory: Factory | None = None) -> nn.Module:
    """Return the model of a checkpoint with its weights, in fp32 on the CPU.

    Args:
        checkpoint: The checkpoint.
        factory: Makes the module; None for that of the `config.json` beside the weights.

    Raises:
        ConfigError: there is neither a factory nor a configuration.
        ResultError: the weights are damaged, or of another model.
    """
    if factory is None:
        if checkpoint.kind == "transformers":
            return _pretrained(checkpoint.folder)
        if checkpoint.config is None:
            raise ConfigError(
                f"{checkpoint.path} has weights alone: name a function that makes the model, "
                "--model module:function"
            )
        module = _untrained(checkpoint.config)
    else:
        module = factory()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"the model's function must return a module: {type(module)}")
        if checkpoint.kind == "transformers":
            raise ConfigError(
                f"{checkpoint.path} is a folder of transformers, which makes its own model: name "
                "the file of its weights to load them into another"
            )
    module = module.float()
    load_into(module, weights_of(checkpoint), checkpoint.path)
    return module


def language_of(folder: Path | None, tokenizer: Path | None = None) -> Language:
    """Return tokenizer and context of a folder of transformers, as far as it has them.

    Args:
        folder: That of the model's configuration; None without one.
        tokenizer: A folder of a tokenizer of its own.

    Raises:
        ConfigError: there is no such folder; or, with the first text, it cannot be read.
    """
    context = None
    if folder is not None:
        config = _config(folder)
        context = next((getattr(config, n) for n in CONTEXTS if hasattr(config, n)), None)
    source = tokenizer or folder
    if source is None or not (tokenizer or any(source.glob("tokenizer*"))):
        return Language(context=context)
    if not source.is_dir():
        raise ConfigError(f"no such folder of a tokenizer: {source}")
    tokenizer_of = functools.cache(_tokenizer)
    return Language(lambda text: tokenizer_of(source)(text, verbose=False)["input_ids"], context)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with reading(f"the tokenizer in {folder}", ConfigError):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    with reading(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kinds = config.architectures or []
    if kinds and not any(kind.endswith(CAUSAL) for kind in kinds):
        raise ConfigError(
            f"{folder} holds {', '.join(kinds)}, no model that predicts the next token: measure it "
            "in Python, ds_hessian.measure(model, batches, loss_fn)"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{folder} holds quantized weights: measure the model before that")
    config.use_cache = False
    return config


def _untrained(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = _config(folder)
    with reading(f"a model of {folder / 'config.json'}"):
        made: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back transformers' progress bar and its report, which is read here."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _pretrained(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = _config(folder)
    with reading(folder), _quiet():
        require_whole(_files(folder))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
        )
    found, report = loaded
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(map(_in_words, report.get(problem) or ()))
        if names:
            raise ResultError(
                f"{folder} is not of its own config.json: {problem.replace('_', ' ')} "
                f"{', '.join(names[:3])} ({len(names)} in all)"
            )
    module: nn.Module = found
    return module


def _files(folder: Path) -> list[Path]:
    """Return the files of weights that transformers reads: safetensors, where there are any."""
    safe = any((folder / name).is_file() for name in WHOLE)
    name, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    return [path for form in ("", "-*") for path in folder.glob(f"{name}{form}.{suffix}")]


def _in_words(key: Any) -> str:
    """Return what transformers reports of a name: of a mismatch its shapes too."""
    if not isinstance(key, tuple):
        return str(key)
    name, there, here = key
    return f"{name} {tuple(there)} in place of {tuple(here)}"
