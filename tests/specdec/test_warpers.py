"""Under every warper and processor, the joint law of three sampled tokens is plain `generate`'s, enumerated exactly."""

import pytest
import torch

import specdec
from drafters.draft_model import DraftModelDrafter
from specdec.processors import PREFIX_FREE, Processors
from tests.specdec.test_sampling import cells, p_of
from tests.tiny_models import tiny

VOCAB, LENGTH, ROWS, SEQUENCES = 5, 3, 4, 3
CALLS = 60  # of the four prompts per draft length, so that each is answered 360 times
PROMPTS = torch.tensor([[1, 2, 3, 1, 2], [0, 4, 2, 4, 2], [0, 0, 3, 3, 1], [2, 1, 2, 4, 1]])
MASK = torch.tensor([[1] * 5, [0] + [1] * 4, [0, 0, 1, 1, 1], [1] * 5])
SETTINGS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.15},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "top_h": {"top_h": 0.6},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "all": {"repetition_penalty": 1.3, "temperature": 1.2, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
}


def target():
    return tiny("qwen3", seed=1, vocab=VOCAB)


@torch.no_grad()
def exact_laws(model, settings) -> list[dict[tuple[int, ...], float]]:
    """Per prompt, the probability of every LENGTH tokens: `generate`'s own processors on whole forwards in float64."""
    laws = []
    for prompt, mask in zip(PROMPTS, MASK, strict=True):
        processors = model.generate(
            prompt[None], attention_mask=mask[None], do_sample=True, max_new_tokens=LENGTH, **settings,
            custom_generate=lambda model, input_ids, logits_processor, **rest: logits_processor,
        )  # fmt: skip
        law = {(): 1.0}
        for _ in range(LENGTH):
            ids = torch.cat([prompt.expand(len(law), -1), torch.tensor(list(law), dtype=torch.long)], dim=1)
            seen = torch.cat([mask.expand(len(law), -1), torch.ones_like(ids[:, len(prompt) :])], dim=1)
            positions = (seen.cumsum(1) - 1).clamp(min=0)
            logits = model(ids, attention_mask=seen, position_ids=positions, use_cache=False).logits[:, -1]
            each = [processors(one, scores) for one, scores in zip(ids.split(1), logits.split(1), strict=True)]
            p = torch.cat(each).softmax(-1).tolist()
            law = {(*tokens, v): mass * p[i][v] for i, (tokens, mass) in enumerate(law.items()) for v in range(VOCAB)}
        laws.append(law)
    return laws


def sample(model, drafter, settings, calls, seeds) -> list[list[tuple[int, ...]]]:
    """Per prompt, the first LENGTH tokens of every answer. With one drafted token the last of them may be the bonus
    token, with two (for which one more has to be asked for) both others may be drafted."""
    found, drafted = [[] for _ in PROMPTS], 0
    for seed in range(seeds):
        out, stats = specdec.generate(
            model, PROMPTS.repeat(calls, 1), attention_mask=MASK.repeat(calls, 1), do_sample=True, drafter=drafter,
            draft_length=1 + seed % 2, max_new_tokens=LENGTH + 1, num_return_sequences=SEQUENCES, seed=seed,
            return_stats=True, **settings,
        )  # fmt: skip
        for row, tokens in enumerate(out[:, PROMPTS.shape[1] :][:, :LENGTH].tolist()):
            found[row // SEQUENCES % ROWS].append(tuple(tokens))
        drafted += sum(sum(row.drafted) for row in stats.rows)
    assert drafted > 0
    return found


def p_value(drafter, settings, calls=CALLS, seeds=2) -> float:
    """Of all prompts' chi-squares together."""
    model, settings = target(), {"top_k": 0} | settings
    drafter = DraftModelDrafter(tiny("llama", vocab=VOCAB)) if drafter == "draft_model" else drafter
    samples = sample(model, drafter, settings, calls, seeds)
    return p_of([cells(*each) for each in zip(samples, exact_laws(model, settings), strict=True)])


@pytest.mark.parametrize("warper", SETTINGS)
def test_joint_law_of_three_tokens(warper):
    """Batch 4 as often as needed, in one call."""
    assert p_value("draft_model", SETTINGS[warper]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["draft_model", "ngram:min_n=1"])
@pytest.mark.parametrize("warper", SETTINGS)
def test_joint_law_in_calls_of_four_rows(warper, drafter):
    """One call per batch, each with a seed of its own."""
    assert p_value(drafter, SETTINGS[warper], calls=1, seeds=2 * CALLS) > 1e-3


@pytest.mark.parametrize("warper", ["top_k", "top_p", "min_p"])
def test_a_bonus_token_without_a_warper_is_caught(warper, monkeypatch, controls):
    apply = Processors.apply

    def forgetful(self, logits, prefixes):
        scores = apply(self, logits, prefixes)
        others = [each for each in self.processors if type(each) not in PREFIX_FREE]
        ends = torch.tensor(prefixes.draft.lengths).cumsum(0) + torch.arange(len(prefixes.draft.lengths))
        bonus = ends[torch.tensor(prefixes.draft.lengths) > 0]
        without = apply(Processors(others, self.vocab_size), logits, prefixes)
        return scores.index_copy(0, bonus, without[bonus])

    monkeypatch.setattr(Processors, "apply", forgetful)
    p = p_value("draft_model", SETTINGS[warper])
    assert p < 1e-6
    controls(f"bonus token without {warper}", f"joint law of three tokens, p = {p:.0e}")
