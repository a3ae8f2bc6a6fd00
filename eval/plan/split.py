"""Prefill and decode on separate devices: how many of each, and what speculation, which speeds up decode, changes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Requests/s that one device prefills, and that one device decodes."""

    prefill: float
    decode: float

    def __post_init__(self) -> None:
        if not (0 < self.prefill < math.inf and 0 < self.decode < math.inf):
            raise ValueError(
                f"a device prefills {self.prefill:g} and decodes {self.decode:g} requests/s: both must be positive and "
                f"finite"
            )

    def with_speculation(self, speedup: float) -> Rates:
        """Decode `speedup` times as fast, prefill as before. Raises ValueError for one that is not positive."""
        if not speedup > 0:
            raise ValueError(f"the decode speed-up is {speedup}: give a positive number, 1 for no speculation")
        return Rates(self.prefill, self.decode * speedup)

    @property
    def balanced(self) -> float:
        """Requests/s per device if devices could be split in any proportion: what no split of whole devices exceeds.

        Also what devices that do both in turn reach, if turning costs nothing: 1 / (1 / prefill + 1 / decode)."""
        return 1 / (1 / self.prefill + 1 / self.decode)


@dataclass(frozen=True)
class Split:
    """`prefill` + `decode` devices under `rates`. Every request passes both phases, so the slower one sets the pace.

    Worked example, rates 5.6 and 10: one and one device make min(5.6, 10) = 5.6 requests/s, 2.8 per device; two and one
    make min(11.2, 10) = 10, 3.33 per device."""

    prefill: int
    decode: int
    rates: Rates

    @property
    def devices(self) -> int:
        return self.prefill + self.decode

    @property
    def requests(self) -> float:
        """Requests/s in all."""
        return min(self.prefill * self.rates.prefill, self.decode * self.rates.decode)

    @property
    def requests_per_device(self) -> float:
        return self.requests / self.devices

    @property
    def waiting(self) -> str:
        """The phase whose devices idle part of the time, or "neither"."""
        prefill, decode = self.prefill * self.rates.prefill, self.decode * self.rates.decode
        return "neither" if math.isclose(prefill, decode) else "prefill" if prefill > decode else "decode"


def best_split(rates: Rates, devices: int) -> Split:
    """The split of exactly this many devices with the most requests/s; of equal ones that with fewer prefill devices.

    Requests rise with prefill devices until decode sets the pace, so the best is one of the two whole numbers around
    devices x decode / (prefill + decode). devices: at least 2."""
    balanced = int(devices / (1 + rates.prefill / rates.decode))
    around = {min(max(prefill, 1), devices - 1) for prefill in (balanced, balanced + 1)}
    return max((Split(prefill, devices - prefill, rates) for prefill in sorted(around)), key=lambda s: s.requests)


def plan(rates: Rates, speedup: float, devices: int) -> list[dict[str, float | int | str]]:
    """Best splits of 2 to `devices` devices without and with speculation, a row for each number of devices.

    Raises ValueError for fewer than two devices and for a speed-up that is not positive."""
    if devices < 2:
        raise ValueError(f"{devices} device(s) cannot be split: give at least 2, one for each phase")
    speculative = rates.with_speculation(speedup)
    rows = []
    for count in range(2, devices + 1):
        row: dict[str, float | int | str] = {"devices": count}
        for name, best in {"plain": best_split(rates, count), "speculative": best_split(speculative, count)}.items():
            row |= {
                f"{name}_prefill": best.prefill,
                f"{name}_decode": best.decode,
                f"{name}_requests": best.requests,
                f"{name}_requests_per_device": best.requests_per_device,
                f"{name}_waiting": best.waiting,
            }
        rows.append(row)
    return rows
