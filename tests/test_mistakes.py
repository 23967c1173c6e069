"""What a user can get wrong with the engine: each is refused early, on every rank, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oarlock
from oarlock.errors import OarlockError

SGD = torch.optim.SGD


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def _loss(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
    return model(data).square().sum(), len(data)


def _engine(world: oarlock.World, **options: Any) -> oarlock.DataParallel:
    torch.manual_seed(0)
    model = _net()
    return oarlock.DataParallel(model, SGD(model.parameters(), lr=0.1), world, **options)


def _loader(world: oarlock.World, rows: int = 8, batch: int = 4, **options: Any) -> oarlock.Loader:
    data = torch.linspace(-1, 1, 2 * rows).view(rows, 2)
    return oarlock.Loader(data, batch, options.pop("micro", 1), world=world, **options)


def _said(action: Callable[[], Any]) -> tuple[str, str]:
    """The class and the message of what ``action`` raises."""
    try:
        action()
    except OarlockError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# -- at construction, on one rank ---------------------------------------------------------------


def _wrapped() -> tuple[Any, Any]:
    model = _net()
    return nn.DataParallel(model), SGD(model.parameters(), lr=0.1)


def _stranger() -> tuple[Any, Any]:
    model = _net()
    return model, SGD([*model.parameters(), nn.Parameter(torch.ones(5, 7))], lr=0.1)


def _copied() -> tuple[Any, Any]:
    return _net(), SGD(_net().parameters(), lr=0.1)


def _forgetful() -> tuple[Any, Any]:
    model = _net()
    return model, SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]


def _lazy() -> tuple[Any, Any]:
    model = nn.Sequential(nn.LazyLinear(3))
    return model, SGD(model.parameters(), lr=0.1)


def _complex() -> tuple[Any, Any]:
    model = _net()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model, SGD(model.parameters(), lr=0.1)


def _sparse() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    return model, SGD(model.parameters(), lr=0.1)


def _frozen() -> tuple[Any, Any]:
    model = _net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    return model, optimizer


def _of(kind: Any) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        model = _net()
        return model, kind(model.parameters())

    return build


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_wrapped, ["wrapped in DataParallel", "model.module"]),
        (_stranger, ["1 parameter that the model has not", "[5, 7]"]),
        (_copied, ["4 parameters that the model has not", "[3, 2]"]),
        (_forgetful, ["does not hold 2 trainable", "2.weight, 2.bias"]),
        (_lazy, ["Lazy parameters", "0.weight", "one forward"]),
        (_complex, ["phase", "view_as_real"]),
        (_sparse, ["0 gives sparse gradients", "sparse=False"]),
        (_frozen, ["No parameter of the model is trainable"]),
        (_of(torch.optim.LBFGS), ["LBFGS", "closure"]),
        (_of(torch.optim.SparseAdam), ["SparseAdam"]),
        (lambda: (_net(), "adam"), ["optimizer is a str"]),
        (lambda: ("model", None), ["model is a str"]),
        (lambda: (nn.Linear(2, 2, device="meta"), None), ["weight, bias on meta", ".to("]),
    ],
)
def test_what_cannot_be_trained(build: Callable[[], tuple[Any, Any]], words: list[str]) -> None:
    model, optimizer = build()
    kind, message = _said(lambda: oarlock.DataParallel(model, optimizer, oarlock.World("cpu")))
    assert kind == "SetupError"
    for word in words:
        assert word in message


def test_schedulers_that_do_not_fit() -> None:
    schedulers = torch.optim.lr_scheduler
    model = _net()
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    for scheduler, words in (
        (schedulers.ReduceLROnPlateau(optimizer), "ReduceLROnPlateau needs a measured value"),
        (schedulers.ConstantLR(other), "of this very optimizer"),
        (0.1, "must be a learning-rate scheduler"),
    ):
        kind, message = _said(
            lambda s=scheduler: oarlock.DataParallel(  # type: ignore[misc]
                model, optimizer, oarlock.World("cpu"), scheduler=s
            )
        )
        assert kind == "SetupError"
        assert words in message


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0},
        {"clip_norm": -1.0},
        {"clip_norm": float("nan")},
        {"clip_norm": "1"},
        {"bucket_mb": 0},
        {"bucket_mb": -3},
        {"bucket_mb": float("nan")},
        {"bucket_mb": "25"},
        {"guard_every": -1},
        {"guard_every": 1.5},
        {"nonfinite": "ignore"},
        {"precision": "fp8"},
        {"precision": None},
        {"sharding": 7},
        {"seed": "x"},
        {"seed": -1},
    ],
    ids=str,
)
def test_impossible_settings(options: dict[str, Any]) -> None:
    kind, message = _said(lambda: _engine(oarlock.World("cpu"), **options))
    (name, value) = next(iter(options.items()))
    assert kind in ("ConfigError", "SetupError")
    assert message.startswith(f"{name} is {value!r}; ")


# -- in the first step, on one rank -------------------------------------------------------------


def _vector(model: nn.Module, data: Tensor) -> Any:
    return model(data).square().sum(1), len(data)


def _detached(model: nn.Module, data: Tensor) -> Any:
    return model(data).detach().sum(), len(data)


LOSSES: list[tuple[Callable[[nn.Module, Tensor], Any], str, list[str]]] = [
    (_vector, "SetupError", ["scalar tensor", "not [1]", "reduction='sum'"]),
    (_detached, "SetupError", ["does not depend on any trainable parameter"]),
    (lambda m, d: _loss(m, d)[0], "SetupError", ["(loss_sum, weight)", "returned a Tensor"]),
    (lambda m, d: (*_loss(m, d), 1), "SetupError", ["(loss_sum, weight)", "returned a tuple"]),
    (lambda m, d: None, "SetupError", ["(loss_sum, weight)", "returned a NoneType"]),
    (lambda m, d: (1.5, 2), "SetupError", ["scalar tensor", "not float"]),
    (lambda m, d: (_loss(m, d)[0], None), "SetupError", ["weight", "not None"]),
    (lambda m, d: (_loss(m, d)[0], -1), "SetupError", ["weight", "not negative", "-1"]),
    (lambda m, d: (_loss(m, d)[0], float("nan")), "SetupError", ["weight", "nan"]),
    (lambda m, d: (_loss(m, d)[0], float("inf")), "SetupError", ["weight", "inf"]),
    (lambda m, d: (_loss(m, d)[0], torch.ones(2)), "SetupError", ["weight"]),
    (lambda m, d: (_loss(m, d)[0], 0), "DataError", ["Step 1", "total weight is zero"]),
]


@pytest.mark.parametrize("case", range(len(LOSSES)))
def test_what_a_loss_function_must_return(case: int) -> None:
    loss_fn, expected, words = LOSSES[case]
    world = oarlock.World("cpu")
    engine, batch = _engine(world), next(iter(_loader(world)))
    before = [p.clone() for p in engine.model.parameters()]
    kind, message = _said(lambda: engine.step(batch, loss_fn))
    assert kind == expected
    for word in words:
        assert word in message
    for p, was in zip(engine.model.parameters(), before, strict=True):
        assert torch.equal(p, was), "no update is made"


def test_what_is_no_batch() -> None:
    engine = _engine(oarlock.World("cpu"))
    for wrong, kind, words in (
        (torch.ones(2, 2), "SetupError", "not a Tensor"),
        (None, "SetupError", "not a NoneType"),
        ([], "DataError", "Step 1 has no micro-batch on any rank"),
    ):
        said = _said(lambda given=wrong: engine.step(given, _loss))  # type: ignore[misc]
        assert said[0] == kind
        assert words in said[1]
