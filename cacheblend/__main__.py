"""The command line, as `python -m cacheblend`."""

from .cli.main import main

if __name__ == "__main__":
    main()
