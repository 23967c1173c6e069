"""A small GPT that learns to write a text character by character.

python examples/characters.py                 one process, on this repository's LICENSE
oarlock launch -n 2 examples/characters.py --text my_book.txt --steps 500
torchrun --nproc-per-node 2 examples/characters.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import oarlock

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
parser.add_argument("--steps", type=int, default=100, help="updates to make")
args = parser.parse_args()

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 2


class Windows:
    """A map-style dataset: each row is a window of the text, moved on by half its length."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.codes = torch.tensor([self.alphabet.index(c) for c in text])

    def __len__(self) -> int:
        return (len(self.codes) - 1 - CONTEXT) // (CONTEXT // 2) + 1

    def __getitem__(self, row: int) -> torch.Tensor:
        start = row * (CONTEXT // 2)
        return self.codes[start : start + CONTEXT + 1]  # one more: the last target


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [rows, length] -> [.., .., characters]
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        hidden = self.characters(x) + self.places.weight[:length]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def loss_fn(model, rows):
    """The sum over all characters, and their number."""
    scores, targets = model(rows[:, :-1]), rows[:, 1:]
    return cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


torch.manual_seed(0)
world = oarlock.join()
data = Windows(args.text.read_text(encoding="utf-8"))
model = GPT(len(data.alphabet)).to(world.device)
engine = oarlock.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=3e-3), world)
loader = oarlock.Loader(data, batch_size=32, micro_batch_size=8, seed=0)

while engine.steps_done < args.steps:
    for batch in loader:
        result = engine.step(batch, loss_fn)
        if world.is_main and (result.step == 1 or result.step % 10 == 0):
            print(f"step {result.step}: loss {result.loss:.4f} a character", flush=True)
        if engine.steps_done == args.steps:
            break
