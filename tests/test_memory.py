"""Memory plans in plain figures: their sums, what is refused, and which way out is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hessian.analyses import Analysis, Spectrum, analysis_of, plan_job
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import FP32, TIERS, Item, MemoryPlan, Tier, in_stage
from ds_hessian.planning import Job, Needs, alternatives, needs_of, plan, refuse_too_large

N, RANKS = 7_000_000_000, 64
VECTOR = 4 * N / RANKS


def config(**settings: object) -> HessianConfig:
    return HessianConfig().with_overrides(**{"precision": "model", **settings})


def named(title: str, arguments: dict[str, object]) -> Analysis[object]:
    """The analysis of this name."""
    return analysis_of(title, arguments)[0]


def test_items_of_different_moments_share_memory() -> None:
    plan = MemoryPlan.of(
        [Item("always", "host", 100)],
        [Item("a", "host", 30, ("passes", "trials")), Item("b", "host", 5, ("trials",))],
        [Item("c", "host", 20, ("storing",)), Item("d", "disk", 7), Item("nothing", "disk", 0)],
    )
    assert (plan.peak("host"), plan.peak("disk"), plan.peak("accelerator")) == (135, 7, 0)
    assert "nothing" not in plan.table()
    assert len(plan.table().splitlines()) == 1 + 5 + 2


@pytest.mark.parametrize(
    ("settings", "accelerator", "host", "disk"),
    [
        # Two gradients of a product, two at the weights, training's in bf16, two trials: 6.5.
        ({}, 30 + 6.5, 0, 0),
        ({"scheme": "forward"}, 30 + 6.5, 0, 0),
        ({"tolerance": 1e-2}, 30 + 6.5, 0, 0),
        ({"tolerance": 1e-4}, 30 + 9.5, 0, 0),
        ({"scheme": "fourth_order"}, 30 + 9.5, 0, 0),
        ({"mode": "window", "window": 5}, 5 + 6.5, 0, 0),
        ({"mode": "none"}, 2 + 6.5, 0, 0),
        # In passes over single micro-batches two Ritz vectors, and one gradient.
        ({"sampling": True}, 30 + 4.5 + 2 + 1, 0, 0),
        # The vector that is multiplied is no row of the basis any more.
        ({"dtype": "bf16"}, 15 + 7.5, 0, 0),
        # Pinned: two blocks of 256 MiB, and a row, of 417 MiB in fp32, as powers of two.
        ({"device": "disk"}, 7.5, 2**30 / VECTOR, 30),
        ({"device": "disk", "dtype": "bf16"}, 7.5, 3 * 2**28 / VECTOR, 15),
        # Two Ritz vectors being formed from two blocks, on the accelerator.
        (
            {"mode": "selective", "device": "disk", "window": 8},
            10 + 4.5 + 1 + 2 + 2 * 2**28 / VECTOR,
            2**30 / VECTOR,
            30,
        ),
    ],
    ids=str,
)
def test_a_plan_counts_vectors(
    settings: dict[str, object], accelerator: float, host: float, disk: float
) -> None:
    plan = plan_job(config(**settings), num_parameters=N, world_size=RANKS)
    found = [plan.peak(tier) / VECTOR for tier in ("accelerator", "host", "disk")]
    # Blocks that travel end at multiples of 4096 coordinates: 1e-3 of what they are.
    assert found == pytest.approx([accelerator, host, disk], rel=1e-6 if disk == 0 else 1e-3)


def test_pinned_memory_is_rounded_up_to_a_power_of_two() -> None:
    plan = plan_job(config(device="host"), num_parameters=N, world_size=RANKS)
    assert plan.peak("host") == 16 * 2**30  # of 30 vectors, 13.1 GB


def test_a_job_on_the_cpu_has_everything_on_the_host() -> None:
    plans = [
        plan_job(config(device=d), num_parameters=N, world_size=RANKS, accelerator=False)
        for d in ("accelerator", "host")
    ]
    assert plans[0].peak("host") == plans[1].peak("host") == pytest.approx(36.5 * VECTOR)
    assert plans[0].peak("accelerator") == 0


def test_a_window_longer_than_the_run_takes_no_more_than_the_run() -> None:
    plans = [
        plan_job(config(mode="selective", window=w), num_parameters=N, world_size=RANKS)
        for w in (30, 2**40)
    ]
    assert plans[0] == plans[1]


def test_stages_and_offload_change_what_the_guard_holds() -> None:
    def extra(**job: object) -> tuple[float, float]:
        plan = plan_job(config(), num_parameters=N, world_size=RANKS, **job)  # type: ignore[arg-type]
        usual = 36.0 * VECTOR * (RANKS if job["stage"] == 0 else 1)
        return (plan.peak("accelerator") - usual) / VECTOR, plan.peak("host") / VECTOR

    assert extra(stage=2) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert extra(stage=0, dtype="bf16") == pytest.approx((0.0, 0.0), abs=1e-6)
    assert extra(stage=0, dtype="fp32") == pytest.approx((RANKS, 0.0))
    # Masters come to the weights for the measurement; what training has pending stays on the host.
    assert extra(stage=3, offload_optimizer=True) == pytest.approx((1.0, 1.5))


# Of an operator: two gradients of a product, two at the weights, training's in bf16; two trials.
ALWAYS, TRIALS, PRODUCT = 4.5, 2, 1


@pytest.mark.parametrize(
    ("analysis", "arguments", "settings", "accelerator", "disk"),
    [
        # The basis, which restarts keep within 256 MiB of its own size, and k vectors from it.
        ("eigenpairs", {"k": 2}, {}, 24 + 2 + ALWAYS + PRODUCT, 0),
        ("eigenpairs", {"k": 2, "basis_size": 9}, {}, 9 + 2 + ALWAYS + PRODUCT, 0),
        # The vector that is multiplied; many eigenvectors, when the basis is gone, count more.
        ("eigenpairs", {"k": 1}, {"device": "disk"}, 1 + ALWAYS + TRIALS, 22),
        ("eigenpairs", {"k": 6}, {"device": "disk"}, 2 * 6 + ALWAYS + PRODUCT, 32),
        ("trace", {}, {}, 1 + ALWAYS + TRIALS, 0),
        ("trace", {"method": "hutch++", "num_matvecs": 30}, {}, 10 + 1 + ALWAYS + TRIALS, 0),
        ("trace", {"method": "xtrace"}, {"dtype": "bf16"}, 7.5 + 1 + ALWAYS + TRIALS, 0),
        ("solve", {"dampings": [1.0, 2.0]}, {}, 30 + ALWAYS + PRODUCT + 2, 0),
        ("solve", {"dampings": [1.0], "num_matvecs": 12}, {}, 12 + ALWAYS + TRIALS, 0),
        # Adam's diagonal, a root, b and v scaled, the first solution, and the space.
        (
            "solve",
            {"dampings": [1.0, 2.0], "num_matvecs": 12, "preconditioner": "adam"},
            {},
            1 + 1 + 2 + 1 + 12 + ALWAYS + TRIALS,
            0,
        ),
        ("influence", {"dampings": [1.0]}, {"device": "disk"}, 1 + 2 + ALWAYS + PRODUCT, 30),
        ("sharpness", {"preconditioned": False}, {}, 1 + 22 + ALWAYS + TRIALS, 0),
        # Two of Adam's, two starts, the root and the vector scaled by it.
        ("sharpness", {}, {}, 2 + 2 + 2 + 22 + ALWAYS + TRIALS, 0),
        ("sharpness", {"warm": True}, {}, 2 + 10 + 5 + ALWAYS, 0),
        # 2 m vectors, the last of which is a product, with two pairs and one at work.
        ("sharpness", {}, {"device": "disk"}, 2 + 2 + 10 + 5 + ALWAYS, 22),
        # Its Krylov space of 10 and the random vector before it.
        ("displacement_sweep", {}, {}, 1 + 10 + ALWAYS + TRIALS, 0),
        # Two directions; the product, that before it, and their difference.
        ("displacement_sweep", {"directions": ["random", "gradient"]}, {}, 2 + ALWAYS + 3, 0),
        ("displacement_sweep", {"directions": []}, {}, ALWAYS + 3, 0),
        ("block_coupling", {}, {}, 3 + ALWAYS + TRIALS, 0),
        ("off_block_share", {}, {}, 3 + ALWAYS + TRIALS, 0),
    ],
    ids=str,
)
def test_plans_of_analyses_count_vectors(
    analysis: str,
    arguments: dict[str, object],
    settings: dict[str, object],
    accelerator: float,
    disk: float,
) -> None:
    n = 700_000_000_000  # so that blocks of 256 MiB are nothing beside a vector
    plan = plan_job(config(**settings), analysis, arguments, num_parameters=n, world_size=RANKS)
    found = [plan.peak(tier) / (4 * n / RANKS) for tier in ("accelerator", "disk")]
    assert found == pytest.approx([accelerator, disk], abs=0.03)


@pytest.mark.parametrize(
    ("analysis", "arguments", "settings", "kept"),
    [
        ("spectrum", {}, {}, 30),
        ("spectrum", {}, {"num_probes": 3}, 30 + 2),
        ("spectrum", {}, {"mode": "none"}, 2 + 2),
        ("spectrum", {}, {"mode": "window", "window": 7, "dtype": "bf16"}, 7 + 2),
        ("spectrum", {}, {"mode": "window", "window": 40}, 30),
        ("spectrum", {}, {"mode": "selective", "window": 4}, 30 + 4 + 2),
        ("eigenpairs", {"k": 3}, {}, 300 + 3),
        ("eigenpairs", {"k": 3, "max_matvecs": 40}, {}, 40 + 3),
        ("trace", {"method": "xtrace", "num_matvecs": 20}, {}, 20),
        ("solve", {"dampings": [1.0, 2.0]}, {}, 30 + 2),
        ("influence", {"dampings": [1.0], "num_matvecs": 7}, {}, 7 + 1),
        ("sharpness", {"warm": True}, {}, 5 + 2),
        ("block_coupling", {"num_blocks": 6}, {}, 7),
        ("off_block_share", {"num_probes": 3}, {}, 6),
        ("displacement_sweep", {}, {}, 0),
    ],
    ids=str,
)
def test_what_resume_keeps_is_planned_in_vectors_of_fp32(
    analysis: str, arguments: dict[str, object], settings: dict[str, object], kept: int
) -> None:
    job = {"num_parameters": N, "world_size": RANKS}
    plan = plan_job(config(**settings, resume="state"), analysis, arguments, **job)
    assert plan.peak("resume") / VECTOR == pytest.approx(kept, rel=1e-6)
    assert plan_job(config(**settings), analysis, arguments, **job).peak("resume") == 0


def test_blocks_that_resume_needs_the_number_of_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="block_coupling takes depends on the model"):
        plan_job(config(resume="state"), "block_coupling", num_parameters=N, world_size=RANKS)


@pytest.mark.parametrize(
    ("analysis", "arguments", "vectors", "way_out"),
    [
        ("eigenpairs", {"k": 1}, 80, "max_matvecs = 75"),
        ("eigenpairs", {"k": 1}, 5, "resume = null"),
        ("spectrum", {}, 20, "num_matvecs = 15"),
        ("sharpness", {}, 10, "resume = null"),
    ],
)
def test_a_state_that_all_ranks_have_no_room_for_together_is_refused(
    analysis: str, arguments: dict[str, object], vectors: int, way_out: str
) -> None:
    settings, planned = config(resume="state"), named(analysis, arguments)
    job = Job(num_parameters=N, world_size=2)
    free: dict[Tier, int] = dict.fromkeys(TIERS, 2**50)
    free["resume"] = int(2 * vectors * FP32 * job.share.n_local)
    needs = [needs_of(planned, job.share, settings, free) for _ in range(2)]
    ranks = [replace(each, node=f"node{i}") for i, each in enumerate(needs)]
    with pytest.raises(ConfigError, match="in the resume folder of rank 0 for 2 ranks") as raised:
        refuse_too_large(planned, settings, ranks)
    assert way_out in str(raised.value) and str(raised.value).endswith("would fit")


@pytest.mark.parametrize(
    ("analysis", "arguments", "accelerator", "elsewhere", "way_out"),
    [
        ("eigenpairs", {"k": 2}, 22, 100, 'basis.device = "host"'),
        ("eigenpairs", {"k": 2}, 22, 1, 'basis.dtype = "bf16"'),
        ("eigenpairs", {"k": 2, "basis_size": 40}, 20, 1, "basis_size = 10"),
        ("trace", {"method": "hutch++", "num_matvecs": 60}, 13, 1, "num_matvecs = 15"),
        ("trace", {"method": "xtrace", "num_matvecs": 12}, 8, 1, 'method = "hutchinson"'),
        ("solve", {"dampings": [1.0]}, 22, 1, "num_matvecs = 15"),
        ("influence", {"dampings": [1.0]}, 10, 40, 'basis.device = "host"'),
        ("sharpness", {}, 25, 1, 'basis.dtype = "bf16"'),
        ("sharpness", {}, 20, 1, 'basis.dtype = "bf16" and preconditioned = false'),
    ],
    ids=str,
)
def test_a_refusal_of_an_analysis_names_its_own_settings(
    analysis: str,
    arguments: dict[str, object],
    accelerator: float,
    elsewhere: float,
    way_out: str,
) -> None:
    vector, share = 4 * N / RANKS, Job(num_parameters=N, world_size=RANKS).share
    planned = named(analysis, arguments)

    free = {"accelerator": accelerator, "host": elsewhere, "disk": elsewhere}
    others = alternatives(planned, config())
    plans = [plan(planned, share, config()), *(plan(o.analysis, share, o.config) for o in others)]
    mine = Needs(
        "a",
        {tier: int(vectors * vector) for tier, vectors in free.items()},  # type: ignore[misc]
        [{tier: p.peak(tier) for tier in free} for p in plans],  # type: ignore[misc]
    )
    with pytest.raises(ConfigError) as raised:
        refuse_too_large(planned, config(), [mine])
    assert str(raised.value).startswith(f"not enough memory for {analysis}: it needs ")
    assert str(raised.value).endswith(f": {way_out} would fit")


def test_passes_in_fp32_that_were_asked_for_can_be_given_up() -> None:
    planned, share = named("block_coupling", {}), Job(num_parameters=N, world_size=RANKS).share
    free: dict[Tier, int] = {"accelerator": int(10 * VECTOR)}
    given = config(precision="fp32")
    with pytest.raises(ConfigError, match='finite_difference.precision = "model" would fit'):
        refuse_too_large(planned, given, [needs_of(planned, share, given, free)])


def test_stages_share_memory() -> None:
    plan = MemoryPlan.of(
        [Item("always", "host", 10)],
        in_stage("first", [Item("a", "host", 7), Item("b", "host", 5, ("passes",))]),
        in_stage("then", [Item("c", "host", 11), Item("d", "host", 4, ("storing",))]),
    )
    assert plan.peak("host") == 10 + 11 + 4
    assert "first: passes" in plan.table() and plan.table().count("then") == 2


def test_what_has_no_plan_is_said() -> None:
    with pytest.raises(ConfigError, match="no analysis 'density'; there are spectrum, "):
        plan_job(config(), "density", num_parameters=N, world_size=RANKS)


SPECTRUM = Spectrum()


def needs(free: dict[str, float], node: str = "a", **settings: object) -> Needs:
    """A rank's, of the plans of the 7B job."""
    given = config(**settings)
    configs = [given, *(other.config for other in alternatives(SPECTRUM, given))]
    plans = [plan_job(c, num_parameters=N, world_size=RANKS) for c in configs]
    return Needs(
        node,
        {tier: int(vectors * VECTOR) for tier, vectors in free.items()},  # type: ignore[misc]
        [{tier: p.peak(tier) for tier in free} for p in plans],  # type: ignore[misc]
    )


