"""Small, readable reference models over the public functions and modules of flashtile."""

from flashtile.models.bert import Bert, BertForPreTraining
from flashtile.models.config import BertConfig, GPTConfig
from flashtile.models.gpt import GPT, flashtile_attention, plain_attention
from flashtile.models.hugging_face import config_from_hugging_face, from_hugging_face, to_hugging_face

__all__ = [
    "GPT",
    "Bert",
    "BertConfig",
    "BertForPreTraining",
    "GPTConfig",
    "config_from_hugging_face",
    "flashtile_attention",
    "from_hugging_face",
    "plain_attention",
    "to_hugging_face",
]
