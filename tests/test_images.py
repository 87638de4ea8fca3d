"""Whatever a file holds becomes H x W x 3 uint8 RGB, or is refused by name."""

import io

import numpy as np
import pytest
from PIL import Image

from vitrel.training import images
from vitrel.training.images import DataError, decode


def png(array, **info):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG", **info)
    return buffer.getvalue()


def test_rgb_is_read_exactly():
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    read = decode(png(pixels), "x")
    assert read.dtype == np.uint8
    assert (read == pixels).all()


def test_grey_becomes_three_equal_channels():
    grey = np.array([[0, 100], [200, 255]], np.uint8)
    assert (decode(png(grey), "x") == grey[:, :, None]).all()


def test_sixteen_bit_grey_keeps_its_ramp():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(2, 0)
    assert (decode(png(ramp), "x")[0, :, 0] == np.arange(256)).all()


def test_alpha_is_laid_over_white():
    rgba = np.array([[[200, 0, 0, 255], [200, 0, 0, 0], [0, 0, 0, 51]]], np.uint8)
    assert decode(png(rgba), "x").tolist() == [[[200, 0, 0], [255, 255, 255], [204, 204, 204]]]


@pytest.mark.parametrize("content", [b"", b"not an image", png(np.zeros((40, 40, 3), np.uint8))[:60]])
def test_a_damaged_file_is_refused_by_name(content):
    with pytest.raises(DataError, match=r"^dir/a\.png: cannot be read as an image \(.+\); replace or remove the file$"):
        decode(content, "dir/a.png")


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 99)
    with pytest.raises(DataError, match=r"^a: 10 x 10 pixels are more than the 99 that are read"):
        decode(png(np.zeros((10, 10, 3), np.uint8)), "a")


def test_case_images(shared):
    folder = shared / "cases" / "images"

    def read(name):
        picture = decode((folder / name).read_bytes(), name)
        assert picture.dtype == np.uint8
        assert picture.ndim == 3
        assert picture.shape[2] == 3
        return picture

    rgba = read("rgba_half_transparent.png")
    assert rgba[16, 30].tolist() == [0, 200, 0]
    assert rgba[16, 5].tolist() == [255, 255, 255]
    assert np.abs(read("cmyk_adobe_red.jpg").astype(int) - [255, 0, 0]).max() <= 12
    ramp = read("gray16_full_ramp.png")
    assert len(np.unique(ramp)) >= 200
    assert np.abs(ramp[:, 128].astype(int) - 128).max() <= 2
    assert read("palette_alpha_bytes.png")[16, 16].tolist() == [0, 160, 0]
    upright = read("exif_orientation6.jpg")
    assert upright.shape == (60, 40, 3)
    assert upright[5, 35].argmax() == 0  # the red block is at the top right
    assert len(np.unique(read("gray_alpha.png"))) == 40
    assert read("one_row_1x64.png").shape == (1, 64, 3)
    assert read("animated_3frames.gif")[0, 0].tolist() == [220, 20, 20]
    assert read("png_named.jpg").shape == (32, 40, 3)
    grey = read("gray_8bit.jpg")
    assert (grey == grey[:, :, :1]).all()
    for name in ("truncated_half.jpg", "zero_byte.jpg", "huge_10000x10000_1bit.png"):
        with pytest.raises(DataError, match=name):
            read(name)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGBA", "PNG"), ("LA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("L", "WEBP"), ("1", "TIFF"), ("RGB", "BMP")],
)
def test_every_mode_becomes_three_channels(mode, kind):
    grey = Image.fromarray(np.full((6, 4), 60, np.uint8))
    buffer = io.BytesIO()
    grey.convert("RGB").convert(mode).save(buffer, kind)
    read = decode(buffer.getvalue(), "x")
    assert (read.shape, read.dtype) == ((6, 4, 3), np.uint8)
    if mode not in ("1", "P"):  # whose colours are few
        assert np.abs(read.astype(int) - 60).max() <= 3


def test_no_other_reader_of_pillow_is_started():
    """A PostScript file of whatever name would start Ghostscript."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "EPS")
    with pytest.raises(DataError, match=r"^a\.jpg: cannot be read as an image \(none of BMP GIF JPEG PNG"):
        decode(buffer.getvalue(), "a.jpg")


def test_a_message_is_one_line_whatever_the_name():
    with pytest.raises(DataError, match=r"^a b\\x1b\.png: cannot be read as an image \(the file is empty\)"):
        decode(b"", "a\nb\x1b.png")
