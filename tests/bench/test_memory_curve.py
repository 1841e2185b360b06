"""The picture of the memory curve shows every method, also where two need the same."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from ringattn.bench.memory import draw_curve


@pytest.mark.parametrize("alike", [2, 3])
def test_methods_that_need_the_same_are_all_seen(alike: int, tmp_path: Path) -> None:
    methods = [f"method {number}" for number in range(alike)] + ["more"]
    factors = {method: 1 + 0.02 * (method == methods[1]) + 7 * (method == "more") for method in methods}
    records = [
        {"length_tokens": length, "method": method, "storages_bytes": length * 2**12 * factors[method]}
        for length in (512, 4096)
        for method in methods
    ]
    path = tmp_path / "memory.png"
    draw_curve(methods, records, lambda method, length: int(length * 2**12 * factors[method]), "", path)
    image = matplotlib.image.imread(path)[:, :, :3]
    middle = image[:, image.shape[1] // 3 : 2 * image.shape[1] // 3]  # lines alone: no points, no legend
    seen = [int((np.abs(middle - to_rgb(f"C{number}")).max(2) < 0.08).sum()) for number in range(alike + 1)]
    assert min(seen[:alike]) > 0.5 * max(seen[:alike]) > 50
    assert seen[alike] > max(seen[:alike])  # alone on its line, without dashes
