"""Losses against sums written out over a vocabulary of a few tokens, in float64."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from train.losses import TargetLaw, acceptance, depth_weights, token_losses

V, N = 7, 5
IDS = torch.tensor([0, 2, 3, 6])
DISTANCES = ("kl", "reverse_kl", "tv", "neg_log_alpha", "lk_hybrid")


def law(target: Tensor, ids: Tensor | None = None) -> TargetLaw:
    return TargetLaw.of(target, ids, "ce")  # with all that any loss needs


def logits(columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(N, columns, generator=generator, dtype=torch.float64)


def distribution(row: Sequence[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def by_hand(name: str, p: Sequence[float], q: Sequence[float]) -> float:
    """One token's loss from its probabilities, at the tokens that the drafter knows."""
    alpha = math.fsum(min(a, b) for a, b in zip(p, q, strict=True))
    kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    reverse = math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    lam = math.exp(-3 * alpha)
    table = {"kl": kl, "reverse_kl": reverse, "tv": 1 - alpha, "neg_log_alpha": -math.log(alpha), "alpha": alpha}
    return {**table, "lk_hybrid": lam * kl + (1 - lam) * (1 - alpha)}[name]


def rows(draft: Tensor, target: Tensor, ids: Tensor | None) -> list[tuple[list[float], list[float]]]:
    """(p at the drafter's tokens, q) per token; p is normalised over the whole vocabulary."""
    known = range(V) if ids is None else ids.tolist()
    pairs = zip(draft.tolist(), target.tolist(), strict=True)
    return [([distribution(t)[x] for x in known], distribution(d)) for d, t in pairs]


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("name", DISTANCES)
def test_distances_equal_their_sums(name: str, ids: Tensor | None) -> None:
    draft, target = logits(V if ids is None else len(ids)), logits(V, seed=1)
    expected = [by_hand(name, p, q) for p, q in rows(draft, target, ids)]
    assert token_losses(name, draft, law(target, ids), draft_ids=ids).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
def test_acceptance_equals_its_sum(ids: Tensor | None) -> None:
    draft, target = logits(V if ids is None else len(ids)), logits(V, seed=1)
    expected = [by_hand("alpha", p, q) for p, q in rows(draft, target, ids)]
    assert acceptance(draft, law(target, ids)).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", (*DISTANCES, "alpha"))
def test_control_renormalising_p_over_the_draft_vocabulary_is_another_value(name: str) -> None:
    draft, target = logits(len(IDS)), logits(V, seed=1)
    wrong = [by_hand(name, [a / sum(p) for a in p], q) for p, q in rows(draft, target, IDS)]
    found = (
        acceptance(draft, law(target, IDS))
        if name == "alpha"
        else token_losses(name, draft, law(target, IDS), draft_ids=IDS)
    )
    assert max(abs(a - b) for a, b in zip(found.tolist(), wrong, strict=True)) > 1e-3


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "lk_hybrid"])
def test_control_swapping_p_and_q_is_another_value(name: str) -> None:
    draft, target = logits(V), logits(V, seed=1)
    wrong = [by_hand(name, q, p) for p, q in rows(draft, target, None)]
    found = token_losses(name, draft, law(target)).tolist()
    assert max(abs(a - b) for a, b in zip(found, wrong, strict=True)) > 1e-3


def test_mass_outside_the_draft_vocabulary_counts_as_rejected() -> None:
    """p = (1/2, 1/4, 1/4), drafter knows tokens 0 and 1 and says (2/3, 1/3): alpha = 1/2 + 1/4."""
    target, draft = torch.log(torch.tensor([[2.0, 1.0, 1.0]])), torch.log(torch.tensor([[2.0, 1.0]]))
    assert acceptance(draft, law(target, torch.tensor([0, 1]))).item() == pytest.approx(0.75, abs=1e-6)


def test_cross_entropies() -> None:
    """ce goes by the target's arg-max, ce_data by the text; a token that the drafter does not know adds nothing."""
    draft, target = logits(len(IDS)), logits(V, seed=1)
    target[:, 3] += torch.tensor([100.0, 100.0, 0, 0, 100.0])
    target[:, 5] += torch.tensor([0, 0, 100.0, 100.0, 0])  # 5 is not in IDS
    log_q = [[math.log(x) for x in distribution(row)] for row in draft.tolist()]
    expected = [-log_q[0][2], -log_q[1][2], 0, 0, -log_q[4][2]]
    assert token_losses("ce", draft, law(target, IDS), draft_ids=IDS).tolist() == pytest.approx(expected, abs=1e-12)
    text = torch.tensor([0, 6, 1, 2, 4])
    expected = [-log_q[0][0], -log_q[1][3], 0, -log_q[3][1], 0]
    assert token_losses("ce_data", draft, None, text, IDS).tolist() == pytest.approx(expected, abs=1e-12)
    whole = logits(V)
    expected = [-math.log(distribution(row)[token]) for row, token in zip(whole.tolist(), text.tolist(), strict=True)]
    assert token_losses("ce_data", whole, None, text).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("name", ["ce", "ce_data", *DISTANCES])
