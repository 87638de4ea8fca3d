"""A saved model is tested as it was trained: with its normalisation, and in strips where it reads strips."""

import pytest
import timm
import torch

import vitrel
from vitrel.training.config import parse
from vitrel.training.data import PictureDataModule, normalize
from vitrel.training.model import save_model_folder
from vitrel.training.saved import open_model
from vitrel.training.sources import find_source
from vitrel.training.transforms import InputConfig

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


@pytest.mark.parametrize("strips", [None, (1, 1)])
def test_its_own_normalisation_and_its_strips(strips, tmp_path):
    config = parse(["--data.name", "digits", "--data.batch_size", "100"])
    body = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 8, "patch_size": 4, "num_classes": 10}
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl", **body).eval()
    for name in model.position_parameters():
        torch.nn.init.normal_(model.get_parameter(name), std=3)
    net = model if strips is None else vitrel.StripReader(model, *strips)
    known = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "crop_pct": 1.0}
    save_model_folder(net, tmp_path / "model", find_source(config.data).classes, known)

    task, data, trainer = open_model(str(tmp_path / "model"), config)
    assert isinstance(task.net, vitrel.StripReader) == (strips is not None)
    assert (data.inputs.mean, data.inputs.std) == (MEAN, STD)  # those of the digits are others
    own = InputConfig((8, 8), MEAN, STD)
    pictures = PictureDataModule(parse(["--data.name", "digits"]).data, own, find_source(config.data))
    pictures.setup("test")
    raw, labels = next(iter(pictures.test_dataloader()))
    with torch.no_grad():
        expected, got = net.eval()(normalize(raw, own)), task.eval()(normalize(raw, data.inputs))
        assert torch.allclose(got, expected, atol=1e-5)
        if strips is not None:
            assert not torch.allclose(got, model(normalize(raw, own)), atol=1e-3)
    metrics = trainer.test(task, datamodule=data, verbose=False)[0]
    assert 0 <= metrics["test/acc"] <= 1
    assert len(labels) == len(raw)
