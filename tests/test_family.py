"""Names of position parameters, in models and below wrappers; the rest is tested with the models that have it."""

import timm
import torch
from timm.optim import create_optimizer_v2

import vitrel


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


def test_timms_optimizer_decays_no_table_below_a_wrapper():
    model = micro()
    for one in (model, torch.compile(model)):
        groups = create_optimizer_v2(one, "adamw", lr=0.1, weight_decay=0.05).param_groups
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        assert {decay[id(model.get_parameter(name))] for name in model.position_parameters()} == {0.0}
        assert decay[id(model.head.weight)] == 0.05
