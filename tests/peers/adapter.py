"""DDP's contract over Oarlock's engine: forward, ``loss.backward()``, mean gradients in ``.grad``.

A DDP test computes its loss outside of the model and calls backward itself; ``engine.step`` wants
to do both. They meet in the output's gradient g: inside that backward, the engine makes a step on
the loss (output · g).sum(), whose gradients are those of the test's own loss. The step is the
public one, whole: agreement, buckets, hooks, exchange during backward, division. Only the
optimizer is idle, since a test makes its own update, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree  # what DDP takes outputs apart with

import oarlock
from oarlock.errors import DataError, OarlockError
from oarlock.world import current

# Taken, and needing nothing: a model is where it computes before an engine is built; what a rank
# doesn't use is always found; a graph may change or stay; a forward overwrites no buffers.
_HELD_ANYWAY = {
    "device_ids",
    "output_device",
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
}


class _Idle(torch.optim.Optimizer):
    """Leaves weights and gradients alone."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        return None


class _Border(torch.autograd.Function):
    """Between the model's outputs and the test's loss: backward ends here, and a step is made."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, arrived: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)  # None for an output that the loss does not use
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        with torch.enable_grad():
            ctx.arrived(gradients)
        return (None, None, *(None for _ in gradients))


class Adapter(nn.Module):
    """In the place of ``DistributedDataParallel``.

    Args:
        module: the model.
        bucket_cap_mb: size of a gradient bucket.
        gradient_as_bucket_view: leave the buckets' own memory in ``.grad``, where the engine's
            optimizer would find it; else copies, since a test may keep one for longer than a step.
        forward_sync_buffers: kept for tests that look at it.
        process_group: one of all ranks, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float = 25.0,
        gradient_as_bucket_view: bool = False,
        forward_sync_buffers: bool = True,
        process_group: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        strange = set(others) - _HELD_ANYWAY
        if strange:
            raise TypeError(f"Oarlock has no counterpart of {', '.join(sorted(strange))}.")
        world = current()
        if process_group is not None and dist.get_world_size(process_group) != world.size:
            raise TypeError("Oarlock's engine spans all ranks.")
        self.module = module
        self.forward_sync_buffers = forward_sync_buffers
        self._options = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._trainable = [p for p in module.parameters() if p.requires_grad]
        try:
            self.engine = self._build(world, bucket_cap_mb)
        except OarlockError as error:
            raise RuntimeError(str(error)) from error  # the kind of error that DDP's tests expect
        self._sync = True
        self._divide_by_all = True
        self._earlier: list[Any] = []  # micro-batches of the step to come

    def _build(self, world: oarlock.World, bucket_mb: float) -> oarlock.DataParallel:
        # An optimizer needs a parameter before the engine can say that the model has none.
        optimizer = _Idle(self._trainable or [nn.Parameter(torch.zeros(()))])
        # No guard: some tests make the replicas' buffers differ, and look what becomes of them.
        return oarlock.DataParallel(
            self.module, optimizer, world, bucket_mb=bucket_mb, guard_every=0
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.module(*args, **kwargs)
        leaves, structure = _pytree.tree_flatten(answer)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        if not places:
            return answer
        outputs, sync = [leaves[i] for i in places], self._sync

        def arrived(gradients: tuple[Tensor | None, ...]) -> None:
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
            if pairs:
                self._earlier.append(pairs)
            if sync:
                micro_batches, self._earlier = self._earlier, []
                self._step(micro_batches)

        start = torch.zeros((), requires_grad=True)  # so that backward comes by
        apart = _Border.apply(start, arrived, *(o.detach() for o in outputs))
        for i, output in zip(places, apart, strict=True):
            leaves[i] = output
        return _pytree.tree_unflatten(leaves, structure)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches before the step's last one."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """A rank that is through takes part in the others' steps, without a micro-batch."""
        self._divide_by_all = divide_by_initial_world_size
        before = self.engine.steps_done
        yield
        own = self.engine.steps_done - before
        held = [(p, p.grad) for p in self._trainable]
        while self._step([]):
            pass
        for parameter, gradient in held:  # those of steps that this rank's loop did not make
            parameter.grad = gradient
        # A rank without data would make the engine's updates, but not those of a test's loop.
        steps = self.engine.world.gather(own)
        for tensor in self.module.state_dict().values():
            self.engine.world.broadcast_tensor(tensor, source=steps.index(max(steps)))
        self._divide_by_all = True

    def _step(self, micro_batches: list[Any]) -> bool:
        """A step of the engine. False if no rank had anything for it."""
        # The engine starts a step without gradients; DDP adds to what is there.
        before = {p: p.grad.clone() for p in self._trainable if p.grad is not None}
        last = micro_batches[-1] if micro_batches else None

        def loss_fn(_: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, int]:
            # A mean over ranks, as DDP's, is a weight of one a rank.
            return torch.stack([(o * g).sum() for o, g in pairs]).sum(), int(pairs is last)

        try:
            result = self.engine.step(micro_batches, loss_fn)
        except DataError:
            for parameter, gradient in before.items():
                parameter.grad = gradient
            return False
        # DDP divides by the ranks that there are, Oarlock by those that had something.
        share = result.weight / self.engine.world.size if self._divide_by_all else 1.0
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = before.get(parameter)
                continue
            if not self._options["gradient_as_bucket_view"]:
                parameter.grad = parameter.grad.clone()
            parameter.grad *= share
            if parameter in before:
                parameter.grad += before[parameter]
        return True

    def _remove_autograd_hooks(self) -> None:
        """The engine's hooks do nothing outside of its steps, so another may take its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.module, self._options)


def _rebuild(kind: type[Adapter], module: nn.Module, options: dict[str, Any]) -> Adapter:
    return kind(module, **options)
