"""Our attention backend for CPUs against SGLang's torch-native one."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

# Importing SGLang takes a quarter of a minute on two idle cores, and it warns of missing GPUs.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def backends():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from engine.runtime.cpu_attention import PagedCpuAttention

    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    return PagedCpuAttention(runner), TorchNativeAttnBackend(runner)


def batch(new, cached, *, heads=9, kv_heads=3, size=64, dtype=torch.float32):
    """Prompts (or one token each) of which the beginning is in the pool."""
    generator = torch.Generator().manual_seed(3)
    lengths = [a + b for a, b in zip(new, cached, strict=True)]
    num = sum(lengths) + 3
    keys = torch.randn(num, kv_heads, size, generator=generator).to(dtype)
    values = torch.randn(num, kv_heads, size, generator=generator).to(dtype)
    table = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int32)
    slots = torch.randperm(num, generator=generator).to(torch.int32)
    for row, length in enumerate(lengths):
        table[row, :length], slots = slots[:length], slots[length:]
    query = torch.randn(sum(new), heads, size, generator=generator).to(dtype)
    rows = torch.arange(len(lengths))
    return (query, keys, values, table, rows, torch.tensor(lengths)), torch.tensor(cached)


def both(backends, method, given, *lens, **options):
    query, keys, values, table, rows, lengths = given
    found = []
    for backend in backends:
        out = torch.full_like(query, float("nan"))
        getattr(backend, method)(
            query, out, keys, values, table, rows, lengths, *lens, None, **options
        )
        found.append(out)
    return found


OPTIONS = {"scaling": 0.125, "enable_gqa": True, "is_cross_attn": False}


@pytest.mark.parametrize("window", [None, -1, 0, 5, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_as_theirs(backends, window, dtype):
    given, _ = batch([1] * 5, [0, 3, 63, 64, 200], dtype=dtype)
    options = {**OPTIONS, "causal": False, "sliding_window_size": window}
    ours, theirs = both(backends, "_run_sdpa_forward_decode", given, **options)
    near = 2e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=near, atol=near)


@pytest.mark.parametrize("window", [None, 4, 70])
@pytest.mark.parametrize("cached", [[0, 0, 0], [1, 0, 40], [64, 200, 0]])
def test_prompts_are_as_theirs(backends, window, cached):
    new = [1, 17, 130]
    given, cached_tokens = batch(new, cached)
    options = {**OPTIONS, "causal": True, "sliding_window_size": window}
    lens = (cached_tokens, torch.tensor(new))
    ours, theirs = both(backends, "_run_sdpa_forward_extend", given, *lens, **options)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def test_what_is_not_causal_is_left_to_them(backends):
    given, cached = batch([4, 9], [0, 0])
    options = {**OPTIONS, "causal": False, "sliding_window_size": None}
    lens = (cached, torch.tensor([4, 9]))
    ours, theirs = both(backends, "_run_sdpa_forward_extend", given, *lens, **options)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_type_without_a_kernel_is_left_to_them(backends, dtype):
    given, _ = batch([1, 1], [5, 9], dtype=dtype)
    options = {**OPTIONS, "causal": False, "sliding_window_size": None}
    ours, theirs = both(backends, "_run_sdpa_forward_decode", given, **options)
    assert torch.equal(ours, theirs)


def test_without_the_kernel_it_is_theirs(backends, monkeypatch):
    ours, theirs = backends
    monkeypatch.setattr(ours, "_has_kernel", False)
    given, _ = batch([1, 1], [5, 9])
    options = {**OPTIONS, "causal": False, "sliding_window_size": None}
    found = both((ours, theirs), "_run_sdpa_forward_decode", given, **options)
    assert torch.equal(*found)


def test_registering_twice_is_registering_once():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from engine.runtime import cpu_attention

    cpu_attention.register()
    cpu_attention.register()
    assert ATTENTION_BACKEND_CHOICES.count(cpu_attention.NAME) == 1
    assert ATTENTION_BACKENDS[cpu_attention.NAME] is cpu_attention.PagedCpuAttention
