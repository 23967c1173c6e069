"""The command line. Each command is a thin door to a function, imported when it is called."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from oarlock import __version__
from oarlock.errors import OarlockError, UserError

# Typer carries its own copy of click in newer versions; its classes are reached through this one.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_EXTRAS = {
    "transformers": "finetune",
    "peft": "finetune",
    "tokenizers": "finetune",
    "datasets": "finetune",
    "pydantic": "finetune",
    "gguf": "finetune",
    "sentencepiece": "finetune",
    "accelerate": "finetune",
    "tensorboard": "tensorboard",
}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact, fast and loud data-parallel training for PyTorch.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"oarlock {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


Ranks = Annotated[
    int | None,
    typer.Option("-n", "--ranks", metavar="N", help="Ranks to start; default: one per device."),
]
RunFile = Annotated[
    Path | None, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="PATH", help="Model folder, GGUF file or hub id.")
]
Data = Annotated[
    str | None, typer.Option("--data", metavar="PATH", help="Training data: file, folder, hub id.")
]
Output = Annotated[
    str | None, typer.Option("--output", metavar="DIR", help="Folder for the results.")
]
Method = Annotated[str | None, typer.Option("--method", metavar="full|lora", help="What to train.")]
Epochs = Annotated[float | None, typer.Option("--epochs", help="Passes over the data.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Stop after so many updates.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", metavar="ROWS", help="Rows in a step, over all ranks.")
]
MicroBatchSize = Annotated[
    int | None,
    typer.Option("--micro-batch-size", metavar="ROWS", help="Rows that a device takes at a time."),
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Highest learning rate.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", metavar="TOKENS", help="Longest row.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of order and dropout.")]
Precision = Annotated[
    str | None, typer.Option("--precision", metavar="fp32|bf16|fp16", help="Number format.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the run file; repeatable."),
]


def _overrides(settings: list[str] | None, **flags: Any) -> dict[str, object]:
    """The flags given, by their dotted keys in the run file ('train__lr' is 'train.lr')."""
    given: dict[str, object] = {}
    for item in settings or []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {item!r}: write it as --set key=value, like train.lr=1e-4.")
        given[key.strip()] = value.strip()
    for name, value in flags.items():
        key = name.replace("__", ".")
        if value is None:
            continue
        if key in given:
            raise UserError(f"{key} is given twice: by its flag and by --set.")
        given[key] = value
    return given


@app.command()
def demo(
    ranks: Ranks = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where to put the results.")
    ] = None,
) -> None:
    """Fine-tune a small real model, replicas proven identical."""
    _check_ranks(ranks)
    from oarlock.demo.run import demo as run

    raise typer.Exit(run(ranks, folder))


@app.command()
def check(
    run_file: RunFile = None,
    model: Model = None,
    data: Data = None,
    output: Output = None,
    method: Method = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    lr: LearningRate = None,
    max_length: MaxLength = None,
    seed: Seed = None,
    precision: Precision = None,
    settings: Set = None,
    ranks: Ranks = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check model, data and settings without training."""
    _check_ranks(ranks)
    overrides = _overrides(
        settings,
        model__path=model,
        data__train=data,
        train__output=output,
        train__method=method,
        train__epochs=epochs,
        train__steps=steps,
        train__batch_size=batch_size,
        train__micro_batch_size=micro_batch_size,
        train__lr=lr,
        data__max_length=max_length,
        train__seed=seed,
        train__precision=precision,
    )
    _need_something("check", run_file, overrides)
    from oarlock.finetune.command import check as run

    raise typer.Exit(run(run_file, overrides, json, ranks))


