"""What test_peers launches, in two processes: a model whose every forward waits for the other's, as a sharded one's."""

import sys
from datetime import timedelta

import torch
import torch.distributed

import specdec
from specdec.compat import CACHE_FIELD
from tests.specdec.test_generation import prompts
from tests.tiny_models import tiny


def main(synced: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank, model = torch.distributed.get_rank(), tiny("llama")
    one = {name: value[rank : rank + 1] for name, value in prompts().items()}
    settings = {"do_sample": False, "max_new_tokens": 30}
    expected = model.generate(**one, **settings)[0, 12:]
    ends = {"eos_token_id": expected[3 if rank == 0 else 20].item(), "pad_token_id": 0}
    expected = model.generate(**one, **settings, **ends)
    model.register_forward_pre_hook(lambda *_: torch.distributed.all_reduce(torch.ones(1)))
    # the second process also reads its prompt with the model's own forward, and has a cache to fill
    asked = {"return_dict_in_generate": True, "output_hidden_states": True} if rank else {}
    out = specdec.generate(model, **one, synced_gpus=synced, **settings, **ends, **asked)
    assert torch.equal(out.sequences if rank else out, expected)
    assert not rank or out[CACHE_FIELD].get_seq_length() == expected.shape[1] - 1
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] == "synced")
