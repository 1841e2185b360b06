"""What one call of a fused kernel on a rectangle allocates, counted before it runs.

Guarantees: on the CPU, every byte that torch's allocator hands out inside the call, its kernels' own buffers included.
The buffers are those of torch's aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`cpu_flash_attention`,
`cpu_flash_attention_backward`, `flash_attention_kernel_impl`), float32 and float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ringattn.engine.base import Sizes
from ringattn.engine.rectangles import HeadGroup, Rectangle

# Keys of one block of scores in torch's kernel (kvSplitSize).
KEY_BLOCK = 512


def query_block(q_rows: int) -> int:
    """Query rows that a thread of the CPU kernel works on at once."""
    # torch's own steps: qSplitSize of its flash_attention kernels.
    return min(q_rows, 256 if q_rows >= 768 else 64 if q_rows >= 192 else 32)


def kernel_bytes(q_rows: int, k_rows: int, dim: int, item_bytes: int, backward: bool) -> int:
    """Buffers inside one call of the CPU kernel.

    Forward of each thread a block of scores, two numbers a row, a block of output. Backward of each thread a block of
    scores and of their gradient, and of all together one number a row.
    """
    block = query_block(q_rows)
    scores = block * min(k_rows, KEY_BLOCK)
    threads = torch.get_num_threads()
    # Scores (block, keys), row maximum and sum (block, 2), output (block, dim); backward scores and their gradient.
    elements = threads * 2 * scores + block if backward else threads * (scores + 2 * block + block * dim)
    return elements * item_bytes


class Strips(NamedTuple):
    """A rectangle for some heads of a call with `sizes`; the kernel works on `width` columns in `dtype`.

    `dlse`: backward with a gradient of lse, which is one more column of dout and v. `scaled`: q is multiplied first.
    """

    rectangle: Rectangle
    heads: HeadGroup
    sizes: Sizes
    width: int
    dtype: torch.dtype
    dlse: bool = False
    scaled: bool = False

    def forward_bytes(self, begins: bool = False) -> int:
        """The most at once: copies of operands with the kernel's call, with its order restored, or with the merge.

        `begins`: what is made becomes the state, without a merge.
        """
        sizes, item = self.sizes, self.dtype.itemsize
        # One number for each query row and head: the size of an lse.
        rows = self._q(1)
        # The op's output, of padded columns, with its lse.
        result = self._q(self.width) + rows
        inside = kernel_bytes(self.rectangle.q_rows.count, self.rectangle.k_rows.count, self.width, item, False)
        # A flip along the rows is a copy without the padding.
        restored = self._q(sizes.value_dim) if self.rectangle.reversed else 0
        # Of `softmax_state.merge_`: the merged lse twice and two weights; a first one is only put in order.
        merging = 4 * rows if not begins else rows if self.rectangle.reversed else 0
        # While merging, a reversed result has been replaced by its copy in order, but its lse is still held.
        kept = restored + rows if restored else result
        operands = (self._q(sizes.head_dim), self._k(sizes.head_dim), self._k(sizes.value_dim))
        padded = (self._q(self.width), self._k(self.width), self._k(self.width))
        widths = (sizes.head_dim, sizes.head_dim, sizes.value_dim)
        # Three moments, one after the other: the call, the reordering, the merge.
        after = max(result + inside, result + restored, kept + merging)
        return self._copied(operands, padded, widths, after, made=(self.scaled, False, False))

    def backward_bytes(self) -> int:
        """The same of the gradient, which is added where it belongs without a merge."""
        sizes, rectangle = self.sizes, self.rectangle
        # dq, dk and dv of the op, of padded columns.
        grads = self._q(self.width) + 2 * self._k(self.width)
        inside = kernel_bytes(rectangle.q_rows.count, rectangle.k_rows.count, self.width, self.dtype.itemsize, True)
        if not self._dout_is_contiguous():
            inside += self._q(self.width)  # the kernel's `grad_out.contiguous()`
        # Inside the call the flipped lse is held; after it the gradients are flipped one at a time.
        if rectangle.reversed:
            inside = max(inside + self._q(1), self._q(sizes.head_dim), self._k(max(sizes.head_dim, sizes.value_dim)))
        # A gradient of lse is one more column of dout and of v.
        value_dim = sizes.value_dim + self.dlse
        dims = (value_dim, sizes.head_dim, sizes.head_dim, value_dim, sizes.value_dim)
        counts = (self._q, self._q, self._k, self._k, self._q)  # dout, q, k, v, out
        operands = tuple(count(dim) for count, dim in zip(counts, dims, strict=True))
        padded = tuple(count(self.width) for count in counts)
        # In the order of `dims`; dout and v are new tensors with the column of lse.
        made = (self.dlse, self.scaled, False, self.dlse, False)
        return self._copied(operands, padded, dims, grads + inside, made)

    def _copied(
        self,
        operands: tuple[int, ...],
        padded: tuple[int, ...],
        widths: tuple[int, ...],
        after: int,
        made: tuple[bool, ...],
    ) -> int:
        """The most at once while operands are converted, then padded, and then with what comes `after`.

        `made`: which operands are new in any case.
        """
        # Converting or reversing copies every operand; else only those that are made anew.
        every = self._converted or self.rectangle.reversed
        first = [nbytes if every or new else 0 for nbytes, new in zip(operands, made, strict=True)]
        narrow = [width < self.width for width in widths]
        padding = sum(nbytes for nbytes, pads in zip(padded, narrow, strict=True) if pads)
        # Padding replaces the copy before it; unpadded copies stay until the call has returned.
        left = sum(nbytes for nbytes, pads in zip(first, narrow, strict=True) if not pads)
        return max(sum(first) + padding, left + padding + after)

    @property
    def _converted(self) -> bool:
        return self.sizes.dtype != self.dtype

    def _dout_is_contiguous(self) -> bool:
        """As (batch, rows, heads, dim); copies of operands are, and padded ones have rows outermost."""
        if self.dlse or self.sizes.value_dim < self.width:
            return self.sizes.batch == 1 or self.rectangle.q_rows.count == 1
        if self._converted or self.rectangle.reversed:
            return True
        rows, heads = self.rectangle.q_rows, self.heads.q_heads
        # A view of rows and heads is contiguous where it leaves out none between two that it has.
        whole_rows = rows.stride == 1 and (self.sizes.batch == 1 or rows.count == self.sizes.rows)
        return whole_rows and (heads.count == self.sizes.heads or self.sizes.batch * rows.count == 1)

    def _q(self, dim: int) -> int:
        """Bytes of `dim` numbers for each query row and head."""
        return math.prod((self.rectangle.q_rows.count, self.sizes.batch, self.heads.q_heads.count, dim)) * (
            self.dtype.itemsize
        )

    def _k(self, dim: int) -> int:
        """Bytes of `dim` numbers for each key row and head."""
        return math.prod((self.rectangle.k_rows.count, self.sizes.batch, self.heads.kv_heads.count, dim)) * (
            self.dtype.itemsize
        )
