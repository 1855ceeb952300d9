"""CacheEngine: shapes and stride orders of backends, bit-exact moves, and every refusal."""

from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda.compat.cache_engine import CacheEngine, LayerType
from kvpagoda.errors import BadInput, NotOwned
from raises import raises


class Model:
    """A hybrid of attention and state-space layers, as one rank sees it."""

    def __init__(self, layers=8, heads=4, head_size=6, dtype=torch.float16, use_mla=False):
        self.layers, self.heads, self.head_size, self.dtype, self.use_mla = layers, heads, head_size, dtype, use_mla

    def get_head_size(self):
        return self.head_size

    def get_num_kv_heads(self, parallel):
        return self.heads // parallel.tensor_parallel_size

    def get_num_layers_by_block_type(self, parallel, block_type):
        return {"attention": self.layers, "mamba": 3}[block_type] // parallel.pipeline_parallel_size


class Backend:
    """A shape and a stride order, as attention backends give them."""

    def __init__(self, shape, order=None):
        self.shape = shape
        if order is not None:
            self.get_kv_cache_stride_order = lambda: order

    def get_kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return self.shape(num_blocks, block_size, num_kv_heads, head_size)


BACKENDS = {
    "none": None,
    "kv first": Backend(lambda n, b, h, d: (2, n, b, h, d)),
    "blocks first": Backend(lambda n, b, h, d: (n, 2, b, h, d), (0, 1, 2, 3, 4)),
    "heads outside tokens": Backend(lambda n, b, h, d: (n, 2, b, h, d), (0, 1, 3, 2, 4)),
    "heads outside blocks": Backend(lambda n, b, h, d: (2, n, b, h, d), (0, 3, 1, 2, 4)),
    "an order that is not its own inverse": Backend(lambda n, b, h, d: (2, n, b, h, d), (1, 3, 0, 4, 2)),
    "flat": Backend(lambda n, b, h, d: (2, n, b * h * d)),
    "latent": Backend(lambda n, b, h, d: (n, b, d)),
}


def make(backend="none", *, gpu=7, cpu=5, model=None, block_size=3, cache_dtype="auto", pp=1, tp=1, **kwargs):
    cache = SimpleNamespace(block_size=block_size, num_gpu_blocks=gpu, num_cpu_blocks=cpu, cache_dtype=cache_dtype)
    parallel = SimpleNamespace(pipeline_parallel_size=pp, tensor_parallel_size=tp)
    device = SimpleNamespace(device_type="cpu")
    backend = BACKENDS[backend] if isinstance(backend, str) else backend
    return CacheEngine(cache, model or Model(layers=2), parallel, device, backend, **kwargs)


def fill(engine):
    rng = torch.Generator().manual_seed(0)
    for side in (engine._gpu, engine._cpu):
        side.rows.copy_(torch.randint(0, 256, side.rows.shape, dtype=torch.uint8, generator=rng))


def blocks(tensor, engine):
    """[num_blocks, bytes]: what each block holds, read through the view that the backend sees."""
    shape, longer = engine._shape(4), engine._shape(5)
    axis = next(i for i in range(len(shape)) if shape[i] != longer[i])
    return tensor.movedim(axis, 0).contiguous().flatten(1).view(torch.uint8)


def test_default_shapes():
    engine = make()
    assert [t.shape for t in engine.gpu_cache] == [(2, 7, 3, 4, 6)] * 2
    assert [t.shape for t in engine.cpu_cache] == [(2, 5, 3, 4, 6)] * 2
    assert all(t.dtype == torch.float16 and t.is_contiguous() and not t.any() for t in engine.gpu_cache)
    mla = make(model=Model(layers=2, heads=1, head_size=576, use_mla=True))
    assert mla.gpu_cache[0].shape == (7, 3, 576)


