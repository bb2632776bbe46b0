"""What a spread of lengths costs: the batches, the fit, and a run from end to end."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bench import kernel_cpu, kernel_gpu, kernels  # noqa: E402
from bench.kernel_spreads import (  # noqa: E402
    CACHE_BYTES,
    EQUAL,
    SHAPES,
    SPREADS,
    Extra,
    Shape,
    lengths,
    num_pools,
    padding,
    padding_cost,
)
from engine.simulator import measured  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SMALL = Shape(heads=4, kv_heads=2, head_size=64, layers=3)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("batch", "mean"), [(1, 1), (1, 77), (2, 1), (7, 3), (64, 128), (256, 9)])
def test_every_spread_has_the_batch_and_the_total(spread, batch, mean):
    for seed in range(5):
        found = lengths(spread, batch, mean, seed)
        assert (len(found), sum(found)) == (batch, batch * mean)
        assert min(found) >= 1
        assert found == lengths(spread, batch, mean, seed)


def test_spreads_are_what_they_are_called():
    assert set(lengths(EQUAL, 16, 100, 1)) == {100}
    halves = sorted(lengths("1:15", 16, 1600, 1))
    assert halves[7] < 210 < 2900 < halves[8]
    long = sorted(lengths("one long", 64, 1000, 1))
    assert long[-1] == pytest.approx(16_000, rel=0.01)
    assert long[0] == pytest.approx(long[-2], abs=1)
    assert sorted(lengths("one long", 8, 1000, 1))[-1] == pytest.approx(6_000, rel=0.01)
    uniform = lengths("0.5-1.5", 256, 1000, 1)
    assert 400 < min(uniform) < 600 < 1400 < max(uniform) < 1600


def test_another_seed_is_another_draw():
    assert lengths("lognormal", 16, 500, 1) != lengths("lognormal", 16, 500, 2)
    assert lengths("one long", 64, 500, 1) != lengths("one long", 64, 500, 2)


def test_padding_is_what_is_added_to_reach_the_longest():
    assert padding([5, 5]) == 0
    assert padding([1, 9, 2]) == 15


@pytest.mark.parametrize("planted", [3e-9, 0.0, -2e-9])
def test_a_planted_cost_of_padding_is_found(planted):
    found = [Extra(pad, planted * pad, 1e-3 * pad) for pad in (10, 500, 70_000)]
    cost = padding_cost(found)
    assert cost.per_token_s == pytest.approx(planted, rel=1e-9, abs=1e-20)
    assert cost.error_s == pytest.approx(0, abs=1e-15)


def test_the_verdict_goes_by_the_error():
    noise = [1e-5, -1e-5, 1.2e-5, -0.9e-5]
    pads = [1000, 2000, 1500, 1800]

    def verdict(per_token_s):
        pairs = zip(pads, noise, strict=True)
        return padding_cost([Extra(p, per_token_s * p + n, 1e-3) for p, n in pairs]).verdict()

    assert verdict(1e-7) == "a penalty"
    assert "about zero" in verdict(0.0)
    assert "negative" in verdict(-1e-7)


def test_one_batch_proves_no_penalty_and_none_has_no_cost():
    assert "about zero" in padding_cost([Extra(10, 1.0, 1.0)]).verdict()
    with pytest.raises(ValueError, match="no padding"):
        padding_cost([Extra(0, 1.0, 1.0)])


def test_small_batches_read_more_pools_than_a_cache_holds():
    assert num_pools(CACHE_BYTES, SMALL) == 1
    assert num_pools(CACHE_BYTES // 2, SMALL) == 2
    assert num_pools(1, SMALL) == SMALL.layers


def test_both_kernels_of_the_cpu_decode_the_same():
    ready = kernel_cpu.CpuKernels(SMALL, "float32", seed=1)
    batch = ready.batch([3, 40, 1, 17], slots=100)
    keys, values = torch.randn(2, 100, 2, 64)
    kernel_cpu.decode_torch(batch, keys, values)
    found = batch.out.clone()
    assert found.abs().max() > 0
    if ready.csv_kernel == kernel_cpu.TORCH:
        pytest.skip("no compiler on this machine: torch's own attention is used")
    kernel_cpu.decode_ours(batch, keys, values)
    torch.testing.assert_close(batch.out, found, rtol=1e-4, atol=1e-5)


def test_a_run_writes_a_table_json_and_csv(tmp_path, capsys):
    flags = ["--device", "cpu", "--batches", "1,3,8", "--contexts", "6,24", "--rounds", "2"]
    files = ["--json", str(tmp_path / "found.json"), "--csv", str(tmp_path / "steps.csv")]
    assert kernels.main([*flags, *files, "--most-tokens", "150"]) == 0
    said = capsys.readouterr().out
    assert "left out, more than 150 tokens: 8 x 24" in said
    assert "torch_native, batch 8: a spread costs" in said
    record = json.loads((tmp_path / "found.json").read_text())
    assert record["bench"] == "kernels"
    assert "torch_native 3 padding_s" in record["summary"]
    assert all(len(case["seconds"][EQUAL]) == 2 for case in record["cases"])
    rows = measured.read(tmp_path / "steps.csv")
    # Two sizes of one request, which has one length, and three sizes of batches that spread.
    assert len(rows) == 2 + 3 * len(SPREADS)
    assert {(row.step.num_decodes, row.step.context_tokens) for row in rows} == {
        (1, 6),
        (1, 24),
        (3, 18),
        (3, 72),
        (8, 48),
    }
    assert measured.fit(rows).constant_s > 0


def test_the_fit_of_the_csv_is_what_was_planted(tmp_path):
    def case(batch, mean):
        pads = {spread: padding(lengths(spread, batch, mean, 1)) for spread in SPREADS}
        seconds = {
            spread: [1e-3 + 1e-7 * batch * mean + 2e-8 * pad] * 2 for spread, pad in pads.items()
        }
        return kernels.Case("any", batch, mean, pads, seconds)

    cases = [case(batch, mean) for batch in (8, 32) for mean in (100, 2000)]
    kernels._write_csv(tmp_path / "steps.csv", cases)
    found = measured.load(tmp_path / "steps.csv")
    assert found.context_s == pytest.approx(1e-7, rel=1e-4)
    assert found.padding_s == pytest.approx(2e-8, rel=1e-4)
    for cost in kernels._costs(cases):
        assert cost.padding.per_token_s == pytest.approx(2e-8, rel=1e-6)
        assert cost.padding.verdict() == "a penalty"


def test_unsteady_batches_are_counted(capsys):
    def case(equal_s):
        pads = {EQUAL: 0, "1:15": 700}
        return kernels.Case("any", 8, 100, pads, {EQUAL: equal_s, "1:15": [1e-3] * 4})

    steady, unsteady = case([1e-3, 1.1e-3, 1e-3, 9e-4]), case([1e-3, 2e-3, 1e-3, 2e-3])
    assert (steady.noise(), unsteady.noise()) == pytest.approx((0.05, 2 / 3))
    kernels._print([steady, unsteady], kernels._costs([steady, unsteady]))
    assert "1 of 2 batches were unsteady" in capsys.readouterr().out


def test_too_large_is_said(capsys):
    assert kernels.main(["--device", "cpu", "--batches", "4", "--most-tokens", "3"]) == 1
    assert "nothing to measure" in capsys.readouterr().out


def test_without_a_gpu_that_is_said_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(kernel_gpu, "missing", lambda: "it is at the repair shop")
    assert kernels._device("auto") == "cpu"
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "repair shop" in out
    assert kernels.main(["--device", "cuda"]) == 1
    assert "repair shop" in capsys.readouterr().err


def test_neither_sglang_nor_what_a_bare_machine_lacks_is_imported():
    code = (
        "import sys, bench.kernels, bench.kernel_cpu, bench.kernel_gpu;"
        "print({'sglang', 'zmq', 'msgspec', 'flashinfer'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def attention(query, pool, indptr, pages, last):
    """Written out in float64, request by request, over pages."""
    keys, values = (part.double().cpu() for part in pool)
    group = query.shape[1] // keys.shape[2]
    found = []
    for row, asked in enumerate(query.double().cpu()):
        own = pages[indptr[row] : indptr[row + 1]].long().cpu()
        tokens = (len(own) - 1) * keys.shape[1] + int(last[row])
        key = keys[own].flatten(0, 1)[:tokens].repeat_interleave(group, dim=1)
        value = values[own].flatten(0, 1)[:tokens].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", asked, key) * query.shape[-1] ** -0.5
        found.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value))
    return torch.stack(found)


class FakeWrapper:
    """FlashInfer's interface as it is used, over ``attention``."""

    plans = 0

    def __init__(self, workspace, layout, *, use_cuda_graph, use_tensor_cores):
        assert (layout, use_cuda_graph) == ("NHD", False)
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, pages, last, heads, kv_heads, size, page_size, **types):
        FakeWrapper.plans += 1
        assert indptr.dtype == pages.dtype == last.dtype == torch.int32
        assert len(pages) == indptr[-1]
        assert len(set(pages.tolist())) == len(pages)
        assert types["q_data_type"] == types["kv_data_type"] == torch.float32
        self.planned, self.page_size = (indptr, pages, last), page_size

    def run(self, query, pool, *, out):
        assert pool[0].shape[1] == self.page_size
        out.copy_(attention(query, pool, *self.planned))


