"""One step against its formula, resuming against not stopping, and how a run ends."""

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.train.toy import D, K, ToyBatches, ToyRecipe, ToySettings, ToyStates, toy_data
from train.checkpoints import Checkpoints
from train.loop import Data, Outcome, train
from train.parallel import make_accelerator


def settings(out: Path, **changes: object) -> ToySettings:
    given = {"epochs": 2, "batch_size": 8, "learning_rate": 0.03, "save_every": 4, "eval_every": 5, "held_out": 0.0}
    return ToySettings(target="toy", prompts="toy", out=str(out), **(given | changes))


def run(given: ToySettings, data: Data | None = None, recipe: ToyRecipe | None = None) -> tuple[ToyRecipe, Outcome]:
    Path(given.out).mkdir(exist_ok=True)
    AcceleratorState._reset_state(reset_partial_state=True)  # the test before, or another run of this one
    accelerator = make_accelerator(given)
    recipe = recipe or ToyRecipe(given.dropout)
    held_out = toy_data(given, seed=3) if given.held_out else None
    return recipe, train(recipe, data or toy_data(given), held_out, given, accelerator)


def weights(recipe: ToyRecipe) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in recipe.module.parameters() if parameter.requires_grad]


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def metrics(out: Path, split: str = "train") -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def mean_loss_by_hand(recipe: ToyRecipe, data: Data, steps: Sequence[int]) -> Tensor:
    """Sum over all depths and counted tokens of -log q, divided by the number of tokens at depth 1, text by text."""
    total, first = torch.zeros(()), 0
    for step in steps:
        batch = data.batch_at(step, torch.device("cpu"))
        for tokens, mask, hidden in zip(batch.tokens, batch.loss_mask, batch.hidden, strict=True):
            for depth in range(1, K + 1):
                for t in range(len(tokens) - depth):
                    if mask[t + depth]:
                        log_q = torch.log_softmax(recipe.module.logits(hidden[t])[depth - 1], -1)
                        total = total - log_q[tokens[t + depth]]
                        first += depth == 1
    return total / first


@pytest.fixture
def gradients() -> list[list[Tensor]]:
    """Of every optimizer step, the gradients that it was given."""
    seen: list[list[Tensor]] = []

    def note(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        seen.append([p.grad.detach().clone() for group in optimizer.param_groups for p in group["params"]])

    handle = register_optimizer_step_pre_hook(note)
    yield seen
    handle.remove()


def length(gradient: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float((part.double() ** 2).sum()) for part in gradient))


def test_a_step_follows_the_mean_loss_per_token(tmp_path: Path, gradients: list[list[Tensor]]) -> None:
    given = settings(tmp_path, accumulation=3, clip=1e9)
    loss = mean_loss_by_hand(recipe := ToyRecipe(), toy_data(given), [0, 1, 2])
    expected = torch.autograd.grad(loss, [p for p in recipe.module.parameters() if p.requires_grad])
    run(given)
    assert apart(gradients[0], expected) < 1e-6
    first = metrics(tmp_path)[0]
    assert first["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert first["grad_norm"] == pytest.approx(length(expected), rel=1e-5)


def test_a_long_gradient_is_clipped(tmp_path: Path, gradients: list[list[Tensor]]) -> None:
    run(settings(tmp_path, clip=0.01))
    assert [length(gradient) for gradient in gradients] == pytest.approx([0.01] * len(gradients), rel=1e-4)
    assert min(line["grad_norm"] for line in metrics(tmp_path)) > 0.01


def test_the_learning_rate_rises_and_falls(tmp_path: Path) -> None:
    """12 steps, 3 of them of warm-up: 0, 1/3, 2/3, then half a cosine over the other 9."""
    run(settings(tmp_path, warmup=0.25))
    expected = [0, 1 / 3, 2 / 3, *(0.5 * (1 + math.cos(math.pi * i / 9)) for i in range(9))]
    assert [line["learning_rate"] / 0.03 for line in metrics(tmp_path)] == pytest.approx(expected)


SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]


