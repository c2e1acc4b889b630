"""How far a reward can push each parameter of a language model.

The library under the book *Small Is Not Sparse*. Data flows one way:
policy and prompts, score moments, ceiling, record, chapter. Import from the modules:

>>> from ceilings.ceiling import gradient_ceiling, tightness
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
