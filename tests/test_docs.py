"""The page on presets says what the code does."""

import re
from pathlib import Path

from vitrel.position import PositionTerms
from vitrel.relpos import DISTANCES, PRESETS, TERMS, RelPos
from vitrel.tables import RESIZE

PAGE = (Path(__file__).parents[1] / "docs" / "presets.md").read_text(encoding="utf-8")


def test_every_preset_is_listed_with_its_parameters():
    listed = {}
    for line in PAGE.splitlines():
        if match := re.match(r"\| `(\w+)` \|", line):
            cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            listed[match[1]] = int(cells[3])
    counted = {
        name: sum(p.numel() for p in PositionTerms(RelPos.preset(name), 384, 6, 64, (14, 14)).parameters())
        for name in PRESETS
    }
    assert listed == counted


def test_every_term_and_choice_is_named():
    for name in [*TERMS, *DISTANCES, *RESIZE]:
        assert re.search(rf"\b{name}\b", PAGE), name
