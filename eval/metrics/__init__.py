"""Answer quality, nearness to full recompute, what was computed, and differences between methods."""
