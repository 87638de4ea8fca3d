"""Where data sets lie, their classes and their splits."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from vitrel.training import sources
from vitrel.training.images import DataError
from vitrel.training.settings import DataConfig
from vitrel.training.sources import Cifar, find_source, hold_out


def write_tree(root, counts, value=0):
    for name, count in counts.items():
        for i in range(count):
            path = root / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((32, 32, 3), value + i, np.uint8)).save(path)


def folder(root, **settings):
    return find_source(DataConfig(name="folder", root=str(root), **settings))


def test_digits_are_split_by_class_without_overlap():
    source = find_source(DataConfig(name="digits"))
    splits = {name: source.split(name) for name in ("train", "val", "test")}
    assert {name: len(s) for name, s in splits.items()} == {"train": 1293, "val": 144, "test": 360}
    together = np.concatenate([s.indices for s in splits.values()])
    assert sorted(together) == list(range(1797))
    for split in splits.values():
        shares = np.bincount(split.labels[split.indices]) / len(split)
        assert np.abs(shares - 0.1).max() < 0.01
    first = splits["train"].pictures[0]
    assert first.shape == (8, 8, 3)
    assert first.dtype == np.uint8
    assert first.max() == 239  # 15 of 16 grey levels
    other = find_source(DataConfig(name="digits", split_seed=1))
    assert (other.split("test").indices == splits["test"].indices).all()
    assert not (other.split("val").indices == splits["val"].indices).all()


def test_a_held_out_part_is_stratified_and_seeded():
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    kept, out = hold_out(labels, 0.2, seed=3)
    assert np.bincount(labels[out]).tolist() == [12, 6, 2]
    assert sorted([*kept, *out]) == list(range(100))
    assert (hold_out(labels, 20, seed=3)[1] == out).all()
    with pytest.raises(DataError, match=r"data\.val_size: 2 of 100 training images cannot be held out"):
        hold_out(labels, 2, seed=3)


def test_val_is_taken_from_train_only_where_there_is_none(tmp_path, caplog):
    write_tree(tmp_path / "train", {"a": 10, "b": 10})
    write_tree(tmp_path / "test", {"a": 3, "b": 2})
    source = folder(tmp_path, val_size=0.2)
    assert [len(source.split(n)) for n in ("train", "val", "test")] == [16, 4, 5]
    write_tree(tmp_path / "val", {"a": 1})
    source = folder(tmp_path, val_size=0.2)
    assert [len(source.split(n)) for n in ("train", "val", "test")] == [20, 1, 5]
    assert not caplog.records


def test_val_serves_as_test_where_there_is_none_and_says_so(tmp_path, caplog):
    write_tree(tmp_path / "train", {"a": 3, "b": 3})
    write_tree(tmp_path / "val", {"b": 2})
    source = folder(tmp_path)
    assert source.tested_on == "val"
    assert source.split("test").labels.tolist() == [1, 1]
    assert "the test figures are those of val" in caplog.text
    write_tree(tmp_path / "test", {"a": 1})
    assert folder(tmp_path).tested_on == find_source(DataConfig()).tested_on == "test"


def test_splits_are_checked_without_reading_a_picture(tmp_path):
    write_tree(tmp_path / "train", {"a": 3, "b": 3})
    write_tree(tmp_path / "test", {"a": 1})
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    folder(tmp_path, val_size=2).check()
    with pytest.raises(DataError, match=r"data\.val_size: 5\.0 of 6 training images cannot be held out"):
        folder(tmp_path, val_size=5.0).check()
    write_tree(tmp_path / "test", {"c": 1})
    with pytest.raises(DataError, match="test has the class folder 'c', which the training images lack"):
        folder(tmp_path, val_size=2).check()
    for name in ("digits", "fake"):
        find_source(DataConfig(name=name)).check()
    with pytest.raises(DataError, match=r"data\.val_size: 1437"):
        find_source(DataConfig(val_size=1437)).check()


def test_damaged_pictures_are_skipped_on_request_named_and_counted(shared, caplog):
    root = shared / "cases" / "folders" / "one_truncated"
    source = folder(root, skip_damaged=True)
    broken = f"{root}/train/bear/06_broken.jpg"
    assert source.skipped == []
    train = source.split("train")
    assert len(train) == 12
    assert all(train.pictures[i].shape == (32, 32, 3) for i in train.indices)
    assert source.skipped == [broken]
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith(f"skipped {broken}: cannot be read as an image (image file is truncated")
    source.check()
    source.split("train")
    assert source.skipped == [broken]  # looked for once
    assert len(folder(root).split("train")) == 13


def test_many_skipped_pictures_are_named_in_part_and_a_split_of_none_is_refused(tmp_path, caplog):
    write_tree(tmp_path / "train", {"a": 30, "b": 4})
    write_tree(tmp_path / "val", {"a": 2})
    for i in range(25):
        (tmp_path / "train" / "a" / f"{i}.png").write_bytes(b"")
    source = folder(tmp_path, skip_damaged=True)
    assert len(source.split("train")) == 9
    assert len(source.skipped) == 25
    assert len([r for r in caplog.records if "the file is empty" in r.getMessage()]) == 20
    assert f"skipped 5 more pictures of {tmp_path}/train" in caplog.text
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="val: none of the pictures of the val split can be read"):
        folder(tmp_path, skip_damaged=True).check()


def test_what_is_held_out_does_not_depend_on_damaged_pictures(tmp_path):
    write_tree(tmp_path / "train", {"a": 10, "b": 10})
    write_tree(tmp_path / "test", {"a": 1})
    before = folder(tmp_path, val_size=6).split("val")
    (tmp_path / "train" / before.pictures.names[before.indices[0]]).write_bytes(b"")
    after = folder(tmp_path, val_size=6, skip_damaged=True).split("val")
    assert after.indices.tolist() == before.indices.tolist()[1:]


def test_decoded_pictures_are_skipped_too(tmp_path):
    for split in ("train", "test"):
        write_tree(tmp_path / split, {f"c{i}": 2 for i in range(10)})
    (tmp_path / "train" / "c0" / "0.png").write_bytes(b"")
    source = find_source(DataConfig(name="cifar10", root=str(tmp_path), val_size=10, skip_damaged=True))
    splits = [source.split(name) for name in ("train", "val")]
    assert sum(map(len, splits)) == 19
    assert all(s.pictures[i].max() == i % 2 for s in splits for i in s.indices)
    with pytest.raises(DataError, match=r"c0/0\.png: cannot be read as an image \(the file is empty\)"):
        find_source(DataConfig(name="cifar10", root=str(tmp_path), val_size=10)).split("train")


def test_case_folders(shared, caplog):
    cases = shared / "cases" / "folders"
    stray = folder(cases / "stray_files")
    assert stray.classes == ["apple", "bear"]
    assert (len(stray.split("train")), len(stray.split("val"))) == (12, 4)
    missing = folder(cases / "val_missing_class").split("val")
    assert sorted(set(missing.labels.tolist())) == [0, 2, 3]
    for i in missing.indices:  # duck, the class 3, is yellow, and crab, the class 2, orange
        red, green, _ = missing.pictures[i].mean(axis=(0, 1))
        assert missing.labels[i] == (3 if green > 200 else 2 if green > 100 and red > 200 else 0)
    assert not caplog.records
    empty = folder(cases / "empty_class")
    assert empty.classes == ["apple", "bear", "crab", "duck"]
    assert "no pictures in crab; the class is kept" in caplog.text
    broken = folder(cases / "one_truncated").split("train")
    with pytest.raises(DataError, match=r"bear/06_broken\.jpg"):
        _ = [broken.pictures[i] for i in broken.indices]


def test_an_interrupted_archive_is_refused_with_its_path(shared):
    root = shared / "cases" / "cifar" / "interrupted_archive"
    for download in (False, True):
        with pytest.raises(DataError, match=r"cifar-100-python\.tar\.gz is damaged .* delete it and copy"):
            find_source(DataConfig(name="cifar100", root=str(root), download=download))


def test_an_interrupted_unpacking_is_refused_with_its_path(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").write_bytes(b"\x80")
    with pytest.raises(DataError, match=r"cifar-100-python is incomplete or damaged .* delete it and unpack it again"):
        find_source(DataConfig(name="cifar100", root=str(tmp_path))).check()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "folder"])
def test_missing_data_are_one_line_with_the_way_out(tmp_path, name):
    with pytest.raises(DataError) as e:
        find_source(DataConfig(name=name, root=str(tmp_path)))
    message = str(e.value)
    assert str(tmp_path) in message
    assert "--data.root DIR" in message
    assert "\n" not in message
    if name != "folder":
        assert "--data.download true" in message
        assert "--data.name fake" in message


def cifar_tar(path, classes):
    with tarfile.open(path, "w") as tar:
        for label, name in enumerate(classes):
            for i in range(2):
                buffer = io.BytesIO()
                Image.fromarray(np.full((32, 32, 3), 10 * label + i, np.uint8)).save(buffer, "PNG")
                info = tarfile.TarInfo(f"{name}/{i}.png")
                info.size = buffer.tell()
                buffer.seek(0)
                tar.addfile(info, buffer)


@pytest.mark.parametrize("below", ["", "cifar10"])
def test_cifar_from_tars_of_class_folders_is_decoded_once(tmp_path, monkeypatch, below):
    base = tmp_path / below
    base.mkdir(exist_ok=True)
    classes = [f"c{i}" for i in range(10)]
    for split in ("train", "test"):
        cifar_tar(base / f"{split}.tar", classes)
    calls = []
    real = sources._decoded
    monkeypatch.setattr(sources, "_decoded", lambda files, *rest: calls.append(files.root.name) or real(files, *rest))
    source = find_source(DataConfig(name="cifar10", root=str(tmp_path), val_size=10))
    splits = [source.split(name) for name in ("train", "val", "test")]
    assert calls == ["train.tar", "test.tar"]
    assert source.classes == classes
    assert [len(s) for s in splits] == [10, 10, 20]
    test = splits[2]
    assert isinstance(test.pictures, np.ndarray)
    assert [int(test.pictures[i][0, 0, 0]) // 10 for i in test.indices] == test.labels.tolist()
    (tmp_path / "cifar100").mkdir()
    for split in ("train", "test"):
        cifar_tar(tmp_path / "cifar100" / f"{split}.tar", classes)
    with pytest.raises(DataError, match="holds 10 class folders; cifar100 has 100"):
        find_source(DataConfig(name="cifar100", root=str(tmp_path)))


def test_cifar_is_downloaded_only_when_asked_and_not_there(tmp_path, monkeypatch):
    calls = []

    class Fake:
        filename, base_folder, tgz_md5 = "a.tar.gz", "cifar-100-python", "0"

        def __init__(self, root, download=False, train=True):
            calls.append((root, download))

    monkeypatch.setitem(sources._CIFAR, "cifar100", Fake)
    source = find_source(DataConfig(name="cifar100", root=str(tmp_path), download=True))
    assert isinstance(source, Cifar)
    assert calls == []  # looking for it downloads nothing
    source.prepare()
    assert calls == [(str(tmp_path), True)]
    (tmp_path / "cifar-100-python").mkdir()
    find_source(DataConfig(name="cifar100", root=str(tmp_path), download=True)).prepare()
    assert len(calls) == 1


def test_the_real_cifar100(shared):
    root = shared / "data" / "cifar100"
    if not (root / "test.tar").is_file():
        pytest.skip(f"no {root}/test.tar")
    source = find_source(DataConfig(name="cifar100", root=str(root)))
    assert len(source.classes) == 100
    assert source.classes == sorted(source.classes)


def test_a_class_without_a_picture_to_train_on_is_said(tmp_path, caplog):
    for split in ("train", "test"):
        for label, count in (("ant", 6), ("bee", 6), ("cat", 0 if split == "train" else 2)):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / split / label / f"{i}.png")
    find_source(DataConfig(name="folder", root=str(tmp_path), val_size=0.34)).check()
    assert "no picture to train on of 1 of 3 classes: cat" in caplog.text
