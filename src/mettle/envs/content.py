"""Parts of a message's content: text, an image, audio, or anything else that a provider knows.

Invariant: a part is the plain dict that goes over the wire; the classes only say its `type` and give attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mettle.records.record import Record


class GenericContentPart(Record):
    """A part of a type that only its provider knows."""

    __slots__ = ()
    TYPE: ClassVar[str] = ""

    def __init__(self, raw: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        super().__init__({"type": self.TYPE} if self.TYPE else {})
        self.update(raw or {})
        self.update(fields)


class TextContentPart(GenericContentPart):
    """`text`."""

    __slots__ = ()
    TYPE = "text"


class ImageUrlSource(Record):
    """Where an image is: `url`, which may be a data URL."""

    __slots__ = ()


class ImageUrlContentPart(GenericContentPart):
    """`image_url`, an `ImageUrlSource`."""

    __slots__ = ()
    TYPE = "image_url"


class InputAudioSource(Record):
    """Audio as base64 `data` in a `format`."""

    __slots__ = ()


class InputAudioContentPart(GenericContentPart):
    """`input_audio`, an `InputAudioSource`."""

    __slots__ = ()
    TYPE = "input_audio"


ContentPart = TextContentPart | ImageUrlContentPart | InputAudioContentPart | GenericContentPart | dict[str, Any]
MessageContent = str | list[ContentPart]
