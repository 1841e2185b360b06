"""Which binding to NCCL a ring uses."""

from __future__ import annotations

from ringattn.transport.nccl.binding import Binding
from ringattn.transport.nccl.options import NcclOptions


def open_binding(options: NcclOptions) -> Binding:
    """The binding that `options` name. Raises `UnsupportedError` when the library or cupy is missing or unfit."""
    if options.binding == "cupy":
        from ringattn.transport.nccl.cupy_binding import CupyBinding

        return CupyBinding(options.library)
    from ringattn.transport.nccl.ctypes_binding import CtypesBinding
    from ringattn.transport.nccl.library import load_library

    return CtypesBinding(load_library(options.library))
