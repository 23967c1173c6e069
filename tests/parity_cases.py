"""The table of what must come out the same on any number of ranks as in one plain process.

Adam divides each gradient by its own size, so where a gradient is zero but for rounding, it makes
a full step of the rounding error, and two correct programs part. The models here therefore have no
bias before a BatchNorm and nothing else whose true gradient is zero without being exactly zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from parity_models import (
    LM,
    MLP,
    BatchNormNet,
    Buffered,
    Checkpointed,
    DigitsNet,
    Dropping,
    Mixed,
    Odd,
    Router,
    llama,
    llama_lora,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        model, rows, loss, collate: as a user has them.
        optimizer: from the model. scheduler: from the optimizer.
        batch, micro: rows in a global batch, in a micro-batch. steps: how many updates.
        engine: arguments of DataParallel.
        shares: world size → shares of the ranks.
        reference: 'whole' is plain PyTorch on the concatenated batch; 'in order' is one plain
            process that runs the micro-batches one after the other (where the result depends on
            how the batch is cut: BatchNorm, casts); 'one rank' is the engine itself on one rank
            (random numbers, whose seeds are the engine's own).
        worlds: the sizes to run on.
        wide: also in float64, to 1e-12.
        tolerance: greatest relative difference of a tensor in float32.
    """

    model: Callable[[], nn.Module]
    rows: Sequence[Any]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch: int = 12
    micro: int = 3
    steps: int = 10
    engine: dict[str, Any] = field(default_factory=dict)
    shares: dict[int, list[float]] = field(default_factory=dict)
    reference: str = "whole"
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    wide: bool = True
    tolerance: float = 1e-6


# -- data --------------------------------------------------------------------------------------


