"""Towers of images over the ranks of a ring: each rank runs the tower on some images, and all ranks get all features.

Guarantees: features and gradients are those of one process, up to rounding. The tower runs once on every rank, also if
there are fewer images than ranks, so that collective calls inside a tower (FSDP) and its backward match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.core.geometry import StridedRange
from ringattn.core.layout import Layout
from ringattn.errors import InputError, UnsupportedError
from ringattn.sequence import Sequence

SHARDED = "ringattn_shard_images"
"""The attribute that marks a model whose images are sharded; copies of a model keep it."""


@dataclass(frozen=True)
class _FeatureLayout(Layout):
    """The rows of features of each rank. `pieces`: their ranges."""

    pieces: tuple[tuple[StridedRange, ...], ...] = ()

    @cached_property
    def shards(self) -> tuple[tuple[StridedRange, ...], ...]:
        return self.pieces


class ImageShards:
    """The assignment of a batch's images to the ranks of a ring: whole images, balanced by their sizes.

    `images`: the indices of each rank's images, in order. `inputs`: the tower's inputs for this rank's images. A rank
    without an image gets the first one, and its features are not used.
    """

    def __init__(self, module: nn.Module, pixels: str, inputs: Mapping[str, Any], seq: Sequence) -> None:
        """Assign images to ranks. `pixels`: the name of the input with pixels, all others have an entry per image.

        Raises `InputError` on every rank if the inputs cannot be divided by images, or if the tower mixes images.
        """
        self.seq = seq
        with seq.ring.refused_by_all():
            _refuse_mixing(module)
            sizes = self._sizes(pixels, inputs)
        self.count, ranks = len(sizes), seq.ring.world_size
        self.images: list[list[int]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        # The largest image first, always to the rank with the least so far.
        for image in sorted(range(self.count), key=lambda image: -sizes[image]):
            rank = loads.index(min(loads))
            self.images[rank].append(image)
            loads[rank] += sizes[image]
        for images in self.images:
            images.sort()
        chosen = self.images[seq.ring.rank] or [0]
        self.inputs = {name: [x[image] for image in chosen] if isinstance(x, list | tuple) else x[chosen]
                       for name, x in inputs.items() if name != pixels}  # fmt: skip
        x = inputs[pixels]
        self.inputs[pixels] = torch.cat([x.split(sizes)[image] for image in chosen]) if self.has_patches else x[chosen]

    def _sizes(self, pixels: str, inputs: Mapping[str, Any]) -> list[int]:
        """Return the size of each image: the number of its patches, or else its pixels."""
        x, others = inputs[pixels], {name: value for name, value in inputs.items() if name != pixels}
        counts = {name: len(value) for name, value in others.items()}
        grids = [value for name, value in others.items() if name.endswith("_grid_thw")]
        self.has_patches = bool(grids)  # the patches of all images are in one dimension
        sizes = torch.as_tensor((grids or [*others.values()] or [torch.ones(len(x), 1)])[0]).prod(-1).long().tolist()
        if not sizes or {*counts.values()} - {len(sizes)} or len(x) != (sum(sizes) if grids else len(sizes)):
            raise InputError(
                f"shard_images: {pixels} {tuple(x.shape)} cannot be divided by images; the other inputs have {counts} "
                f"entries, and {sizes[:8]} {'patches' if grids else 'pixels'}; prepare the model without shard_images"
            )
        return list(map(int, sizes))

    def gather(self, parts: list[Tensor], features: list[Tensor]) -> list[Tensor]:
        """Return the features of all images, in order, on every rank. Differentiable. A collective call.

        `parts`: a tensor for each image of `inputs`, with its features as rows. `features`: tensors with the rows of
        all these images.
        """
        ring, own_images = self.seq.ring, self.images[self.seq.ring.rank]
        with ring.refused_by_all():
            if len(parts) != max(1, len(own_images)):
                raise UnsupportedError(
                    f"the tower returned {len(parts)} groups of features for {len(own_images)} images"
                )
        counts = torch.zeros(self.count, dtype=torch.int64, device=ring.device)
        for image, part in zip(own_images, parts, strict=False):
            counts[image] = len(part)
        ring.all_reduce([counts])
        rows = counts.tolist()
        starts = [0, *accumulate(rows)]
        pieces = tuple(
            tuple(StridedRange(starts[image], rows[image]) for image in images if rows[image]) for images in self.images
        )
        layout = _FeatureLayout("images", starts[-1], ring.world_size, (0, starts[-1]), pieces=pieces)
        kept = sum(rows[image] for image in own_images)  # 0 rows of the first image, on a rank without an image
        return [Sequence(ring, layout, None).gather(x[:kept], dim=0) for x in features]


def _refuse_mixing(module: nn.Module) -> None:
    """Raise `UnsupportedError` if the images of a batch change each other's features."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise UnsupportedError(
                f"shard_images: {name} of {type(module).__name__} is a batch normalization in training mode, which "
                "mixes the images of a batch; use its evaluation mode, or prepare the model without shard_images"
            )