def test_keyword_names_and_attributes():
    cache = SimpleNamespace(block_size=3, num_gpu_blocks=9, num_cpu_blocks=6, cache_dtype="fp8")
    model, parallel = Model(layers=6, heads=4), SimpleNamespace(pipeline_parallel_size=3, tensor_parallel_size=2)
    device, backend = SimpleNamespace(device_type="cpu"), BACKENDS["blocks first"]
    engine = CacheEngine(
        cache_config=cache, model_config=model, parallel_config=parallel, device_config=device, attn_backend=backend
    )
    assert engine.cache_config is cache and engine.model_config is model and engine.attn_backend is backend
    assert engine.parallel_config is parallel and engine.device_config is device
    assert (engine.head_size, engine.num_attention_layers, engine.num_kv_heads, engine.block_size) == (6, 2, 2, 3)
    assert (engine.num_gpu_blocks, engine.num_cpu_blocks, engine.dtype) == (3, 2, torch.uint8)
    assert [tuple(t.shape) for t in engine.gpu_cache] == [(3, 2, 3, 2, 6)] * 2
    assert [tuple(t.shape) for t in engine.cpu_cache] == [(2, 2, 3, 2, 6)] * 2


@pytest.mark.parametrize(("pp", "gpu", "cpu"), [(1, 7, 5), (2, 3, 2), (5, 1, 1), (8, 0, 0)])
def test_blocks_are_divided_over_the_pipeline_stages(pp, gpu, cpu):
    engine = make(pp=pp, model=Model(layers=2 * pp))
    assert (engine.num_gpu_blocks, engine.num_cpu_blocks) == (gpu, cpu)
    assert engine.gpu_cache[0].shape[1] == gpu and engine.cpu_cache[0].shape[1] == cpu
    with pytest.raises(NotOwned):
        engine.swap_in(torch.tensor([[cpu, 0]]))


def test_a_side_without_blocks_has_no_cache():
    nothing = torch.empty(0, 2, dtype=torch.int64)
    for gpu, cpu in ((7, None), (None, 5), (None, None)):
        engine = make(gpu=gpu, cpu=cpu)
        assert (engine.num_gpu_blocks, engine.num_cpu_blocks) == (gpu, cpu)
        assert (len(engine.gpu_cache), len(engine.cpu_cache)) == (0 if gpu is None else 2, 0 if cpu is None else 2)
        for call in (engine.swap_in, engine.swap_out):
            call(nothing)
            with raises(NotOwned, field=ANY, needed=[0, 0], available=-1):
                call(torch.tensor([[0, 0]]))


def test_layers_are_counted_by_type_and_stage_and_heads_by_rank():
    engine = make(model=Model(layers=8, heads=4), pp=2, tp=2)
    assert len(engine.gpu_cache) == len(engine.cpu_cache) == engine.num_attention_layers == 4
    assert engine.gpu_cache[0].shape == (2, 3, 3, 2, 6) and engine.num_kv_heads == 2
    assert len(make(layer_type="mamba").gpu_cache) == 3
    assert LayerType.attention == "attention"
    assert make(model=Model(layers=0)).gpu_cache == []


@pytest.mark.parametrize("name", list(BACKENDS))
def test_shape_and_stride_order_are_those_of_the_backend(name):
    engine = make(name)
    backend = engine.attn_backend
    for tensors, num in ((engine.gpu_cache, 7), (engine.cpu_cache, 5)):
        shape = backend.get_kv_cache_shape(num, 3, 4, 6) if backend else (2, num, 3, 4, 6)
        ask = getattr(backend, "get_kv_cache_stride_order", None)
        order = ask() if ask else tuple(range(len(shape)))
        for tensor in tensors:
            assert tuple(tensor.shape) == tuple(shape)
            assert tensor.permute(order).is_contiguous()
        starts = [tensor.data_ptr() for tensor in tensors]
        assert starts[1] - starts[0] == tensors[0].numel() * tensors[0].element_size()


