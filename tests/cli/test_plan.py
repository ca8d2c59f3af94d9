"""`ds-hessian plan`: its figures are those of the library, and it says what would fit."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ds_hessian.analyses import plan_job
from ds_hessian.cli.jobs import job_of
from ds_hessian.config import HessianConfig
from ds_hessian.memory import shown
from ds_hessian.planning import ACCELERATOR, Job, Mesh, Shape, activations
from ds_hessian.planning import times as timing
from tests.cli.test_cli import ROOT, call

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


def test_the_documentation_shows_what_is_printed() -> None:
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    found = re.findall(r"^\$ ds-hessian ((?:.*\\\n)*.*)\n((?:.+\n)+?)```$", text, re.MULTILINE)
    assert len(found) == 2
    for command, shown_there in found:
        done = call(*shlex.split(command.replace("\\\n", " ")))
        assert done.stdout == shown_there


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


SIZES = "--layers 8 --hidden 64 --heads 8 --groups 4 --vocabulary 1024 --sequence 128".split()
AXES = "--tensor 2 --pipeline 2 --virtual 2 --sequence-parallel".split()
MESH = Mesh(tensor=2, pipeline=2, virtual=2, sequence_parallel=True)
SHAPE = Shape(layers=8, hidden=64, heads=8, vocabulary=1024, sequence=128, groups=4)
FOUND = {"num_parameters": SHAPE.parameters, "world_size": 16, "mesh": MESH, "shape": SHAPE}


def test_a_megatron_job_is_planned_from_its_axes_and_the_sizes_of_its_model() -> None:
    rates = "--tokens 256 --tflops 0.001 --network 1 --node-network 2 --latency 20".split()
    done = call("plan", *SIZES, *AXES, "--ranks", "16", "--recompute", "full", *rates)
    assert done.returncode == 0, done.stderr
    config = HessianConfig()
    assert (
        f"{SHAPE.parameters:,} parameters, Megatron (TP 2, PP 2, VPP 2, distributed" in done.stdout
    )
    assert plan_job(config, **FOUND).table() in done.stdout
    job = Job(**FOUND, recompute="full")
    machine = replace(ACCELERATOR, latency=20e-6, network=1e9, node_network=2e9)
    each = timing.micro_batch(job, 256, 1e9, machine)
    run = timing.run_of(job, machine)
    time = timing.plan_time(run.over(8, each.seconds), job.share, machine, config, 30, run)
    assert time.table() in done.stdout and "of communication" in done.stdout


def test_passes_in_fp32_need_the_room_of_more_activations() -> None:
    """Which is that of training's passes, once more."""
    held = activations(Job(**FOUND), 4096, 8)
    needed = plan_job(HessianConfig().with_overrides(precision="fp32"), **FOUND).peak("accelerator")
    rates = ["--tokens", "4096", "--tflops", "1", "--free"]
    for free, words in (
        (needed + 0.9 * held, "passes as training runs them"),
        (needed + 1.1 * held, "passes in fp32"),
    ):
        options = [*SIZES, *AXES, "--ranks", "16", *rates, f"accelerator={free / 2**30}"]
        done = call("plan", *options)
        assert done.returncode == 0 and words in done.stdout
        assert f"activations of training's passes: {shown(held)}" in done.stdout
    done = call("plan", *options[:-1], "accelerator=0.0001", "-s", "precision=fp32")
    assert done.returncode == 1
    assert f"on the accelerator, {shown(held)} more for activations, where" in done.stdout


LINE = """
--num-layers 8 --hidden-size 64 --num-attention-heads 8 --group-query-attention \\
--num-query-groups 4 --vocab-size 900 --seq-length 128 --position-embedding-type rope
--tensor-model-parallel-size=2 --pipeline-model-parallel-size 2 --sequence-parallel --bf16
--num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer # as options say it
"""
VALUES = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "padded_vocab_size": 1024,
    "seq_length": 128,
    "position_embedding_type": "rope",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "bf16": True,
}


@pytest.mark.parametrize("text", [LINE, json.dumps(VALUES)], ids=["line", "json"])
def test_arguments_of_megatron_say_the_same_as_options(tmp_path: Path, text: str) -> None:
    path = tmp_path / "arguments"
    path.write_text(text)
    assert job_of({}, ranks=16, arguments=path) == Job(**FOUND)
    said = call("plan", "--megatron", path, "--ranks", "16").stdout
    assert said == call("plan", *SIZES, *AXES, "--ranks", "16").stdout


def test_experts_and_what_megatron_adds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "arguments"
    more = {
        "num_experts": 16,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 32,
        "moe_layer_freq": [0] + [1] * 7,
        "moe_shared_expert_intermediate_size": 32,
        "swiglu": True,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "recompute_granularity": "selective",
    }
    path.write_text(json.dumps(VALUES | more))
    found = job_of({}, ranks=16, arguments=path)
    experts = {"experts": 16, "active": 4, "expert_ffn": 32, "shared_ffn": 32, "dense_layers": 1}
    kind = {"gated": True, "rms": True, "bias": False, "tied": False, "ffn": 128}
    assert found.shape == replace(SHAPE, **experts, **kind)
    assert found.mesh == replace(MESH, expert=4, expert_tensor=1)
    assert found.recompute == "selective"


