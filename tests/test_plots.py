import numpy as np
import pytest
import timm
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import vitrel
from vitrel.maps import TermMap
from vitrel.plots import plot_ablation, plot_sizes


def test_a_row_per_block_and_a_panel_per_head_on_one_scale_centred_on_zero():
    maps = {"blocks.0": torch.full((3, 5, 9), -2.0), "blocks.4": torch.full((3, 5, 9), 0.5)}
    figure = vitrel.plot_bias_maps(maps)
    assert len(figure.subfigs) == 2
    for part, limit in zip(figure.subfigs, (2.0, 0.5), strict=True):
        images = [ax.images[0] for ax in part.axes if ax.images]
        assert len(images) == 3
        assert {(i.norm.vmin, i.norm.vcenter, i.norm.vmax) for i in images} == {(-limit, 0, limit)}


def test_axes_count_patches_from_the_query():
    figure = vitrel.plot_bias_maps({"blocks.0": torch.zeros(1, 5, 9)})
    ax = next(ax for ax in figure.subfigs[0].axes if ax.images)
    assert ax.images[0].get_extent() == [-4.5, 4.5, 2.5, -2.5]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("columns right of the query", "rows below the query")


@pytest.mark.parametrize("place", [(2, 0), (0, 1)], ids=["right", "below"])
def test_the_picture_shows_a_key_at_its_place_from_the_mark(place):
    maps = torch.zeros(1, 5, 9)
    maps[0, 2 + place[1], 4 + place[0]] = 1.0
    figure = vitrel.plot_bias_maps({"blocks.0": maps})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())
    ax = next(ax for ax in figure.subfigs[0].axes if ax.images)

    def pixel(dx, dy):
        x, y = ax.transData.transform((dx, dy))
        return picture[picture.shape[0] - 1 - int(y), int(x), :3].astype(int)

    red = pixel(*place)
    assert red[0] > red[2] + 50
    for other in [(-place[0], -place[1]), (2, 1), (place[1], place[0])]:
        assert np.ptp(pixel(*other)) < 10


def test_chosen_blocks_of_a_model():
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl")
    assert len(vitrel.plot_bias_maps(model).subfigs) == 6
    assert len(vitrel.plot_bias_maps(model, ["blocks.1"]).subfigs) == 1
    with pytest.raises(ValueError, match=r"no block 'blocks\.9', expected one of blocks\.0"):
        vitrel.plot_bias_maps(model, ["blocks.9"])


def test_nothing_to_draw_says_what_is_needed():
    with pytest.raises(ValueError, match=r"nothing to draw.*rel_pos needs bias or v"):
        vitrel.plot_bias_maps(timm.create_model("vitrel_micro_patch4_32", rel_pos="none"))


def test_heads_beyond_six_go_on_the_next_line():
    figure = vitrel.plot_bias_maps({"blocks.0": torch.randn(8, 5, 9)})
    shown = [ax for ax in figure.subfigs[0].axes if ax.images and ax.get_visible()]
    assert [ax.get_title() for ax in shown] == [f"head {i}" for i in range(8)]
    assert len({round(ax.get_position().y0, 3) for ax in shown}) == 2


def micro(rel_pos, **kwargs):
    small = {"embed_dim": 24, "num_heads": 3, "depth": 1, "num_classes": 3, "img_size": (12, 24)}
    return timm.create_model("vitrel_micro_patch4_32", rel_pos=rel_pos, **{**small, **kwargs})


def test_a_row_per_map_and_one_per_spread():
    maps = vitrel.term_maps(micro("txl+value"), torch.randn(2, 3, 12, 24))["blocks.0"]
    figure = vitrel.plot_term_maps(maps, "blocks.0")
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert titles == [f"blocks.0: {t}  (+ is the query)" for t in (
        "whatever the picture", "query term, mean", "query term, spread over queries and pictures", "value term",
    )]  # fmt: skip
    with pytest.raises(ValueError, match="nothing to draw: the block has no maps"):
        vitrel.plot_term_maps({})


def test_a_spread_of_rounding_alone_is_none():
    values = torch.zeros(1, 3, 3)
    values[0, 1, 2] = 28
    for least, shown in ((4e-7, 0.0), (0.5, 0.5)):
        one = TermMap("query term, mean", "added to the score", values, spread=torch.full((1, 3, 3), least))
        figure = vitrel.plot_term_maps({"query": one})
        (image,) = (i for ax in figure.subfigs[1].axes for i in ax.images)
        assert float(image.get_array().max()) == shown


