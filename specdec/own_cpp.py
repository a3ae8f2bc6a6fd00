"""C++ functions of specdec's own, compiled on the machine that runs them."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

from torch._inductor.codecache import CppCodeCache
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

logger = logging.getLogger("specdec")

COMMON = Path(__file__).with_name("cpu_vectors.h")
FLAGS = ("-march=native", "-ffp-contract=fast")


def loaded(source: Path, instead: str) -> ctypes.CDLL | None:
    """The library of a source file, which torch keeps on disk; None where it cannot be compiled, which is logged with
    what happens `instead`."""
    try:
        return CppCodeCache.load(COMMON.read_text() + source.read_text(), extra_flags=FLAGS)
    except (CppCompileError, InvalidCxxCompiler) as error:
        reason = str(error).strip().partition("\n")[0]
        logger.warning("%s, as specdec's C++ cannot be compiled here: %s", instead, reason)
        return None
