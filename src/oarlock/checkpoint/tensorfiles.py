"""Tensors and small values to files and back: safetensors and JSON, never pickle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from oarlock.errors import CheckpointError, SetupError
from oarlock.world import World

# Kept under their own dtype; anything else goes as bytes, with the dtype beside it.
_DIRECT = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip


def describe(tensor: Tensor) -> dict[str, Any]:
    """dtype and shape, as JSON."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def dtype_of(description: Mapping[str, Any]) -> torch.dtype:
    """The dtype that :func:`describe` wrote."""
    dtype = getattr(torch, str(description["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"This PyTorch knows no dtype {description['dtype']!r}.")
    return dtype


def plain(tensor: Tensor, name: str) -> Tensor:
    """The tensor's own values in host memory, contiguous. SetupError where it has none to take."""
    if is_traceable_wrapper_subclass(tensor):
        raise SetupError(
            f"{name} is a {type(tensor).__name__}, which cannot be stored exactly.\n"
            "Use plain tensors in the model and the optimizer."
        )
    tensor = tensor.detach().as_subclass(Tensor)
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise SetupError(f"{name} ({tensor.layout}, on {tensor.device}) has no values to store.")
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, [n]; the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit (so a NaN equals itself)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous())))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. OSError where the disk refuses."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = plain(tensor, name)
        value = value if value.dtype in _DIRECT else as_bytes(value)
        storage = value.untyped_storage().data_ptr()
        # views of one storage are refused by the format; each is stored by itself
        out[name] = value.clone() if storage in seen else value
        seen.add(storage)
    with disk_errors(path):
        save_file(out, path, metadata={"format": "pt"})


class disk_errors:
    """Turns safetensors' text about the operating system's error into the OSError it was."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if isinstance(error, SafetensorError):
            number = re.search(r"os error (\d+)", str(error))
            if number:
                text = re.sub(r".*I/O error: | \(os error.*", "", str(error))
                raise OSError(int(number[1]), text, str(self.path)) from error


class Reader:
    """Reads tensors from the safetensors files of a folder; only from ``files``, if given."""

    def __init__(self, folder: Path, files: Sequence[str] | None = None) -> None:
        self.folder, self.files = folder, files
        self._open: dict[str, Any] = {}

    def keys(self, file: str) -> list[str]:
        """The names of the tensors in ``file``."""
        return list(self._file(file).keys())

    def get(self, file: str, key: str, description: Mapping[str, Any] | None = None) -> Tensor:
        """A tensor in host memory; a view of the file, so clone what is to be kept."""
        try:
            value = self._file(file).get_tensor(key)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file} has no usable tensor {key}.") from error
        if description is None:
            return value
        dtype = dtype_of(description)
        if value.dtype != dtype and dtype not in _DIRECT:
            value = value.clone().view(dtype)  # cloned: the bytes may lie unaligned in the file
        if value.dtype != dtype or value.numel() != torch.Size(description["shape"]).numel():
            raise CheckpointError(f"{self.folder / file}: {key} is not what the checkpoint says.")
        return value.reshape(description["shape"])

    def _file(self, file: str) -> Any:
        if self.files is not None and file not in self.files:
            raise CheckpointError(f"{self.folder}: its manifest does not name {file!r}.")
        if file not in self._open:
            try:
                handle = safe_open(str(self.folder / file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from error
            self._open[file] = handle
        return self._open[file]

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Taker:
    """Gets stored tensors to all ranks: rank 0 reads, the others receive."""

    def __init__(self, world: World, reader: Reader | None) -> None:
        self.world, self.reader = world, reader

    def into(self, target: Tensor, description: dict[str, Any]) -> None:
        """Overwrite ``target``, alike in dtype and shape, on all ranks."""
        if self.reader is not None:
            key = description.get("key", description.get("tensor"))
            target.copy_(self.reader.get(description["file"], str(key), description))
        if self.world.size == 1 or target.numel() == 0:
            return
        if target.dtype not in _DIRECT:  # backends know fewer dtypes than PyTorch
            raw = as_bytes(target.contiguous())
            self.world.broadcast_tensor(raw)
            target.copy_(raw.view(target.dtype).reshape(target.shape))
        else:
            self.world.broadcast_tensor(target)

    def new(self, description: dict[str, Any], device: torch.device | str = "cpu") -> Tensor:
        """The tensor on all ranks, in memory of its own."""
        target = torch.empty(description["shape"], dtype=dtype_of(description), device=device)
        self.into(target, description)
        return target


# -- values ------------------------------------------------------------------------------------


def pack(value: Any, where: str, file: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON: numbers, text, None, tensors, and lists, tuples and dicts of these.

    A tensor goes into ``tensors`` (to be written to ``file``) under ``where``, the path to it.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value if type(value) in (bool, int, float, str, type(None)) else _basic(value)
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, Parameter):
            plain(value, where)
        while where in tensors:  # the keys 1 and "1" are two
            where += "'"
        tensors[where] = value
        return {"tensor": where, "file": file, **describe(value)}
    if isinstance(value, list):
        return [pack(v, f"{where}/{i}", file, tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [pack(v, f"{where}/{i}", file, tensors) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            kind: [
                [pack(k, where, file, tensors), pack(v, f"{where}/{k}", file, tensors)]
                for k, v in value.items()
            ]
        }
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return pack(value.item(), where, file, tensors)
    raise SetupError(
        f"{where} is a {type(value).__qualname__}, which a checkpoint cannot hold.\n"
        "It holds numbers, text, None and tensors, in lists, tuples and dicts; nothing is pickled."
    )


def _basic(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def unpack(value: Any, take: Callable[[dict[str, Any]], Tensor]) -> Any:
    """What :func:`pack` was given; ``take`` gets a tensor's description."""
    if isinstance(value, list):
        return [unpack(v, take) for v in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return take(value)
    if "tuple" in value:
        return tuple(unpack(v, take) for v in value["tuple"])
    if "counter" in value:
        return Counter({unpack(k, take): unpack(v, take) for k, v in value["counter"]})
    return {unpack(k, take): unpack(v, take) for k, v in value["dict"]}


def check_json(value: Any, where: str) -> None:
    """SetupError naming the place where ``value`` is not plain JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise SetupError(f"{where} has the key {key!r}; keys must be text.")
            check_json(inner, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            check_json(inner, f"{where}[{i}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise SetupError(
            f"{where} is a {type(value).__qualname__}; it must be plain JSON: text, numbers, "
            "true or false, None, lists and dicts."
        )
