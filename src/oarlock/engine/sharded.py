"""Sharding 3: weights, gradients and optimizer state in shards, by PyTorch's FSDP2.

FSDP2 (``torch.distributed.fsdp.fully_shard``) gathers a block's weights just before it runs and
sums its gradients to their shards right after. Around it the step is the same: exact weights (it
is told to add, not to average), and an optimizer that works on this rank's shards as plain flat
tensors. Each forward is collective. So a rank with fewer micro-batches than others runs its last
one again, with a loss of zero, as often as it takes.

(Zhao et al., "PyTorch FSDP", 2023; Rajbhandari et al., "ZeRO", 2020.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter

from oarlock.batches import MicroBatch
from oarlock.engine.agreement import Agreement
from oarlock.engine.dtensors import is_sharded, local, whole
from oarlock.engine.exchange import Alone
from oarlock.engine.names import clean, named_parameters
from oarlock.engine.norm import global_norm
from oarlock.engine.pieces import Pieces, State
from oarlock.errors import ConfigError, SetupError
from oarlock.world import World

HYBRID = "hybrid"  # shards inside a machine, whole replicas of them between machines


class Sharded(Alone):
    """Each rank keeps 1/N of everything; blocks are gathered while they run.

    The model is changed: its parameters become DTensors, and blocks get FSDP2's hooks.

    Args:
        world: the ranks, more than one.
        model: whole and alike on all ranks.
        optimizer: elementwise; its groups then hold this rank's shards, flat.
        blocks: classes of modules that are gathered one by one; None: found (see
            :func:`find_blocks`).
        hybrid: shard over the ranks of one machine only.

    Raises:
        SetupError: a model that FSDP2 cannot shard, or is sharded already. ConfigError: no module
            of ``blocks``, or machines with unequal numbers of ranks.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        blocks: Sequence[type[nn.Module]] | None = None,
        hybrid: bool = False,
    ) -> None:
        super().__init__([])
        self.world, self._model = world, model
        before = named_parameters(model)
        mesh = make_mesh(world, hybrid)
        self._units = self._shard(mesh, find_blocks(model, blocks))
        self._named = [(n, p) for n, p in named_parameters(model) if p.requires_grad]
        after = dict(named_parameters(model))
        self._shapes = {name: p.shape for name, p in self._named}
        self._counting = self._checking = self._evaluated = False
        self._count, self._place = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self._group = mesh.get_group(mesh.ndim - 1)
        _exchange_members(optimizer, {p: after[n] for n, p in before})
        pieces = {
            name: Parameter(local(p).detach().view(-1))
            for name, p in self._named
            if local(p).numel()
        }
        self.slices: Pieces = Pieces(dict(self._named), pieces, self._span, optimizer, world)
        self._used: set[str] = set()
        self._watched: set[int] = set()
        self._bytes = _bytes_a_round(self._units, self._count)

    def _shard(self, mesh: DeviceMesh, blocks: Sequence[nn.Module]) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if any(isinstance(m, FSDPModule) for m in self._model.modules()):
            raise SetupError(
                "The model is sharded already, by an earlier engine or by fully_shard.\n"
                "Build it anew and pass it as it is."
            )
        _refuse_mixed(self._model, blocks)
        try:
            for module in (*blocks, self._model):
                fully_shard(module, mesh=mesh)
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise SetupError(f"FSDP2 cannot shard this model: {error}\nUse sharding=2.") from error
        units: list[Any] = [m for m in self._model.modules() if isinstance(m, FSDPModule)]
        for unit in units:
            unit.set_gradient_divide_factor(1.0)  # sums; the step divides once
            unit.set_force_sum_reduction_for_comms(True)  # or it multiplies first, which gloo can't
            if hasattr(unit, "set_reduce_scatter_unused_params"):
                # a layer that only some ranks used: the others send zeros instead of nothing
                unit.set_reduce_scatter_unused_params(True)
            unit.register_forward_pre_hook(self._watch)
            unit.register_forward_pre_hook(self._same_block, prepend=True)  # before it is gathered
        self._unit_names = [
            clean(n) or "the whole model" for n, m in self._model.named_modules() if m in units
        ]
        return units

    def _span(self, name: str, rank: int) -> tuple[int, int]:
        """FSDP2 cuts a parameter along its first dimension, rounding up."""
        shape = self._shapes[name]
        rows = shape[0]
        a_row = shape[1:].numel()
        each = -(-rows // self._count)
        place = rank % self._count
        return min(place * each, rows) * a_row, min((place + 1) * each, rows) * a_row

    # -- which micro-batches ---------------------------------------------------------------------

    def rounds(
        self, own: Sequence[MicroBatch], agreement: Agreement | None = None
    ) -> Iterator[tuple[MicroBatch, bool]]:
        if agreement is not None:
            agreement.reach()
        counts = self.world.gather(len(own)) if agreement is None else agreement.counts
        if not any(counts):
            return
        if agreement is None and not self._evaluated:
            self._checking = self._evaluated = True
        echo = own[-1] if own else None
        if 0 in counts:  # a rank without any borrows one; before the first forward, where all meet
            lender = next(rank for rank, count in enumerate(counts) if count)
            echo = self.world.gather(echo if self.world.rank == lender else None)[lender]
        for micro_batch in own:
            yield micro_batch, True
        for _ in range(max(counts) - len(own)):
            kept = [b.clone() for b in self._model.buffers()]
            assert echo is not None
            yield echo, False
            with torch.no_grad():
                for buffer, before in zip(self._model.buffers(), kept, strict=True):
                    buffer.copy_(before)
        if not torch.is_grad_enabled():  # no backward will free what the forward gathered
            for unit in self._units:
                unit.reshard()
            self._same_block()
            self._checking = False

    @contextmanager
    def meetings(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                with self.world.lost_peer("gathering weights or summing gradients"):
                    raise
            if "setStorage" in str(error):
                raise SetupError(
                    "At sharding 3 a loss function cannot run a backward of its own, or a block "
                    "again: its weights are freed after the first.\nUse sharding=2."
                ) from error
            raise

    def _same_block(self, unit: nn.Module | None = None, args: Any = None) -> None:
        """In some steps: all ranks run the same block now (None: are at the end of a forward)."""
        if not self._checking:
            return
        at = self._units.index(unit) if unit is not None else len(self._units)
        records = self.world.announce("forward", self.world.steps, at).wait()
        if len({record[1] for record in records}) > 1:
            self.world._failed = True
            names = [*self._unit_names, "the end of the loss function"]
            rows = "\n".join(f"  rank {r}: {names[rec[1]]}" for r, rec in enumerate(records))
            raise SetupError(
                f"Step {self.world.steps + 1}: the ranks do not run the same blocks, as sharding 3 "
                f"needs, since a block's weights are gathered when it runs. They are at:\n{rows}\n"
                "Use sharding=2; or name larger blocks, which every micro-batch runs, with "
                "shard_blocks; and call the model in every micro-batch."
            )

    # -- in the step -----------------------------------------------------------------------------

    def _watch(self, unit: nn.Module, args: Any) -> None:
        """See which gathered parameters get a gradient; FSDP2 keeps these for all steps."""
        for name, parameter in unit.named_parameters():
            new = parameter.requires_grad and id(parameter) not in self._watched
            if new and not is_sharded(parameter):  # an inner unit's is gathered later
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._mark(unit, name))

    def _mark(self, unit: nn.Module, name: str) -> Any:
        prefix = next(n for n, m in self._model.named_modules() if m is unit)
        full = clean(f"{prefix}.{name}" if prefix else name)

        def arrived(parameter: Parameter) -> None:
            if self._counting:
                self._used.add(full)

        return arrived

    def begin(self) -> None:
        self.slices.check_in_place()
        self._used = set()
        self._counting = True
        step = self.world.steps + 1
        self._checking = step & (step - 1) == 0  # 1, 2, 4, 8, …
        self.sent_bytes, self.wait_seconds = 0, 0.0

    def before_backward(self, agreement: Agreement, last: bool) -> None:
        self._same_block()
        self.sent_bytes += self._bytes

    def used(self) -> list[bool]:
        return [name in self._used for name, _ in self._named]

    def stop(self) -> None:
        self._counting = self._checking = False

    def attach(self, used: Sequence[bool]) -> list[Tensor]:
        gradients = []
        for (name, parameter), is_used in zip(self._named, used, strict=True):
            grad, parameter.grad = parameter.grad, None
            if self.slices.owns(name):
                piece = self.slices.piece(name)
                piece.grad = local(grad).view(-1) if is_used and grad is not None else None
                if piece.grad is not None:
                    gradients.append(piece.grad)
        return gradients

    def norm(self, gradients: Sequence[Tensor]) -> float:
        square = torch.tensor(global_norm(gradients) ** 2, dtype=torch.float64)
        squares = self.world.gather(float(square))
        first = self.world.rank - self.world.rank % self._count  # this replica's ranks
        return math.sqrt(math.fsum(squares[first : first + self._count]))

    def bad_gradient(self) -> str:
        bad = [
            i
            for i, (name, _) in enumerate(self._named)
            if self.slices.owns(name)
            and self.slices.piece(name).grad is not None
            and not bool(torch.isfinite(self.slices.piece(name).grad).all())  # type: ignore[arg-type]
        ]
        last = max(self.world.gather(max(bad, default=-1)))
        return self._named[last][0] if last >= 0 else ""

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[Parameter]]:
        return self.slices.groups

    def whole_state(self) -> State | None:
        return self.slices.whole_state()

    def whole_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        wanted, found = set(names), {}
        for name, parameter in named_parameters(self._model):
            if name in wanted:
                tensor = whole(parameter.detach())
                if self.world.is_main:
                    found[name] = tensor.cpu()
        return found

    def detach(self) -> None:
        raise SetupError(
            "The model and its optimizer are in the shards of an earlier engine (sharding=3).\n"
            "Build both anew for a new engine."
        )


