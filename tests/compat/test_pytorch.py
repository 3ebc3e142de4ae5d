"""flash_attn's functions as parts of PyTorch programs: compiled, and called by transformers."""

import textwrap

import pytest
import torch

from flashtile.testing import assert_same
from support.attention.compat_cases import cumulative, normal, served
from support.running.python import run_python

flash_attn_func = served(2).flash_attn_func
flash_attn_varlen_func = served(2).flash_attn_varlen_func
flash_attn_with_kvcache = served(2).flash_attn_with_kvcache
flash_attn_unpadded_qkvpacked_func = served(1, "flash_attn_interface").flash_attn_unpadded_qkvpacked_func

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.mark.slow
def test_compiles_as_one_graph():
    q, k, cu = normal(2, 9, 4, 16).float(), normal(2, 12, 2, 16, seed=1).float(), cumulative([4, 5])
    rows, cache = normal(9, 3, 2, 16).float(), normal(2, 16, 2, 16, seed=2).float()
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    calls = [
        (lambda x: flash_attn_func(x, k, k, causal=True, window_size=(4, -1)), q),
        (lambda x: flash_attn_func(x, k, k, softcap=2.0, return_attn_probs=True)[:2], q),
        (lambda x: flash_attn_varlen_func(*x.unbind(1), cu, cu, 5, 5, causal=True), rows),
        (lambda x: flash_attn_unpadded_qkvpacked_func(x, cu, 5, 0.0, causal=True), rows),
    ]
    for call, given in calls:
        x = given.clone().requires_grad_()
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        for got, wanted in zip(results(compiled, x), results(call, x), strict=True):
            assert_same(got, wanted)

    def step(q, new):
        return flash_attn_with_kvcache(q, cache.clone(), cache.clone(), new, new, cache_seqlens=lengths, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert_same(compiled(q[:, :1], k[:, :1]), step(q[:, :1], k[:, :1]))


def results(call, x):
    outputs = call(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    (grad,) = torch.autograd.grad(outputs[0].square().sum(), x)
    return [out.detach() for out in outputs] + [grad]


TRANSFORMERS = """
import copy, functools, importlib
import torch, flashtile.compat
NAMES = {"flash_attn": "flash_attention_2", "flash_attn_interface": "flash_attention_3",
         "flash_attn.cute": "flash_attention_4"}
for name in NAMES:
    flashtile.compat.install(name)
import transformers.utils.import_utils as available
available.is_torch_cuda_available = lambda: True  # what it asks for beside the package
from transformers import AutoModelForCausalLM, LlamaConfig
from flashtile.testing import assert_same

served = []
for name in NAMES:
    module = importlib.import_module(name)
    for kind, function in (("dense", "flash_attn_func"), ("packed", "flash_attn_varlen_func")):
        call = getattr(module, function)
        @functools.wraps(call)  # transformers looks at its arguments
        def counting(*given, call=(name, kind), function=call, **named):
            served.append(call)
            return function(*given, **named)
        setattr(module, function, counting)

config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
torch.manual_seed(0)
eager = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
tokens = torch.randint(0, 97, (2, 17))
mask = torch.ones_like(tokens)
mask[1, :5] = 0
options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
for name, implementation in NAMES.items():
    flash = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    flash.load_state_dict(eager.state_dict())
    for given, kind in ((None, "dense"), (mask, "packed")):
        served.clear()
        one, two = (model(tokens, attention_mask=given, labels=tokens) for model in (eager, flash))
        assert served == [(name, kind)] * 2, served
        kept = torch.ones_like(mask).bool() if given is None else mask.bool()
        assert_same(two.logits[kept], one.logits[kept])
        if given is None:
            of_both = ((two, flash), (one, eager))
            assert_same(*(torch.autograd.grad(out.loss, list(model.parameters())) for out, model in of_both))
    assert torch.equal(eager.generate(tokens, **options), flash.generate(tokens, **options))
"""


@pytest.mark.slow
def test_transformers_calls_it():
    pytest.importorskip("transformers")
    run_python("-c", textwrap.dedent(TRANSFORMERS))