@pytest.mark.parametrize(("offset", "place"), [((0, -1), (1, 4)), ((-1, 0), (2, 3))], ids=["right", "below"])
@pytest.mark.parametrize("query", [(1, 3)])
def test_attention_over_the_picture_shows_a_planted_key_at_its_place(offset, place, query):
    net = micro("swin")
    with torch.no_grad():
        net.blocks[0].attn.position.bias.table[1, 2 + offset[0], 5 + offset[1]] = 12.0
    figure = vitrel.plot_attention(net, torch.zeros(3, 12, 24), query)
    panels = [ax for ax in figure.axes if len(ax.images) == 2]
    assert len(panels) == 9
    scales = {(ax.images[1].norm.vmin, ax.images[1].norm.vmax) for ax in panels}
    assert len(scales) == 1
    for number, ax in enumerate(panels):
        heat = np.asarray(ax.images[1].get_array())
        part, head = divmod(number, 3)
        assert heat.shape == (3, 6)
        if head == 1 and part in (0, 2):  # both, and position alone
            assert np.unravel_index(heat.argmax(), heat.shape) == place
            assert heat.max() > 99
        else:
            assert heat == pytest.approx(100 / 18, abs=1e-3)
        (mark,) = ax.patches
        assert mark.get_xy() == (query[1] - 0.5, query[0] - 0.5)


def test_attention_says_what_it_cannot_show():
    with pytest.raises(ValueError, match=r"no block 'x', expected one of blocks\.0"):
        vitrel.plot_attention(micro("bias"), torch.zeros(3, 12, 24), (0, 0), "x")
    with pytest.raises(ValueError, match=r"query \(3, 0\): expected a row below 3 and a column below 6"):
        vitrel.plot_attention(micro("bias"), torch.zeros(3, 12, 24), (3, 0))


ABLATION = [
    {"off": off, "top1": 0.9 + change, "change": change, "standard_error": 0.01}
    for off, change in [("nothing", 0.0), ("query", -0.02), ("rotary_mixed", 0.005), ("all of them", -0.6)]
]
SIZES = [{"rows": 32, "cols": 32, "rule": "trained size", "top1": 0.9}] + [
    {"rows": s, "cols": c, "rule": r, "top1": t}
    for s, c, r, t in [(24, 24, "clamp", 0.7), (64, 48, "clamp", 0.5), (24, 24, "interpolate", 0.8)]
]


def figures():
    yield vitrel.plot_bias_maps({"blocks.11": 1e-3 * torch.randn(12, 127, 127), "blocks.0": 1e3 * torch.randn(1, 3, 3)})
    yield vitrel.plot_bias_maps({"blocks.0": torch.randn(2, 27, 7)})
    yield vitrel.plot_term_maps(vitrel.term_maps(micro("irpe_qkv"), torch.randn(2, 3, 12, 24))["blocks.0"], "blocks.0")
    yield vitrel.plot_attention(micro("txl"), torch.randn(3, 12, 24), (1, 1))
    yield vitrel.plot_attention(micro("txl", num_heads=1), torch.randn(3, 12, 24), (1, 1))
    yield plot_ablation(ABLATION)
    yield plot_ablation(ABLATION[:2])
    yield plot_sizes(SIZES)
    yield plot_sizes(SIZES[:1])


def drawn_texts(figure):
    """Every text that is drawn, with its box; ticks beyond an axis' ends are kept by matplotlib and not drawn."""
    hidden = set()
    for ax in figure.findobj(Axes):
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden.update(t for tick in ticks if not low <= tick.get_loc() <= high for t in tick.findobj(Text))
        if not ax.get_visible():
            hidden.update(ax.findobj(Text))
    texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible() and t not in hidden]
    return [(t.get_text(), t.get_window_extent()) for t in texts if t.get_window_extent().width > 0]


def test_no_label_is_clipped_or_lies_on_another_and_the_ground_is_white():
    for number, figure in enumerate(figures()):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        picture = np.asarray(canvas.buffer_rgba())
        assert (picture[0, 0] == 255).all(), number
        drawn = drawn_texts(figure)
        for i, (one, a) in enumerate(drawn):
            assert min(a.x0, a.y0) > -1, (number, one)
            assert a.x1 < picture.shape[1] + 1, (number, one)
            assert a.y1 < picture.shape[0] + 1, (number, one)
            for other, b in drawn[:i]:
                across = min(a.x1, b.x1) - max(a.x0, b.x0)
                down = min(a.y1, b.y1) - max(a.y0, b.y0)
                assert not (across > 2 and down > 2), (number, one, other)