def _points(count: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(count)
    return [(torch.randn(6, generator=g), torch.randn(3, generator=g)) for _ in range(count)]


def _numbered(count: int) -> list[tuple[Tensor, Tensor, int]]:
    return [(x, y, i) for i, (x, y) in enumerate(_points(count))]


def _tokens(count: int, vocabulary: int = 40) -> list[dict[str, Tensor]]:
    """Rows of unequal length; from 0 to 30 of their tokens are targets, most often 2 or 30."""
    g = torch.Generator().manual_seed(1)
    targets = [2, 30, 0, 30, 2, 1, 11, 0, 30, 2, 2, 0, 5]
    rows = []
    for i in range(count):
        wanted = targets[i % len(targets)]
        length = wanted + 2 + i % 3
        ids = torch.randint(0, vocabulary, (length,), generator=g)
        labels = ids.clone()
        labels[: length - wanted] = -100
        rows.append({"ids": ids, "labels": labels})
    return rows


def _pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def padded(name: str, value: int) -> Tensor:
        parts = [r[name] for r in rows]
        return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    mask = [torch.ones_like(r["ids"]) for r in rows]
    return {
        "ids": padded("ids", 0),
        "labels": padded("labels", -100),
        "mask": nn.utils.rnn.pad_sequence(mask, batch_first=True),
    }


def _digits(count: int) -> list[tuple[Tensor, int]]:
    digits = load_digits()
    images = torch.tensor(digits.images[:count] / 16, dtype=torch.float32).unsqueeze(1)
    return [(image, int(label)) for image, label in zip(images, digits.target, strict=False)]


# -- losses ------------------------------------------------------------------------------------


def squares(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    """Squared error, summed; weight: rows."""
    return (model(data[0]) - data[1]).square().sum(), len(data[0])


def _of(pick: Callable[[Any], Tensor]) -> Callable[[nn.Module, Any], tuple[Tensor, int]]:
    def loss(model: nn.Module, data: Any) -> tuple[Tensor, int]:
        return (pick(model(data[0])) - data[1]).square().sum(), len(data[0])

    return loss


def _weighted(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """Rows with fractional weights from 0.01 to 10; the weight comes as a tensor."""
    weights = 10.0 ** (data[2].to(data[0].dtype) % 4 - 2)
    errors = (model(data[0]) - data[1]).square().sum(1)
    return (errors * weights).sum(), weights.sum().double()


def _next_token(model: nn.Module, data: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits, labels = model(data["ids"])[:, :-1], data["labels"][:, 1:]
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss, int((labels != -100).sum())


def _next_token_or_nothing(model: nn.Module, data: dict[str, Tensor]) -> tuple[Tensor, int]:
    """As above, but a micro-batch without targets runs nothing: its zero has no graph."""
    if (data["labels"][:, 1:] == -100).all():
        return torch.zeros(()), 0
    return _next_token(model, data)


def _causal(model: nn.Module, data: dict[str, Tensor]) -> tuple[Tensor, int]:
    def forward(ids: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=data["mask"], use_cache=False).logits

    return _next_token(forward, data)  # type: ignore[arg-type]


def _classes(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(data[0]), data[1], reduction="sum"), len(data[1])


def _penalised(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    """A gradient penalty: a backward inside the loss function."""
    x = data[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - data[1]).square().sum() + slope.square().sum(), len(x)


def _noisy(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    """Random numbers of Python, NumPy and torch in the loss function."""
    factor = random.random() + float(np.random.rand()) + torch.rand(())
    loss, weight = squares(model, data)
    return loss * factor, weight


def _overflowing(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    """Row 5's gradient is beyond any float: only the rank that runs it sees that."""
    loss, weight = squares(model, data)
    return loss * (1e38 if 5 in data[2].tolist() else 1.0), weight


# -- optimizers --------------------------------------------------------------------------------


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0, "lr": 1e-2}, {"params": matrices}], lr=1e-3
    )


def _warmup(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 4, 8 / (n + 1)))


def _cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    # also changes the momentum at every update
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=12)


# -- the table ---------------------------------------------------------------------------------

_POINTS, _FEW, _ONE = _points(40), _points(2), _points(1)
_ROWS = _numbered(31)
_TEXT = _tokens(26)
_IMAGES = _digits(60)
_UNEQUAL = {2: [6.0, 2.0], 3: [1.0, 5.0, 2.0], 4: [5.0, 0.0, 2.0, 1.0]}
_IDLE = {2: [8.0, 0.0], 3: [0.0, 1.0, 0.0], 4: [0.0, 0.0, 3.0, 5.0]}
_TINY_BUCKETS = {"bucket_mb": 1e-4}


def _plain(**changes: Any) -> Case:
    settings = {"model": MLP, "rows": _POINTS, "loss": squares, "optimizer": _adamw}
    return Case(**{**settings, **changes})


def _text(**changes: Any) -> Case:
    settings = {"rows": _TEXT, "loss": _next_token, "optimizer": _adamw, "collate": _pad}
    return Case(**{"model": LM, "batch": 8, "micro": 1, **settings, **changes})


def _pictures(**changes: Any) -> Case:
    settings = {"rows": _IMAGES, "loss": _classes, "optimizer": _adamw, "batch": 14, "micro": 4}
    return Case(**{"model": DigitsNet, **settings, **changes})


def _norms(**changes: Any) -> Case:
    # Of what a BatchNorm net computes, a hundredth part is rounding after ten steps of Adam in
    # float32: it is compared to 1e-6 with SGD, and to 1e-12 in float64 either way.
    return _pictures(
        **{"model": BatchNormNet, "reference": "in order", "optimizer": _sgd} | changes
    )


CASES: dict[str, Case] = {
    "equal micro-batches": _plain(),
    "equal micro-batches, sgd": _plain(optimizer=_sgd),
    "unequal micro-batches, partial batch": _plain(rows=_points(23), batch=10, micro=4),
    "unequal micro-batches, partial batch, sgd": _plain(
        rows=_points(23), batch=10, micro=4, optimizer=_sgd
    ),
    **{
        f"{count} micro-batches": _plain(
            rows=_points(2 * count + 1), batch=2 * count, micro=2, wide=count in (5, 32)
        )
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)  # 1 to 8 on a rank, whatever the world
    },
    "micro-batch larger than the batch": _plain(batch=5, micro=99),
    "dataset smaller than the world": _plain(rows=_FEW, batch=8, micro=1),
    "one row": _plain(rows=_ONE, batch=1, micro=1),
    "shares": _plain(batch=8, micro=1, shares=_UNEQUAL),
    "idle ranks": _plain(batch=8, micro=1, shares=_IDLE, optimizer=_sgd),
    "clipping": _plain(engine={"clip_norm": 0.5}, optimizer=_sgd),
    "clipping that never bites": _plain(engine={"clip_norm": 1e6}),
    "fused": _plain(optimizer=_fused, engine=_TINY_BUCKETS),
    "several groups": _plain(optimizer=_groups, scheduler=_cosine),
    "warm-up": _plain(scheduler=_warmup, batch=8, micro=1),
    "one cycle": _plain(scheduler=_one_cycle, optimizer=_groups),
    "fractional weights": _plain(rows=_ROWS, loss=_weighted, batch=9, micro=2),
    "tuple": _plain(model=lambda: MLP("tuple"), loss=_of(lambda out: out[0]), wide=False),
    "dict": _plain(model=lambda: MLP("dict"), loss=_of(lambda out: out["y"]), wide=False),
    "dataclass": _plain(model=lambda: MLP("dataclass"), loss=_of(lambda out: out.y), wide=False),
    "tiny buckets": _plain(engine=_TINY_BUCKETS),
    "no overlap": _plain(engine={"overlap": False, **_TINY_BUCKETS}),
    "gradient penalty": _plain(loss=_penalised),
    "two dtypes": _plain(model=Mixed, wide=False),
    "scalars and strange strides": _plain(model=Odd, engine=_TINY_BUCKETS),
    # Row i goes through expert i // 10 alone: in most steps some ranks, in some steps all ranks
    # leave an expert out, and a fourth one is never used. SGD's momentum and AdamW's decay would
    # move what nobody used, if its gradient were zero instead of missing.
    "routed": _plain(model=Router, rows=_ROWS, loss=Router.loss, batch=3, micro=1, steps=22),
    "routed, sgd": _plain(
        model=Router, rows=_ROWS, loss=Router.loss, batch=3, micro=1, steps=22, optimizer=_sgd
    ),
    "routed, tiny buckets": _plain(
        model=Router, rows=_ROWS, loss=Router.loss, batch=6, micro=2, engine=_TINY_BUCKETS
    ),
    "tokens": _text(),
    "tokens, pairs": _text(micro=2, batch=7, scheduler=_warmup, engine={"clip_norm": 1.0}),
    "tokens, nothing run without targets": _text(loss=_next_token_or_nothing, optimizer=_sgd),
    "tokens, untied": _text(model=lambda: LM(tied=False)),
    "tokens, frozen": _text(model=lambda: LM(tied=False, frozen=True)),
    "llama": _text(model=llama, loss=_causal, engine={"clip_norm": 1.0}, steps=10, wide=False),
    "llama, untied": _text(
        model=lambda: llama(tied=False), loss=_causal, steps=10, micro=2, wide=False
    ),
    "llama, lora, checkpointing": _text(
        model=llama_lora, loss=_causal, steps=10, worlds=(1, 2), wide=False
    ),
    "digits": _pictures(steps=20),
    "digits, sgd": _pictures(optimizer=_sgd, engine=_TINY_BUCKETS),
    "batchnorm": _norms(),
    "batchnorm, adamw": _norms(optimizer=_adamw, tolerance=2e-5),
    "batchnorm, idle ranks": _norms(shares=_IDLE, micro=2),
    "batchnorm, cumulative": _norms(model=lambda: BatchNormNet(momentum=None)),
    "batchnorm, called twice": _norms(model=lambda: BatchNormNet(twice=True)),
    "batchnorm, frozen": _norms(model=lambda: BatchNormNet(frozen=True)),
    "buffers": _plain(model=Buffered, reference="in order"),
    "checkpointing": _plain(model=lambda: Checkpointed(use_reentrant=False)),
    "checkpointing, reentrant, no overlap": _plain(
        model=lambda: Checkpointed(use_reentrant=True), engine={"overlap": False}
    ),
    "compiled": _plain(
        model=lambda: torch.compile(MLP(), backend="aot_eager"), worlds=(1, 2), wide=False
    ),
    "bf16": _plain(engine={"precision": "bf16"}, reference="in order", wide=False, tolerance=1e-4),
    "fp16": _plain(
        engine={"precision": "fp16"},
        rows=_ROWS,
        loss=_overflowing,
        reference="in order",
        wide=False,
        tolerance=1e-4,
        steps=20,
    ),
    "dropout": _plain(model=Dropping, reference="one rank", batch=8, micro=1),
    "noise": _plain(loss=_noisy, reference="one rank", batch=8, micro=1, shares=_UNEQUAL),
    "dropout in checkpointing": _plain(
        model=lambda: Checkpointed(use_reentrant=False, dropout=0.3), reference="one rank"
    ),
}
