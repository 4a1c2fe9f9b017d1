"""`--speculative-algorithm EAGLE` runs in the same workers: tokens are right with an untrained draft too."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from client import ROOT, Request, prompt
from safetensors.torch import save_file
from shapes import SHAPES, plan
from test_tokens import check_tokens, delta

from specdec.servers.server import Server, ServerPlan

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def untrained_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer EAGLE draft (models/llama_eagle.py) with random weights; head and embedding are the target's."""
    folder = tmp_path_factory.mktemp("eagle-draft")
    config = json.loads((ROOT / "env/tiny_pair/target/config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (queries, hidden),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "embed_tokens.weight": (config["vocab_size"], hidden),
    }
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    weights |= {"fc.bias": torch.zeros(hidden), "layers.0.post_attention_layernorm.weight": torch.ones(hidden)}
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    draft = config | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(draft))
    return folder


def test_eagle_crosses_the_threshold(
    baseline: Server, start: Callable[[ServerPlan], Server], untrained_draft: Path
) -> None:
    flags = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(untrained_draft)]
    server = start(plan(list(SHAPES)[-1], *flags))
    server.set_threshold(3)
    before, after = check_tokens(baseline, server, [Request(prompt(i), 16 + 8 * i) for i in range(6)])
    assert delta(before, after, "switches_off") >= 1
    assert delta(before, after, "plain_steps") > 0
    assert delta(before, after, "speculative_steps") > 0
