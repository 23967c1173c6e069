"""The fine-tuning run, as every rank executes it.

Read :func:`run`: load, prepare, train, export. `python -m oarlock.finetune.recipe RUN.toml` is one
rank of it; launchers start that.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oarlock.batches import Batch, Loader
from oarlock.checkpoint import Checkpoints
from oarlock.config import RunConfig, load
from oarlock.engine.step import DataParallel, EvalResult, StepResult
from oarlock.errors import CheckpointError, SaveError
from oarlock.finetune.export import export
from oarlock.finetune.generate import answers, prompts_of
from oarlock.finetune.loss import causal_lm_loss
from oarlock.finetune.model import LoadedModel, load_model, quiet_environment, resolve
from oarlock.finetune.packing import check_packing
from oarlock.finetune.plan import Steps, batch_table, describe_steps, schedule, steps_of
from oarlock.finetune.prepare import Prepared, prepare
from oarlock.finetune.screen import Metrics, Screen, memory_bytes
from oarlock.finetune.stopping import Stop
from oarlock.world import World, join

EVAL_CHUNK = 8  # batches between two looks at whether to stop
AfterStep = Callable[[DataParallel, StepResult], None]


def prepare_data(config: RunConfig, tokenizer: Any, rejects: Path | None = None) -> Prepared:
    """The run file's data; the same on every rank."""
    data = config.data
    return prepare(
        data.train,
        tokenizer=tokenizer,
        eval_source=data.eval,
        eval_fraction=data.eval_fraction,
        train_split=data.train_split,
        eval_split=data.eval_split,
        layout=data.layout,
        columns=data.columns,
        chat_template=data.chat_template,
        max_length=data.max_length,
        truncate=data.truncate,
        packing=data.packing,
        on_bad=data.on_bad,
        drop_duplicates=data.drop_duplicates,
        seed=config.train.seed,
        rejects=rejects,
    )


@dataclass
class Parts:
    """Everything that a run consists of, once it is set up."""

    config: RunConfig
    world: World
    loaded: LoadedModel
    prepared: Prepared
    engine: DataParallel
    loader: Loader
    eval_loader: Loader | None
    steps: Steps
    checkpoints: Checkpoints
    stop: Stop
    screen: Screen

    @property
    def position(self) -> int:
        """Global batches used so far."""
        return self.loader.epoch * len(self.loader) + self.loader.step_in_epoch

    def settings(self) -> dict[str, Any]:
        """What a checkpoint remembers of the run beside its state."""
        lengths = hashlib.sha256(self.prepared.lengths.astype("int64").tobytes()).hexdigest()
        return {
            "ranks": self.world.size,
            "data": lengths[:16],
            "steps": self.steps.total,
            "model": self.config.model.path,
            "method": self.config.train.method,
        }

    def save(self) -> bool:
        """A checkpoint here. Collective. False where it could not be written now (it says why)."""
        tokenizer = self.loaded.tokenizer

        def extra(folder: Path) -> None:
            tokenizer.save_pretrained(folder)

        path = self.checkpoints.save(self.engine, self.loader, self.settings(), extra)
        if path is not None:
            self.screen.say(f"saved step {self.engine.steps_done}: {path}")
        return path is not None


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


