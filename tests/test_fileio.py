"""Strict YAML and whole files."""

import os

import pytest

from vitrel.training.fileio import ConfigError, dump_yaml, read_yaml, whole_folder, write_whole


def read(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(path)


def test_scalars_are_those_of_yaml_1_2(tmp_path):
    text = "a: 1e-3\nb: 1E-3\nc: 5e4\nd: 1.0e5\ne: .5\nf: -3\ng: off\nh: on\n"
    text += "i: true\nj: 010\nk: 1:30\nl: 2026-01-01\nm: ~"
    expected = {"a": 0.001, "b": 0.001, "c": 50000.0, "d": 100000.0, "e": 0.5, "f": -3, "g": "off", "h": "on"}
    expected |= {"i": True, "j": 10, "k": "1:30", "l": "2026-01-01", "m": None}
    assert read(tmp_path, text) == expected


def test_a_byte_order_mark_changes_nothing(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbfseed: 3\n") == {"seed": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: key 'a' is repeated (first in line 1); keep one"),
        ("a:\n  b: 1\n  b: 2\n", "line 3: key 'b' is repeated (first in line 2); keep one"),
        ("a:\n\tb: 1\n", "line 2: a tab indents this line; use spaces"),
        ("a: [1\n", "line 2: expected ',' or ']', but got '<stream end>'"),
        ("1: 2\n", "line 1: the key 1 is not text"),
        ("- 1\n", "expected sections such as 'model:' and 'data:', got list"),
        (b"a: \xff\n", "is not UTF-8 text (byte 3); save it as UTF-8"),
        ("a: !!python/object:os.system x\n", "line 1: could not determine a constructor"),
        ("[" * 1000, "is nested too deeply"),
        ("a: &x [1]\nb: *x\n", "line 1: &x: anchors and aliases are not read; write the value out, or quote the text"),
        ("a: *x\n", "line 1: *x: anchors and aliases are not read"),
        ("a: &x [*x]\n", "line 1: &x: anchors and aliases are not read"),
        ("a: !!bool maybe\n", "'maybe'"),
        ("a: !!int x\n", "invalid literal"),
        ("a: !!timestamp 2026-01-01\n", "line 1: could not determine a constructor"),
        ("a: !!binary aGk=\n", "line 1: could not determine a constructor"),
        ("a: !!set {x}\n", "line 1: could not determine a constructor"),
        ("a: \x07\n", "special characters are not allowed"),
        ("a: 1\n---\nb: 2\n", "line 2: "),
        ("a: " + "9" * 5000, "Exceeds the limit"),
    ],
)
def test_a_fault_is_one_line_with_file_and_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as e:
        read(tmp_path, text)
    assert message in str(e.value)
    assert "c.yaml" in str(e.value)
    assert "\n" not in str(e.value)


def test_what_is_dumped_reads_back_equal(tmp_path):
    tree = {"text": ["1e3", "off", "null", "010", "1:30", "true", "~", "a b", "é", ""], "numbers": [1e-5, 1.0, 3, True]}
    again = read(tmp_path, dump_yaml(tree))
    assert again == tree
    assert [type(value) for value in again["numbers"]] == [float, float, int, bool]


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_whole(path, "one")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, "two")
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_a_folder_is_whole_or_not_there(tmp_path):
    folder = tmp_path / "above" / "model"
    for text in ("one", "two"):
        with whole_folder(folder) as beside:
            (beside / f"{text}.txt").write_text(text)
            assert not (folder / f"{text}.txt").exists()
    assert [p.name for p in folder.iterdir()] == ["two.txt"]  # the older one has been replaced
    (folder / "two.txt").rename(folder / "kept.txt")
    with pytest.raises(FileNotFoundError), whole_folder(folder) as beside:
        (beside / "none.txt").read_text()
    assert [p.name for p in folder.iterdir()] == ["kept.txt"]
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
