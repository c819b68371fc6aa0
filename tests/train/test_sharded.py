"""Files of a checkpoint by several ranks: what their headers claim is checked before anything is made of it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from perspectron.train.sharded import shapes, shard_of, whole
from perspectron.util.errors import CheckpointError
from tests.fuzz.mutate import with_header
from tests.refusals import refused


def written(folder, starts, count=2):
    for rank in range(count):
        told = {"DCP_SHARDING_INFO": json.dumps(starts(rank))}
        save_file({"w": torch.full((2, 3), float(rank))}, folder / shard_of(rank), told)


def test_parts_are_put_together(tmp_path):
    written(tmp_path, lambda rank: {"w": {"saved_offsets": [2 * rank, 0]}})
    assert whole(tmp_path)["w"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "start", [[1 << 40, 0], [3, 0], [-2, 0], [2], [2, 0, 0], [True, 0], ["2", 0], None], ids=str
)
def test_parts_that_lie_elsewhere_are_refused_before_room_is_made(tmp_path, start):
    written(tmp_path, lambda rank: {"w": {"saved_offsets": start if rank else [0, 0]}})
    for reader in (shapes, whole):
        with refused(CheckpointError):
            reader(tmp_path)


@pytest.mark.parametrize(
    "told", ["[]", "{", "[" * 5000, '{"w": 1}', "[" + "[]," * 4_000_000 + "[]]"], ids=len
)
def test_where_parts_lie_must_be_told_in_json_of_bounded_size(tmp_path, told):
    save_file({"w": torch.zeros(2, 3)}, tmp_path / shard_of(0), {"DCP_SHARDING_INFO": told})
    with refused(CheckpointError):
        shapes(tmp_path)


def test_headers_have_the_bounds_of_other_files(tmp_path):
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (tmp_path / shard_of(0)).write_bytes(with_header({f"t{i}": empty for i in range(33_000)}, b""))
    with refused(CheckpointError, 32_768):
        shapes(tmp_path)
    wide = {"dtype": "F32", "shape": [1 << 32, 1 << 32, 0], "data_offsets": [0, 0]}
    (tmp_path / shard_of(0)).write_bytes(with_header({"w": wide}, b""))
    with refused(CheckpointError, tmp_path, 1 << 32):
        shapes(tmp_path)
