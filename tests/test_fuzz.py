"""Spoiled configs, options and pictures: each is taken, or refused in one line that names it.

``VITREL_FUZZ=2000 python -m pytest tests/test_fuzz.py`` makes 2000 of every kind; few are made by default.
"""

import io
import json
import os
import random
import resource
import tarfile
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrel.relpos import PRESETS
from vitrel.training.checks import check
from vitrel.training.config import _names, _timm_arguments, _trainer_arguments, dump, from_dict, parse
from vitrel.training.fileio import ConfigError
from vitrel.training.files import find_damaged, open_folder, open_tar
from vitrel.training.images import DataError
from vitrel.training.model import save_model_folder
from vitrel.training.settings import DataConfig, TrainConfig
from vitrel.training.transforms import InputConfig, eval_transform, train_transform

COUNT = int(os.environ.get("VITREL_FUZZ", "20"))
CONFIGS = Path(__file__).parents[1] / "configs"
SLOWLY = settings(
    max_examples=COUNT,
    deadline=None,
    derandomize="VITREL_FUZZ" not in os.environ,  # the same few each time, and others on request
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
NAMES = [name for name, hint in _names(TrainConfig) if name not in ("model", "data", "optim", "logger", "trainer")]
NAMES += [f"trainer.{name}" for name in sorted(_trainer_arguments())]
NAMES += [f"model.{name}" for name in sorted(_timm_arguments())]

NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([0.0, 0.1, 0.5, 1.0, 1e-3, -1.0, 1e300, -(10**12), 10**12, 10**30]),
    st.floats(), st.integers(),
)  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(
        ["", " ", "null", "true", "on", "off", "auto", "cpu", "ddp", "16", "1e-3", "last", ".", "..", "a/b", "\x00",
         "x" * 300, "bf16-mixed", "32-true", "folder", "fake", "cifar100", "resized_crop", "[1, 2]", "{a: 1}",
         "\ud800", "a\nb", *PRESETS, "txl+value", "resnet18", "vit_tiny_patch16_224"]
    ),
    st.text(max_size=12),
)  # fmt: skip
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=4),
    st.dictionaries(
        st.one_of(WORDS, st.sampled_from(["preset", "terms", "table", "scale", "depth"])), PLAIN, max_size=3
    ),
)


HINTS = dict(_names(TrainConfig))
LIKELY = {int: st.integers(0, 40), float: st.floats(0, 1), bool: st.booleans(), str: WORDS}
LIKELY[Any] = st.one_of(VALUES, *LIKELY.values())


def likely(name):
    """Values of the type that a setting takes; of any type where that is not known here."""
    hint = HINTS.get(name, Any)
    hints = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return st.one_of(*(_of_type(h) for h in hints))


def _of_type(hint):
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return st.lists(_of_type(typing.get_args(hint)[0]), max_size=4)
    return LIKELY.get(hint, VALUES)


def pairs():
    """A dotted name and a value, of its type or of any; now and then a name that is none."""
    likely_pair = st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), likely(name)))
    return st.one_of(
        likely_pair, likely_pair, likely_pair, st.tuples(st.sampled_from(NAMES), VALUES),
        st.tuples(st.sampled_from(NAMES).map(lambda name: name[:-1]), VALUES),
    )  # fmt: skip


def taken(options, tmp_path):
    """Whether the settings pass every check before data are read; what is refused is refused in one line."""
    refusal = None
    try:
        config = parse(options, [CONFIGS])
        check(config)
    except ConfigError as e:
        refusal = str(e)
    if refusal is not None:
        assert refusal.isprintable()
        assert len(refusal) > 10
        return False
    text = dump(config)
    assert dump(from_dict(config.as_dict())) == text
    (tmp_path / "again.yaml").write_text(text, encoding="utf-8")
    assert dump(parse(["--config", str(tmp_path / "again.yaml")])) == text
    return True


def tree(pairs):
    """Dotted names and values as nested mappings; a name below a value takes its place."""
    root = {}
    for name, value in pairs:
        here = root
        *sections, leaf = name.split(".")
        for section in sections:
            here = here.setdefault(section, {}) if isinstance(here.get(section, {}), dict) else {}
        here[leaf] = value
    return root


@given(st.lists(pairs(), min_size=1, max_size=4))
@SLOWLY
def test_any_value_of_any_setting_is_taken_or_refused_in_one_line(tmp_path, given_pairs):
    (tmp_path / "c.yaml").write_text(json.dumps(tree(given_pairs)))
    event("taken" if taken(["--config", str(tmp_path / "c.yaml")], tmp_path) else "refused")


@given(st.lists(st.one_of(pairs(), pairs(), pairs(), WORDS), min_size=1, max_size=4))
@SLOWLY
def test_any_options_are_taken_or_refused_in_one_line(tmp_path, words):
    options = []
    for word in words:
        if isinstance(word, str):
            options.append(word)
        else:
            value = word[1] if isinstance(word[1], str) else json.dumps(word[1])
            options += [f"--{word[0]}={value}"] if len(value) % 2 else [f"--{word[0]}", value]
    if not {"-h", "--help"} & set(options):
        event("taken" if taken(options, tmp_path) else "refused")


