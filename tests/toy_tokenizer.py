"""A tokenizer of single bytes, built in memory: 256 tokens, so that every other character is several tokens long."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"
VOCAB = 257
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..255 stand for bytes (in the alphabet's order), 256 for END, which is end of text and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token=END, pad_token=END, chat_template=CHAT, padding_side="left"
    )
