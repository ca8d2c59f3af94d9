"""Jobs to plan: from a DeepSpeed configuration, from Megatron's arguments, and from options."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from ds_hessian.config import read_deepspeed, text_in, value_of
from ds_hessian.config.messages import shown
from ds_hessian.errors import ConfigError
from ds_hessian.planning import Job, Mesh, Shape
from ds_hessian.planning.job import Recompute

LLAMA: Mapping[str, Any] = {"gated": True, "rms": True, "bias": False, "tied": False}
"""What differs from a GPT as megatron-core builds it by default."""

DEEPSPEED = {"stage", "offload_optimizer", "offload_parameters", "secondary"}
"""Fields of `Job` that only jobs of DeepSpeed have."""

PAD = 128
"""Megatron-LM pads the vocabulary to a multiple of this and the tensor-parallel size
(`make_vocab_size_divisible_by`)."""

UNKNOWN = (
    *("multi_latent_attention", "mtp_num_layers", "pipeline_model_parallel_layout"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    *("hybrid_override_pattern", "experimental_attention_variant", "attention_output_gate"),
    *("moe_latent_size", "moe_shared_expert_gate"),
    *("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"),
)
"""Arguments of Megatron whose parameters or stages are others than `Shape` and `Mesh` know."""


def job_of(
    options: Mapping[str, Any],
    *,
    ranks: int,
    parameters: int | None = None,
    config: Path | None = None,
    arguments: Path | None = None,
) -> Job:
    """Return the job of a DeepSpeed configuration or of Megatron's arguments; what options say
    replaces what the file says.

    Args:
        options: Fields of `Job`, `Mesh` and `Shape` by their names, and `style`; None where an
            option says nothing.
        ranks: Number of ranks.
        parameters: Parameters of the model, where its sizes are not given.
        config: A DeepSpeed configuration.
        arguments: A file of Megatron's arguments.

    Raises:
        ConfigError: a file cannot be read, has what is not planned, the model or the host is given
            twice or not at all, or the sizes do not fit each other.
    """
    said = {name: value for name, value in options.items() if value is not None}

    def fields_of(kind: type[Any]) -> dict[str, Any]:
        names = {field.name for field in fields(kind)}
        return {name: value for name, value in said.items() if name in names}

    mesh, of_job, found = fields_of(Mesh), fields_of(Job), dict[str, Any]()
    shape = {**(LLAMA if said.get("style") == "llama" else {}), **fields_of(Shape)}
    megatron = arguments is not None or bool(mesh)
    if megatron and (config is not None or not DEEPSPEED.isdisjoint(of_job)):
        raise ConfigError(
            "--config, --stage, --hpz and --offload-* are of DeepSpeed, --megatron and the sizes "
            "of axes of Megatron: give those of one of them"
        )
    if arguments is not None:
        of_file = read_megatron(arguments)
        mesh, shape = {**of_file.mesh, **mesh}, {**of_file.shape, **shape}
        found = of_file.others
    elif config is not None:
        found = _of_deepspeed(config)
    model = _shape(shape) if shape else None
    if parameters is not None and model is not None:
        raise ConfigError("--parameters and the sizes of the model are the same twice: give one")
    number = parameters if model is None else model.parameters
    if number is None:
        raise ConfigError("give the model: --parameters, or its --layers, --hidden and so on")
    return Job(
        num_parameters=number,
        world_size=ranks,
        mesh=Mesh(**mesh) if megatron else None,
        shape=model,
        **{**found, **of_job},
    )


def _shape(given: Mapping[str, Any]) -> Shape:
    needed = ("layers", "hidden", "heads", "vocabulary", "sequence")
    missing = [f"--{name}" for name in needed if name not in given]
    if missing:
        raise ConfigError(f"the sizes of the model lack {', '.join(missing)}")
    return Shape(**given)


def _of_deepspeed(config: Path) -> dict[str, Any]:
    settings = read_deepspeed(config)
    sections = {}
    for name in ("zero_optimization", "bf16", "fp16"):
        section = settings.get(name)
        if not (section is None or isinstance(section, Mapping)):
            raise ConfigError(f"{config}: {name} must be an object, got {shown(section)}")
        sections[name] = section or {}
    zero = sections["zero_optimization"]
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{config}: zero_optimization.stage must be 0, 1, 2 or 3: {shown(stage)}")
    _require_counts(config, zero, ["zero_hpz_partition_size"], 1)
    dtypes = [d for d in ("bf16", "fp16") if sections[d].get("enabled") is True]
    return {
        "stage": stage,
        "dtype": dtypes[0] if dtypes else "fp32",
        "offload_optimizer": _offloads(zero.get("offload_optimizer")),
        "offload_parameters": _offloads(zero.get("offload_param")),
        "secondary": zero.get("zero_hpz_partition_size", 1) if stage == 3 else 1,
    }


def _require_counts(file: Path, found: Mapping[str, Any], names: Iterable[str], least: int) -> None:
    """Raise if one of these entries, where a file has it, is no count."""
    for name in names:
        value = found.get(name)
        if value is not None and not (type(value) is int and least <= value <= MOST):
            raise ConfigError(
                f"{file}: {name} must be an integer of at least {least}, got {shown(value)}"
            )


def _offloads(section: object) -> bool:
    return isinstance(section, Mapping) and section.get("device", "none") != "none"


# ---- Megatron's arguments


@dataclass(frozen=True)
class Arguments:
    """What Megatron's arguments say: fields of `Mesh`, `Shape` and `Job`."""

    mesh: dict[str, Any]
    shape: dict[str, Any]
    others: dict[str, Any]


