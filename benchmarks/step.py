"""One step, side by side in one run: Oarlock, plain PyTorch without communication, and DDP.

    python benchmarks/step.py [--sizes 1.8M 13.8M 44M] [--runs 4] [--rounds 12] [--ranks 2]

Contestants take turns step by step, in an order drawn anew each round, so that a slow moment of the
machine hits all alike; the table shows medians and their ratios. All do the same work: forward,
backward, clipping to norm 1, AdamW. The one that Oarlock is held against runs twice, as two
contestants: what those two differ by is noise. One process may favour one of them for as long as it
lives, so the race is run several times in fresh processes, in each the contestants are built in
another order, and the times are pooled. While it races glibc is told to keep freed memory.

"alone" is the exchange with nothing beside it; "waited" is what of it backward did not hide: the
shortest wait among the ranks, since the others also wait for that rank to finish its backward.
Memory is measured apart, one contestant a process: the growth of the resident set's peak over what
the model itself takes.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from models import GPT, SIZES, Size, loss_sum

import oarlock
from oarlock import Batch, MicroBatch

TIME = 64  # tokens a row


def build(size: Size) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A fresh model and its optimizer, the same on every call."""
    torch.manual_seed(0)
    model = GPT(size)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def plain(size: Size, world: oarlock.World) -> Callable[[Tensor], None]:
    """What one writes for one device; on several ranks: no communication at all."""
    model, optimizer = build(size)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        loss, weight = loss_sum(model, ids)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(loss.detach())

    return step


def ddp(size: Size, world: oarlock.World) -> Callable[[Tensor], None]:
    """PyTorch's DistributedDataParallel with gradients as bucket views."""
    model, optimizer = build(size)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        loss, weight = loss_sum(wrapped, ids)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(loss.detach())

    return step


class Oarlock:
    """This engine; keeps the last result for the bytes and the waiting time."""

    def __init__(self, size: Size, world: oarlock.World) -> None:
        model, optimizer = build(size)
        self.engine = oarlock.DataParallel(model, optimizer, world, clip_norm=1.0)
        self.waits: list[float] = []
        self.bytes = 0

    def __call__(self, ids: Tensor) -> None:
        world, step = self.engine.world, self.engine.steps_done
        part = MicroBatch(world.rank, tuple(range(len(ids))), ids)
        batch = Batch(0, step, world.size, world.size * len(ids), [part])  # as a Loader makes it
        result = self.engine.step(batch, loss_sum)
        self.waits.append(result.wait_seconds)
        self.bytes = result.exchanged_bytes


