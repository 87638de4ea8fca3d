"""The position of a layer, and what is kept of it between calls in inference."""

import copy
import pickle

import pytest
import torch
from forms import place

from vitrel import RelativeAttention2d, position

SCHEMES = ["bias", "txl", "shaw", "cpb", "rope_mixed", {"preset": "txl", "source": "sinusoid"}, "swin"]


@pytest.fixture(params=SCHEMES, ids=str)
def attn(request):
    torch.manual_seed(0)
    attn = RelativeAttention2d(16, 2, grid_size=(3, 5), rel_pos=request.param).eval()
    for parameter in attn.position_terms.parameters():
        torch.nn.init.normal_(parameter)
    return attn


def fresh(attn, x):
    """The output of a copy that has kept nothing."""
    return copy.deepcopy(attn)(x)


@pytest.fixture
def x():
    return torch.randn(2, 15, 16, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_what_follows_from_parameters_and_grid_is_made_once(attn, x):
    first = attn(x)
    kept = attn.position_terms._kept
    assert torch.equal(attn(x), first)
    assert attn.position_terms._kept is kept
    assert kept[2].kept  # tables as read by each pair of lines, angles, or a bias


def in_place(terms):
    next(terms.parameters()).mul_(1.5)  # a constant added to a bias changes no softmax


def by_data(terms):
    next(terms.parameters()).data.mul_(-2.0)


def swapped(terms):
    for parameter in terms.parameters():
        parameter.data = parameter.data.flip(0) + 0.5


def loaded(terms):
    terms.load_state_dict({k: 1.5 * v if v.is_floating_point() else v for k, v in terms.state_dict().items()})


def replaced(terms):
    module = next(m for m in terms.modules() if list(m.parameters(recurse=False)))
    name, parameter = next(iter(module.named_parameters(recurse=False)))
    setattr(module, name, torch.nn.Parameter(1.5 * parameter))


@pytest.mark.parametrize("edit", [in_place, by_data, swapped, loaded, replaced])
@torch.no_grad()
def test_an_edited_parameter_is_never_read_from_what_was_kept(attn, x, edit):
    before = attn(x)
    edit(attn.position_terms)
    after = attn(x)
    assert torch.equal(after, fresh(attn, x))
    assert not torch.allclose(after, before)


@torch.no_grad()
def test_another_type_grid_and_autocast(attn, x):
    attn(x)
    assert torch.equal(attn.double()(x.double()), fresh(attn, x.double()))
    attn.float()(x)
    with torch.autocast("cpu", torch.bfloat16):
        inside = attn(x)
        assert torch.equal(inside, fresh(attn, x))
    assert torch.equal(attn(x), fresh(attn, x))
    attn.grid_size = (5, 3)
    assert torch.equal(attn(x), fresh(attn, x))
    attn.set_grid_size((1, 15))
    assert torch.equal(attn(x), fresh(attn, x))


@torch.no_grad()
def test_another_thread_may_forget_what_was_kept_while_it_is_compared(attn, x, monkeypatch):
    expected = attn(x)
    same = position._same

    def slow(old, new):
        attn.position_terms._kept = None  # as a thread with gradients does
        return same(old, new)

    monkeypatch.setattr(position, "_same", slow)
    assert torch.equal(attn(x), expected)


def test_nothing_is_kept_with_gradients_or_in_training(attn, x):
    with torch.no_grad():
        attn(x)
        assert attn.position_terms._kept is not None
        attn.train()(x)
        assert attn.position_terms._kept is None
        attn.eval()(x)
    attn(x).sum().backward()
    assert attn.position_terms._kept is None
    assert all(p.grad is not None for p in attn.position_terms.parameters())


@torch.no_grad()
def test_what_is_kept_is_not_copied_or_saved(attn, x):
    attn(x)
    assert copy.deepcopy(attn).position_terms._kept is None
    assert pickle.loads(pickle.dumps(attn)).position_terms._kept is None
    assert not any("kept" in name for name in attn.state_dict())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap over a fused kernel
@torch.no_grad()
def test_inference_mode_and_torch_func(attn, x):
    with torch.inference_mode():
        inside = attn(x)
    assert torch.equal(attn(x), inside)
    parameters = {name: p + 1 for name, p in attn.named_parameters()}
    other = copy.deepcopy(attn)
    other.load_state_dict({**attn.state_dict(), **parameters})
    torch.testing.assert_close(torch.func.functional_call(attn, parameters, (x,)), other(x), rtol=1e-5, atol=1e-5)
    stacked = {name: torch.stack([p, p + 1]) for name, p in attn.named_parameters()}
    both = torch.func.vmap(lambda p: torch.func.functional_call(attn, p, (x,)))(stacked)
    torch.testing.assert_close(both, torch.stack([attn(x), other(x)]), rtol=1e-5, atol=1e-5)


def test_a_position_says_its_terms():
    assert place("txl", (2, 3))().terms == ("query", "u", "v")
