"""PyTorch's own DDP tests, from the installed wheel, on forked ranks that joined an Oarlock world.

Nearly all of them ask for a GPU a rank, though what they check has nothing to do with one. Here
they run on the CPU: the decorators that skip are taken away when the module is imported, and in the
ranks a device that is a number or "cuda" means the CPU.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import adapter
import torch
from ranks import free_port
from torch import nn
from torch.overrides import TorchFunctionMode

import oarlock
from oarlock.engine.buffers import _GlobalBatchNorm, synchronise_batch_norm
from oarlock.world import current

RANKS = 3
_MODULE = "torch.testing._internal.distributed.distributed_test"


@functools.cache
def upstream() -> ModuleType:
    """PyTorch's module with the tests. It reads the environment while it is imported."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        # Its own base class with text comparisons that no DDP test uses; not worth a dependency.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.ACCEPT = False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with mock.patch.dict(os.environ, {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS)}):
        common = importlib.import_module("torch.testing._internal.common_distributed")

        def never(*_: Any, **__: Any) -> Callable[[Any], Any]:
            return lambda test: test

        with (
            mock.patch.object(common, "skip_if_lt_x_gpu", never),
            mock.patch.object(common, "skip_if_no_gpu", lambda test: test),
        ):
            return importlib.import_module(_MODULE)


def ddp_tests() -> set[str]:
    """Names of the tests that are about DDP: by their name, or because they build one."""
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    base = next(n for n in ast.walk(tree) if getattr(n, "name", "") == "_DistTestBase")
    assert isinstance(base, ast.ClassDef)
    methods = {f.name: f for f in base.body if isinstance(f, ast.FunctionDef)}
    mentions = {name: _mentions(function) for name, function in methods.items()}
    builders = {"DistributedDataParallel"}
    while True:  # a test may build one through helpers
        more = {name for name, used in mentions.items() if used & builders} - builders
        if not more:
            break
        builders |= more
    return {t for t in methods if t.startswith("test_") and (t in builders or _says_ddp(t))}


def _mentions(function: ast.FunctionDef) -> set[str]:
    nodes = list(ast.walk(function))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {
        n.id for n in nodes if isinstance(n, ast.Name)
    }


def _says_ddp(name: str) -> bool:
    return any(word in name.lower() for word in ("ddp", "distributeddataparallel", "sync"))


# -- the CPU in a GPU's place ----------------------------------------------------------------------


def _is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _OnTheCPU(TorchFunctionMode):
    """Tensors asked for on, or moved to, a GPU are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class SynchronisedBatchNorm(_GlobalBatchNorm):
    """In the place of ``nn.SyncBatchNorm``, which has no CPU form: what the engine takes there."""

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module) -> nn.Module:
        synchronise_batch_norm(module, current())
        return module


@contextmanager
def in_place_of_ddp(wrapper: type[nn.Module]) -> Iterator[None]:
    """In a rank: ``wrapper`` is DDP, the engine's BatchNorm is SyncBatchNorm, the CPU is a GPU."""
    to = nn.Module.to

    def move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module if args and _is_gpu(args[0]) else to(module, *args, **kwargs)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with ExitStack() as stack:
        for owner, name, value in (
            (nn.parallel, "DistributedDataParallel", wrapper),
            (upstream(), "DistributedDataParallel", wrapper),
            (nn, "SyncBatchNorm", SynchronisedBatchNorm),
            (nn.Module, "cuda", lambda module, *_: module),
            (nn.Module, "to", move),
            (torch.cuda, "set_device", nothing),
            (torch.cuda, "synchronize", nothing),
            (torch.cuda, "manual_seed", nothing),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_OnTheCPU())
        yield


# -- running ---------------------------------------------------------------------------------------


def _case(wrapper: type[nn.Module], timeout: float) -> type[unittest.TestCase]:
    """A test case as PyTorch makes them, but forked and in an Oarlock world."""
    module = upstream()

    class Peers(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            self.addCleanup(Path(self.file_name).unlink, missing_ok=True)  # PyTorch's stays
            # Forked, so that torch is imported once; see tests/ranks.py.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
            torch.set_num_threads(1)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            self = cls(test_name)
            self.rank, self.file_name = rank, file_name
            world = oarlock.join(timeout=timeout)
            with in_place_of_ddp(wrapper):
                self.run_test(test_name, pipe)
            world.close()
            sys.exit(0)

    Peers.__qualname__ = "Peers"
    return Peers


def run(name: str, wrapper: type[nn.Module], ranks: int, timeout: float) -> str | None:
    """Run one of PyTorch's tests with ``wrapper`` as DDP. None, or how it failed.

    A skipped test counts as failed: the table says that it applies.
    """

    upstream()
    common = importlib.import_module("torch.testing._internal.common_distributed")
    env = {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    result = unittest.TestResult()
    with (
        mock.patch.dict(os.environ, env),
        mock.patch.object(common, "get_timeout", return_value=timeout),
        mock.patch.object(common, "logger", mock.Mock()),  # failures are in the result too
    ):
        _case(wrapper, timeout)(name).run(result)
    for _, text in [*result.errors, *result.failures, *result.skipped]:
        return text
    return None if result.testsRun == 1 else "it did not run"


class Runner:
    """A process of its own that runs them: PyTorch's test modules change settings of whoever
    imports them, and the ranks are forked from a process that has them loaded."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def __call__(
        self,
        name: str,
        wrapper: type[nn.Module] = adapter.Adapter,
        ranks: int = RANKS,
        timeout: float = 30.0,
    ) -> str | None:
        self._pipe.send((name, wrapper, ranks, timeout))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Any) -> None:
    while (asked := pipe.recv()) is not None:
        pipe.send(run(*asked))