class FakeEvent:
    def __init__(self, **_):
        pass

    record = synchronize = elapsed_time = lambda self, *_: 5.0


@pytest.fixture
def fake_gpu(monkeypatch):
    fake = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper, __version__="fake")
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(kernel_gpu, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(kernel_gpu, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeWrapper.plans = 0


def test_what_flashinfer_is_told_has_every_request_its_own_pages(fake_gpu):
    ready = kernel_gpu.GpuKernels(SMALL, "float32", 1, graph=False)
    timed = ready.prepare({EQUAL: [20, 20, 20], "other": [1, 16, 43]})
    assert list(timed) == [
        "flashinfer page 1",
        "flashinfer page 1 + plan",
        "flashinfer page 16",
        "flashinfer page 16 + plan",
    ]
    assert ready.csv_kernel in timed
    assert (ready.memory_bytes, FakeWrapper.plans) == (800, 4)
    assert timed["flashinfer page 16"]["other"]() == pytest.approx(5e-3)
    assert FakeWrapper.plans == 4
    timed["flashinfer page 16 + plan"]["other"]()
    assert FakeWrapper.plans == 5


@pytest.mark.parametrize("page_size", kernel_gpu.PAGE_SIZES)
def test_pages_hold_exactly_the_contexts(fake_gpu, page_size):
    ready = kernel_gpu.GpuKernels(SMALL, "float32", 1, graph=False)
    contexts = [1, 16, 43, 32]
    step = ready.step(contexts, [ready.noise_pool(120, page_size)], page_size)
    held = [
        (end - start - 1) * page_size + last
        for start, end, last in zip(step.indptr, step.indptr[1:], step.last, strict=False)
    ]
    assert held == contexts


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("page_size", kernel_gpu.PAGE_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_flashinfer_decodes_what_attention_is(shape, page_size, graph):
    reason = kernel_gpu.missing()
    if reason:
        pytest.skip(reason)
    ready = kernel_gpu.GpuKernels(SHAPES[shape], "bfloat16", 1, graph=graph)
    pool = ready.noise_pool(6000 // page_size, page_size)
    step = ready.step([1, 16, 43, 5000], [pool], page_size)
    assert step.run_s() > 0
    assert step.plan_and_run_s() > 0
    exact = attention(step.query, pool, step.indptr, step.pages, step.last)
    torch.testing.assert_close(step.out.double().cpu(), exact, rtol=2e-2, atol=2e-2)