def test_how_a_step_is_split_does_not_matter(tmp_path: Path) -> None:
    ends = []
    for size, parts in SPLITS:
        recipe, outcome = run(settings(tmp_path / f"{size}", batch_size=size, accumulation=parts))
        assert outcome.step == 12
        ends.append(weights(recipe))
    assert max(apart(ends[0], end) for end in ends) < 1e-6


def test_control_means_of_means_depend_on_the_split(tmp_path: Path) -> None:
    class MeanRecipe(ToyRecipe):
        def loss(self, batch):
            loss, sums = super().loss(batch)
            return loss / sums["tokens"][0], {"tokens": torch.ones(K), "top1": sums["top1"] / sums["tokens"]}

    ends = []
    for size, parts in SPLITS[:2]:
        recipe, _ = run(settings(tmp_path / f"{size}", batch_size=size, accumulation=parts), recipe=MeanRecipe())
        ends.append(weights(recipe))
    assert apart(*ends) > 1e-4


def test_a_launcher_s_accumulation_is_not_applied_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run(settings(tmp_path / "a"))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    launched, _ = run(settings(tmp_path / "b"))
    assert equal(weights(plain), weights(launched))


class Killed(BaseException):
    """In place of a kill, which leaves no time to clean up."""


def kill() -> None:
    raise Killed


def killed_run(given: ToySettings, step: int) -> None:
    data = toy_data(given)
    data.batches.calls[step] = kill
    with pytest.raises(Killed):
        run(given, data)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """Bit for bit, with dropout, wherever it stops: before the first checkpoint, just after one, twice."""
    whole, _ = run(settings(tmp_path / "whole", dropout=0.3, held_out=0.1))
    for name, stops in {"early": [2], "after": [8], "between": [7], "twice": [5, 11]}.items():
        for number, stop in enumerate(stops):
            killed_run(settings(tmp_path / name, dropout=0.3, held_out=0.1, resume=number > 0), stop)
        resumed, outcome = run(settings(tmp_path / name, dropout=0.3, held_out=0.1, resume=True))
        assert equal(weights(whole), weights(resumed)), name
        assert outcome.step == 12
        for split in ("train", "held_out"):
            ours, theirs = (metrics(tmp_path / one, split) for one in (name, "whole"))
            assert [(line["step"], line["loss"]) for line in ours] == [(line["step"], line["loss"]) for line in theirs]


def test_control_a_run_resumed_without_its_random_stream_ends_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = run(settings(tmp_path / "whole", dropout=0.3))
    killed_run(settings(tmp_path / "other", dropout=0.3), 7)
    monkeypatch.setattr(Checkpoints, "_set_random", lambda self, states: None)
    resumed, _ = run(settings(tmp_path / "other", dropout=0.3, resume=True))
    assert apart(weights(whole), weights(resumed)) > 1e-5


def test_a_signal_saves_and_ends_and_the_run_can_go_on(tmp_path: Path) -> None:
    whole, _ = run(settings(tmp_path / "whole"))
    for number in (signal.SIGINT, signal.SIGTERM):
        out = tmp_path / number.name
        data = toy_data(settings(out))
        data.batches.calls[5] = lambda number=number: os.kill(os.getpid(), number)
        before = signal.getsignal(number)
        _, outcome = run(settings(out), data)
        assert outcome == Outcome(step=6, total=12, best_step=None, best_loss=math.inf, interrupted=True)
        assert (out / "checkpoints" / "step-00000006.pt").exists()
        assert signal.getsignal(number) is before
        resumed, outcome = run(settings(out, resume=True))
        assert not outcome.interrupted and equal(weights(whole), weights(resumed))


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    data = toy_data(settings(tmp_path))

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    data.batches.calls[5] = twice
    try:
        with pytest.raises(KeyboardInterrupt):
            run(settings(tmp_path), data)
    finally:
        signal.signal(signal.SIGINT, before)


