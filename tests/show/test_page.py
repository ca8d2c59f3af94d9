"""The page, opened in a browser: it shows what the files say, and asks for nothing else."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
import pytest
import torch

from ds_hessian.errors import ResultError
from ds_hessian.krylov import DampedSystems, Solution, solve
from ds_hessian.records import (
    Cost,
    Estimate,
    HessianBlockCoupling,
    HessianBlockSpectra,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianSpectrum,
    HessianTrace,
    Provenance,
)
from ds_hessian.show.page import Run, page_of, run_in, write_page
from ds_hessian.show.page.write import sections_of
from tests.browser import ask, needs_browser
from tests.krylov.matrices import SPECTRA, Matrix
from tests.records.makers import (
    COST,
    PROVENANCE,
    language_model_like,
    semicircle,
    spectrum_of,
    sweep,
)
from tests.records.test_analyses import kronecker
from tests.tiers import cells

BLOCKS = ("wte", *(f"h.{number}" for number in range(6)), "ln_f")
HOSTILE = "<img src=x onerror=broken()> & </script>"  # no name may become part of the page
HALF_A_PIXEL = 0.5


def measured(step: int) -> dict[str, Any]:
    """Cost and provenance at a step."""
    seconds = 2.0 + 0.1 * (step % 7)
    cost = dataclasses.replace(COST, seconds_per_product=seconds, seconds_total=30 * seconds + 5)
    return {"cost": cost, "provenance": dataclasses.replace(PROVENANCE, step=step)}


def spectrum(step: int, probes: int = 1) -> HessianSpectrum:
    values = language_model_like(1000) * (1 + step / 5000)
    found = spectrum_of(values, m=24, probes=probes, noise=2e-3, seed=step)
    return dataclasses.replace(found, **measured(step), loss=2 + 1000 / (step + 100))


def analyses(step: int) -> list[Any]:
    """One record of every other kind that the page shows."""
    rng, count = np.random.default_rng(step), len(BLOCKS)
    names = [f"{block}.{part}" for block in BLOCKS for part in ("weight", "bias")]
    names += [f"h.0.{HOSTILE}"]
    shares = rng.dirichlet(np.ones(len(names)), size=2)
    lengths = {"residuals": np.ones(2), "product_errors": np.ones(2), "displacements": np.ones(2)}
    blocks = {"sizes": np.ones(count), "noises": np.full(count, 0.02), "num_matvecs": count + 1}
    null = {"null_relative_errors": np.full(count, 0.9), "null_cosines": np.full(count, 0.3)}
    return [
        HessianEigenpairs(
            values=np.array([80.0, 60.0]) + step / 100,
            errors=np.array([0.1, 0.2]),
            **lengths,
            converged=np.array([True, False]),
            vectors=torch.zeros(2, 0),
            **{"which": "LM", "num_matvecs": 40, "restarts": 1, "asymmetry": 0.0},
            concentrations=dict(zip(names, shares.T, strict=True)),
            sampling_errors=np.zeros(0),
            **measured(step),
        ),
        HessianTrace(
            **{"value": 290.0, "error": 20.0, "bound": 50.0, "samples": np.ones(4)},
            blocks=BLOCKS,
            block_values=rng.exponential(30.0, count),
            block_errors=np.full(count, 4.0),
            **{"method": "hutchinson", "num_matvecs": 4},
            **measured(step),
        ),
        HessianBlockCoupling(
            names=BLOCKS,
            relative_errors=np.append(rng.random(count - 1), np.nan),
            cosines=rng.random(count),
            share=0.31,
            **blocks,
            **null,
            **measured(step),
        ),
        HessianBlockSpectra.of(
            {name: spectrum_of(rng.normal(i, 1, 40), 8, 2) for i, name in enumerate(BLOCKS[:5])},
            measured(step)["provenance"],
        ),
        dataclasses.replace(kronecker(), **measured(step)),
        HessianOffBlockShare(
            value=0.3, error=0.02, noise=0.001, null=0.93, num_matvecs=8, **measured(step)
        ),
        *systems(step),
        dataclasses.replace(sweep(), **measured(step)),
        HessianSharpness(
            eigenvalue_max=Estimate(84.5 + step / 100, 2.0),
            preconditioned=Estimate(3000.0 - step / 10, 100.0),
            **{"converged": (True, True), "gradient_curvature": 20.0 + step, "num_matvecs": 5},
            **{"update_curvature": None, "update_norm": None, "gradient_norm": 1.0},
            **{"loss": 2.0, "warm": True},
            **measured(step),
        ),
    ]


@functools.cache
def solution() -> Solution:
    """Of a matrix, at four dampings, with too few products for the first."""
    operator = Matrix.of(SPECTRA["spiked"])
    draw = operator.fresh()
    return solve(operator, draw(1), [0.5, 6.0, 30.0, 200.0], draw, "minres", num_matvecs=12)


def systems(step: int) -> list[Any]:
    """A solution, and the influence of 30 examples."""
    rng, found = np.random.default_rng(step), solution()
    fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(DampedSystems)}
    scores = rng.standard_normal(30) * 10.0 ** -np.arange(4)[:, None]
    errors = np.abs(scores) / 7
    errors[0, 4] = np.inf
    return [
        HessianSolution(**vars(found), **measured(step)),
        HessianInfluence(**fields, scores=scores, errors=errors, query_loss=1.75, **measured(step)),
    ]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one step with a record of every kind."""
    folder = tmp_path_factory.mktemp("one") / "step_000500"
    for record in (spectrum(500, probes=2), *analyses(500)):
        record.save(folder)
    return folder


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 spectra, with analyses at the third and the last."""
    folder = tmp_path_factory.mktemp("five")
    for number in range(1, 6):
        place = folder / f"step_{20 * number:06d}"
        spectrum(20 * number).save(place)
        for record in analyses(20 * number) if number in (3, 5) else ():
            record.save(place)
    return folder


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 50 spectra, with analyses at each tenth."""
    folder = tmp_path_factory.mktemp("fifty")
    for number in range(1, 51):
        place = folder / f"step_{20 * number:06d}"
        spectrum(20 * number).save(place)
        for record in analyses(20 * number) if number % 10 == 0 else ():
            record.save(place)
    return folder


