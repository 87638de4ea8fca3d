"""Memory across the strips of an image that is too tall for one pass: Transformer-XL's recurrence in 2-D.

An image is read from the top in strips of patch rows. In each layer the patches of a strip attend to each other and to
the rows above it, which that layer kept as its own input from the strips before (Transformer-XL, arXiv 1901.02860,
section 3.2), at their true offsets: the keys lie on a grid that begins ``memory_rows`` above the queries.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitrel.attention import Memory, RelativeAttention2d
from vitrel.grid import Grid
from vitrel.stripmodel import check_model, pooling
from vitrel.stripstate import StripState

PREFIXES = ("renew", "carry")


class StripReader(nn.Module):
    """Reads tall images strip by strip with a relative vision transformer, within bounded memory.

    ``forward`` reads whole images, ``step`` one strip of a stream. Time grows linearly with the height, and a
    strip's memory depends on ``strip_rows`` and ``memory_rows`` alone. Keys further away than a table was made for read
    its last entry (a kernel has ended there). The memory is handed to the model's attentions while a strip is read, so
    that two threads need a model each; ``torch.compile`` the reader or the model's blocks, not the model.

    Args:
        model: A vitrel model, or a timm ``VisionTransformer`` made relative with ``keep_absolute=False``. It stays
            as it is.
        strip_rows: Patch rows of a strip; the last one of an image may have fewer.
        memory_rows: Patch rows above a strip that it sees; 0 for none, None for all.
        pool: What the classifier is given: ``avg``, the mean of all patches read so far; ``last``, that of the last
            strip; ``token``, the first prefix token after the last strip. None for the model's own pooling.
        prefix: Prefix tokens (class token, registers) begin anew in each strip (``renew``) or go on with what they
            became in the strip before (``carry``).
        detach: Cut gradients at the seams, as Transformer-XL does; False to go back through all strips. What a stream
            has pooled is cut too, so that each ``step`` may have a backward pass of its own.

    Raises:
        TypeError: For a model of another family.
        ValueError: For a model with an absolute position embedding or blocks that cannot see a memory, or an unknown
            option.
    """

    def __init__(
        self,
        model: nn.Module,
        strip_rows: int,
        memory_rows: int | None = None,
        *,
        pool: Literal["avg", "last", "token"] | None = None,
        prefix: Literal["renew", "carry"] = "renew",
        detach: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(model, StripReader):
            raise TypeError("model: a StripReader already; give it the model inside, reader.model")
        check_model(model)
        if prefix not in PREFIXES:
            raise ValueError(f"prefix: expected one of {', '.join(PREFIXES)}, got {prefix!r}")
        self.model = model
        self.strip_rows = _rows("strip_rows", strip_rows, least=1)
        self.memory_rows = None if memory_rows is None else _rows("memory_rows", memory_rows, least=0)
        self.pool, self.prefix, self.detach = pooling(model, pool), prefix, detach
        self._state: StripState | None = None
        self._warned = False
        self.training = model.training

    def forward(self, image: Tensor | Sequence[Tensor], heights: Sequence[int] | None = None) -> Tensor:
        """Logits of whole images; a stream that is being read with ``step`` is left as it is.

        Args:
            image: (B, C, h, w), or a sequence of (C, h, w) of one width, which are padded below to the tallest.
            heights: Height of each image in pixels, where ``image`` is padded below; a patch row counts as padding if
                all of it is.

        Returns:
            (B, classes).
        """
        state = None
        for strip in self._read(image, heights):
            state = strip[1]
        return self._classify(cast(StripState, state))

    def forward_features(self, image: Tensor | Sequence[Tensor], heights: Sequence[int] | None = None) -> Tensor:
        """Patches of whole images after the last norm, (B, h * w, D); arguments as ``forward``.

        Padded patches hold anything.
        """
        prefix = self._model.num_prefix_tokens
        return torch.cat([tokens[:, prefix:] for tokens, _ in self._read(image, heights)], 1)

    def step(self, strip: Tensor, heights: Sequence[int] | None = None) -> Tensor:
        """Read the next strip of a stream and give the logits of what has been read so far.

        Args:
            strip: (B, C, h, w), at most ``strip_rows`` patches high.
            heights: Height in pixels that each image still has in this strip, 0 for one that has ended.

        Returns:
            (B, classes).
        """
        strip = self._checked(strip)
        rows = self._grid(strip)[0]
        if rows > self.strip_rows:
            raise ValueError(
                f"strip: {strip.shape[-2]} pixels are {rows} patch rows, expected at most "
                f"strip_rows={self.strip_rows}; cut it, or give whole images to forward"
            )
        if self._state is not None and self._state.valid.shape[0] != strip.shape[0]:
            raise ValueError(
                f"strip: a batch of {strip.shape[0]}, expected {self._state.valid.shape[0]} as in the strips before; "
                "reset() starts anew"
            )
        valid = self._valid_rows(heights, strip, floor=0 if self._state else 1)
        if self._state is not None:
            again = self._state.ended if valid is None else self._state.ended & valid.any(1)
            if again.any():
                raise ValueError(
                    f"heights: image {int(again.nonzero()[0])} had ended in a strip before; give it 0 rows"
                )
        _, state = self._strip(strip, valid, self._state)
        logits = self._classify(state)
        self._state = replace(state, total=state.total.detach()) if self.detach else state
        return logits

    def reset(self) -> None:
        """Forget the strips of the stream."""
        self._state = None

    def state(self) -> dict[str, Any]:
        """What ``step`` has kept of its stream, as plain tensors and numbers; empty before the first strip."""
        return {} if self._state is None else {**vars(self._state), "pool": self.pool}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with a stream from its ``state()``.

        Raises:
            ValueError: If it is that of another model.
        """
        if not state:
            self._state = None
            return
        model = self._model
        saved = StripState.of(state, len(model.blocks), model.embed_dim, model.num_prefix_tokens)
        if state["pool"] != self.pool:
            raise ValueError(
                f"state: pooling {state['pool']!r}, expected {self.pool!r}; restore it into a reader made alike"
            )
        if self.memory_rows is not None and saved.rows > self.memory_rows:
            raise ValueError(f"state: {saved.rows} rows kept, expected at most memory_rows={self.memory_rows}")
        self._state = saved

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that should not decay."""
        return {f"model.{name}" for name in self._model.no_weight_decay()}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's groups of layers, for a learning rate that decays with depth."""
        return {group: _inside(matched) for group, matched in self._model.group_matcher(coarse=coarse).items()}

    @property
    def _model(self) -> Any:
        return self.model

    def _read(
        self, image: Tensor | Sequence[Tensor], heights: Sequence[int] | None
    ) -> Iterator[tuple[Tensor, StripState]]:
        if not isinstance(image, Tensor):
            if heights is not None:
                raise ValueError("heights: those of a sequence of images are known; leave them out")
            widths = {getattr(picture, "shape", ())[-1:] for picture in image} if isinstance(image, Sequence) else set()
            if len(widths) != 1 or any(picture.ndim != 3 for picture in image):
                raise ValueError("image: expected (B, C, h, w), or a sequence of (C, h, w) of one width, at least one")
            heights = [picture.shape[-2] for picture in image]
            image = torch.stack([F.pad(picture, (0, 0, 0, max(heights) - picture.shape[-2])) for picture in image])
        image = self._checked(image)
        valid = self._valid_rows(heights, image, floor=1)
        pixels = self.strip_rows * self._model.patch_embed.patch_size[0]
        state = None
        for n, strip in enumerate(image.split(pixels, -2)):
            rows = None if valid is None else valid[:, n * self.strip_rows :][:, : self.strip_rows]
            tokens, state = self._strip(strip, rows, state)
            yield tokens, state

    def _strip(self, strip: Tensor, valid: Tensor | None, state: StripState | None) -> tuple[Tensor, StripState]:
        """Tokens of a strip after the last norm, (B, P + patches, D), and the state after it."""
        model = self._model
        rows, cols = self._grid(strip)
        if model.training and model.grad_checkpointing:
            raise ValueError(
                "grad_checkpointing: not supported while strips are read; call set_grad_checkpointing(False)"
            )
        if valid is None:
            valid = torch.ones(strip.shape[0], rows, dtype=torch.bool, device=strip.device)
        else:  # whatever padding holds, NaN too, would reach the sums
            pixels = valid.repeat_interleave(model.patch_embed.patch_size[0], 1)[:, : strip.shape[-2]]
            strip = strip.masked_fill(~pixels[:, None, :, None], 0)
        with _any_size(model.patch_embed):
            x = VisionTransformer._pos_embed(model, model.patch_embed(strip))
        x = model.norm_pre(x)
        prefix = model.num_prefix_tokens
        if state is None:
            state = StripState.start(x, prefix, len(model.blocks))
        elif state.hidden[0].shape[1] != state.rows * cols:
            raise ValueError(
                f"strip: {cols} patch columns, and the strips before had another width; reset() starts anew"
            )
        elif self.prefix == "carry":
            x = torch.cat([state.prefix.to(x), x[:, prefix:]], 1)
        seen = torch.cat([state.valid, valid], 1)
        mask = None
        if not seen.all():
            mask = F.pad(seen.repeat_interleave(cols, 1), (prefix, 0), value=True)[:, None, None]
        x, given = self._through_blocks(x, mask, state, Grid(rows, cols, top=state.rows))
        tokens = model.norm(x)
        total, count = state.pooled(tokens, valid.repeat_interleave(cols, 1), prefix, self.pool)
        kept, hidden = state.kept(given, seen, rows, self.memory_rows)
        carried = torch.where(valid.any(1)[:, None, None], x[:, :prefix], state.prefix.to(x))
        if self.detach:
            hidden, carried = [h.detach() for h in hidden], carried.detach()
        return tokens, StripState(kept.shape[1], hidden, kept, carried, total, count, ended=~valid[:, -1])

    def _through_blocks(
        self, x: Tensor, mask: Tensor | None, state: StripState, strip: Grid
    ) -> tuple[Tensor, list[Tensor]]:
        """The prefix and patches after all blocks, and what each attention was given for the patches."""
        model = self._model
        given: list[Tensor] = []
        hooks = []
        try:
            for block, hidden in zip(model.blocks, state.hidden, strict=True):
                attn: RelativeAttention2d = block.attn
                self._check_reach(attn, strip)
                attn.memory = Memory(hidden, strip)
                hooks.append(attn.register_forward_pre_hook(lambda _, args: given.append(args[0][:, -strip.patches :])))
            for block in model.blocks:
                x = block(x, attn_mask=mask)
        finally:
            for hook in hooks:
                hook.remove()
            for block in model.blocks:
                block.attn.memory = None
        return x, given

    def _check_reach(self, attn: RelativeAttention2d, strip: Grid) -> None:
        if self._warned or self.training:
            return
        seen = (strip.top + strip.rows, strip.cols)
        reach = (torch.arange(seen[0])[:, None], torch.arange(seen[1])[None])
        if not attn.position_terms.covers(*reach, as_they_are=True).all():
            self._warned = True
            warnings.warn(
                f"a strip sees {seen[0]} rows and {seen[1]} columns of patches, more than its tables were "
                "trained for, so that their last entry is repeated, or a kernel ends: see "
                f"vitrel.coverage(model, {seen})",
                stacklevel=2,
            )

    def _classify(self, state: StripState) -> Tensor:
        model = self._model
        pooled = (state.total / state.count.clamp(min=1)).to(state.prefix.dtype)
        return model.head(model.head_drop(model.fc_norm(pooled)))

    def _checked(self, image: Tensor) -> Tensor:
        patches = self._model.patch_embed
        if not isinstance(image, Tensor) or image.ndim != 4:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"image: expected a tensor of shape (B, C, h, w), got {got}")
        if not patches.dynamic_img_pad and any(
            side < patch or side % patch for side, patch in zip(image.shape[-2:], patches.patch_size, strict=True)
        ):
            raise ValueError(
                f"image: {image.shape[-2]} x {image.shape[-1]} pixels are no multiple of the patch of "
                f"{patches.patch_size[0]} x {patches.patch_size[1]}; pad or crop it"
            )
        return image

    def _grid(self, strip: Tensor) -> tuple[int, int]:
        rows, cols = self._model.patch_embed.dynamic_feat_size(tuple(strip.shape[-2:]))
        return rows, cols

    def _valid_rows(self, heights: Sequence[int] | None, image: Tensor, floor: int) -> Tensor | None:
        if heights is None:
            return None
        patch = 1 if self._model.patch_embed.dynamic_img_pad else self._model.patch_embed.patch_size[0]
        if isinstance(heights, Tensor):
            heights = heights.tolist()
        if not (
            isinstance(heights, Sequence)
            and len(heights) == len(image)
            and all(hasattr(n, "__index__") and floor <= n <= image.shape[-2] and n % patch == 0 for n in heights)
        ):
            raise ValueError(
                f"heights: expected {len(image)} numbers of pixels from {floor} to {image.shape[-2]} that "
                f"are multiples of {patch}, got {heights}"
            )
        below = torch.arange(self._grid(image)[0], device=image.device) * self._model.patch_embed.patch_size[0]
        return below < torch.as_tensor(list(heights), device=image.device)[:, None]


def _inside(matched: Any) -> Any:
    """timm's patterns for parameter names, for a model that is the attribute ``model``."""
    if isinstance(matched, str):
        return rf"^model\.(?:{matched.replace('^', '')})"
    return type(matched)(map(_inside, matched)) if isinstance(matched, (tuple, list)) else matched


def _rows(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{name}: expected a number of patch rows, at least {least}, got {value!r}")
    return operator.index(value)


@contextmanager
def _any_size(patch_embed: Any) -> Iterator[None]:
    strict = patch_embed.strict_img_size
    patch_embed.strict_img_size = False
    try:
        yield
    finally:
        patch_embed.strict_img_size = strict
