"""Data sets by name: where their files lie, their classes, and their train, validation and test splits.

To add a data set: a subclass of :class:`Source` and its line in :func:`find_source`.
"""

from __future__ import annotations

import logging
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pytorch_lightning.utilities import rank_zero_only
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import calculate_md5

from vitrel.training.files import ImageFiles, find_damaged, find_split, open_split
from vitrel.training.images import DataError
from vitrel.training.settings import DataConfig

_logger = logging.getLogger(__name__)
SHOWN = 20
"""How many skipped pictures are named."""
SplitName = Literal["train", "val", "test"]
_CIFAR = {"cifar10": CIFAR10, "cifar100": CIFAR100}
_CLASSES = {"cifar10": 10, "cifar100": 100}
_ALIASES: dict[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}


class Pictures(Protocol):
    """Pictures by index, each (H, W, 3) uint8 RGB: an array (N, H, W, 3), or files."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class Split:
    """Pictures with their labels.

    Attributes:
        pictures: What is read.
        labels: Class index of each picture, (N,).
        indices: Which pictures belong to the split, (n,).
    """

    pictures: Pictures
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)


class Source(ABC):
    """A data set.

    Attributes:
        classes: Class names in the order of the labels.
        tested_on: The split that :meth:`split` gives for ``test``: ``val`` where there is no test split.
        skipped: Damaged pictures of the splits opened so far that are left out, by path.
    """

    classes: list[str]
    tested_on: SplitName = "test"
    skipped: Sequence[str] = ()

    def prepare(self) -> None:  # noqa: B027 (most sources have nothing to prepare)
        """Downloads or unpacks what is missing; called by one process."""

    def check(self) -> None:
        """Makes every split once, without reading pictures, unless damaged ones have to be found; after ``prepare``.

        Raises:
            DataError: As :meth:`split`.
        """
        for name in _ALIASES:
            self.split(name)

    @abstractmethod
    def split(self, name: SplitName) -> Split:
        """Opens one split.

        Raises:
            DataError: Naming a file that cannot be used.
        """


def find_source(data: DataConfig) -> Source:
    """The data set of the settings; looks at names of files only, and downloads nothing.

    Raises:
        DataError: If its files are not there, with the places looked at and what to do.
    """
    if data.name == "digits":
        return Digits(data)
    if data.name == "fake":
        return Fake(data)
    root = Path(data.root).expanduser().absolute()
    for base in (root, root / data.name):
        if data.name != "folder" and (base / _CIFAR[data.name].base_folder).is_dir():
            return Cifar(data, base)
        if find_split(base, _ALIASES["train"]) and any(find_split(base, _ALIASES[s]) for s in ("val", "test")):
            return ClassFolders(data, base)
        if data.name != "folder" and (base / _CIFAR[data.name].filename).is_file():
            return Cifar(data, base)
    if data.download:
        return Cifar(data, root)
    raise DataError(_not_found(data, root))


def hold_out(
    labels: NDArray[np.int64], size: float, seed: int, setting: str = "data.val_size"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Stratified indices of the images kept and of those held out, each sorted.

    Args:
        labels: (N,).
        size: Part of the images below 1, or their count.
        seed: Same seed, same split.
        setting: What an error calls ``size``.

    Raises:
        DataError: If a class has too few images to be on both sides.
    """
    try:
        kept, out = train_test_split(
            np.arange(len(labels)), test_size=size if size < 1 else int(size), stratify=labels, random_state=seed
        )
    except ValueError as e:
        raise DataError(
            f"{setting}: {size} of {len(labels)} training images cannot be held out with every class on both sides"
            f" ({e}); change it or give a val/ folder"
        ) from None
    return np.sort(kept), np.sort(out)


