"""The step: one optimizer update on one global batch, whoever computes its micro-batches.

Read :meth:`DataParallel.step` first; everything else in this folder is a part of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oarlock.batches import Batch, MicroBatch
from oarlock.engine import guard
from oarlock.engine.buffers import Buffers, synchronise_batch_norm
from oarlock.engine.checks import check_model, check_optimizer, check_scheduler, describe
from oarlock.engine.exchange import Exchange
from oarlock.engine.names import named_parameters
from oarlock.engine.precision import Precision
from oarlock.errors import ConfigError, DataError, NonFiniteError, OutOfStepError, SetupError
from oarlock.randomness import key, own_random_state, seed_everything
from oarlock.world import Announcement, World, current

log = logging.getLogger("oarlock")

LossFunction = Callable[[nn.Module, Any], tuple[Tensor, Any]]
_MICRO_BATCH = 4  # the domain of micro-batches' random numbers
_NONFINITE = ("stop", "skip", "continue")


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
        sharding: 0, or 'auto', which is 0 for now: every rank keeps everything whole.
        clip_norm: clip the averaged gradient to this 2-norm.
        precision: 'fp32', or autocast in 'bf16' or 'fp16' (with a dynamic loss scale).
        scheduler: a learning-rate scheduler; stepped once an update, in updates.
        bucket_mb: size of a gradient bucket in MiB (2^20 bytes).
        guard_every: compare the replicas after steps 1, 2, 4, 8, … and then every so many; 0: never.
        nonfinite: 'stop', 'skip' (as if the step had not been) or 'continue'.
        sync_batchnorm: BatchNorm statistics over the micro-batches that ranks run at one time.
        seed: for random numbers in micro-batches that do not come from a Loader.
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
        clip_norm: float | None = None,
        precision: str = "fp32",
        scheduler: Any = None,
        bucket_mb: float = 25.0,
        guard_every: int = 100,
        nonfinite: str = "stop",
        sync_batchnorm: bool = False,
        seed: int = 0,
        overlap: bool = True,
    ) -> None:
        _check_settings(sharding, clip_norm, bucket_mb, guard_every, nonfinite)
        self.world = world or current()
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        trainable = check_model(model, self.world)
        check_optimizer(optimizer, model)
        check_scheduler(scheduler, optimizer)
        self.clip_norm, self.nonfinite, self.guard_every = clip_norm, nonfinite, guard_every
        self.seed, self.sync_batchnorm = seed, sync_batchnorm
        self.precision = Precision(precision, self.world.device)
        self.named_trainable = dict(trainable)
        self.param_names = {p: n for n, p in named_parameters(model)}
        if self.world.size > 1:
            settings = {
                "clip_norm": clip_norm,
                "precision": precision,
                "bucket_mb": bucket_mb,
                "guard_every": guard_every,
                "nonfinite": nonfinite,
                "sync_batchnorm": sync_batchnorm,
                "scheduler": type(scheduler).__name__,
                "seed": seed,
            }
            guard.compare_construction(describe(model, optimizer, settings), self.world)
        guard.align_replicas(model, self.world)
        if sync_batchnorm:
            synchronise_batch_norm(model, self.world)
        self.buffers = Buffers(model, self.world)
        # In a world of one gradients stay where autograd puts them: there is nothing to exchange.
        self.exchange = (
            Exchange(self.world, trainable, int(bucket_mb * 2**20), overlap)
            if self.world.size > 1
            else None
        )
        self.steps_done = 0
        self.stopping = False
        self._stop_asked = self._updating = False
        optimizer.register_step_pre_hook(self._refuse_foreign_update)

    # -- the step ------------------------------------------------------------------------------

    def step(self, batch: Batch | Sequence[Any], loss_fn: LossFunction) -> StepResult:
        """One update on one global batch. Collective: every rank calls it with its own part.

        Args:
            batch: from a :class:`~oarlock.batches.Loader`; or this rank's own list of micro-batches.
            loss_fn: ``loss_fn(model, data) -> (loss_sum, weight)``: the *sum* of the micro-batch's
                losses (a scalar tensor) and its weight (how many target tokens or samples).

        Raises:
            OutOfStepError, PeerLostError: the ranks do not run the same steps, or one is gone.
            SetupError: a loss or weight of the wrong kind. DataError: zero total weight.
            NonFiniteError, DivergedError: see the class.
        """
        started = time.perf_counter()
        announced, batch = self._open(batch)
        run = self._runner(batch, loss_fn)
        self.buffers.begin()
        kept = self._keep_buffers()

        totals = Totals()
        with own_random_state(self.world.device), self._collecting():
            for micro_batch in batch.micro_batches:
                loss_sum, weight = run(micro_batch)
                if micro_batch is batch.micro_batches[-1]:
                    # From here on buckets leave for the other ranks, so all must be at one place.
                    last_rank = self._agree(announced, batch)
                    if self.exchange:
                        self.exchange.arm()
                totals.add(loss_sum, weight)
                if loss_sum.requires_grad:
                    self.precision.scaled(loss_sum).backward()
            if not batch.micro_batches:  # takes part all the same, with zeros
                last_rank = self._agree(announced, batch)
            closing = self._close_batch(totals)
            if self.exchange:
                self.exchange.finish()

        loss, weight, used, changed = closing()
        self.buffers.finish(changed, last_rank)
        gradients = self._gradients(used)
        scale = weight * self.precision.scale
        norm = float(torch.nn.utils.get_total_norm(gradients)) / scale if gradients else 0.0
        skipped = self._is_bad(loss, norm, batch, run, kept)
        lr = float(self.optimizer.param_groups[0]["lr"])
        if not skipped:
            clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))
            self._update(gradients, clip / scale)
        self.steps_done += 1
        self.world.steps = self.steps_done
        if self.exchange:
            self.exchange.settle(used)
        if self._guard_is_due():
            self.check_replicas()
        return StepResult(
            self.steps_done,
            loss,
            weight,
            norm,
            lr,
            skipped,
            time.perf_counter() - started,
            self.exchange.wait_seconds if self.exchange else 0.0,
            self.exchange.sent_bytes if self.exchange else 0,
        )

    def _open(self, batch: Batch | Sequence[Any]) -> tuple[Announcement, Batch]:
        """Tell the others which step this is; the answers are awaited while forward runs."""
        if isinstance(batch, Batch):
            own = batch.micro_batches
            first, count = (own[0].index if own else -1), batch.count
        elif isinstance(batch, (list, tuple)):
            first, count = -2, len(batch)
            batch = Batch(0, self.steps_done, count, 0, list(batch), self.seed)
        else:
            raise SetupError(
                f"step() takes a Batch from a Loader or a list of micro-batches, not a "
                f"{type(batch).__name__}."
            )
        last = first + len(batch.micro_batches)
        announced = self.world.announce(
            "step", self.steps_done + 1, batch.epoch, batch.step, count, batch.rows, first, last,
            self.seed if first == -2 else batch.seed,
        )  # fmt: skip
        if first == -2:  # the user's own lists: their indices follow from all ranks' counts
            counts = [r[3] for r in announced.wait()]
            offset = sum(counts[: self.world.rank])
            batch.count = sum(counts)
            batch.micro_batches = [
                MicroBatch(offset + i, (), data) for i, data in enumerate(batch.micro_batches)
            ]
        return announced, batch

    def _agree(self, announced: Announcement, batch: Batch) -> int:
        """All ranks run this step, and their ranges make up the batch; who has the last one?"""
        records = announced.wait()
        own_lists = records[0][5] == -2
        kept = (0,) if own_lists else (0, 1, 2, 3, 4, 7)
        names = ("step", "epoch", "batch", "micro-batches", "rows", "", "", "seed")
        for column in kept:
            values = [r[column] for r in records]
            if len(set(values)) > 1 or any((r[5] == -2) != own_lists for r in records):
                lines = "\n".join(
                    f"  rank {i}: step {r[0]}, epoch {r[1]}, batch {r[2]}, {r[3]} micro-batches, "
                    f"{r[4]} rows, seed {r[7]}"
                    for i, r in enumerate(records)
                )
                raise OutOfStepError(
                    f"The ranks run different steps ({names[column]} differs):\n{lines}\n"
                    "Give every rank the same dataset, batch size, micro-batch size and seed, and "
                    "load the same checkpoint on all."
                )
        if own_lists:
            takers = [i for i, r in enumerate(records) if r[3] > 0]
        else:
            takers = [i for i, r in enumerate(records) if r[5] >= 0]
            covered = 0
            for i in takers:
                if records[i][5] != covered:
                    raise OutOfStepError(
                        f"Step {self.steps_done + 1}: micro-batch {covered} of {batch.count} is "
                        f"run by no rank or by two (rank {i} starts at {records[i][5]}).\n"
                        "Use one Loader with the same shares on every rank, as it deals the ranges."
                    )
                covered = records[i][6]
            if covered != batch.count:
                raise OutOfStepError(
                    f"Step {self.steps_done + 1}: only {covered} of {batch.count} micro-batches are "
                    "run.\nUse one Loader with the same shares on every rank."
                )
        if not takers:
            raise DataError(f"Step {self.steps_done + 1} has no micro-batch on any rank.")
        if self.sync_batchnorm and self.world.size > 1:
            counts = [r[6] - r[5] if r[5] >= 0 else 0 for r in records]
            counts = [r[3] for r in records] if own_lists else counts
            if len(set(counts)) > 1:
                raise SetupError(
                    f"Step {self.steps_done + 1}: sync_batchnorm needs the same number of "
                    f"micro-batches on every rank, but they have {counts}.\n"
                    "Choose batch_size and micro_batch_size so that each rank gets as many "
                    "(drop_last=True for the last batch), or sync_batchnorm=False."
                )
        return takers[-1]

    def _runner(
        self, batch: Batch, loss_fn: LossFunction
    ) -> Callable[[MicroBatch], tuple[Tensor, Any]]:
        """One micro-batch's forward, with random numbers of its own whoever runs it."""

        def run(micro_batch: MicroBatch) -> tuple[Tensor, Any]:
            seed_everything(
                key(batch.seed, _MICRO_BATCH, batch.epoch, batch.step, micro_batch.index)
            )
            with self.precision.autocast():
                answer = loss_fn(self.model, micro_batch.data)
            return self._check_loss(answer)

        return run

    def _check_loss(self, answer: Any) -> tuple[Tensor, Any]:
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise SetupError(
                "loss_fn must return (loss_sum, weight): the sum of the losses and how many there "
                f"are. It returned a {type(answer).__name__}."
            )
        loss, weight = answer
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise SetupError(
                f"loss_fn must return a scalar tensor as loss_sum, not {shape}.\n"
                "Sum over the items: reduction='sum', or loss.sum()."
            )
        number = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
            raise SetupError(
                f"loss_fn must return a weight that is a number and not negative, not {weight!r}."
            )
        if not loss.requires_grad and number and torch.is_grad_enabled():
            raise SetupError(
                "The loss does not depend on any trainable parameter (it has no gradient).\n"
                "Is part of the model frozen, detached, or run under torch.no_grad()?"
            )
        return loss, number

    def _close_batch(
        self, totals: Totals
    ) -> Callable[[], tuple[float, float, list[bool], list[bool]]]:
        """Sum over the ranks what is known only after backward. Returns a function to read it."""
        parameters = list(self.named_trainable.values())
        if self.exchange is None:
            used = [p.grad is not None for p in parameters]
        else:
            used = self.exchange.used()
        changed = self.buffers.changed()
        n, b = len(used), len(changed)
        message = torch.tensor(
            [
                totals.loss(),
                totals.weight,
                totals.ints,
                totals.floats,
                self._stop_asked,
                *used,
                *changed,
            ],
            dtype=torch.float64,
        )
        work = None
        if self.world.size > 1:
            with self.world._lost("summing the loss"):
                work = dist.all_reduce(message, group=self.world.control, async_op=True)

        def read() -> tuple[float, float, list[bool], list[bool]]:
            if work is not None:
                self.world.wait(work, "summing the loss")
            loss_sum, weight, ints, floats, stop = message[:5].tolist()
            self.stopping = stop > 0
            if ints and floats:
                raise SetupError(
                    f"Step {self.steps_done + 1}: the weight is a whole number in {int(ints)} "
                    f"micro-batch(es) and a fraction in {int(floats)}, so they do not count the "
                    "same thing.\nReturn the same kind everywhere: tokens or samples."
                )
            if weight == 0:
                raise DataError(
                    f"Step {self.steps_done + 1}: the total weight is zero, so there is no mean "
                    "loss.\nNo micro-batch of this global batch has a target; check the labels."
                )
            flags = (message[5:] > 0).tolist()
            return loss_sum / weight, weight, flags[:n], flags[n : n + b]

        return read

    def _gradients(self, used: list[bool]) -> list[Tensor]:
        """The summed gradients, as few tensors as possible. Unused parameters' are None."""
        if self.exchange is not None:
            return self.exchange.attach(used)
        return [p.grad for p in self.named_trainable.values() if p.grad is not None]

    def _update(self, gradients: list[Tensor], factor: float) -> None:
        """Divide by the total weight (once; clipping and loss scale go along), then update."""
        torch._foreach_mul_(gradients, factor)
        self._updating = True
        try:
            self.optimizer.step()
        finally:
            self._updating = False
        self.precision.succeeded()
        if self.scheduler is not None:
            self.scheduler.step()

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        for parameter in self.named_trainable.values():
            parameter.grad = None
        if self.exchange:
            self.exchange.begin()
        try:
            yield
        finally:
            if self.exchange:
                self.exchange.stop()

    # -- what can go wrong ---------------------------------------------------------------------

    def _keep_buffers(self) -> list[Tensor] | None:
        if self.nonfinite != "skip" and self.precision.name != "fp16":
            return None
        return [b.clone() for b in self.model.buffers()]

    def _is_bad(
        self,
        loss: float,
        norm: float,
        batch: Batch,
        run: Callable[[MicroBatch], tuple[Tensor, Any]],
        kept: list[Tensor] | None,
    ) -> bool:
        """Not finite? Then name the first bad number, and stop, skip (True) or go on (False)."""
        total = loss + norm
        if total - total == 0:  # neither inf nor nan
            return False
        skip = self.precision.overflowed()
        if not skip:
            message = self._name_bad_number(loss, norm, batch, run)
            if self.nonfinite == "stop":
                raise NonFiniteError(message)
            if self.world.is_main:
                log.warning("%s", message.splitlines()[0] + f" ({self.nonfinite})")
            skip = self.nonfinite == "skip"
        if skip and kept is not None:
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), kept, strict=True):
                    buffer.copy_(before)
        return skip

    def _name_bad_number(
        self,
        loss: float,
        norm: float,
        batch: Batch,
        run: Callable[[MicroBatch], tuple[Tensor, Any]],
    ) -> str:
        def forward(micro_batch: MicroBatch) -> Tensor:
            return run(micro_batch)[0]

        buffers = [b.clone() for b in self.model.buffers()]
        with own_random_state(self.world.device):
            mine = guard.find_bad_number(self.model, batch.micro_batches, forward)
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        found = [
            (bad.micro_batch, rank, host, bad)
            for rank, (host, bad) in enumerate(self.world.gather((self.world.host, mine)))
            if bad is not None
        ]
        what = "loss" if loss - loss != 0 else "gradient"
        head = f"Step {self.steps_done + 1} (epoch {batch.epoch}, batch {batch.step}): the {what} "
        if not found:
            return (
                f"{head}is not finite (loss {loss}, gradient norm {norm}), but running the "
                "micro-batches again gives finite numbers.\nThe sum overflowed, an operation is "
                "not deterministic, or a device or link is faulty."
            )
        index, rank, host, bad = min(found, key=lambda f: (f[0], f[1]))
        rows = f", rows {list(bad.rows[:16])}{'…' if len(bad.rows) > 16 else ''}" * bool(bad.rows)
        where = f"micro-batch {index}{rows}" if index >= 0 else "before any micro-batch"
        return (
            f"{head}is not finite: first in {bad.what}, on rank {rank} ({host}), {where}.\n"
            "No update was made. Look at these rows; lower the learning rate or clip the gradient "
            "(clip_norm); or choose nonfinite='skip' to leave such steps out."
        )

    def _guard_is_due(self) -> bool:
        if self.world.size == 1 or self.guard_every == 0:
            return False
        n = self.steps_done
        if n % self.guard_every == 0 or n & (n - 1) == 0:  # 1, 2, 4, 8, … then regularly
            self._check_membership()
            return True
        return False

    def _check_membership(self) -> None:
        trainable = {id(p) for _, p in named_parameters(self.model) if p.requires_grad}
        if trainable != {id(p) for p in self.named_trainable.values()}:
            raise SetupError(
                f"After step {self.steps_done} the model's trainable parameters are not those that "
                "the engine was built with: some were added, removed, frozen or unfrozen.\n"
                "Build a new DataParallel after such a change."
            )
        check_optimizer(self.optimizer, self.model)

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
        return guard.check_replicas(self.model, self.world)

    # -- beside the step -----------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Batch], loss_fn: LossFunction) -> EvalResult:
        """The exact mean loss over all rows of ``batches``: sums and weights over all ranks.

        Collective. Runs in eval mode without gradients, and leaves modes and random state alone.
        """
        modes = [(m, m.training) for m in self.model.modules()]
        totals, rows = Totals(), 0
        self.model.eval()
        try:
            with torch.no_grad(), own_random_state(self.world.device):
                for batch in batches:
                    run = self._runner(batch, loss_fn)
                    rows += sum(len(m.rows) for m in batch.micro_batches)
                    for micro_batch in batch.micro_batches:
                        totals.add(*run(micro_batch))
        finally:
            for module, mode in modes:
                module.training = mode
        self.world.announce("evaluation", self.steps_done).wait()
        everyone = self.world.gather((totals.loss(), totals.weight, rows))
        loss, weight, rows = (sum(column) for column in zip(*everyone, strict=True))
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
        self.steps_done = self.world.steps = int(state["steps_done"])
        if self.precision.name == "fp16":
            self.precision.scale = float(state["loss_scale"])
            self.precision.good_steps = int(state["good_steps"])


