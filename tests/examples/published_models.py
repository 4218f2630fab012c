"""What the ``config.json`` of published models says, and folders that hold it without weights.

Source: ``config.json`` of the named repositories on the HuggingFace hub. Keys that shape no tensor
and that nothing here reads are left out.
"""

import json
from math import prod

import yaml

_PUBLISHED = """
llama3: &llama3 {architectures: [LlamaForCausalLM], model_type: llama, vocab_size: 128256,
  num_key_value_heads: 8, intermediate_size: 8192, rms_norm_eps: 1.0e-05, rope_theta: 500000.0,
  rope_scaling: {factor: 32.0, high_freq_factor: 4.0, low_freq_factor: 1.0,
  original_max_position_embeddings: 8192, rope_type: llama3}, max_position_embeddings: 131072,
  hidden_act: silu, tie_word_embeddings: true, bos_token_id: 128000, eos_token_id: 128001}
qwen3: &qwen3 {architectures: [Qwen3ForCausalLM], model_type: qwen3, vocab_size: 151936,
  num_key_value_heads: 8, head_dim: 128, rms_norm_eps: 1.0e-06, rope_theta: 1000000,
  max_position_embeddings: 40960, hidden_act: silu, attention_bias: false,
  use_sliding_window: false, sliding_window: null, tie_word_embeddings: true}
Llama-3.2-1B: {<<: *llama3, hidden_size: 2048, num_hidden_layers: 16, num_attention_heads: 32,
  head_dim: 64}
Llama-3.2-3B: {<<: *llama3, hidden_size: 3072, num_hidden_layers: 28, num_attention_heads: 24,
  head_dim: 128}
Qwen3-4B: {<<: *qwen3, hidden_size: 2560, intermediate_size: 9728, num_hidden_layers: 36,
  num_attention_heads: 32}
Qwen3-1.7B: {<<: *qwen3, hidden_size: 2048, intermediate_size: 6144, num_hidden_layers: 28,
  num_attention_heads: 16}
Qwen3-0.6B-Base: {<<: *qwen3, max_position_embeddings: 32768, hidden_size: 1024,
  intermediate_size: 3072, num_hidden_layers: 28, num_attention_heads: 16}
gemma-3-1b-pt: {architectures: [Gemma3ForCausalLM], model_type: gemma3_text, vocab_size: 262144,
  hidden_size: 1152, intermediate_size: 6912, num_hidden_layers: 26, num_attention_heads: 4,
  num_key_value_heads: 1, head_dim: 256, query_pre_attn_scalar: 256, rms_norm_eps: 1.0e-06,
  rope_theta: 1000000, rope_local_base_freq: 10000, rope_scaling: null, sliding_window: 512,
  sliding_window_pattern: 6, max_position_embeddings: 32768,
  hidden_activation: gelu_pytorch_tanh, attn_logit_softcapping: null,
  final_logit_softcapping: null, attention_bias: false, bos_token_id: 2, eos_token_id: 1,
  pad_token_id: 0}
Phi-4-mini-instruct: {architectures: [Phi3ForCausalLM], model_type: phi3, vocab_size: 200064,
  hidden_size: 3072, intermediate_size: 8192, num_hidden_layers: 32, num_attention_heads: 24,
  num_key_value_heads: 8, rms_norm_eps: 1.0e-05, rope_theta: 10000.0,
  partial_rotary_factor: 0.75, original_max_position_embeddings: 4096,
  max_position_embeddings: 131072, sliding_window: 262144, hidden_act: silu,
  attention_bias: false, tie_word_embeddings: true, bos_token_id: 199999, eos_token_id: 199999,
  pad_token_id: 199999}
"""

CONFIGS = {
    name: values
    for name, values in yaml.safe_load(_PUBLISHED).items()
    if name not in ("llama3", "qwen3")
}
"""By the last part of the repository's name."""

CONFIGS["Qwen3-1.7B-with-llama-3-tokenizer"] = {**CONFIGS["Qwen3-1.7B"], "vocab_size": 128256}
"""What ``megatron-ext transfer init`` makes of it."""

BILLIONS = {
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
    "Qwen3-4B": 4.02,
    "Qwen3-1.7B": 1.72,
    "Qwen3-0.6B-Base": 0.60,
    "gemma-3-1b-pt": 1.00,
}
"""Parameters, as the models' pages say; an embedding that is the head too counts once."""


def write_config(folder, name):
    """A model's folder with ``config.json``, an empty tokenizer file and nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    (folder / "tokenizer.json").touch()
    return folder


def write_hollow_weights(folder, shapes):
    """A safetensors file whose header is that of weights in bf16, and whose data is a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
