"""The small server: its requests get the tokens of the model alone, however steps are made up."""

import importlib.util

import pytest
import torch

import serve
from flashtile.models import GPT, GPTConfig

_NO_TRANSFORMERS = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--cache", "int8", "--no-draft"],
        pytest.param(["--model", "llama", "--cache", "float8_e4m3fn"], marks=_NO_TRANSFORMERS),
    ],
    ids=" ".join,
)
def test_requests_together_are_requests_alone(arguments, capsys):
    serve.main([*arguments, "--requests", "5"])
    assert "every request has the tokens that it gets alone" in capsys.readouterr().out


def test_tokens_are_those_of_generate():
    """With few pages, so that requests wait for those of others, and chunks that cut prompts anywhere."""
    target = serve.gpt(serve.Size(2, 64, 4, 30, torch.float32, torch.float32, "cpu"), seed=0)
    config = target.model.config
    assert isinstance(config, GPTConfig)
    plain = GPT(config).eval()
    plain.load_state_dict(target.model.state_dict())
    requests = serve.requests_of(2, 6)
    server = serve.Server(target, None, 30, budget=7)
    server.serve(requests)
    assert set(target.graphs) == {(1, 1), (2, 1)}
    assert server.pages.shared and len(server.pages.free) == 30 and not server.pages.known
    for request, again in zip(requests, serve.requests_of(2, 6), strict=True):
        expected = plain.generate(torch.tensor([again.tokens]), again.new_tokens)
        assert request.tokens == expected[0].tolist()
