"""FlashInfer's paged decode attention, planned and run as SGLang does. Needs torch and flashinfer.

SGLang plans once a step on the host and then replays a CUDA graph in which every layer runs the
kernel on its own pool; so does this. Pages lie anywhere in the pool.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.kernel_spreads import Shape, Timed, num_pools

PAGE_SIZES = (1, 16)
"""SGLang's default, and what others take."""
WORKSPACE_BYTES = 512 << 20
TENSOR_CORE_GROUP = 4
"""Query heads per key-value head from which SGLang has the kernel for tensor cores run."""
MEMORY_SHARE = 0.8

Pool = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values: (pages, page size, key-value heads, head size) each."""


def missing() -> str | None:
    """Why FlashInfer can't be measured here; None where it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return None


class GpuKernels:
    """``kernel_spreads.Kernels`` of the GPU: each page size, without and with planning."""

    def __init__(self, shape: Shape, dtype: str, seed: int, *, graph: bool) -> None:
        import flashinfer

        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._graph = graph
        self._device = _device()
        self._generator = torch.Generator(device=self._device).manual_seed(seed)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self.description = (
            f"{torch.cuda.get_device_name(self._device)}, flashinfer {flashinfer.__version__}, "
            f"torch {torch.__version__}, {'a CUDA graph' if graph else 'no CUDA graph'}"
        )
        self.csv_kernel = f"{_name(PAGE_SIZES[0])} + plan"
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        self.memory_bytes = int(MEMORY_SHARE * free_bytes)

    def prepare(self, batches: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Timed]]:
        """By kernel and name of a batch; ``batches`` are the contexts, of the same total."""
        requests = max(map(len, batches.values()))
        tokens = max(map(sum, batches.values())) + requests * max(PAGE_SIZES)
        size = (self._shape.kv_heads, self._shape.head_size)
        layers = num_pools(tokens * self._shape.bytes_per_token(self._dtype.itemsize), self._shape)
        flat = [(self._noise(tokens, *size), self._noise(tokens, *size)) for _ in range(layers)]
        timed: dict[str, dict[str, Timed]] = {}
        for page_size in PAGE_SIZES:
            # The same memory in other pages: two pools of the largest batches would not fit.
            pools = [(_paged(keys, page_size), _paged(values, page_size)) for keys, values in flat]
            name = _name(page_size)
            timed[name], timed[f"{name} + plan"] = {}, {}
            for spread, contexts in batches.items():
                step = self.step(contexts, pools, page_size)
                timed[name][spread] = step.run_s
                timed[f"{name} + plan"][spread] = step.plan_and_run_s
        return timed

    def step(self, contexts: Sequence[int], pools: Sequence[Pool], page_size: int) -> "PagedStep":
        """A batch's step, planned once and ready to be run."""
        num_pages = pools[0][0].shape[0]
        counts = [-(-tokens // page_size) for tokens in contexts]
        order = torch.randperm(num_pages, generator=self._generator, device=self._device)
        pages = order[: sum(counts)].to(torch.int32)
        query = self._noise(len(contexts), self._shape.heads, self._shape.head_size)
        return PagedStep(
            self._shape,
            self._workspace,
            query,
            pools,
            _host([0, *counts]).cumsum(0, dtype=torch.int32),
            pages,
            _host([(tokens - 1) % page_size + 1 for tokens in contexts]),
            graph=self._graph,
        )

    def noise_pool(self, pages: int, page_size: int) -> Pool:
        """A layer's keys and values."""
        size = (pages, page_size, self._shape.kv_heads, self._shape.head_size)
        return self._noise(*size), self._noise(*size)

    def _noise(self, *size: int) -> torch.Tensor:
        empty = torch.empty(size, dtype=self._dtype, device=self._device)
        return empty.uniform_(-1, 1, generator=self._generator)


class PagedStep:
    """Every layer's attention of one step: FlashInfer's plan, and a run per layer.

    Args:
        shape: of the model's attention.
        workspace: bytes for partial results, shared by steps that never run side by side.
        query: (requests, heads, head size), what each layer asks.
        pools: of the layers, in turn.
        indptr: (requests + 1,) int32 on the host: where each request's pages begin.
        pages: (sum of pages,) int32 on the device.
        last: (requests,) int32 on the host: tokens in each request's last page.
        graph: run from a CUDA graph. Without one the launches of short kernels are what is timed.
    """

    def __init__(
        self,
        shape: Shape,
        workspace: torch.Tensor,
        query: torch.Tensor,
        pools: Sequence[Pool],
        indptr: torch.Tensor,
        pages: torch.Tensor,
        last: torch.Tensor,
        *,
        graph: bool,
    ) -> None:
        self._shape, self.query, self._pools = shape, query, pools
        self.indptr, self.pages, self.last = indptr, pages, last
        self.out = torch.empty_like(query)
        """(requests, heads, head size): of the last layer run."""
        self._wrapper = _wrapper(shape, workspace, indptr, pages, last, graph=graph)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self.plan()
        self.run = self._captured() if graph else self._run_layers

    def plan(self) -> None:
        """Deals the batch out to the GPU's processors, on the host, as once a step."""
        self._wrapper.plan(
            self.indptr,
            self.pages,
            self.last,
            self._shape.heads,
            self._shape.kv_heads,
            self._shape.head_size,
            self._pools[0][0].shape[1],
            pos_encoding_mode="NONE",
            q_data_type=self.query.dtype,
            kv_data_type=self.query.dtype,
        )

    def run_s(self) -> float:
        """Seconds of all layers, planned before."""
        self._start.record()
        self.run()
        return self._elapsed_s()

    def plan_and_run_s(self) -> float:
        """Seconds of the plan and all layers."""
        self._start.record()
        self.plan()
        self.run()
        return self._elapsed_s()

    def _elapsed_s(self) -> float:
        self._end.record()
        self._end.synchronize()
        return 1e-3 * float(self._start.elapsed_time(self._end))

    def _run_layers(self) -> None:
        for layer in range(self._shape.layers):
            self._wrapper.run(self.query, self._pools[layer % len(self._pools)], out=self.out)

    def _captured(self) -> Any:
        # Outside the graph first, on a side stream: what is compiled or allocated once is not
        # allowed while a graph is captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run_layers()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run_layers()
        return graph.replay


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _wrapper(
    shape: Shape,
    workspace: torch.Tensor,
    indptr: torch.Tensor,
    pages: torch.Tensor,
    last: torch.Tensor,
    *,
    graph: bool,
) -> Any:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    # A graph reads the plan where it lay when it was captured, so it has buffers of its own.
    buffers = {
        "paged_kv_indptr_buffer": torch.zeros_like(indptr, device=workspace.device),
        "paged_kv_indices_buffer": torch.zeros_like(pages),
        "paged_kv_last_page_len_buffer": torch.zeros_like(last, device=workspace.device),
    }
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=graph,
        use_tensor_cores=shape.heads // shape.kv_heads >= TENSOR_CORE_GROUP,
        **(buffers if graph else {}),
    )


def _name(page_size: int) -> str:
    return f"flashinfer page {page_size}"


def _host(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _paged(flat: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = len(flat) // page_size
    return flat[: pages * page_size].view(pages, page_size, *flat.shape[1:])
