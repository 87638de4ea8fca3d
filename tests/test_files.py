"""Class folders as trees and tar files."""

import io
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from vitrel.training.files import find_damaged, find_split, open_folder, open_tar
from vitrel.training.images import DataError


def png(value):
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


TREE = {
    "bear/2.png": png(2),
    "ape/1.PNG": png(1),
    "ape/deep/3.png": png(3),
    "ape/.hidden.png": b"",
    "ape/notes.txt": b"x",
    ".cache/x.png": b"",
    "README.md": b"x",
    "stray.png": png(9),
}


def tree(root, files=TREE, empty=("cat",)):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    for name in empty:
        (root / name).mkdir()
    return root


def tar(path, top="", files=TREE, empty=("cat",)):
    with tarfile.open(path, "w") as t:
        for name in empty:
            info = tarfile.TarInfo(top + name)
            info.type = tarfile.DIRTYPE
            t.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(content)
            t.addfile(info, io.BytesIO(content))
    return path


def listing(files):
    return files.classes, files.names, [int(files[i][0, 0, 0]) for i in range(len(files))], files.folders


def test_a_tree_and_a_tar_hold_the_same_pictures(tmp_path):
    expected = ["ape", "bear", "cat"], ["ape/1.PNG", "ape/deep/3.png", "bear/2.png"], [1, 3, 2], ["ape", "ape", "bear"]
    assert listing(open_folder(tree(tmp_path / "t"))) == expected
    assert listing(open_tar(tar(tmp_path / "a.tar"))) == expected
    assert listing(open_tar(tar(tmp_path / "b.tar", top="./"))) == expected


def test_a_common_folder_above_the_classes_is_no_class(tmp_path):
    files = {k: v for k, v in TREE.items() if k != "stray.png"}
    classes, names, values, _ = listing(open_tar(tar(tmp_path / "a.tar", top="train/", files=files)))
    assert classes == ["ape", "bear", "cat"]
    assert names[0] == "train/ape/1.PNG"
    assert values == [1, 3, 2]


def test_labels_follow_the_training_classes(tmp_path):
    files = open_folder(tree(tmp_path / "t", {"crab/1.png": png(1), "duck/1.png": png(2)}, empty=()))
    assert files.labels(["apple", "bear", "crab", "duck"]).tolist() == [2, 3]
    with pytest.raises(DataError, match="class folder 'duck', which the training images lack"):
        files.labels(["apple", "bear", "crab"])


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match=r"x\.tar: not a readable, uncompressed tar file"):
        open_tar(tmp_path / "x.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no pictures in class folders"):
        open_folder(tmp_path / "empty")
    files = open_folder(tree(tmp_path / "t", {"a/broken.png": png(1)[:30]}, empty=()))
    with pytest.raises(DataError, match=r"t/a/broken\.png: cannot be read as an image"):
        files[0]
    cut = tar(tmp_path / "cut.tar", files={"a/1.png": png(1), "a/2.png": png(2)})
    cut.write_bytes(cut.read_bytes()[:700])
    with pytest.raises(DataError, match=r"cut\.tar"):
        _ = open_tar(cut)[0]


def test_a_tar_that_was_cut_between_two_pictures_is_refused(tmp_path):
    whole = tar(tmp_path / "a.tar", files={"a/1.png": png(1), "b/2.png": png(2)}, empty=()).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as t:
        second = t.getmember("b/2.png").offset
    for damaged in (whole[:second], whole[: second + 100], whole[:second] + b"x" * 512 + whole[second + 512 :]):
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(DataError, match=rf"a\.tar: .*\(damaged or cut short after {second} bytes; copy or pack"):
            open_tar(tmp_path / "a.tar")


def test_links_in_a_tar_are_refused_by_name(tmp_path):
    for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        tar(tmp_path / "a.tar", files={"a/1.png": png(1)}, empty=())
        with tarfile.open(tmp_path / "a.tar", "a") as t:
            info = tarfile.TarInfo("b/2.png")
            info.type, info.linkname = kind, "a/1.png"
            t.addfile(info)
        with pytest.raises(DataError, match=r"a\.tar: b/2\.png is a link; pack the pictures themselves"):
            open_tar(tmp_path / "a.tar")


def test_only_files_are_pictures(tmp_path):
    root = tree(tmp_path / "t", {"a/1.png": png(1), "a/folder.png/2.png": png(2)}, empty=())
    os.mkfifo(root / "a" / "pipe.png")  # reading it would wait for ever
    (root / "a" / "gone.png").symlink_to("nowhere.png")
    files = open_folder(root)
    assert files.names == ["a/1.png", "a/folder.png/2.png", "a/gone.png"]
    with pytest.raises(DataError, match=r"a/gone\.png: No such file or directory"):
        files[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_all_damaged_pictures_are_found(tmp_path, workers):
    content = {"a/1.png": png(1), "a/2.png": png(2)[:40], "b/3.png": b"", "b/4.png": png(4)}
    state = torch.random.get_rng_state()
    faults = find_damaged(open_folder(tree(tmp_path / "t", content, empty=())), workers)
    assert list(faults) == [1, 2]
    assert (
        faults[2] == f"{tmp_path}/t/b/3.png: cannot be read as an image (the file is empty); replace or remove the file"
    )
    assert torch.equal(torch.random.get_rng_state(), state)  # the draws of a run do not depend on it


def test_a_split_is_a_folder_or_a_tar(tmp_path):
    assert find_split(tmp_path, ("val", "valid")) is None
    (tmp_path / "valid.tar").touch()
    assert find_split(tmp_path, ("val", "valid")) == tmp_path / "valid.tar"
    (tmp_path / "val").mkdir()
    assert find_split(tmp_path, ("val", "valid")) == tmp_path / "val"
