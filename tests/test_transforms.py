"""Augmentation: what each recipe does, and that its draws differ where they should and repeat where they should."""

import tracemalloc

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from vitrel.training.settings import DataConfig
from vitrel.training.transforms import InputConfig, eval_transform, mix_transform, train_transform

INPUTS = InputConfig((32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NOISE = np.random.default_rng(0).integers(1, 256, (32, 32, 3), dtype=np.uint8)


class Same(Dataset):
    """The same picture again and again."""

    def __init__(self, transform, size=8):
        self.transform, self.size = transform, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.transform(NOISE)


def epochs(n, workers=0, persistent=False, seed=0, **settings):
    settings = {"augment": "crop_flip", "cutout": 0.5, **settings}
    torch.manual_seed(seed)
    loader = DataLoader(
        Same(train_transform(INPUTS, DataConfig(**settings))),
        batch_size=2,
        num_workers=workers,
        persistent_workers=persistent,
    )
    return [torch.cat(list(loader)) for _ in range(n)]


def distinct(pictures):
    return len({p.numpy().tobytes() for p in pictures})


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_draws_differ_between_epochs_workers_and_pictures_and_repeat_with_the_seed(workers, persistent):
    first = torch.cat(epochs(3, workers, persistent))
    assert distinct(first) >= 23  # 24 draws of 81 crops, 2 flips and a hole
    assert torch.equal(first, torch.cat(epochs(3, workers, persistent)))
    assert not torch.equal(first, torch.cat(epochs(3, workers, persistent, seed=1)))


def test_the_transforms_of_a_picture_are_independent():
    ramp = np.arange(1, 1025, dtype=np.int64).reshape(32, 32)
    coded = np.stack([ramp // 256 + 1, ramp % 256, np.full_like(ramp, 7)], 2).astype(np.uint8)
    transform = train_transform(INPUTS, DataConfig(augment="crop_flip", cutout=0.5, crop_padding=4))
    torch.manual_seed(0)
    rows, cols, flips, holes = [], [], [], []
    for _ in range(600):
        out = transform(coded).numpy().astype(int)
        value = (out[0] - 1) * 256 + out[1]
        y, x = np.argwhere(out[2] == 7)[0]
        inside = (out[2] == 7).sum(axis=1).argmax()
        line = value[inside][out[2][inside] == 7]
        flips.append(bool(line[1] < line[0]))
        source_row, source_col = divmod(value[y, x] - 1, 32)
        rows.append(source_row - y)
        cols.append(source_col - x if not flips[-1] else source_col + x - 31)
        border = 32 * 32 - (32 - abs(rows[-1])) * (32 - abs(cols[-1]))
        holes.append((out[2] == 0).sum() > border)
    draws = np.array([rows, cols, flips, holes], dtype=float)
    assert set(rows) == set(range(-4, 5))
    assert set(flips) == {False, True}
    correlation = np.corrcoef(draws)
    assert np.abs(correlation[~np.eye(4, dtype=bool)]).max() < 0.17


def test_eval_is_the_centre_of_the_covering_picture():
    inputs = InputConfig((4, 4), (0.5,) * 3, (0.5,) * 3)
    wide = np.zeros((8, 16, 3), np.uint8)
    wide[:, 4:12] = 200  # the middle half in width
    out = eval_transform(inputs)(wide)
    assert out.shape == (3, 4, 4)
    assert out.dtype == torch.uint8
    assert (out == 200).all()
    assert torch.equal(eval_transform(INPUTS)(NOISE), torch.from_numpy(NOISE).permute(2, 0, 1))


@pytest.mark.parametrize("augment", ["none", "shift", "crop_flip", "resized_crop"])
@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (7, 5), (300, 200), (48, 24)])
def test_every_picture_comes_out_at_the_input_size(augment, shape):
    inputs = InputConfig((48, 24), (0.5,) * 3, (0.5,) * 3, crop_pct=0.9)
    picture = np.full((*shape, 3), 9, np.uint8)
    data = DataConfig(augment=augment, color_jitter=0.3, cutout=1.0)
    for out in (train_transform(inputs, data)(picture), eval_transform(inputs)(picture)):
        assert out.shape == (3, 48, 24)
        assert out.dtype == torch.uint8
        assert out.is_contiguous()


def test_shift_never_mirrors():
    left = np.zeros((32, 32, 3), np.uint8)
    left[8:24, 4:10] = 255
    transform = train_transform(INPUTS, DataConfig(augment="shift", crop_padding=2))
    for _ in range(50):
        out = transform(left)[0].float()
        assert out[:, :16].sum() > 10 * out[:, 16:].sum()


def test_statistics_come_from_the_settings_then_the_data_then_the_model():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), patch_size=8)
    assert InputConfig.of(model, DataConfig(name="folder")).mean == (0.5, 0.5, 0.5)
    assert InputConfig.of(model, DataConfig(name="cifar100")).mean == (0.5071, 0.4865, 0.4409)
    assert InputConfig.of(model, DataConfig(mean=[0, 0, 0], std=[1, 1, 1])).std == (1, 1, 1)
    assert InputConfig.of(model, DataConfig(name="folder")).size == (32, 48)
    assert InputConfig.of(model, DataConfig(name="folder")).crop_pct == 0.9


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("settings", [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_mixed_labels_are_the_parts_of_the_mixed_pictures(size, settings):
    torch.manual_seed(0)
    x, y = torch.eye(4)[:size].repeat(1, 3).reshape(size, 3, 2, 2), torch.arange(size)
    mixed, labels = mix_transform(DataConfig(**settings), num_classes=4)(x, y)
    assert labels.shape == (size, 4)
    torch.testing.assert_close(labels.sum(1), torch.ones(size))
    if "cutmix" not in settings:  # every picture is its class's own unit picture
        torch.testing.assert_close(mixed[:, 0].reshape(size, 4), labels)


def test_no_mix_without_an_alpha():
    assert mix_transform(DataConfig(), 3) is None


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 1), (6, 4, 2), (6, 4, 4), (0, 4, 3)])
@pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
def test_only_three_channels_are_taken(shape, augment):
    """albumentations would normalise or jitter other numbers of channels in a way of its own."""
    for transform in (eval_transform(INPUTS), train_transform(INPUTS, DataConfig(augment=augment))):
        with pytest.raises(ValueError, match=r"picture: expected \(H, W, 3\) uint8, got \(\d, 4.* uint8"):
            transform(np.zeros(shape, np.uint8))
        with pytest.raises(ValueError, match=r"picture: expected \(H, W, 3\) uint8, got .* float32"):
            transform(np.zeros((6, 4, 3), np.float32))


def test_a_long_picture_is_cut_before_it_is_enlarged():
    """1 x 200,000 pixels at 32 px would be 32 x 6,400,000; what remains is the same middle."""
    row = np.random.default_rng(0).integers(0, 256, (1, 2000, 3), dtype=np.uint8)
    out = eval_transform(INPUTS)(row)
    whole = cv2.resize(row, (64_000, 32), interpolation=cv2.INTER_CUBIC)[:, 31_984:32_016]
    assert torch.equal(out, torch.from_numpy(whole.transpose(2, 0, 1)))
    long = np.pad(row, ((0, 0), (99_000, 99_000), (0, 0)))
    tracemalloc.start()
    assert torch.equal(eval_transform(INPUTS)(long), out)
    assert torch.equal(eval_transform(INPUTS)(long.transpose(1, 0, 2)), out.transpose(1, 2))
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
