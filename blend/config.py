"""The method's configuration, which needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import check_share, option

if TYPE_CHECKING:
    from .selectors import Schedule, Selector
else:
    Selector = object  # what `base/options.py` reads of it

DEFAULT_RATIO = 0.14  # r*; the paper's is 0.15, see `FusionConfig`
DOCUMENT_TOKENS = 2048  # of the windows in which a document is read, see `ChunkContext`
SELECTOR_NAMES = ("question_attention", "gradual", "single_shot", "first_tokens")
DEFAULT_SELECTOR = "question_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionConfig:
    """Share of the reusable KV that is recomputed, and the choice of its tokens.

    The ratio is a share of the reusable tokens, in the mean over layers 1 and up (paper §4.3): 0 is full KV reuse, 1 is full
    prefill. The paper's r* is 0.15 (§7, figure 16); at 0.14 all that a short prompt's blend computes, the question's pass
    included, is a fifth of full prefill.

    Args:
        recompute_ratio: None for `DEFAULT_RATIO`, or in an engine for the loading controller's choice.
        selector: one of `SELECTORS`, or any `Selector`; None for `DEFAULT_SELECTOR`, or in an engine for the calibrated one.
            "question_attention": tokens of the question's highest attention; it won on pretrained models
            (docs/benchmarks.md). "gradual": the paper's HKVD tokens (§4.3, figure 9); "single_shot": HKVD tokens chosen at
            layer 1 for all layers; "first_tokens": EPIC's.
        max_loss_nats: the first token's distribution may move by so much between full reuse and a blend at `recompute_ratio`;
            where it moves further, the blend is widened (blend/widening.py). None: never. For "question_attention" only.

    Raises:
        ConfigError: a value is outside its range, or the selector is unknown.
    """

    recompute_ratio: float | None = option(
        None,
        "Share of the reusable tokens to recompute, 0 to 1; left out, the preset's, or else the loading controller's choice.",
    )
    selector: str | Selector | None = option(
        None,
        f"How the tokens to recompute are selected; left out, the calibrated selector, or {DEFAULT_SELECTOR}.",
        choices=SELECTOR_NAMES,
    )
    max_loss_nats: float | None = option(
        None, "Recompute more where recomputing a little moves the first token further; left out, the preset's, or never."
    )

    def __post_init__(self) -> None:
        nats = self.max_loss_nats
        if self.recompute_ratio is not None:
            check_share("recompute_ratio", self.recompute_ratio)
        if nats is not None and (isinstance(nats, bool) or not isinstance(nats, int | float) or not nats > 0):
            raise ConfigError("max_loss_nats", nats, "a number above 0; recompute_ratio=1 loses nothing")
        if nats is not None and self.selector in SELECTOR_NAMES[1:]:
            raise ConfigError("max_loss_nats", nats, f"for the selector {DEFAULT_SELECTOR} only")
        if self.selector not in (None, *SELECTOR_NAMES) and not hasattr(self.selector, "select"):
            from .selectors import SELECTORS

            if self.selector not in [*SELECTORS]:  # where somebody has put one of his own
                raise ConfigError("selector", self.selector, f"one of {', '.join(SELECTORS)}, or a Selector")

    @property
    def schedule(self) -> Schedule:
        """The selector's schedule; that of single-shot selection if it has none."""
        from .selectors import Schedule

        return getattr(self.resolve_selector(), "schedule", Schedule(0.0))

    @property
    def ratio(self) -> float:
        """The recompute ratio; the default if it is None."""
        return DEFAULT_RATIO if self.recompute_ratio is None else self.recompute_ratio

    def resolve_selector(self) -> Selector:
        """The selector itself."""
        if self.selector is not None and not isinstance(self.selector, str):
            return self.selector
        from .selectors import SELECTORS

        return SELECTORS[self.selector or DEFAULT_SELECTOR](self.ratio)
