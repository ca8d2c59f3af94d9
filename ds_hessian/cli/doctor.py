"""Diagnosis of this machine: the parts of ds_hessian that run here, and those that do not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.memory import DTYPES
from ds_hessian.ops import extension_locks
from ds_hessian.table import Table
from ds_hessian.version import __version__

PACKAGES = ("torch", "deepspeed", "numpy", "scipy", "pydantic", "matplotlib", "plotly")
OPTIONAL = (
    *("megatron-core", "transformers", "accelerate", "datasets", "pandas"),
    *("tensorboard", "wandb", "comet-ml"),
)


@dataclass(frozen=True)
class Finding:
    """One finding of the diagnosis.

    Attributes:
        topic: Group that it is shown under.
        name: What.
        text: What was found.
        works: False where a measurement is not possible, or not to be trusted, because of it.
    """

    topic: str
    name: str
    text: str
    works: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """True if nothing prevents a measurement."""
        return all(finding.works for finding in self.findings)

    def tables(self) -> list[str]:
        """Return the findings, a table for each topic, and the verdict."""
        tables = list[str]()
        for topic, findings in groupby(self.findings, lambda finding: finding.topic):
            rows = [
                (finding.name, finding.text if finding.works else f"WILL NOT WORK: {finding.text}")
                for finding in findings
            ]
            tables.append(Table(topic, rows, first=26))
        failed = [finding.name for finding in self.findings if not finding.works]
        verdict = f"in the way: {', '.join(failed)}" if failed else "all is well"
        return [*tables, f"verdict: {verdict}"]


def examine(config: Path | None = None) -> Diagnosis:
    """Look at this machine and, if given, at the "hessian" section of a DeepSpeed configuration.

    Raises:
        ConfigError: the configuration cannot be read, has no such section, or one that is wrong.
    """
    section = [] if config is None else _section(config)
    return Diagnosis(
        (
            *(*section, *_versions(), *_kernels(), *_builds()),
            *(*_dtypes(), *_arithmetic(), *_determinism()),
        )
    )


def _section(config: Path) -> list[Finding]:
    if not config.exists():
        raise ConfigError(f"no such file: {config}")
    settings = HessianConfig.from_deepspeed(config)
    if settings is None:
        raise ConfigError(f'{config} has no "hessian" section: without one nothing is measured')
    products = settings.num_probes * settings.num_matvecs
    interval, steps = settings.interval, ", ".join(map(str, settings.steps))
    times = [
        *(["at logarithmic spacing"] if interval == "log" else []),
        *([f"every {interval} steps"] if interval and interval != "log" else []),
        *([f"at steps {steps}"] if steps else []),
    ]
    when = " and ".join(times) or "on request"
    state = f"a spectrum of {products} products {when}" if settings.enabled else "switched off"
    return [Finding("configuration", "hessian section", f"{state} ({config})")]


def _versions() -> list[Finding]:
    found = [
        Finding("versions", "ds_hessian", __version__),
        Finding("versions", "python", platform.python_version()),
    ]
    for name in PACKAGES + OPTIONAL:
        try:
            text, works = importlib.metadata.version(name), True
        except importlib.metadata.PackageNotFoundError:
            text, works = "not installed", name in OPTIONAL
        if name == "deepspeed" and works:
            text, works = _supported(text)
        found.append(Finding("versions", name, text, works))
    return found


def _supported(version: str) -> tuple[str, bool]:
    from ds_hessian.backends.zero.host import check_version

    try:
        check_version(version)
        _deepspeeds_accelerator()
    except UnsupportedError as error:
        return str(error), False
    except Exception as error:  # its parts raise whatever they do where something is amiss
        first = str(error).strip().partition("\n")[0]
        return f"{version} does not start: {type(error).__name__}: {first}", False
    return version, True


def _deepspeeds_accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def _accelerator() -> Any:
    """Return DeepSpeed's accelerator; None without a DeepSpeed that starts, of which the versions
    tell.
    """
    with suppress(Exception):
        return _deepspeeds_accelerator()
    return None


def _kernels() -> list[Finding]:
    from ds_hessian.ops.report import report

    found = report()
    return [
        Finding(
            f"kernels (DS_HESSIAN_OPS={found.mode}, {found.threads} CPU threads)",
            each.device,
            f"{each.name}: {each.reason}",
            each.name != "none" or each.device != _device(),
        )
        for each in found.implementations
    ]


def _builds() -> list[Finding]:
    """Find locks of killed builds, on which every start of DeepSpeed would hang."""
    found = extension_locks.abandoned()
    return [
        Finding(
            "DeepSpeed's builds",
            lock.parent.name,
            f"DeepSpeed hangs here without a word: a build was killed; rm {shlex.quote(str(lock))}",
            works=False,
        )
        for lock in found
    ] or [Finding("DeepSpeed's builds", "locks", "none is left by a killed build")]


def _device() -> str:
    accelerator = _accelerator()
    if accelerator is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(accelerator.device_name()).split(":")[0]


def _dtypes() -> list[Finding]:
    """Ask DeepSpeed for each dtype, and compare the gradients of two passes bit for bit."""
    accelerator, found = _accelerator(), []
    trains = {}
    if accelerator is not None:
        trains = {
            "fp32": True,
            "bf16": accelerator.is_bf16_supported(),
            "fp16": accelerator.is_fp16_supported(),
        }
    texts = {True: "trains; ", False: "DeepSpeed does not train in it here; ", None: ""}
    for name, dtype in DTYPES.items():
        text = texts[trains.get(name)]
        try:
            same = torch.equal(_gradient(dtype), _gradient(dtype))
        except RuntimeError as error:
            first = f"{text}torch: {error}".partition("\n")[0]
            found.append(Finding("dtypes", name, first, name != "fp32"))
            continue
        repeats = "a gradient repeats bit for bit" if same else "the same gradient twice differs"
        found.append(Finding("dtypes", name, f"{text}{repeats}", same))
    return found


def _gradient(dtype: torch.dtype) -> Tensor:
    """Return the gradient of a transformer layer's loss, always from the same weights and input."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        x = torch.randn(4, 32, 64)
    layer = layer.to(_device(), dtype)
    layer(x.to(_device(), dtype)).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in layer.parameters() if p.grad is not None])


def _arithmetic() -> list[Finding]:
    reduced = torch.backends.cuda.matmul.allow_tf32 or torch.get_float32_matmul_precision() != (
        "highest"
    )
    text = 'on: fp32 products have 10 bits; "precision": "fp32" switches it off while measuring'
    return [Finding("arithmetic", "TF32 matrix products", text if reduced else "off")]


def _determinism() -> list[Finding]:
    forced = torch.are_deterministic_algorithms_enabled()
    text = "forced" if forced else "not forced"
    found = [Finding("determinism", "deterministic kernels", text)]
    if torch.cuda.is_available():
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set")
        found.append(Finding("determinism", "CUBLAS_WORKSPACE_CONFIG", workspace))
    return found
