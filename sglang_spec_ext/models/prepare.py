"""Prepares the checkpoints that the demo and the tests use, each once per machine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_spec_ext.models import cache, smollm2


@dataclass(frozen=True)
class Model:
    """A checkpoint that can be prepared."""

    name: str
    recipe: str
    build: Callable[[Path], None]
    group: str  # "demo" or "tiny"

    @property
    def folder(self) -> Path:
        """Where the checkpoint lives in the cache."""
        return cache.home() / "models" / self.name


def models() -> tuple[Model, ...]:
    """Return every checkpoint by name; imports torch."""
    from sglang_spec_ext.models import tiny

    demo = Model(smollm2.NAME, smollm2.RECIPE, smollm2.build, "demo")
    return (demo, *(Model(e.name, e.recipe, e.build, "tiny") for e in tiny.entries()))


def prepare(wanted: Iterable[Model]) -> Iterator[tuple[Model, str | None]]:
    """Yield each model after it is in place, with the reason why it was built (None: it was there)."""
    for model in wanted:
        yield model, cache.ensure(model.folder, model.recipe, model.build)