def test_nan_stops_before_it_reaches_the_weights(tmp_path: Path) -> None:
    given = settings(tmp_path)
    recipe, data = ToyRecipe(), Data(ToyBatches(8), ToyStates(spoilt=7))
    seen: list[list[Tensor]] = []
    data.batches.calls[6] = lambda: seen.append(weights(recipe))
    with pytest.raises(FloatingPointError, match=r"the loss is nan .* at step 7, .* checkpoint is .*step-00000004.pt"):
        run(given, data, recipe)
    assert equal(seen[0], weights(recipe))
    resumed, outcome = run(settings(tmp_path, resume=True))
    whole, _ = run(settings(tmp_path / "whole"))
    assert outcome.step == 12 and equal(weights(whole), weights(resumed))


def test_a_gradient_that_is_not_finite_stops_too(tmp_path: Path) -> None:
    class Kinked(ToyRecipe):
        def loss(self, batch):
            loss, sums = super().loss(batch)
            return loss + (0 * self.module.mix.weight).sqrt().sum(), sums  # 0, with slope 0 * inf

    with pytest.raises(FloatingPointError, match=r"a gradient of length nan at step 1, .* checkpoint is none"):
        run(settings(tmp_path), recipe=Kinked())


def test_the_best_evaluation_s_weights_are_left(tmp_path: Path) -> None:
    """Random tokens cannot be learned, so that a long run does worse and worse on others."""
    given = settings(tmp_path, held_out=0.1, epochs=20, learning_rate=0.1)
    recipe, outcome = run(given)
    lines = metrics(tmp_path, "held_out")
    assert [line["step"] for line in lines] == [*range(5, 121, 5)]
    best = min(lines, key=lambda line: line["loss"])
    assert (outcome.best_step, outcome.best_loss) == (best["step"], best["loss"])
    assert outcome.best_step < outcome.step == 120
    data = toy_data(given, seed=3)
    by_hand = mean_loss_by_hand(recipe, data, range(data.batches.per_epoch))
    assert by_hand.item() == pytest.approx(best["loss"], abs=1e-5)
    assert lines[-1]["loss"] > best["loss"] + 0.01


def test_evaluation_is_without_gradient_and_dropout(tmp_path: Path) -> None:
    seen = []

    class Watched(ToyRecipe):
        def loss(self, batch):
            seen.append((self.module.training, torch.is_grad_enabled()))
            return super().loss(batch)

    run(settings(tmp_path, held_out=0.1, epochs=1), recipe=Watched())
    assert set(seen[:5]) == {(True, True)} and set(seen[5:11]) == {(False, False)} and seen[11] == (True, True)


def test_bfloat16_computes_in_it_and_trains_in_float32(tmp_path: Path) -> None:
    types = set()

    class Watched(ToyRecipe):
        def loss(self, batch):
            types.add(self.module.logits(batch.hidden).dtype)
            return super().loss(batch)

    run(settings(tmp_path / "a"), recipe=Watched())
    recipe, _ = run(settings(tmp_path / "b", mixed_precision="bf16"), recipe=Watched())
    assert types == {torch.float32, torch.bfloat16}
    assert {tensor.dtype for tensor in weights(recipe)} == {torch.float32}
    full, half = ([line["loss"] for line in metrics(tmp_path / name)] for name in "ab")
    assert half == pytest.approx(full, rel=0.02) and half != full


def test_frozen_parameters_stay_the_target_s_own(tmp_path: Path) -> None:
    before = ToyRecipe().target.weight
    recipe, _ = run(settings(tmp_path))
    assert recipe.module.head.weight is recipe.target.weight
    assert torch.equal(recipe.target.weight, before)


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 epoch\(s\) of 6 batches are less than one step of 7: lower accumulation"):
        run(settings(tmp_path, epochs=1, accumulation=7))


def test_half_precision_parameters_are_refused(tmp_path: Path) -> None:
    recipe = ToyRecipe()
    recipe.module.mix = nn.Linear(D, K * D, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="trained parameters are torch.bfloat16, in which small updates are lost"):
        run(settings(tmp_path), recipe=recipe)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    run(settings(tmp_path, epochs=20))
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert sum(losses[-6:]) / 6 < sum(losses[:6]) / 6 - 0.1
