"""Load: requests at random moments against servers, rates swept, methods side by side (paper figure 14)."""
