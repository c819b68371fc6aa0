"""Texts of numbers for people."""

from perspectron.util.numbers import signed


def test_what_rounds_to_zero_keeps_its_sign():
    """So that a reader sees on which side of zero an interval ends."""
    assert [signed(x) for x in (-4e-4, 4e-4, 0.0, -0.0, None)] == ["−0.000", "+0.000", "0.000", "0.000", "–"]
    assert [signed(x) for x in (-0.0125, 1.0)] == ["−0.013", "+1.000"]
