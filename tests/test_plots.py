import numpy as np
import pytest
import timm
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import vitrel


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


def test_the_picture_shows_a_key_to_the_right_right_of_the_mark():
    maps = torch.zeros(1, 5, 9)
    maps[0, 2, 4 + 2] = 1.0
    figure = vitrel.plot_bias_maps({"blocks.0": maps})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())
    ax = next(ax for ax in figure.subfigs[0].axes if ax.images)

    def pixel(dx, dy):
        x, y = ax.transData.transform((dx, dy))
        return picture[picture.shape[0] - 1 - int(y), int(x), :3].astype(int)

    red = pixel(2, 0)
    assert red[0] > red[2] + 50
    assert np.ptp(pixel(-2, 0)) < 10
    assert np.ptp(pixel(2, 1)) < 10


def test_chosen_blocks_of_a_model():
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl")
    assert len(vitrel.plot_bias_maps(model).subfigs) == 6
    assert len(vitrel.plot_bias_maps(model, ["blocks.1"]).subfigs) == 1
    with pytest.raises(ValueError, match=r"no block 'blocks\.9', expected one of blocks\.0"):
        vitrel.plot_bias_maps(model, ["blocks.9"])


def test_nothing_to_draw_says_what_is_needed():
    with pytest.raises(ValueError, match=r"nothing to draw.*rel_pos needs bias or v"):
        vitrel.plot_bias_maps(timm.create_model("vitrel_micro_patch4_32", rel_pos="none"))
