import torch
from torch.nn.functional import cross_entropy

import oarlock

torch.manual_seed(0)
points = torch.randn(1000, 2)
inside = (points.norm(dim=1) < 1).long()
dataset = torch.utils.data.TensorDataset(points, inside)
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


def loss_fn(model, micro_batch):
    x, y = micro_batch
    return cross_entropy(model(x), y, reduction="sum"), len(y)  # a sum, and of how many


world = oarlock.join()
model.to(world.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = oarlock.DataParallel(model, optimizer, world, clip_norm=1.0)
loader = oarlock.Loader(dataset, batch_size=64, micro_batch_size=16, seed=0)

for epoch in range(5):
    for batch in loader:
        result = engine.step(batch, loss_fn)
    if world.is_main:
        print(f"epoch {epoch}: loss {result.loss:.4f}")
