"""Subclasses of SGLang's speculative workers."""
