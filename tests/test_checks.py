"""Values out of range are refused before any work, in one line."""

import pytest

from vitrel.training.checks import check
from vitrel.training.config import parse
from vitrel.training.fileio import ConfigError


def test_the_defaults_pass():
    check(parse([]))


@pytest.mark.parametrize(
    "options", [["--optim.position_lr_scale.bias", "30"], ["--optim.position_lr_scale", "{bias: 30}"]]
)
def test_factors_by_term_are_taken(options):
    config = parse([*options, "--model.rel_pos", "bias"])
    check(config)
    assert config.optim.position_lr_scale == {"bias": 30.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.batch_size", "0"], "data.batch_size: expected an integer of at least 1, got 0"),
        (["--trainer.max_epochs", "-3"], "trainer.max_epochs: expected an integer of at least 1, got -3"),
        (["--trainer.max_epochs", "null"], "trainer.max_epochs: expected an end: max_epochs or max_steps, got None"),
        (["--optim.lr", "-1"], "optim.lr: expected a positive number, got -1.0"),
        (["--optim.position_lr_scale", "-1"], "optim.position_lr_scale: expected 0 or more, or such a number for each"),
        (
            ["--optim.position_lr_scale", "{bias: .inf}"],
            "optim.position_lr_scale: expected 0 or more, or such a number",
        ),
        (
            ["--optim.position_lr_scale", "{bias: 30}", "--model.rel_pos", "txl"],
            "optim.position_lr_scale: the model has no bias to learn; it has u, v, query",
        ),
        (
            ["--optim.position_lr_scale", "{bias: 30}", "--model.rel_pos", "none"],
            "optim.position_lr_scale: the model has no bias to learn; it has no position parameters",
        ),
        (["--optim.warmup", "1"], "optim.warmup: expected a part of all steps from 0 to below 1, got 1.0"),
        (["--optim.ema_decay", "1"], "optim.ema_decay: expected a decay between 0 and 1, got 1.0"),
        (["--data.val_size", "1.5"], "data.val_size: expected a part below 1 or a count of images, got 1.5"),
        (["--data.scale", "[1]"], "data.scale: expected [smallest, largest] with 0 < smallest <= largest <= 1"),
        (["--data.std", "[1, 1, 0]"], "data.std: expected three numbers, one per channel"),
        (["--data.mean", "[0, 0, 0]"], "data.mean and data.std go together; give both or neither"),
        (["--data.download", "true"], "data.download: only cifar10 and cifar100 can be downloaded, not digits"),
        (["--name", "a/b"], "name: expected a plain folder name, got 'a/b'"),
        (["--name", ".."], "name: expected a plain folder name, got '..'"),
        (["--name", ""], "name: expected some text, got ''; leave it out for the default"),
        (["--name", "x" * 300], "name: expected names of at most 255 bytes, got 'xxx"),
        (["--data.root", " "], "data.root: expected some text, got ' '"),
        (["--runs", ""], "runs: expected some text, got ''"),
        (["--runs", __file__], f"runs: {__file__} is a file; give a folder"),
        (["--runs", f"{__file__}/a/b"], f"runs: {__file__} is a file; give a folder"),
        (["--model.arch", ""], "model.arch: expected some text, got ''"),
        (["--data.root", "a\0b"], "data.root: expected text without control characters, got 'a\\x00b'"),
        (["--logger.project", "\udcff"], "logger.project: expected text without control characters"),
        (["--data.num_workers", "100000"], "data.num_workers: expected 0 to 512, or null, got 100000"),
        (
            ["--model.img_size", "0"],
            "model.img_size: expected a side or [rows, columns] of at most 16384 pixels, got 0",
        ),
        (["--model.depth", "100000"], "model.depth: expected at most 1024, got 100000"),
        (
            ["--model.kwargs.rel_pos", "rope"],
            "model.kwargs.rel_pos: set by the run or by model.rel_pos; remove it here",
        ),
        (["--trainer.accelerator", "nope"], "trainer: "),
        (["--trainer.limit_val_batches", "-1"], "trainer: "),
        (["--trainer.strategy", "nope"], "trainer: "),
        (["--trainer.strategy", "ddp_spawn"], "trainer.strategy: ddp_spawn starts processes"),
        (["--ckpt_path", "x.ckpt"], "ckpt_path: there is no file x.ckpt; give a .ckpt file or 'last'"),
        (["--model.img_size", "30"], "model.img_size: 30 x 30 is not a multiple of vitrel_micro_patch4_32's patch"),
        (["--model.patch_size", "3"], "32 x 32 is not a multiple of vitrel_micro_patch4_32's patch of 3 x 3 pixels"),
        (["--model.num_heads", "5"], "model.num_heads: vitrel_micro_patch4_32 refuses {'num_heads': 5}"),
        (["--model.kwargs.foo", "1"], "model.foo: vitrel_micro_patch4_32 refuses {'foo': 1}"),
        (["--model.arch", "vitrel_micro"], "model.arch: no timm model is called 'vitrel_micro'; did you mean vitrel_"),
        (["--model.rel_pos", "biass"], "model.rel_pos: preset 'biass' is unknown"),
        (["--model.arch", "resnet18", "--model.rel_pos", "bias"], "model.rel_pos: resnet18 has no relative positions"),
        (["--model.checkpoint", "nowhere"], "model.checkpoint: nowhere is neither a folder with model.safetensors"),
    ],
)
def test_a_value_out_of_range_is_refused(options, message):
    with pytest.raises(ConfigError) as e:
        check(parse(options))
    assert message in str(e.value)
    assert str(e.value).isprintable()
    assert "\n" not in str(e.value)


def test_other_models_of_timm_pass():
    check(parse(["--model.arch", "resnet18"]))
    check(parse(["--model.arch", "vit_tiny_patch16_224", "--model.img_size", "[32, 64]", "--model.patch_size", "8"]))
