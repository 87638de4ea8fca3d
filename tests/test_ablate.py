"""Terms switched off: the scores without the summand, on every form, and the model as it was afterwards."""

import pytest
import timm
import torch

import vitrel
from vitrel.ablate import switchable
from vitrel.backends import BACKENDS, Case, unsuited
from vitrel.probe import probes
from vitrel.relpos import PRESETS, RelPos

SCHEMES = [*PRESETS, "txl+value", "txl+bias", "rope+bias", "txl+key", "bias+kernel"]


def model(rel_pos, backend="auto", **kwargs):
    torch.manual_seed(0)
    small = {"embed_dim": 24, "num_heads": 3, "depth": 1, "img_size": (12, 20), "num_classes": 3}
    made = timm.create_model("vitrel_micro_patch4_32", rel_pos=rel_pos, backend=backend, **{**small, **kwargs})
    for name in sorted(made.position_parameters()):
        torch.nn.init.normal_(made.get_parameter(name))
    return made.eval()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_term_off_is_its_summand_gone_and_on_again_the_same_model(scheme):
    net, pictures = model(scheme, class_token=True), torch.randn(2, 3, 12, 20)
    attn, x = net.blocks[0].attn, torch.randn(2, 16, 24)
    whole, logits = attn.terms(x), net(pictures)
    for term in switchable(net):
        with vitrel.switched_off(net, term):
            left = attn.terms(x)
            expected = sum(summand for name, summand in whole.items() if name != term)
            torch.testing.assert_close(sum(left.values()), expected, atol=1e-5, rtol=1e-5)
            changed = net(pictures)
        assert not torch.equal(changed, logits) or term == "u"
    assert torch.equal(net(pictures), logits)


@pytest.mark.parametrize("scheme", ["txl+bias+value+key", "txl", "deberta", "shaw", "beit", "irpe_qkv", "rope"])
def test_every_form_leaves_the_term_out(scheme):
    spec = RelPos.of({"preset": scheme})
    pictures = torch.randn(2, 3, 12, 20)
    nets = {
        name: model(scheme, name, class_token=True)
        for name in BACKENDS
        if unsuited(name, Case(spec, tokens=16)) is None
    }
    for term in switchable(nets["reference"]):
        results = {}
        for name, net in nets.items():
            with vitrel.switched_off(net, term), torch.no_grad():
                results[name] = net(pictures)
        for result in results.values():
            torch.testing.assert_close(result, results["reference"], atol=1e-5, rtol=1e-4)


def test_all_terms_off_is_the_model_without_position():
    net, bare = model("txl+bias+value"), model("none")
    bare.load_state_dict(net.state_dict(), strict=False)
    pictures = torch.randn(2, 3, 12, 20)
    with vitrel.switched_off(net):
        torch.testing.assert_close(net(pictures), bare(pictures))


def test_an_unknown_term_is_refused_by_name():
    with (
        pytest.raises(ValueError, match=r"no term 'valu' in this model, expected one of query, value"),
        vitrel.switched_off(model("shaw"), "valu"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"no term 'bias' in this model, it has no position terms"),
        vitrel.switched_off(model("none"), "bias"),
    ):
        pass


def test_layers_that_share_their_tables_are_switched_once():
    net = model({"preset": "bias", "share_layers": True}, depth=2)
    bare = model("none", depth=2)
    bare.load_state_dict(net.state_dict(), strict=False)
    pictures = torch.randn(1, 3, 12, 20)
    with vitrel.switched_off(net, "bias"):
        torch.testing.assert_close(net(pictures), bare(pictures))
        assert [list(p.position.terms) for p in probes(net, pictures).values()] == [[], []]
