"""Makes the picture of the README: a small language model, trained and measured in a minute."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian

WIDTH, CONTEXT = 32, 32
IMAGE = Path(__file__).parent / "_static" / "readme_spectrum.png"


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


def main() -> None:
    """Train, measure, draw."""
    torch.manual_seed(0)
    source = Path(ds_hessian.__file__).with_name("hessian.py").read_text().encode()
    text = torch.tensor([byte for byte in source if byte < 128])
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch() -> Tensor:
        starts = torch.randint(len(text) - CONTEXT, (16,)).tolist()
        return torch.stack([text[start : start + CONTEXT] for start in starts])

    for _ in range(150):
        optimizer.zero_grad()
        model(batch()).backward()
        optimizer.step()
    spectrum = ds_hessian.measure(model, [batch() for _ in range(4)], step=150, num_matvecs=30)
    print(spectrum.table())
    spectrum.plot(IMAGE)


if __name__ == "__main__":
    main()
