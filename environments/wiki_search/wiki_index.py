"""Search over pages by BM25, as small as it gets.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), k1 = 1.5, b = 0.75;
words of the title count three times.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

WORD = re.compile(r"[^\W_]+")
TITLE_WEIGHT = 3
K1, B = 1.5, 0.75


def words(text: str) -> list[str]:
    """The words of a text, without case."""
    return [word.casefold() for word in WORD.findall(text)]


class Index:
    """Titles and texts, searched by words."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._postings: dict[str, dict[str, int]] = defaultdict(dict)
        self._lengths: dict[str, int] = {}
        for title, text in texts.items():
            counts = Counter(words(text) + words(title) * TITLE_WEIGHT)
            self._lengths[title] = counts.total()
            for word, count in counts.items():
                self._postings[word][title] = count
        self._mean_length = sum(self._lengths.values()) / max(1, len(self._lengths))

    def search(self, query: str, limit: int = 10) -> list[str]:
        """Titles of the best pages, best first; none when no word of the query stands anywhere."""
        scores: dict[str, float] = defaultdict(float)
        for word in set(words(query)):
            found = self._postings.get(word, {})
            rarity = math.log(1 + (len(self._lengths) - len(found) + 0.5) / (len(found) + 0.5))
            for title, count in found.items():
                length = 1 - B + B * self._lengths[title] / self._mean_length
                scores[title] += rarity * count * (K1 + 1) / (count + K1 * length)
        return sorted(scores, key=lambda title: (-scores[title], title))[:limit]
