"""The fine-tuning run, as every rank executes it.

Read :func:`run`: load, prepare, train, export. `python -m oarlock.finetune.recipe RUN.toml` is one
rank of it; launchers start that.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable

from oarlock.batches import Batch
from oarlock.config import RunConfig, load
from oarlock.engine.step import DataParallel, EvalResult, StepResult
from oarlock.errors import CheckpointError, SaveError
from oarlock.finetune.loss import causal_lm_loss
from oarlock.finetune.model import quiet_environment
from oarlock.finetune.plan import batch_table, describe_steps
from oarlock.finetune.results import Before, finish, samples_of
from oarlock.finetune.screen import Metrics, memory_bytes
from oarlock.finetune.setup import Parts, set_up
from oarlock.finetune.stopping import Stop
from oarlock.world import World, join

EVAL_CHUNK = 8  # batches between two looks at whether to stop
AfterStep = Callable[[DataParallel, StepResult], None]


def run(
    config: RunConfig,
    resume: bool = False,
    *,
    after_step: AfterStep | None = None,
    stop_after: int | None = None,
    world: World | None = None,
) -> int:
    """One rank's part of a fine-tuning run; alone, all of it.

    Args:
        config: the resolved run file, the same on every rank.
        resume: go on from the newest whole checkpoint in the output folder.
        after_step: called on every rank after each step.
        stop_after: end after so many steps without export (to compare worlds).
        world: the ranks; by default joined here, and left at the end.

    Returns:
        The exit status: 0 when finished, or stopped by a signal with everything saved.
    """
    quiet_environment()
    stop = Stop()
    stop.install()
    try:
        with contextlib.nullcontext(world) if world else join(timeout=1800.0) as joined:
            parts = set_up(config, joined, stop)
            try:
                return _run(parts, resume, after_step, stop_after)
            finally:
                parts.screen.close()
    finally:
        stop.restore()


def _run(parts: Parts, resume: bool, after_step: AfterStep | None, stop_after: int | None) -> int:
    config, world, engine, screen = parts.config, parts.world, parts.engine, parts.screen
    resumed = _resume(parts) if resume else 0
    table = batch_table(config.train.batch_size, config.train.micro_batch_size, world.size)
    if stop_after is None:
        screen.say(*parts.prepared.report.lines(), *describe_steps(config, parts.steps))
    screen.say(*table)
    metrics = Metrics(config.output, resumed, config.train.tensorboard, world.is_main)
    before = Before(config.output / "before.json", world)
    quick = stop_after is not None
    started = time.monotonic()
    try:
        if not quick and not (resumed and before.read()):
            before.samples = samples_of(parts)
            result = _evaluate(parts, metrics)
            before.eval_loss = result.loss if result else None
            if not _stop_agreed(parts):
                before.write()
        if _stop_agreed(parts):
            screen.say("Stopped before the first step.", _how_to_resume(config))
            return 0
        screen.start_bar(stop_after or parts.steps.total, parts.position)
        finished = _train(parts, metrics, after_step, stop_after)
        screen.close()
        if quick:
            return 0
        if not finished:
            screen.say(
                f"Stopped after step {engine.steps_done}; everything is saved.",
                _how_to_resume(config),
            )
            return 0
        return finish(parts, before, _evaluate(parts, metrics), time.monotonic() - started)
    finally:
        metrics.close()


def _how_to_resume(config: RunConfig) -> str:
    return f"To go on: oarlock resume {config.output}"


def _stop_agreed(parts: Parts) -> bool:
    return any(parts.world.gather(parts.stop.asked))


def _resume(parts: Parts) -> int:
    """Load the newest whole checkpoint; 0 where there is none yet."""
    info = parts.checkpoints.load(parts.engine, parts.loader, missing_ok=True)
    if info is None:
        parts.screen.say("No checkpoint was written yet: starting from the beginning.")
        return 0
    was, now = info.settings, parts.settings()
    for name, what in (("data", "the data's rows"), ("steps", "the number of steps")):
        if name in was and was[name] != now[name]:
            raise CheckpointError(
                f"{parts.config.output}: {what} changed since the checkpoint ({was[name]}, now "
                f"{now[name]}); continuing would not be the same run.\n"
                "Put it back, or start a new run in another folder."
            )
    parts.screen.say(f"Resumed at step {info.step} (epoch {info.epoch}) from {info.path}")
    if was.get("ranks", now["ranks"]) != now["ranks"]:
        batch = parts.config.train.batch_size
        parts.screen.say(
            f"ranks: {was['ranks']} before, {now['ranks']} now; the global batch stays "
            f"{batch} rows, and steps, learning rate and order of the data with it"
        )
    return parts.position


def _train(
    parts: Parts, metrics: Metrics, after_step: AfterStep | None, stop_after: int | None
) -> bool:
    """The loop. True when all steps are done, False when a stop was asked for (and saved)."""
    train, engine, loader, total = (
        parts.config.train,
        parts.engine,
        parts.loader,
        parts.steps.total,
    )
    saved = parts.position
    window_tokens, window_began = 0, time.monotonic()
    while parts.position < total:
        for batch in loader:
            result = engine.step(batch, causal_lm_loss)
            done = parts.position
            window_tokens += _tokens(parts, batch)
            if after_step is not None:
                after_step(engine, result)
            log = done % train.log_every == 0 or done == total
            now = time.monotonic()
            numbers = {
                "epoch": batch.epoch,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": window_tokens,
                "targets": int(result.weight),
                "tokens_per_second": window_tokens / max(now - window_began, 1e-9),
                "seconds": result.seconds,
                "memory_bytes": memory_bytes(parts.world.device),
                "skipped": result.skipped,
            }
            parts.screen.step(done, numbers, log)
            if log:
                metrics.write(done, **numbers)
                window_tokens, window_began = 0, time.monotonic()
            stopping = engine.stopping
            if not stopping and train.eval_every and done % train.eval_every == 0 and done < total:
                _evaluate(parts, metrics)
                stopping = _stop_agreed(parts)
                window_tokens, window_began = 0, time.monotonic()
            due = train.save_every and done % train.save_every == 0
            wanted = stop_after is None and (stopping or due or done == total)
            if wanted and done != saved and parts.save():
                saved = done
            if stopping and done < total:
                if saved != done:
                    raise SaveError(
                        f"Stopped after step {done}, but it could not be saved: "
                        f"{parts.checkpoints.last_problem}\n{_how_to_resume(parts.config)} "
                        "(from the last good checkpoint)"
                    )
                return False
            if done >= total or done == stop_after:
                return done >= total
    return True


def _tokens(parts: Parts, batch: Batch) -> int:
    """Tokens of a whole global batch; every rank knows them from the plan."""
    assert parts.loader.plan is not None
    rows = parts.loader.plan.batch_rows(batch.epoch, batch.step)
    return int(parts.prepared.lengths[rows].sum())


def _evaluate(parts: Parts, metrics: Metrics) -> EvalResult | None:
    """The exact loss over the held-out rows. None without such rows, or when stopped half-way."""
    loader, step = parts.eval_loader, parts.position
    if loader is None:
        return None
    loader.epoch = loader.step_in_epoch = 0
    batches = iter(loader)
    loss, weight, rows = 0.0, 0.0, 0
    while chunk := list(itertools.islice(batches, EVAL_CHUNK)):
        part = parts.engine.evaluate(chunk, causal_lm_loss)
        loss, weight, rows = loss + part.loss * part.weight, weight + part.weight, rows + part.rows
        if _stop_agreed(parts):
            return None
    result = EvalResult(loss / weight, weight, rows)
    metrics.write(step, eval_loss=result.loss, eval_targets=int(weight), eval_rows=rows)
    parts.screen.say(
        f"step {step}: held-out loss {result.loss:.4f} ({rows} rows, {int(weight)} tokens)"
    )
    return result


def main(arguments: list[str]) -> int:
    """``RUN.toml [--resume]``: one rank of the run."""
    return run(load(arguments[0]), resume="--resume" in arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
