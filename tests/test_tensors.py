"""Tensors inside containers, and which memory is behind which kind of tensor."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

from vramlab.tensors import consists_of_tensors, map_tensors, storages_of, tensors_in


class Opaque(torch.Tensor):
    """A wrapper of two plain tensors that computes on both. It looks like memory of its size, and has none of its own."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def half(name: str) -> Any:
            inner_args, inner_kwargs = tree_map(lambda x: getattr(x, name) if isinstance(x, cls) else x, (args, kwargs or {}))
            return func(*inner_args, **inner_kwargs)

        first, second = half("first"), half("second")
        return cls(first, second) if isinstance(first, torch.Tensor) else first


class Pair(Opaque):
    """The same, and it can be taken apart."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Pair:
        return Pair(parts["first"], parts["second"])


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def nbytes(tensor: torch.Tensor) -> list[int]:
    return [storage.nbytes() for storage in storages_of(tensor)]


def test_tensors_are_found_in_any_nesting_and_in_order() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    tree = [a, (b, {"x": c, "y": "text", "z": None}), 5]
    assert [len(t) for t in tensors_in(tree)] == [1, 2, 3]
    assert list(tensors_in("text")) == list(tensors_in(None)) == list(tensors_in({1, 2})) == []


def test_mapping_keeps_the_kinds_of_containers() -> None:
    point = namedtuple("point", "x y")
    ones = torch.ones(2)
    tree = {"list": [ones], "tuple": (ones, "text"), "named": point(ones, 7), "order": OrderedDict(a=ones)}
    mapped = map_tensors(lambda t: t * 3, tree)
    assert [t.sum().item() for t in tensors_in(mapped)] == [6.0] * 4
    assert isinstance(mapped["named"], point)
    assert mapped["named"].y == 7
    assert isinstance(mapped["order"], OrderedDict)
    assert mapped["tuple"][1] == "text"


def test_a_view_shares_its_storage() -> None:
    base = torch.zeros(1000, 1000)
    for view in (base[0], base.t(), base.expand(3, 1000, 1000), base.view(-1)[5:], base.detach()):
        assert storages_of(view)[0]._cdata == base.untyped_storage()._cdata
        assert nbytes(view) == [4_000_000]


def test_an_expanded_tensor_has_the_bytes_of_what_it_repeats() -> None:
    assert nbytes(torch.zeros(10, 1).expand(10, 1000)) == [40]


def test_complex_and_quantised_and_empty_tensors_have_one_storage() -> None:
    assert nbytes(torch.zeros(10, dtype=torch.complex64)) == nbytes(torch.zeros(10, dtype=torch.complex64).imag) == [80]
    assert nbytes(torch.zeros(0)) == [0]
    assert nbytes(torch.zeros(5, dtype=torch.float8_e4m3fn)) == [5]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (torch.sparse_coo, [2 * 3 * 8, 3 * 4]),  # int64 row and column of each value, the values
        (torch.sparse_csr, [5 * 8, 3 * 8, 3 * 4]),  # int64 starts of the rows, columns, values
        (torch.sparse_csc, [5 * 8, 3 * 8, 3 * 4]),
        (torch.sparse_bsr, [3 * 8, 3 * 8, 3 * 4 * 4]),  # the same of blocks
        (torch.sparse_bsc, [3 * 8, 3 * 8, 3 * 4 * 4]),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_tensor_is_its_indices_and_values(layout: torch.layout, expected: list[int]) -> None:
    dense = torch.zeros(4, 4)
    dense[0, 1] = dense[2, 2] = dense[3, 0] = 1
    sparse = dense.to_sparse(layout=layout, blocksize=(2, 2) if "sparse_bs" in str(layout) else None).clone()  # no spare room
    assert nbytes(sparse) == nbytes(sparse.requires_grad_()) == expected


def test_meta_and_fake_tensors_have_no_memory() -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(1000)
    assert nbytes(torch.empty(1000, device="meta")) == nbytes(fake) == nbytes(mode.from_tensor(torch.zeros(10))) == []
    assert nbytes(torch.nn.Parameter(fake)) == []


def test_a_wrapper_is_the_tensors_inside_it() -> None:
    pair = Pair(torch.zeros(10), torch.zeros(10))
    assert nbytes(pair) == nbytes(Pair(pair, torch.zeros(10)))[:2] == [40, 40]
    assert len(nbytes(Pair(pair, torch.zeros(10)))) == 3
    assert nbytes(torch.nn.Parameter(pair)) == [40, 40]


def test_a_wrapper_that_cannot_be_taken_apart_has_no_memory_of_its_own() -> None:
    assert nbytes(Opaque(torch.zeros(10), torch.zeros(10))) == []


def test_a_jagged_nested_tensor_is_its_values_and_offsets() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 10), torch.zeros(5, 10)], layout=torch.jagged)
    assert sorted(nbytes(nested))[-1] == 8 * 10 * 4
    assert 3 * 8 in nbytes(nested)  # two rows have three offsets


def test_a_distributed_tensor_is_its_local_part(mesh: Any) -> None:
    assert nbytes(distribute_tensor(torch.zeros(64, 4), mesh, [Shard(0)])) == [32 * 4 * 4]


def test_which_classes_consist_of_tensors() -> None:
    class Named(torch.Tensor):
        pass

    assert consists_of_tensors(Pair)
    assert not any(consists_of_tensors(kind) for kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, Named))
    with FakeTensorMode():
        assert not consists_of_tensors(type(torch.empty(1)))