def read_megatron(path: Path) -> Arguments:
    """Return what a file of Megatron's arguments says: JSON, or as on a command line.

    Raises:
        ConfigError: it cannot be read, or has what is not planned.
    """
    try:
        text = text_in(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else _of_command_line(text)
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply for arguments") from None
    except ValueError as error:
        raise ConfigError(f"{path}: neither JSON nor arguments: {error}") from None
    _require_counts(path, found, (*(set(MESH) - FLAGS), *DIVISORS), 1)
    _require_counts(path, found, (*(set(SHAPE) - FLAGS), *COUNTS), 0)
    recompute = found.get("recompute_granularity") or "none"
    if recompute not in get_args(Recompute):
        raise ConfigError(f"{path}: recompute_granularity cannot be {shown(recompute)}")
    unknown = [name for name in UNKNOWN if found.get(name)]
    if unknown:
        raise ConfigError(f"{path}: a plan does not know {', '.join(unknown)}")
    mesh = _named(found, MESH)
    per_stage = found.get("num_layers_per_virtual_pipeline_stage")
    if per_stage and not found.get("num_layers"):
        raise ConfigError(f"{path}: num_layers_per_virtual_pipeline_stage needs num_layers")
    if per_stage:
        mesh["virtual"] = found["num_layers"] // (mesh.get("pipeline", 1) * per_stage)
    mesh["distributed_optimizer"] = bool(found.get("use_distributed_optimizer"))
    others: dict[str, Any] = {"dtype": "bf16" if found.get("bf16") else "fp32"}
    if found.get("fp16"):
        others["dtype"] = "fp16"
    others["recompute"] = recompute
    return Arguments(mesh, _shape_of(found, mesh.get("tensor", 1)), others)


MESH = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual",
    "num_virtual_stages_per_pipeline_rank": "virtual",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
    "num_distributed_optimizer_instances": "instances",
    "sequence_parallel": "sequence_parallel",
}
SHAPE = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "groups",
    "kv_channels": "head_width",
    "ffn_hidden_size": "ffn",
    "seq_length": "sequence",
    "add_qkv_bias": "qkv_bias",
    "qk_layernorm": "head_norms",
    "num_experts": "experts",
    "num_moe_experts": "experts",
    "moe_router_topk": "active",
    "moe_ffn_hidden_size": "expert_ffn",
    "moe_shared_expert_intermediate_size": "shared_ffn",
}

FLAGS = {"sequence_parallel", "add_qkv_bias", "qk_layernorm"}
DIVISORS = ("num_layers_per_virtual_pipeline_stage", "make_vocab_size_divisible_by")
COUNTS = ("padded_vocab_size", "vocab_size", "max_position_embeddings")
"""Arguments that are no count, and further ones that are."""
MOST = 2**63 - 1


def _named(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: found[name] for name, ours in names.items() if found.get(name) is not None}


def _shape_of(found: Mapping[str, Any], tensor: int) -> dict[str, Any]:
    shape = _named(found, SHAPE)
    if not shape:
        return {}
    if found.get("group_query_attention") is False:
        shape.pop("groups", None)
    gated = bool(found.get("swiglu") or found.get("gated_linear_unit"))
    if gated and "ffn" not in shape and "hidden" not in shape:
        raise ConfigError("the width of a gated MLP needs ffn_hidden_size or hidden_size")
    if gated and "ffn" not in shape:  # as Megatron-LM's arguments.py: a GPT's operations, rounded
        shape["ffn"] = int(4 * shape["hidden"] * 2 / 3 / 64) * 64
    rows = found.get("padded_vocab_size")
    if rows is None and found.get("vocab_size") is not None:
        multiple = found.get("make_vocab_size_divisible_by", PAD) * tensor
        rows = -(-found["vocab_size"] // multiple) * multiple
    if rows is not None:
        shape["vocabulary"] = rows
    learned = found.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    shape["positions"] = found.get("max_position_embeddings", 0) if learned else 0
    every = found.get("moe_layer_freq", 1)
    if isinstance(every, list):
        shape["dense_layers"] = every.index(1) if 1 in every else len(every)
        if 0 in every[shape["dense_layers"] :]:
            raise ConfigError("a plan does not know moe_layer_freq but for first layers without")
    elif every != 1:
        raise ConfigError("a plan does not know moe_layer_freq but for first layers without")
    return {
        **shape,
        "gated": gated,
        "bias": not found.get("disable_bias_linear") and found.get("add_bias_linear", True),
        "tied": not found.get("untie_embeddings_and_output_weights"),
        "rms": found.get("normalization") == "RMSNorm",
    }


def _of_command_line(text: str) -> dict[str, Any]:
    """Return arguments by the names that Megatron gives them; those without a value are true."""
    words, found = shlex.split(text.replace("\\\n", " "), comments=True), dict[str, Any]()
    if not words or not words[0].startswith("--"):
        raise ValueError("it does not begin with an option")
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[i + 1] if i + 1 < len(words) else "--"
            if not equals and following.startswith("--"):
                found[name.replace("-", "_")] = True
            else:
                found[name.replace("-", "_")] = value_of(value if equals else following)
    return found