@app.command()
def finetune(
    run_file: RunFile = None,
    model: Model = None,
    data: Data = None,
    output: Output = None,
    method: Method = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    lr: LearningRate = None,
    max_length: MaxLength = None,
    seed: Seed = None,
    precision: Precision = None,
    settings: Set = None,
    ranks: Ranks = None,
) -> None:
    """Fine-tune an open model on all devices of this machine."""
    _check_ranks(ranks)
    overrides = _overrides(
        settings,
        model__path=model,
        data__train=data,
        train__output=output,
        train__method=method,
        train__epochs=epochs,
        train__steps=steps,
        train__batch_size=batch_size,
        train__micro_batch_size=micro_batch_size,
        train__lr=lr,
        data__max_length=max_length,
        train__seed=seed,
        train__precision=precision,
    )
    _need_something("finetune", run_file, overrides)
    from oarlock.finetune.command import finetune as run

    raise typer.Exit(run(run_file, overrides, ranks))


class _LaunchCommand(TyperCommand):
    """Leaves everything from the script, or from ``-m module``, untouched."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for i, word in enumerate(args):
            if word == "-m":
                return super().parse_args(ctx, [*args[:i], "--", *args[i:]])
            value_of_option = i > 0 and args[i - 1] in ("-n", "--ranks", "--log-dir")
            if word == "--" or (not word.startswith("-") and not value_of_option):
                break
        return super().parse_args(ctx, args)


@app.command(
    cls=_LaunchCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[-n N] [--log-dir DIR]",
)
def launch(
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="script.py [ARGS]", help="Or: -m module [ARGS]…", show_default=False
        ),
    ] = None,
    ranks: Ranks = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="DIR", help="Keep the ranks' complete logs in here."),
    ] = None,
) -> None:
    """Run a training script, one process per device."""
    from oarlock.launch.local import launch as run

    raise typer.Exit(run(target or [], n=ranks, log_dir=log_dir))


@app.command()
def resume(
    run_folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder.")],
    ranks: Ranks = None,
) -> None:
    """Go on with an interrupted fine-tune."""
    _check_ranks(ranks)
    if not run_folder.is_dir():
        what = "is not a folder" if run_folder.exists() else "does not exist"
        raise UserError(f"{run_folder} {what}; give the output folder of a run.")
    from oarlock.finetune.command import resume as run

    raise typer.Exit(run(run_folder, ranks))


def _check_ranks(ranks: int | None) -> None:
    if ranks is not None and ranks < 1:
        raise UserError(f"The number of ranks is {ranks}; it must be at least 1.")


def _need_something(command: str, run_file: Path | None, overrides: dict[str, object]) -> None:
    if run_file is None and not overrides:
        raise UserError(
            f"Give a run file (`oarlock {command} RUN.toml`), or at least --model and --data."
        )
    if run_file is None:
        return
    if run_file.is_dir():
        raise UserError(f"{run_file} is a directory; give the run file in it.")
    if not run_file.exists():
        raise UserError(f"No run file {run_file} (looked in {os.getcwd()}).")


def main() -> NoReturn:
    """The entry point of ``oarlock``: run a command and exit with its status."""
    try:
        status = app(prog_name="oarlock", standalone_mode=False)
    except _UsageError as error:
        status = _usage(error)
    except OarlockError as error:
        status = _clear(error)
    except (KeyboardInterrupt, typer.Abort):
        print("oarlock: interrupted.", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        status = 141  # the reader is gone (`| head`), as a shell reports it
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        print(
            f"oarlock: this command needs {error.name}. Install it with "
            f"`pip install 'oarlock[{extra}]'`.",
            file=sys.stderr,
        )
        status = 2
    _leave(status if isinstance(status, int) else 0)


def _usage(error: Any) -> int:
    """One line for a wrong command line."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "oarlock"
    message = " ".join(str(error.format_message()).split()).rstrip(".")
    print(f"{command}: {message}. (See `{command} --help`.)", file=sys.stderr)
    return 2


def _clear(error: OarlockError) -> int:
    if os.environ.get("OARLOCK_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    else:
        print(f"oarlock: {error}", file=sys.stderr)
    return error.exit_status


def _leave(status: int) -> NoReturn:
    """Exit; a reader of our output that has gone is no reason for a message."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


if __name__ == "__main__":
    main()