@pytest.mark.parametrize(
    ("cache_dtype", "model_dtype", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", "float32", torch.float32),
        ("auto", torch.float8_e4m3fn, torch.float8_e4m3fn),
        ("fp8", torch.bfloat16, torch.uint8),
        ("fp8_e5m2", torch.bfloat16, torch.uint8),
        ("half", torch.bfloat16, torch.float16),
        ("bfloat16", torch.float16, torch.bfloat16),
    ],
)
def test_dtypes(cache_dtype, model_dtype, expected):
    engine = make(cache_dtype=cache_dtype, model=Model(layers=1, dtype=model_dtype))
    assert engine.gpu_cache[0].dtype == engine.cpu_cache[0].dtype == engine.dtype == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_whole_blocks_move_bit_exactly_and_nothing_else_does(name, dtype):
    engine = make(name, model=Model(layers=2, dtype=dtype))
    fill(engine)
    rng = np.random.default_rng(0)
    moves = [
        (engine.swap_in, engine.cpu_cache, engine.gpu_cache),
        (engine.swap_out, engine.gpu_cache, engine.cpu_cache),
        (engine.copy, engine.gpu_cache, engine.gpu_cache),
    ]
    for move, source, target in moves:
        n = 3
        dst = rng.permutation(len(blocks(target[0], engine)))[:n]
        others = [i for i in range(len(blocks(source[0], engine))) if move != engine.copy or i not in dst]
        src = rng.choice(others, n)
        before = [(blocks(a, engine).clone(), blocks(b, engine).clone()) for a, b in zip(source, target)]
        move(torch.from_numpy(np.stack([src, dst], 1).astype(np.int64)))
        for layer, (was_source, was_target) in enumerate(before):
            now = blocks(target[layer], engine)
            was_target[torch.from_numpy(dst)] = was_source[torch.from_numpy(src)]
            assert torch.equal(now, was_target)


def test_one_source_may_go_to_several_destinations():
    engine = make()
    fill(engine)
    engine.copy(torch.tensor([[0, 3], [0, 4], [1, 5]]))
    for tensor in engine.gpu_cache:
        rows = blocks(tensor, engine)
        assert torch.equal(rows[3], rows[0]) and torch.equal(rows[4], rows[0]) and torch.equal(rows[5], rows[1])


@pytest.mark.parametrize(
    ("call", "pairs", "wrong", "available", "field"),
    [
        ("swap_in", [[0, 1], [5, 2]], [0, 5], 4, "source"),
        ("swap_in", [[0, 7]], [7, 7], 6, "destination"),
        ("swap_in", [[-1, 0]], [-1, -1], 4, "source"),
        ("swap_in", [[0, -1]], [-1, -1], 6, "destination"),
        ("swap_in", [[0, 3], [1, 3]], [3], None, None),
        ("swap_out", [[0, 5]], [5, 5], 4, "destination"),
        ("swap_out", [[7, 0]], [7, 7], 6, "source"),
        ("swap_out", [[0, 3], [0, 3]], [3], None, None),
        ("copy", [[0, 7]], [7, 7], 6, "destination"),
        ("copy", [[0, 2], [1, 2]], [2], None, None),
        ("copy", [[0, 1], [1, 2]], [1], None, None),
        ("copy", [[3, 3]], [3], None, None),
    ],
)
def test_bad_ids_raise_before_anything_moves(call, pairs, wrong, available, field):
    engine = make()
    fill(engine)
    before = engine._gpu.rows.clone(), engine._cpu.rows.clone()
    with raises(NotOwned, needed=wrong, available=available, field=field):
        getattr(engine, call)(torch.tensor(pairs))
    assert torch.equal(engine._gpu.rows, before[0]) and torch.equal(engine._cpu.rows, before[1])


@pytest.mark.parametrize(
    "pairs",
    [
        torch.zeros(2, 2, dtype=torch.int32),
        torch.zeros(2, 2),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
        [[0, 1]],
        {0: 1},
        None,
    ],
)
def test_pairs_of_another_shape_or_dtype_raise(pairs):
    engine = make()
    for call in (engine.swap_in, engine.swap_out, engine.copy):
        with raises(BadInput, needed=ANY):
            call(pairs)


