"""The decode kernel against attention written out in float64."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from engine.kernels import paged_attention  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def kernel():
    if not paged_attention.is_available():
        pytest.skip("no compiler on this machine: torch's own attention is used")


def pool(lengths, heads, kv_heads, size, dtype, *, seed=0, spread=1.0):
    """A pool whose slots are dealt out at random, and a query for each request."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(lengths) + 7

    def noise(*shape):
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    keys, values = noise(num, kv_heads, size), noise(num, kv_heads, size)
    table = torch.full((len(lengths) + 3, max(lengths) + 5), num - 1, dtype=torch.int32)
    slots = torch.randperm(num - 1, generator=generator).to(torch.int32)
    rows = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length], slots = slots[:length], slots[length:]
    query = noise(len(lengths), heads, size)
    return query, keys, values, table, rows, torch.tensor(lengths)


def decoded(query, keys, values, table, rows, lengths, *, window=-1, scale=None):
    out = torch.full_like(query, float("nan"))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    paged_attention.decode(
        query, keys, values, table, rows, lengths, out, scale=scale, window_tokens=window
    )
    return out


def exact(query, keys, values, table, rows, lengths, *, window=-1, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    group = query.shape[1] // keys.shape[1]
    found = []
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        first = 0 if window < 0 else max(0, length - window)
        slots = table[row, first:length].long()
        key = keys[slots].double().repeat_interleave(group, dim=1)
        value = values[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", query[index].double(), key) * scale
        found.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value))
    return torch.stack(found)


HEADS = [(9, 3), (32, 8), (8, 8), (8, 1), (14, 2), (5, 1), (1, 1)]


@pytest.mark.parametrize("size", sorted(paged_attention.HEAD_SIZES))
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_it_is_attention(heads, kv_heads, size):
    given = pool([1, 2, 63, 64, 65, 200], heads, kv_heads, size, torch.float32)
    torch.testing.assert_close(decoded(*given).double(), exact(*given), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [64, 128])
def test_bfloat16_is_rounded_once(size):
    given = pool([1, 17, 300], 8, 2, size, torch.bfloat16)
    ours, true = decoded(*given), exact(*given)
    # Half a unit in the last place of eight bits, and what the float32 sums add.
    torch.testing.assert_close(ours.double(), true, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 64, 100, 1000])
def test_a_window_sees_the_last_tokens_alone(window):
    given = pool([1, 50, 64, 129, 300], 6, 2, 64, torch.float32)
    true = exact(*given, window=window)
    torch.testing.assert_close(decoded(*given, window=window).double(), true, rtol=2e-6, atol=2e-6)


def test_scores_of_hundreds_neither_overflow_nor_vanish():
    given = pool([3, 90, 400], 4, 2, 64, torch.float32, spread=8.0)
    ours = decoded(*given, scale=1.0)
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours.double(), exact(*given, scale=1.0), rtol=1e-4, atol=1e-4)


def test_the_first_tile_may_be_worth_nothing_beside_the_last():
    query, keys, values, table, rows, lengths = pool([130], 2, 1, 64, torch.float32)
    keys[table[rows[0], :129].long()] = -100.0
    keys[table[rows[0], 129].long()] = 100.0
    query.fill_(1.0)
    ours = decoded(query, keys, values, table, rows, lengths)
    last = values[table[rows[0], 129].long(), 0]
    torch.testing.assert_close(ours[0, 0], last)


def test_a_result_does_not_depend_on_who_else_is_in_the_batch():
    query, keys, values, table, rows, lengths = pool([5, 400, 64, 1, 77], 9, 3, 64, torch.float32)
    together = decoded(query, keys, values, table, rows, lengths)
    for index in range(len(lengths)):
        at = slice(index, index + 1)
        alone = decoded(query[at], keys, values, table, rows[at], lengths[at])
        assert torch.equal(alone[0], together[index])


def test_a_result_does_not_depend_on_the_number_of_threads():
    given = pool([5, 400, 64, 1, 77], 9, 3, 64, torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(decoded(*given))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_keys_may_lie_in_a_part_of_a_wider_pool():
    query, keys, values, table, rows, lengths = pool([20, 70], 4, 2, 64, torch.float32)
    both = torch.stack([keys, values], dim=1)
    ours = decoded(query, both[:, 0], both[:, 1], table, rows, lengths)
    assert torch.equal(ours, decoded(query, keys, values, table, rows, lengths))


def test_an_empty_batch_is_nothing():
    query, keys, values, table, rows, lengths = pool([4], 4, 2, 64, torch.float32)
    assert decoded(query[:0], keys, values, table, rows[:0], lengths[:0]).shape == (0, 4, 64)


def test_rows_and_lengths_may_be_of_any_whole_type():
    query, keys, values, table, rows, lengths = pool([4, 9], 4, 2, 64, torch.float32)
    ours = decoded(query, keys, values, table, rows.int(), lengths.int())
    assert torch.equal(ours, decoded(query, keys, values, table, rows, lengths))


@pytest.mark.parametrize("what", ["size", "heads", "table", "lengths", "type", "strided"])
def test_what_does_not_fit_is_refused(what):
    query, keys, values, table, rows, lengths = pool([4, 9], 4, 2, 64, torch.float32)
    if what == "size":
        query, keys, values = query[..., :48], keys[..., :48], values[..., :48]
        query = query.contiguous()
    elif what == "heads":
        query = query[:, :3].contiguous()
    elif what == "table":
        table = table.long()
    elif what == "lengths":
        lengths = lengths[:1]
    elif what == "type":
        values = values.bfloat16()
    else:
        query = query.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RuntimeError):
        decoded(query, keys, values, table, rows, lengths)


def test_what_it_supports():
    query, keys, values, *_ = pool([4], 4, 2, 64, torch.float32)
    assert paged_attention.supports(query, keys, values)
    assert not paged_attention.supports(query.half(), keys.half(), values.half())
    assert not paged_attention.supports(query, keys, values[..., :32])
    assert not paged_attention.supports(query, keys.bfloat16(), values.bfloat16())
    assert not paged_attention.supports(query[..., :48], keys[..., :48], values[..., :48])


OFF = "from engine.kernels.paged_attention import is_available; print(is_available())"


def test_without_a_kernel_it_says_so(monkeypatch):
    monkeypatch.setenv(paged_attention.OFF_VARIABLE, "0")
    found = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


def test_without_a_compiler_it_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "False"
    assert "no attention kernel for this CPU" in found.stderr


def test_it_is_built_once_and_beside_others_who_build(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both = [subprocess.Popen([sys.executable, "-c", OFF], stdout=subprocess.PIPE) for _ in range(2)]
    assert [job.communicate()[0].split()[-1] for job in both] == [b"True", b"True"]
    (folder,) = (tmp_path / "jitserve" / "kernels").iterdir()
    assert [path.name for path in folder.iterdir()] == [f"{paged_attention.NAME}.so"]
    # What was built needs no compiler any more, and a build that was killed is nobody's matter.
    (folder / "lock").touch()
    monkeypatch.setenv("CXX", "no-such-compiler")
    again = subprocess.run([sys.executable, "-c", OFF], capture_output=True, check=True)
    assert again.stdout.split()[-1] == b"True"


def test_another_cpu_is_another_build(monkeypatch):
    here = paged_attention.build_dir()
    monkeypatch.setattr(paged_attention, "_cpu", lambda: "flags: another")
    assert paged_attention.build_dir() != here