def spoil(content, rng):
    """A copy with a few bytes flipped, cut, doubled or moved."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 8, 64])
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            data[at:at] = rng.choice([b"\t", b":", b"-", b"'", b"{", b"[", b"&a ", b"!!int ", b"\n", b"#", b"0", b"e9"])
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_a_config_with_spoiled_bytes_is_taken_or_refused_in_one_line(tmp_path, name):
    settings_only = b"".join(line for line in (CONFIGS / name).read_bytes().splitlines(True) if line[:1] != b"#")
    outcomes = []
    for i in range(-(-COUNT // 4)):
        (tmp_path / "c.yaml").write_bytes(spoil(settings_only, random.Random(i)))
        outcomes.append(taken(["--config", str(tmp_path / "c.yaml")], tmp_path))
    print(f"{name}: {sum(outcomes)} of {len(outcomes)} taken")
    assert 0 < sum(outcomes) < len(outcomes)


def pictures():
    """Small files of many kinds."""
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (24, 40, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[274] = 6
    kinds = [
        ("png", rgb, {}), ("png", rgb.convert("LA"), {}),
        ("png", rgb.convert("P"), {"transparency": bytes(range(256))}),
        ("png", Image.fromarray(rng.integers(0, 65536, (24, 40), dtype=np.uint16)), {}), ("png", rgb.convert("1"), {}),
        ("jpeg", rgb, {}), ("jpeg", rgb, {"progressive": True, "exif": exif}), ("jpeg", rgb.convert("CMYK"), {}),
        ("gif", rgb, {"save_all": True, "append_images": [rgb]}), ("webp", rgb, {}),
        ("tiff", rgb, {}), ("bmp", rgb, {}),
    ]  # fmt: skip
    for kind, image, options in kinds:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        yield kind, buffer.getvalue()


def test_a_picture_with_spoiled_bytes_is_read_or_named_by_a_worker(tmp_path):
    kinds = list(pictures())
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    for i in range(COUNT):
        # two of three are PNG or JPEG
        kind, content = kinds[i % 8] if i % 3 else kinds[8 + i // 3 % 4]
        (folder / f"{i:06d}.{kind}").write_bytes(spoil(content, random.Random(i)))
    files = open_folder(tmp_path / "train")
    assert len(files) == COUNT
    faults = find_damaged(files, workers=1)
    assert 0 < len(faults) < COUNT
    for i, fault in faults.items():
        assert fault.startswith(f"{files.root}/{files.names[i]}: ")
        assert fault.isprintable()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{len(faults)} of {COUNT} refused; the largest process had {peak:.2f} GiB")
    assert peak < 3
    inputs = InputConfig((8, 12), (0.5,) * 3, (0.5,) * 3, crop_pct=0.9)
    made = [eval_transform(inputs), train_transform(inputs, DataConfig(augment="crop_flip"))]
    made.append(train_transform(inputs, DataConfig(augment="resized_crop")))
    for i in sorted(set(range(COUNT)) - set(faults)):
        try:
            picture = files[i]
        except DataError:
            pytest.fail(f"{files.names[i]} was read once and not again")
        assert picture.dtype == np.uint8
        assert picture.ndim == 3
        assert picture.shape[2] == 3
        assert all(transform(picture).shape == (3, 8, 12) for transform in made)


def test_a_tar_with_spoiled_bytes_is_read_or_named(tmp_path):
    with tarfile.open(tmp_path / "whole.tar", "w") as tar:
        for i, (kind, content) in enumerate(pictures()):
            info = tarfile.TarInfo(f"{'ab'[i % 2]}/{i}.{kind}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    whole = (tmp_path / "whole.tar").read_bytes()
    headers = [i for i in range(0, len(whole), 512) if whole[i + 257 : i + 262] == b"ustar"]
    outcomes = set()
    for i in range(COUNT):
        rng = random.Random(i)
        at = rng.choice(headers)
        content = whole[:at] + spoil(whole[at : at + 512], rng)[: rng.choice([512, 600])] + whole[at + 512 :]
        if i % 2:  # a wrong checksum hides what else is wrong
            header = content[at : at + 512]
            total = sum(header[:148]) + 8 * 32 + sum(header[156:])
            content = content[: at + 148] + b"%06o\0 " % total + content[at + 156 :]
        (tmp_path / "a.tar").write_bytes(content)
        try:
            files = open_tar(tmp_path / "a.tar")
            _ = [files[k] for k in range(len(files))]
        except DataError as e:
            outcomes.add(str(e)[: len(str(tmp_path)) + 6])
        else:
            outcomes.add("read")
    assert outcomes == {"read", f"{tmp_path}/a.tar"}


def test_a_stored_configuration_with_spoiled_bytes_is_taken_or_refused_in_one_line(tmp_path):
    model = timm.create_model("vitrel_micro_patch4_32", depth=1, embed_dim=16, num_heads=2, num_classes=3)
    data = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "crop_pct": 1.0}
    save_model_folder(model, tmp_path / "model", ["a", "b", "c"], data)
    stored = tmp_path / "model" / "config.json"
    whole = json.loads(stored.read_text())
    options = ["--model.checkpoint", str(tmp_path / "model")]
    outcomes = [taken(options, tmp_path)]
    for i in range(-(-COUNT // 2)):
        rng = random.Random(i)
        if i % 2:
            stored.write_bytes(spoil(json.dumps(whole).encode(), rng))
        else:  # whole JSON of another content
            spoiled = json.loads(json.dumps(whole))
            section = rng.choice(
                [spoiled, spoiled["model_args"], spoiled["pretrained_cfg"], spoiled["model_args"]["rel_pos"]]
            )
            section[rng.choice(list(section))] = rng.choice(
                [None, -1, 0, 10**12, 0.5, "x", "", [], [1, 2], {}, {"a": 1}, True]
            )
            stored.write_text(json.dumps(spoiled))
        outcomes.append(taken(options, tmp_path))
    assert outcomes[0]
    assert not all(outcomes)
