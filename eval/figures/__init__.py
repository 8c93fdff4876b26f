"""The paper's figures, from runs and from measurements of their own: PNG and CSV."""

from .draw import draw_figures

__all__ = ["draw_figures"]
