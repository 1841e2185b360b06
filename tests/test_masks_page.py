"""The page of masks: its code runs alone, and finds what the dense reference finds."""

from tests.doc_code import run_page


def test_the_page_runs() -> None:
    assert run_page("masks.md")["wanted"].shape == (1, 1001, 4, 16)
