"""Peak memory, each figure in a fresh process."""

import argparse
import gc
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention import attention_runs
from benchmarks.pairs import Run

SCRIPT = Path(__file__).parents[1] / "benchmark.py"


def peak(run: Run, device: str) -> float:
    """Peak memory of a run beyond what was there before it, in MB; on Linux from the kernel's own high-water mark."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not marks.exists():
        raise ValueError("--what memory: needs Linux (/proc/self/clear_refs) or --device cuda")
    read = lambda key: int(status.read_text().split(key)[1].split()[0]) / 1e3  # noqa: E731
    gc.collect()
    marks.write_text("5")
    before = read("VmRSS:")
    run()
    return read("VmHWM:") * 1.024 - before * 1.024


def fresh(arguments: list[str]) -> float:
    """The number that this script prints last, run in a fresh process with these arguments."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.splitlines()[-1])


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory of attention on one image, a fresh process for each; ``extra`` is what goes beyond plain."""
    place = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    if args.only:  # the fresh process
        name, grid, grad = args.only[0], int(args.only[1]), args.only[2] == "1"
        peer = args.peers
        warm, _ = attention_runs(args.presets, args.backends, peer, 4, 1, place, grad)
        warm[name]()  # thread pools and the like
        runs, _ = attention_runs(args.presets, args.backends, peer, grid, 1, place, grad)
        print(json.dumps(peak(runs[name], args.device)))
        return []
    rows = []
    for grid in args.grids:
        for grad in (False, True):
            peers = ["timm RelPosBias", "timm rope", "timm samvit"] if args.peers else []
            plain = 0.0
            for name in ["none", *args.presets, *peers]:
                ours = ["--presets", name] if name in args.presets else ["--presets"]
                command = ["--what", "memory", "--only", name, str(grid), str(int(grad)), *ours]
                command += ["--device", args.device, "--dtype", args.dtype, *(["--peers"] if name in peers else [])]
                found = [fresh(command) for _ in range(min(args.repeats, 3))]
                plain = statistics.median(found) if name == "none" else plain
                what = {"grid": f"{grid}x{grid}", "pass": "forward+backward" if grad else "forward", "name": name}
                rows.append({**what, "peak MB": statistics.median(found), "extra MB": statistics.median(found) - plain})
    return rows
