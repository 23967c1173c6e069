"""Set up a run on one rank: model, data, engine, loaders, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oarlock.batches import Loader
from oarlock.checkpoint import Checkpoints
from oarlock.config import RunConfig
from oarlock.engine.step import DataParallel
from oarlock.finetune.model import LoadedModel, load_model
from oarlock.finetune.modelfiles import resolve
from oarlock.finetune.packing import check_packing
from oarlock.finetune.plan import Steps, schedule, steps_of
from oarlock.finetune.prepare import Prepared, prepare
from oarlock.finetune.screen import Screen
from oarlock.finetune.stopping import Stop
from oarlock.world import World


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
        return {
            "ranks": self.world.size,
            "data": self.prepared.digest,
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
