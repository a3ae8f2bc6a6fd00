"""One training run from settings to a head that has been tried out: what every recipe shares around `train.loop`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor

from eval.methods import Request
from heads.saved import fingerprint
from specdec.contracts import Drafter
from specdec.models import LoadedModel, load_target
from train import data, provenance
from train.batches import Batches, Example, show_example
from train.chains import ChainRecipe, ChainSettings
from train.finish import finish
from train.loop import Data, train
from train.parallel import leave, make_accelerator
from train.responses import ResponseSettings, read, respond
from train.settings import claim
from train.states import CachedStates, ComputedStates, States, cache_states
from train.vocabulary import most_frequent

INTERRUPTED = 130  # exit status of a run that a signal ended

Drafters = Callable[[Path, LoadedModel], dict[str, tuple[Drafter, int]]]


def run(
    settings: ChainSettings,
    kind: str,
    make_recipe: Callable[[ChainSettings, LoadedModel, Tensor | None], ChainRecipe],
    drafters: Drafters,
) -> None:
    """Responses, states, training, and at the end the evaluation. `drafters` makes, from the folder of the finished
    head, what that evaluation drafts with: by name, each with its draft length.

    Every process of a launch calls this; results are written by the first."""
    claim(settings)
    accelerator = make_accelerator(settings)
    loaded = load_target(settings.target, settings.dtype, str(accelerator.device))
    loaded.model.requires_grad_(False)
    # The target's path is in the settings; that it still holds the weights of the checkpoints is told here.
    provenance.claim(Path(settings.out) / "checkpoints", {"target": fingerprint(loaded.model)})
    training, held_out = examples(settings, loaded, accelerator)
    draft_ids = None
    if settings.draft_vocab_size is not None:
        draft_ids, _ = most_frequent(training, settings.draft_vocab_size, vocabulary(loaded), special_ids(loaded))
    if accelerator.is_main_process:
        print(f"{show_example(training[0], loaded.tokenizer)}\n", file=sys.stderr)
    recipe = make_recipe(settings, loaded, draft_ids)
    rank, world = accelerator.process_index, accelerator.num_processes
    parts = {}
    for name, chosen in {"train": training, "held_out": held_out}.items():
        batches = Batches(chosen, settings.batch_size, settings.seed, rank, world)
        parts[name] = Data(batches, states(settings, loaded, chosen, name, accelerator))
    outcome = train(recipe, parts["train"], parts["held_out"], settings, accelerator)
    if outcome.interrupted:
        if accelerator.is_main_process:
            print(f"specdec: interrupted; {settings.out} keeps step {outcome.step}, --resume goes on", file=sys.stderr)
        leave(accelerator)
        sys.exit(INTERRUPTED)
    if accelerator.is_main_process:
        folder = finish(settings, kind, recipe, loaded, training, held_out, parts["held_out"].states, drafters)
        print(f"specdec: {folder} holds what was trained and its card, README.md", file=sys.stderr)
    leave(accelerator)


def examples(
    settings: ChainSettings, loaded: LoadedModel, accelerator: Accelerator
) -> tuple[list[Example], list[Example]]:
    """The target's answers to the prompts, to train on and held out; made first where they are not there yet."""
    prompts = data.load(
        settings.prompts, settings.column, loaded.tokenizer, settings.raw, settings.limit, settings.max_prompt_tokens
    )
    training, held_out = data.split(prompts, settings.held_out)
    asked = ResponseSettings(settings.temperature, settings.max_new_tokens, settings.response_batch_size, settings.seed)
    folder = Path(settings.out) / "responses" if settings.responses is None else Path(settings.responses)
    respond(loaded, prompts, asked, folder, accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()
    answered = {example.id: example for example in read(loaded, prompts, asked, folder)}
    return tuple([answered[prompt.id] for prompt in part] for part in (training, held_out))


def states(
    settings: ChainSettings, loaded: LoadedModel, chosen: Sequence[Example], name: str, accelerator: Accelerator
) -> States:
    """The target's states of `chosen`, as `settings.states` says."""
    if settings.states == "fly":
        return ComputedStates(loaded.model, "post_norm")
    folder = Path(settings.out) / "states" / name
    if accelerator.is_main_process:
        cache_states(loaded.model, "post_norm", chosen, folder)
    accelerator.wait_for_everyone()
    return CachedStates(loaded.model, "post_norm", chosen, folder)


def vocabulary(loaded: LoadedModel) -> int:
    """V, the width of the target's logits."""
    return loaded.model.get_output_embeddings().weight.shape[0]


def special_ids(loaded: LoadedModel) -> set[int]:
    """Ids that a reduced vocabulary always has: the tokenizer's special tokens and what ends an answer."""
    return {*loaded.tokenizer.all_special_ids, *Request.of(loaded.model, {}, 0).stops}
