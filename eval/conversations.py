"""The turns of a chat as prompts of their own, the same for every method.

A later turn follows the model's own answer to the earlier ones. If every method went on from its own answers, methods
would be timed on different prompts as soon as one output differs. So the answers are made once, before anything is
timed: by plain greedy decoding, in the grid's first dtype, with the run's number of new tokens. Every method, at every
temperature, batch size and dtype, then gets the same tokens. They are kept in `answers.jsonl`, for --resume.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import specdec
from eval.folder import Folder
from eval.methods import EncodedPrompt, Request, engine_method
from eval.runner import batches
from eval.settings import Settings
from specdec.models import LoadedModel
from specdec.prompts import Prompt, encode

ANSWERS = "answers.jsonl"


def first_turns(prompts: Sequence[Prompt], loaded: LoadedModel, raw: bool) -> list[EncodedPrompt]:
    """Every chat's first turn, numbered from 0, which needs no answer."""
    encoded = encode(prompts, loaded.tokenizer, raw)
    return [
        EncodedPrompt(number, prompt.id, prompt.category, tokens)
        for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True))
    ]


def all_turns(
    prompts: Sequence[Prompt], loaded: LoadedModel, settings: Settings, folder: Folder
) -> list[EncodedPrompt]:
    """First turns, then second ones, and so on; the second of chat `a` has the id `a, turn 2`.

    Answers that the folder does not hold yet are made and written to it."""
    known = _known(folder)
    found, chats, turn = first_turns(prompts, loaded, settings.raw), list(prompts), 1
    encoded = found
    while any(chat.later_turns for chat in chats):
        longer = [place for place, chat in enumerate(chats) if chat.later_turns]
        missing = [encoded[place] for place in longer if (chats[place].id, turn) not in known]
        for id, answer in _answers(missing, loaded, settings):
            known[id, turn] = answer
            with (folder.path / ANSWERS).open("a") as file:
                file.write(json.dumps({"id": id, "turn": turn, "answer": answer}) + "\n")
        chats = [_answered(chats[place], known[chats[place].id, turn]) for place in longer]
        turn += 1
        encoded = [
            EncodedPrompt(len(found) + number, f"{chat.id}, turn {turn}", chat.category, tokens, chat.id)
            for number, (chat, tokens) in enumerate(
                zip(chats, encode(chats, loaded.tokenizer, settings.raw), strict=True)
            )
        ]
        found = [*found, *encoded]
    return found


def _answers(prompts: Sequence[EncodedPrompt], loaded: LoadedModel, settings: Settings):
    """Chat id and answer, as text, of each prompt, batch by batch."""
    request = Request.of(loaded.model, {"do_sample": False}, settings.seed)
    plain = engine_method("plain", loaded.model, request, None, 0, "auto", specdec.generate)
    for batch in batches(prompts, max(settings.batch_sizes)):
        for prompt, tokens in zip(batch, plain.generate(batch, settings.max_new_tokens).tokens, strict=True):
            yield prompt.conversation or prompt.id, loaded.tokenizer.decode(tokens, skip_special_tokens=True)


def _answered(chat: Prompt, answer: str) -> Prompt:
    """`chat` with its answer and its next turn."""
    turn, *later = chat.later_turns
    messages = (*chat.messages, {"role": "assistant", "content": answer}, {"role": "user", "content": turn})
    return replace(chat, messages=messages, later_turns=tuple(later))


def _known(folder: Folder) -> dict[tuple[str, int], str]:
    """The folder's answers by chat and turn; a last line that a kill cut short is left out."""
    path = folder.path / ANSWERS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["id"], row["turn"]): row["answer"] for row in rows}
