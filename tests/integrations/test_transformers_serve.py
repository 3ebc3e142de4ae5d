"""`transformers serve` with continuous batching on flashtile: the answers of `generate`, without a network."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import flashtile
from support.models.transformers_cases import LANGUAGE, build, registered, transformers  # noqa: F401

for _needed in ("fastapi", "uvicorn", "openai", "accelerate", "tokenizers"):
    pytest.importorskip(_needed)
if transformers.__version__.startswith(("5.17.", "5.18.", "5.19.")):
    pytest.skip("transformers before 5.20 batches requests in another way", allow_module_level=True)

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
PROMPTS = ["one two three", "five", "eight seven six five four three two one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama and a tokenizer of words, saved."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", *WORDS, *(f"w{number}" for number in range(86))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(
        path
    )
    build(LANGUAGE["llama"], "eager").save_pretrained(path)
    return path


@pytest.fixture
def address(registered):  # noqa: F811
    from transformers.cli.serve import Serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    server = Serve(
        continuous_batching=True, device="cpu",
        dtype="float32", cb_num_blocks=12, cb_block_size=16, cb_max_batch_tokens=16, host="127.0.0.1", port=port,
        non_blocking=True,
    )  # fmt: skip
    server._model_manager.attn_implementation = "flashtile"  # its command line takes transformers' own names alone
    while not server.server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/v1/completions"
    server.kill_server()


def test_answers_are_those_of_generate(folder, address, monkeypatch):
    calls = []
    ours = flashtile.attention_varlen
    monkeypatch.setattr(flashtile, "attention_varlen", lambda *a, **o: (calls.append(1), ours(*a, **o))[1])

    def ask(prompt: str) -> Any:
        body = {"model": str(folder), "prompt": prompt, "max_tokens": 6, "temperature": 0}
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(ask, PROMPTS))
    assert calls
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for prompt, answer in zip(PROMPTS, answers):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert answer.split() == tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True).split()
