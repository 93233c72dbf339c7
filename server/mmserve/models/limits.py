"""What an archive, a download and a location may be."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much an archive may ask of us. No model that we know comes near.

    Attributes:
        max_entries: files and folders.
        max_directory_bytes: of a zip's own table, which is held in memory.
        max_ratio: unpacked by packed size, above `free_bytes`. Deflate reaches 1030; weights stay
            below 2, and a table of zeros (an embedding before training) may be large.
        free_bytes: unpacked bytes below which the ratio is not looked at.
        max_unpacked_bytes: in all.
    """

    max_entries: int = 100_000
    max_directory_bytes: int = 16 << 20
    max_ratio: int = 200
    free_bytes: int = 1 << 30
    max_unpacked_bytes: int = 256 << 30

    def most(self, packed_bytes: int) -> int:
        """Bytes that an archive of this size may unpack to."""
        return min(self.max_unpacked_bytes, max(self.free_bytes, self.max_ratio * packed_bytes))


class DownloadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a download may take.

    Attributes:
        connect_s: seconds to connect, handshake included.
        silence_s: seconds without a byte.
        total_s: seconds in all, an hour: 20 GiB at 6 MB/s.
        max_bytes: of an archive, 20 GiB: that of the largest models served on one host.
        max_redirects: hops.
    """

    connect_s: float = 10.0
    silence_s: float = 60.0
    total_s: float = 3600.0
    max_bytes: int = 20 << 30
    max_redirects: int = 10


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What may be fetched from elsewhere.

    Attributes:
        schemes: lower case; any other is no scheme but the beginning of a path.
        urls: regular expression that a URL must match from end to end, credentials left out.
    """

    schemes: tuple[str, ...] = ("http", "https")
    urls: str = ".*"