def stored(folder: Path, kind: str = "spectrum") -> list[dict[str, Any]]:
    """The JSON of each step, as any other program would read it."""
    paths = sorted(folder.glob(f"**/{kind}.json"))
    found = [json.loads(path.read_text()) for path in paths]
    return sorted(found, key=lambda content: content["provenance"]["step"])


def figure(title: str) -> str:
    """Script: the figure of a title, as plotly has it."""
    return (
        "const shown = '.figures > div:not([hidden]) > .js-plotly-plot';"
        "const all = [...document.querySelectorAll(shown)];"
        f"const gd = all.find(div => div._fullLayout.title.text === {json.dumps(title)});"
    )


# What is drawn of a trace, from the numbers that plotly has plotted (strings stay strings).
TRACES = """
const numbers = x => Array.from(x ?? []);
return gd._fullData.map(t => ({
  name: t.name, x: numbers(t.x), y: numbers(t.y),
  z: numbers(t.z).map(numbers),
  up: numbers(t.error_y?.array), right: numbers(t.error_x?.array)
}));
"""


def traces(page: Path, title: str, folder: Path) -> dict[str, dict[str, Any]]:
    answer = ask(page, figure(title) + TRACES, folder)["answer"]
    return {trace["name"]: trace for trace in answer}


@needs_browser
def test_outliers_are_drawn_where_the_json_has_them(one: Path, tmp_path: Path) -> None:
    """Read off the picture: the markers' pixels, turned back by the axis' own ends."""
    page = write_page(run_in(one), tmp_path / "page.html")
    script = """
      const axis = gd._fullLayout.xaxis;
      const name = 'single eigenvalue, with its bar';
      const number = gd._fullData.findIndex(t => t.name === name);
      const trace = gd.querySelectorAll('.xy .scatterlayer .trace')[number];
      const markers = [...trace.querySelectorAll('.point')];
      const place = marker => marker.getAttribute('transform').match(/translate\\(([-\\d.e]+)/)[1];
      const pixels = markers.map(place).map(Number);
      return {pixels, low: axis.range[0], high: axis.range[1], length: axis._length};
    """
    (content,) = stored(one)
    answer = ask(page, figure("whole spectrum") + script, tmp_path)["answer"]
    unit = (answer["high"] - answer["low"]) / answer["length"]
    found = sorted(answer["low"] + unit * np.array(answer["pixels"]))
    expected = sorted(outlier["value"] for outlier in content["outliers"])
    assert len(expected) > 4
    np.testing.assert_allclose(found, expected, rtol=0, atol=HALF_A_PIXEL * unit)


