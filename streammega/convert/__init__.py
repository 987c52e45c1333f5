"""Corpora to `.bin/.idx`: text and JSON lines through a tokenizer, in parallel."""

from streammega.convert.run import ConvertReport, convert

__all__ = ["ConvertReport", "convert"]
