"""Names of position parameters, in models and below wrappers; the rest is tested with the models that have it."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

import vitrel
from vitrel.training.settings import OptimConfig
from vitrel.training.task import parameter_groups


def micro(**kwargs):
    return timm.create_model("vitrel_micro_patch4_32", **{"depth": 2, "rel_pos": "bias", **kwargs})


def test_position_parameters_of_any_model():
    model = micro(rel_pos="txl")
    names = {n for n, _ in model.named_parameters() if ".position." in n}
    assert len(names) == 2 * 4
    assert vitrel.position_parameters(model) == model.position_parameters() == names
    wrapped = torch.nn.ModuleDict({"model": model})
    assert vitrel.position_parameters(wrapped) == {f"model.{name}" for name in names}
    assert vitrel.position_parameters(model.blocks[0].attn.position) == {"query.table_h", "query.table_w", "u", "v"}
    assert vitrel.position_parameters(micro(rel_pos="none")) == set()
    assert vitrel.position_parameters(timm.create_model("resnet18")) == set()


@pytest.mark.parametrize("compiled", [False, True])
def test_optimizers_decay_no_table(compiled):
    """timm's and the run's own: every table is spared, the rest as without position, each parameter in one group."""
    model = vitrel.relativize(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32), "txl")
    if compiled:
        model.compile()
    position, names = model.position_parameters(), {id(p): name for name, p in model.named_parameters()}
    for groups in (
        create_optimizer_v2(model, "adamw", lr=0.1, weight_decay=0.05).param_groups,
        parameter_groups(model, OptimConfig(weight_decay=0.05)),
    ):
        listed = [names[id(p)] for group in groups for p in group["params"]]
        assert sorted(listed) == sorted(names.values())
        decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
        assert decayed == {n for n, p in model.named_parameters() if p.ndim > 1} - position - {"pos_embed", "cls_token"}
