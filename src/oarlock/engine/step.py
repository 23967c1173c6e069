"""The step: one optimizer update on one global batch, whoever computes its micro-batches.

Read :meth:`DataParallel.step` first; everything else in this folder is a part of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.batches import Batch, MicroBatch, map_tensors
from oarlock.engine import guard, ladder
from oarlock.engine.agreement import Agreement
from oarlock.engine.buffers import Buffers, synchronise_batch_norm
from oarlock.engine.checks import (
    check_loss,
    check_model,
    check_optimizer,
    check_scheduler,
    check_settings,
    describe,
)
from oarlock.engine.names import named_parameters
from oarlock.engine.nonfinite import NonFinite
from oarlock.engine.precision import Precision
from oarlock.engine.reproducible import deterministic, prepare
from oarlock.engine.totals import Closing, Totals, total
from oarlock.errors import ConfigError, DataError, SetupError
from oarlock.randomness import key, own_random_state, seed_everything
from oarlock.world import World, current

LossFunction = Callable[[nn.Module, Any], tuple[Tensor, Any]]
_MICRO_BATCH = 4  # the domain of micro-batches' random numbers


@dataclass(frozen=True)
class StepResult:
    """What one step did; all but the times is the same on every rank.

    Attributes:
        step: updates attempted so far, this one included.
        loss: sum of losses over the global batch, divided by ``weight``.
        weight: total weight of the global batch (target tokens, samples).
        grad_norm: 2-norm of the averaged gradient, before clipping.
        lr: learning rate of the first group, as used in this update.
        skipped: no update was made (fp16 overflow, or nonfinite='skip').
        seconds: the whole step. wait_seconds: the part of the exchange that backward did not hide.
        exchanged_bytes: gradient bytes that this rank handed to the backend.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    lr: float
    skipped: bool
    seconds: float
    wait_seconds: float
    exchanged_bytes: int


@dataclass(frozen=True)
class EvalResult:
    """An exact evaluation: sums over all rows, divided once."""

    loss: float
    weight: float
    rows: int


