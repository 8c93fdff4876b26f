"""Write docs/options.md: every option of `cacheblend serve`, from the fields that it is made of.

python scripts/write_options.py
"""

from pathlib import Path

from cacheblend.base.options import Option, options_of
from cacheblend.service.engine.config import EngineConfig
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.serving.config import ServingConfig

FILE = Path(__file__).parents[1] / "docs" / "options.md"
CONFIGS = (EngineConfig, ServingConfig, HttpConfig)
HEAD = """\
# Options

`python scripts/write_options.py` writes this page from the configuration classes. Each option of `cacheblend serve` is a flag,
a variable and a key of its TOML file (`--config`): `--max-tokens`, `CACHEBLEND_MAX_TOKENS`, `max_tokens`. A flag comes before
a variable, and both before the file; a size may be `2GB` or `512MiB`. Other commands have the options that have an effect
there. `--model` and `--store-dir` stand beside them.

In Python the fields of an engine are nested:

```python
from cacheblend import Engine, EngineConfig, FusionConfig, StoreConfig

config = EngineConfig(model="smollm2-135m", store_dir="my-store", store=StoreConfig(ram_budget_bytes=2**30), preset="fast")
config = EngineConfig(model="smollm2-135m", store_dir="my-store", fusion=FusionConfig(recompute_ratio=0.2, selector="gradual"))
```

| `--preset` | recompute ratio |
|---|---|
| `exact` | 1: every reused token is recomputed; the prefix cache still helps |
| `high` | `balanced`, widened from 0.02 nats; a calibrated ratio is not |
| `balanced` | the calibrated one; else 0.05, and 0.3 where that moves the first token by 0.05 nats; small models: 0.14 |
| `fast` | 0.05 |

[Benchmarks](benchmarks.md) have the figures. `--recompute-ratio` comes before a preset, and the ratio of a request before both.
"""


def options_page() -> str:
    """The page as Markdown."""
    found = options_of(*CONFIGS).values()
    parts = [HEAD]
    for config, panel in dict.fromkeys((each.config, each.panel) for each in found):
        parts.append(f"\n## {panel} (`{config.__name__}`)\n\n| flag | default | |\n|---|---|---|\n")
        parts += [_row(each) for each in found if (each.config, each.panel) == (config, panel)]
    return "".join(parts)


def _row(each: Option) -> str:
    help_ = each.help.replace("|", "\\|")
    return f"| `{each.flag}` | {_default(each)} | {help_} |\n"


def _default(each: Option) -> str:
    if each.default in (None, ()):
        return ""
    if each.type is bool:
        return "on" if each.default else "off"
    return f"{each.default:,}" if isinstance(each.default, int) and each.default > 9999 else f"{each.default}"


if __name__ == "__main__":
    FILE.write_text(options_page(), encoding="utf-8")
