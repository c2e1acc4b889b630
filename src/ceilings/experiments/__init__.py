"""Long runs, one module each: ``Config``, ``FULL``, ``SMOKE``, ``run(config) -> Record``.

``python -m ceilings.experiments.NAME`` is the only writer of ``results/NAME.json``.
"""

__all__: list[str] = []
