"""Files that cannot be written or read, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Goes around opening, writing and closing `path`, a file of a run that can be continued.

    Raises ValueError, which names the file and says what to do, where the system refuses any of them."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}): make room and continue with --resume; what was finished is "
            f"kept"
        ) from None


def make_folder(path: Path) -> None:
    """Make `path` a folder, and those that it lies in. Raises ValueError where it cannot become one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be made a folder ({error.strerror}): give another --out") from None


@contextmanager
def reading(failed: str) -> Iterator[None]:
    """Goes around what other libraries make of files that may be damaged.

    Raises ValueError, one line that begins with `failed`, for whatever they raise."""
    try:
        yield
    except Exception as error:  # safetensors has a class of its own, tokenizers raises the bare one
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{failed}: {type(error).__name__}: {reason}") from error
