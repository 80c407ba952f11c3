"""`python -m tierstore.cli`."""

from tierstore.cli import main

if __name__ == "__main__":
    main()
