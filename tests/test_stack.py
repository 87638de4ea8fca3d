"""Stacked pictures: what a canvas shows, and that its label can only be told across the seam."""

import pytest
import timm
import torch
from PIL import Image

import vitrel
from vitrel.training.config import from_dict
from vitrel.training.data import PictureDataModule
from vitrel.training.export import export
from vitrel.training.fileio import ConfigError
from vitrel.training.run import run
from vitrel.training.saved import evaluate
from vitrel.training.settings import DataConfig
from vitrel.training.stack import MARK, StackedPictures, cell
from vitrel.training.transforms import InputConfig

INPUTS = InputConfig((48, 8), (0.5,) * 3, (0.5,) * 3)


class Numbers(torch.utils.data.Dataset):
    """Picture i is filled with i and has the label i."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index


def read(canvas):
    """Place of the mark, and the number that fills each picture."""
    marked = (canvas == torch.tensor(MARK)[:, None, None]).all(0)
    rows = marked.any(1).nonzero().flatten()
    return int(rows[-1] + 1) // 8, canvas[0, ::8, -1].tolist()


@pytest.mark.parametrize("fixed", [True, False])
def test_the_picture_below_the_mark_gives_the_label(fixed):
    stacked = StackedPictures(Numbers(), 6, fixed)
    places, black = set(), []
    for index in range(1, 50):
        canvas, label = stacked[index]
        assert canvas.shape == (3, 48, 8)
        place, numbers = read(canvas)
        assert label == index == numbers[place]
        black.append(numbers.count(0))
        assert (canvas == torch.tensor(MARK)[:, None, None]).all(0).sum() == 4
        places.add(place)
    assert places == {1, 2, 3, 4, 5}
    assert (max(black) == 5) != fixed


def test_a_canvas_of_evaluation_is_the_same_each_time_and_one_of_training_is_not():
    fixed, free = StackedPictures(Numbers(), 6, True), StackedPictures(Numbers(), 6, False)
    assert torch.equal(fixed[7][0], fixed[7][0])
    assert not torch.equal(free[7][0], free[7][0])
    assert read(fixed[7][0]) != read(fixed[8][0])


def test_the_loaders_stack_pictures_of_their_part_of_the_canvas():
    data = PictureDataModule(DataConfig(name="digits", stack=6, batch_size=4), INPUTS)
    data.setup("fit")
    data.setup("test")
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        pictures, labels = next(iter(loader))
        assert pictures.shape == (4, 3, 48, 8)
        assert labels.shape == (4,)
    assert len(data.test_dataloader().dataset) == 360


def test_a_canvas_that_cannot_be_divided_is_refused():
    with pytest.raises(ConfigError, match="of 3 pixel rows have no room for a mark"):
        cell(INPUTS, 16)
    with pytest.raises(ConfigError, match="5 pictures do not divide the model's 48 pixel rows"):
        cell(INPUTS, 5)


def settings(tmp_path, **model):
    body = {"img_size": [48, 8], "patch_size": 2, "kwargs": {"depth": 2, "embed_dim": 32, "num_heads": 2}}
    return {
        "runs": str(tmp_path),
        "data": {"name": "digits", "stack": 6},
        "model": {"rel_pos": "txl", **body, **model},
        "optim": {"ema_decay": 0.9},
        "trainer": {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1},
        "logger": {"mode": "off", "maps_every": 1},
    }


@pytest.mark.slow
def test_a_run_in_strips_leaves_its_timm_model_and_is_evaluated_again(tmp_path):
    results = run(from_dict(settings(tmp_path, strip_rows=4, memory_rows=2)))
    folder = results["folder"]
    model = timm.create_model(f"local-dir:{folder}/model", pretrained=True)
    assert model.patch_embed.img_size == (48, 8)
    vitrel.StripReader(model, 4, 2)
    assert evaluate(folder)["test/acc"] == results["test/acc"]
    export(folder, tmp_path / "shared")
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "model = vitrel.StripReader(model, 4, 2)\n" in card
    assert "accuracy is that of reading images in strips" in card
    code = card.split("```python\n")[1].split("```")[0].replace("local-dir:shared", f"local-dir:{tmp_path}/shared")
    Image.new("RGB", (8, 48)).save(tmp_path / "image.png")
    exec(code.replace("image.png", str(tmp_path / "image.png")), {})
    with pytest.raises(ConfigError, match="in strips"):
        export(folder, tmp_path / "onnx", onnx=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": {"memory_rows": 2}}, "model.memory_rows: without model.strip_rows"),
        ({"model": {"strip_rows": 2, "memory_rows": -1}}, "model.memory_rows: expected"),
        ({"model": {"strip_rows": 0}}, "model.strip_rows: strip_rows: expected"),
        ({"model": {"strip_rows": 2, "compile": True}}, "model.compile: not with"),
        ({"model": {"strip_rows": 2, "arch": "vit_tiny_patch16_224", "rel_pos": None}}, "no relative position"),
        ({"data": {"mixup": 0.2}}, "data.stack: a mix of two canvases"),
        ({"data": {"stack": 0}}, "data.stack: expected"),
        ({"data": {"stack": 5}}, "data.stack: 5 pictures do not divide"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_one_line(change, match, tmp_path):
    tree = settings(tmp_path)
    for section, values in change.items():
        tree[section] = {**tree[section], **values}
    with pytest.raises(ConfigError, match=match) as raised:
        run(from_dict(tree))
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
