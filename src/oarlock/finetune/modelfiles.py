"""Where a model's files are, and whether they are whole; weights are not loaded for that."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

from oarlock.errors import ModelError


def resolve(path: str, converted: Path | None = None) -> Path:
    """The local folder of a model: itself, a GGUF's converted copy, or the hub's cache.

    Args:
        path: folder, GGUF file or hub id.
        converted: where a GGUF file's weights are kept as an ordinary folder; made here if needed.
    """
    place = Path(path)
    if place.is_dir():
        return place
    if path.endswith(".gguf"):
        check_gguf(place)
        if converted is None:
            return place
        if not (converted / "config.json").exists():
            from oarlock.finetune.model import convert_gguf

            convert_gguf(place, converted)
        return converted
    if place.is_file():
        raise ModelError(
            f"{path} is a file; a model is a folder (with config.json and *.safetensors), a hub id "
            "or a GGUF file (*.gguf)."
        )
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ModelError(f"{path}: no such model folder.")
    return _from_hub(path)


def _from_hub(name: str) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
    with contextlib.suppress(Exception):
        cached = Path(hub.snapshot_download(name, allow_patterns=wanted, local_files_only=True))
        check_folder(cached)
        return cached
    try:
        info = hub.model_info(name, timeout=10)
        files = [f.rfilename for f in info.siblings or []]
        if not any(f.endswith(".safetensors") for f in files):
            wanted.append("*.bin")
        return Path(hub.snapshot_download(name, allow_patterns=wanted))
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError(
            f"{name}: not a folder here, and the hub has no such model (or it wants a login: "
            "`hf auth login`)."
        ) from None
    except OSError as error:
        raise ModelError(_offline(name, error)) from None
    except Exception as error:  # the http client's own classes, whichever it is today
        raise ModelError(_offline(name, error)) from None


def _offline(name: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
    return (
        f"{name}: not a folder here, not whole in the local cache, and the hub cannot be reached.\n"
        "Give the path of a model folder or a GGUF file, or connect to the network once.\n"
        f"(the hub's client said: {reason})"
    )


# -- checks that need no weights in memory ------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Is it a whole model folder? Looks at names, sizes and headers only.

    Raises:
        ModelError: empty, no model, or a truncated file (named).
    """
    config = folder / "config.json"
    if not config.exists():
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{folder} is a LoRA adapter, not a whole model.\n"
                "Merge it into its base first, and give the merged folder."
            )
        what = "is empty" if not any(folder.iterdir()) else "is no model folder: no config.json"
        raise ModelError(f"{folder} {what}.\nA model folder has config.json, weights, tokenizer.")
    try:
        parsed = json.loads(config.read_text("utf-8"))
        if not isinstance(parsed, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        raise ModelError(f"{config}: not a readable model configuration: {error}.") from None
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, OSError) as error:
            raise ModelError(f"{index}: not a readable index of weights: {error}.") from None
        missing = [n for n in names if not (folder / n).exists()]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing, first: "
                f"{missing[0]}.\nCopy or download the model again."
            )
        files = [folder / n for n in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files and not list(folder.glob("*.bin")):
            raise ModelError(f"{folder} has config.json but no weights (*.safetensors).")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """A safetensors file says in its header how long it must be."""
    size = file.stat().st_size
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > size:
                raise ValueError("its header is cut off")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        expected = 8 + length + max((v["data_offsets"][1] for v in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file}: damaged or no safetensors file ({error}).\nCopy or download it again."
        ) from None
    if size != expected:
        raise ModelError(
            f"{file}: {size} bytes, but its header says {expected}: the file is truncated or "
            "damaged.\nCopy or download it again."
        )


def check_gguf(file: Path) -> None:
    if not file.exists():
        raise ModelError(f"{file}: no such GGUF file.")
    if file.is_dir():
        raise ModelError(f"{file} is a folder, not a GGUF file.")
    try:
        with file.open("rb") as f:
            magic = f.read(4)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from None
    if magic != b"GGUF":
        raise ModelError(f"{file} is not a GGUF file (it does not begin with 'GGUF').")
