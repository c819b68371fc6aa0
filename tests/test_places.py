"""The device of a run of the tests, without one: `tests/places.py`."""

import torch

from tests import places


def test_the_default_device_is_that_of_the_run() -> None:
    """A helper asks for it, and PyTorch asks a tensor of its own if the device has no number."""
    with places.OfTheRun(torch.device("cuda", 0)):
        assert torch.get_default_device() == torch.device("cuda", 0)