def exchange_alone(engine: oarlock.DataParallel) -> float:
    """Seconds that the same buckets take when nothing else runs (median of 5)."""
    if not engine.exchange.buckets:
        return 0.0
    times = []
    for _ in range(5):
        engine.world.barrier()
        start = time.perf_counter()
        works = [dist.all_reduce(b.allocate(), async_op=True) for b in engine.exchange.buckets]
        for work in works:
            work.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def keep_freed_memory() -> None:
    """Let glibc give no memory back: whose step next faults 16 MiB of logits in again is chance.

    It was seen to cost one contestant or the other 4 % of a small model's step, for as long as a
    process lives, depending only on the order of its allocations.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
        libc.mallopt(m_mmap_threshold, 1 << 30)


def race(world: oarlock.World, size: Size, rounds: int, run: int) -> dict[str, Any]:
    """Step seconds of each contestant, taking turns, and how Oarlock's exchange went."""
    keep_freed_memory()
    ids = torch.randint(0, size.vocabulary, (size.tokens // TIME, TIME + 1))
    makers: dict[str, Callable[..., Any]] = {"plain": plain, "oarlock": Oarlock}
    makers |= {"ddp": ddp, "ddp again": ddp} if world.size > 1 else {"plain again": plain}
    names = sorted(makers)
    names = names[run % len(names) :] + names[: run % len(names)]
    contestants = {name: makers[name](size, world) for name in names}
    engine: Oarlock = contestants["oarlock"]
    times: dict[str, list[float]] = {n: [] for n in names}
    shuffle = random.Random(run).shuffle  # alike on all ranks
    for i in range(rounds + 3):
        shuffle(names)
        for name in names:
            world.barrier()
            start = time.perf_counter()
            contestants[name](ids)
            if i >= 3:  # the first rounds warm up
                times[name].append(time.perf_counter() - start)
    return {
        "times": times,
        "alone": [exchange_alone(engine.engine)],
        "waits": [min(waits) for waits in zip(*world.gather(engine.waits[3:]), strict=True)],
        "bytes": engine.bytes,
    }


def pooled(ranks: int, size: Size, runs: int, rounds: int) -> dict[str, Any]:
    """The race in ``runs`` fresh sets of processes, all times together."""
    out = on_ranks(race, ranks, size, rounds, 0)
    for run in range(1, runs):
        more = on_ranks(race, ranks, size, rounds, run)
        for name, times in more["times"].items():
            out["times"][name] += times
        out["alone"] += more["alone"]
        out["waits"] += more["waits"]
    return out | {k: statistics.median(out[k]) for k in ("alone", "waits")}


def peak(world: oarlock.World, size: Size, name: str) -> float:
    """Growth of the peak resident set over five steps, MiB, beyond imports and the data."""
    ids = torch.randint(0, size.vocabulary, (size.tokens // TIME, TIME + 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = {"plain": plain, "ddp": ddp, "oarlock": Oarlock}[name](size, world)
    for _ in range(5):
        step(ids)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _child(fn: Callable[..., Any], rank: int, ranks: int, port: int, args: tuple, box: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with oarlock.join(device="cpu") as world:
        answer = fn(world, *args)
        if rank == 0:
            box.put(answer)


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run ``fn(world, *args)`` on forked ranks, one thread each; rank 0's answer."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    box = context.Queue()
    children = [
        context.Process(target=_child, args=(fn, r, ranks, port, args, box)) for r in range(ranks)
    ]
    for child in children:
        child.start()
    answer = box.get(timeout=600)
    for child in children:
        child.join()
    return answer


def ratio(times: dict[str, list[float]], name: str, *to: str) -> float:
    """Median time of ``name`` over the median of all times of ``to``."""
    return statistics.median(times[name]) / statistics.median(t for n in to for t in times[n])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=[s.name for s in SIZES])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one thread a rank, gloo, loopback")
    print(f"{args.ranks} ranks; medians of {args.runs} runs of {args.rounds} rounds\n")
    print(
        f"{'model':>6} {'plain':>9} {'DDP':>9} {'Oarlock':>9} {'Oarlock/DDP':>12} {'noise':>7} "
        f"{'MB sent':>8} {'alone':>8} {'waited':>8} {'hidden':>7}   peak MiB: plain, DDP, Oarlock"
    )
    for size in (s for s in SIZES if s.name in args.sizes):
        out = pooled(args.ranks, size, args.runs, args.rounds)
        ms = {n: 1000 * statistics.median(t) for n, t in out["times"].items()}
        hidden = 1 - out["waits"] / out["alone"]
        memory = (
            ""
            if args.no_memory
            else ", ".join(
                f"{on_ranks(peak, args.ranks, size, n):.0f}" for n in ("plain", "ddp", "oarlock")
            )
        )
        print(
            f"{size.name:>6} {ms['plain']:>6.0f} ms {ms['ddp']:>6.0f} ms {ms['oarlock']:>6.0f} ms "
            f"{ratio(out['times'], 'oarlock', 'ddp', 'ddp again'):>12.3f} "
            f"{ratio(out['times'], 'ddp again', 'ddp'):>7.3f} {out['bytes'] / 1e6:>8.1f} "
            f"{1000 * out['alone']:>5.0f} ms {1000 * out['waits']:>5.0f} ms {hidden:>7.0%}   "
            f"{memory}",
            flush=True,
        )
    print("\n1 rank:")
    print(f"{'model':>6} {'plain':>9} {'Oarlock':>9} {'Oarlock/plain':>14} {'noise':>7}")
    for size in (s for s in SIZES if s.name in args.sizes):
        out = pooled(1, size, args.runs, args.rounds)
        ms = {n: 1000 * statistics.median(t) for n, t in out["times"].items()}
        print(
            f"{size.name:>6} {ms['plain']:>6.0f} ms {ms['oarlock']:>6.0f} ms "
            f"{ratio(out['times'], 'oarlock', 'plain', 'plain again'):>14.3f} "
            f"{ratio(out['times'], 'plain again', 'plain'):>7.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
