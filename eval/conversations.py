"""The turns of a chat as prompts of their own, the same for every method.

A later turn follows the model's own answer to the earlier ones. If every method went on from its own answers, methods
would be timed on different prompts as soon as one output differs. So the answers are made once, before anything is
timed: by plain greedy decoding, in the grid's first dtype, with the run's number of new tokens. Every method, at every
temperature, batch size and dtype, then gets the same tokens. They are kept in `answers.json`, for --resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import specdec
from eval.folder import Folder
from eval.methods import EncodedPrompt, Request, engine_method
from eval.runner import batches
from eval.settings import Settings
from specdec.models import LoadedModel
from specdec.prompts import Prompt, encode

ANSWERS = "answers.json"


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
    known = {(row["id"], row["turn"]): row["answer"] for row in folder.read_json(ANSWERS, [])}
    found, chats, turn = first_turns(prompts, loaded, settings.raw), list(prompts), 1
    encoded = found
    while any(chat.later_turns for chat in chats):
        longer = [place for place, chat in enumerate(chats) if chat.later_turns]
        missing = [encoded[place] for place in longer if (chats[place].id, turn) not in known]
        for answers in _answers(missing, loaded, settings):
            known |= {(id, turn): answer for id, answer in answers.items()}
            rows = [{"id": id, "turn": after, "answer": answer} for (id, after), answer in known.items()]
            folder.write_json(ANSWERS, rows)
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


def _answers(prompts: Sequence[EncodedPrompt], loaded: LoadedModel, settings: Settings) -> Iterator[dict[str, str]]:
    """The answers, as text, by chat id, batch by batch."""
    request = Request.of(loaded.model, {"do_sample": False}, settings.seed)
    plain = engine_method("plain", loaded.model, request, None, 0, "auto", specdec.generate)
    for batch in batches(prompts, max(settings.batch_sizes)):
        outputs = plain.generate(batch, settings.max_new_tokens).tokens
        texts = [loaded.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outputs]
        yield {prompt.conversation or prompt.id: text for prompt, text in zip(batch, texts, strict=True)}


def _answered(chat: Prompt, answer: str) -> Prompt:
    """`chat` with its answer and its next turn."""
    turn, *later = chat.later_turns
    messages = (*chat.messages, {"role": "assistant", "content": answer}, {"role": "user", "content": turn})
    return replace(chat, messages=messages, later_turns=tuple(later))
