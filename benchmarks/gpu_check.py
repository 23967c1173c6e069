"""What only an accelerator can show, in one short run: parity, speed and memory on the GPUs here.

    python benchmarks/gpu_check.py            # all devices of this machine
    python benchmarks/gpu_check.py --device cpu -n 2   # the same script, to try it without one

Prints one line a check and exits 1 if one fails. Under five minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def check(device: str | None) -> int:
    """Runs on each rank. Returns the exit status."""
    import torch
    from models import GPT, SIZES, loss_sum
    from torch import nn

    import oarlock

    torch.backends.cuda.matmul.allow_tf32 = False
    with oarlock.join(device=device) as world:
        size = SIZES[0]
        torch.manual_seed(0)
        rows = torch.randint(0, size.vocabulary, (64, 65))
        failed = False

        def say(name: str, good: bool, text: str) -> None:
            nonlocal failed
            failed |= not good
            if world.is_main:
                print(f"{'ok  ' if good else 'FAIL'} {name}: {text}", flush=True)

        def build() -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(1)
            model = GPT(size).to(world.device)
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        for precision, bound in (("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-2)):
            model, optimizer = build()
            engine = oarlock.DataParallel(
                model, optimizer, world, clip_norm=1.0, precision=precision
            )
            if precision == "fp16":  # low enough that no step is skipped: both do the same
                engine.precision.scale = 64.0
            loader = oarlock.Loader(rows, 16, 2, seed=0, world=world)
            for _ in range(3):
                for batch in loader:
                    engine.step(batch, loss_sum)
            print_ = engine.check_replicas()
            plain, plain_optimizer = build()  # every rank computes the whole batch, in fp32
            alone = oarlock.DataParallel(
                plain, plain_optimizer, oarlock.World(world.device), clip_norm=1.0
            )
            whole = oarlock.Loader(rows, 16, 16, seed=0, world=alone.world)
            for _ in range(3):
                for batch in whole:
                    alone.step(batch, loss_sum)
            error = max(
                float((a - b).detach().norm() / b.detach().norm())
                for a, b in zip(model.parameters(), plain.parameters(), strict=True)
            )
            say(
                f"parity {precision}",
                error < bound,
                f"{world.size} rank(s) against one: {error:.1e} (bound {bound:.0e}), "
                f"replicas {print_}",
            )

        size = SIZES[-1] if world.device.type != "cpu" else SIZES[0]
        torch.manual_seed(1)
        model = GPT(size).to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engine = oarlock.DataParallel(model, optimizer, world, precision="bf16", guard_every=0)
        ids = torch.randint(0, size.vocabulary, (32, 65)).to(world.device)
        times, waits = [], []
        for _ in range(20):
            start = time.perf_counter()
            result = engine.step([ids], loss_sum)
            times.append(time.perf_counter() - start)
            waits.append(result.wait_seconds)
        say(
            "speed bf16",
            True,
            f"{size.name}: {1000 * statistics.median(times[5:]):.1f} ms a step, "
            f"{1000 * statistics.median(waits[5:]):.1f} ms of it waiting on the host",
        )
        if world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
            weights = sum(p.numel() * 4 for p in model.parameters()) / 2**20
            say(
                "memory", True, f"peak {peak:.0f} MiB, of it 16 bytes a parameter {4 * weights:.0f}"
            )
        return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("-n", type=int)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return check(args.device)
    import torch

    if args.device is None and not torch.accelerator.is_available():
        print("No accelerator on this machine: nothing was checked.")
        return 0
    from oarlock.launch.local import launch

    ranks = args.n or (torch.accelerator.device_count() if args.device is None else 1)
    own = ["--rank"] + (["--device", args.device] if args.device else [])
    return launch([__file__, *own], ranks)


if __name__ == "__main__":
    sys.exit(main())
