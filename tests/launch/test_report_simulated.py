"""The section of a report's page that shows simulations."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringattn.errors import InputError
from ringattn.launch.pictures.simulate import main
from ringattn.launch.report.points import read_sweep
from ringattn.launch.report.report import page_of, simulated_panel
from tests.launch.sweep_records import folder, strong


def test_a_simulation_beside_a_sweep_has_a_section_of_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = read_sweep(folder(tmp_path, strong()))
    assert "<h2>Simulated</h2>" not in page_of(sweep, print)
    words = ["ranks=1,2,4", "tokens=4Ki", "scaling=both", "heads=4", "kv_heads=2"]
    assert main([*words, f"json={sweep.folder / 'simulated-h100.json'}"]) == 0
    page = page_of(sweep, print)
    assert "<h2>Simulated</h2>" in page and "ring, 4,096 tokens, H100 SXM" in page
    panel = simulated_panel(sweep.folder / "simulated-h100.json")
    assert [name for name, _, _ in panel["legend"]] == ["strong scaling", "weak scaling"]
    assert len(panel["charts"]) == 3 and all(chart.svg in page for chart in panel["charts"])
    capsys.readouterr()


def test_a_file_that_is_no_simulation_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{", '{"curves": {}}'):
        (tmp_path / "simulated.json").write_text(text)
        with pytest.raises(InputError, match=r"simulated\.json is not a simulation of this version"):
            simulated_panel(tmp_path / "simulated.json")
