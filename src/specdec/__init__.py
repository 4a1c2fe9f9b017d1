"""Dynamic speculation disable for SGLang's EAGLE-3 workers, and the measurement suite that proves it."""

__version__ = "0.1.0"