def set_up(config: RunConfig, world: World, stop: Stop) -> Parts:
    """Open the model and the data, build engine and loaders."""
    train, output = config.train, config.output
    screen = Screen(world.is_main)
    if world.is_main:
        resolve(config.model.path, output / "base")  # once: downloads, or converts a GGUF file
    world.barrier()
    loaded = load_model(
        config.model,
        train.method,
        config.lora,
        dropout=train.dropout,
        gradient_checkpointing=train.gradient_checkpointing,
        seed=train.seed,
        converted=output / "base",
    )
    screen.say(loaded.base_description)
    rejects = output if world.is_main and config.data.on_bad == "skip" else None
    prepared = prepare_data(config, loaded.tokenizer, rejects)
    steps = steps_of(config, len(prepared.train))
    model = loaded.model.to(world.device)
    if config.data.packing:
        check_packing(model)
    model.train()
    optimizer = make_optimizer(model, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(train.schedule, steps))
    engine = DataParallel(
        model,
        optimizer,
        world,
        clip_norm=train.clip_norm or None,
        precision=train.precision,
        scheduler=scheduler,
        guard_every=train.guard_every,
        nonfinite=train.nonfinite,
        seed=train.seed,
    )
    stop.attach(engine, world.is_main)
    micro = min(train.micro_batch_size, train.batch_size)
    loader = Loader(
        prepared.train,
        train.batch_size,
        micro,
        seed=train.seed,
        collate_fn=prepared.collate,
        lengths=None if config.data.packing else [int(n) for n in prepared.lengths],
        workers=config.data.workers,
        world=world,
    )
    eval_loader = None
    if prepared.eval is not None and prepared.eval_lengths is not None:
        eval_loader = Loader(
            prepared.eval,
            train.batch_size,
            micro,
            shuffle=False,
            collate_fn=prepared.collate,
            lengths=None if config.data.packing else [int(n) for n in prepared.eval_lengths],
            world=world,
        )
    checkpoints = Checkpoints(output / "checkpoints", keep=train.keep)
    checkpoints.check(engine)
    return Parts(
        config,
        world,
        loaded,
        prepared,
        engine,
        loader,
        eval_loader,
        steps,
        checkpoints,
        stop,
        screen,
    )


