"""Copies of KV, against SGLang's own radix cache, allocator and pool."""

from array import array
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

# Importing SGLang takes a quarter of a minute on two idle cores, and it warns of missing GPUs.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

LAYERS, HEADS, SIZE = 2, 3, 4
TOKEN_BYTES = 2 * LAYERS * HEADS * SIZE * 4
COMPUTING = 1.0
"""Seconds for a token to be computed again: dearer than any copy here."""


class Ticking:
    """A clock that is a millisecond further each time."""

    now = 0.0

    def now_s(self):
        self.now += 1e-3
        return self.now


class Pool:
    """What the swap uses of SGLang's pool of keys and values."""

    cpu_offloading_chunk_size = 20

    def __init__(self, num):
        shape = (num + 1, HEADS, SIZE)
        self.k_buffer = [torch.zeros(shape) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(shape) for _ in range(LAYERS)]
        self.fails = False

    def get_cpu_copy(self, indices, **_):
        if self.fails:
            raise RuntimeError("no memory")
        pieces = indices.split(self.cpu_offloading_chunk_size)
        return [
            [[keys[piece].clone(), values[piece].clone()] for piece in pieces]
            for keys, values in zip(self.k_buffer, self.v_buffer, strict=True)
        ]

    def load_cpu_copy(self, copy, indices, **_):
        if self.fails:
            raise RuntimeError("no memory")
        size = self.cpu_offloading_chunk_size
        for layer, chunks in enumerate(copy):
            for number, piece in enumerate(indices.split(size)):
                keys, values = chunks[number]
                assert len(keys) == len(values) == len(piece)
                self.k_buffer[layer][piece] = keys
                self.v_buffer[layer][piece] = values


