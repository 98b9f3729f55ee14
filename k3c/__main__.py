"""`python -m k3c` is the `k3c` command."""

from k3c.cli import main

if __name__ == "__main__":
    main()