class Digits(Source):
    """scikit-learn's handwritten digits: 1797 grey pictures of 8 x 8; a fifth is the test split."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self.classes = [str(i) for i in range(10)]

    def split(self, name: SplitName) -> Split:
        bunch = load_digits()
        grey = np.round(bunch.images * (255 / 16)).astype(np.uint8)
        labels = bunch.target.astype(np.int64)
        rest, test = hold_out(labels, 0.2, seed=0)  # the test split is the same whatever the settings
        kept, val = hold_out(labels[rest], self.data.val_size, self.data.split_seed)
        indices = {"train": rest[kept], "val": rest[val], "test": test}[name]
        return Split(np.repeat(grey[..., None], 3, axis=3), labels, indices)


class Fake(Source):
    """Random 32 x 32 pictures and labels, to try the code without data."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self.classes = [f"class_{i}" for i in range(data.fake_classes)]

    def split(self, name: SplitName) -> Split:
        rng = np.random.default_rng([self.data.split_seed, ["train", "val", "test"].index(name)])
        pictures = rng.integers(0, 256, (self.data.fake_images, 32, 32, 3), dtype=np.uint8)
        labels = rng.integers(0, len(self.classes), self.data.fake_images)
        return Split(pictures, labels, np.arange(len(labels)))


class ClassFolders(Source):
    """``train`` and ``val`` and/or ``test``, each a tree or a tar of class folders.

    Without ``val``, part of ``train`` is held out; without ``test``, ``val`` serves for both. CIFAR's pictures are
    decoded once into memory, since decoding would otherwise take a good part of every epoch.
    """

    def __init__(self, data: DataConfig, base: Path) -> None:
        self.data = data
        found = {name: find_split(base, aliases) for name, aliases in _ALIASES.items()}
        self.paths = {name: path for name, path in found.items() if path}
        self.tested_on = "test" if "test" in self.paths else "val"
        self.skipped: list[str] = []
        self._told = False
        self._opened: dict[Path, ImageFiles] = {}
        self._sound: dict[Path, NDArray[np.bool_]] = {}
        self._arrays: dict[Path, NDArray[np.uint8]] = {}
        train = self._open(self.paths["train"])
        self.classes = train.classes
        expected = _CLASSES.get(data.name)
        if expected and len(self.classes) != expected:
            raise DataError(f"{train.root} holds {len(self.classes)} class folders; {data.name} has {expected}")
        if len(self.classes) < 2:
            raise DataError(f"{train.root} holds one class folder only, {self.classes[0]!r}; two are needed")
        empty = sorted(set(train.classes) - set(train.folders))
        if empty:
            _warn(f"{train.root}: no pictures in {', '.join(empty)}; the class is kept")

    def check(self) -> None:
        for name in _ALIASES:
            self._indices(name)
        _, labels, indices = self._indices("train")
        bare = [name for label, name in enumerate(self.classes) if label not in labels[indices]]
        if bare:
            _warn(f"no picture to train on of {len(bare)} of {len(self.classes)} classes: {', '.join(bare[:SHOWN])}")

    def split(self, name: SplitName) -> Split:
        files, labels, indices = self._indices(name)
        if self.data.name == "folder":
            return Split(files, labels, indices)
        if files.root not in self._arrays:
            self._arrays[files.root] = _decoded(files, self._sound.get(files.root))
        return Split(self._arrays[files.root], labels, indices)

    def _open(self, path: Path) -> ImageFiles:
        if path not in self._opened:
            self._opened[path] = open_split(path)
        return self._opened[path]

    def _indices(self, name: SplitName) -> tuple[ImageFiles, NDArray[np.int64], NDArray[np.int64]]:
        """The files of a split, the labels of all of them, and which of them belong to it."""
        if name == "test" and self.tested_on == "val":
            if not self._told:
                _warn(f"no test split beside {self.paths['train']}: the test figures are those of val")
            name, self._told = "val", True
        files = self._open(self.paths.get(name, self.paths["train"]))
        labels = files.labels(self.classes)
        indices = np.arange(len(labels))
        if "val" not in self.paths and name in ("train", "val"):
            kept, val = hold_out(labels, self.data.val_size, self.data.split_seed)
            indices = kept if name == "train" else val
        if self.data.skip_damaged:  # after the split, which does not change when a file is mended
            indices = indices[self._readable(files)[indices]]
            if not len(indices):
                raise DataError(f"{files.root}: none of the pictures of the {name} split can be read")
        return files, labels, indices

    def _readable(self, files: ImageFiles) -> NDArray[np.bool_]:
        if files.root not in self._sound:
            faults = find_damaged(files, self.data.num_workers or 0)
            self._sound[files.root] = np.array([i not in faults for i in range(len(files))], dtype=bool)
            self.skipped += [f"{files.root}/{files.names[i]}" for i in faults]
            for fault in list(faults.values())[:SHOWN]:
                _warn(f"skipped {fault}")
            if len(faults) > SHOWN:
                _warn(f"skipped {len(faults) - SHOWN} more pictures of {files.root}")
        return self._sound[files.root]


