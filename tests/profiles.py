"""Profiles of simple machines, whose seconds a test can work out."""

from cacheblend.loader.profile import LayerSample, PrefillSample, Profile, TierSpeed

LAYER_TOKEN_BYTES = 1000


def linear_profile(
    *,
    layers: int = 11,
    row_s: float = 1e-5,
    bytes_per_s: float = 1e9,
    read_s: float = 0.0,
    model: str = "model",
    device: str = "device",
    layer_token_bytes: int = LAYER_TOKEN_BYTES,
) -> Profile:
    """A row costs the same in every layer, whatever the prompt's length, and nothing else costs anything."""
    rows = [(tokens, tokens // share) for tokens in (100, 1000) for share in (1, 2, 10)]
    later = [LayerSample(layer=1, tokens=n, rows=r, projected=n if r < n else 0, seconds=row_s * r) for n, r in rows]
    whole = [LayerSample(layer=0, tokens=n, rows=n, projected=0, seconds=row_s * n) for n in (100, 1000)]
    return Profile(
        model=model,
        device=device,
        layers=layers,
        layer_token_bytes=layer_token_bytes,
        prefill=tuple(PrefillSample(tokens=n, seconds=layers * row_s * n) for n in (100, 1000)),
        blend=(*whole, *later),
        logits_s=0.0,
        tiers={tier: TierSpeed(read_s=read_s, bytes_per_s=bytes_per_s) for tier in ("ram", "nvme")},
    )
