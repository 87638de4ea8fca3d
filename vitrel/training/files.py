"""Class folders, as a tree or in a tar file: which pictures there are, and their bytes.

A class is a folder; classes are sorted by name, and their order is fixed by the training split. Hidden files, hidden
folders and files that are no pictures are left out. Tar files are read in place by offset: nothing is unpacked, and
loader workers share no file position.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from vitrel.training.images import SUFFIXES, DataError, decode


@dataclass(frozen=True)
class ImageFiles:
    """Pictures in files, decoded one at a time.

    Attributes:
        root: A folder, or a tar file.
        names: Path of each picture below ``root``.
        spans: Offset and length of each in the tar file, (N, 2); None for a folder.
        folders: Class folder of each picture.
        classes: All class folders, those without pictures too, sorted.
    """

    root: Path
    names: list[str]
    spans: NDArray[np.int64] | None
    folders: list[str]
    classes: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """The picture as (H, W, 3) uint8 RGB.

        Raises:
            DataError: Naming a file that cannot be read.
        """
        name = f"{self.root}/{self.names[index]}"
        try:
            if self.spans is None:
                content = (self.root / self.names[index]).read_bytes()
            else:
                start, length = self.spans[index]
                with open(self.root, "rb") as f:
                    f.seek(start)
                    content = f.read(length)
        except OSError as e:
            raise DataError(f"{name}: {e.strerror}") from None
        return decode(content, name)

    def labels(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """Class index of each picture, (N,), by the order of the training classes.

        Raises:
            DataError: Naming a folder that is no training class.
        """
        index = {name: i for i, name in enumerate(classes)}
        for folder in self.classes:
            if folder not in index:
                raise DataError(f"{self.root} has the class folder {folder!r}, which the training images lack;"
                                " rename it or remove it")  # fmt: skip
        return np.array([index[f] for f in self.folders], dtype=np.int64)


def open_folder(root: Path) -> ImageFiles:
    """Lists a tree of class folders; pictures may lie deeper than the class folder.

    Raises:
        DataError: If there are no class folders with pictures.
    """
    classes = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    names, folders = [], []
    for name in classes:
        found = [p.relative_to(root) for p in sorted((root / name).rglob("*")) if _is_picture(p)]
        found = [p for p in found if not any(part.startswith(".") for part in p.parts)]
        names += [p.as_posix() for p in found]
        folders += [name] * len(found)
    return _checked(ImageFiles(root, names, None, folders, classes))


def open_tar(path: Path) -> ImageFiles:
    """Lists a tar file of class folders, with or without one common folder above them.

    Raises:
        DataError: If it is no plain tar file or holds no class folders with pictures.
    """
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as raw:
            members = [(_parts(m.name), m) for m in tar]
            raw.seek(tar.offset)
            # The listing just ends where a header is damaged, or where the file was cut between two members.
            if raw.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"damaged or cut short after {tar.offset} bytes; copy or pack it again")
    except (tarfile.TarError, OSError, EOFError) as e:
        raise DataError(f"{path}: not a readable, uncompressed tar file ({e})") from None
    members = [(parts, m) for parts, m in members if not any(part.startswith(".") for part in parts)]
    for parts, m in members:
        if (m.issym() or m.islnk()) and _is_named_picture(parts[-1]):
            raise DataError(f"{path}: {m.name} is a link; pack the pictures themselves (tar --hard-dereference -h)")
    entries = [(parts, m.isdir(), m.offset_data, m.size) for parts, m in members if m.isreg() or m.isdir()]
    pictures = [e for e in entries if not e[1] and _is_named_picture(e[0][-1])]
    depth = min((len(e[0]) for e in pictures), default=0)
    top = 1 if depth > 2 and len({e[0][0] for e in pictures}) == 1 else 0
    pictures = sorted(e for e in pictures if len(e[0]) > top + 1)
    folders = [e[0][top] for e in pictures]
    empty = {e[0][top] for e in entries if e[1] and len(e[0]) > top}
    spans = np.array([(e[2], e[3]) for e in pictures], dtype=np.int64).reshape(-1, 2)
    names = ["/".join(e[0]) for e in pictures]
    return _checked(ImageFiles(path, names, spans, folders, sorted(empty | set(folders))))


def find_damaged(files: ImageFiles, workers: int = 0) -> dict[int, str]:
    """What is wrong with each picture that cannot be read, by its index; every picture is read.

    Args:
        files: The pictures.
        workers: Processes that read; 0 reads in this one.
    """
    # With a generator of its own the loader draws nothing from the one of the run.
    faults = DataLoader(_Faults(files), batch_size=None, num_workers=workers, generator=torch.Generator())
    return {i: fault for i, fault in enumerate(faults) if fault}


class _Faults(Dataset[str]):
    """What is wrong with each picture, or an empty text."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        try:
            self.files[index]
        except DataError as e:
            return str(e)
        return ""


def find_split(base: Path, aliases: Sequence[str]) -> Path | None:
    """The folder or tar file of a split below ``base``, the first alias that is there."""
    for alias in aliases:
        for path in (base / alias, base / f"{alias}.tar"):
            if path.is_dir() or (path.suffix == ".tar" and path.is_file()):
                return path
    return None


def open_split(path: Path) -> ImageFiles:
    """:func:`open_folder` or :func:`open_tar`."""
    return open_tar(path) if path.is_file() else open_folder(path)


def _is_picture(path: Path) -> bool:
    # A broken link is listed, and named when it is read; a pipe or a folder of such a name is no picture.
    return _is_named_picture(path.name) and (path.is_file() or path.is_symlink()) and not path.is_dir()


def _is_named_picture(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in PurePosixPath(name).parts if part not in (".", "/"))


def _checked(files: ImageFiles) -> ImageFiles:
    if not files.names:
        suffixes = " ".join(sorted(SUFFIXES))
        raise DataError(f"{files.root} holds no pictures in class folders; expected CLASS/NAME with one of {suffixes}")
    return files
