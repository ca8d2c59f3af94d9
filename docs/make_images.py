"""Make the picture of the README and the pictures of a page: `python docs/make_images.py`.

A small language model is trained and measured in two minutes. Its last spectrum is drawn for the
README; the page of the run is photographed in chromium, where that is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.records import HessianSpectrum
from ds_hessian.show.page import page_of, run_in, write_page

WIDTH, CONTEXT, STEPS = 32, 32, 150
IMAGES = Path(__file__).resolve().parent / "_static"
CHROMIUM = shutil.which("chromium")
FLAGS = """
    --headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars
    --disable-background-networking --virtual-time-budget=20000
""".split()
SHOTS = {
    "page_desktop": ["--window-size=1280,1400"],
    "page_dark": ["--window-size=1280,1400", "--blink-settings=preferredColorScheme=0"],
    "page_phone": ["--window-size=500,1400"],
}


class Model(nn.Module):
    """One causal transformer layer over bytes; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        """Mean cross entropy of the next byte."""
        x = self.embed(text[:, :-1]) + self.position.weight[: text.shape[1] - 1]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.layer(x, src_mask=mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def train(folder: Path) -> None:
    """Leave a run in the folder: spectra at step 0 and at logarithmic spacing, and eigenpairs."""
    torch.manual_seed(0)
    source = Path(ds_hessian.__file__).with_name("hessian.py").read_text().encode()
    text = torch.tensor([byte for byte in source if byte < 128])
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch() -> Tensor:
        starts = torch.randint(len(text) - CONTEXT, (16,)).tolist()
        return torch.stack([text[start : start + CONTEXT] for start in starts])

    when = {"interval": "log", "steps": [0, STEPS]}
    settings = when | {"output_path": str(folder), "plot": False, "progress": False}
    hessian = ds_hessian.attach(model, optimizer, settings).use([batch() for _ in range(4)])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).backward()
        optimizer.step()
        hessian.step()
    hessian.save(hessian.eigenpairs(k=3))
    hessian.save(hessian.trace(blocks="layers"))


def photograph(page: Path, name: str, flags: list[str], profile: Path) -> None:
    """Take a picture of the first screen of a page."""
    target = IMAGES / f"{name}.png"
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", f"--screenshot={target}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=300)


def main() -> None:
    """Train, measure, draw."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "small-language-model"
        train(folder)
        spectrum = HessianSpectrum.load(folder / f"step_{STEPS:06d}")
        print(spectrum.table())
        spectrum.plot(IMAGES / "readme_spectrum.png")
        page = write_page(run_in(folder), page_of(folder))
        for name, flags in SHOTS.items() if CHROMIUM else ():
            photograph(page, name, flags, Path(place) / name)


if __name__ == "__main__":
    main()
