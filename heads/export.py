"""`specdec export`: a head in another project's format, read back and compared before it counts as written."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.formats import fasterdecoding, native_mtp, vllm_medusa
from heads.formats.files import new_folder, read_config
from heads.medusa import MedusaHeads
from heads.mtp import MTPHead

Head = MedusaHeads | MTPHead
FORMATS: dict[str, tuple[str, ModuleType]] = {
    "vllm-medusa": ("medusa", vllm_medusa),
    "fasterdecoding": ("medusa", fasterdecoding),
    "native-mtp": ("mtp", native_mtp),
}
KINDS: dict[str, type[Head]] = {"medusa": MedusaHeads, "mtp": MTPHead}
TEXT_LENGTH = 12  # tokens of the random text on which both heads are compared


def export(folder: str | Path, format: str, out: str | Path, model: PreTrainedModel, target: str) -> None:
    """Write the head in `folder`, made for `model`, to the new folder `out` in another format (a key of FORMATS).

    target: the name of the target, as a reader of the export should know it.

    `out` appears only once what was written has been read back and gives the head's logits. Raises ValueError where it
    does not, or where the format cannot say what the head is, and FileExistsError where `out` is in use.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}: known are {', '.join(FORMATS)}")
    kind, files = FORMATS[format]
    saved = read_config(Path(folder) / "config.json").get("kind")
    if saved != kind:
        raise ValueError(f"format {format} is for {kind} heads, but {folder} holds one of kind {saved!r}: give another")
    head = KINDS[kind].from_pretrained(folder, model)
    with new_folder(Path(out)) as made:
        files.write(head, model, made, target)
        check_equal(head, files.read(made, model), format)


def check_equal(head: Head, again: Head, format: str) -> None:
    """ValueError unless `again`, read back from `format`, gives the logits of `head` on a random text; of a larger
    vocabulary, those of head's own ids count."""
    expected, found = _logits(head), _logits(again)
    if head.draft_ids is not None and again.draft_ids is None:
        found = found[..., head.draft_ids]
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    allowed = 10 * torch.finfo(expected.dtype).eps * largest  # norms stored less one are rounded twice
    if not difference <= allowed:  # NaN is not
        raise ValueError(
            f"the {format} files do not give the head's logits, which are up to {largest:.2g} and differ by up to "
            f"{difference:.2g}: nothing was exported"
        )


@torch.no_grad()
def _logits(head: Head) -> Tensor:
    """The head's logits, of all its depths, on a text and states that are the same for any head of its size."""
    draws = torch.Generator().manual_seed(0)
    weight = next(head.parameters())
    tokens = torch.randint(head.config.vocab_size, (1, TEXT_LENGTH), generator=draws).to(weight.device)
    hidden = torch.randn(1, TEXT_LENGTH, head.config.hidden_size, generator=draws).to(weight)
    if isinstance(head, MedusaHeads):
        return head(hidden)
    depths = head.max_depth or 2  # the second depth of a single stage is fed by its own output
    return torch.stack([head.project(state) for state in head(tokens, hidden, depths)])