@needs_browser
def test_the_curves_drawn_are_those_of_the_files(one: Path, tmp_path: Path) -> None:
    page = write_page(run_in(one), tmp_path / "page.html")
    found = traces(page, "the bulk: share at or below", tmp_path)
    x, y = (np.array(found["at or below"][axis]) for axis in "xy")
    with np.load(one / "spectrum.npz") as arrays:
        ritz = np.sort(arrays["ritz_values"], axis=None)
    np.testing.assert_array_equal(np.unique(x)[1:-1], np.unique(ritz.astype(np.float32)))
    assert (np.diff(y) >= 0).all() and y[-1] == pytest.approx(1, abs=1e-6)
    (content,) = stored(one)
    levels = content["density"]["cumulative"]
    shares = np.interp(levels["eigenvalues"], x, y, left=0, right=1)
    lower, upper = np.array(levels["lower"]), np.array(levels["upper"])
    assert (shares >= lower - 1e-6).all() and (shares <= upper + 1e-6).all()


@needs_browser
def test_eigenvalues_over_fifty_steps_are_those_of_the_files(fifty: Path, tmp_path: Path) -> None:
    page = write_page(run_in(fifty), tmp_path / "page.html")
    found, contents = traces(page, "eigenvalues", tmp_path), stored(fifty)
    assert len(contents) == 50
    steps = [content["provenance"]["step"] for content in contents]
    for name, key in (("largest", "eigenvalue_max"), ("smallest", "eigenvalue_min")):
        assert found[name]["x"] == steps
        assert found[name]["y"] == [content[key]["value"] for content in contents]
        assert found[name]["up"] == [content[key]["error"] for content in contents]
    sharp = stored(fifty, "sharpness")
    values = [content["eigenvalue_max"]["value"] for content in sharp]
    assert found["largest (sharpness)"]["y"] == values and len(values) == 5
    ends = {content[key]["value"] for content in contents for key in ("eigenvalue_max",)}
    ends |= {content["eigenvalue_min"]["value"] for content in contents}
    between = [o["value"] for c in contents for o in c["outliers"] if o["value"] not in ends]
    assert sorted(found["outliers"]["y"]) == sorted(between)