def make_tree(tree_type, allocator, *, page_size=1, disable=False):
    """The one that SGLang makes, or the one that it made before."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    if tree_type == "plain":
        return RadixCache.create_simulated(
            mock_allocator=allocator, page_size=page_size, disable=disable
        )
    return UnifiedRadixCache(
        CacheInitParams(
            disable=disable,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
        )
    )


@pytest.fixture(autouse=True, params=["unified", "plain"])
def tree_type(request, monkeypatch):
    monkeypatch.setattr(Engine, "tree_type", request.param)
    return request.param


class Engine:
    """SGLang's tree and allocator over such a pool, and one request's way through them."""

    tree_type = "unified"

    def __init__(self, num=200, max_bytes=1 << 20):
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        from engine.runtime.kv_swap import KvSwap

        self.pool = Pool(num)
        self.allocator = TokenToKVPoolAllocator(
            num, dtype=torch.float32, device="cpu", kvcache=self.pool, need_sort=False
        )
        self.tree = make_tree(self.tree_type, self.allocator)
        self.rows = torch.zeros((8, num), dtype=torch.int32)
        self.swap = KvSwap(
            self.tree,
            self.allocator,
            SimpleNamespace(req_to_token=self.rows),
            Ticking(),
            max_bytes,
        )

    def run(self, tokens, row=0, **more):
        """A request that has these tokens in the pool; its KV is told by its tokens."""
        slots = self.allocator.alloc(len(tokens))
        self.rows[row, : len(tokens)] = slots
        for layer in range(LAYERS):
            value = torch.tensor(tokens, dtype=torch.float32)[:, None, None] + 1000 * layer
            self.pool.k_buffer[layer][slots] = value.expand(-1, HEADS, SIZE)
            self.pool.v_buffer[layer][slots] = -value.expand(-1, HEADS, SIZE)
        fields = {
            "multimodal_inputs": None,
            "positional_embed_overrides": None,
            "session": None,
            "skip_radix_cache_insert": False,
            "extra_key": None,
            "cache_salt": None,
            "full_untruncated_fill_ids": array("q", tokens),
            "refresh_fill_ids": lambda: None,
            "owned_kv_len": lambda: len(tokens),
            "kv": SimpleNamespace(req_pool_idx=row),
        }
        return SimpleNamespace(**{**fields, **more}), slots

    def cached(self, tokens):
        """The slots of what the tree has of them."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        if not match.device_prefix_len:
            return torch.empty(0, dtype=torch.int64)
        return self.tree.path_device_indices(match.last_device_node)

    def keep(self, tokens, slots):
        """The prefix cache takes KV over."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", tokens))
        self.tree.insert(InsertParams(key=key, value=slots.to(torch.int64)))

    def check(self, tokens):
        """All of them are cached, and the KV is theirs."""
        slots = self.cached(tokens)
        assert len(slots) == len(tokens)
        for layer in range(LAYERS):
            value = torch.tensor(tokens, dtype=torch.float32) + 1000 * layer
            assert torch.equal(self.pool.k_buffer[layer][slots][:, 1, 2], value)
            assert torch.equal(self.pool.v_buffer[layer][slots][:, 1, 2], -value)

    @property
    def held(self):
        return self.allocator.available_size() + self.tree.evictable_size()


TOKENS = list(range(10, 80))


def preempted(engine, tokens=TOKENS, name="a", **more):
    """Saved, and then lost altogether."""
    req, slots = engine.run(tokens, **more)
    engine.swap.save(name, req)
    engine.allocator.free(slots)
    for buffers in (engine.pool.k_buffer, engine.pool.v_buffer):
        for buffer in buffers:
            buffer[slots] = 0.0


def test_what_was_lost_comes_back_through_the_prefix_cache():
    engine = Engine()
    preempted(engine)
    assert engine.swap.num_bytes == len(TOKENS) * TOKEN_BYTES
    engine.swap.restore("a", COMPUTING)
    engine.check(TOKENS)
    assert engine.held == 200
    assert engine.swap.state()["restored_tokens"] == len(TOKENS)


def test_only_what_is_missing_is_copied_back():
    engine = Engine()
    req, slots = engine.run(TOKENS)
    engine.swap.save("a", req)
    engine.keep(TOKENS[:30], slots[:30])
    engine.allocator.free(slots[30:])
    engine.swap.restore("a", COMPUTING)
    engine.check(TOKENS)
    assert torch.equal(engine.cached(TOKENS)[:30], slots[:30].to(torch.int64))
    assert engine.swap.restored_tokens == 40
    assert engine.held == 200


def test_what_is_still_cached_is_left_alone():
    engine = Engine()
    req, slots = engine.run(TOKENS)
    engine.swap.save("a", req)
    engine.keep(TOKENS, slots)
    engine.swap.restore("a", COMPUTING)
    assert engine.swap.num_restored == 0
    engine.check(TOKENS)


def test_room_is_made_by_eviction_but_not_of_its_own_beginning():
    engine = Engine(num=100)
    req, slots = engine.run(TOKENS)
    engine.swap.save("a", req)
    engine.keep(TOKENS[:30], slots[:30])
    engine.allocator.free(slots[30:])
    # Everything else is somebody's that nobody uses any more.
    other = list(range(500, 570))
    engine.keep(other, engine.allocator.alloc(70))
    assert engine.allocator.available_size() == 0
    engine.swap.restore("a", COMPUTING)
    engine.check(TOKENS)
    assert engine.held == 100


def test_without_room_nothing_changes_and_the_copy_stays():
    engine = Engine(num=100)
    preempted(engine)
    taken = engine.allocator.alloc(90)
    engine.swap.restore("a", COMPUTING)
    assert len(engine.cached(TOKENS)) == 0
    assert engine.allocator.available_size() == 10
    engine.allocator.free(taken)
    engine.swap.restore("a", COMPUTING)
    engine.check(TOKENS)


def test_where_computing_is_cheaper_it_is_computed():
    engine = Engine()
    preempted(engine)
    engine.swap.restore("a", engine.swap.token_s)
    assert engine.swap.num_restored == 0
    engine.swap.restore("a", 1.01 * engine.swap.token_s)
    assert engine.swap.num_restored == 1


def test_a_token_takes_what_it_was_measured_to_take():
    engine = Engine()
    assert engine.swap.token_s is None
    preempted(engine)
    assert engine.swap.token_s == pytest.approx(1e-3 / len(TOKENS))


def test_the_oldest_copy_goes_where_memory_is_short():
    engine = Engine(max_bytes=150 * TOKEN_BYTES)
    for number in range(3):
        preempted(engine, list(range(100 * number, 100 * number + 70)), str(number))
    assert engine.swap.num_bytes == 140 * TOKEN_BYTES
    assert engine.swap.num_lost == 1
    engine.swap.restore("0", COMPUTING)
    assert engine.swap.num_restored == 0
    engine.swap.restore("2", COMPUTING)
    engine.check(list(range(200, 270)))


def test_one_that_is_larger_than_all_memory_is_not_copied():
    engine = Engine(max_bytes=60 * TOKEN_BYTES)
    preempted(engine)
    assert engine.swap.num_bytes == engine.swap.num_saved == 0


def test_saving_again_replaces_the_copy():
    engine = Engine()
    preempted(engine)
    preempted(engine, [*TOKENS, 1, 2, 3])
    assert engine.swap.num_bytes == (len(TOKENS) + 3) * TOKEN_BYTES
    engine.swap.restore("a", COMPUTING)
    engine.check([*TOKENS, 1, 2, 3])


def test_a_request_that_runs_or_ended_has_no_copy():
    engine = Engine()
    preempted(engine)
    engine.swap.forget("a")
    engine.swap.forget("never there")
    assert engine.swap.num_bytes == 0
    engine.swap.restore("a", COMPUTING)
    assert engine.swap.num_restored == 0


def test_after_a_flush_nothing_comes_back():
    engine = Engine()
    preempted(engine)
    engine.swap.clear()
    engine.swap.restore("a", COMPUTING)
    assert (engine.swap.num_bytes, engine.swap.num_restored) == (0, 0)


@pytest.mark.parametrize(
    "more",
    [
        {"multimodal_inputs": object()},
        {"positional_embed_overrides": object()},
        {"session": object()},
        {"skip_radix_cache_insert": True},
    ],
)
def test_what_tokens_do_not_tell_is_not_copied(more):
    engine = Engine()
    preempted(engine, **more)
    assert engine.swap.num_saved == 0


def test_a_few_tokens_are_not_worth_it():
    engine = Engine()
    preempted(engine, TOKENS[:15])
    assert engine.swap.num_saved == 0


def test_a_copy_that_fails_costs_nothing_but_itself():
    engine = Engine()
    engine.pool.fails = True
    preempted(engine)
    assert (engine.swap.num_saved, engine.swap.num_lost) == (0, 1)
    engine.pool.fails = False
    preempted(engine)
    engine.pool.fails = True
    engine.swap.restore("a", COMPUTING)
    assert engine.swap.num_lost == 2
    assert engine.allocator.available_size() == 200
    assert (engine.swap.num_bytes, len(engine.cached(TOKENS))) == (0, 0)


def test_namespaces_are_kept_apart():
    engine = Engine()
    preempted(engine, extra_key="adapter")
    engine.swap.restore("a", COMPUTING)
    assert engine.swap.num_restored == 1
    assert len(engine.cached(TOKENS)) == 0


def test_what_can_be_swapped(tree_type):
    from engine.runtime.kv_swap import can_swap

    engine = Engine()
    assert can_swap(engine.tree, engine.allocator)
    for changes in ({"page_size": 16}, {"disable": True}):
        assert not can_swap(make_tree(tree_type, engine.allocator, **changes), engine.allocator)
    assert not can_swap(SimpleNamespace(disable=False, page_size=1), engine.allocator)
    del engine.pool.k_buffer
    assert not can_swap(engine.tree, engine.allocator)


@pytest.mark.parametrize("owner", ["cache_controller", "linker"])
def test_a_tree_that_moves_kv_by_itself_is_left_to_it(owner):
    from engine.runtime.kv_swap import can_swap

    engine = Engine()
    if engine.tree_type == "unified":
        setattr(engine.tree, owner, object())
        assert not can_swap(engine.tree, engine.allocator)
