"""What a watched generation is known to have done, against the generation itself."""

import torch

import specdec
from drafters.draft_model import DraftModelDrafter, first_layers
from eval.fidelity.recorder import Recorder
from eval.fidelity.rescore import at_width, hf_processors, processed, teacher_forced
from specdec.contracts import Draft, Scores
from specdec.draws import FreshDraws
from specdec.target import Target
from tests.tiny_models import tiny
from verifiers.greedy import GreedyVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.tree_rejection import TreeRejectionVerifier

PROMPTS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [0, 0, 11, 12, 11, 12, 11, 12]])
MASK = torch.tensor([[1] * 8, [0] * 2 + [1] * 6])
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3}


def watched(verifier, sampling, drafter="ngram", keep=lambda row, step: step == 2):
    model = tiny("llama", dtype=torch.float32)
    recorder = Recorder(verifier, 2, keep)
    output, stats = specdec.generate(
        model, PROMPTS, attention_mask=MASK, drafter=drafter(model) if callable(drafter) else drafter, draft_length=3,
        verifier=recorder, on_commit=recorder.on_commit, seed=1, return_stats=True, max_new_tokens=20, **sampling,
    )  # fmt: skip
    return model, recorder, output[:, 8:].tolist(), stats


def test_tokens_steps_and_drafts_are_the_runs():
    _, recorder, output, stats = watched(GreedyVerifier(), {"do_sample": False})
    for log, tokens, row in zip(recorder.rows, output, stats.rows, strict=True):
        assert log.tokens == tokens and sum(log.steps) == 20
        assert log.drafted[1:] == row.drafted
        assert [count - 1 for count in log.steps[1:-1]] == row.accepted[:-1]
        assert log.guesses == [None] * 20  # nothing is sampled
    assert stats.verifier == "greedy" and recorder.seconds > 0


def test_scores_are_teacher_forcings_with_hugging_faces_processors():
    model, recorder, output, _ = watched(RejectionVerifier(), SAMPLING)
    for log, tokens, columns, mask in zip(recorder.rows, output, PROMPTS, MASK, strict=True):
        row = {"attention_mask": mask[None], "max_new_tokens": 20}
        processors = hf_processors(model, columns[None], **row, **SAMPLING)
        raw = teacher_forced(model, columns[mask.bool()].tolist(), tokens)
        scores = processed(processors, columns.tolist(), tokens, raw)
        torch.testing.assert_close(torch.tensor(log.scores), scores[range(20), tokens], rtol=0, atol=1e-4)
        wrong = processed(processors, columns.tolist(), tokens, raw.roll(1, 0))
        assert (torch.tensor(log.scores) - wrong[range(20), tokens]).abs().max() > 1


def test_scoring_at_another_width_is_the_same_up_to_rounding():
    model = tiny("llama")
    prompt, tokens = list(range(1, 30)), [3, 1, 4, 1, 5, 9, 2, 6]
    expected = teacher_forced(model, prompt, tokens)
    for width in (1, 3, 8, 20):
        torch.testing.assert_close(at_width(Target(model), prompt, tokens, width), expected, rtol=0, atol=1e-10)


def test_guesses_are_the_distributions_that_drafts_were_drawn_from():
    _, recorder, _, _ = watched(
        RejectionVerifier(), SAMPLING, lambda model: DraftModelDrafter(first_layers(model, 1)), lambda row, step: True
    )
    for log in recorder.rows:
        assert log.guesses[0] is None  # the first token of all is never drafted
        first = 0
        for kept, count in zip(log.kept, log.steps, strict=True):
            for place, guess in enumerate(log.guesses[first : first + count]):
                if place < len(kept.tokens):
                    q = (kept.q_logits[place] - kept.q_logz[place]).exp()
                    torch.testing.assert_close(guess.float().exp(), q, rtol=2e-2, atol=1e-3)
                else:
                    assert guess is None
            first += count


def test_a_kept_step_holds_scores_of_its_own_nodes():
    model, recorder, output, _ = watched(RejectionVerifier(), SAMPLING)
    for row, log in enumerate(recorder.rows):
        [kept] = log.kept
        assert (kept.row, kept.step, kept.emitted, kept.rule) == (row, 2, sum(log.steps[:2]), "rejection")
        assert kept.scores.shape == (len(kept.tokens) + 1, 97)
        tokens = [token for _, token in kept.outcome]
        assert tokens[: log.steps[2]] == output[row][kept.emitted : kept.emitted + log.steps[2]]
        scores = [kept.scores[node, token].item() for node, token in kept.outcome]
        assert scores[: log.steps[2]] == log.scores[kept.emitted : kept.emitted + log.steps[2]]


def test_in_a_tree_a_guess_is_of_the_nodes_first_child_over_the_whole_vocabulary():
    """Node 1 (token 4) is accepted for certain, its child 2 too; q has only the ids 3, 4, 5 of 6."""
    q_ids = torch.tensor([3, 4, 5])
    q_logits = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.0, 0.5], [0.3, 0.3, 0.4]]]).log()
    draft = Draft(torch.tensor([[4, 3, 5]]), [3], torch.tensor([[-1, -1, 0]]), q_logits, q_logits.logsumexp(-1), q_ids)
    certain = torch.full((4, 6), -torch.inf)
    certain[0, 4] = certain[1, 5] = certain[2, 0] = certain[3, 1] = 0
    recorder = Recorder(TreeRejectionVerifier(), 1, lambda row, step: True)
    draws = FreshDraws(0, [0], [0], None, "cpu")
    recorder.verify(draft, Scores(certain, torch.tensor([[0, 1, 2, 3]])), draws)
    recorder.on_commit(0, [4, 5, 1], 2)
    log = recorder.rows[0]
    assert log.kept[0].path == [0, 2] and log.scores == [0, 0, 0]
    root, inner, leaf = log.guesses
    torch.testing.assert_close(root.float().exp(), torch.tensor([0, 0, 0, 0.1, 0.2, 0.7]), rtol=0, atol=1e-3)
    torch.testing.assert_close(inner.float().exp(), torch.tensor([0, 0, 0, 0.3, 0.3, 0.4]), rtol=0, atol=1e-3)
    assert leaf is None
    assert log.kept[0].q_logits.shape == (3, 6)
