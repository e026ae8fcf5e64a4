"""Pinned prefixes: which pages they need, and how many pages all of them together may take."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_novakv.prefix.pages import PageMap


class PinLimitError(ValueError):
    """A pin would exceed the limit."""


@dataclass(frozen=True)
class Pin:
    """A prefix to keep.

    Attributes:
        name: unique.
        tokens: token ids from the start of the prompt.
    """

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class BoundPin:
    """A pin whose block hashes are known.

    Attributes:
        num_tokens: whole chunks that it keeps.
        keys: of its chunks.
        pages: group and hash of its pages.
        is_configured: given with the server's settings, so no request may remove it.
    """

    num_tokens: int
    keys: tuple[bytes, ...]
    pages: frozenset[tuple[int, bytes]]
    is_configured: bool


class PinTable:
    """All pins of a server.

    A configured pin is bound by the first request whose prompt begins with it: only then are its block hashes known,
    and only then is there something to keep.

    Args:
        pages: of the server.
        pins: configured ones.
        max_pages: pages that all pins together may take.

    Raises:
        PinLimitError: the configured pins need more, or one of them is shorter than a chunk.
    """

    def __init__(self, pages: PageMap, pins: Sequence[Pin], max_pages: int) -> None:
        self._map = pages
        self._max_pages = max_pages
        self._unbound = list(pins)
        self._bound: dict[str, BoundPin] = {}
        self._pinned: frozenset[tuple[int, bytes]] = frozenset()
        for pin in pins:
            if not pages.floor(len(pin.tokens)):
                raise PinLimitError(
                    f"prefix_index: pin {pin.name!r} has {len(pin.tokens)} tokens, the smallest cacheable prefix "
                    f"{pages.chunk_tokens}; pin a longer prefix"
                )
        # what prefixes have in common counts once for each: they are not bound yet
        needed = sum(self._num_pages(pin) for pin in pins)
        if needed > max_pages:
            sizes = ", ".join(f"{pin.name!r} {self._num_pages(pin)}" for pin in pins)
            raise PinLimitError(
                f"prefix_index: the pins need {needed} blocks ({sizes}), max_pinned_ratio allows {max_pages}; "
                "pin less, or give the cache more memory"
            )

    @property
    def max_pages(self) -> int:
        """Pages that all pins together may take."""
        return self._max_pages

    @property
    def num_pages(self) -> int:
        """Different pages of bound pins, cached or not."""
        return len(self._pinned)

    @property
    def bound(self) -> dict[str, BoundPin]:
        """Bound pins by name; not to be changed."""
        return self._bound

    @property
    def unbound(self) -> list[Pin]:
        """Configured pins that no prompt has begun with yet; not to be changed."""
        return self._unbound

    def is_pinned(self, group: int, page_hash: bytes) -> bool:
        """Whether a page belongs to a bound pin."""
        return (group, page_hash) in self._pinned

    def matching(self, prompt: Sequence[int]) -> list[Pin]:
        """Unbound pins whose whole chunks a prompt begins with.

        The rest is not kept anyway, and the last token of a text may differ from that of the text continued.
        """
        lengths = [self._map.floor(len(pin.tokens)) for pin in self._unbound]
        return [
            pin
            for pin, length in zip(self._unbound, lengths, strict=True)
            if tuple(prompt[:length]) == pin.tokens[:length]
        ]

    def bind(
        self, name: str, hashes: Sequence[bytes], num_tokens: int, is_configured: bool
    ) -> tuple[bytes, ...] | None:
        """Bind a configured pin, or add one that a request asks for.

        Args:
            name: of the pin.
            hashes: of the blocks of a prompt that begins with it.
            num_tokens: tokens to keep; rounded down to whole chunks.
            is_configured: whether the name is that of a configured pin; otherwise no such pin may have it.

        Returns:
            Keys of its chunks; None if the very same pin is bound already.

        Raises:
            PinLimitError: another prefix has the name, less than a chunk is left, or the pins would exceed the limit.
        """
        length = self._map.floor(min(num_tokens, len(hashes) * self._map.hash_tokens))
        if name in self._bound and self._bound[name].keys == self._map.chunk_keys(hashes, length):
            return None
        if name in self._bound or (not is_configured and any(pin.name == name for pin in self._unbound)):
            raise PinLimitError(f"pin {name!r} keeps another prefix; unpin it first")
        if not length:
            raise PinLimitError(f"pin {name!r} is shorter than {self._map.chunk_tokens} tokens, nothing can be kept")
        pages = frozenset((page[0], self._map.page_hash(hashes, page)) for page in self._map.pages_for_hit(length))
        reserved = 0 if is_configured else sum(self._num_pages(pin) for pin in self._unbound)
        if len(self._pinned | pages) + reserved > self._max_pages:
            raise PinLimitError(
                f"pin {name!r} of {length} tokens needs {len(pages - self._pinned)} more blocks; "
                f"{self.num_pages + reserved} of {self._max_pages} are taken. Raise max_pinned_ratio or unpin another"
            )
        self._unbound = [pin for pin in self._unbound if pin.name != name]
        self._bound[name] = BoundPin(length, self._map.chunk_keys(hashes, length), pages, is_configured)
        self._pinned |= pages
        return self._bound[name].keys

    def unbind(self, name: str) -> tuple[bytes, ...]:
        """Drop a pin that a request made.

        Returns:
            Keys of its chunks.

        Raises:
            KeyError: there is no such pin, or it is configured.
        """
        if name not in self._bound or self._bound[name].is_configured:
            raise KeyError(name)
        keys = self._bound.pop(name).keys
        self._pinned = frozenset().union(*(pin.pages for pin in self._bound.values()))
        return keys

    def _num_pages(self, pin: Pin) -> int:
        return len(self._map.pages_for_hit(self._map.floor(len(pin.tokens))))
