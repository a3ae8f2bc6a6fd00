"""A model and drafters of three tokens, so small that joint laws can be listed and 100,000 tokens are cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eval.fidelity.ladder import Ladder
from eval.methods import EncodedPrompt
from specdec.contracts import BaseDrafter, Draft, Draws, Rows, Verifier

# Laws of the next token; row = last token. p > q at two tokens of each row, so that the residual is random.
P = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.1, 0.5], [0.35, 0.35, 0.3]])
Q = torch.tensor([[0.7, 0.1, 0.2], [0.2, 0.5, 0.3], [0.1, 0.3, 0.6]])
CHAIN = (-1, 0)  # parents of the drafted tokens
TREE = (-1, -1, 0, 1)
HIDDEN = 8


def toy_model() -> PreTrainedModel:
    """A Llama whose next-token law is the row of P that its last token names: its only layer adds nothing."""
    V = len(P)
    config = LlamaConfig(
        vocab_size=V, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False, rms_norm_eps=0.0,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(V, HIDDEN))
    # The norm makes a one-hot state's entry sqrt(HIDDEN).
    model.lm_head.weight.copy_(torch.nn.functional.pad(P.log().T, (0, HIDDEN - V)) / HIDDEN**0.5)
    return model


@dataclass
class TableDrafter(BaseDrafter):
    """Drafts from Q, a chain or a tree of the given parents, siblings without replacement.

    says: the q that the verifier is told, "true" or "unmodified", the bug: without the earlier siblings left out."""

    parents: tuple[int, ...] = CHAIN
    says: str = "true"
    name = "table"

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        last = torch.tensor([int(tokens[-1]) for tokens in rows.tokens])
        nodes, depths, told, logz = [last], [0], [], []
        for j, parent in enumerate(self.parents):
            logits = Q[nodes[parent + 1]].log()
            left = logits
            for sibling in range(j):
                if self.parents[sibling] == parent:
                    left = left.scatter(1, nodes[sibling + 1][:, None], -torch.inf)
            depth = depths[parent + 1]
            token, q_logits, q_logz = draws.sample(left, depth, index=depths[1:].count(depth + 1))
            if self.says == "unmodified":
                q_logits, q_logz = logits, logits.logsumexp(-1)
            nodes.append(token), depths.append(depth + 1), told.append(q_logits), logz.append(q_logz)
        lengths = [min(len(self.parents), limit) for limit in budget]
        tree = None if self.parents == CHAIN else torch.tensor(self.parents).expand(len(last), -1).clone()
        return Draft(_stack(nodes[1:]), lengths, tree, q_logits=_stack(told), q_logz=_stack(logz))


def toy_ladder(drafter: TableDrafter, verifier: type[Verifier], seed: int) -> Ladder:
    """A ladder of the toy model with one prompt. Its requests are made by `eval.fidelity.joint`."""
    return Ladder(
        model=toy_model(),
        prompts=[EncodedPrompt(0, "toy", "", [0])],
        drafter=drafter,
        verifier=verifier,
        draft_length=len(drafter.parents),
        batch_size=1,
        max_new_tokens=1,
        sampling={"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        stops=frozenset(),
        pad=0,
        seed=seed,
    )


def _stack(values: list[Tensor]) -> Tensor:
    return torch.stack(values, dim=1)
