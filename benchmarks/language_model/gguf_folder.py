"""A Llama folder as a GGUF file: ``python gguf_folder.py FOLDER FILE TYPE``, in the environment of the peers.

Its tokens have no texts. ``TYPE`` is a type of llama.cpp, such as ``Q8_0`` or ``Q4_K_M``, which quantises.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write(folder: Path, path: Path) -> None:
    """The folder's numbers as float32."""
    config = json.loads((folder / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, numbers in load_file(folder / "model.safetensors").items():
        array = numbers.astype(np.float32)
        if name.endswith("q_proj.weight"):
            array = _interleaved(array, num_heads)
        elif name.endswith("k_proj.weight"):
            array = _interleaved(array, num_kv_heads)
        writer.add_tensor(_renamed(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module = name.removesuffix(".weight")
    if module in whole:
        return f"{whole[module]}.weight"
    _, _, index, part = module.split(".", 3)
    return f"blk.{index}.{_NAMES[part]}.weight"


def _interleaved(weight: Any, num_heads: int) -> Any:
    """Rows in the order of llama.cpp's rotary embedding, which pairs neighbours rather than halves."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    source, target, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    exact = target.with_suffix(".f32")
    write(source, exact)
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.nthread = 1
    status = llama_cpp.llama_model_quantize(str(exact).encode(), str(target).encode(), ctypes.byref(parameters))
    exact.unlink()
    sys.exit(status)