def test_no_pairs_and_no_host_blocks():
    engine = make(cpu=0)
    nothing = torch.empty(0, 2, dtype=torch.int64)
    engine.swap_in(nothing)
    engine.swap_out(nothing)
    engine.copy(nothing)
    make(model=Model(layers=0)).swap_in(torch.tensor([[0, 0]]))
    assert engine.cpu_cache[0].shape == (2, 0, 3, 4, 6)
    with pytest.raises(NotOwned):
        engine.swap_out(torch.tensor([[0, 0]]))


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "float"])
@pytest.mark.parametrize("use_mla", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_the_block_size_in_bytes_is_what_the_tensors_take(cache_dtype, use_mla, heads):
    model = Model(layers=6, heads=heads, use_mla=use_mla)
    cache = SimpleNamespace(block_size=3, num_gpu_blocks=7, num_cpu_blocks=5, cache_dtype=cache_dtype)
    parallel = SimpleNamespace(pipeline_parallel_size=2, tensor_parallel_size=1)
    nbytes = CacheEngine.get_cache_block_size(cache, model, parallel)
    assert nbytes == 3 * 3 * (1 if use_mla else 2) * heads * 6 * {"auto": 2, "fp8": 1, "float": 4}[cache_dtype]
    engine = CacheEngine(cache, model, parallel, SimpleNamespace(device_type="cpu"))
    assert engine._gpu.rows.numel() == 3 * nbytes and engine._cpu.rows.numel() == 2 * nbytes


@pytest.mark.parametrize(
    "broken",
    [
        {"backend": Backend(lambda n, b, h, d: (2, b, h, d))},
        {"backend": Backend(lambda n, b, h, d: (n, n, d))},
        {"backend": Backend(lambda n, b, h, d: (2, n * b, h, d))},
        {"backend": Backend(lambda n, b, h, d: (2, n, d), (0, 1))},
        {"backend": Backend(lambda n, b, h, d: (2, n, d), (0, 1, 1))},
        {"cache_dtype": "fp3"},
        {"cache_dtype": ["auto"]},
        {"gpu": -1},
        {"pp": 0},
        {"block_size": 0},
        {"model": Model(heads=0)},
        {"cpu": 1.5},
    ],
)
def test_configs_that_cannot_be_right_raise(broken):
    with pytest.raises(BadInput):
        make(**broken)


@pytest.mark.parametrize("broken", [{"block_size": -4}, {"cache_dtype": {}}])
def test_no_block_size_is_told_for_configs_that_cannot_be_right(broken):
    cache = SimpleNamespace(
        **{"block_size": 3, "num_gpu_blocks": 3, "num_cpu_blocks": 2, "cache_dtype": "auto", **broken}
    )
    with pytest.raises(BadInput):
        CacheEngine.get_cache_block_size(
            cache, Model(), SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1)
        )


def test_a_backend_that_leaves_the_stride_order_open():
    class Open(Backend):
        def get_kv_cache_stride_order(self):
            raise NotImplementedError

    assert make(Open(lambda n, b, h, d: (2, n, b, h, d))).gpu_cache[0].is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(BACKENDS))
def test_swaps_between_the_gpu_and_page_locked_memory(name):
    cache = SimpleNamespace(block_size=16, num_gpu_blocks=7, num_cpu_blocks=5, cache_dtype="auto")
    parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1)
    device = SimpleNamespace(device_type="cuda")
    engine = CacheEngine(cache, Model(head_size=64), parallel, device, BACKENDS[name])
    assert engine.gpu_cache[0].is_cuda and engine.cpu_cache[0].is_pinned()
    fill(engine)
    engine.swap_in(torch.tensor([[4, 0], [1, 6]]))
    engine.copy(torch.tensor([[6, 2]]))
    engine.swap_out(torch.tensor([[2, 0]]))
    for host, cuda in zip(engine.cpu_cache, engine.gpu_cache):
        host_blocks, cuda_blocks = blocks(host, engine), blocks(cuda, engine).cpu()
        assert torch.equal(cuda_blocks[[0, 6, 2]], host_blocks[[4, 1, 0]])
        assert torch.equal(host_blocks[0], host_blocks[1])
