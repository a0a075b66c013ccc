"""The name that pickles of version 0.1 have for `fretwork.patterns.pattern.parsed`; nothing else is here."""

from fretwork.patterns.pattern import parsed

_parsed = parsed