def test_gradients_equal_finite_differences(name: str, ids: Tensor | None) -> None:
    columns = V if ids is None else len(ids)
    draft, target, text = logits(columns), law(logits(V, seed=1), ids), torch.tensor([0, 6, 1, 2, 4])

    def loss(values: Tensor) -> float:
        if name != "lk_hybrid":
            return token_losses(name, values, target, text, ids).sum().item()
        lam = torch.exp(-3 * acceptance(draft, target))  # at the point itself: it has no gradient
        kl, tv = (token_losses(part, values, target, draft_ids=ids) for part in ("kl", "tv"))
        return (lam * kl + (1 - lam) * tv).sum().item()

    values = draft.clone().requires_grad_()
    token_losses(name, values, target, text, ids).sum().backward()
    step = 1e-6
    for n in range(N):
        for column in range(columns):
            there, back = draft.clone(), draft.clone()
            there[n, column] += step
            back[n, column] -= step
            slope = (loss(there) - loss(back)) / (2 * step)
            assert values.grad[n, column].item() == pytest.approx(slope, abs=1e-7)


def test_control_a_gradient_through_lambda_is_another_one() -> None:
    draft, target = logits(V).requires_grad_(), law(logits(V, seed=1))
    token_losses("lk_hybrid", draft, target).sum().backward()
    through = draft.detach().clone().requires_grad_()
    lam = torch.exp(-3 * acceptance(through, target))
    (lam * token_losses("kl", through, target) + (1 - lam) * token_losses("tv", through, target)).sum().backward()
    assert (draft.grad - through.grad).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["ce", *DISTANCES])
def test_the_target_gets_no_gradient(name: str) -> None:
    draft, target = logits(V).requires_grad_(), logits(V, seed=1).requires_grad_()
    token_losses(name, draft, law(target)).sum().backward()
    assert target.grad is None and draft.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["ce", *DISTANCES])
def test_bfloat16_logits_lose_nothing_further(name: str) -> None:
    draft, target = logits(V).bfloat16(), logits(V, seed=1).bfloat16()
    expected = token_losses(name, draft.double(), law(target.double()))
    found = token_losses(name, draft, law(target))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ce", *DISTANCES])
def test_far_apart_distributions_stay_finite(name: str, dtype: torch.dtype) -> None:
    draft, target = torch.zeros(1, V, dtype=dtype), torch.zeros(1, V, dtype=dtype)
    draft[0, 0], target[0, 1] = 200, 200
    draft.requires_grad_()
    found = token_losses(name, draft, law(target))
    found.sum().backward()
    expected = {"ce": 200, "kl": 200, "reverse_kl": 200, "tv": 1, "neg_log_alpha": 200 - math.log(V), "lk_hybrid": 200}
    assert found.item() == pytest.approx(expected[name], rel=1e-3)
    assert draft.grad.isfinite().all()


def test_control_alpha_in_probabilities_underflows() -> None:
    draft, target = torch.zeros(1, V), torch.zeros(1, V)
    draft[0, 0], target[0, 1] = 200, 200
    alpha = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum()
    assert (-alpha.log()).isinf()


@pytest.mark.parametrize("name", ["kl", "tv", "neg_log_alpha", "lk_hybrid"])
def test_tokens_that_the_target_forbids_add_nothing(name: str) -> None:
    draft, target = logits(V), logits(V, seed=1)
    target[:, 4] = -math.inf
    draft.requires_grad_()
    found = token_losses(name, draft, law(target))
    found.sum().backward()
    almost = target.clone()
    almost[:, 4] = -80
    assert found.tolist() == pytest.approx(token_losses(name, draft, law(almost)).tolist(), abs=1e-9)
    assert draft.grad.isfinite().all()


def test_a_batch_without_a_counted_token_adds_nothing() -> None:
    for name in ("ce", "ce_data", *DISTANCES):
        found = token_losses(
            name, torch.empty(0, 4), law(torch.empty(0, V), IDS), torch.empty(0, dtype=torch.long), IDS
        )
        assert found.shape == (0,)


def test_depth_weights_are_those_of_the_paper() -> None:
    assert depth_weights(0.6, 3).tolist() == pytest.approx([0.51, 0.306, 0.184], abs=5e-4)
    assert depth_weights(1.0, 4).tolist() == [0.25] * 4


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown loss 'cosine': give one of ce, ce_data, kl"):
        token_losses("cosine", logits(V), logits(V))
