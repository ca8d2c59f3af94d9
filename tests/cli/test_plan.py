"""`ds-hessian plan`: its figures are those of the library, and it says what would fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_hessian.analyses import plan_job
from ds_hessian.config import HessianConfig
from ds_hessian.memory import shown
from ds_hessian.planning import ACCELERATOR, Job
from ds_hessian.planning import times as timing
from tests.cli.test_cli import call

JOB = ("--parameters", "7B", "--ranks", "64")
FIGURES = {"num_parameters": 7_000_000_000, "world_size": 64}


def test_memory_time_and_price_of_a_spectrum() -> None:
    done = call("plan", *JOB, "--seconds-per-micro-batch", "1.5", "--price", "2.5")
    assert done.returncode == 0, done.stderr
    config = HessianConfig()
    memory = plan_job(config, **FIGURES)
    time = timing.plan_time(12.0, Job(**FIGURES).share, ACCELERATOR, config, 30)
    assert memory.table() in done.stdout and time.table() in done.stdout
    assert f"price: {2.5 * 64 * time.total / 3600:.2f}" in done.stdout


def test_a_configuration_says_what_the_job_is(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    settings = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "hessian": {"num_matvecs": 12, "basis": {"device": "host"}},
    }
    path.write_text(json.dumps(settings))
    done = call("plan", *JOB, "--config", path)
    config = HessianConfig(num_matvecs=12, basis={"device": "host"})
    job = plan_job(config, stage=2, dtype="bf16", offload_optimizer=True, **FIGURES)
    assert "ZeRO-2 in bf16 on 64 ranks, optimizer offloaded" in done.stdout
    assert job.table() in done.stdout
    over = call("plan", *JOB, "--config", path, "--stage", "3", "-s", "num_matvecs=9", "--cpu")
    assert "ZeRO-3 in bf16 on 64 ranks of the CPU" in over.stdout
    assert "basis, 9 vectors" in over.stdout and "accelerator" not in over.stdout


def test_an_analysis_has_its_own_arguments() -> None:
    arguments = {"k": 3, "basis_size": 30}
    given = ["-s", "k=3", "-s", "basis_size=30", "-s", "max_matvecs=90", "-s", "dtype=bf16"]
    passes = ["--seconds-per-micro-batch", "1"]
    done = call("plan", *JOB, "--analysis", "eigenpairs", *given, *passes)
    config = HessianConfig().with_overrides(dtype="bf16")
    assert plan_job(config, "eigenpairs", arguments, **FIGURES).table() in done.stdout
    assert "measurement, 93 products" in done.stdout


def test_what_does_not_fit_ends_with_1_and_names_what_would() -> None:
    narrow = HessianConfig().with_overrides(precision="model")
    needed = plan_job(narrow, **FIGURES).peak("accelerator")
    done = call("plan", *JOB, "--free", "accelerator=8", "--free", "host=50")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last == (
        f"does not fit: {shown(needed)} on the accelerator, where 8 GiB are free; "
        'basis.device = "host" would'
    )
    assert call("plan", *JOB, "--free", f"accelerator={needed / 2**30 + 0.01}").returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "7x", "-r", "2"], "'7x' is not a number of at least 1, such as 7e9 or 7B"),
        ([*JOB, "--analysis", "solve"], "missing 1 required keyword-only argument: 'dampings'"),
        ([*JOB, "--analysis", "density"], "there is a plan of spectrum, eigenpairs"),
        ([*JOB, "-s", "num_matvec=3"], "num_matvec: unknown override; did you mean"),
        ([*JOB, "-s", "num_matvecs"], "--set takes name=value, got 'num_matvecs'"),
        ([*JOB, "-s", "num_matvecs=0"], "num_matvecs: must be an integer, at least 1"),
        ([*JOB, "--tokens", "4096"], "--tokens and --tflops estimate the time together: give both"),
        ([*JOB, "--price", "2"], "a price needs the time"),
        (
            [*JOB, "--free", "gpu=3"],
            "'gpu=3' is not one of accelerator, host, disk, resume and a number",
        ),
        ([*JOB, "--config", "none.json"], "no such file"),
        (
            [*JOB, "--analysis", "block_coupling", "--seconds-per-micro-batch", "1"],
            "depends on the model: give --products",
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_broken_input_is_one_line_and_2(options: list[str], words: str) -> None:
    done = call("plan", *options)
    assert done.returncode == 2 and not done.stdout
    assert words in done.stderr and done.stderr.count("\n") == 1
