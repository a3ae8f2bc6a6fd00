"""specdec: speculative decoding for Hugging Face models, exact by construction and measured.

`specdec.generate(model, ...)` and `model.generate(..., custom_generate=specdec.speculate(...))` decode with a drafter;
`BaseDrafter` and `Draft` are what a drafter of one's own is made of. The console script `specdec` does the rest.
"""

from specdec.batching import Finished, stream_batch
from specdec.contracts import BaseDrafter, Draft, Drafter, Draws, Rows, Scores, Verdict, Verifier
from specdec.generation import generate
from specdec.patching import patch
from specdec.speculation import speculate
from specdec.stats import Stats
from specdec.target import Target

__version__ = "0.1.0"
__all__ = [
    "BaseDrafter",
    "Draft",
    "Drafter",
    "Draws",
    "Finished",
    "Rows",
    "Scores",
    "Stats",
    "Target",
    "Verdict",
    "Verifier",
    "generate",
    "patch",
    "speculate",
    "stream_batch",
]
