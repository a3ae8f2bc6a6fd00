"""Multi-token prediction in the style of DeepSeek-V3 (2412.19437, section 2.2): a decoder layer of the target's kind
that reads the target's state and the next token's embedding, and predicts one token further.

With the target's state h_t at token t, the chain of t starts with stage input M [norm(emb(x_{t+1})); norm(h_t)] and
predicts x_{t+2}; each further depth puts the next token's embedding and the stage's own output in their places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from heads.projection import Projection, head_rows
from heads.saved import SavedHead
from heads.submodel import layers_of, submodel
from specdec.compat import cache_argument

State = Literal["post_norm", "pre_norm"]

OUTPUTS = {  # what Hugging Face's layers call the projections that end their attention and feed-forward branches
    "o_proj", "down_proj", "down_proj_bias", "out_proj", "c_proj", "dense", "dense_4h_to_h", "fc2",
}  # fmt: skip


@dataclass(frozen=True)
class MTPConfig:
    """layers: 1 = one stage, applied again for every depth (FastMTP 2509.18362); K = a stage of its own for each of K
        depths (DeepSeek-V3), which is also the most tokens that can be drafted.
    hidden_contract: which state of the target is read.   recycled: which state of a stage goes on to the next depth.
    concat: the order in which the two halves enter M.
    zero_first_embedding: the token embedding at position 0 is zero, as some published checkpoints were trained.
    draft_vocab_size: number of ids that can be proposed, None = all.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None = None
    hidden_contract: State = "post_norm"
    recycled: State = "post_norm"
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"
    zero_first_embedding: bool = False

    def __post_init__(self):
        for name in ("layers", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"an MTP head needs {name} of at least 1, not {getattr(self, name)}")
        states = ("post_norm", "pre_norm")
        choices = {"hidden_contract": states, "recycled": states, "concat": ("embedding_first", "hidden_first")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give {' or '.join(known)}")


class MTPStage(nn.Module):
    """enorm, hnorm, fc (M) and one decoder layer with its final norm, started from the target's last layer.

    M starts by handing the state on, and what the layer adds to it (`OUTPUTS`) starts at zero, so that a new stage
    changes the target's state little, as new Medusa heads do. The last layer as it is would drown it: its sums are as
    large as the residual stream that it was trained on, 30 times the state after a norm in SmolLM2-135M, where a head
    that started so was right at depth 1 in 25% of the places after 250 steps, and one that started from zero (in that
    trial with a constant final norm too) in 32%.

    `block` is the whole of it as a causal LM of the target's class, which the engine runs like any other model: its
    layer and norm are this module's, its embedding and output head the target's (cut to the draft vocabulary).
    """

    def __init__(self, config: MTPConfig, model: PreTrainedModel, draft_ids: Tensor | None):
        super().__init__()
        self.config = config
        D, weight = config.hidden_size, model.get_output_embeddings().weight
        at = {"device": weight.device, "dtype": weight.dtype}
        eps = getattr(model.config.get_text_config(decoder=True), "rms_norm_eps", 1e-6)
        self.enorm, self.hnorm = (nn.RMSNorm(D, eps=eps, **at) for _ in range(2))
        self.fc = nn.Linear(2 * D, D, bias=False, **at)
        halves = [torch.zeros(D, D, **at), torch.eye(D, **at)]
        self.fc.weight.data.copy_(torch.cat(halves if config.concat == "embedding_first" else halves[::-1], dim=1))
        block = submodel(model, [-1], share=False)
        if draft_ids is not None:
            block.set_output_embeddings(head_rows(model.get_output_embeddings(), draft_ids))
        object.__setattr__(self, "block", block)  # not registered: most of its parameters are the target's
        self.layer = layers_of(block)[0]
        for name, parameter in self.layer.named_parameters():
            if OUTPUTS & set(name.split(".")):
                nn.init.zeros_(parameter)
        self.final = nn.ModuleDict(
            {
                name: child
                for name, child in block.get_decoder().named_children()
                if not isinstance(child, nn.Embedding | nn.ModuleList) and any(True for _ in child.parameters())
            }
        )
        self.requires_grad_(True)

    def inputs(self, embeds: Tensor, state: Tensor, positions: Tensor) -> Tensor:
        """M [norm(emb); norm(h)] [..., D], the block's input. embeds, state: [..., D]; positions [...] of the slots."""
        embeds, state = embeds.to(self.fc.weight.dtype), state.to(self.fc.weight.dtype)
        if self.config.zero_first_embedding:
            embeds = embeds.masked_fill((positions == 0)[..., None], 0)
        halves = [self.enorm(embeds), self.hnorm(state)]
        return self.fc(torch.cat(halves if self.config.concat == "embedding_first" else halves[::-1], dim=-1))


class MTPHead(SavedHead):
    """`config.layers` stages on a target.

    model:     the target, for its embedding, its output head and the kind of its layers.
    draft_ids: [Vd] int64 sorted target ids, for a reduced vocabulary.
    """

    kind, config_class = "mtp", MTPConfig

    def __init__(self, config: MTPConfig, model: PreTrainedModel, draft_ids: Tensor | None = None):
        super().__init__(config, model, draft_ids)
        self.stages = nn.ModuleList(MTPStage(config, model, self.draft_ids) for _ in range(config.layers))
        self.project = Projection(model, self.draft_ids)
        object.__setattr__(self, "embed", model.get_input_embeddings())  # the target's: neither trained nor saved

    @property
    def max_depth(self) -> int | None:
        """Most tokens that can be drafted, None = any number."""
        return None if self.config.layers == 1 else self.config.layers

    def stage(self, depth: int) -> MTPStage:
        """The stage of `depth`, counted from 1."""
        return self.stages[0 if self.config.layers == 1 else depth - 1]

    def forward(self, tokens: Tensor, hidden: Tensor, depths: int) -> list[Tensor]:
        """Every chain of a batch of texts at once, as training needs it and as drafting would compute it.

        tokens: [B, T], right-padded; hidden: [B, T, D] the target's states of them, of the kind `hidden_contract` says.
        Returns for depth k = 1..depths the post-norm states [B, T, D]: entry t, through `project`, predicts token
        t + k + 1 and has read the tokens up to t + k (so it means nothing where t + k is past the text).

        Attention as in drafting: depth 1 is causal, as is every stage of its own; at a further depth of a recursive
        stage, chain t sits at position t + k - 1 and sees the depth-1 entries up to t and its own later ones.
        """
        if self.config.recycled == "pre_norm":
            raise NotImplementedError("a head that recycles the pre_norm state can draft but not be trained")
        if self.max_depth is not None and depths > self.max_depth:
            raise ValueError(f"depths is {depths} but the head has {self.config.layers} stages, one per depth")
        B, T = tokens.shape
        embeds = self.embed(nn.functional.pad(tokens, (0, depths)))
        state, states, cache = hidden, [], None
        for depth in range(1, depths + 1):
            stage = self.stage(depth)
            recursive = self.config.layers == 1 and depth > 1
            cache = cache if recursive else DynamicCache()
            first = depth - 1 if recursive else 0  # slots count from 0 in each stage
            positions = torch.arange(first, first + T, device=tokens.device).expand(B, T)
            inputs = stage.inputs(embeds[:, depth : depth + T], state, positions)
            decoder = stage.block.get_decoder()
            state = decoder(
                inputs_embeds=inputs,
                attention_mask=_chain_mask(T, depth if recursive else 1, _window(stage), inputs),
                position_ids=positions,
                use_cache=True,
                **{cache_argument(decoder): cache},
            ).last_hidden_state
            states.append(state)
        return states


def _window(stage: MTPStage) -> int | None:
    """Positions that the stage's layer sees, itself included; None = all."""
    config = stage.block.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return window if types[0] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def _chain_mask(T: int, depth: int, window: int | None, like: Tensor) -> Tensor:
    """[1, 1, T, depth * T] additive mask of chain t at `depth` over the entries of depths 1..depth, T of each: chain t
    sits at position t + depth - 1 and sees the depth-1 entries up to t and its own ones."""
    t = torch.arange(T, device=like.device)
    own = torch.eye(T, dtype=torch.bool, device=like.device)
    blocks = []
    for level in range(1, depth + 1):
        seen = t <= t[:, None] if level == 1 else own
        distance = (t[:, None] + depth) - (t + level)
        blocks.append(seen if window is None else seen & (distance < window))
    mask = torch.zeros(T, depth * T, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~torch.cat(blocks, dim=1), -torch.inf)[None, None]
