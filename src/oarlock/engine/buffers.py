"""Buffers: what one process running all micro-batches in order would hold, on every rank."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from oarlock.engine.agreement import Agreement
from oarlock.engine.names import clean, named_buffers
from oarlock.errors import SetupError
from oarlock.world import World

log = logging.getLogger("oarlock")


class Buffers:
    """Keeps the model's buffers alike on all ranks.

    BatchNorm's running statistics are an exponential average over micro-batches, which is linear:
    from r the average goes to (1-m)^k r + Σ m (1-m)^(k-1-i) s_i after k micro-batches. A rank
    started from the same r and knows k, so its own part Σ… can be taken out, decayed by the
    micro-batches that come after it on later ranks, and summed. The result is exactly (to
    rounding) that of one process, on any number of ranks.

    Other buffers that a forward changed: whole-number scalars are counters, their increments are
    summed; the rest is taken from the rank that ran the last micro-batch, whose value one process
    would hold at the end if each forward overwrites it. That is said once.

    In reproducible mode each micro-batch's forward starts BatchNorm's statistics from zero (while
    training it doesn't read them), and all ranks repeat the average over all micro-batches, in
    order: the same bits whoever ran them, for V times the statistics in memory.
    """

    def __init__(self, model: nn.Module, world: World, reproducible: bool = False) -> None:
        self.world, self._reproducible = world, reproducible
        self._norms = [
            (clean(name), module)
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm)
            and module.track_running_stats
            and module.running_mean is not None
        ]
        handled = {
            id(b)
            for _, m in self._norms
            for b in (m.running_mean, m.running_var, m.num_batches_tracked)
        }
        # A synchronised layer's statistics are over all ranks already, and alike on all.
        self._norms = [
            (n, m) for n, m in self._norms if not isinstance(m, nn.SyncBatchNorm | _GlobalBatchNorm)
        ]
        self._model = model
        self._others = [n for n, b in named_buffers(model) if id(b) not in handled]
        self._told: set[str] = set()
        # The reference point and the wide type for the linear combination
        self._wide = torch.float32 if world.device.type == "mps" else torch.float64

    def _other(self) -> list[Tensor]:
        buffers = dict(named_buffers(self._model))
        return [buffers[n] for n in self._others]

    def begin(self) -> None:
        """Remember the state at the start of a step."""
        self._active = [m for _, m in self._norms if m.training]
        self._before = [
            (m.running_mean.clone(), m.running_var.clone(), m.num_batches_tracked.clone())  # type: ignore[union-attr]
            for m in self._active
        ]
        self._seen: dict[int, list[Tensor]] = {}
        others = self._other() if self._others else []
        self._versions = [(b, b._version) for b in others]  # held: an id could be used again
        self._counters = [b.clone() if _is_counter(b) else None for b in others]

    def before_forward(self) -> None:
        """A micro-batch's forward follows."""
        if self._reproducible:
            for m in self._active:
                for buffer in (m.running_mean, m.running_var, m.num_batches_tracked):
                    buffer.zero_()  # type: ignore[union-attr,operator]

    def after_forward(self, index: int) -> None:
        """Micro-batch ``index`` has been run."""
        if not self._reproducible or not self._active:
            return
        parts = []
        for m, before in zip(self._active, self._before, strict=True):
            held: Any = (m.running_mean, m.running_var, m.num_batches_tracked)
            parts.append(torch.cat([buffer.to(self._wide).view(-1) for buffer in held]))
            for buffer, old in zip(held, before, strict=True):  # should the step yet fail
                buffer.data.copy_(old)  # unseen by autograd, which kept it for a backward
        self._seen[index] = parts

    def changed(self) -> list[bool]:
        """For each buffer that is not BatchNorm's: did this rank's forwards write to it?"""
        if not self._others:
            return []
        return [
            b is not held or b._version != version
            for b, (held, version) in zip(self._other(), self._versions, strict=True)
        ]

    @property
    def count(self) -> int:
        """How many flags ``changed`` returns; the same on all ranks."""
        return len(self._others)

    def finish(self, changed: list[bool], agreement: Agreement) -> None:
        """Make the buffers alike: ``changed`` on any rank."""
        if self._active and self._reproducible:
            self._repeat_norms(agreement.batch.count)
        elif self._active and self.world.size > 1:
            self._merge_norms()
        if any(changed) and self.world.size > 1:
            self._merge_others(changed, agreement.last_rank)

    @torch.no_grad()
    def _repeat_norms(self, count: int) -> None:
        for i, (m, (mean, var, tracked)) in enumerate(zip(self._active, self._before, strict=True)):
            width = mean.numel()
            rows = torch.zeros(count, 2 * width + 1, dtype=self._wide, device=mean.device)
            for index, parts in self._seen.items():
                rows[index] = parts[i]
            if self.world.size > 1:
                self._all_reduce(rows)  # each row is zero on all ranks but one: exact
            now = torch.cat([mean, var]).to(self._wide)
            calls = float(tracked)
            for row, new in zip(rows, rows[:, -1].tolist(), strict=True):
                if m.momentum is None:
                    now = (now * calls + row[:-1] * new) / max(calls + new, 1.0)
                else:
                    now = now * (1.0 - m.momentum) ** int(new) + row[:-1]
                calls += new
            m.running_mean.copy_(now[:width])  # type: ignore[union-attr]
            m.running_var.copy_(now[width:])  # type: ignore[union-attr]
            m.num_batches_tracked.fill_(int(calls))  # type: ignore[union-attr,operator]

    def _merge_norms(self) -> None:
        calls = torch.stack(
            [m.num_batches_tracked - b[2] for m, b in zip(self._active, self._before, strict=True)]  # type: ignore[operator]
        ).to(torch.int64)
        gathered = [torch.empty_like(calls) for _ in range(self.world.size)]
        all_calls = torch.stack(self._all_gather(gathered, calls))  # [ranks, norms]
        later = all_calls[self.world.rank + 1 :].sum(0)
        total = all_calls.sum(0)
        parts: list[Tensor] = []
        for i, (m, (mean, var, tracked)) in enumerate(zip(self._active, self._before, strict=True)):
            for now, before in ((m.running_mean, mean), (m.running_var, var)):
                now, before = now.to(self._wide), before.to(self._wide)  # type: ignore[union-attr]
                if m.momentum is None:  # cumulative average: the sum of all statistics so far
                    own = now * (tracked + calls[i]) - before * tracked
                else:
                    keep = torch.tensor(1.0 - m.momentum, dtype=self._wide, device=now.device)
                    own = (now - keep ** calls[i] * before) * keep ** later[i]
                parts.append(own)
        flat = torch.cat(parts)
        self._all_reduce(flat)
        start = 0
        with torch.no_grad():
            for i, (m, (mean, var, tracked)) in enumerate(
                zip(self._active, self._before, strict=True)
            ):
                for now, before in ((m.running_mean, mean), (m.running_var, var)):
                    own = flat[start : start + before.numel()]
                    start += before.numel()
                    if m.momentum is None:
                        new = (before.to(self._wide) * tracked + own) / (tracked + total[i]).clamp(
                            min=1
                        )
                    else:
                        keep = torch.tensor(1.0 - m.momentum, dtype=self._wide, device=own.device)
                        new = keep ** total[i] * before.to(self._wide) + own
                    # a layer that no rank ran keeps its bits
                    now.copy_(torch.where(total[i] > 0, new, before.to(self._wide)))  # type: ignore[union-attr]
                m.num_batches_tracked.copy_(tracked + total[i])  # type: ignore[operator,union-attr]

    def _merge_others(self, changed: list[bool], last_rank: int) -> None:
        told: list[str] = []
        for name, buffer, before, is_changed in zip(
            self._others, self._other(), self._counters, changed, strict=True
        ):
            if not is_changed:
                continue
            if before is not None:
                increment = (buffer - before).to(torch.int64)
                self._all_reduce(increment)
                with torch.no_grad():
                    buffer.copy_(before + increment)
                continue
            if name not in self._told:
                told.append(name)
                self._told.add(name)
            self.world.broadcast_tensor(buffer, source=last_rank)
        if told and self.world.is_main:
            log.warning(
                "Buffers that a forward overwrites are taken from the rank that ran the last "
                "micro-batch: %s",
                ", ".join(told),
            )

    def _all_reduce(self, tensor: Tensor) -> None:
        wire = tensor.cpu() if self.world.staged else tensor
        with self.world.lost_peer("summing buffers"):
            dist.all_reduce(wire)
        if wire is not tensor:
            tensor.copy_(wire)

    def _all_gather(self, out: list[Tensor], mine: Tensor) -> list[Tensor]:
        if self.world.staged:
            out, mine = [t.cpu() for t in out], mine.cpu()
        with self.world.lost_peer("gathering buffers"):
            dist.all_gather(out, mine)
        return [t.to(self.world.device) for t in out]


def _is_counter(buffer: Tensor) -> bool:
    return buffer.dim() == 0 and not buffer.is_floating_point() and buffer.dtype != torch.bool


class _GlobalBatchNorm(_BatchNorm):
    """BatchNorm whose statistics are over the micro-batches that all ranks run at one time.

    For devices where PyTorch's SyncBatchNorm does not run; the differentiable all-reduce of
    ``torch.distributed.nn`` does the communication.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        self._check_input_dim(input)
        if not self.training or dist.get_world_size() == 1:
            return super().forward(input)
        dims = [d for d in range(input.dim()) if d != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = all_reduce(torch.cat([x.sum(dims), count]))
        n, mean = sums[-1], sums[:-1] / sums[-1]
        centred = x - mean.view(shape)
        var = all_reduce((centred * centred).sum(dims)) / n
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                m = self.momentum
                factor = 1.0 / float(self.num_batches_tracked) if m is None else m
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = var * (n / (n - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        y = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)


def synchronise_batch_norm(model: nn.Module, world: World) -> None:
    """Replace BatchNorm layers in place: statistics over all ranks' concurrent micro-batches.

    Parameters and buffers stay the same tensors, so optimizers stay valid. What is computed then
    depends on the number of ranks, and each must run the same number of micro-batches.
    """
    replaced = 0
    for module in model.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            if world.device.type in ("cuda", "xpu") and not world.staged:
                module.__class__ = nn.SyncBatchNorm
                module.process_group = None  # type: ignore[assignment]
            else:
                module.__class__ = _GlobalBatchNorm
            replaced += 1
    if not replaced:
        raise SetupError(
            "sync_batchnorm=True, but the model has no BatchNorm layer that could be synchronised."
        )
