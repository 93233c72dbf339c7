"""Which character sets a client may name for its text."""

from __future__ import annotations

import codecs
import encodings
from encodings.aliases import aliases

# Python has no other name for these, so that `aliases` does not list them.
_WITHOUT_ALIAS = (
    *("cp720", "cp737", "cp856", "cp874", "cp875", "cp1006", "koi8_t", "koi8_u"),
    *("mac_arabic", "mac_croatian", "mac_farsi", "mac_romanian", "utf_8_sig"),
)
# Codecs that are no character sets, and one that hides any text from whoever looks at the bytes.
_NO_CHARSETS = (
    *("base64_codec", "bz2_codec", "hex_codec", "quopri_codec", "rot_13", "uu_codec"),
    *("zlib_codec", "mbcs", "utf_7"),
)
_CHARSETS = frozenset(aliases.values()).union(_WITHOUT_ALIAS).difference(_NO_CHARSETS)


def codec_of(charset: str) -> str | None:
    """Python's name of a character set, "utf-8" for `UTF8`; None where it is not known.

    `codecs.lookup` keeps each name it was ever asked for: clients that make names up would fill
    the memory. Here it is asked for those of a closed set only.
    """
    name = encodings.normalize_encoding(charset.lower())
    name = aliases.get(name) or aliases.get(name.replace(".", "_")) or name
    return codecs.lookup(name).name if name in _CHARSETS else None
