"""The tables of README.md and RESULTS.md from ``results/``: between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import timm

import vitrel
from evidence.plan import Planned, plan
from evidence.rows import RESULTS, Row, find, mean
from vitrel.training.fileio import ConfigError, write_whole

ROOT = RESULTS.parent
PAGES = ("README.md", "RESULTS.md")
Runs = list[tuple[Planned, Row]]


def write() -> list[Path]:
    """Writes every table anew; returns the pages."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        write_whole(ROOT / page, fill(text))
    return [ROOT / page for page in PAGES]


def fill(text: str) -> str:
    """A page with its tables made anew.

    Raises:
        ConfigError: For a table of an unknown name.
    """

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ConfigError(f"no table is called {name!r}, expected one of {', '.join(TABLES)}")
        return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def by_row(group: str) -> tuple[dict[str, Runs], list[str]]:
    """The finished runs of each row of a group, the best row first, and the names of the runs that are to be done."""
    rows: dict[str, Runs] = {}
    missing = []
    for run in plan([group]):
        row = find(run)
        if row is None:
            missing.append(f"{run.row} (seed {run.seed})")
        else:
            rows.setdefault(run.row, []).append((run, row))
    return dict(sorted(rows.items(), key=lambda item: -_accuracy(item[1]))), missing


def _accuracy(runs: Runs, name: str = "test/acc") -> float:
    return mean((row for _, row in runs), name)


def percent(runs: Runs, name: str = "test/acc") -> str:
    """The mean over seeds in percent, with the seeds' own values where there are several."""
    values = [100 * row[name] for _, row in runs]
    own = f" ({', '.join(f'{v:.1f}' for v in values)})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.1f}{own}"


def _group(group: str, more: Sequence[tuple[str, Callable[[Runs], str]]] = ()) -> str:
    rows, missing = by_row(group)
    heads = ["", "set", "parameters", "validation after each epoch", "test top-1 %", *(head for head, _ in more)]
    cells = []
    for name, runs in rows.items():
        run, first = runs[0]
        curve = " ".join(f"{100 * v:.1f}" for v in first["val/acc"])
        own = [f"`{name}`", run.own, f"{first['parameters']:,}", curve, percent(runs)]
        cells.append([*own, *(cell(runs) for _, cell in more)])
    text = markdown(heads, cells) if cells else "No run of this group has ended so far."
    return text + (f"\n\nNot trained so far: {', '.join(missing)}." if missing else "")


def kept(runs: Runs, size: int = 48) -> str:
    """Accuracy at another size as a part of that at the trained one, in percent, under the rule that keeps most."""
    parts, rules = [], []
    for _, row in runs:
        at = [r for r in row.get("sizes", []) if (r["rows"], r["cols"]) == (size, size)]
        if not at:
            return ""
        best = max(at, key=lambda r: r["top1"])
        parts.append(100 * best["top1"] / row["test/acc"])
        rules.append(best["rule"])
    rule = f", {rules[0]}" if rules[0] != "none" else ""
    return f"{sum(parts) / len(parts):.0f}{rule}"


def sizes() -> str:
    """Accuracy at sizes that were never trained on, by row, seed and rule."""
    rows, _ = by_row("positions")
    found = [(name, run, row) for name, runs in rows.items() for run, row in runs if len(row.get("sizes", [])) > 4]
    sides = sorted({r["rows"] for *_, row in found for r in row["sizes"]})
    cells = []
    for name, run, row in found:
        rules = dict.fromkeys(r["rule"] for r in row["sizes"] if r["rule"] != "trained size")
        for rule in rules:
            at = {r["rows"]: r["top1"] for r in row["sizes"] if r["rule"] in (rule, "trained size")}
            cells.append([f"`{name}`", str(run.seed), rule, *(f"{100 * at[s]:.1f}" if s in at else "" for s in sides)])
    if not cells:
        return "No run has been tested at other sizes so far."
    return markdown(["", "seed", "rule", *(f"{side} px" for side in sides)], cells)


def terms() -> str:
    """Terms of txl switched off after training, and left out of training."""
    rows, missing = by_row("terms")
    whole = rows.get("txl", [])
    off = {r["off"]: r for _, row in whole for r in row.get("ablation", [])}
    cells = []
    for name, runs in rows.items():
        without = runs[0][1]["settings"].get("model.rel_pos.terms")
        gone = "nothing" if name == "txl" else name.removeprefix("without_")
        switched = off.get(gone)
        cells.append([gone, percent(runs), f"{100 * switched['top1']:.1f}" if switched else "", str(without or "")])
    if not cells:
        return "No run of this group has ended so far."
    text = markdown(["without", "trained without: test top-1 %", "switched off after training", "terms"], cells)
    return text + (f"\n\nNot trained so far: {', '.join(missing)}." if missing else "")


WORDS = {
    "none": "content only",
    "bias": "separable scalar tables",
    "swin": "joint scalar table",
    "cpb": "joint scalar table by an MLP",
    "rope": "rotation",
    "rope_mixed": "rotation by learned angles",
    "rope+bias": "rotation and scalar tables",
    "txl": "Transformer-XL's four terms",
    "sam": "query term, unscaled",
    "shaw": "query and value terms",
    "deberta": "query and key terms",
    "irpe_qkv": "query, key and value terms, joint",
    "txl+value": "Transformer-XL's, and a value term",
}


def presets() -> str:
    """What a preset adds, costs and reaches."""
    rows, _ = by_row("positions")
    ratios = {r["name"]: r["ratio"] for r in _costs()}
    cells = []
    for name, words in WORDS.items():
        model = timm.create_model("vitrel_micro_patch4_32", rel_pos=vitrel.RelPos.preset(name))
        count = sum(p.numel() for p in model.parameters())
        runs = rows.get(name.replace("swin", "bias_joint").replace("+", "_"), [])
        reached = [percent(runs), kept(runs)] if runs else ["", ""]
        cells.append([f"`{name}`", words, f"{count:,}", f"{ratios[name]:.2f}", *reached])
    return markdown(
        ["preset", "terms", "parameters", "training step", "CIFAR-100, 10 epochs", "kept at 48 px, %"], cells
    )


def _costs() -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / "cost.json").read_text(encoding="utf-8"))["rows"]
    return rows


def cost() -> str:
    """Time of a training step of each preset."""
    cells = [[r["name"], f"{r['seconds']:.3f}", *(f"{r[k]:.2f}" for k in ("ratio", "from", "to"))] for r in _costs()]
    return markdown(["none = 1", "seconds", "ratio", "from", "to"], cells)


TABLES: dict[str, Callable[[], str]] = {
    "presets": presets,
    "cost": cost,
    "positions": lambda: _group("positions", [("kept at 48 px, %", kept)]),
    "sizes": sizes,
    "terms": terms,
    "learning": lambda: _group("learning"),
    "recipe": lambda: _group("recipe"),
}
