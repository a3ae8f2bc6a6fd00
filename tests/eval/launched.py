"""What test_processes launches: the command line on a tiny model."""

import torch

import eval.command
from specdec.cli import app
from specdec.models import LoadedModel
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

if __name__ == "__main__":
    torch.set_num_threads(1)
    eval.command.load_target = lambda *arguments: LoadedModel(tiny("llama", vocab=VOCAB), toy_tokenizer(), "tiny")
    app()
