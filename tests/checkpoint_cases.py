"""Small runs to save and load, shared by the checkpoint tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import oarlock
from oarlock.engine.dtensors import whole
from oarlock.engine.names import named_state

ROWS = 26


class Net(nn.Module):
    """BatchNorm, a tied pair, a frozen layer, an unused one, odd buffers, a bf16 parameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.left = nn.Linear(width, width, bias=False)
        self.right = nn.Linear(width, width, bias=False)
        self.right.weight = self.left.weight
        self.scale = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.out = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("wave", torch.polar(torch.ones(3), torch.arange(3.0)).cdouble())
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, float("inf")]))
        self.register_buffer("flags", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = torch.tanh(self.norm(self.first(x)))
        x = self.right(torch.tanh(self.left(self.frozen(x)))) * self.scale
        return self.out(torch.dropout(x, 0.1, self.training))


class Rows(torch.utils.data.Dataset):
    """Random vectors; row i is a function of i."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(i)
        return torch.randn(6, generator=g), torch.randint(0, 3, (), generator=g)


def loss(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    """Cross-entropy, summed."""
    x, y = data
    return nn.functional.cross_entropy(model(x).float(), y, reduction="sum"), len(y)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with other options."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decay = [p for n, p in named if p.dim() > 1]
    other = [p for n, p in named if p.dim() < 2]
    groups = [{"params": decay}, {"params": other, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.05, momentum=0.9, nesterov=True)


def build(
    world: oarlock.World | None = None,
    *,
    seed: int = 0,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    scheduler: Callable[[Any], Any] | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[oarlock.DataParallel, oarlock.Loader]:
    """An engine and its loader; ``seed`` makes the fresh weights."""
    torch.manual_seed(seed)
    world = world or oarlock.World("cpu")
    model = model if model is not None else Net()
    if options.get("one_dtype"):  # as sharding 3 needs it
        model = model.float()
    options.pop("one_dtype", None)
    opt = optimizer(model)
    schedule = scheduler(opt) if scheduler else None
    options = {"clip_norm": 1.0, **options}
    engine = oarlock.DataParallel(model, opt, world, scheduler=schedule, **options)
    return engine, oarlock.Loader(Rows(), 8, 2, seed=3, world=world)


def run(engine: oarlock.DataParallel, loader: oarlock.Loader, steps: int) -> None:
    """So many steps, over the ends of epochs."""
    done = 0
    while done < steps:
        for batch in loader:
            engine.step(batch, loss)
            done += 1
            if done == steps:
                break


def fingerprint(engine: oarlock.DataParallel) -> dict[str, bytes]:
    """Every bit of the weights, buffers and optimizer state, by name.

    Where the state lies in slices it is gathered, and only rank 0 has it.
    """
    out = {f"model/{n}": _bits(whole(t.detach())) for n, t in named_state(engine.model)}
    names = {p: n for n, p in engine.model.named_parameters()}
    state = engine.exchange.whole_state()
    if state is None and not engine.sharding:
        state = {names[p]: entry for p, entry in engine.optimizer.state.items()}
    for name, entry in (state or {}).items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                out[f"{name}/{key}"] = _bits(value)
            else:
                out[f"{name}/{key}"] = repr(value).encode()
    for i, group in enumerate(engine.optimizer.param_groups):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        out[f"group/{i}"] = repr(sorted(options.items())).encode()
    if engine.scheduler is not None:
        out["scheduler"] = repr(sorted(engine.scheduler.state_dict().items(), key=str)).encode()
    return out


def _bits(tensor: Tensor) -> bytes:
    value = tensor.detach().contiguous().reshape(-1)
    return str(tensor.dtype).encode() + bytes(value.view(torch.uint8).tolist())


def assert_same(a: dict[str, bytes], b: dict[str, bytes]) -> None:
    """Equal, or the names of what differs."""
    assert set(a) == set(b), set(a) ^ set(b)
    different = [name for name in a if a[name] != b[name]]
    assert not different, different


def saved(folder: Path, steps: int = 2, **kw: Any) -> tuple[Any, oarlock.Loader, Path]:
    """An engine trained for some steps and saved into ``folder``."""
    engine, loader = build(**kw)
    run(engine, loader, steps)
    path = oarlock.Checkpoints(folder).save(engine, loader)
    assert path is not None
    return engine, loader, path
