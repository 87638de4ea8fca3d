"""Reading a picture: whatever the file holds becomes H x W x 3, uint8, RGB, or is refused by name.

* Alpha is laid over white. * 16-bit grey keeps its ramp. * The EXIF orientation is applied.
* Of an animation the first frame is taken.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

MAX_PIXELS = 64 * 1024 * 1024
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class DataError(RuntimeError):
    """Data that cannot be used; the message is one line for the user."""


def decode(content: bytes, name: str) -> NDArray[np.uint8]:
    """The picture in ``content`` as (H, W, 3) uint8 RGB.

    Args:
        content: The bytes of an image file, of any format Pillow reads.
        name: What an error calls it.

    Raises:
        DataError: For a damaged, truncated, empty or too large file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked below
            warnings.filterwarnings("ignore", "Palette images with Transparency", UserWarning)  # handled below
            with Image.open(io.BytesIO(content)) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(
                        f"{name}: {image.width} x {image.height} pixels are more than the {MAX_PIXELS} that are read;"
                        " make it smaller or remove it"
                    )
                image.load()
                return _rgb(ImageOps.exif_transpose(image) or image)
    except DataError:
        raise
    except (
        OSError, SyntaxError, ValueError, TypeError, EOFError, KeyError, IndexError, OverflowError, AttributeError,
        MemoryError, RuntimeError, struct.error, zlib.error, Image.DecompressionBombError,
    ) as e:  # fmt: skip  # Pillow's readers raise all of these on damaged files
        reason = "the file is empty" if not content else " ".join(str(e).split()) or type(e).__name__
        raise DataError(f"{name}: cannot be read as an image ({reason}); replace or remove the file") from None


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips it at 255
        grey = np.asarray(image).astype(np.int64)
        if grey.min(initial=0) < 0 or grey.max(initial=0) > 65535:
            raise ValueError("32-bit integer pixels")
        grey = ((grey + 128) // 257).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if ("A" in image.mode.upper() and image.mode != "LAB") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"), dtype=np.uint8)
