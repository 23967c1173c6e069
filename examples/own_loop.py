"""Your own loop: micro-batches that you cut yourself, a scheduler, evaluation and checkpoints.

    python examples/own_loop.py                   run it again with more --steps: it goes on
    oarlock launch -n 2 examples/own_loop.py --steps 200
    torchrun --nproc-per-node 2 examples/own_loop.py

The rows are lists of tokens of very unequal length, each with the sum of its tokens' hidden
values as its target; micro-batches hold about as many tokens, not as many rows.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

import oarlock

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100, help="updates to make, in all")
parser.add_argument("--folder", default="runs/own_loop", help="where the checkpoints are")
args = parser.parse_args()

TOKENS_A_MICRO_BATCH, ROWS_A_STEP, VOCABULARY = 256, 64, 20
random = torch.Generator().manual_seed(0)
VALUES = torch.randn(VOCABULARY, generator=random)
lengths = torch.randint(1, 60, (1000,), generator=random).tolist()
rows = [torch.randint(VOCABULARY, (n,), generator=random) for n in lengths]
train, test = rows[:900], rows[900:]


def collate(rows):  # -> all tokens in one line, where each row starts, the targets
    starts = torch.tensor([0] + [len(r) for r in rows[:-1]]).cumsum(0)
    return torch.cat(rows), starts, torch.stack([VALUES[r].sum() for r in rows])


def micro_batches(step, world):
    """This rank's micro-batches of global batch ``step``: a function of the step alone, so that
    nothing but the step is needed to go on after a stop, on any number of ranks."""
    order = torch.Generator().manual_seed(step)
    cut, tokens = [[]], 0
    for i in torch.randperm(len(train), generator=order)[:ROWS_A_STEP].tolist():
        if tokens + len(train[i]) > TOKENS_A_MICRO_BATCH:
            cut.append([])
            tokens = 0
        cut[-1].append(train[i])
        tokens += len(train[i])
    return [collate(rows) for rows in cut[world.rank :: world.size]]  # may differ in number


def loss_fn(model, micro_batch):
    tokens, starts, targets = micro_batch
    return mse_loss(model(tokens, starts)[:, 0], targets, reduction="sum"), len(targets)


torch.manual_seed(1)
world = oarlock.join()
model = nn.EmbeddingBag(VOCABULARY, 1, mode="sum").to(world.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)  # in updates
engine = oarlock.DataParallel(model, optimizer, world, scheduler=scheduler)
test_loader = oarlock.Loader(test, 50, 10, shuffle=False, collate_fn=collate)
checkpoints = oarlock.Checkpoints(args.folder, keep=2)

found = checkpoints.load(engine, missing_ok=True)
if found and world.is_main:
    print(f"going on after step {found.step} ({found.path})")
while engine.steps_done < args.steps:
    result = engine.step(micro_batches(engine.steps_done, world), loss_fn)
    if world.is_main and (result.step == 1 or result.step % 10 == 0):
        print(f"step {result.step}: loss {result.loss:.4f}  lr {result.lr:.3f}", flush=True)
    if result.step % 50 == 0 or result.step == args.steps:
        exact = engine.evaluate(test_loader, loss_fn)  # every test row once, on any world
        checkpoints.save(engine, settings={"test loss": exact.loss})
        if world.is_main:
            print(f"step {result.step}: test loss {exact.loss:.4f} over {exact.rows} rows")