@needs_browser
@pytest.mark.parametrize("run", cells(("five", "fifty"), ("five",)))
def test_the_slider_shows_each_step_with_its_figures(
    run: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(run)
    page = write_page(run_in(folder), tmp_path / "page.html")
    script = """
      const section = [...document.querySelectorAll('section')]
        .find(s => s.querySelector('h2').textContent === 'Spectrum');
      const slider = document.querySelector('#steps input'), found = [];
      for (let i = 0; i <= Number(slider.max); i++) {
        slider.value = i;
        slider.dispatchEvent(new Event('input'));
        const gd = section.querySelector('.js-plotly-plot');
        found.push({
          label: section.querySelector('.at').textContent,
          above: document.querySelector('#steps output').textContent,
          card: document.querySelector('.cards strong').textContent,
          rows: [...section.querySelectorAll('dl > div')].map(row =>
            [row.querySelector('dt').textContent, row.querySelector('dd').textContent]),
          outliers: Array.from(gd._fullData.find(t => t.name.startsWith('single')).x),
        });
      }
      return found;
    """
    answer, contents = ask(page, script, tmp_path)["answer"], stored(folder)
    assert [state["label"] for state in answer] == [
        f"step {content['provenance']['step']:,}" for content in contents
    ]
    for state, content in zip(answer, contents, strict=True):
        rows = dict(state["rows"])
        assert state["above"] == state["label"] and state["card"] == rows["largest eigenvalue"]
        for name, key in (
            ("largest eigenvalue", "eigenvalue_max"),
            ("smallest eigenvalue", "eigenvalue_min"),
            ("trace", "trace"),
        ):
            assert rows[name] == str(Estimate(**content[key]))
        assert rows["loss"].startswith(f"{content['loss']:.4g}")
        assert state["outliers"] == [outlier["value"] for outlier in content["outliers"]]


@needs_browser
def test_layers_and_blocks_are_those_of_the_files(one: Path, tmp_path: Path) -> None:
    page = write_page(run_in(one), tmp_path / "page.html")
    (map_,) = traces(page, "eigenvectors", tmp_path).values()
    (pairs,) = stored(one, "eigenpairs")
    with np.load(one / "eigenpairs.npz") as arrays:
        shares = dict(zip(pairs["concentrations"], arrays["concentrations"], strict=True))
    for block, row in zip(map_["y"], map_["z"], strict=True):
        own = sum(share for name, share in shares.items() if name.startswith(f"{block}."))
        np.testing.assert_allclose(row, 100 * own, rtol=1e-12)
    assert tuple(map_["y"]) == BLOCKS
    np.testing.assert_allclose(np.sum(map_["z"], axis=0), 100, rtol=1e-12)

    (bars,) = traces(page, "traces of blocks", tmp_path).values()
    coupling = traces(page, "relative error", tmp_path)["measured"]
    with np.load(one / "trace.npz") as arrays:
        assert bars["x"] == arrays["block_values"].tolist()
        assert bars["right"] == arrays["block_errors"].tolist()
    with np.load(one / "block_coupling.npz") as arrays:
        expected = [None if np.isnan(e) else e for e in arrays["relative_errors"]]
        assert coupling["x"] == expected and coupling["right"] == arrays["noises"].tolist()
    assert tuple(coupling["y"]) == BLOCKS


@needs_browser
def test_systems_and_sweeps_are_those_of_the_files(one: Path, tmp_path: Path) -> None:
    page = write_page(run_in(one), tmp_path / "page.html")
    (residuals,) = traces(page, "residual", tmp_path).values()
    with np.load(one / "solution.npz") as arrays:
        assert residuals["x"] == arrays["dampings"].tolist() and len(residuals["x"]) == 4
        assert residuals["y"] == arrays["residuals"].tolist()

    shown = traces(page, "influence", tmp_path)
    with np.load(one / "influence.npz") as arrays:
        scores, errors = arrays["scores"], arrays["errors"]
        for number, damping in enumerate(arrays["dampings"]):
            found = shown[f"damping {damping:.4g}"]
            rows = [int(name.removeprefix("example ")) for name in found["y"]]
            assert found["x"] == scores[number, rows].tolist()
            bars = [None if np.isinf(e) else e for e in errors[number, rows]]
            assert found["right"] == bars
        assert set(rows) == set(np.argsort(-abs(scores).max(0))[:20].tolist())
        assert scores[0, rows].tolist() == sorted(scores[0, rows], reverse=True)

    curvature, change = (traces(page, t, tmp_path) for t in ("curvature", "change of Hv"))
    with np.load(one / "sweep.npz") as arrays:
        (content,) = stored(one, "sweep")
        for number, name in enumerate(("random 0", "gradient")):
            plateau = content["plateaus"][name]["curvature"]
            expected = arrays["curvatures"][number] / plateau
            np.testing.assert_allclose(curvature[name]["y"], expected, rtol=1e-12)
            assert curvature[name]["x"] == change[name]["x"] == arrays["displacements"].tolist()


@needs_browser
def test_times_add_up_to_those_of_the_files(fifty: Path, tmp_path: Path) -> None:
    page = write_page(run_in(fifty), tmp_path / "page.html")
    bars = traces(page, "time of a spectrum", tmp_path)
    total = np.sum([bar["y"] for bar in bars.values()], axis=0)
    costs = [Cost(**content["cost"]) for content in stored(fifty)]
    np.testing.assert_allclose(total, [cost.seconds_total for cost in costs], rtol=1e-12)
    gradients = traces(page, "cost of a product", tmp_path)["timed"]["y"]
    assert gradients == [cost.seconds_per_product / cost.seconds_per_gradient for cost in costs]


@needs_browser
@pytest.mark.parametrize("fixture", ["one", "fifty"])
def test_nothing_is_fetched_and_nothing_fails(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = write_page(run_in(request.getfixturevalue(fixture)), tmp_path / "page.html")
    count = "return document.querySelectorAll('.figures .main-svg').length"
    seen = ask(page, count, tmp_path)
    assert seen["answer"] >= 10
    assert (seen["resources"], seen["refused"], seen["errors"]) == ([], [], [])


@needs_browser
def test_a_request_would_be_refused_by_the_page_itself(one: Path, tmp_path: Path) -> None:
    page = write_page(run_in(one), tmp_path / "page.html")
    script = """
      new Image().src = 'https://example.org/pixel.png';
      await fetch('https://example.org/data.json').catch(error => error);
      await new Promise(done => setTimeout(done, 300));
    """
    refused = ask(page, script, tmp_path)["refused"]
    assert sorted(refused) == ["https://example.org/data.json", "https://example.org/pixel.png"]


def test_the_page_refers_to_nothing_but_the_files_of_its_run(one: Path, tmp_path: Path) -> None:
    text = write_page(run_in(one), tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.|@import|url\(", text)
    assert not re.search(r"<(link|iframe|img|base|object|embed)\b|\ssrc=", text)
    links = re.findall(r'\shref="([^"#][^"]*)"', text)
    assert len(links) == len(run_in(one).records)
    assert all((tmp_path / unquote(link)).resolve().parent == one for link in links)
    inside = re.findall(r'\shref="#([^"]*)"', text)
    assert inside and all(f'id="{name}"' in text for name in inside)


def test_the_page_of_a_folder_has_its_name_and_lies_in_it(five: Path) -> None:
    assert page_of(five) == five / f"{five.name}.html"
    text = write_page(run_in(five), page_of(five)).read_text(encoding="utf-8")
    assert f"<h1>{five.name}</h1>" in text and 'href="step_000020/spectrum.json"' in text


@pytest.mark.parametrize("name", [b"run \xff", "50 % #1?é".encode(), b"same", b"link"])
def test_links_of_a_page_lead_to_records_whatever_their_folders_are_called(
    tmp_path: Path, name: bytes
) -> None:
    run, below = tmp_path / os.fsdecode(name), "same" if name == b"same" else "step #1"
    spectrum(20).save(tmp_path / "elsewhere" / "step")
    if name == b"link":
        run.mkdir()
        (run / below).symlink_to(tmp_path / "elsewhere" / "step")
    else:
        spectrum(20).save(run / below)
    text = write_page(run_in(run), page_of(run)).read_text(encoding="utf-8")
    (link,) = re.findall(r'\shref="([^"#][^"]*)"', text)
    assert (run / os.fsdecode(unquote_to_bytes(link))).samefile(run / below / "spectrum.json")
    assert unquote(link) == f"{below}/spectrum.json"


@pytest.mark.full
def test_the_page_of_two_hundred_spectra_is_below_ten_megabytes(tmp_path: Path) -> None:
    found = spectrum_of(language_model_like(1000), m=30, probes=2, noise=2e-3)
    records = tuple(
        (f"step_{i:06d}", dataclasses.replace(found, **measured(i))) for i in range(200)
    )
    page = write_page(Run("long", records), tmp_path / "page.html")
    assert page.stat().st_size < 10e6


# Pairs of visible texts in a figure whose boxes overlap by more than a pixel.
OVERLAPS = """
const found = [];
for (const gd of document.querySelectorAll('.js-plotly-plot')) {
  if (!gd.offsetParent) continue;
  const texts = [...gd.querySelectorAll('svg text')].filter(text => text.textContent.trim());
  const boxes = texts.map(text => text.getBoundingClientRect());
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const a = boxes[i], b = boxes[j];
    if (texts[i].contains(texts[j]) || texts[j].contains(texts[i])) continue;
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide <= 2 || high <= 2) continue;
    found.push([gd.layout.title.text, texts[j].textContent, texts[i].textContent]);
  }
}
return found;
"""


@needs_browser
@pytest.mark.parametrize(
    "run",
    cells(("one", "five", "fifty", "two hundred", "logarithmic", "sixty outliers"), ("five",)),
)
def test_texts_of_figures_do_not_overlap(
    run: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    if run == "two hundred":
        found = spectrum(20)
        for step in range(200):
            dataclasses.replace(found, **measured(step)).save(folder / f"step_{step:06d}")
    elif run == "logarithmic":
        for step in (0, 1, 2, 3, 6, 10, 18, 32, 56, 100, 178, 316, 562, 1000, 1778, 3162):
            spectrum(step).save(folder / f"step_{step:06d}")
    elif run == "sixty outliers":
        values = np.concatenate([0.3 * semicircle(3000), np.geomspace(2, 900, 60)])
        spectrum_of(values, m=110).save(folder)
    else:
        folder = request.getfixturevalue(run)
    page = write_page(run_in(folder), tmp_path / "page.html")
    assert ask(page, OVERLAPS, tmp_path)["answer"] == []


@needs_browser
def test_the_theme_is_switched_and_every_figure_has_buttons(one: Path, tmp_path: Path) -> None:
    page = write_page(run_in(one), tmp_path / "page.html")
    script = """
      const gd = document.querySelector('.js-plotly-plot');
      const page = () => getComputedStyle(document.body).backgroundColor;
      const colours = () => [page(), gd._fullLayout.paper_bgcolor];
      const light = colours();
      document.getElementById('theme').click();
      const shown = [...document.querySelectorAll('.figures > div:not([hidden])')];
      const image = await Plotly.toImage(gd, {format: 'svg', width: 400, height: 300});
      const buttons = shown.map(s => s.querySelectorAll('.save button').length);
      return {light, dark: colours(), buttons, image: image.slice(0, 18)};
    """
    answer = ask(page, script, tmp_path)["answer"]
    assert answer["light"] == ["rgb(255, 255, 255)", "#FFFFFF"]
    assert answer["dark"] == ["rgb(21, 24, 28)", "#15181C"]
    assert set(answer["buttons"]) == {2} and answer["image"] == "data:image/svg+xml"


@needs_browser
def test_names_are_shown_as_text(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "")
    spectrum(500).save(folder)
    page = write_page(run_in(folder), tmp_path / "page.html")
    seen = ask(page, "return document.querySelector('h1').textContent", tmp_path)
    assert (seen["answer"], seen["errors"], seen["refused"]) == (folder.name, [], [])


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_to_the_side(one: Path, tmp_path: Path, width: int) -> None:
    """In a frame, since a window of chromium's is at least 500 pixels wide."""
    write_page(run_in(one), tmp_path / "page.html")
    outer = tmp_path / "outer.html"
    outer.write_text(f"<html><body><iframe src='page.html' width='{width}'></iframe></body></html>")
    inner = tmp_path / "page.html"
    tell = """addEventListener('message', async question => {
      await drawn;
      question.source.postMessage(document.documentElement.scrollWidth, '*');
    });"""
    inner.write_text(
        inner.read_text(encoding="utf-8").replace("</body>", f"<script>{tell}</script></body>"),
        encoding="utf-8",
    )
    question = """
      const frame = document.querySelector('iframe').contentWindow;
      return new Promise(done => {
        addEventListener('message', answer => done(answer.data));
        setInterval(() => frame.postMessage('how wide?', '*'), 100);  // until it listens
      });
    """
    answer = ask(outer, question, tmp_path)["answer"]
    assert answer == width


@pytest.mark.parametrize("fixture", cells(["one", "fifty"], ["one"]))
def test_every_property_of_the_figures_is_one_of_plotlys(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    """Its Python classes refuse others, which its script passes over in silence."""
    import plotly.graph_objects as go

    from ds_hessian.show.page.style import TEMPLATE

    for section in sections_of(run_in(request.getfixturevalue(fixture))):
        for chart in section.states[-1].charts:
            go.Figure(chart.figure | {"layout": chart.figure["layout"] | {"template": TEMPLATE}})


def test_sections_are_there_for_what_was_measured_only(tmp_path: Path) -> None:
    def titles(folder: Path) -> list[str]:
        return [section.title for section in sections_of(run_in(folder))]

    spectrum_of(semicircle(300), m=12).save(tmp_path / "plain")
    assert titles(tmp_path / "plain") == ["Spectrum", "Products"]
    for step in (100, 200):
        analyses(step)[-1].save(tmp_path / "sharp" / f"step_{step}")
    assert titles(tmp_path / "sharp") == ["Over training", "Sharpness"]


def test_records_without_a_picture_have_their_figures_on_the_page(tmp_path: Path) -> None:
    """At one step, of a trace of no blocks and of eigenvectors of no layers too."""
    pairs, trace, *_, sharpness = analyses(500)
    nothing = {"blocks": (), "block_values": np.zeros(0), "block_errors": np.zeros(0)}
    for record in (
        dataclasses.replace(pairs, concentrations={}),
        dataclasses.replace(trace, **nothing),
        sharpness,
    ):
        record.save(tmp_path / "run")
    sections = {section.title: section for section in sections_of(run_in(tmp_path / "run"))}
    assert list(sections) == ["Sharpness", "Eigenvalues", "Trace"]
    assert ("trace", "290 ± 20") in sections["Trace"].states[0].rows
    page = write_page(run_in(tmp_path / "run"), tmp_path / "page.html")
    assert all(
        text in page.read_text(encoding="utf-8")
        for text in ("89.5 ± 2.0", "290 ± 20", "85.00 ± 0.10")
    )


def test_a_folder_with_nothing_to_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="nothing to show of .*no record of HessianSpectrum"):
        run_in(tmp_path)


def test_a_broken_analysis_is_refused_too(one: Path, tmp_path: Path) -> None:
    spectrum(500).save(tmp_path)
    for name in ("block_coupling.json", "block_coupling.npz"):
        (tmp_path / name).write_bytes((one / name).read_bytes()[:-1])
    with pytest.raises(ResultError, match="block_coupling.npz .* is truncated"):
        run_in(tmp_path)


@pytest.mark.parametrize("target", ["nowhere", "spectrum.json"])
def test_a_record_whose_link_leads_nowhere_is_refused(tmp_path: Path, target: str) -> None:
    """Its step was left out, without a word."""
    for name, step in (("a", 5), ("b", 6)):
        spectrum(step).save(tmp_path / name)
    (tmp_path / "b" / "spectrum.json").unlink()
    (tmp_path / "b" / "spectrum.json").symlink_to(target)
    with pytest.raises(ResultError, match="no spectrum in .*b: cannot read spectrum.json"):
        run_in(tmp_path)


def test_steps_that_repeat_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        spectrum(100).save(tmp_path / name)
    labels = [label for label, _ in run_in(tmp_path).labelled(HessianSpectrum)]
    assert labels == ["step 100 (a)", "step 100 (b)"]
    assert isinstance(run_in(tmp_path).records[0][1].provenance, Provenance)


def test_steps_that_repeat_have_columns_of_their_own(tmp_path: Path) -> None:
    """Bars of one name were stacked, as if a spectrum had taken the time of both, and of columns of
    one name the last was drawn."""
    for name, step in (("a", 100), ("b", 100), ("c", 1200)):
        for record in (spectrum(step), analyses(step)[0]):
            record.save(tmp_path / name)
    for title in ("time of a spectrum", "the first eigenvector"):
        charts = [c for s in sections_of(run_in(tmp_path)) for c in s.states[0].charts]
        (drawn,) = (c.figure for c in charts if c.figure["layout"]["title"]["text"] == title)
        for trace in drawn["data"]:
            assert trace["x"] == ["100 (a)", "100 (b)", "1,200"]


def test_kronecker_figures_have_their_errors(tmp_path: Path) -> None:
    found = kronecker()
    found.save(tmp_path)
    (section,) = (s for s in sections_of(run_in(tmp_path)) if s.title == "Kronecker factors")
    cosines, shares = (chart.figure["data"][0]["text"] for chart in section.states[0].charts)
    assert cosines[0][1] == f"{found.cosines[0, 1]:.2f} ± {found.cosine_errors[0, 1]:.2f}"
    assert shares[1][2] == f"{found.plain_shares[1]:.2f} ± {found.plain_share_errors[1]:.2f}"


def test_what_a_pointer_shows_is_in_the_figure(one: Path) -> None:
    states = [state for section in sections_of(run_in(one)) for state in section.states]
    drawn = [t for state in states for chart in state.charts for t in chart.figure["data"]]
    for name in ("text", "customdata", "z"):
        shown = [t for t in drawn if "%{" + name in t.get("hovertemplate", "")]
        assert all(name in trace for trace in shown)
        assert shown or name == "customdata"  # of several steps of one name
