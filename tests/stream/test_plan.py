"""Plans against the tensors themselves, and the exact figures of the 1.05 T model."""

import dataclasses
import math
import tracemalloc

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.model.census import census, packed_bytes
from perspectron.ops import tiles
from perspectron.ops.packing import LAYOUTS, Packed, pack, pack_tiles
from perspectron.quant.convert import convert
from perspectron.stream import plan
from perspectron.stream.expert_file import ExpertLayout
from perspectron.stream.plan import Needs, Rates, bounds, case, needs, place, uniform_hit_rate
from perspectron.util.errors import ConfigError
from tests.refusals import refused

SMALL = {
    "d_model": 32,
    "layers": 8,
    "hidden": 72,
    "rank": 8,
    "heads": 2,
    "kv_heads": 1,
    "window": 16,
    "torus": [3, 2],
}


@pytest.fixture(scope="module")
def trillion() -> Needs:
    return needs(presets.get("perspective-1t"), 8192)


@pytest.fixture(scope="module")
def small() -> Needs:
    return needs(presets.get("perspective-tiny", **SMALL), 100)


def zeros(format: str, N: int, K: int) -> Packed:
    layout, G = LAYOUTS[format], math.ceil(K / 128)
    codes = torch.full((N, K), layout.padding)
    if format in tiles.FORMATS:
        scales = torch.zeros(N, math.ceil(K / 32))
        return pack_tiles(codes, torch.zeros(N), scales, scales if layout.zero is None else None, format)
    if layout.zero is None:
        return pack(codes, torch.zeros(N, G), torch.zeros(N, G), format)
    return pack(codes, torch.zeros(N), None, format)


@pytest.mark.parametrize("format", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (6, 65), (13, 128), (300, 200), (84, 321)])
def test_a_matrix_takes_what_its_tensors_take(format, shape):
    assert sum(packed_bytes(format, shape)) == zeros(format, *shape).nbytes


@pytest.mark.parametrize("shared", ["2bit", "4bit", "int8"])
@pytest.mark.parametrize(
    "name", ["perspective-tiny", "perspective-tiny-dense", "gpt2-tiny", "adr-tiny", "ssd-tiny", "kda-tiny"]
)
def test_all_parts_of_a_model_once_packed(name, shared):
    """Its own modules, packed one by one, and as `quantize` packs them."""
    overrides = {key: SMALL[key] for key in ("d_model", "hidden")} if "perspective" in name else {}
    model = perspectron.build(presets.get(name, **overrides))
    held = packed = 0
    for where, module in model.named_modules():
        dense = isinstance(module, torch.nn.Linear) and not where.endswith("route_proj")
        dense = dense and min(module.weight.shape) >= 32
        logits = where in ("lm_head", "lm_head.out_proj")
        for key, weight in module.named_parameters(recurse=False):
            if dense and key == "weight":
                held += zeros("int8" if logits else shared, *weight.shape).nbytes
            elif where in ("embedding", "positions"):
                held += zeros("int8", *weight.shape).nbytes
            elif key in ("gate_EFD", "up_EFD", "down_EDF"):
                packed += len(weight) * zeros("ternary", *weight.shape[1:]).nbytes
            else:
                held += weight.nbytes
        held += sum(buffer.nbytes for key, buffer in module.named_buffers(recurse=False) if key == "bias_E")
    found = needs(model.config, 64, shared)
    assert sum(part.bytes for part in found.parts.values()) == held
    assert sum(layer.experts * layer.read for layer in found.experts) == packed
    assert sum(part.bytes for part in found.state.values()) == model.init_state(1, capacity=64).nbytes
    assert sum(convert(model, shared).bytes.values()) == held


@pytest.mark.parametrize("name", presets.names())
def test_parameters_are_those_of_the_census(name):
    config = presets.get(name)
    counted, found = census(config, [64]).groups, needs(config, 64)
    own = {kind: part.parameters for kind, part in found.parts.items()}
    if found.experts:
        own["experts"] = sum(layer.experts * layer.parameters for layer in found.experts)
    assert own == {kind: group.parameters for kind, group in counted.items()}


def test_bytes_of_the_trillion_are_exact(trillion):
    assert [layer.layer for layer in trillion.experts] == [i for i in range(80) if i % 4 != 3]
    assert {(e.experts, e.codes, e.scales, e.shard) for e in trillion.experts} == {
        (128, 27_065_344, 104_448, 6634 * 4096)
    }
    counted = census(presets.get("perspective-1t"), [8192])
    assert (counted.shard_bytes, counted.scale_bytes) == (27_065_344, 104_448)
    assert sum(part.bytes for part in trillion.state.values()) == counted.state_bytes[8192]
    matrices = {"pdr": 3_145_728_000, "window_gqa": 838_860_800, "swiglu": 2_705_326_080}
    for kind, weights in matrices.items():
        assert trillion.parts[kind].bytes == weights // 4 + weights // 128 * 4  # and 4 bytes to 128 weights
    assert trillion.parts["embedding"].bytes == 32768 * 4096 + 32768 * 4
    assert trillion.state["pdr"].bytes == 60 * (4096 * 256 * 4 + 8)
    assert trillion.state["window_gqa"].bytes == 20 * (2 * 8 * 512 * 128 * 4 + 8)
    assert trillion.resident == 2_358_125_904
    assert trillion.shards == 7680 and trillion.missed == 60 * 6634 * 4096


