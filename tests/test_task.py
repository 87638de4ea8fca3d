"""The task: groups, schedule, loss and metrics against values worked out by hand."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F

from vitrel.training.model import build_model
from vitrel.training.settings import ModelConfig, OptimConfig
from vitrel.training.task import ClassificationTask, WarmupCosine, parameter_groups

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


def test_other_models_have_two_groups():
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, class_token=True)
    named = names_by_group(net, parameter_groups(net, OptimConfig()))
    assert set(named) == {"decay", "no_decay"}
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= named["no_decay"]


def test_compiling_changes_no_name_and_no_group(tiny):
    plain = ClassificationTask(tiny("--model.rel_pos", "txl").as_dict(), 3)
    compiled = ClassificationTask(tiny("--model.rel_pos", "txl", "--model.compile", "true").as_dict(), 3)
    assert list(plain.state_dict()) == list(compiled.state_dict())
    groups = [names_by_group(t.net, parameter_groups(t.net, t.config.optim)) for t in (plain, compiled)]
    assert groups[0] == groups[1]


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
