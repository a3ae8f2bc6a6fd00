"""Prints, at the end of the run, which broken controls the tests caught."""

import pytest

CAUGHT: list[tuple[str, str]] = []


@pytest.fixture
def controls():
    """Call with (control, how it was caught) once a test has caught a broken control."""
    return lambda control, how: CAUGHT.append((control, how))


def pytest_terminal_summary(terminalreporter):
    if CAUGHT:
        terminalreporter.section("broken controls caught")
        width = max(len(control) for control, _ in CAUGHT)
        for control, how in sorted(CAUGHT):
            terminalreporter.write_line(f"{control:<{width}}  {how}")