def make_optimizer(model: torch.nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW; no decay on vectors (norms and biases)."""
    train = config.train
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    assert train.lr is not None
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=train.lr, betas=(train.betas[0], train.betas[1])
    )


def _run(parts: Parts, resume: bool, after_step: AfterStep | None, stop_after: int | None) -> int:
    config, world, engine, screen = parts.config, parts.world, parts.engine, parts.screen
    resumed = _resume(parts) if resume else 0
    screen.say(*parts.prepared.report.lines(), *describe_steps(config, parts.steps))
    screen.say(*batch_table(config.train.batch_size, config.train.micro_batch_size, world.size))
    metrics = Metrics(config.output, resumed, config.train.tensorboard, world.is_main)
    before = _Before(config.output / "before.json", world)
    quick = stop_after is not None
    started = time.monotonic()
    try:
        if not quick and not (resumed and before.read()):
            before.samples = _samples(parts)
            result = _evaluate(parts, metrics)
            before.eval_loss = result.loss if result else None
            if not _stop_agreed(parts):
                before.write()
        if _stop_agreed(parts):
            screen.say("Stopped before the first step.", _how_to_resume(config))
            return 0
        screen.start_bar(parts.steps.total, parts.position)
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
        return _finish(parts, metrics, before, time.monotonic() - started)
    finally:
        metrics.close()


def _how_to_resume(config: RunConfig) -> str:
    return f"To go on: oarlock resume {config.output}"


def _stop_agreed(parts: Parts) -> bool:
    return any(parts.world.gather(parts.stop.asked))


def _resume(parts: Parts) -> int:
    """Load the newest whole checkpoint; 0 where there is none yet."""
    if parts.world.broadcast(parts.checkpoints.latest() is None):
        parts.screen.say("No checkpoint was written yet: starting from the beginning.")
        return 0
    info = parts.checkpoints.load(parts.engine, parts.loader)
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


def _samples(parts: Parts) -> list[dict[str, str]]:
    """Answers as the model stands. Rank 0 asks; the others wait."""
    out: list[dict[str, str]] = []
    if parts.world.is_main:
        prompts = prompts_of(parts.config, parts.prepared)
        said = answers(
            parts.engine.model,
            parts.prepared.encoder,
            prompts,
            parts.config.samples.max_tokens,
            parts.world.device,
        )
        out = [
            {"prompt": p.shown, "answer": a, **({"taught": p.taught} if p.taught else {})}
            for p, a in zip(prompts, said, strict=True)
        ]
    return parts.world.broadcast(out)


class _Before:
    """What was measured before training; kept on disk, since a resumed run can't measure it."""

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.world = path, world
        self.samples: list[dict[str, str]] = []
        self.eval_loss: float | None = None

    def read(self) -> bool:
        kept = None
        if self.world.is_main and self.path.exists():
            try:
                kept = json.loads(self.path.read_text("utf-8"))
            except ValueError:
                kept = None
        kept = self.world.broadcast(kept)
        if not isinstance(kept, dict):
            return self.world.steps > 0  # lost; measuring now would not be "before"
        self.samples, self.eval_loss = kept["samples"], kept["eval_loss"]
        return True

    def write(self) -> None:
        if self.world.is_main:
            kept = {"samples": self.samples, "eval_loss": self.eval_loss}
            self.path.write_text(json.dumps(kept, indent=1, ensure_ascii=False), "utf-8")


def _finish(parts: Parts, metrics: Metrics, before: _Before, seconds: float) -> int:
    """Evaluate, prove, export, read back, show."""
    config, world, screen = parts.config, parts.world, parts.screen
    result = _evaluate(parts, metrics)
    fingerprint = parts.engine.check_replicas()
    samples = _samples(parts)
    encoder, tokenizer = parts.prepared.encoder, parts.loaded.tokenizer
    if (
        tokenizer.chat_template is None and encoder.chat_template is not None
    ) or config.data.chat_template is not None:
        tokenizer.chat_template = encoder.chat_template
    made = []
    if world.is_main:
        sample = torch.tensor(_some_ids(parts), device=world.device)[None]
        made = export(
            parts.engine.model,
            tokenizer,
            config.output,
            method=config.train.method,
            merge=config.train.merge,
            sample=sample,
            end_token_ids=encoder.end_token_ids,
            trust_remote_code=config.model.trust_remote_code,
        )
        summary = {
            "steps": parts.engine.steps_done,
            "epochs": parts.steps.epochs,
            "ranks": world.size,
            "seconds": seconds,
            "eval_loss_before": before.eval_loss,
            "eval_loss_after": result.loss if result else None,
            "fingerprint": fingerprint,
            "data": parts.prepared.report.to_dict(),
            "results": [{"folder": str(m.folder), "what": m.what} for m in made],
            "samples": [
                {**now, "before": old["answer"]}
                for now, old in zip(samples, before.samples, strict=False)
            ]
            or samples,
        }
        text = json.dumps(summary, indent=1, ensure_ascii=False, default=str)
        (config.output / "summary.json").write_text(text, "utf-8")
        _show(parts, summary)
        for m in made:
            screen.say(f"{m.what}, read back and compared: {m.folder}", f"  load it: {m.how}")
    world.barrier()
    return 0


def _some_ids(parts: Parts) -> list[int]:
    item = parts.prepared.train[0]
    example = item[0] if isinstance(item, list) else item
    return example.input_ids[:64].tolist()


def _show(parts: Parts, summary: dict[str, Any]) -> None:
    say = parts.screen.say
    for sample in summary["samples"]:
        say("", f"asked:  {sample['prompt']}")
        if "before" in sample:
            say(f"before: {sample['before']}")
        say(f"after:  {sample['answer']}")
        if "taught" in sample:
            say(f"taught: {sample['taught']}")
    say("")
    if summary["eval_loss_after"] is not None:
        was = summary["eval_loss_before"]
        start = f"{was:.4f} before, " if was is not None else ""
        say(f"held-out loss: {start}{summary['eval_loss_after']:.4f} after")
    scheduler = parts.engine.scheduler
    say(
        f"schedule: {scheduler.last_epoch} of {parts.steps.total} updates",
        f"all {parts.world.size} replicas hold the same bits: fingerprint {summary['fingerprint']}"
        if parts.world.size > 1
        else f"fingerprint of the weights: {summary['fingerprint']}",
    )


def main(arguments: list[str]) -> int:
    """``RUN.toml [--resume]``: one rank of the run."""
    return run(load(arguments[0]), resume="--resume" in arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
