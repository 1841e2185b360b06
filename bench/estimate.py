"""How fast the attention kernels would be, estimated from their machine code without a GPU.

`python -m ringattn.bench.estimate [dims=128,64] [archs=90] [results=FOLDER]` compiles our kernels and a plain one,
counts the instructions of their inner loops, lets a model of a multiprocessor run them (`cycles.py`), and compares with
what was published. The model is fitted to two published kernels and checked on others (`estimate_published.json`); its
errors stand in the output and are the estimates' too. For sm_80 and sm_100 there is no fit: bounds by pipe alone.
Guarantees: estimates are of the inner loop on long sequences; not of launches, of a block's begin and end, of memory,
nor of work that is uneven between multiprocessors. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringattn.bench.estimate_kernels import Kernel, estimated, fitted, read_published


@dataclass(frozen=True)
class EstimateOptions:
    """`archs`: 90 has a fitted model; others are only counted and bounded."""

    dims: tuple[int, ...] = (128, 64)
    archs: tuple[int, ...] = (90,)
    results: str = "bench/results/cpu"


def main(words: Sequence[str]) -> dict[str, Any]:
    """Compile, print, keep; returns what is kept."""
    print("estimate: compiling the attention kernels, up to 10 s each", flush=True)
    import triton

    from ringattn.bench import report
    from ringattn.bench.estimate_launches import launches
    from ringattn.bench.estimate_tables import tables
    from ringattn.bench.options import parse

    options = parse(EstimateOptions(), words)
    found: dict[int, list[Kernel]] = {}
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for arch in options.archs:
            for launch in launches(arch, options.dims):
                one = estimated(launch, arch)
                found.setdefault(arch, []).append(one)
                print(
                    f"sm_{arch} d={one.dim} {one.form} {one.kernel}: {one.counts[0]['all']} instructions a pass, "
                    f"{one.per(0):.0f} cycles for 128 x 128 pairs", flush=True,
                )  # fmt: skip
    published = read_published()
    data = {
        "triton": triton.__version__,
        "kernels": {str(arch): [one._asdict() for one in kernels] for arch, kernels in found.items()},
        "published": published,
    }
    report.finish("estimate", options, tables(fitted(published), found, published), data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
