"""Reading a picture: whatever the file holds becomes H x W x 3, uint8, RGB, or is refused by name.

* Alpha is laid over white. * 16-bit grey keeps its ramp. * The EXIF orientation is applied.
* Of an animation the first frame is taken.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from vitrel.training.fileio import one_line

MAX_PIXELS = 64 * 1024 * 1024
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no other reader, whatever a file calls itself


class DataError(RuntimeError):
    """Data that cannot be used; the message is one line for the user, also after a loader worker handed it over."""

    def __init__(self, message: str) -> None:
        if "Original Traceback" in message:  # torch makes an error of this class anew, with a traceback as its message
            message = message.strip().splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: ")
        super().__init__(one_line(message))


def decode(content: bytes, name: str) -> NDArray[np.uint8]:
    """The picture in ``content`` as (H, W, 3) uint8 RGB.

    Args:
        content: The bytes of an image file; what they hold counts, not how the file is called.
        name: What an error calls it.

    Raises:
        DataError: For a damaged, truncated, empty or too large file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damage that does not keep Pillow from reading the picture; bombs: below
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(
                        f"{name}: {image.width} x {image.height} pixels are more than the {MAX_PIXELS} that are read;"
                        " make it smaller or remove it"
                    )
                image.load()
                return _rgb(ImageOps.exif_transpose(image) or image)
    except DataError:
        raise
    except Exception as e:  # a damaged file makes Pillow's readers fail in any way
        reason = str(e).strip() or type(e).__name__
        if isinstance(e, UnidentifiedImageError):
            reason = f"none of {' '.join(_FORMATS)}" if content else "the file is empty"
        raise DataError(f"{name}: cannot be read as an image ({reason}); replace or remove the file") from None


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips it at 255
        wide = np.asarray(image)
        if wide.min(initial=0) < 0 or wide.max(initial=0) > 65535:
            raise ValueError("32-bit integer pixels")
        grey = ((wide.astype(np.uint32) + 128) // 257).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if ("A" in image.mode.upper() and image.mode != "LAB") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return np.array(image if image.mode == "RGB" else image.convert("RGB"), dtype=np.uint8)
