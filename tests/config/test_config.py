"""The "hessian" section: defaults, refusals with their reason, overrides, documentation."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hessian.config import HessianConfig, describe
from ds_hessian.errors import ConfigError


def leaves(model, prefix=""):
    for name, field in model.model_fields.items():
        nested = getattr(field.annotation, "model_fields", None)
        if nested is None:
            yield prefix + name, field
        else:
            yield from leaves(field.annotation, f"{prefix}{name}.")


def test_an_empty_section_is_enabled_with_the_documented_defaults():
    config = HessianConfig.parse({})
    assert config == HessianConfig()
    assert config.enabled and not config.dropout
    assert (config.interval, config.start_step, config.seed) == (0, 0, 0)
    assert (config.num_matvecs, config.num_probes, config.num_micro_batches) == (30, 1, 8)
    assert config.finite_difference.displacement == "auto"
    assert config.output_path == "hessian_out"


def test_every_field_has_a_description_and_a_row_in_the_table():
    rows = describe().splitlines()[2:]
    fields = dict(leaves(HessianConfig))
    assert len(rows) == len(fields)
    for row, (path, field) in zip(rows, fields.items(), strict=True):
        key, value, default, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert key == f"`{path}`"
        assert json.loads(default.strip("`")) == json.loads(json.dumps(field.default))
        assert field.description and meaning == field.description
        assert value


def test_leaf_names_are_unique_so_that_overrides_can_use_them():
    names = [path.split(".")[-1] for path, _ in leaves(HessianConfig)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"finite_difference": {"displacment": 1e-3}},
            r'hessian\.finite_difference\.displacment: unknown key; did you mean "displacement"\?',
        ),
        ({"num_matvec": 3}, r'hessian\.num_matvec: unknown key; did you mean "num_matvecs"\?'),
        ({"displacement": 1}, r'did you mean "hessian\.finite_difference\.displacement"\?'),
        ({"displacment": 1}, r'did you mean "hessian\.finite_difference\.displacement"\?'),
        ({"zzz": 1}, r"hessian\.zzz: unknown key; known are enabled, interval"),
        ({"num_matvecs": "30"}, r'an integer, at least 1, got "30": remove the quotes'),
        ({"num_matvecs": True}, r"hessian\.num_matvecs: must be an integer.*got true"),
        ({"num_matvecs": 3.0}, r"must be an integer, at least 1, got 3\.0: the default is 30"),
        ({"num_matvecs": 0}, r"at least 1, got 0"),
        ({"num_probes": None}, r"hessian\.num_probes: .*got null: the default is 1"),
        ({"seed": -1}, r"hessian\.seed: must be an integer, at least 0, got -1"),
        ({"interval": -5}, r"hessian\.interval: .*got -5"),
        ({"plot": 1}, r"hessian\.plot: must be true or false, got 1"),
        ({"enabled": "true"}, r'hessian\.enabled: must be true or false, got "true": remove the q'),
        ({"output_path": ""}, r"hessian\.output_path: must be a path that is not empty"),
        ({"num_matvecs": "auto"}, r'got "auto": Hugging Face\'s "auto" is not resolved'),
        ({"basis": {"dtype": "auto"}}, r'Hugging Face\'s "auto" is not resolved'),
        ({"probe": "rademacer"}, r'must be "gaussian" or "rademacher", .*mean "rademacher"\?'),
        (
            {"finite_difference": {"scheme": "backward"}},
            r'scheme: must be "central" or "forward" or "fourth_order" or "auto", got "backward"',
        ),
        ({"basis": {"dtype": "fp16"}}, r'must be "fp32" or "bf16", got "fp16"'),
        ({"basis": {"device": "nvme"}}, r'this version supports "accelerator", "host", "disk" on'),
        ({"basis": {"folder": "x"}}, r'basis\.folder: has no effect while .* is "accelerator"'),
        ({"reorthogonalization": {"mode": "nine"}}, r'mode: must be "full" or .*mean "none"\?'),
        ({"reorthogonalization": {"window": 1}}, r"window: must be an integer, at least 2, got 1"),
        ({"resume": ""}, r"resume: must be a path that is not empty, or null"),
        ({"finite_difference": 5}, r"an object with keys of scheme, tolerance, displacement"),
        ({"finite_difference": {"tolerance": 1}}, r"tolerance: must be a number between 0 and 1"),
        (
            {"finite_difference": {"tolerance": 0.01, "scheme": "central"}},
            r'tolerance: 0\.01 contradicts .*scheme = "central": set "auto", or remove one',
        ),
        ({"finite_difference": {"scheme": "auto"}}, r'scheme: "auto" needs .*tolerance: set it'),
        (
            {"finite_difference": {"tolerance": 0.01, "displacement": 1e-3}},
            r"tolerance: 0\.01 contradicts .*displacement = 0\.001: a tolerance chooses",
        ),
        ({"interval": 5, "enabled": False}, r"interval: 5 contradicts hessian\.enabled = false"),
        ({"start_step": 4}, r"start_step: 4 has no effect while hessian\.interval and"),
        (
            {"sharpness_interval": 5, "enabled": False},
            r"sharpness_interval: 5 contradicts hessian\.enabled = false",
        ),
        (
            {"sampling": True, "reorthogonalization": {"mode": "none"}},
            r'sampling: needs Ritz vectors, for which hessian\..*mode = "none" stores too little',
        ),
        ({"resume": "x", "enabled": False}, r"resume: has no effect while hessian\.enabled is fa"),
        (
            {"reorthogonalization": {"mode": "none", "window": 20}},
            r'window: 20 has no effect in mode "none": set "window" or "selective"',
        ),
        ({"seed": [10**5000]}, r"hessian\.seed: .*, got a value of type list"),
        (5, r"^hessian: must be an object of settings, got 5"),
    ],
)
def test_a_wrong_section_is_refused_with_path_reason_and_way_out(section, message):
    with pytest.raises(ConfigError, match=message) as caught:
        HessianConfig.parse(section)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("interval", ["interval", "sharpness_interval"])
def test_either_interval_gives_a_start_step_its_effect(interval):
    assert HessianConfig.parse({"start_step": 4, interval: 2}).scheduled


@pytest.mark.parametrize(
    "value", [0, -1e-3, 1e-40, float("nan"), float("inf"), True, "big", 10**400]
)
def test_an_impossible_displacement_is_refused(value):
    with pytest.raises(ConfigError, match=r'displacement: must be "auto" or a finite number'):
        HessianConfig.parse({"finite_difference": {"displacement": value}})


@given(st.floats(min_value=1e-12, max_value=1e6) | st.integers(1, 1000))
@settings(deadline=None)
def test_any_positive_number_is_a_displacement(value):
    config = HessianConfig.parse({"finite_difference": {"displacement": value}})
    assert config.finite_difference.displacement == float(value)


def test_all_problems_are_reported_at_once_one_line_each():
    with pytest.raises(ConfigError) as caught:
        HessianConfig(seed="x", plot=0, basis={"dtyp": 1}, num_matvecs=0)
    starts = {line.split(":")[0] for line in str(caught.value).splitlines()}
    assert starts == {"hessian.seed", "hessian.plot", "hessian.basis.dtyp", "hessian.num_matvecs"}


@given(
    st.dictionaries(
        st.sampled_from([*HessianConfig.model_fields, "unknown"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.sampled_from(["", "auto", "3", "x"]),
        max_size=4,
    )
)
@settings(deadline=None)
def test_whatever_is_given_the_answer_is_a_config_or_a_config_error(section):
    try:
        config = HessianConfig.parse(section)
    except ConfigError as error:
        assert all(line.startswith("hessian.") for line in str(error).splitlines())
    else:
        assert HessianConfig.parse(config.model_dump()) == config


def test_a_deepspeed_config_without_the_section_gives_none(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 2}')
    for config in (None, {}, {"train_batch_size": 2, "zero_optimization": {}}, path, str(path)):
        assert HessianConfig.from_deepspeed(config) is None


def test_the_section_is_read_from_everything_that_deepspeed_reads(tmp_path: Path):
    content = {"train_batch_size": 2, "hessian": {"num_matvecs": 7}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    commented = tmp_path / "ds.hjson"
    commented.write_text("{\n  # HJSON, as DeepSpeed accepts it\n  hessian: {num_matvecs: 7}\n}")
    encoded = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    for config in (content, path, str(path), commented, encoded):
        found = HessianConfig.from_deepspeed(config)
        assert found is not None and found.num_matvecs == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hessian": {"seed": 1, "seed": 2}}', r'repeats "seed" within one object'),
        ('{"hessian": {}, "hessian": {"seed": 2}}', r'repeats "hessian"'),
        ('{"hessian": ', r"ds\.json is not JSON"),
        ("[1, 2]", r"must hold a JSON object"),
        ('{"hesian": {}}', r'hesian: unknown key of the DeepSpeed.*mean "hessian"\?'),
        ('{"hessian": null}', r"hessian: must be an object of settings, got null"),
        ('{"hess": {}}', r'hess: unknown key of the DeepSpeed.*mean "hessian"\?'),
        ('{"ds_hessian": {}}', r"ds_hessian: unknown key"),
        ('{"Hessian_Config": {}}', r"Hessian_Config: unknown key"),
        ('{"hessian": {"seed": ' + "9" * 5000 + "}}", r"ds\.json is not JSON: .*digits"),
        ("[" * 100_000, r"ds\.json is nested too deeply"),
        ('{"hessian": ' + '{"basis":' * 200 + "1" + "}" * 201, r"basis: unknown key"),
        ('{"hessian": {}}'.encode("utf-16"), r"ds\.json is not UTF-8 text .*: save it as UTF-8"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | bytes, message: str):
    path = tmp_path / "ds.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        HessianConfig.from_deepspeed(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file, and not base64"):
        HessianConfig.from_deepspeed(tmp_path / "missing.json")


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        HessianConfig().seed = 3


def test_overrides_change_top_level_keys_leaves_and_parts_of_subsections():
    base = HessianConfig.parse({"finite_difference": {"displacement": 0.5}})
    changed = base.with_overrides(num_matvecs=5, output_path=Path("there"), mode="full")
    assert (changed.num_matvecs, changed.output_path) == (5, "there")
    assert changed.finite_difference == base.finite_difference
    assert base.with_overrides(displacement=1e-3).finite_difference.displacement == 1e-3
    partly = base.with_overrides(finite_difference={"scheme": "central"})
    assert partly == base == base.with_overrides()


class Mute:
    """As arrays, and missing values of pandas, it is no truth value whether it equals another."""

    def __eq__(self, other):
        raise TypeError("ambiguous")

    def __repr__(self):
        raise TypeError("no words")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_matvec": 3}, r'^num_matvec: unknown override; did you mean "num_matvecs"\?'),
        ({"displacment": 3}, r'^displacment: unknown override; did you mean "displacement"\?'),
        ({"displacement": "big"}, r"^hessian\.finite_difference\.displacement: must be"),
        ({"displacement": np.ones(2)}, r"^hessian\.finite_difference\.displacement: .* \[1\.0, 1"),
        ({"seed": Mute()}, "seed: must be .*, got a value of type Mute: the defau"),
        (
            {"displacement": 1.0, "finite_difference": {"displacement": 2.0}},
            r"displacement: overridden twice",
        ),
        ({"finite_difference": {"h": 1}}, r"^hessian\.finite_difference\.h: unknown key"),
        ({"basis": None}, r"^hessian\.basis: must be an object"),
        ({"basis": 3, "dtype": "bf16"}, r"^hessian\.basis: must be an object, got 3"),
        ({"mode": "full", "window": 20}, r'window: 20 has no effect in mode "full"'),
    ],
)
def test_a_wrong_override_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        HessianConfig().with_overrides(**overrides)


def test_an_override_drops_what_has_no_effect_with_it():
    """Else a call could not leave a mode or a device whose settings the section has."""
    window = HessianConfig.parse({"reorthogonalization": {"mode": "window", "window": 20}})
    assert window.with_overrides(mode="full").reorthogonalization.window == 10
    assert window.with_overrides(mode="selective").reorthogonalization.window == 20
    disk = HessianConfig.parse({"basis": {"device": "disk", "folder": "x"}})
    assert disk.with_overrides(device="host").basis.folder is None
    assert disk.with_overrides(dtype="bf16").basis.folder == "x"


def test_tolerance_scheme_and_displacement_follow_the_one_that_is_given():
    plain, loose = HessianConfig(), HessianConfig().with_overrides(tolerance=1e-2)
    assert (loose.finite_difference.scheme, loose.finite_difference.formula) == ("auto", "central")
    assert loose == HessianConfig.parse({"finite_difference": {"tolerance": 1e-2}})
    assert loose.with_overrides(tolerance=None) == plain == loose.with_overrides(scheme="central")
    fixed = plain.with_overrides(displacement=1e-3)
    assert loose.with_overrides(displacement=1e-3) == fixed
    assert fixed.with_overrides(tolerance=1e-2) == loose
    found = loose.with_overrides(operator="ggn").finite_difference
    assert (found.scheme, found.tolerance) == ("central", None)
    message = r'tolerance: 0.001 \(scheme "auto"\) has no meaning for hessian.operator = "ggn"'
    with pytest.raises(ConfigError, match=message):  # it named the scheme alone
        loose.with_overrides(operator="ggn", tolerance=1e-3)


def test_importing_the_config_loads_neither_torch_nor_deepspeed():
    code = (
        "import sys, ds_hessian.config; assert not {'torch', 'deepspeed'} & set(sys.modules), "
        "'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