class Totals:
    """One rank's sums over its micro-batches, in float64."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self.weight = 0.0
        self.ints = self.floats = 0

    def add(self, loss_sum: Tensor, weight: float) -> None:
        """Add a micro-batch's loss sum and weight."""
        loss = loss_sum.detach()
        loss = loss if loss.device.type == "mps" else loss.double()
        self._loss = loss if self._loss is None else self._loss + loss
        self.weight += weight
        if isinstance(weight, int):
            self.ints += 1
        else:
            self.floats += 1

    def loss(self) -> float:
        """The sum of the losses, read to the host."""
        return 0.0 if self._loss is None else float(self._loss)


def _check_settings(
    sharding: int | str, clip_norm: float | None, bucket_mb: float, guard_every: int, nonfinite: str
) -> None:
    if sharding not in (0, "auto"):
        raise ConfigError(
            f"sharding is {sharding!r}; this version has 0 (every rank keeps everything whole) "
            "and 'auto', which chooses it."
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm is {clip_norm!r}; it must be a positive number, or None.")
    if not bucket_mb > 0:
        raise ConfigError(f"bucket_mb is {bucket_mb!r}; it must be a positive number of MiB.")
    if not isinstance(guard_every, int) or guard_every < 0:
        raise ConfigError(f"guard_every is {guard_every!r}; it must be a whole number (0: never).")
    if nonfinite not in _NONFINITE:
        raise ConfigError(f"nonfinite is {nonfinite!r}; it must be one of {', '.join(_NONFINITE)}.")
