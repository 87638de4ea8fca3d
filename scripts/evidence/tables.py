"""The tables of README.md and RESULTS.md from ``results/``: between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import timm

from evidence.plan import Planned, plan
from evidence.rows import RESULTS, Row, find
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
        ConfigError: For a table of an unknown name, or one whose end is missing.
    """

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ConfigError(f"no table is called {name!r}, expected one of {', '.join(TABLES)}")
        if "<!-- table: " in match[0][1:]:
            raise ConfigError(f"table {name!r}: there is no '<!-- end -->' below it")
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
    return dict(sorted(rows.items(), key=lambda item: -fmean(row["test/acc"] for _, row in item[1]))), missing


def percent(runs: Runs, name: str = "test/acc") -> str:
    """The mean over seeds in percent, with the seeds' own values where there are several."""
    values = [100 * row[name] for _, row in runs]
    own = f" ({', '.join(f'{v:.1f}' for v in values)})" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{own}"


def _group(group: str, more: Sequence[tuple[str, Callable[[Runs], str]]] = ()) -> str:
    rows, missing = by_row(group)
    heads = ["", "set", "parameters", "validation after each epoch", "test top-1 %", *(head for head, _ in more)]
    cells = []
    for name, runs in rows.items():
        curves = zip(*(row["val/acc"] for _, row in runs), strict=False)
        curve = " ".join(f"{100 * fmean(values):.1f}" for values in curves)
        own = [f"`{name}`", runs[0][0].own, f"{runs[0][1]['parameters']:,}", curve, percent(runs)]
        cells.append([*own, *(cell(runs) for _, cell in more)])
    return _or_nothing(markdown(heads, cells), cells, missing)


def _or_nothing(text: str, cells: Sequence[object], missing: Sequence[str]) -> str:
    text = text if cells else "No run of this group has ended so far."
    return text + (f"\n\nNot trained so far: {', '.join(missing)}." if missing else "")


def _at(row: Row, size: int) -> dict[str, float]:
    """Top-1 at a square size by rule."""
    return {r["rule"]: r["top1"] for r in row.get("sizes", []) if (r["rows"], r["cols"]) == (size, size)}


def _trained(row: Row) -> float:
    """Top-1 at the trained size in the pass over other sizes, which is in float32."""
    return next(r["top1"] for r in row["sizes"] if r["rule"] == "trained size")


def _parts(runs: Runs, size: int = 48) -> dict[str, float]:
    """Accuracy at another size as a part of that at the trained one, in percent, means over seeds by rule."""
    if not all(row.get("sizes") for _, row in runs):
        return {}
    found = [(_at(row, size), _trained(row)) for _, row in runs]
    rules = [rule for rule in found[0][0] if all(rule in at for at, _ in found)]
    return {rule: 100 * fmean(at[rule] / whole for at, whole in found) for rule in rules}


def kept(runs: Runs) -> str:
    """What is kept at 48 px under the default rule, and under another one where that keeps more."""
    parts = _parts(runs)
    if not parts:
        return ""
    usual = "none" if "none" in parts else "interpolate"
    best = max(parts, key=lambda rule: (parts[rule], rule == usual))
    return f"{parts[usual]:.1f}" + ("" if best == usual else f" ({parts[best]:.1f} {best})")


def rules() -> str:
    """What is kept at 48 px under each rule."""
    heads = {"none": "no tables", "clamp": "clamp", "interpolate": "interpolate", "geometric": "geometric"}
    cells = []
    for name, runs in _sized().items():
        if parts := _parts(runs):
            own = (f"{parts[rule]:.1f}" if rule in parts else "" for rule in heads)
            cells.append([f"`{name}`", str(len(runs)), *own])
    return _or_nothing(markdown(["kept at 48 px, %", "seeds", *heads.values()], cells), cells, [])


def _sized() -> dict[str, Runs]:
    """The finished runs of the groups whose models are tested at other sizes, by ``GROUP.ROW``."""
    groups = ("positions", "augmentation")
    return {f"{group}.{name}": runs for group in groups for name, runs in by_row(group)[0].items()}


def sizes() -> str:
    """Accuracy at square sizes that were never trained on, by row and rule, means over seeds."""
    rows = _sized()
    sides = sorted({r["rows"] for runs in rows.values() for _, row in runs for r in row.get("sizes", [])})
    cells = []
    for name, runs in rows.items():
        found = [{side: _at(row, side) for side in sides} for _, row in runs]
        if any(sum(bool(at) for at in by_side.values()) < 4 for by_side in found):
            continue  # tested at one other size alone
        for rule in dict.fromkeys(rule for at in found[0].values() for rule in at if rule != "trained size"):
            own = [[by_side[side].get(rule, by_side[side].get("trained size")) for by_side in found] for side in sides]
            means = ["" if None in values else f"{100 * fmean(values):.1f}" for values in own]
            cells.append([f"`{name}`", str(len(runs)), rule, *means])
    return _or_nothing(markdown(["", "seeds", "rule", *(f"{side} px" for side in sides)], cells), cells, [])


