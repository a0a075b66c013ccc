"""What a layer's weights belong to, saved beside them: a layout, a pattern or a list of them, as text."""

from __future__ import annotations

import zlib
from typing import Any

from torch import nn

_KEY = "fretwork_structure"
_LONGEST = 200


class Structured(nn.Module):
    """A layer whose structure travels in its `state_dict`, and which refuses the weights of another structure.

    The text goes into the state dict's `_metadata`, which `torch.save` keeps, so that the keys stay those of the
    parameters. A plain dict has no metadata and is taken as it is.
    """

    def _structure(self) -> str | None:
        """One line of text, equal for equal structures; None where there is nothing to compare."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        structure, metadata = self._structure(), getattr(destination, "_metadata", None)
        if structure is not None and metadata is not None:
            metadata.setdefault(prefix[:-1], {})[_KEY] = structure

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected, got = self._structure(), local_metadata.get(_KEY)
        if expected is not None and got is not None and expected != got:
            where = f"{prefix[:-1]}: " if prefix else ""
            error_msgs.append(
                f"{where}{type(self).__name__}: state_dict: expected weights of {shortened(expected)}, "
                f"got those of {shortened(got)}"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def shortened(text: str) -> str:
    """A long text by its beginning and a checksum, by which two of them differ."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}… ({len(text)} characters, crc32 {zlib.crc32(text.encode()):08x})"
