"""The task: groups, schedule, loss and metrics against values worked out by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from vitrel.relpos import PRESETS
from vitrel.training.model import build_model
from vitrel.training.run import StoppedError, run
from vitrel.training.settings import ModelConfig, OptimConfig
from vitrel.training.task import ClassificationTask, WarmupCosine, parameter_groups, table_norms

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2}


def names_by_group(net, groups):
    names = {id(p): n for n, p in net.named_parameters()}
    return {g["name"]: {names[id(p)] for p in g["params"]} for g in groups}


@pytest.mark.parametrize("rel_pos", ["none", "bias", "txl"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_every_parameter_is_in_one_group_and_positions_never_decay(rel_pos, weight_decay):
    net = build_model(ModelConfig(rel_pos=rel_pos, kwargs=dict(SMALL)), 3)
    optim = OptimConfig(lr=2e-3, weight_decay=weight_decay, position_lr_scale=7)
    groups = parameter_groups(net, optim)
    named = names_by_group(net, groups)
    everything = [n for names in named.values() for n in names]
    assert sorted(everything) == sorted(n for n, _ in net.named_parameters())
    assert named.get("position", set()) == net.position_parameters()
    assert net.position_parameters() <= net.no_weight_decay()
    for group in groups:
        decays = group["name"] == "decay"
        assert group["weight_decay"] == (weight_decay if decays else 0)
        if decays:
            assert all(n.endswith(".weight") and p.ndim > 1 for n, p in net.named_parameters() if n in named["decay"])
        if group["name"] == "position":
            assert group["lr"] == pytest.approx(1.4e-2)


def test_factors_by_term():
    net = build_model(ModelConfig(rel_pos={"preset": "txl+bias", "prefix": "learned"}, kwargs=dict(SMALL)), 3)
    net.blocks[0].attn.position_terms.bias.requires_grad_(False)
    optim = OptimConfig(lr=2e-3, position_lr_scale={"bias": 30, "v": 0.5})
    groups = parameter_groups(net, optim)
    lr = {g["name"]: g["lr"] for g in groups if g["name"].startswith("position")}
    assert lr == pytest.approx({
        "position_u": 2e-3, "position_v": 1e-3, "position_prefix": 2e-3, "position_bias": 6e-2, "position_query": 2e-3,
    })  # fmt: skip
    named = names_by_group(net, groups)
    assert set().union(*(named[name] for name in lr)) == {
        n for n in net.position_parameters() if net.get_parameter(n).requires_grad
    }
    assert all(f".{name.removeprefix('position_')}" in n for name in lr for n in named[name])


def test_a_factor_of_the_absolute_embedding():
    net = build_model(ModelConfig(rel_pos="bias", kwargs={**SMALL, "pos_embed": "learn"}), 3)
    groups = parameter_groups(net, OptimConfig(lr=2e-3, position_lr_scale={"pos_embed": 10, "bias": 3}))
    named = names_by_group(net, groups)
    assert named["position_pos_embed"] == {"pos_embed"}
    assert sorted(n for names in named.values() for n in names) == sorted(n for n, _ in net.named_parameters())
    lr = {g["name"]: (g["lr"], g["weight_decay"]) for g in groups if g["name"].startswith("position")}
    assert lr == {"position_bias": pytest.approx((6e-3, 0)), "position_pos_embed": pytest.approx((2e-2, 0))}
    for scale in (10.0, {"bias": 3.0}):
        assert (
            "pos_embed" in names_by_group(net, parameter_groups(net, OptimConfig(position_lr_scale=scale)))["no_decay"]
        )


def test_other_models_have_two_groups():
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, class_token=True)
    named = names_by_group(net, parameter_groups(net, OptimConfig()))
    assert set(named) == {"decay", "no_decay"}
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= named["no_decay"]


def test_compiling_changes_no_name_and_no_group(tiny):
    plain = ClassificationTask(tiny("--model.rel_pos", "txl").as_dict(), 3)
    compiled = ClassificationTask(tiny("--model.rel_pos", "txl", "--model.compile", "true").as_dict(), 3)
    assert list(plain.state_dict()) == list(compiled.state_dict())
    made = [t.configure_optimizers()["optimizer"].param_groups for t in (plain, compiled)]
    groups = [names_by_group(t.net, g) for t, g in zip((plain, compiled), made, strict=True)]
    assert groups[0] == groups[1]
    still = {name for group, names in groups[0].items() if group != "decay" for name in names}
    parameters = dict(plain.net.named_parameters())
    one_dimensional = {n for n, p in parameters.items() if p.ndim < 2}
    assert still == plain.net.no_weight_decay() & set(parameters) | one_dimensional
    assert [g["weight_decay"] for g in made[0] if g["name"] != "decay"] == [0.0, 0.0]


@pytest.mark.parametrize(
    "pooling",
    [
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": True},
        {"global_pool": "token", "class_token": True},
        {"global_pool": "map"},
    ],
)
def test_every_parameter_of_every_preset_reaches_the_loss(pooling):
    for preset in [*PRESETS, "bias+kernel"]:
        net = build_model(ModelConfig(rel_pos=preset, img_size=8, kwargs={**SMALL, **pooling}), 3)
        F.cross_entropy(net(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1])).backward()
        assert [n for n, p in net.named_parameters() if p.grad is None] == [], preset


def test_the_schedule_warms_up_and_ends_at_its_floor():
    factor = WarmupCosine(steps=11, warmup=4, floor=0.2)
    assert [factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(7) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factor(10) == pytest.approx(0.2)
    assert factor(99) == pytest.approx(0.2)
    assert WarmupCosine(steps=3, warmup=0)(0) == 1.0


def silent(task):
    task.log = lambda *args, **kwargs: None
    return task


def smoothed(labels, classes, smoothing):
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def test_labels_are_smoothed_once_with_hard_and_with_mixed_labels(tiny):
    task = silent(ClassificationTask(tiny("--optim.label_smoothing", "0.1").as_dict(), 4))
    x, y = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    by_hand = -(smoothed(y, 4, 0.1) * task(x).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(task.training_step((x, y), 0), by_hand)

    soft = torch.tensor([[0.7, 0.3, 0, 0]] * 6)
    task.mix = lambda pictures, labels: (pictures, soft)
    by_hand = -((soft * 0.9 + 0.1 / 4) * task(x).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(task.training_step((x, y), 0), by_hand)


def test_a_mixed_picture_counts_as_the_class_of_its_larger_part(tiny):
    task = silent(ClassificationTask(tiny().as_dict(), 3))
    task.mix = lambda pictures, labels: (pictures, torch.tensor([[0.6, 0.4, 0], [0, 0.2, 0.8]]))
    task.forward = lambda pictures: torch.tensor([[9.0, 0, 0], [9.0, 0, 0]], requires_grad=True)
    task.training_step((torch.zeros(2, 3, 8, 8), torch.tensor([1, 1])), 0)
    assert float(task.train_acc.compute()) == 0.5


def test_metrics_weigh_every_picture_the_same(tiny):
    task = silent(ClassificationTask(tiny().as_dict(), 7))
    task.log_dict = lambda *args, **kwargs: None
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]])
    task.forward = lambda pictures: logits.expand(len(pictures), 7)
    task.validation_step((torch.zeros(4, 3, 8, 8), torch.tensor([0, 0, 4, 5])), 0)
    task.validation_step((torch.zeros(1, 3, 8, 8), torch.tensor([6])), 1)
    assert {k: round(float(v), 4) for k, v in task.val_acc.compute().items()} == {"val/acc": 0.4, "val/acc5": 0.6}
    by_hand = F.cross_entropy(logits.expand(5, 7), torch.tensor([0, 0, 4, 5, 6]))
    torch.testing.assert_close(task.val_loss.compute(), by_hand)


def test_a_batch_is_learnt_by_heart(tiny):
    torch.manual_seed(0)
    task = silent(ClassificationTask(tiny("--model.rel_pos", "txl", "--optim.lr", "1e-2").as_dict(), 4))
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 4
    optimizer = torch.optim.AdamW(parameter_groups(task.net, task.config.optim), lr=task.config.optim.lr)
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.training_step((x, y), 0)
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    assert (task(x).argmax(1) == y).all()


def test_the_norm_of_a_blocks_tables_is_that_of_all_of_them_as_one_vector():
    net = build_model(ModelConfig(rel_pos="txl", kwargs=dict(SMALL)), 3)
    tables = [p for n, p in net.named_parameters() if n in net.position_parameters() and n.startswith("blocks.1.")]
    assert len(tables) == 4  # table_h, table_w, u, v
    with torch.no_grad():
        for value, table in enumerate(tables, start=1):
            table.fill_(value)
    norms = table_norms(net)
    assert list(norms) == ["blocks.0", "blocks.1"]
    by_hand = math.sqrt(sum(value**2 * table.numel() for value, table in enumerate(tables, start=1)))
    assert float(norms["blocks.1"]) == pytest.approx(by_hand)
    assert table_norms(build_model(ModelConfig(rel_pos="none", kwargs=dict(SMALL)), 3)) == {}


def test_norms_and_the_global_batch_are_logged(tiny):
    config = tiny("--data.name", "fake", "--data.batch_size", "8", "--trainer.accumulate_grad_batches", "2",
                  "--trainer.log_every_n_steps", "1", "--optim.lr", "0.004")  # fmt: skip
    folder = Path(run(config)["folder"])
    header, *rows = (line.split(",") for line in (folder / "metrics.csv").read_text().splitlines())
    columns = {name: [float(row[i]) for row in rows if row[i]] for i, name in enumerate(header)}
    assert len(columns["train/grad_norm"]) == 3  # five batches, two at a time
    assert all(norm > 0 for norm in columns["train/grad_norm"])
    assert len(columns["tables/blocks.0_norm"]) == len(columns["tables/blocks.1_norm"]) == 1
    assert "global_batch: 16\nlr: 0.004\n" in (folder / "hparams.yaml").read_text()


@pytest.fixture
def white(tmp_path):
    """Class folders of dark pictures, ten to train with, of which one is white: b/3.png."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 2)):
        for name in "ab":
            (tmp_path / "pictures" / split / name).mkdir(parents=True)
            for i in range(count):
                picture = rng.integers(0, 200, (8, 8, 3), dtype=np.uint8)
                if (split, name, i) == ("train", "b", 3):
                    picture[:] = 255
                Image.fromarray(picture).save(tmp_path / "pictures" / split / name / f"{i}.png")
    return tmp_path / "pictures"


