"""The end of a run: the replicas' proof, answers before and after, the exported result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from oarlock.engine.step import EvalResult
from oarlock.finetune.export import export
from oarlock.finetune.generate import answers, prompts_of
from oarlock.finetune.setup import Parts
from oarlock.world import World


def samples_of(parts: Parts) -> list[dict[str, str]]:
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


class Before:
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


def finish(parts: Parts, before: Before, result: EvalResult | None, seconds: float) -> int:
    """Prove, export, read back, show. ``result``: the held-out loss at the end."""
    config, world, screen = parts.config, parts.world, parts.screen
    fingerprint = parts.engine.check_replicas()
    samples = samples_of(parts)
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
