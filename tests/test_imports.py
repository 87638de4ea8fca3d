"""The rooms: which module may import which, and what ``import vitrel`` loads."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "vitrel"
ORDER = [
    "grid",
    "resize",
    "stretched",
    "initial",
    "lookup",
    "learned",
    "computed",
    "rotary",
    "terms",
    "relpos",
    "position",
    "profiles",
    "masks",
    "tracing",
    "kernel",
    "attend",
    "firstorder",
    "folded",
    "written",
    "blocked",
    "backends",
    "recomputed",
    "attention",
    "explanation",
    "eva",
    "family",
    "stem",
    "vit",
    "zoo",
    "stripstate",
    "stripmodel",
    "strips",
    "ablate",
    "probe",
    "maps",
    "measures",
    "plots",
    "page",
    "originals",
    "convert",
    "relativize",
    "relativized",
]
HEAVY = [
    "pytorch_lightning",
    "albumentations",
    "wandb",
    "matplotlib",
    "sklearn",
    "jsonargparse",
    "torchmetrics",
    "plotly",
]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_core_imports_one_way():
    for path in PACKAGE.glob("*.py"):
        if path.stem == "__init__":
            continue
        assert path.stem in ORDER, f"{path.name} has no place in the order of imports"
        allowed = ORDER[: ORDER.index(path.stem)]
        rooms = {name.split(".")[1] for name in imported(path) if name.startswith("vitrel.")}
        assert rooms <= set(allowed), f"{path.name} imports {rooms - set(allowed)}"


def test_training_imports_one_way():
    order = [p.stem for p in sorted((PACKAGE / "training").glob("*.py"), key=lambda p: p.stem) if p.stem != "__init__"]
    graph = {
        stem: {
            n.split(".")[2]
            for n in imported(PACKAGE / "training" / f"{stem}.py")
            if n.startswith("vitrel.training.") and n.split(".")[2] in order
        }
        for stem in order
    }
    while graph:
        free = [stem for stem, needs in graph.items() if not needs & set(graph)]
        assert free, f"a ring of imports among {sorted(graph)}"
        for stem in free:
            del graph[stem]


def test_import_vitrel_is_light():
    code = f"""
import sys, torch, timm  # timm loads wandb itself where it is installed
before = set(sys.modules)
import vitrel
print([m for m in {HEAVY!r} if m in sys.modules and m not in before])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert run.stderr == ""
