"""Numbers that are not finite: who computed the first one, from which rows, and what then."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.batches import Batch, MicroBatch
from oarlock.engine.dtensors import is_sharded, local
from oarlock.engine.exchange import Alone
from oarlock.engine.names import named_parameters
from oarlock.engine.precision import Precision
from oarlock.errors import NonFiniteError
from oarlock.randomness import own_random_state
from oarlock.world import World

log = logging.getLogger("oarlock")

MANY_SKIPS = 10  # fp16: a start at a scale of 2^16 skips a few; more is worth a word

Run = Callable[[MicroBatch], tuple[Tensor, Any]]


class NonFinite:
    """The policy: 'stop' (raise), 'skip' (as if the step had not been) or 'continue'.

    After the exchange the sum no longer shows whose gradient was bad. So the micro-batches are run
    once more, one by one and with the same random numbers, looking at every module's output: it
    costs one step, and only when one has gone wrong.
    """

    def __init__(self, policy: str, model: nn.Module, world: World, precision: Precision) -> None:
        self.policy, self.model, self.world, self.precision = policy, model, world, precision
        self._kept: list[Tensor] | None = None

    def begin(self) -> None:
        """Keep the buffers, where a skipped step will have to put them back."""
        if self.policy == "skip" or self.precision.name == "fp16":
            self._kept = [b.clone() for b in self.model.buffers()]

    def handle(self, loss: float, norm: float, batch: Batch, run: Run, exchange: Alone) -> bool:
        """The step's numbers are not finite. True: skip the update; False: make it all the same.

        Collective; all ranks decide alike, since they see the same global numbers.

        Raises:
            NonFiniteError: under the policy 'stop'.
        """
        skip = self.precision.overflowed()
        if skip and self.precision.skipped == MANY_SKIPS and self.world.is_main:
            log.warning(
                "Step %d: %d updates in a row were skipped, the loss scale is down to %g (loss %g, "
                "gradient norm %g). If this goes on, numbers overflow in fp16 itself or a row is "
                "bad: the run then stops and names it. bf16 has no such limit.",
                self.world.steps + 1,
                MANY_SKIPS,
                self.precision.scale,
                loss,
                norm,
            )
        if not skip:
            message = self._message(loss, norm, batch, run, exchange)
            if self.policy == "stop":
                raise NonFiniteError(message)
            if self.world.is_main:
                log.warning("%s (policy: %s)", message.splitlines()[0], self.policy)
            skip = self.policy == "skip"
        if skip and self._kept is not None:
            self._restore(self._kept)
        return skip

    def _restore(self, kept: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(before)

    def _message(self, loss: float, norm: float, batch: Batch, run: Run, exchange: Alone) -> str:
        gradient = exchange.bad_gradient()
        buffers = [b.clone() for b in self.model.buffers()]
        with own_random_state(self.world.device):
            mine = find_bad_number(self.model, batch.micro_batches, lambda m: run(m)[0], exchange)
        self._restore(buffers)
        found = [
            (bad.micro_batch, rank, host, bad)
            for rank, (host, bad) in enumerate(self.world.gather((self.world.host, mine)))
            if bad is not None
        ]
        what = "gradient" if math.isfinite(loss) else "loss"
        head = f"Step {self.world.steps + 1} (epoch {batch.epoch}, batch {batch.step}): the {what} "
        if not found and gradient:
            return (
                f"{head}is not finite: the sum of the gradients of {gradient}, while the outputs "
                "of all modules are finite.\nNo update was made. At this sharding it is not known "
                "from which micro-batch it comes; lower the learning rate, clip the gradient "
                "(clip_norm), or choose nonfinite='skip' to leave such steps out."
            )
        if not found:
            return (
                f"{head}is not finite (loss {loss}, gradient norm {norm}), but running the "
                "micro-batches again gives finite numbers.\nThe sum overflowed, an operation is "
                "not deterministic, or a device or link is faulty."
            )
        # A bad loss before a bad gradient: synchronised layers hand gradients to other ranks.
        index, rank, host, bad = min(
            found, key=lambda f: (f[3].what.startswith("the gradient"), f[0], f[1])
        )
        rows = f", rows {list(bad.rows[:16])}{'…' if len(bad.rows) > 16 else ''}" * bool(bad.rows)
        where = f"micro-batch {index}{rows}" if index >= 0 else "before any micro-batch"
        return (
            f"{head}is not finite: first in {bad.what}, on rank {rank} ({host}), {where}.\n"
            "No update was made. Look at these rows; lower the learning rate or clip the gradient "
            "(clip_norm); or choose nonfinite='skip' to leave such steps out."
        )


@dataclass
class BadNumber:
    """The first number that is not finite on some rank."""

    micro_batch: int
    rows: tuple[int, ...]
    what: str


def find_bad_number(
    model: nn.Module,
    micro_batches: Sequence[Any],
    run: Callable[[Any], Tensor],
    exchange: Alone,
) -> BadNumber | None:
    """Run micro-batches again, one by one, and find the first tensor that is not finite.

    ``run`` does one micro-batch's forward with its own random numbers and returns the loss sum.
    Costs a step on each rank, and only when a step has gone wrong.
    """
    # Where ranks hold shards they meet in each forward, and none can run a backward alone.
    sharded = any(is_sharded(p) for p in model.parameters())
    found: BadNumber | None = None
    for name, p in named_parameters(model):
        if not _finite(local(p)):
            found = BadNumber(-1, (), f"the parameter {name} itself, before the step")
            break
    if found and not sharded:
        return found
    # All of them on every rank, also after the find: a synchronised BatchNorm meets in each pass.
    with torch.set_grad_enabled(not sharded):
        for micro_batch, counts in exchange.rounds(micro_batches):
            what = _bad_in(model, micro_batch, run)
            if what and counts and found is None:
                found = BadNumber(micro_batch.index, micro_batch.rows, what)
    return found


def _bad_in(model: nn.Module, micro_batch: Any, run: Callable[[Any], Tensor]) -> str:
    """What is first not finite in one micro-batch's forward and backward; empty where nothing."""
    first: list[str] = []
    hooks = [m.register_forward_hook(_watch(n, first)) for n, m in model.named_modules()]
    try:
        loss = run(micro_batch)
    finally:
        for hook in hooks:
            hook.remove()
    bad = [f"the output of {name}" for name in first]
    if not _finite(loss):
        bad.append("the loss")
    if loss.requires_grad:
        parameters = [(n, p) for n, p in named_parameters(model) if p.requires_grad]
        grads = torch.autograd.grad(loss, [p for _, p in parameters], allow_unused=True)
        # last layer first, as backward goes
        for (name, _), grad in reversed(list(zip(parameters, grads, strict=True))):
            if grad is not None and not _finite(grad):
                bad.append(f"the gradient of {name}")
    return bad[0] if bad else ""


def _watch(name: str, first: list[str]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if first:
            return
        for tensor in _tensors(output):
            if not _finite(tensor):
                first.append(f"{name or 'the model'} ({type(module).__name__})")
                return

    return hook


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []
