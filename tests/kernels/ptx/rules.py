"""Which rules of PTX a launch must obey: all of them, or those that Triton obeys in kernels without Gluon."""

from __future__ import annotations

from typing import NamedTuple


class Rules(NamedTuple):
    """Rules that may be relaxed.

    `fenced_copies`: wgmma sees a copy by `cp.async` only after a proxy fence. `fenced_registers`: `wgmma.fence` follows
    the last access to the registers of a product. `fenced_mbarriers`: TMA sees a new mbarrier only after a proxy fence.
    `any_elected`: `elect.sync` may choose any lane, not only lane 0. `waited_loads`: a register is read only after the
    load of tensor memory that writes it has been waited for.
    """

    fenced_copies: bool = True
    fenced_registers: bool = True
    fenced_mbarriers: bool = True
    any_elected: bool = True
    waited_loads: bool = True


STRICT = Rules()
OF_TRITON = Rules(False, False, False, False, False)
"""The rules that Triton's own code obeys. `docs/internals/ptx-interpreter.md` says why the others do no harm."""
OF_TENSOR_MEMORY = STRICT._replace(waited_loads=False)
"""The rules that the Gluon kernels for sm_100 obey: LLVM moves registers before the wait for their load."""
