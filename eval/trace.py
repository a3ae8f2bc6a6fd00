"""What happened in every step of a few chosen requests: drafted tokens with their p and q, and what became of them.

Traced requests are run again by themselves, untimed: only so does nothing of size V have to be kept, or read, while
the grid is timed. The random numbers are those of the grid's requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import specdec
from eval.grid import Speculation
from eval.methods import EncodedPrompt, Request, left_padded
from eval.settings import Settings
from specdec.call_checks import fitting_verifier
from specdec.contracts import Draft, Draws, Scores, Verdict, Verifier
from specdec.models import LoadedModel
from specdec.registry import VERIFIERS, known
from verifiers.chains import drafted_probs
from verifiers.paths import parent_nodes


class TracingVerifier:
    """`verifier`, keeping the last step's draft, p and verdict for as long as the callback needs them.

    It decides as `verifier` does: it stands beside the rule and hands everything on unchanged."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.lossless, self.draws = verifier, verifier.lossless, verifier.draws
        self.last: tuple[Draft, Scores, Verdict] | None = None

    @property
    def name(self) -> str:
        return self.verifier.name

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        verdict = self.verifier.verify(draft, p, draws)
        self.last = draft, p, verdict
        return verdict


@dataclass(frozen=True)
class Tracer:
    """`on_commit` turns each step of the one row of a call into an entry of `steps`.

    A step holds `drafted`, a list of {token, text, p, q, accept_prob, parent, accepted}, and `next`, {token, text, p},
    the token that the target put after the accepted ones; `emitted` counts what was left after the cut at a stop. p is
    the target's processed probability of the token after its prefix, q that with which it was drafted (1 where the
    draft was deterministic), accept_prob None where the rule has none. parent: drafted token it hangs off, -1 = none.
    """

    verifier: TracingVerifier
    tokenizer: PreTrainedTokenizerBase
    steps: list[dict[str, Any]]

    def on_commit(self, row: int, tokens: Sequence[int], n_drafted: int) -> None:
        draft, p, verdict = self.verifier.last
        count = draft.lengths[0]
        accepted = verdict.path[0, : int(verdict.n_accepted[0])].tolist()
        end = torch.tensor(accepted[-1] + 1 if accepted else 0)
        token = int(verdict.next_token[0])
        self.steps.append(
            {
                "drafted": self._drafted(draft, p, verdict, accepted) if count else [],
                "next": {"token": token, "text": self._text(token), "p": float(_p(p, end, torch.tensor(token)))},
                "emitted": len(tokens),
            }
        )

    def _drafted(self, draft: Draft, p: Scores, verdict: Verdict, accepted: Sequence[int]) -> list[dict[str, Any]]:
        count = draft.lengths[0]
        ids, places = draft.tokens[0, :count], parent_nodes(draft)[0, :count]
        columns = zip(
            ids.tolist(),
            _p(p, places, ids).tolist(),
            drafted_probs(draft, draft.tokens, p.logits.shape[-1])[0, :count].tolist(),
            verdict.accept_prob[0, :count].tolist(),
            (places - 1).tolist(),
            strict=True,
        )
        return [
            {
                "token": token,
                "text": self._text(token),
                "p": p_of,
                "q": q_of,
                "accept_prob": chance if chance == chance else None,
                "parent": parent,
                "accepted": place in accepted,
            }
            for place, (token, p_of, q_of, chance, parent) in enumerate(columns)
        ]

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])


def trace(
    temperature: float,
    loaded: LoadedModel,
    drafted: Sequence[Speculation],
    prompts: Sequence[EncodedPrompt],
    settings: Settings,
) -> list[dict[str, Any]]:
    """The steps of `prompts` with every drafter and rule at one temperature, each request alone."""
    found = []
    for speculation in drafted:
        for name in settings.verifiers_at(temperature):
            rule = TracingVerifier(fitting_verifier(known(VERIFIERS, name, "verifier"), temperature > 0))
            for prompt in prompts:
                steps, error = _steps(prompt, temperature, loaded, speculation, rule, settings)
                found.append(
                    {
                        "id": prompt.id,
                        "method": speculation.text,
                        "verifier": rule.name,
                        "temperature": temperature,
                        "dtype": str(loaded.model.dtype).removeprefix("torch."),
                        "steps": steps,
                        "error": error,
                    }
                )
    return found


def _steps(
    prompt: EncodedPrompt,
    temperature: float,
    loaded: LoadedModel,
    speculation: Speculation,
    rule: TracingVerifier,
    settings: Settings,
) -> tuple[list[dict[str, Any]], str | None]:
    """One request's steps, and what ended them early, if anything did: a failed drafter has a failed row already."""
    request = Request.of(loaded.model, settings.sampling(temperature), settings.seed)
    input_ids, mask = left_padded([prompt.tokens], request.pad, loaded.model.device)
    tracer = Tracer(rule, loaded.tokenizer, [])
    try:
        specdec.generate(
            loaded.model,
            input_ids,
            attention_mask=mask,
            drafter=speculation.drafter,
            draft_length=speculation.length,
            verifier=rule,
            seed=settings.seed,
            invariant=settings.invariant,
            compile=settings.compile,
            request_ids=[prompt.number],
            on_commit=tracer.on_commit,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=request.pad,
            **request.sampling,
        )
    except Exception as error:  # as in eval.runner.execute
        return tracer.steps, f"{type(error).__name__}: {error}"
    return tracer.steps, None


def _p(p: Scores, nodes: Tensor, tokens: Tensor) -> Tensor:
    """p of `tokens` at `nodes` of the only row, in float32 also where a greedy run keeps the model's own dtype."""
    logits = p.logits[p.index[0, nodes.to(p.index.device)]].float()
    return logits.softmax(-1).gather(-1, tokens.to(logits.device)[..., None])[..., 0]
