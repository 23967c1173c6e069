"""One step, side by side in one run: Oarlock on each rung, DDP, FSDP2, and no communication at all.

    python benchmarks/step.py [--sizes 1.8M 13.8M 44M] [--ranks 2] [--runs 4] [--rounds 12]
    python benchmarks/step.py --only "rung 0" "reproducible 0"
    sudo python benchmarks/step.py --rate 1gbit       on the home lab, a host for each rank

Contestants take turns of a few steps, in an order drawn anew each round, so that a slow moment of
the machine hits all alike; the table shows medians and their ratios. DDP runs twice, as two
contestants: what those two differ by is noise. One process may favour one contestant for as long as
it lives, so the race is run several times in fresh processes, in each the contestants are built in
another order, and the times are pooled. While it races glibc is told to keep freed memory.

"bound" is max(compute, communication): the step without communication, and the time that the bytes
of an all-reduce take on the link (on loopback: that an all-reduce of all gradients alone takes).
"waited" is what of the exchange neither backward nor the next forward hid: the shortest wait among
the ranks, since the others also wait for that rank to finish its backward.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import jobs
import torch
import torch.distributed as dist
from contestants import MAKERS, TIME, Oarlock, build, make
from lab import Lab
from models import SIZES, Size

import oarlock

WARM, STEPS = 2, 2  # rounds that do not count; steps a turn that do, after one that does not


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


def all_reduce_alone(size: Size, world: oarlock.World) -> float:
    """Seconds that an all-reduce of all gradients takes when nothing else runs (median of 5)."""
    flat = torch.zeros(sum(p.numel() for p in build(size)[0].parameters()))
    times = []
    for _ in range(5 if world.size > 1 else 0):
        world.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(part, async_op=True) for part in flat.split(1 << 21)]:
            work.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times) if times else 0.0


def race(
    world: oarlock.World, size: str, names: list[str], rounds: int, run: int
) -> dict[str, Any]:
    """Step seconds of each contestant, taking turns; waits and bytes of those that tell."""
    keep_freed_memory()
    of = next(s for s in SIZES if s.name == size)
    torch.manual_seed(world.rank)
    ids = torch.randint(0, of.vocabulary, (of.tokens // TIME, TIME + 1))
    names = names[run % len(names) :] + names[: run % len(names)]
    contestants = {name: make(name, of, world) for name in names}
    times: dict[str, list[float]] = {n: [] for n in names}
    shuffle = random.Random(run).shuffle  # alike on all ranks
    for i in range(rounds + WARM):
        shuffle(names)
        for name in names:
            step = contestants[name]
            step(ids)  # so that what it leaves to the next step is there when the clock starts
            start = time.perf_counter()
            for _ in range(STEPS):
                step(ids)
            if i >= WARM:
                times[name].append((time.perf_counter() - start) / STEPS)
            if isinstance(step, Oarlock):
                step.engine.exchange.synchronize()  # nothing of it runs in another's turn
            world.barrier()
    ours = {n: c for n, c in contestants.items() if isinstance(c, Oarlock)}
    waits = {n: world.gather(c.waits[WARM * (STEPS + 1) :]) for n, c in ours.items()}
    return {
        "times": times,
        "alone": all_reduce_alone(of, world),
        "waits": {n: [min(w) for w in zip(*each, strict=True)] for n, each in waits.items()},
        "bytes": {n: c.bytes for n, c in ours.items()},
    }


def pooled(ranks: int, size: Size, names: list[str], args: Any, lab: Lab | None) -> dict[str, Any]:
    """The race in several fresh sets of processes, all times together."""
    out: dict[str, Any] = {"times": {n: [] for n in names}, "waits": {}, "alone": [], "bytes": {}}
    for number in range(args.runs):
        job = {"size": size.name, "names": names, "rounds": args.rounds, "run": number}
        more = jobs.run(__file__, job, ranks, lab)
        for name, times in more["times"].items():
            out["times"][name] += times
        for name, waits in more["waits"].items():
            out["waits"].setdefault(name, []).extend(waits)
        out["alone"].append(more["alone"])
        out["bytes"] = more["bytes"]
    return out


def report(ranks: int, size: Size, names: list[str], args: Any, lab: Lab | None) -> None:
    """Run the race and print its table."""
    out = pooled(ranks, size, names, args, lab)
    ms = {name: 1000 * statistics.median(times) for name, times in out["times"].items()}
    base = "DDP" if "DDP" in ms else "plain"
    both = statistics.median([t for n in ms if n.startswith(base) for t in out["times"][n]])
    print(f"{size.name}, {ranks} rank{'s' * (ranks > 1)}", end="")
    bound = None
    if ranks > 1 and "plain" in ms:
        send = 1000 * statistics.median(out["alone"])
        link = "an all-reduce alone"
        if lab is not None and args.rate:
            whole = sum(p.numel() * p.element_size() for p in build(size)[0].parameters())
            rate = lab.measure()
            send = 1000 * 2 * (ranks - 1) / ranks * whole * 8 / (rate * 1e6)
            link = f"its bytes at the measured {rate:.0f} Mbit/s"
        bound = max(ms["plain"], send)
        print(
            f": bound max(compute {ms['plain']:.0f}, communication {send:.0f}: {link}) "
            f"= {bound:.0f} ms",
            end="",
        )
    against = f"DDP/it ({base} twice)" if base == "DDP" else "plain/it"
    print(f"\n{'':>16} {'step':>9} {against:>20} {'it/bound':>9} {'MB sent':>8} {'waited':>9}")
    for name in ms:
        print(f"{name:>16} {ms[name]:>6.0f} ms {1000 * both / ms[name]:>20.3f}", end="")
        print(f" {ms[name] / bound:>9.3f}" if bound else f" {'':>9}", end="")
        if name in out["waits"]:
            waited = 1000 * statistics.median(out["waits"][name])
            print(f" {out['bytes'][name] / 1e6:>8.1f} {waited:>6.0f} ms", end="")
        print(flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=[s.name for s in SIZES])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(MAKERS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", help="run on the home lab, its links at this rate: 1gbit")
    args = parser.parse_args()
    where = f"home lab, {args.rate}" if args.rate else "loopback"
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one thread a rank, gloo, {where}")
    print(f"medians of {args.runs} runs of {args.rounds} turns of {STEPS} steps\n")
    names = ["plain", "DDP", "DDP again", *(n for n in MAKERS if n not in ("plain", "DDP"))]
    if args.only:
        names = ["plain", "DDP", "DDP again", *args.only]
    with Lab(args.ranks, args.rate) if args.rate else contextlib.nullcontext() as lab:
        for size in (s for s in SIZES if s.name in args.sizes):
            report(args.ranks, size, names, args, lab)
            if lab is None:
                alone = ["plain", "plain again", "rung 0", "reproducible 0"]
                report(1, size, alone, args, None)


if __name__ == "__main__":
    jobs.serve(race)
    main()
