"""The choice of a form, what each refuses, and what explain says of it."""

from dataclasses import replace

import pytest
import timm
import torch

import vitrel
from vitrel import RelPos
from vitrel.backends import BACKENDS, CROSSOVERS, Case, check, choose, unsuited, why

SMALL, LARGE = 64, 4096


def case(rel_pos, tokens=SMALL, **facts):
    return Case(RelPos.of(rel_pos), tokens, **facts)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (case("none", LARGE, grad=True), "dense"),
        (case("rope", LARGE, grad=True), "dense"),
        (case("none", grad=True), "dense"),
        (case("none", grad=True, half=True), "written"),
        (case("rope", grad=True, half=True), "written"),
        (case("none", 196, grad=True, half=True), "dense"),
        (case("none", half=True), "dense"),
        (case("none", grad=True, half=True, device="cuda"), "dense"),
        (case("none", grad=True, half=True, traced=True), "dense"),
        (case("bias"), "dense"),
        (case("swin"), "dense"),
        (case("txl"), "written"),
        (case("irpe_qk"), "dense"),
        (case("bias", grad=True), "written"),
        (case("swin", grad=True), "written"),
        (case("txl", grad=True, traced=True), "dense"),
        (case("txl", grad=True, dropout=True), "dense"),
        (case("bias", grad=True, mask_grad=True), "dense"),
        (case("shaw", grad=True, full_grids=False), "dense"),
        (case("bias", LARGE), "blocked"),
        (case("shaw", LARGE, grad=True), "blocked"),
        (case("txl", LARGE, grad=True, traced=True), "folded"),
        (case("txl", LARGE, grad=True, dropout=True), "folded"),
        (case("txl", LARGE, full_grids=False), "folded"),
        (case("swin", LARGE, grad=True), "written"),
        (case("swin", LARGE), "dense"),
        (case("txl", device="cuda", grad=True), "dense"),
        (case("txl", LARGE, device="cuda", grad=True), "folded"),
        (case("swin", LARGE, device="cuda", grad=True), "dense"),
        (case("bias", LARGE, device="mps"), "folded"),
    ],
    ids=str,
)
def test_the_choice(given, taken):
    assert choose("auto", given) == taken
    assert unsuited(taken, given) is None
    assert why(taken, given)


def test_the_crossovers_are_where_the_choice_changes():
    for (device, mode), tokens in CROSSOVERS.items():
        spec = "txl" if "input" in mode else "bias"
        given = case(spec, tokens, device=device, grad=mode == "training")
        fewer = replace(given, tokens=tokens - 1)
        assert choose("auto", given) in ("blocked", "folded")
        assert choose("auto", fewer) in ("dense", "written")
        assert f"{tokens} tokens, at least {tokens}" in why(choose("auto", given), given)
        assert f"fewer than {tokens}" in why(choose("auto", fewer), fewer)


@pytest.mark.parametrize(
    ("backend", "facts", "message"),
    [
        ("folded", {"rel_pos": "swin"}, "needs one table per axis, and these are joint; set table='separable'"),
        ("blocked", {"rel_pos": "irpe_qkv"}, "needs one table per axis"),
        ("written", {"rel_pos": "irpe_qkv"}, "needs one table per axis and full grids for a value term"),
        ("blocked", {"rel_pos": "bias", "full_grids": False}, "needs full grids, and these are points"),
        ("written", {"rel_pos": "bias", "dropout": True}, "has no attention dropout; set attn_drop to 0"),
        (
            "blocked",
            {"rel_pos": "bias", "traced": True},
            "has a backward pass of its own, which torch.compile, torch.export and torch.func cannot",
        ),
        ("written", {"rel_pos": "bias", "mask_grad": True}, "gives a mask no gradient"),
    ],
)
def test_a_backend_that_cannot_serve_says_why(backend, facts, message):
    with pytest.raises(ValueError, match=rf"backend: '{backend}' {message}.*or use backend='auto'"):
        choose(backend, case(**facts))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_forced_backend_is_taken_by_the_model(name):
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl", depth=1, backend=name)
    assert [(r.backend, r.why) for r in vitrel.explain(model)] == [(name, "asked for")]
    plain = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl", depth=1, backend="reference")
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-5)
    if name in ("folded", "blocked"):
        with pytest.raises(ValueError, match=f"backend: '{name}' needs one table per axis"):
            check(name, RelPos.preset("swin"))


def test_explain_counts_bytes_that_grow_with_the_tokens_and_not_with_their_square():
    extra = {}
    for preset in ("bias", "txl", "shaw", "deberta", "bias+kernel"):
        for side in (32, 64):
            model = timm.create_model("vitrel_small_patch16_224", rel_pos=preset, img_size=16 * side, depth=1)
            (report,) = vitrel.explain(model)
            assert report.backend == "blocked"
            assert report.why.endswith("; the kernel a row of queries at a time") == ("kernel" in preset)
            extra[side] = report.extra_bytes
        assert extra[64] <= 8.1 * extra[32]
        assert extra[64] < 6 * 4096**2 * 4 / 5


def test_explain_says_what_a_step_in_16_bits_takes():
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos="none", depth=1)
    (report,) = vitrel.explain(model.train())
    assert (report.backend, report.extra_bytes) == ("dense", 0)
    with torch.autocast("cpu", torch.bfloat16):
        (mixed,) = vitrel.explain(model)
    (report,) = vitrel.explain(model.bfloat16())
    assert report == mixed
    assert (report.backend, report.extra_bytes) == ("written", 4 * 64 * 64 * 4)  # its weights are in float32
    assert report.why == "nothing to add to the scores, in 16 bits: softmax written out head by head"
    (report,) = vitrel.explain(model.eval())
    assert (report.backend, report.extra_bytes) == ("dense", 0)


@pytest.mark.parametrize("backend", ["written", "blocked"])
def test_second_derivatives_are_refused_and_not_wrong(backend):
    model = timm.create_model("vitrel_micro_patch4_32", rel_pos="txl+value", depth=1, img_size=16, backend=backend)
    x = torch.randn(1, 3, 16, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    table = model.blocks[0].attn.position.query.table_h
    for wanted in (x, table):
        with pytest.raises(RuntimeError, match=rf"'{backend}' cannot be differentiated twice; .* backend='reference'"):
            torch.autograd.grad(grad.sum(), wanted, retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("preset", ["bias", "txl", "shaw", "deberta", "rope", "swin"])
@pytest.mark.parametrize("backend", ["auto", "dense", "reference", "written", "folded", "blocked"])
def test_a_batch_of_none(backend, preset):
    if backend != "auto" and unsuited(backend, case(preset)):
        return
    attn = vitrel.RelativeAttention2d(16, 2, grid_size=(3, 5), rel_pos=preset, backend=backend, num_prefix_tokens=1)
    out = attn(torch.zeros(0, 16, 16, requires_grad=True))
    assert out.shape == (0, 16, 16)
    out.sum().backward()