def spoilt_by_white(monkeypatch):
    """A model that answers a white picture with no number."""
    real = ClassificationTask.forward

    def forward(self, pictures):
        low = pictures.amin(dim=(1, 2, 3))
        return torch.where((low > 0)[:, None], torch.nan, real(self, pictures))

    monkeypatch.setattr(ClassificationTask, "forward", forward)


NUMBERS = ("--data.name", "folder", "--data.batch_size", "2", "--model.rel_pos", "txl", "--trainer.max_epochs", "2",
           "--data.mean", "[0.9, 0.9, 0.9]", "--data.std", "[1, 1, 1]", "--optim.lr", "0.003")  # fmt: skip


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_picture(tiny, white, monkeypatch, workers):
    spoilt_by_white(monkeypatch)
    config = tiny(*NUMBERS, "--data.root", str(white), "--data.num_workers", workers)
    with pytest.raises(StoppedError) as stopped:
        run(config)
    message = str(stopped.value)
    assert stopped.value.status == 1
    assert message.startswith("error: the loss is nan in step ")
    assert " (epoch 1); learning rates 0." in message
    assert "; largest table entry 0." in message
    assert f"; pictures: {white}/train/b/3.png. Lower optim.lr" in message
    assert message.endswith("; nothing is saved, since no epoch was complete")
    assert "\n" not in message


