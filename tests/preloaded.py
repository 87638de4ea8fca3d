"""Runs scripts in processes forked from one that has imported what they need: importing takes longer than they do."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "vitrel.training.run",
        "vitrel.training.evaluation",
        "vitrel.training.looking",
        "vitrel.training.export",
        "vitrel.page",
    ]
)


def run(arguments, cwd, environment):
    """``python ARGUMENTS`` (a script with its arguments, or ``-c CODE``): exit status, and what it wrote."""
    log = Path(cwd) / "output.txt"
    process = _CONTEXT.Process(target=_run, args=(arguments, str(cwd), environment, str(log)))
    process.start()
    process.join(300)
    assert process.exitcode is not None, arguments
    return process.exitcode, log.read_text()


def _run(arguments, cwd, environment, log):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if arguments[0] == "-c":
        sys.argv = ["-c"]
        exec(compile(arguments[1], "README.md", "exec"), {"__name__": "__main__"})
        return
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
