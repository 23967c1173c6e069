"""The hidden way back: whoever reads a weight, and however, sees the updated one."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call

import oarlock
from oarlock.engine.weights import PendingWeight


class Net(nn.Module):
    """Modules called twice, out of order, or not at all, and weights read outside their module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.twice = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)
        self.free = nn.Parameter(torch.ones(8))
        self.rnn = nn.LSTM(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.late(self.twice(torch.tanh(self.twice(self.embed(ids)))))
        x, _ = self.rnn(x * self.free)
        return nn.functional.linear(x, self.embed.weight)


def _loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
    logits = model(ids)
    return nn.functional.cross_entropy(logits, ids, reduction="sum"), len(ids)


class Slow:
    """A wire that brings each bucket of weights 50 ms late, poisoned until then."""

    def __init__(self, wire: Any, rank: int) -> None:
        self.wire, self.rank = wire, rank

    def to_owners(self, *args: Any) -> Any:
        return self.wire.to_owners(*args)

    def to_all(self, flat: Tensor) -> Any:
        self.wire.wait(self.wire.to_all(flat), "bringing weights")
        right = flat.clone()
        flat.fill_(float("nan"))
        return (flat, right, time.monotonic() + 0.05)

    def wait(self, handle: Any, doing: str) -> None:
        if isinstance(handle, tuple):
            flat, right, due = handle
            time.sleep(max(0.0, due - time.monotonic()))
            flat.copy_(right)
        else:
            self.wire.wait(handle, doing)


def _trained(world: oarlock.World, slow: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"sharding": 1, "bucket_mb": 0.0003, "guard_every": 0, **options}
    engine = oarlock.DataParallel(model, optimizer, world, **options)
    if slow:
        engine.exchange.wire = Slow(engine.exchange.wire, world.rank)
    loader = oarlock.Loader(torch.arange(80) % 10, 16, 4, world=world)
    for batch in loader:
        engine.step(batch, _loss)
    return engine


def _pickled(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()


def _called(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"out": functional_call(model, dict(model.named_parameters()), torch.arange(10))}


READERS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "state_dict": lambda m: m.state_dict(),
    "forward": lambda m: {"out": m(torch.arange(10)).detach()},
    "evaluation": lambda m: {"out": m.eval()(torch.arange(10)).detach()},
    "deepcopy": lambda m: copy.deepcopy(m).state_dict(),
    "torch.save": _pickled,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).state_dict(),
    "data": lambda m: {n: p.data for n, p in m.named_parameters()},
    "detach": lambda m: {n: p.detach() for n, p in m.named_parameters()},
    "numpy": lambda m: {n: torch.tensor(p.detach().numpy()) for n, p in m.named_parameters()},
    "vector": lambda m: {"all": nn.utils.parameters_to_vector(m.parameters()).detach()},
    "stack of several": lambda m: {"all": torch.cat([p.flatten() for p in m.parameters()])},
    "functional_call": _called,
    "double": lambda m: {n: p.detach() for n, p in copy.deepcopy(m).double().named_parameters()},
    "print": lambda m: {"text": torch.tensor(list(repr(list(m.parameters())).encode()))},
    "last one first": lambda m: {n: p.detach() for n, p in reversed(list(m.named_parameters()))},
    "one element": lambda m: {"one": torch.tensor([float(p.flatten()[0]) for p in m.parameters()])},
    "memory": lambda m: {"memory": torch.tensor([p.data_ptr() > 0 for p in m.parameters()])},
}


def _read(world: oarlock.World) -> list[str]:
    wrong = []
    for name, read in READERS.items():
        late, prompt = _trained(world, slow=True), _trained(world, slow=False, overlap=False)
        assert all(type(p) is PendingWeight for p in late.model.parameters())
        assert all(type(p) is nn.Parameter for p in prompt.model.parameters())
        got, want = read(late.model), read(prompt.model)
        same = set(got) == set(want) and all(torch.equal(got[k], want[k]) for k in want)
        if not same:
            wrong.append(name)
        if name != "forward" and name != "evaluation" and name != "functional_call":
            leftover = [n for n, p in late.model.named_parameters() if type(p) is not nn.Parameter]
            if leftover:
                wrong.append(f"{name}: {leftover} still pending")
        late.exchange.synchronize()
    return wrong


def test_every_reader_sees_updated_weights() -> None:
    assert run_ranks(_read, 2) == [[], []]


def _facts(world: oarlock.World) -> list[Any]:
    model = _trained(world, slow=True).model
    p = model.late.weight
    facts = [p.shape, p.dtype, p.device, p.requires_grad, p.grad, p.numel(), p.size(0), p.dim()]
    p.grad = None
    return [*facts, type(p) is PendingWeight, isinstance(p, nn.Parameter)]


def test_facts_about_a_weight_wait_for_nothing() -> None:
    facts = run_ranks(_facts, 2)[0]
    shape = torch.Size([8, 8])
    assert facts[:8] == [shape, torch.float32, torch.device("cpu"), True, None, 64, 8, 2]
    assert facts[8:] == [True, True]


class _Kernel(torch.autograd.Function):
    """Takes memory without asking the tensor, as custom kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            assert bool(torch.isfinite(weight).all())
            return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, grad.sum(0)


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return _Kernel.apply(x, self.weight)


def _custom_kernel(world: oarlock.World) -> bool:
    model = nn.Sequential(nn.Linear(5, 5), _Custom())
    engine = oarlock.DataParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), world, sharding=2, guard_every=0
    )
    engine.exchange.wire = Slow(engine.exchange.wire, world.rank)
    for batch in oarlock.Loader(torch.randn(16, 5), 4, 2, world=world):
        engine.step(batch, lambda m, x: (m(x).square().sum(), len(x)))
    return type(model[1].weight) is PendingWeight


def test_a_module_with_a_kernel_of_its_own_waits_before_its_forward() -> None:
    assert run_ranks(_custom_kernel, 2) == [True, True]


def _compiled_inside(world: oarlock.World) -> list[str]:
    """A loss function that compiles by itself: its guards look at types."""
    engine = _trained(world, slow=False)
    inner = torch.compile(engine.model.twice, backend="eager")

    def loss_fn(model: Any, ids: Tensor) -> tuple[Tensor, int]:
        return inner(model.embed(ids)).square().sum(), len(ids)

    kinds = []
    for batch in oarlock.Loader(torch.arange(64) % 10, 16, 4, world=world):
        engine.step(batch, loss_fn)
        kinds.append(type(engine.model.late.weight).__name__)
    return kinds


def test_nothing_is_hidden_from_compiled_code() -> None:
    assert run_ranks(_compiled_inside, 2) == [["Parameter"] * 4] * 2


def _closed_at_once(world: oarlock.World) -> Tensor:
    engine = _trained(world, slow=False)
    world.close()
    return nn.utils.parameters_to_vector(engine.model.parameters()).detach()


def test_leaving_waits_for_weights_under_way() -> None:
    one, other = run_ranks(_closed_at_once, 2)
    assert torch.equal(one, other)


@pytest.mark.parametrize("rung", [1, 2])
def test_hiding_changes_no_bit(rung: int) -> None:
    shown = run_ranks(_weights, 2, rung, False)
    hidden = run_ranks(_weights, 2, rung, True)
    for a in (*shown, *hidden):
        assert torch.equal(a, shown[0])


def _weights(world: oarlock.World, rung: int, overlap: bool) -> Tensor:
    model = _trained(world, slow=False, sharding=rung, overlap=overlap).model
    return nn.utils.parameters_to_vector(model.parameters()).detach()