def test_the_state_does_not_grow_with_the_context(trillion):
    longer = needs(presets.get("perspective-1t"), 1 << 20)
    assert (longer.state, longer.resident) == (trillion.state, trillion.resident)


def test_what_a_token_reads_and_writes(small):
    """A memory is rewritten; of a ring one place is. A tied embedding is read whole."""
    pdr, ring = small.state["pdr"], small.state["window_gqa"]
    assert pdr.read == pdr.written == pdr.bytes == 6 * (32 * 8 * 4 + 8)
    assert ring.read == ring.bytes == 2 * (2 * 16 * 16 * 4 + 8) and ring.written == 2 * 8
    assert small.parts["embedding"].read == small.parts["embedding"].bytes
    untied = needs(presets.get("adr-demo"), 64).parts["embedding"]
    assert untied.read == untied.bytes // 50257
    expert = small.experts[0]
    shared = sum(part.read for part in (*small.parts.values(), *small.state.values()))
    assert small.read == shared + 6 * (expert.codes + expert.scales)


def test_a_network_that_layers_share_is_held_once_and_read_by_each():
    found = needs(presets.get("perspective-1t-dense"), 64)
    assert found.parts["swiglu"].read == 4 * found.parts["swiglu"].bytes
    assert found.experts == ()


# ---------------------------------------------------------------- where it goes


def test_a_slot_is_whole_huge_pages_and_a_gpu_holds_two_experts(small):
    """2.7 MB, as those of Qwen3-30B-A3B in 4bit32."""
    layout = ExpertLayout(2048, 768, "4bit32")
    assert 2 << 20 < layout.bytes < layout.slot == 4 << 20
    assert ExpertLayout(32, 32).slot == ExpertLayout(32, 32).bytes
    several = dataclasses.replace(
        small, experts=tuple(dataclasses.replace(layer, chosen=4) for layer in small.experts)
    )
    assert place(several, 1 << 30, 1 << 30).least_vram == several.resident + 2 * several.experts[0].shard
    assert place(several, 1 << 30, 1 << 30).least_ram == 4 * several.slot


def test_slots_are_what_is_left(small):
    slot = small.slot
    for extra, slots in ((0, 1), (slot - 1, 1), (slot, 2), (34 * slot, 35), (35 * slot, 36), (99 * slot, 36)):
        found = place(small, small.resident + slot + extra)
        assert (found.slots, found.fits, found.streams) == (slots, True, slots < 36)
    ample = place(small, small.resident + slot).ample_ram
    assert ample == small.resident + 36 * slot
    short = place(small, small.resident + slot - 1)
    assert not short.fits and short.least_ram - short.ram == 1


def test_a_gpu_holds_the_shared_part_and_two_experts(small):
    least = small.resident + 2 * small.slot
    found = place(small, 3 * small.slot, least)
    assert (found.fits, found.slots, found.least_vram) == (True, 3, least)
    assert not place(small, 3 * small.slot, least - 1).fits
    assert not place(small, small.slot - 1, least).fits
    assert case(small, found, "x", 0.5).pcie == 6 * small.slot


def test_random_uses_are_counted_in_the_memory_of_those_chosen(monkeypatch):
    monkeypatch.setattr(plan, "USES", 1000)
    E, tokens = 64, 20 * 64
    tracemalloc.start()
    uniform_hit_rate([E] * 16, 512, [2] * 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * (2 * tokens * E * 8)  # a layer's draws, their order, and what is chosen of all 16


def test_without_experts_nothing_streams():
    found = needs(presets.get("gpt2-tiny"), 64)
    placement = place(found, found.resident)
    assert placement.fits and not placement.streams
    (only,) = bounds(found, placement)
    assert (only.miss_rate, only.disk, only.pcie) == (0, 0, 0)
    assert not place(found, found.resident - 1).fits


# ---------------------------------------------------------------- how fast


def test_time_is_between_the_longest_and_the_sum(small):
    placement = place(small, 3 * small.slot, 1 << 30)
    found = case(small, placement, "x", 0.25)
    rates = Rates(1e9, 1e8, 1e7)
    memory, disk, pcie = (small.read + small.written) / 1e9, 1.5 * small.slot / 1e8, 6 * small.slot / 1e7
    assert found.seconds(rates) == pytest.approx({"memory": memory, "disk": disk, "pcie": pcie})
    least, most = found.tokens_per_second(rates)
    assert least == pytest.approx(1 / (memory + disk + pcie)) and most == pytest.approx(1 / pcie)
    assert found.seconds(Rates(None, 1e8, None)) == pytest.approx({"disk": disk})
    assert found.tokens_per_second(Rates(None, None, None)) is None


def test_more_memory_is_never_slower(trillion):
    speeds = []
    for gigabytes in (3, 8, 24, 100, 200, 212):
        found = bounds(trillion, place(trillion, gigabytes * 10**9))
        assert found[0].miss_rate == (0 if gigabytes == 212 else 1)
        speeds.append(found[-1].tokens_per_second(Rates(45e9, 3e9, None)))
    assert speeds == sorted(speeds) and speeds[-1][0] == speeds[-1][1]


def test_an_unknown_format_is_refused_by_name():
    with refused(ConfigError, "shared", "3bit"):
        needs(presets.get("gpt2-tiny"), 64, "3bit")