def terms() -> str:
    """Terms of txl switched off after training, and left out of training."""
    rows, missing = by_row("terms")
    off: dict[str, list[float]] = {}
    for _, row in rows.get("txl", []):
        for line in row.get("ablation", []):
            off.setdefault(line["off"], []).append(100 * line["top1"])
    trained = {"nothing" if name == "txl" else name.removeprefix("without_"): runs for name, runs in rows.items()}
    cells = []
    for gone in dict.fromkeys((*off, *trained)):
        runs = trained.get(gone, [])
        switched = f"{fmean(off[gone]):.1f}" if gone in off else ""
        kept = "+".join(runs[0][1]["settings"]["model.rel_pos.terms"]) if runs else ""
        cells.append([gone, percent(runs) if runs else "", switched, kept])
    heads = ["without", "trained without: test top-1 %", "switched off after training: test top-1 %", "terms trained"]
    return _or_nothing(markdown(heads, cells), cells, missing)


def switched_off() -> str:
    """Terms of the position schemes switched off after training."""
    cells = []
    for name, runs in by_row("positions")[0].items():
        if not all("ablation" in row for _, row in runs):
            continue
        found = [{line["off"]: line["top1"] for line in row["ablation"]} for _, row in runs]
        for off in found[0]:
            change = 100 * fmean(top1[off] - top1["nothing"] for top1 in found)
            own = [f"{100 * fmean(top1[off] for top1 in found):.1f}", "" if off == "nothing" else f"{change:+.1f}"]
            cells.append([f"`{name}`", str(len(runs)), off, *own])
    return _or_nothing(markdown(["", "seeds", "switched off", "test top-1 %", "change"], cells), cells, [])


WORDS = {
    "none": "content only",
    "learned": 'content only, with `pos_embed="learn"`',
    "bias": "separable scalar tables",
    "bias+kernel": "the same, and a convolution of the values",
    "swin": "joint scalar table",
    "cpb": "joint scalar table by an MLP",
    "rope": "rotation",
    "rope_mixed": "rotation by learned angles",
    "rope+bias": "rotation and scalar tables",
    "txl": "Transformer-XL's four terms",
    "sam": "query term, unscaled",
    "shaw": "query and value terms",
    "shaw+bias": "the same, and scalar tables",
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
        absolute = {"rel_pos": "none", "pos_embed": "learn"}
        model = timm.create_model("vitrel_micro_patch4_32", **(absolute if name == "learned" else {"rel_pos": name}))
        count = sum(p.numel() for p in model.parameters())
        runs = rows.get(name.replace("swin", "bias_joint").replace("+", "_"), [])
        reached = [percent(runs), kept(runs)] if runs else ["", ""]
        shown = "learned absolute" if name == "learned" else f"`{name}`"
        cells.append([shown, words, f"{count:,}", f"{ratios[name]:.2f}", *reached])
    return markdown(
        ["preset", "terms", "parameters", "training step", "CIFAR-100, 10 epochs", "kept at 48 px, %"], cells
    )


def _costs() -> list[Row]:
    file = RESULTS / "cost.json"
    try:
        rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))["rows"]
        if missing := set(WORDS) - {str(row["name"]) for row in rows}:
            raise ValueError(f"no row of {min(missing)}")
        for row in rows:
            for key in ("seconds", "ratio", "from", "to", "peak MB"):
                if not 0 <= float(row[key]) < math.inf:
                    raise ValueError(f"{row['name']}: {key} is {row[key]}")
    except (ValueError, TypeError, KeyError) as e:
        raise ConfigError(
            f"{file}: not what scripts/benchmark.py --json writes ({e}); RESULTS.md has the command"
        ) from e
    return rows


def cost() -> str:
    """Time and peak memory of a training step of each preset."""
    cells = [
        [
            r["name"],
            f"{r['seconds']:.3f}",
            *(f"{r[k]:.2f}" for k in ("ratio", "from", "to")),
            f"{r['peak MB']:.0f}",
        ]
        for r in _costs()
    ]
    return markdown(["none = 1", "seconds", "ratio", "from", "to", "peak MB"], cells)


TABLES: dict[str, Callable[[], str]] = {
    "presets": presets,
    "cost": cost,
    "positions": lambda: _group("positions", [("kept at 48 px, %", kept)]),
    "sizes": sizes,
    "rules": rules,
    "terms": terms,
    "switched_off": switched_off,
    "augmentation": lambda: _group("augmentation", [("kept at 48 px, %", kept)]),
    "learning": lambda: _group("learning"),
    "recipe": lambda: _group("recipe"),
}
