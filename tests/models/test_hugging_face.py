"""The models against those of transformers with the same random weights: logits and gradients by the tolerance policy;
state dicts there and back; what is not supported is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashtile.models import (
    GPT,
    BertConfig,
    BertForPreTraining,
    GPTConfig,
    config_from_hugging_face,
    from_hugging_face,
    to_hugging_face,
)
from flashtile.testing import Size, assert_close, size
from support.models.module_cases import DEVICES
from support.running.each_case import each_case

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 40, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = SIZES | {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24}
OTHERS = SIZES | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48,
    "max_position_embeddings": 24,
}  # fmt: skip
#: Architecture, its model, options of its configuration.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-wide-untied": ("gpt2", GPT2 | {"n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False}),
    "neox": ("gpt_neox", OTHERS),
    "neox-sequential": ("gpt_neox", OTHERS | {"use_parallel_residual": False, "attention_bias": False}),
    "neox-rotary-all": (
        "gpt_neox",
        OTHERS | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ),
    "llama": ("llama", OTHERS),
    "llama-grouped": ("llama", OTHERS | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", OTHERS | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}
MODELS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "bert": ("BertConfig", "BertForPreTraining"),
}


def make_theirs(architecture: str, options: dict[str, Any], std: float = 0.2) -> nn.Module:
    config, model = (getattr(transformers, name) for name in MODELS[architecture])
    torch.manual_seed(0)
    theirs = model(config(**options, attn_implementation="eager")).eval()
    for name, parameter in theirs.named_parameters():
        # Wide enough that every part counts; norms and biases are not 1 and 0.
        norm = parameter.dim() == 1 and "bias" not in name
        nn.init.normal_(parameter, mean=1.0 if norm else 0.0, std=std)
    return theirs


def make_ours(theirs: nn.Module) -> tuple[nn.Module, Any]:
    config = config_from_hugging_face(theirs.config)
    ours = (GPT if isinstance(config, GPTConfig) else BertForPreTraining)(config)
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), config))
    return ours.eval(), config


def check(theirs: nn.Module, run_theirs: Any, run_ours: Any, dtype: torch.dtype, device: str) -> None:
    """Outputs, and gradients under their names; the oracle is their model in float64, eager theirs in dtype."""
    theirs = copy.deepcopy(theirs).to(device)
    ours, config = make_ours(theirs)
    ours.to(device, dtype)
    eager = copy.deepcopy(theirs).to(dtype)
    oracle = copy.deepcopy(theirs).to(dtype).double()
    projected = key_projections(oracle)

    results = []
    for model, run in ((ours, run_ours), (oracle, run_theirs), (eager, run_theirs)):
        outputs = run(model)
        upstream = torch.Generator().manual_seed(1)
        grads = [torch.randn(o.shape, generator=upstream, dtype=torch.float64).to(o) for o in outputs]
        torch.autograd.backward(outputs, grads)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        if model is ours:
            gradients = to_hugging_face(gradients, config, theirs.config.model_type)
        results.append({f"output {i}": o.detach() for i, o in enumerate(outputs)} | gradients)
    actual, expected, plain = results
    assert actual.keys() >= expected.keys()
    # A bias of the keys moves all scores of a row alike: its gradient is a sum of which nothing is left.
    cancelled = {f"{name}.bias": size(out.grad.abs().sum((0, 1))) for name, out in projected.items()}
    for name in expected:
        assert_close(name, actual[name], expected[name], plain[name], cancelled.get(name, Size()))


def key_projections(model: nn.Module) -> dict[str, Tensor]:
    """The outputs of layers called `key`, with their gradients, once the model has run."""
    projected: dict[str, Tensor] = {}

    def keep(name: str, out: Tensor) -> None:
        out.retain_grad()
        projected[name] = out

    for name, module in model.named_modules():
        if name.endswith(".key"):
            module.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
    return projected


def tokens(batch: int = 2, length: int = 21) -> Tensor:
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DECODERS)
def test_decoders(case, dtype, device):
    given = tokens().to(device)
    check(
        make_theirs(*DECODERS[case]),
        lambda model: (model(given).logits,),
        lambda model: (model(given),),
        dtype, device,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama"])
def test_larger_decoders(architecture, dtype):
    """Heads of 64 columns, more tokens than a tile has."""
    larger = {"n_embd": 256, "n_positions": 333} if architecture == "gpt2" else {
        "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 333,
    }  # fmt: skip
    options = (GPT2 if architecture == "gpt2" else OTHERS) | larger
    given = tokens(2, 333).cuda()
    theirs = make_theirs(architecture, options, 0.05)
    check(theirs, lambda model: (model(given).logits,), lambda model: (model(given),), dtype, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_bert(masked, dtype, device):
    given = tokens(3).to(device)
    segments = (torch.arange(21, device=device) > 9).long().expand(3, -1)
    mask = torch.ones_like(given, dtype=torch.bool)
    if masked:
        mask[0, 13:] = mask[2, 5:] = False

    def run_theirs(model):
        out = model(given, attention_mask=mask.long(), token_type_ids=segments)
        return out.prediction_logits[mask], out.seq_relationship_logits

    def run_ours(model):
        logits, following = model(given, mask if masked else None, segments)
        return logits[mask], following

    check(make_theirs("bert", OTHERS), run_theirs, run_ours, dtype, device)


@each_case("architecture, options", [*DECODERS.values(), ("bert", OTHERS)])
def test_there_and_back(architecture, options):
    theirs = make_theirs(architecture, options)
    ours, config = make_ours(theirs)
    returned = to_hugging_face(ours.state_dict(), config, architecture)
    expected = theirs.state_dict()
    assert returned.keys() == expected.keys()
    assert all(torch.equal(returned[name], expected[name]) for name in expected)
    assert config_from_hugging_face(theirs.config.to_dict()) == config


def test_other_architectures_and_options_are_refused():
    def config(architecture: str, **options: Any) -> Any:
        return getattr(transformers, MODELS[architecture][0])(**options)

    for message, given in {
        "expected model_type 'gpt2', 'gpt_neox', 'llama', 'bert', got 'opt'": transformers.OPTConfig(),
        "expected scale_attn_by_inverse_layer_idx False, got True": config(
            "gpt2", scale_attn_by_inverse_layer_idx=True
        ),
        "expected an activation of 'gelu', .*, got 'tanh'": config("gpt2", activation_function="tanh"),
        "expected hidden_act 'silu', got 'gelu'": config("llama", hidden_act="gelu"),
        "expected head_dim 128, got 64": config("llama", head_dim=64),
        "expected rope_type 'default', got 'linear'": config(
            "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        ),
        "expected is_decoder False, got True": config("bert", is_decoder=True),
        "expected tie_word_embeddings True, got False": config("bert", tie_word_embeddings=False),
    }.items():
        with pytest.raises(ValueError, match=message):
            config_from_hugging_face(given)


def test_configurations_that_are_none_or_lack_an_option_are_named():
    with pytest.raises(TypeError, match="config: expected a configuration of transformers or a dict, got str"):
        config_from_hugging_face("gpt2")
    given = transformers.LlamaConfig().to_dict()
    del given["mlp_bias"]
    with pytest.raises(ValueError, match="config: expected a value of 'mlp_bias', got none"):
        config_from_hugging_face(given)


@each_case("architecture", MODELS)
def test_configurations_of_another_model_are_refused(architecture):
    other = GPTConfig() if architecture == "bert" else BertConfig()
    message = f"config: expected a .* for '{architecture}', got {type(other).__name__}"
    with pytest.raises(ValueError, match=message):
        to_hugging_face({}, other, architecture)
    theirs = make_theirs(architecture, GPT2 if architecture == "gpt2" else OTHERS)
    with pytest.raises(ValueError, match=message):
        from_hugging_face(theirs.state_dict(), other)


def test_states_of_another_model_are_refused():
    theirs = make_theirs(*DECODERS["llama"])
    ours, config = make_ours(theirs)
    state = theirs.state_dict()
    wrong = {name.replace("model.norm", "model.more"): tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match=r"none for \['model.norm.weight'\], and no place for \['model.more.weight'\]"):
        from_hugging_face(wrong, config)
    with pytest.raises(ValueError, match="expected names that begin with one of"):
        from_hugging_face({"weight": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match="expected one with the tensors of this model, got 'gpt2', which differs in"):
        to_hugging_face(ours.state_dict(), config, "gpt2")
    with pytest.raises(ValueError, match="expected one of 'gpt2', 'gpt_neox', 'llama', 'bert', got 'opt'"):
        to_hugging_face(ours.state_dict(), config, "opt")
    # What older versions stored beside the weights.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    assert from_hugging_face(state, config).keys() == ours.state_dict().keys()
