"""A model with round numbers and a small evaluation, for tests whose values can be checked by hand."""

from eval.acceptance import acceptance, by_position
from eval.plan.shape import AttentionLayers, ModelShape
from tests.eval.samples import record

NO_ATTENTION = (AttentionLayers(count=10, kv_elements=0, flops=0, window=None),)


def dense(attention=NO_ATTENTION) -> ModelShape:
    """1e9 weights of 2 bytes in 10 layers, vocabulary 1,000."""
    return ModelShape("dense", 10, 10**9, 0, 1, 1, attention, 10**9, 1000, 2)


def summary_row(method: str, temperature: float, steps=((2, 2), (2, 0), (0, 0)), accept_prob=None) -> dict:
    """What summary.json says of a method whose only request took `steps` (drafted, accepted)."""
    drafted, accepted = (list(part) for part in zip(*steps, strict=True))
    request = record(method, drafted=drafted, accepted=accepted, accept_prob=accept_prob)
    numbers = acceptance([request]) | {"acceptance_by_position": by_position([request])}
    return {"method": method, "drafter": method, "temperature": temperature, "error": None} | numbers
