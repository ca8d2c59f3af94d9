"""Draw the images of these pages anew: `python docs/images.py`, in about a minute.

A small network is trained by plain gradient descent until it is at the edge of stability. Its last
spectrum, the comparison of all its spectra, and its page (in chromium, where it is installed: on a
desktop, on a phone, in the dark theme) go to `docs/_static`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import ds_hessian
from ds_hessian.records import Comparison, HessianSpectrum
from ds_hessian.show.page import page_of, run_in

HERE = Path(__file__).resolve().parent / "_static"
STEPS, RATE = 320, 0.12
FLAGS = """
    --headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars
    --disable-background-networking --virtual-time-budget=20000
""".split()
DARK = "--blink-settings=preferredColorScheme=0"
SHOTS = {
    "page_desktop": (["--window-size=1280,1500"]),
    "page_dark": (["--window-size=1280,1500", DARK]),
    "page_phone": (["--window-size=500,1500"]),
}


class Classifier(nn.Module):
    """Two hidden layers of tanh; `forward` returns the squared error of its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 5))
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`(batch, 20)` points and `(batch,)` classes to the loss."""
        wanted = functional.one_hot(target, 5).float()
        return (self.layers(x) - wanted).square().sum(1).mean() / 2


def train(folder: Path) -> None:
    """Leave a run in the folder: spectra at step 0 and at logarithmic spacing."""
    torch.manual_seed(0)
    centers = torch.randn(25, 20)
    target = torch.randint(25, (400,))
    data = centers[target] + 0.4 * torch.randn(400, 20), target % 5
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    settings = {
        "interval": "log",
        "steps": [0, *range(80, STEPS + 1, 40)],
        "num_matvecs": 40,
        "output_path": str(folder),
    }
    hessian = ds_hessian.attach(model, optimizer, settings).use([data])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*data).backward()
        optimizer.step()
        hessian.step()


def photograph(page: Path, name: str, flags: list[str], chromium: str, profile: Path) -> None:
    """Take a picture of the first screens of a page."""
    target = HERE / f"{name}.png"
    command = [chromium, *FLAGS, *flags, f"--user-data-dir={profile}", f"--screenshot={target}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=300)


def main() -> None:
    """Draw all images."""
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "edge-of-stability"
        train(folder)
        run = run_in(folder)
        spectra = dict(run.labelled(HessianSpectrum))
        list(spectra.values())[-1].plot(HERE / "spectrum.png")
        Comparison(spectra).plot(HERE / "comparison.png")
        chromium = shutil.which("chromium")
        for name, flags in SHOTS.items() if chromium else ():
            photograph(page_of(folder), name, flags, str(chromium), Path(place) / name)


if __name__ == "__main__":
    main()
