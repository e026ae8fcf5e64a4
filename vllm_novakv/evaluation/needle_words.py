"""Keys and values that are hidden in a haystack: word pairs, seven-digit numbers, UUIDs, all drawn from a seed."""

import random
import uuid
from typing import Literal

Kind = Literal["word", "number", "uuid"]

_ADJECTIVE_TEXT = """
amber ancient arctic autumn bitter blunt brisk broken calm careful cedar clever cloudy coastal copper crimson crisp
dapper dim distant dusty eager early eastern electric empty faint fearless feathered fierce floral formal frosty gentle
gilded glossy golden grassy hollow honest humble icy idle indigo inland ivory jagged jolly keen late lavender leafy
lively lonely loyal lunar mellow mild misty modest mossy muddy narrow nimble northern olive opal patient pearly plain
polite proud quick quiet rapid rare ripe rocky rosy rugged rustic salty sandy scarlet shady silent silver sleepy slender
smoky snowy solar steady stormy sturdy sunny swift tender tidy tiny velvet violet vivid warm western wild windy wooden
"""
_NOUN_TEXT = """
acorn anchor apron arrow badger bakery barley barrel basin beacon bellows bison bonnet bramble bridge bucket buckle
cabin camel candle canyon carpet castle cello chapel cherry cobbler comet compass coral cottage cradle cricket cushion
dagger daisy dolphin donkey drum easel ember falcon feather fender ferry fiddle flagon forest fountain fox galaxy garden
garnet glacier goblet gravel hammer harbor harvest hazel heron hinge island jacket jasmine kettle ladder lagoon lantern
lemon lettuce lily lobster locket lumber magnet maple marble meadow mirror mitten monsoon mustard napkin needle oasis
orchard otter paddle parrot pebble pepper pigeon pillow pond poppy puddle quarry quilt rabbit raft ribbon river saddle
satchel saucer shovel sparrow spindle squirrel stable stapler tavern teapot thimble thistle tower trumpet tulip tunnel
turnip umbrella valley violin wagon walnut weasel willow window zebra
"""

_ADJECTIVES = tuple(_ADJECTIVE_TEXT.split())
_NOUNS = tuple(_NOUN_TEXT.split())

NUM_WORD_PAIRS = len(_ADJECTIVES) * len(_NOUNS)
"""Distinct keys of kind "word"."""


def draw_distinct(kind: Kind, count: int, generator: random.Random) -> list[str]:
    """Distinct strings of one kind, in random order.

    Example: kinds "word", "number" and "uuid" look like "misty-harbor", "4170932" and
    "0f3c9a52-7be1-4d08-9c1a-55d2e8f7a610".

    Args:
        kind: "word" (two words and a hyphen), "number" (seven digits, no leading zero) or "uuid" (version 4).
        count: how many strings, at least 0.
        generator: source of randomness; the same state gives the same strings.

    Returns:
        `count` different strings.

    Raises:
        ValueError: more word pairs are wanted than the lists hold.

    Source: the kinds of keys and values are those of RULER, arXiv 2404.06654, appendix B; the words are our own.
    """
    if kind == "word":
        if count > NUM_WORD_PAIRS:
            raise ValueError(f"{count} different word pairs were asked for, and there are {NUM_WORD_PAIRS}; shorten")
        picks = generator.sample(range(NUM_WORD_PAIRS), count)
        return [f"{_ADJECTIVES[pick // len(_NOUNS)]}-{_NOUNS[pick % len(_NOUNS)]}" for pick in picks]
    if kind == "number":
        return [str(number) for number in generator.sample(range(1_000_000, 10_000_000), count)]
    # 122 random bits: a repetition among any number of draws that fits in memory has a negligible chance
    return [str(uuid.UUID(int=generator.getrandbits(128), version=4)) for _ in range(count)]