def make_mesh(world: World, hybrid: bool) -> DeviceMesh:
    """All ranks in one dimension; hybrid: machines (replicas) × ranks of a machine (shards)."""
    kind = world.device.type
    if not hybrid:
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    places = world.gather((world.local_rank, world.local_size))
    inside = world.local_size
    if places != [(rank % inside, inside) for rank in range(world.size)] or world.size % inside:
        raise ConfigError(
            "sharding='hybrid' needs the same number of ranks on every machine, numbered machine "
            f"by machine; here they are (local rank, of): {places}.\nUse sharding=3."
        )
    shape, names = (world.size // inside, inside), ("replicate", "shard")
    return init_device_mesh(kind, shape, mesh_dim_names=names)


def find_blocks(model: nn.Module, given: Sequence[type[nn.Module]] | None) -> list[nn.Module]:
    """The modules that are gathered one at a time: what repeats in the model.

    Those of the ``given`` classes; else of the classes that a transformers model says are not to
    be split; else the items of every outermost ModuleList or Sequential of two or more modules of
    one class that have parameters and modules of their own, and are not experts, which not every
    micro-batch runs. None is found: the whole model is one.

    Raises:
        ConfigError: the model has no module of a ``given`` class.
    """
    modules = list(model.modules())
    if given is not None:
        for kind in given:
            if not any(isinstance(m, kind) for m in modules):
                raise ConfigError(
                    f"shard_blocks names {kind.__name__}, but the model has no such module."
                )
        return _with_parameters(m for m in modules if isinstance(m, tuple(given)))
    names = {n for m in modules for n in getattr(m, "_no_split_modules", None) or ()}
    if found := _with_parameters(m for m in modules if type(m).__name__ in names):
        return found
    blocks: list[nn.Module] = []
    for name, module in model.named_modules():
        children = list(module.children())
        alike = len(children) > 1 and len({type(c) for c in children}) == 1
        inside = any(module in set(block.modules()) for block in blocks)
        deep = all(any(True for _ in child.children()) for child in children)
        fits = alike and deep and not inside and "expert" not in name.lower()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and fits:
            blocks += _with_parameters(children)
    return blocks


def _with_parameters(modules: Any) -> list[nn.Module]:
    return [m for m in modules if any(True for _ in m.parameters())]


def _refuse_mixed(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """FSDP2 sums the gradients of a block in one tensor, so of one dtype, and says so late."""
    taken: set[int] = set()
    names = {id(p): n for n, p in named_parameters(model)}
    for module in (*blocks, model):
        own = [p for p in module.parameters() if p.requires_grad and id(p) not in taken]
        taken |= {id(p) for p in own}
        odd = next((p for p in own if p.dtype != own[0].dtype), None)
        if odd is not None:
            raise SetupError(
                f"Sharding 3 needs trainable parameters of one dtype in each block, but "
                f"{names[id(own[0])]} is {own[0].dtype} and {names[id(odd)]} is {odd.dtype}.\n"
                "Give them one dtype, or use sharding=2."
            )


def _exchange_members(optimizer: torch.optim.Optimizer, to: dict[Parameter, Parameter]) -> None:
    """The optimizer's groups and state, over other parameters."""
    for group in optimizer.param_groups:
        group["params"] = [to.get(p, p) for p in group["params"]]
    for parameter in list(optimizer.state):
        if isinstance(parameter, Parameter) and parameter in to:
            optimizer.state[to[parameter]] = optimizer.state.pop(parameter)


def _bytes_a_round(units: Sequence[Any], count: int) -> int:
    """What a rank sends for one micro-batch: weights for forward and backward, and gradients.

    The outermost unit's weights stay between the two.
    """
    seen: set[int] = set()
    total = 0
    for i, unit in reversed(list(enumerate(units))):  # inner ones first
        own = [p for p in unit.parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        weights = sum(p.numel() * p.element_size() for p in own)
        gradients = sum(p.numel() * p.element_size() for p in own if p.requires_grad)
        total += (2 if i else 1) * weights + gradients
    return total * (count - 1) // count
