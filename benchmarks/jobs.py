"""Jobs on ranks: one process a rank, on this computer or on the hosts of a lab.

A benchmark script hands itself a job: ``run(__file__, {...}, ranks)`` starts the script anew on
each rank, where ``serve(function)`` calls ``function(world, **job)``. Rank 0's answer comes back.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import Lab

LIMIT = 900.0  # seconds for one job


def run(script: str, job: dict[str, Any], ranks: int, lab: Lab | None = None) -> Any:
    """Rank 0's answer to ``job``. Exits with the ranks' output when one fails or none ends."""
    argv = [sys.executable, script, "--job", json.dumps(job)]
    if lab is not None:
        return json.loads(lab.ranks(argv, per_host=ranks // lab.hosts, timeout=LIMIT)[0])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    children = []
    with tempfile.TemporaryFile("w+") as answer:
        try:
            for rank in range(ranks):
                own = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
                env = {k: str(v) for k, v in (common | own).items()}
                env |= {"MASTER_ADDR": "127.0.0.1"}
                out = answer if rank == 0 else subprocess.DEVNULL
                children.append(subprocess.Popen(argv, env=os.environ | env, stdout=out))
            codes = [child.wait(timeout=LIMIT) for child in children]
        finally:
            for child in children:
                child.kill()
        if any(codes):
            sys.exit(f"{Path(script).name}: ranks ended with {codes} in the job {job}")
        answer.seek(0)
        return json.loads(answer.read())


def serve(function: Callable[..., Any]) -> None:
    """On a rank (``--job`` given): do the job and end. Otherwise do nothing."""
    if sys.argv[1:2] != ["--job"]:
        return
    import torch

    import oarlock

    torch.set_num_threads(1)
    with oarlock.join(device="cpu") as world:
        answer = function(world, **json.loads(sys.argv[2]))
        if world.is_main:
            print(json.dumps(answer), flush=True)
    os._exit(0)  # at exit, gloo's and the wire's threads have been seen to abort
