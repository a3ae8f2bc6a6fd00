"""Closed forms of speculative decoding's length and speed, as pure functions of numbers that were measured or assumed.

Costs are in seconds, or in any unit: only ratios come out. c = time of one drafted token / time of one target step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def expected_length(acceptances: Sequence[float]) -> float:
    """Expected tokens of a step, the correction or bonus token included: 1 + a_1 + a_1 a_2 + ...

    acceptances: probability that the token at depth 1, 2, ... is accepted, given that its depth was reached.
    Raises ValueError for one outside [0, 1]. expected_length([0.5, 0.5]) = 1 + 0.5 + 0.25 = 1.75."""
    for acceptance in acceptances:
        _check_probability("an acceptance", acceptance)
    return 1 + sum(accumulate(acceptances, mul))


def leviathan_speedup(alpha: float, gamma: int, c: float) -> float:
    """(1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1)): Leviathan et al. 2211.17192, theorem 3.8.

    It holds where every drafted token is accepted with the same probability alpha, independently, and a forward over
    gamma + 1 tokens costs what one over a single token does. Raises ValueError for arguments out of range.
    leviathan_speedup(0.8, 4, 0.1) = 3.3616 / 1.4 = 2.4011."""
    _check_probability("alpha", alpha)
    if gamma < 0 or c < 0:
        raise ValueError(f"gamma is {gamma} and c {c}: neither may be negative")
    return expected_length([alpha] * gamma) / (gamma * c + 1)


def ideal_speedup(AL: float, t_plain: float, t_draft: float, t_verify: float, t_sample: float) -> float:
    """AL x T_plain / (T_draft + T_verify + T_sample), all at the same batch size: what a loop without overhead reaches.

    AL:      mean accepted length, the correction or bonus token included.
    t_plain: a step of plain decoding; the others are the parts of a speculative step: drafting, the target's forward
             over the draft, and processors and verification.
    Raises ValueError for AL below 1 and for times that are not positive in sum."""
    _check_length(AL)
    _check_times(t_plain, t_draft, t_verify, t_sample)
    return AL * t_plain / (t_draft + t_verify + t_sample)


def oracle_speedup(
    AL: float, drafted: float, t_plain: float, t_draft: float, t_verify: float, t_sample: float
) -> float:
    """The ideal speed-up of a drafter that knows where it would be rejected, and drafts only what will be accepted.

    A step's cost is taken as linear between the plain one, with nothing drafted, and the speculative one, with
    `drafted` tokens per row; the oracle drafts AL - 1. So ideal / oracle is what rejected drafts waste: 1 where nothing
    is rejected or where a longer draft costs no time.

    drafted: mean drafted tokens per row and step, at least AL - 1. The other arguments are `ideal_speedup`'s.
    Raises ValueError as `ideal_speedup` does, and for fewer drafted tokens than accepted ones."""
    _check_length(AL)
    _check_times(t_plain, t_draft, t_verify, t_sample)
    if drafted <= 0 or drafted < (AL - 1) * (1 - 1e-9):  # the two may be equal, and means are rounded
        raise ValueError(
            f"{drafted} drafted tokens per step cannot give an accepted length of {AL}: it is at most 1 more"
        )
    t_wasteful = t_draft + t_verify + t_sample
    return AL * t_plain / (t_plain + (AL - 1) / drafted * (t_wasteful - t_plain))


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}: a probability is between 0 and 1")


def _check_length(AL: float) -> None:
    if not AL >= 1:
        raise ValueError(f"AL is {AL}: a step emits at least one token, so it is 1 or more")


def _check_times(t_plain: float, *parts: float) -> None:
    if not t_plain > 0 or min(parts) < 0 or not sum(parts) > 0:
        raise ValueError(
            f"times are {t_plain} (plain) and {list(parts)} (draft, verify, sample): give the plain step's and one of "
            f"the others as positive numbers, and none as a negative one"
        )
