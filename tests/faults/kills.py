"""Kills short runs at random moments and in the middle of writing, resumes each, and compares with a run left alone.

    python tests/faults/kills.py --kills 200 --seed 0

Augmentation, mixup, cutmix, dropped paths, an average of the weights and (in every other trial) loader workers are on.
A kill is a SIGKILL to the training process. After each one every checkpoint on disk has to be readable, and the run
goes on with ``--ckpt_path last``; at its end weights, average, optimizer, best checkpoint, test figures and the saved
model have to be those of the run left alone, to the bit. One process imports everything and forks a child per run.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from vitrel.training import fileio
from vitrel.training.config import parse
from vitrel.training.resume import last_checkpoints, read_checkpoint
from vitrel.training.run import guarded, run

RUN = [
    *("--data.name", "fake", "--data.fake_images", "40", "--data.batch_size", "8", "--data.augment", "crop_flip"),
    *("--data.mixup", "0.2", "--data.cutmix", "1", "--optim.ema_decay", "0.9", "--optim.ema_start", "1"),
    *("--model.rel_pos", "txl", "--model.drop_path_rate", "0.2", "--model.img_size", "8", "--model.patch_size", "2"),
    *("--model.kwargs.depth", "2", "--model.kwargs.embed_dim", "16", "--model.kwargs.num_heads", "2"),
    *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "4", "--logger.maps_every", "0", "--logger.mode", "off"),
]
MOMENTS = ["any time", "half of a file", "before the rename", "after the rename"]


def start(options, moment="never", nth=0, log=os.devnull):
    """Forks a run; it kills itself at its ``nth`` written file for the moments of writing. Returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        torch.set_num_threads(1)
        if moment in MOMENTS[1:]:
            set_trap(moment, nth)
        status = guarded(lambda: run(parse(options)))
    finally:
        sys.stdout.flush()
        os._exit(status)


def set_trap(moment, nth):
    """Makes this process kill itself while it writes its ``nth`` file whole."""
    left = iter(range(nth, -1, -1))
    fsync, replace = os.fsync, os.replace

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def stop_in_the_middle(handle):
        if moment == "half of a file" and next(left, 1) == 0:
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
            die()
        fsync(handle)

    def stop_around_the_rename(source, target):
        now = moment != "half of a file" and next(left, 1) == 0
        if now and moment == "before the rename":
            die()
        replace(source, target)
        if now:
            die()

    fileio.os.fsync, fileio.os.replace = stop_in_the_middle, stop_around_the_rename


def wait(pid):
    """Exit status of a child, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(folder):
    """All that has to be the same at the end: results, last and best checkpoint, and the saved model."""
    results = json.loads((folder / "results.json").read_text())
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    found = {"best": best.name, "model": (folder / "model" / "model.safetensors").read_bytes()}
    found |= {k: v for k, v in results.items() if k.startswith("test/") or k in ("epochs", "steps", "checkpoint")}
    for path in (best, folder / "checkpoints" / "last.ckpt"):
        stored = read_checkpoint(path)
        for part in ("state_dict", "current_model_state", "averaging_state", "optimizer_states", "lr_schedulers"):
            found[f"{path.stem} {part}"] = stored.get(part)
    return found


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def trial(options, alone, seconds, rng, counts):
    """One run with one to four kills, each followed by a resume. Returns what is wrong with it, or None."""
    runs = Path(parse(options).runs) / "killed"
    left = rng.randint(1, 4)
    while True:
        resume = ["--ckpt_path", "last"] if last_checkpoints(parse(options)) else []
        moment = rng.choice([MOMENTS[0], *MOMENTS]) if left else "never"
        began = time.monotonic()
        pid = start([*options, *resume], moment, rng.randrange(12), runs.parent / "log")
        if moment == "any time":
            time.sleep(rng.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        status = wait(pid)
        for path in runs.glob("version_*/checkpoints/*.ckpt"):
            read_checkpoint(path)
        done = sorted(runs.glob("version_*/results.json"))
        if status == -signal.SIGKILL:
            left -= 1
            counts[moment] += 1
            counts["before the first checkpoint"] += not last_checkpoints(parse(options))
            counts["after the end"] += bool(done)
        elif status:
            return f"status {status} after {time.monotonic() - began:.1f} s, see {runs.parent / 'log'}"
        if done:
            found = outcome(done[-1].parent)
            different = [name for name in alone if not equal(alone[name], found[name])]
            return f"another {', '.join(different)} in {done[-1].parent}" if different else None


def left_alone(folder, workers):
    """The outcome of a run without a kill, and the seconds it took."""
    folder.mkdir()
    began = time.monotonic()
    options = [*RUN, "--data.num_workers", workers, "--runs", str(folder), "--name", "alone"]
    if wait(start(options, log=folder / "log")):
        sys.exit((folder / "log").read_text())
    return outcome(folder / "alone" / "version_0"), time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, counts, wrong, began = random.Random(args.seed), Counter(), [], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        alone, seconds = {}, {}
        trials = 0
        while sum(counts[m] for m in MOMENTS) < args.kills:
            workers = "02"[trials % 2]
            if workers not in alone:
                alone[workers], seconds[workers] = left_alone(Path(temporary, f"alone{workers}"), workers)
            folder = Path(temporary, f"trial{trials}")
            folder.mkdir()
            options = [*RUN, "--data.num_workers", workers, "--runs", str(folder), "--name", "killed"]
            problem = trial(options, alone[workers], seconds[workers], rng, counts)
            trials += 1
            if problem:
                wrong.append(problem)
                print(f"trial {trials}: {problem}", (folder / "log").read_text()[-3000:], sep="\n", file=sys.stderr)
    figures = {"kills": sum(counts[m] for m in MOMENTS), "runs": trials, "lost or different": len(wrong), **counts}
    print(json.dumps({**figures, "seconds": round(time.monotonic() - began)}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