def test_instances_of_the_optimizer_share_out_parameters_each(tmp_path: Path) -> None:
    path, more = tmp_path / "arguments", {"num_distributed_optimizer_instances": 2}
    path.write_text(json.dumps(VALUES | more))
    found = job_of({}, ranks=16, arguments=path)
    assert found == Job(**FOUND | {"mesh": replace(MESH, instances=2)})
    half = Job(**FOUND | {"world_size": 8})
    assert found.share.n_local == half.share.n_local > Job(**FOUND).share.n_local


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "7x", "-r", "2"], "'7x' is not a number of at least 1, such as 7e9 or 7B"),
        ([*JOB, "--analysis", "solve"], "solve needs dampings, which must be given"),
        ([*JOB, "--analysis", "density"], "no analysis 'density'; there are spectrum, eigen"),
        ([*JOB, "-s", "num_matvec=3"], "num_matvec: unknown override; did you mean"),
        ([*JOB, "-s", "num_matvecs"], "--set takes name=value, got 'num_matvecs'"),
        ([*JOB, "-s", "num_matvecs=0"], "num_matvecs: must be an integer, at least 1"),
        ([*JOB, "--tokens", "4096"], "--tokens and --tflops estimate the time together: give both"),
        ([*JOB, "--price", "2"], "a price needs the time"),
        (["-r", "4"], "give the model: --parameters, or its --layers, --hidden and so on"),
        ([*JOB, *SIZES], "--parameters and the sizes of the model are the same twice"),
        (["-r", "4", "--layers", "4"], "lack --hidden, --heads, --vocabulary, --sequence"),
        ([*JOB, "--stage", "2", "--tensor", "2"], "are of DeepSpeed, --megatron and the sizes"),
        ([*JOB, "--tensor", "3"], "64 ranks are not a multiple of tensor 3 x pipeline 1 x"),
        ([*SIZES, "-r", "48", "--pipeline", "3"], "3 stages do not divide 8 layers"),
        ([*JOB, "--megatron", "none.json"], "none.json: cannot be read"),
        ([*JOB, "--megatron", "README.md"], "README.md: neither JSON nor arguments"),
        (
            [*JOB, "--pipeline", "4", "--virtual", "2", "-s", "num_micro_batches=6"]
            + ["--seconds-per-micro-batch", "1"],
            "runs groups of 4 micro-batches, got 6: set num_micro_batches to a multiple",
        ),
        (
            [*JOB, "--free", "gpu=3"],
            "'gpu=3' is not one of accelerator, host, disk, resume and a number",
        ),
        ([*JOB, "--free", "host=1e308"], "'host=1e308' is not one of"),
        ([*JOB, "--seconds-per-micro-batch", "nan"], "'nan' is not a number"),
        ([*JOB, "--network", "inf"], "inf is not in the range"),
        ([*JOB, "-s", "num_matvecs=" + "9" * 5000], "num_matvecs: must be an integer"),
        ([*JOB, "-s", "num_matvecs=" + "[" * 10**5], "num_matvecs: must be an integer"),
        ([*JOB, "--config", "none.json"], "no such file"),
        (
            [*JOB, "--analysis", "block_coupling", "--seconds-per-micro-batch", "1"],
            "depends on the model: give --products",
        ),
    ],
    ids=lambda value: " ".join(value[-2:])[:60] if isinstance(value, list) else "",
)
def test_broken_input_is_one_line_and_2(options: list[str], words: str) -> None:
    done = call("plan", *options)
    assert done.returncode == 2 and not done.stdout
    assert words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--config", {"zero_optimization": [1]}, "zero_optimization must be an object, got [1]"),
        ("--config", {"bf16": 1}, "bf16 must be an object, got 1"),
        *(
            (
                "--config",
                {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}},
                "zero_hpz_partition_size must be an integer of at least 1, got",
            )
            for size in (0, -4, "a", 1.5, True)
        ),
        ("--megatron", {"num_layers": "many"}, "num_layers must be an integer of at least 0"),
        ("--megatron", {"tensor_model_parallel_size": 0}, "must be an integer of at least 1"),
        ("--megatron", {"recompute_granularity": [1]}, "recompute_granularity cannot be [1]"),
        ("--megatron", {"num_layers_per_virtual_pipeline_stage": 2}, "needs num_layers"),
        ("--megatron", {"num_layers": 2, "swiglu": True}, "needs ffn_hidden_size or hidden_size"),
        ("--megatron", {"use_megatron_fsdp": True}, "a plan does not know use_megatron_fsdp"),
        ("--megatron", {"num_distributed_optimizer_instances": 3}, "3 instances of the optimizer"),
    ],
)
def test_files_with_values_of_other_types_are_one_line_and_2(
    tmp_path: Path, option: str, content: object, words: str
) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(content))
    test_broken_input_is_one_line_and_2([*JOB, option, path], words)


def test_deeply_nested_arguments_of_megatron_are_one_line_and_2(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text('{"a":' * 10**5)
    test_broken_input_is_one_line_and_2([*JOB, "--megatron", path], "it is nested too deeply")


@pytest.mark.parametrize("option", ["--config", "--megatron"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("pipe", "a pipe to which nothing is written"), ("endless", "more than 16777216 bytes")],
)
def test_files_that_do_not_end_are_one_line_and_2(
    tmp_path: Path, option: str, kind: str, words: str
) -> None:
    path = tmp_path / "given.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    test_broken_input_is_one_line_and_2([*JOB, option, path], words)
