"""The page: what is in it, how large it gets, and that it works in a browser, from disk, without a network."""

import base64
import json
import os
import re
import shutil
import sys
import time

import numpy as np
import pytest
import timm
import torch

import vitrel
from vitrel.grid import Grid
from vitrel.page import report
from vitrel.probe import Probe

pytest.importorskip("plotly", reason="no plotly; pip install 'vitrel[page]'")


def planted(grid=(3, 6), **kwargs):
    """Head 1 looks one to the right, head 2 one below, in block 1 alone."""
    torch.manual_seed(0)
    small = {"embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 3, "img_size": (4 * grid[0], 4 * grid[1])}
    net = timm.create_model("vitrel_micro_patch4_32", rel_pos="swin", **{**small, **kwargs}).eval()
    h, w = grid
    with torch.no_grad():
        net.blocks[1].attn.position.bias.table[1, h - 1, w - 2] = 12.0
        net.blocks[1].attn.position.bias.table[2, h - 2, w - 1] = 12.0
    return net


def page(net, size, count=2, **kwargs):
    shown = [np.full((*size, 3), 60 * i, dtype=np.uint8) for i in range(count)]
    captions = [f"picture {i}" for i in range(count)]
    return report(net, torch.zeros(max(count, 1), 3, *size), shown, captions=captions, **kwargs)


def stored(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def numbers(packed, kind):
    return np.frombuffer(base64.b64decode(packed), kind)


def test_the_page_holds_the_maps_and_the_attention():
    net = planted()
    data = stored(page(net, (12, 24), title="</script><b>", facts={"grid": "3 x 6"}))
    assert data["title"] == "</script><b>"
    (kind,) = data["blocks"][1]["kinds"]
    maps = numbers(kind["data"], "<i2").reshape(3, kind["rows"], kind["cols"]) / 32767 * kind["limit"]
    np.testing.assert_allclose(maps, vitrel.bias_maps(net)["blocks.1"], atol=12 / 32767)
    weights = numbers(data["attention"]["blocks"]["blocks.1"]["data"], "u1").reshape(2, 3, 18, 3, 18)
    peaks = numbers(data["attention"]["blocks"]["blocks.1"]["peaks"], "<f4").reshape(2, 3, 18, 3, 1)
    shares = weights / 255 * peaks
    assert shares.sum(-1) == pytest.approx(1, abs=0.04)  # a byte each
    assert shares[1, 1, 8, :, 9] == pytest.approx([1, 1 / 18, 1], abs=0.01)  # both, content, position
    assert shares[0, 2, 8, :, 14] == pytest.approx([1, 1 / 18, 1], abs=0.01)
    assert data["blocks"][1]["numbers"][1]["cols_right"] == pytest.approx(5 / 6 - 2.5 / 6, abs=0.01)


def test_schemes_without_a_free_map_have_their_own(tmp_path):
    for scheme in ("rope", "irpe_qkv"):
        net = timm.create_model(
            "vitrel_micro_patch4_32", rel_pos=scheme, depth=1, embed_dim=24, num_heads=3, img_size=12
        )
        kinds = [k["name"] for k in stored(page(net, (12, 12)))["blocks"][0]["kinds"]]
        assert kinds == (
            ["rotary", "rotary spread"] if scheme == "rope" else ["query", "query spread", "key", "key spread", "value"]
        )
    with pytest.raises(ValueError, match="nothing to show"):
        report(net.blocks[0].mlp)


@pytest.mark.slow
def test_twelve_blocks_of_twelve_heads_on_64x64_patches_are_quick_and_small():
    """All but the model's own run, for which noise stands here."""
    torch.manual_seed(0)
    body = {"embed_dim": 96, "num_heads": 12, "depth": 12, "num_classes": 3, "img_size": 256, "mlp_ratio": 1}
    net = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl+key", **body).eval()
    for name in sorted(net.position_parameters()):
        torch.nn.init.normal_(net.get_parameter(name))
    grid, noise = Grid(64, 64), torch.randn(1, 4096, 96)
    attentions = {f"blocks.{i}": net.blocks[i].attn for i in range(12)}
    with torch.no_grad():
        seen = {
            name: Probe(name, attn, attn.position_terms((64, 64)), grid, noise) for name, attn in attentions.items()
        }
    start = time.process_time()
    html = report(net, seen, 4 * [np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)])
    spent = time.process_time() - start
    assert len(html) < 20e6
    assert spent < 10, spent
    data = stored(html)
    assert [len(block["kinds"]) for block in data["blocks"]] == [3] * 12  # too many for spreads
    assert data["attention"]["cell"] == 4
    assert len(data["pictures"]) == 1  # room for one
    assert len(data["attention"]["queries"]) >= 16


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install 'vitrel[dev]'")
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no chromium; apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """The page of a planted model opened from disk; at the end nothing was fetched and nothing went wrong."""
    (tmp_path / "report.html").write_text(page(planted(), (12, 24), title="planted"), encoding="utf-8")
    contexts, troubles = [], []

    def open_page(width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: troubles.append(message.text) if message.type != "log" else None)
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None)
        tab.goto((tmp_path / "report.html").as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def heat(tab, where):
    return np.array(tab.evaluate(f"document.getElementById('{where}').data[0].z"), dtype=float)


def brightest(values):
    return tuple(int(i) for i in np.unravel_index(values.argmax(), values.shape))


@pytest.mark.slow
def test_the_controls_and_the_keys_change_the_picture(opened):
    tab = opened()
    assert not heat(tab, "map").any()
    tab.select_option("#block", label="blocks.1")
    tab.select_option("#head", label="1")
    right = heat(tab, "map")
    assert right.shape == (5, 11)
    assert brightest(right) == (2, 6)  # the centre is (2, 5)
    assert (right > 1).sum() == 1
    x, y = tab.evaluate("[document.getElementById('map').data[0].x[6], document.getElementById('map').data[0].y[2]]")
    assert (x, y) == (1, 0)
    tab.locator("body").press("ArrowRight")  # the next head
    assert brightest(heat(tab, "map")) == (3, 5)
    assert tab.input_value("#head") == "2"
    assert "head 2" in tab.inner_text("#mapTitle")

    middle = brightest(heat(tab, "attention-both"))
    assert heat(tab, "attention-content") == pytest.approx(100 / 18, abs=0.1)
    assert middle == brightest(heat(tab, "attention-position")) == (2, 3)  # below the patch in row 1, column 3
    tab.keyboard.press("w")
    assert brightest(heat(tab, "attention-both")) == (1, 3)
    tab.keyboard.press("a")
    assert brightest(heat(tab, "attention-both")) == (1, 2)
    assert "row 0, column 2" in tab.inner_text("#attentionTitle")
    box = tab.locator("#attention-picture .nsewdrag").bounding_box()
    tab.mouse.click(box["x"] + box["width"] * 4.5 / 6, box["y"] + box["height"] * 1.5 / 3)
    assert "row 1, column 4" in tab.inner_text("#attentionTitle")
    before = tab.evaluate("document.getElementById('attention-picture').layout.images[0].source")
    tab.keyboard.press("p")
    assert tab.evaluate("document.getElementById('attention-picture').layout.images[0].source") != before
    numbers = tab.inner_text("#numbers")
    assert re.search(r"mean place, rows below\s+0\.[1-9]\d+\s+0\.000\s+0\.[1-9]", numbers)
    tab.keyboard.press("ArrowUp")
    assert tab.input_value("#block") == "0"
    assert not heat(tab, "map").any()
    tab.click("#overview button[data-block='1'][data-head='1']")
    assert brightest(heat(tab, "map")) == (2, 6)
    corner = tab.evaluate("""() => {
        const canvas = document.querySelector("#overview button[data-block='1'][data-head='1'] canvas");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const at = (x, y) => Array.from(pixels.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 3));
        return [at(6, 2), at(4, 2), at(5, 3)];
    }""")
    assert corner[0][0] > corner[0][2] + 50
    assert max(np.ptp(corner[1]), np.ptp(corner[2])) < 5


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (420, "dark")])
def test_the_page_fits_its_window(opened, width, scheme):
    tab = opened(width, scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    colours = tab.evaluate("""() => {
        const style = getComputedStyle(document.body);
        return [style.backgroundColor, style.color, getComputedStyle(document.querySelector('#map .xtitle')).fill];
    }""")
    light, dark = ("rgb(255, 255, 255)", "rgb(27, 27, 27)"), ("rgb(23, 25, 28)", "rgb(236, 236, 236)")
    assert tuple(colours[:2]) == (light if scheme == "light" else dark)
    assert colours[2] == colours[1]
    out = tab.evaluate("""() => [...document.querySelectorAll("#map text, #panels text")].map((text) => {
        const box = text.getBoundingClientRect(), plot = text.closest(".js-plotly-plot").getBoundingClientRect();
        return [text.textContent, box.left - plot.left, plot.right - box.right, box.width];
    }).filter(([, left, right, width]) => width > 0 && (left < -1 || right < -1))""")
    assert out == []
    if "VITREL_SCREENSHOTS" in os.environ:
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("ArrowRight")
        tab.screenshot(path=f"{os.environ['VITREL_SCREENSHOTS']}/planted-{width}-{scheme}.png", full_page=True)


def test_without_plotly_the_page_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ModuleNotFoundError, match=r"the page needs plotly; pip install 'vitrel\[page\]'"):
        page(planted(), (12, 24))
