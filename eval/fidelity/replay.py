"""Replays a kept step: its logged p and q, and the uniforms that its address names, through a float64 rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eval.fidelity.recorder import KeptStep
from eval.fidelity.reference import RULES, Case
from specdec.streams import Purpose, gumbel, uniforms, words

TOLERANCE = 1e-4  # violations below are the rounding of the engine's float32
Q_TOLERANCE = 1e-3  # a q whose log-normaliser is off by more does not sum to 1


@dataclass(frozen=True)
class Replay:
    """violation: by how much the verdict breaks the rule's conditions; 1 at least where it emitted a token of p = 0."""

    row: int
    step: int
    rule: str
    violation: float

    @property
    def failed(self) -> bool:
        return self.violation > TOLERANCE


def replay(kept: KeptStep, seed: int, request: int, prompt_tokens: int) -> Replay | None:
    """The step's verdict held to its rule; None for a rule without a reference (a third party's, or a lossy one).

    seed, request: what addresses the streams. prompt_tokens: real tokens of the prompt.
    Raises ValueError that names row and step where the drafter's q is not a distribution."""
    rule = RULES.get(kept.rule)
    if rule is None:
        return None
    case = _case(kept, seed, request, kept.emitted + prompt_tokens)
    violation = max(rule(case), default=0.0)
    if any(case.p[node, token] == 0 for node, token in kept.outcome):
        violation = max(1.0, violation)
    return Replay(kept.row, kept.step, kept.rule, float(violation))


def choice_scores(kept: KeptStep, node: int, seed: int, request: int, position: int) -> torch.Tensor:
    """[V] float64 scores whose arg-max the token after `node` is: with the noise of its position under coupled.

    position: real tokens before it."""
    scores = kept.scores[node].double()
    if kept.rule != "coupled":
        return scores
    noise = words(seed, *(torch.tensor([x]) for x in (request, position)), Purpose.COUPLED, 0, len(scores))
    return scores.log_softmax(-1) + gumbel(noise, torch.float64)[0]


def _case(kept: KeptStep, seed: int, request: int, root_position: int) -> Case:
    address = (np.array([request]), np.array([kept.step]))
    return Case(
        tokens=kept.tokens,
        parents=kept.parents,
        p=kept.scores.double().softmax(-1).numpy(),
        q=_q(kept, request),
        u=uniforms(seed, *address, Purpose.ACCEPT, 0, max(1, len(kept.tokens)))[0],
        u_pick=uniforms(seed, *address, Purpose.PICK, 0, 1)[0, 0],
        path=kept.path,
        next_token=kept.next_token,
        choice=_choices(kept, seed, request, root_position) if kept.rule in ("greedy", "coupled") else None,
    )


def _q(kept: KeptStep, request: int) -> np.ndarray:
    if kept.q_logits is None:
        one_hot = np.zeros((len(kept.tokens), kept.scores.shape[1]))
        one_hot[range(len(kept.tokens)), kept.tokens] = 1
        return one_hot
    log_q = kept.q_logits.double()
    off = (log_q.logsumexp(-1) - kept.q_logz).abs()
    if not (off < Q_TOLERANCE).all():
        j = int(torch.where(off < Q_TOLERANCE, -1, off.nan_to_num(torch.inf)).argmax())
        raise ValueError(
            f"row {kept.row} (request {request}), step {kept.step}: the drafter's q of drafted token {j} sums to "
            f"{torch.exp(log_q[j].logsumexp(-1) - kept.q_logz[j]):.4g}, not 1: hand over the distribution that the "
            f"token was drawn from, with its log-normaliser"
        )
    return log_q.softmax(-1).numpy()


def _choices(kept: KeptStep, seed: int, request: int, root_position: int) -> np.ndarray:
    """[N + 1, V] `choice_scores` of every node."""
    depths = [0]
    for parent in kept.parents:
        depths.append(depths[parent + 1] + 1)
    rows = [choice_scores(kept, node, seed, request, root_position + depth) for node, depth in enumerate(depths)]
    return torch.stack(rows).numpy()