@pytest.mark.parametrize(
    ("accelerator", "host", "disk", "way_out"),
    [
        (30, 100, 100, 'basis.device = "host"'),
        (30, 20, 20, 'basis.dtype = "bf16"'),
        (10, 40, 100, 'basis.dtype = "bf16" and basis.device = "host"'),
        (10, 5, 70, 'basis.device = "disk"'),
        (10, 5, 40, 'basis.dtype = "bf16" and basis.device = "disk"'),
        (22, 5, 5, "num_matvecs = 15"),
        (9, 5, 5, 'reorthogonalization.mode = "none" and basis.device = "accelerator"'),
    ],
)
def test_a_refusal_names_the_least_harmful_setting_that_would_fit(
    accelerator: float, host: float, disk: float, way_out: str
) -> None:
    free = {"accelerator": accelerator, "host": host, "disk": disk}
    with pytest.raises(ConfigError) as raised:  # two ranks share host and disk
        refuse_too_large(SPECTRUM, config(), [needs(free), needs(free)])
    assert str(raised.value).endswith(f": {way_out} would fit")
    assert "on the accelerator of rank 0 beyond" in str(raised.value)


def test_nothing_would_fit() -> None:
    poor = needs({"accelerator": 1, "host": 1, "disk": 1})
    with pytest.raises(ConfigError, match="no setting of the basis would fit; use more ranks"):
        refuse_too_large(SPECTRUM, config(), [poor])


def test_ranks_share_the_host_memory_of_their_node_only() -> None:
    free, settings = {"accelerator": 10, "host": 50, "disk": 50}, {"device": "host"}
    apart = [needs(free, node, **settings) for node in ("a", "b")]
    refuse_too_large(SPECTRUM, config(**settings), apart)
    together = [needs(free, "a", **settings) for _ in range(2)]
    with pytest.raises(ConfigError, match="on the host of rank 0 for 2 ranks"):
        refuse_too_large(SPECTRUM, config(**settings), together)
