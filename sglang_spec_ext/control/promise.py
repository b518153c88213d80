"""How much of what confidences promised has come true, so that a boasting head does not win over a uniform K.

A uniform K is judged by acceptance that was observed, a budget by confidences. The ratio of accepted draft
tokens to the sum of promised survivals, over the positions that were verified, puts both on one scale; it never
changes who is verified first.
"""

import numpy as np

from sglang_spec_ext.records import BoolArray, FloatArray, IntArray

WINDOW_STEPS = 64.0
PRIOR_TOKENS = 16.0  # promised and kept before anything is known
LARGEST_RATIO = 2.0


class Promise:
    """Windowed sums of promised and accepted draft tokens."""

    def __init__(self) -> None:
        self._promised = 0.0
        self._accepted = 0.0

    def observe(
        self, survival: FloatArray, verified: IntArray, accepted: IntArray, usable: BoolArray
    ) -> None:
        """Add one step: survivals [R, G]; draft tokens [R] verified and accepted; rows [R] to learn from."""
        seen = (np.arange(survival.shape[1]) < verified[:, None]) & usable[:, None]
        keep = 1.0 - 1.0 / WINDOW_STEPS
        self._promised = self._promised * keep + float(survival[seen].sum())
        self._accepted = self._accepted * keep + float(accepted[usable].sum())

    @property
    def ratio(self) -> float:
        """Accepted over promised."""
        return min((self._accepted + PRIOR_TOKENS) / (self._promised + PRIOR_TOKENS), LARGEST_RATIO)
