"""Values of files that are not trusted, checked by the types that describe them."""

from typing import Any

import msgspec

from perspectron.util.errors import PerspectronError


def checked(value: Any, kind: Any, error: type[PerspectronError], where: object) -> Any:
    """JSON's value as `kind`, a type that msgspec knows. `error`, in one line that names `where`, the field and what it
    must be; of a file of another version, whose "format" is not the tag of `kind`, that it is one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as cause:
        what, _, place = str(cause).partition(" - at ")
        field = place.strip("`").removeprefix("$").removeprefix(".")
        what = what[:1].lower() + what[1:]
        if field == "format" and (config := getattr(kind, "__struct_config__", None)):
            what += f", must be {config.tag!r}: files of other versions are not read"
        raise error(f"{where}: {f'{field}: ' if field else ''}{what}") from None
    except UnicodeEncodeError:
        raise error(f"{where}: a string has half of a surrogate pair, which is no text") from None
