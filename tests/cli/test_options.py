"""The answer of a command: JSON that every reader takes."""

import json
import math

from perspectron.cli.options import answer


def test_a_number_that_is_not_finite_is_null_in_json(capsys):
    assert answer(True, {"nan": math.nan, "deep": [{"inf": (math.inf, 1.5)}], "one": 1}) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: word)
    assert found == {"nan": None, "deep": [{"inf": [None, 1.5]}], "one": 1}
