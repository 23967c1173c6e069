"""An image classifier on scikit-learn's handwritten digits (1797 images of 8 x 8).

    python examples/digits.py                     one process
    oarlock launch -n 2 examples/digits.py        two; the same losses, to rounding
    torchrun --nproc-per-node 2 examples/digits.py

Needs scikit-learn.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import oarlock

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100, help="updates to make")
args = parser.parse_args()

torch.manual_seed(0)  # the same start everywhere; were it not, rank 0's weights would be taken
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]  # [rows, 1, 8, 8]
train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(32 * 4 * 4, 10),
)


def loss_fn(model, micro_batch):
    """The sum over the images, and their number: the engine divides once, over all ranks."""
    x, y = micro_batch
    return cross_entropy(model(x), y, reduction="sum"), len(y)


def count_errors(model, micro_batch):
    """For the evaluation: the 'loss' is the number of images told wrong."""
    x, y = micro_batch
    return (model(x).argmax(dim=1) != y).float().sum(), len(y)


world = oarlock.join()
model.to(world.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
engine = oarlock.DataParallel(model, optimizer, world, clip_norm=1.0)
loader = oarlock.Loader(train, batch_size=128, micro_batch_size=32, seed=0)
test_loader = oarlock.Loader(test, batch_size=128, micro_batch_size=32, shuffle=False)

while engine.steps_done < args.steps:
    for batch in loader:  # one epoch, or what is left of it
        result = engine.step(batch, loss_fn)
        if world.is_main and (result.step == 1 or result.step % 10 == 0):
            print(f"step {result.step}: loss {result.loss:.4f}", flush=True)
        if engine.steps_done == args.steps:
            break

wrong = engine.evaluate(test_loader, count_errors)  # every test image once, over all ranks
if world.is_main:
    print(f"test images told right: {1 - wrong.loss:.1%} of {wrong.rows}")
