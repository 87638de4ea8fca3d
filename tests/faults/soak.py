"""Trains for a while with loader workers and loggers and watches the memory of all its processes.

    python tests/faults/soak.py --minutes 30 --root DIR

Few batches make an epoch, so that whatever grows per epoch shows. Prints the memory in MB minute by minute (the median
of samples a second apart, all processes of the run taken together) and the largest change after the first epoch; ends
the run by SIGTERM.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
RUN = [
    *("--config", "cifar100", "--trainer.max_epochs", "100000", "--trainer.limit_train_batches", "8"),
    *(
        "--data.batch_size",
        "32",
        "--trainer.limit_val_batches",
        "2",
        "--trainer.accelerator",
        "cpu",
        "--data.num_workers",
        "2",
    ),
    *("--data.mixup", "0.2", "--optim.ema_decay", "0.99", "--logger.mode", "offline", "--logger.maps_every", "20"),
    *("--trainer.log_every_n_steps", "1"),
]


def family(root):
    """Memory in MB of a process and all its descendants as (name, resident, proportional).

    The proportional size divides a page among the processes that share it, as forked loader workers do, so that it adds
    up to what is in use. Processes that end meanwhile are left out.
    """
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                text = (entry / "stat").read_text()
                parents[int(entry.name)] = int(text.rsplit(")", 1)[1].split()[1])
            except (OSError, ValueError):
                continue
    for pid in parents:
        ancestor = pid
        while ancestor not in (root, 0):
            ancestor = parents.get(ancestor, 0)
        if ancestor != root:
            continue
        try:
            name = "training" if pid == root else Path(f"/proc/{pid}/comm").read_text().strip()
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = dict(line.split(":", 1) for line in lines)
            resident, proportional = (int(sizes[key].split()[0]) / 1024 for key in ("Rss", "Pss"))
            found[pid] = (name, resident, proportional)
        except (OSError, KeyError, ValueError):
            continue
    return list(found.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--root", required=True, help="where CIFAR-100 lies")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs, open(Path(runs, "output"), "w+") as output:
        command = [sys.executable, SCRIPT, *RUN, "--data.root", args.root, "--runs", runs]
        environ = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        samples, began = [], None
        while process.poll() is None and (began is None or time.monotonic() - began < 60 * args.minutes):
            time.sleep(1)
            epochs = Path(output.name).read_text().count("\nepoch ")
            if epochs and began is None:
                began = time.monotonic()
            if began is not None:
                seen = family(process.pid)
                if sum(name == "pt_data_worker" for name, *_ in seen) == 4:  # two for each split
                    samples.append((int((time.monotonic() - began) // 60), epochs, seen))
        process.send_signal(signal.SIGTERM)
        status = process.wait()
        said = Path(output.name).read_text().splitlines()[-1]
    totals = {"resident": [], "proportional": []}
    for minute in sorted({minute for minute, _, _ in samples}):
        now = [(epochs, seen) for m, epochs, seen in samples if m == minute]
        for column, name in enumerate(totals, start=1):
            totals[name].append(statistics.median(sum(part[column] for part in seen) for _, seen in now))
        training = statistics.median(part[1] for _, seen in now for part in seen if part[0] == "training")
        sizes = ", ".join(f"{name} {values[-1]:.0f} MB" for name, values in totals.items())
        print(f"minute {minute}: {now[-1][0]} epochs, {sizes}, of the training process resident {training:.0f} MB")
    changes = {name: round(max(abs(v / values[0] - 1) for v in values), 4) for name, values in totals.items()}
    print(json.dumps({"status": status, "said": said, "epochs": samples[-1][1], "largest change": changes}))
    return status != 143


if __name__ == "__main__":
    sys.exit(main())