class Cifar(Source):
    """CIFAR as torchvision keeps it; torchvision verifies checksums before it reads."""

    def __init__(self, data: DataConfig, base: Path) -> None:
        self.data, self.base, self.kind = data, base, _CIFAR[data.name]
        self.classes = [str(i) for i in range(_CLASSES[data.name])]  # named when the first split is opened
        archive = base / self.kind.filename
        if archive.is_file() and not (base / self.kind.base_folder).is_dir():
            found = calculate_md5(str(archive))
            if found != self.kind.tgz_md5:
                raise DataError(
                    f"{archive} is damaged or incomplete (md5 {found}, expected {self.kind.tgz_md5});"
                    " delete it and copy or download it again"
                )

    def prepare(self) -> None:
        if (self.base / self.kind.base_folder).is_dir():
            return
        try:
            self.kind(str(self.base), download=True)  # unpacks the archive, which it fetches if it is not there
        except (OSError, RuntimeError, EOFError, tarfile.TarError) as e:
            raise DataError(f"cannot download or unpack {self.data.name} into {self.base}: {e}") from None

    def check(self) -> None:
        self.split("test")  # torchvision verifies the training files too
        per_class = 50_000 // len(self.classes)
        hold_out(np.repeat(np.arange(len(self.classes)), per_class), self.data.val_size, self.data.split_seed)

    def split(self, name: SplitName) -> Split:
        try:
            full = self.kind(str(self.base), train=name != "test", download=False)
        except (OSError, RuntimeError, ValueError, EOFError) as e:
            folder = self.base / self.kind.base_folder
            raise DataError(f"{folder} is incomplete or damaged ({e}); delete it and unpack it again") from None
        labels = np.array(full.targets, dtype=np.int64)
        self.classes = list(full.classes)
        indices = np.arange(len(labels))
        if name != "test":
            kept, val = hold_out(labels, self.data.val_size, self.data.split_seed)
            indices = kept if name == "train" else val
        return Split(full.data, labels, indices)


def _decoded(files: ImageFiles, sound: NDArray[np.bool_] | None = None) -> NDArray[np.uint8]:
    """All pictures in one array; those that are not ``sound`` stay black, and belong to no split."""
    wanted = np.arange(len(files)) if sound is None else np.flatnonzero(sound)
    first = files[int(wanted[0])]
    result = np.zeros((len(files), *first.shape), dtype=np.uint8)
    for i in wanted.tolist():
        picture = files[i]
        if picture.shape != first.shape:
            raise DataError(f"{files.root}/{files.names[i]} has {picture.shape[:2]} pixels, others {first.shape[:2]};"
                            " use --data.name folder for pictures of several sizes")  # fmt: skip
        result[i] = picture
    return result


@rank_zero_only
def _warn(text: str) -> None:
    _logger.warning(text)


def _not_found(data: DataConfig, root: Path) -> str:
    trees = "train/ and test/ (or val/) of class folders, or train.tar and test.tar of them"
    if data.name == "folder":
        there = "" if root.is_dir() else " (there is no such folder)"
        return f"no pictures under {root}{there}: expected {trees}; give --data.root DIR"
    kind = _CIFAR[data.name]
    return (
        f"{kind.__name__} is not under {root}: looked there and in {root / data.name} for {kind.base_folder}/,"
        f" {kind.filename}, and {trees}; give --data.root DIR, or --data.download true, or --data.name fake to try the"
        " code on random pictures"
    )
