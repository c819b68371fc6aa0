"""Digests for files of states that a test has changed."""

import json
from collections.abc import Mapping

from torch import Tensor

from perspectron.model.appended import END, Contents, Grown, _sealed, page_ends
from perspectron.util.files import parse_json
from perspectron.util.tensors import JSON_ROOM


def sealed(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a file of one part that holds these tensors, with digests that fit them and no `end`."""
    own = {name: text for name, text in header.items() if name not in (END, "whole", "digest")}
    names, grown = _names(own), tuple[Grown, ...]()
    if names and all(name in tensors and tensors[name].ndim == 4 for name in names):
        slots = min(tensors[name].shape[2] for name in names)
        grown = (Grown(tuple(names), lambda start, stop: [tensors[n][:, :, start:stop] for n in names]),)
        made = Contents({}, {}, grown, slots)
        own["grown"] = json.dumps(made.kinds())
        own["pages"] = "".join(made.pages(page_ends(0, slots)))
    return _sealed(own, {name: x for name, x in tensors.items() if not grown or name not in names})


def _names(header: Mapping[str, str]) -> list[str]:
    try:
        value = parse_json(header.get("grown", "{}"), room=JSON_ROOM)
    except ValueError:
        return []
    return list(value) if isinstance(value, dict) else []