def test_steps_without_a_number_are_left_out_where_asked_and_counted(tiny, white, monkeypatch):
    spoilt_by_white(monkeypatch)
    config = tiny(*NUMBERS, "--data.root", str(white), "--optim.skip_nonfinite", "true")
    results = run(config)
    assert results["skipped_steps"] == 2  # one in each epoch
    assert results["steps"] == 10
    weights = torch.load(Path(results["folder"], "checkpoints", "last.ckpt"))
    assert all(v.isfinite().all() for v in weights["state_dict"].values())
    assert weights["skipped_steps"] == 2
    rows = Path(results["folder"], "metrics.csv").read_text()
    assert "train/skipped_steps" in rows.splitlines()[0]
    more = tiny(*NUMBERS, "--data.root", str(white), "--optim.skip_nonfinite", "true",
                "--trainer.max_epochs", "3", "--ckpt_path", "last")  # fmt: skip
    assert run(more)["skipped_steps"] == 3


def test_an_epoch_without_a_single_good_step_stops(tiny, monkeypatch):
    monkeypatch.setattr(ClassificationTask, "forward", lambda self, x: self.net(x) * torch.nan)
    with pytest.raises(StoppedError, match=r"error: no step of epoch 1 had a finite loss and gradient; largest table"):
        run(tiny("--data.name", "fake", "--optim.skip_nonfinite", "true", "--trainer.num_sanity_val_steps", "0",
                 "--trainer.limit_val_batches", "0"))  # fmt: skip
