"""Streams of random numbers by name."""

import subprocess
import sys

import numpy as np
import torch

from perspectron.util.streams import START, WORDS, normal_slices, stream


def test_a_stream_is_a_mersenne_twister_in_the_state_of_the_hash():
    """Numpy's, set to the same words, gives the same numbers: the words stand where torch reads them."""
    words = stream(3, "a").get_state()[START : START + 8 * WORDS].view(torch.int64).numpy()
    twister = np.random.MT19937()
    twister.state = twister.state | {"state": {"key": words.astype(np.uint32), "pos": WORDS}}
    drawn = torch.randint(2**24, (3000,), generator=stream(3, "a")).numpy()
    assert np.array_equal(drawn, twister.random_raw(3000) % 2**24)
    assert len(set(words.tolist())) == WORDS


def test_streams_of_other_seeds_and_names_share_nothing():
    """Torch's own seeding keeps 32 bits: 0 and 2³² are one to it."""
    keys = [
        (seed, *name)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for name in (("a",), ("b",), ("a", 0), ("a", 1), ("a.b",))
    ]
    draws = [torch.rand(4, generator=stream(*key)).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)
    assert len({stream(*key).initial_seed() for key in keys}) == len(keys)
    assert draws[0] == torch.rand(4, generator=stream(*keys[0])).tolist()


def test_whole_numbers_of_numpy_are_those_of_python():
    draws = [torch.rand(4, generator=stream(*key)) for key in ((3, "a", 5), (np.int64(3), "a", np.uint8(5)))]
    assert torch.equal(*draws)


def test_a_stream_is_the_same_in_every_process():
    draw = "torch.rand(3, generator=stream(7, 'x')).tolist()"
    code = f"import torch; from perspectron.util.streams import stream; print({draw})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{torch.rand(3, generator=stream(7, 'x')).tolist()}\n"


def test_slices_are_the_same_whoever_draws_them():
    whole, part = torch.empty(8, 5, 7), torch.empty(3, 5, 7)
    normal_slices(whole, 0.5, stream(1, "ffn"), "gate")
    normal_slices(part, 0.5, stream(1, "ffn"), "gate", first=4)
    assert torch.equal(part, whole[4:7])
    other = torch.empty(8, 5, 7)
    normal_slices(other, 0.5, stream(1, "ffn"), "up")
    assert not (other == whole).any()
    many = torch.empty(64, 50, 50)
    normal_slices(many, 0.5, stream(1, "ffn"), "gate")
    assert abs(many.std().item() - 0.5) < 0.002 and abs(many.mean().item()) < 0.005