class DataParallel:
    """Trains one model on all ranks: each global batch becomes one exact update.

    Args:
        model: any module, on ``world.device``; it is not wrapped and not changed.
        optimizer: any ``torch.optim`` optimizer over the model's trainable parameters.
        world: from :func:`oarlock.join`; by default the one this process joined.
        sharding: what each rank keeps whole. 0: weights, gradients and optimizer state. 1: no more
            than a slice of the state. 2: nor of the gradients. 3: nor of the weights (FSDP2, which
            changes the model). 'hybrid': as 3, within each machine. 'auto': see ``ladder.choose``.
        shard_blocks: for sharding 3, the classes of modules whose weights are gathered one module
            at a time; by default found, see ``sharded.find_blocks``.
        clip_norm: clip the averaged gradient to this 2-norm.
        precision: 'fp32', or autocast in 'bf16' or 'fp16' (with a dynamic loss scale).
        scheduler: a learning-rate scheduler; stepped once an update, in updates.
        bucket_mb: size of a gradient bucket in MiB (2^20 bytes); 'auto': see ``link``.
        guard_every: compare the replicas after steps 1, 2, 4, 8, … and then every so many;
            0: never.
        nonfinite: 'stop', 'skip' (as if the step had not been) or 'continue'.
        sync_batchnorm: BatchNorm statistics over the micro-batches that ranks run at one time.
        seed: for random numbers in micro-batches that do not come from a Loader.
        reproducible: the same bits on any number of ranks (of one kind of device): gradients are
            added in one fixed tree, and PyTorch is asked for deterministic kernels.
        overlap: False exchanges after backward instead of during it, for debugging.

    Raises:
        SetupError: what can be known to go wrong, before the first step; on all ranks where the
            ranks built different things.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World | None = None,
        *,
        sharding: int | str = 0,
        shard_blocks: Sequence[type[nn.Module]] | None = None,
        clip_norm: float | None = None,
        precision: str = "fp32",
        scheduler: Any = None,
        bucket_mb: float | str = "auto",
        guard_every: int = 100,
        nonfinite: str = "stop",
        sync_batchnorm: bool = False,
        seed: int = 0,
        reproducible: bool = False,
        overlap: bool = True,
    ) -> None:
        check_settings(sharding, clip_norm, bucket_mb, guard_every, nonfinite, seed)
        guard_every, seed = int(guard_every), int(seed)  # NumPy's integers would overflow
        self.world, self.reproducible = world or current(), bool(reproducible)
        if reproducible:
            if sharding in (3, "hybrid"):
                raise ConfigError(
                    f"reproducible=True cannot go with sharding={sharding!r}: FSDP2 leaves adding "
                    "gradients to the backend, whose order depends on the number of ranks.\n"
                    "Use sharding=2, which keeps least of the rungs that can be reproducible."
                )
            if sync_batchnorm:
                raise ConfigError(
                    "reproducible=True cannot go with sync_batchnorm=True: statistics over ranks "
                    "depend on how many there are."
                )
            prepare(self.world)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        trainable = check_model(model, self.world)
        # A second engine on the same optimizer takes over: the first one's hooks would refuse it,
        # its slices are not the model's parameters, and its buckets would stay in memory.
        release = getattr(optimizer, "__dict__", {}).pop("_oarlock_release", None)
        if release is not None:
            release()
        check_optimizer(optimizer, model)
        check_scheduler(scheduler, optimizer)
        self.clip_norm, self.guard_every = clip_norm, guard_every
        self.seed, self.sync_batchnorm = seed, sync_batchnorm
        self.precision = Precision(precision, self.world.device)
        if self.world.size > 1:
            settings = {
                "clip_norm": clip_norm,
                "precision": precision,
                "bucket_mb": bucket_mb,
                "guard_every": guard_every,
                "nonfinite": nonfinite,
                "sync_batchnorm": sync_batchnorm,
                "sharding": sharding,
                "reproducible": self.reproducible,
                "scheduler": type(scheduler).__name__,
                "seed": seed,
            }
            guard.compare_construction(describe(model, optimizer, settings), self.world)
        guard.align_replicas(model, self.world)
        if sync_batchnorm:
            synchronise_batch_norm(model, self.world)
        self.buffers = Buffers(model, self.world, self.reproducible)
        self.nonfinite = NonFinite(nonfinite, model, self.world, self.precision)
        self.sharding, self.exchange = ladder.build(
            sharding,
            self.world,
            trainable,
            model,
            optimizer,
            bucket_mb,
            overlap,
            self.reproducible,
            shard_blocks,
        )
        self.named_trainable = {n: p for n, p in named_parameters(model) if p.requires_grad}
        self.param_names = {p: n for n, p in named_parameters(model)}
        self.steps_done = self._last_good = 0
        self.stopping = False
        self._stop_asked = self._updating = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_foreign_update)
        optimizer.__dict__["_oarlock_release"] = self._release

    # -- the step ------------------------------------------------------------------------------

    def step(self, batch: Batch | Sequence[Any], loss_fn: LossFunction) -> StepResult:
        """One update on one global batch. Collective: every rank calls it with its own part.

        Args:
            batch: from a :class:`~oarlock.batches.Loader`, or this rank's own list of
                micro-batches.
            loss_fn: ``loss_fn(model, data) -> (loss_sum, weight)``: the *sum* of the micro-batch's
                losses (a scalar tensor) and its weight (how many target tokens or samples).
                ``data`` is the micro-batch as collated, its tensors on this rank's device.

        Raises:
            OutOfStepError, PeerLostError: the ranks do not run the same steps, or one is gone.
            SetupError: a loss or weight of the wrong kind. DataError: zero total weight.
            NonFiniteError, DivergedError: see the class.
        """
        started = time.perf_counter()
        agreement = Agreement(self.world, batch, self.steps_done + 1, self.seed)
        batch = agreement.batch
        if self.sync_batchnorm:
            agreement.reach(equal_counts=True)  # before the first forward, which is collective
        run = self._runner(batch, loss_fn)
        self.buffers.begin()
        self.nonfinite.begin()

        totals = Totals()
        with (
            self.exchange.meetings(),
            own_random_state(self.world.device),
            self._kernels(),
            self._collecting(),
        ):
            for micro_batch, real in self.exchange.rounds(batch.micro_batches, agreement):
                self.buffers.before_forward()
                loss_sum, weight = run(micro_batch)
                self.buffers.after_forward(micro_batch.index)
                if real:
                    totals.add(loss_sum, weight)
                else:
                    loss_sum = loss_sum * 0
                last = not real or micro_batch is batch.micro_batches[-1]
                self.exchange.before_backward(agreement, last)
                if loss_sum.requires_grad:
                    self.precision.scaled(loss_sum).backward()
                self.exchange.after_backward()
            agreement.reach()  # also for a rank without a micro-batch: it takes part all the same
            closing = self._close(totals, agreement)
            self.exchange.finish(agreement)

        closed = closing.wait()
        self.stopping = closed.stop
        self.buffers.finish(closed.changed, agreement)
        gradients = self.exchange.attach(closed.used)
        divisor = closed.weight * self.precision.scale
        norm = self.exchange.norm(gradients) / divisor
        lr = float(self.optimizer.param_groups[0]["lr"])
        bad = not math.isfinite(closed.loss + norm)
        skipped = bad and self.nonfinite.handle(closed.loss, norm, batch, run, self.exchange)
        if not skipped:
            clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))
            self._update(gradients, clip / divisor)
        self.steps_done += 1
        self.world.steps = self.steps_done
        self.exchange.settle(closed.used)
        if self._guard_is_due():
            self._check_membership()
            self.check_replicas()
        return StepResult(
            self.steps_done,
            closed.loss,
            closed.weight,
            norm,
            lr,
            skipped,
            time.perf_counter() - started,
            self.exchange.wait_seconds,
            self.exchange.sent_bytes,
        )

    def _kernels(self) -> AbstractContextManager[None]:
        return deterministic() if self.reproducible else nullcontext()

    def _close(self, totals: Totals, agreement: Agreement) -> Closing:
        return Closing(
            agreement,
            totals,
            self.exchange.used(),
            self.buffers.changed(),
            self._stop_asked,
        )

    def _runner(
        self, batch: Batch, loss_fn: LossFunction
    ) -> Callable[[MicroBatch], tuple[Tensor, Any]]:
        """One micro-batch's forward, with random numbers of its own whoever runs it."""

        device = self.world.device

        def run(micro_batch: MicroBatch) -> tuple[Tensor, Any]:
            seed_everything(
                key(batch.seed, _MICRO_BATCH, batch.epoch, batch.step, micro_batch.index), device
            )
            data = micro_batch.data
            if device.type != "cpu":
                data = map_tensors(data, lambda t: t.to(device, non_blocking=True))
            with self.precision.autocast():
                answer = loss_fn(self.model, data)
            return check_loss(answer)

        return run

    def _update(self, gradients: list[Tensor], factor: float) -> None:
        """Divide by the total weight (once; clipping and loss scale go along), then update."""
        torch._foreach_mul_(gradients, factor)
        self._updating = True
        try:
            with self._kernels():
                self.optimizer.step()
        finally:
            self._updating = False
        self.exchange.updated()
        self.precision.succeeded()
        if self.scheduler is not None:
            self.scheduler.step()

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        for parameter in self.named_trainable.values():
            parameter.grad = None
        self.exchange.begin()
        try:
            yield
        finally:
            self.exchange.stop()

    # -- what can go wrong ---------------------------------------------------------------------

    def _guard_is_due(self) -> bool:
        if self.world.size == 1 or self.guard_every == 0:
            return False
        n = self.steps_done
        return n % self.guard_every == 0 or n & (n - 1) == 0  # 1, 2, 4, 8, … then regularly

    def _check_membership(self) -> None:
        trainable = {id(p) for _, p in named_parameters(self.model) if p.requires_grad}
        if trainable != {id(p) for p in self.named_trainable.values()}:
            raise SetupError(
                f"After step {self.steps_done} the model's trainable parameters are not those that "
                "the engine was built with: some were added, removed, frozen or unfrozen.\n"
                "Build a new DataParallel after such a change."
            )
        check_optimizer(self.optimizer, self.model, self.param_groups())

    def param_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters in each group of the optimizer, which may hold slices of them."""
        return self.exchange.groups(self.optimizer)

    def _release(self) -> None:
        self._hook.remove()
        self.exchange.detach()

    def _refuse_foreign_update(self, *_: Any) -> None:
        if not self._updating and self.world.size > 1 and not self.world.closed:
            raise SetupError(
                "optimizer.step() was called outside engine.step(): this rank's weights would "
                "drift away from the others'.\nCall engine.step(batch, loss_fn) only; it updates."
            )

    def check_replicas(self) -> str:
        """Compare all replicas now. Collective. Returns the fingerprint (16 hex digits).

        Raises:
            DivergedError: naming the first tensor that differs, the odd rank and the step.
        """
        self.world.announce("check", self.steps_done).wait()
        self.exchange.synchronize()
        print_ = guard.check_replicas(self.model, self.world, self._last_good)
        self._last_good = self.steps_done
        return print_

    # -- beside the step -----------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Batch], loss_fn: LossFunction) -> EvalResult:
        """The exact mean loss over all rows of ``batches``: sums and weights over all ranks.

        Collective. Runs in eval mode without gradients, and leaves modes and random state alone.
        """
        modes = [(m, m.training) for m in self.model.modules()]
        self.exchange.synchronize()  # kernels for evaluation are chosen by the tensors' type
        totals, rows = Totals(), 0
        self.model.eval()
        try:
            with torch.no_grad(), self.exchange.meetings(), own_random_state(self.world.device):
                for batch in batches:
                    run = self._runner(batch, loss_fn)
                    rows += sum(len(m.rows) for m in batch.micro_batches)
                    for micro_batch, real in self.exchange.rounds(batch.micro_batches):
                        loss_sum, weight = run(micro_batch)
                        if real:
                            totals.add(loss_sum, weight)
        finally:
            for module, mode in modes:
                module.training = mode
        self.world.announce("evaluation", self.steps_done).wait()
        everyone = self.world.gather((totals.losses(), totals.weights, rows))
        losses, weights, counts = zip(*everyone, strict=True)
        loss, weight, rows = total(losses), total(weights), sum(counts)
        if weight == 0:
            raise DataError("The evaluation's total weight is zero: it has no targets.")
        return EvalResult(loss / weight, weight, rows)

    def request_stop(self) -> None:
        """Ask all ranks to stop; safe in a signal handler. After the current step (or the next
        one) ``engine.stopping`` is True on every rank."""
        self._stop_asked = True

    def state_dict(self) -> dict[str, Any]:
        """The engine's own state, small and JSON-able; weights and optimizer are not in it."""
        return {
            "steps_done": self.steps_done,
            "loss_scale": self.precision.scale,
            "good_steps": self.precision.good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self.steps_done = self.world.steps = self._last_good = int(state["steps_done"])
        if self.precision.name == "fp16":
            self.precision.scale = float(state["loss_scale"])
            self.precision.good_steps = int(state["good_steps"])
